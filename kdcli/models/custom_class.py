"""Load and save models of the classes that `modeling_*.py` define and transformers lacks."""

import inspect
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from kdcli.errors import UsageError
from kdcli.models import modeling_kdcli, modeling_unilm

COMPACT_KEY = "compact_layers"
"""Configuration key of a compacted model.

For each layer and matrix: the columns read, the rows written, and the numbers of both that are
kept.
"""
LABEL_WORDS_KEY = "label_words"
"""Configuration key of a model that classifies with its masked-language-model head.

It holds the `ids` of the words, in the order of the labels, and the `auto_class` whose output the
model returns.
"""
UNILM_KEY = "unilm"
"""Configuration key of a model that generates; see `_UniLM` in `kdcli.models.modeling_unilm`."""
CUSTOM_KEYS = (COMPACT_KEY, LABEL_WORDS_KEY, UNILM_KEY)
HEADS = (
    "SequenceClassification",
    "TokenClassification",
    "QuestionAnswering",
    "MaskedLM",
    "MultipleChoice",
)


def class_named(name: str) -> type[PreTrainedModel] | None:
    """Return the custom class with a name, or None."""
    module = modeling_unilm if name.startswith("UniLM") else modeling_kdcli
    custom: type[PreTrainedModel] | None = getattr(module, name, None)
    return custom if isinstance(custom, type) and issubclass(custom, PreTrainedModel) else None


def custom_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Return the custom class that a configuration needs, or None if it needs none.

    Raises UsageError if the configuration needs a custom class but does not name a known one.
    """
    if not any(hasattr(config, key) for key in CUSTOM_KEYS):
        return None
    name = (config.architectures or [""])[0]
    if (custom := class_named(name)) is None:
        raise UsageError(
            f"the configuration of a model that kdcli made names the unknown class '{name}'",
            "check whether its config.json was changed, and copy the model again",
        )
    return custom


def is_custom(model: PreTrainedModel) -> bool:
    """Return whether a model's class is custom."""
    return class_named(type(model).__name__) is not None


def empty_model(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """Make a model whose tensors take no memory. Fill it with `load_tensors`."""
    with torch.device("meta"):
        return model_class(config)


def load_tensors(
    model: PreTrainedModel, tensors: Mapping[str, Tensor], like: nn.Module
) -> PreTrainedModel:
    """Put existing tensors into an empty model without copying them, and set eval mode.

    Raises RuntimeError if tensors are missing or do not have the configuration's sizes.
    """
    model.load_state_dict(tensors, assign=True)
    model.tie_weights()
    # Buffers that are not saved, such as tables of positions, are shared with the encoder `like`.
    modules = dict(model.base_model.named_modules())
    for name, buffer in like.named_buffers():
        path, _, leaf = name.rpartition(".")
        if path in modules and leaf in modules[path]._buffers:
            modules[path]._buffers[leaf] = buffer
    return model.eval()


def forget_custom_classes(config: PreTrainedConfig) -> None:
    """Remove the keys of a custom class from a configuration that another class takes over."""
    if any(hasattr(config, key) for key in CUSTOM_KEYS):
        for name in (*CUSTOM_KEYS, "auto_map"):
            config.__dict__.pop(name, None)


def code_of(model: PreTrainedModel) -> Path:
    """Return the file with a custom model's class, which is saved with the model's weights."""
    return Path(inspect.getfile(type(model)))


def describe_code(model: PreTrainedModel) -> None:
    """Write `auto_map` into a custom model's configuration, so that it names the saved classes."""
    config = model.config
    name, base = type(model).__name__, type(model.base_model).__name__
    base = base.removeprefix("Compact")
    words = getattr(config, LABEL_WORDS_KEY, None)
    if words:
        heads = [words["auto_class"]]
    else:
        heads = [f"AutoModelFor{h}" for h in HEADS if name.endswith(f"For{h}")]
    bare = f"Compact{base}" if hasattr(config, COMPACT_KEY) else base
    classes = {"AutoModel": bare} if class_named(bare) is not None else {}
    classes |= dict.fromkeys(heads, name)
    config.auto_map = {auto: f"{code_of(model).stem}.{of}" for auto, of in classes.items()}
