"""Models whose class is none of transformers: which they are, how one is put together and described.

Their code is `kdcli.models.modeling_kdcli`, which has to stay readable for transformers alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from kdcli.errors import UsageError
from kdcli.models import modeling_kdcli

CODE = Path(str(modeling_kdcli.__file__))
"""The file that such a directory holds beside its weights."""
COMPACT = "compact_layers"
"""The setting of a compacted model's configuration that holds, by layer and matrix, columns read, rows written, columns
and rows kept."""
LABEL_WORDS = "label_words"
"""The setting of a model that classifies with its masked-language-model head: `ids` of the words, in the order of the
labels, and the `auto_class` whose output it gives."""
HEADS = ("SequenceClassification", "TokenClassification", "QuestionAnswering", "MaskedLM", "MultipleChoice")


def class_named(name: str) -> type[PreTrainedModel] | None:
    """The class of a model of ours by its name; None where it is none of ours."""
    try:
        found: type[PreTrainedModel] = getattr(modeling_kdcli, name)
    except AttributeError:
        return None
    return found if isinstance(found, type) and issubclass(found, PreTrainedModel) else None


def custom_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """The class that a configuration needs where it is none of transformers.

    Raises:
        UsageError: it needs one and names another.
    """
    if not (hasattr(config, COMPACT) or hasattr(config, LABEL_WORDS)):
        return None
    name = (config.architectures or [""])[0]
    found = class_named(name)
    if found is None:
        raise UsageError(
            f"the configuration of a model that kdcli made names class '{name}', which is not known",
            "is its config.json as it was written?",
        )
    return found


def is_custom(model: PreTrainedModel) -> bool:
    """Whether a model's class is one of ours."""
    return class_named(type(model).__name__) is not None


def empty_model(of_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """A model without memory, to be `filled`."""
    with torch.device("meta"):
        return of_class(config)


def load_tensors(model: PreTrainedModel, tensors: Mapping[str, Tensor], like: nn.Module) -> PreTrainedModel:
    """Give a blank model tensors that are there already, of which none is copied, and put it into eval mode.

    Args:
        tensors: all that its `state_dict` names.
        like: the encoder whose buffers it shares that no file holds (tables of positions), as far as it has them.

    Raises:
        RuntimeError: tensors of other sizes than the configuration's, or not all that are needed.
    """
    model.load_state_dict(tensors, assign=True)
    model.tie_weights()
    modules = dict(model.base_model.named_modules())
    for name, buffer in like.named_buffers():
        path, _, leaf = name.rpartition(".")
        owner = modules.get(path)
        if owner is not None and leaf in owner._buffers:
            owner._buffers[leaf] = buffer
    return model.eval()


def forget_custom_classes(config: PreTrainedConfig) -> None:
    """Take out of a configuration what a class of ours wrote there: another class takes its weights over."""
    ours = [name for name in (COMPACT, LABEL_WORDS) if hasattr(config, name)]
    for name in [*ours, "auto_map"] if ours else ():
        config.__dict__.pop(name, None)


def describe_code(model: PreTrainedModel) -> None:
    """Write into the configuration of one of ours which classes `trust_remote_code` takes from the file beside it."""
    config: Any = model.config
    name, base = type(model).__name__, type(model.base_model).__name__
    classes = {"AutoModel": f"Compact{base.removeprefix('Compact')}"} if hasattr(config, COMPACT) else {}
    words = getattr(config, LABEL_WORDS, None)
    heads = [words["auto_class"]] if words else [f"AutoModelFor{h}" for h in HEADS if name.endswith(f"For{h}")]
    classes |= dict.fromkeys(heads, name)
    config.auto_map = {auto: f"{CODE.stem}.{of}" for auto, of in classes.items()}
