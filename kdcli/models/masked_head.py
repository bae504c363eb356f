"""Load masked language models: encoders with their stock head over the vocabulary."""

import torch
from transformers import AutoModelForMaskedLM, PreTrainedModel

from kdcli.custom_code import custom_code_allowed
from kdcli.errors import UsageError
from kdcli.models.custom_class import class_for, runs_own_code
from kdcli.models.load import (
    load_config,
    load_encoder,
    load_tokenizer,
    load_weights,
    location,
)
from kdcli.models.model import Model, training_rows
from kdcli.models.reduce import copy_head
from kdcli.models.shape import InitializedStudent


def load_masked_lm(
    source: str,
    *,
    otherwise: str,
    bare: bool = False,
) -> Model:
    """Load a masked language model and its tokenizer; the encoder is the model's `base_model`.

    With `bare`, a checkpoint without a masked-language-model head is loaded as an encoder.

    Raises UsageError if the model cannot be loaded, or if the type or the checkpoint has no such
    head. In the second case, the hint is `otherwise`.
    """
    config = load_config(source)
    expected = class_for(config, AutoModelForMaskedLM)
    if expected is None:
        place = "the code of the model" if runs_own_code(config) else "transformers"
        raise UsageError(
            f"{config.model_type} has no masked-language-model head in {place}", otherwise
        )
    architecture = (config.architectures or [expected])[0]
    # A `ForPreTraining` checkpoint has this head next to others (BERT) or another head instead
    # (ELECTRA). A model that generates text is a subclass.
    if architecture.removeprefix("UniLM") != expected and not architecture.endswith(
        "ForPreTraining"
    ):
        if bare:
            return load_encoder(source)
        raise UsageError(
            f"{source} is {architecture}, without a masked-language-model head", otherwise
        )
    tokenizer = load_tokenizer(source)
    try:
        model = load_weights(source, AutoModelForMaskedLM)
    except UsageError as error:
        raise error.of(f"{source} cannot be read as {expected}", otherwise) from None
    rows = training_rows(location(source))
    return Model(model.eval(), tokenizer, source, rows=rows)


def student_with_head(
    teacher: PreTrainedModel,
    built: InitializedStudent,
    *,
    init: str = "teacher",
    seed: int = 0,
) -> InitializedStudent:
    """Put a student encoder under a head of its teacher's class.

    The head is tied to the embeddings if the configuration requires it.

    * `teacher`: a masked language model, or an encoder whose type has such a head. In the second
      case the head starts at random.
    * `built`: a student of the teacher's `base_model`. It becomes part of the new model, without
      its pooler.
    * `init`: anything but `random` copies the head's weights into the student's basis.
    * `seed`: the seed of random weights.
    """
    encoder, headed = built.model, teacher.base_model is not teacher
    model: PreTrainedModel
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if headed:
            model = type(teacher)(encoder.config).float()
        else:
            model = AutoModelForMaskedLM.from_config(
                encoder.config, dtype=torch.float32, trust_remote_code=custom_code_allowed()
            )
    for name, _ in list(encoder.named_children()):
        if getattr(model.base_model, name, None) is None:
            setattr(encoder, name, None)
    setattr(model, model.base_model_prefix, encoder)
    model.tie_weights()
    if init == "random" or not headed:
        reason = "" if headed else ": the teacher has no masked-language-model head"
        return InitializedStudent(model, [*built.notes, f"head initialised at random{reason}"])
    unfilled = copy_head(teacher, model, built.basis_DN)
    note = f", except {', '.join(unfilled)}, which start at random" if unfilled else ""
    return InitializedStudent(model, [*built.notes, f"head initialised from the teacher's{note}"])
