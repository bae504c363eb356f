"""Masked language models: an encoder under the stock head that guesses masked tokens."""

from __future__ import annotations

from typing import Literal

import torch
from transformers import AutoModelForMaskedLM, PreTrainedModel

from kdcli.errors import UsageError
from kdcli.models.load import LoadedModel, load_config, load_tokenizer, load_weights
from kdcli.models.reduce import copy_head
from kdcli.models.shape import InitializedStudent, shape_of


def load_masked_lm(source: str, *, otherwise: str, trust_remote_code: bool = False) -> LoadedModel:
    """Load a masked language model and its tokenizer; the encoder is its `base_model`.

    Args:
        otherwise: what to do where the model has no such head.

    Raises:
        UsageError: see `kdcli.models.load.load_encoder`; or the type has no such head in transformers, or the
            checkpoint brings none.
    """
    config = load_config(source, trust_remote_code=trust_remote_code)
    if type(config) not in AutoModelForMaskedLM._model_mapping:
        raise UsageError(f"{config.model_type} has no masked-language-model head in transformers", otherwise)
    wanted = AutoModelForMaskedLM._model_mapping[type(config)].__name__
    named = (config.architectures or [wanted])[0]
    # What a model was pre-trained as may hold that head beside others (BERT's) or another one in its place (ELECTRA's).
    if named != wanted and not named.endswith("ForPreTraining"):
        raise UsageError(f"{source} is {named}, without a masked-language-model head", otherwise)
    tokenizer = load_tokenizer(source, trust_remote_code=trust_remote_code)
    try:
        model = load_weights(source, AutoModelForMaskedLM, trust_remote_code=trust_remote_code)
    except UsageError as error:
        raise error.of(f"{source} cannot be read as {wanted}", otherwise) from None
    return LoadedModel(model.eval(), tokenizer, shape_of(model.config), source)


def student_with_head(
    teacher: PreTrainedModel,
    built: InitializedStudent,
    *,
    init: Literal["teacher", "random"] = "teacher",
    seed: int = 0,
) -> InitializedStudent:
    """Put a student under a head of its teacher's class.

    Args:
        teacher: a masked language model.
        built: what `kdcli.models.shape.build_student` made of the teacher's `base_model`. That encoder, with the
            dropout it was given, becomes part of the new model; it loses a pooler, which no such model has.
        init: `teacher`: the head's weights are the teacher's in the dimensions that the student keeps; `random`: drawn.
        seed: of whatever is random.

    Returns:
        The masked language model, tied to its embeddings where its configuration says so, and the notes on both parts.
    """
    encoder = built.model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = type(teacher)(encoder.config).float()
    for name, _ in list(encoder.named_children()):
        if getattr(model.base_model, name, None) is None:
            setattr(encoder, name, None)
    setattr(model, model.base_model_prefix, encoder)
    model.tie_weights()
    if init == "random":
        return InitializedStudent(model, [*built.notes, "head initialised at random"])
    left = copy_head(teacher, model)
    note = "head initialised from the teacher's"
    if left:
        note += f", except {', '.join(left)}, which start at random"
    return InitializedStudent(model, [*built.notes, note])
