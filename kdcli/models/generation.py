"""Encoders as sequence-to-sequence models: UniLM's masked language models (Dong et al. 2019,
https://arxiv.org/abs/1905.03197), as the students of MiniLM generate.

Their class, with the decoding, is made in `kdcli.models.modeling_unilm`, which is copied next to
the weights.
"""

from typing import Any

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from kdcli.errors import UsageError
from kdcli.models.custom_class import UNILM, class_named, custom_class, empty_model, load_tensors
from kdcli.models.heads import tuned_length
from kdcli.models.layout import layout_for
from kdcli.models.load import load_config, load_tokenizer, load_weights, location
from kdcli.models.masked_lm import load_masked_lm, student_with_head
from kdcli.models.model import Model
from kdcli.models.shape import InitializedStudent
from kdcli.models.training_rows import training_rows
from kdcli.types import Task


def load_generator(
    source: str, task: Task, *, new_head: bool, seed: int = 0, trust_remote_code: bool = False
) -> Model:
    """Load a model that generates, or make one of a masked language model or, with a new head over
    the vocabulary tied to the embeddings, of an encoder. `new_head`: False takes only a model that
    generates already. Raises UsageError: see `kdcli.models.load`; an architecture whose attention
    takes no mask for each pair of tokens, or without a masked language model; a tokenizer without
    mask or separator."""
    config = load_config(source, trust_remote_code=trust_remote_code)
    if hasattr(config, UNILM):
        model = load_weights(source, custom_class(config), trust_remote_code=trust_remote_code)
        tokenizer = load_tokenizer(source, trust_remote_code=trust_remote_code)
        length, rows = tuned_length(config, tokenizer, task), training_rows(location(source))
        model.config.finetuning_task = task.name
        return Model(model.eval(), tokenizer, source, "it generates already", length, rows)
    if not new_head:
        raise UsageError(
            f"{source} cannot do task {task.name}: it generates no text",
            "fine-tune it first: kdcli finetune",
        )
    if leaks := layout_for(config).leaks:
        raise UsageError(
            f"{config.model_type} cannot generate: {leaks}, so that targets would see later ones",
            "take a type such as bert, roberta, distilbert, albert, electra or modernbert",
        )
    loaded = load_masked_lm(
        source,
        otherwise="generation needs such a head",
        bare=True,
        trust_remote_code=trust_remote_code,
    )
    note, model = "its own head over the vocabulary", loaded.model
    if model.base_model is model:
        model = student_with_head(model, InitializedStudent(model, []), seed=seed).model
        tied = (
            "tied to the embeddings"
            if model.config.tie_word_embeddings
            else "not tied to the embeddings"
        )
        note = f"a new head over the vocabulary, {tied}: the checkpoint has none"
    made = as_generator(model, loaded.tokenizer, source)
    made.config.finetuning_task = task.name
    return Model(made, loaded.tokenizer, source, note, None, loaded.rows)


def as_generator(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: str
) -> PreTrainedModel:
    """A masked language model as the class that generates; the two share their tensors. Raises
    UsageError: the tokenizer has no mask or no separator."""
    end = tokenizer.sep_token_id if tokenizer.sep_token_id is not None else tokenizer.eos_token_id
    if tokenizer.mask_token_id is None or end is None:
        missing = "mask token" if tokenizer.mask_token_id is None else "token that ends a text"
        raise UsageError(f"the tokenizer of {source} has no {missing}, which generation needs")
    row, config = layout_for(model.config), model.config
    embeddings: Any = model.base_model.get_submodule("embeddings") if row.position_offset else None
    offset = embeddings.padding_idx + 1 if row.position_offset else 0
    config.unilm = {"mask_token_id": int(tokenizer.mask_token_id), "position_offset": offset}
    config.unilm["interface"] = row.interface
    named = class_named(f"UniLM{type(model).__name__}")
    assert named is not None
    made = load_tensors(
        empty_model(named, config), model.state_dict(keep_vars=True), model.base_model
    )
    made.generation_config = GenerationConfig(
        eos_token_id=int(end), pad_token_id=tokenizer.pad_token_id
    )
    return made
