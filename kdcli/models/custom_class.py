"""Models of the classes in `modeling_*.py` of this folder, which transformers does not have."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from kdcli.errors import UsageError
from kdcli.models import modeling_kdcli, modeling_unilm

COMPACT = "compact_layers"
"""Configuration key of a compacted model: by layer and matrix, columns read, rows written, columns and rows kept."""
LABEL_WORDS = "label_words"
"""Configuration key of a model that classifies with its masked-language-model head: `ids` of the words, in the order of
the labels, and the `auto_class` whose output it gives."""
UNILM = "unilm"
"""Configuration key of a model that generates, see `_UniLM` in `kdcli.models.modeling_unilm`."""
KEYS = (COMPACT, LABEL_WORDS, UNILM)
HEADS = (
    "SequenceClassification",
    "TokenClassification",
    "QuestionAnswering",
    "MaskedLM",
    "MultipleChoice",
)


def class_named(name: str) -> type[PreTrainedModel] | None:
    """The custom class of a name; None if there is none."""
    module = modeling_unilm if name.startswith("UniLM") else modeling_kdcli
    named: type[PreTrainedModel] | None = getattr(module, name, None)
    return named if isinstance(named, type) and issubclass(named, PreTrainedModel) else None


def custom_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """The custom class that a configuration needs; None if a class of transformers does. Raises UsageError: it needs a
    custom class but names none."""
    if not any(hasattr(config, key) for key in KEYS):
        return None
    name = (config.architectures or [""])[0]
    if (named := class_named(name)) is None:
        raise UsageError(
            f"the configuration of a model that kdcli made names class '{name}', which is not known",
            "is its config.json as it was written?",
        )
    return named


def is_custom(model: PreTrainedModel) -> bool:
    """Whether a model's class is custom."""
    return class_named(type(model).__name__) is not None


def empty_model(of_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """A model whose tensors take no memory; fill it with `load_tensors`."""
    with torch.device("meta"):
        return of_class(config)


def load_tensors(
    model: PreTrainedModel, tensors: Mapping[str, Tensor], like: nn.Module
) -> PreTrainedModel:
    """Put existing tensors into an empty model without copying them, and set eval mode. Raises RuntimeError: tensors
    are missing or of other sizes than the configuration's."""
    model.load_state_dict(tensors, assign=True)
    model.tie_weights()
    # Buffers that no file holds (tables of positions) are shared with the encoder `like`.
    modules = dict(model.base_model.named_modules())
    for name, buffer in like.named_buffers():
        path, _, leaf = name.rpartition(".")
        if path in modules and leaf in modules[path]._buffers:
            modules[path]._buffers[leaf] = buffer
    return model.eval()


def forget_custom_classes(config: PreTrainedConfig) -> None:
    """Remove a custom class's keys from a configuration, for another class that takes over its weights."""
    if any(hasattr(config, key) for key in KEYS):
        for name in (*KEYS, "auto_map"):
            config.__dict__.pop(name, None)


def code_of(model: PreTrainedModel) -> Path:
    """The file with a custom model's class, which is copied beside its weights."""
    return Path(inspect.getfile(type(model)))


def describe_code(model: PreTrainedModel) -> None:
    """Write `auto_map` into a custom model's configuration: the classes in the file beside its weights."""
    config: Any = model.config
    name, base = type(model).__name__, type(model.base_model).__name__
    base = base.removeprefix("Compact")
    words = getattr(config, LABEL_WORDS, None)
    heads = (
        [words["auto_class"]]
        if words
        else [f"AutoModelFor{h}" for h in HEADS if name.endswith(f"For{h}")]
    )
    bare = f"Compact{base}" if hasattr(config, COMPACT) else base
    classes = ({"AutoModel": bare} if class_named(bare) is not None else {}) | dict.fromkeys(
        heads, name
    )
    config.auto_map = {auto: f"{code_of(model).stem}.{of}" for auto, of in classes.items()}
