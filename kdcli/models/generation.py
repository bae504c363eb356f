"""Load encoders as sequence-to-sequence models, as UniLM does.

UniLM is Dong et al. 2019, https://arxiv.org/abs/1905.03197; MiniLM's students generate in the same
way. `kdcli.models.modeling_unilm` defines the model class and its decoding, and is copied next to
the weights.
"""

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from kdcli.errors import UsageError
from kdcli.models.custom_class import (
    UNILM_KEY,
    class_named,
    custom_class,
    empty_model,
    load_tensors,
)
from kdcli.models.files import TASK_KEY
from kdcli.models.heads import tuned_length
from kdcli.models.layout import layout_for
from kdcli.models.load import load_config, load_tokenizer, load_weights, location
from kdcli.models.masked_head import load_masked_lm, student_with_head
from kdcli.models.model import Model, return_token_types, training_rows
from kdcli.models.shape import InitializedStudent
from kdcli.types import Task


def load_generator(
    source: str,
    task: Task,
    *,
    new_head: bool,
    seed: int = 0,
) -> Model:
    """Load a model that generates text, or turn a masked language model or an encoder into one.

    An encoder gets a new head over the vocabulary, which is tied to the embeddings. With
    `new_head=False`, only a model that already generates is accepted.

    Raises UsageError if the model cannot be loaded, if the architecture does not accept an
    attention mask for each pair of tokens or has no masked language model, or if the tokenizer has
    no mask token or no separator.
    """
    config = load_config(source)
    if hasattr(config, UNILM_KEY):
        generator_class = custom_class(config)
        assert generator_class is not None
        model = load_weights(source, generator_class)
        tokenizer = load_tokenizer(source)
        length = tuned_length(config, tokenizer, task)
        rows = training_rows(location(source))
        setattr(model.config, TASK_KEY, task.name)
        return Model(model.eval(), tokenizer, source, "it generates already", length, rows)
    if not new_head:
        raise UsageError(
            f"{source} cannot do {task.title}: it generates no text",
            "fine-tune it first: kdcli finetune",
        )
    if leaks := layout_for(config).leaks:
        raise UsageError(
            f"{config.model_type} cannot generate: {leaks}, so target tokens would see later ones",
            "use a type such as bert, roberta, distilbert, albert, electra or modernbert",
        )
    loaded = load_masked_lm(source, otherwise="generation needs such a head", bare=True)
    note, model = "its own head over the vocabulary", loaded.model
    if model.base_model is model:
        model = student_with_head(model, InitializedStudent(model, []), seed=seed).model
        tied = (
            "tied to the embeddings"
            if model.config.tie_word_embeddings
            else "not tied to the embeddings"
        )
        note = f"a new head over the vocabulary, {tied}: the checkpoint has none"
    generator = as_generator(model, loaded.tokenizer, source)
    return_token_types(generator.config, loaded.tokenizer)
    setattr(generator.config, TASK_KEY, task.name)
    return Model(generator, loaded.tokenizer, source, note, None, loaded.rows)


def as_generator(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: str
) -> PreTrainedModel:
    """Convert a masked language model to the class that generates; the two share their tensors.

    Raises UsageError if the tokenizer has no mask token or no separator.
    """
    end = tokenizer.sep_token_id if tokenizer.sep_token_id is not None else tokenizer.eos_token_id
    if tokenizer.mask_token_id is None or end is None:
        missing = "mask token" if tokenizer.mask_token_id is None else "end-of-text token"
        raise UsageError(f"the tokenizer of {source} has no {missing}, which generation needs")
    row, config = layout_for(model.config), model.config
    offset = 0
    if row.position_offset:
        offset = model.base_model.get_submodule("embeddings").padding_idx + 1
    config.unilm = {"mask_token_id": int(tokenizer.mask_token_id), "position_offset": offset}
    config.unilm["interface"] = row.interface
    model_class = class_named(f"UniLM{type(model).__name__}")
    assert model_class is not None
    generator = load_tensors(
        empty_model(model_class, config), model.state_dict(keep_vars=True), model.base_model
    )
    generator.generation_config = GenerationConfig(
        eos_token_id=int(end), pad_token_id=tokenizer.pad_token_id
    )
    return generator
