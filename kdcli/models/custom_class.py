"""Load and save models of classes that transformers lacks.

kdcli's own `modeling_*.py` in this folder define some: a further file is found by its name, and so
are its classes. Others come with a model, as code that the user trusts.
"""

import functools
import importlib
import inspect
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.initialization import no_init_weights
from transformers.models.auto.auto_factory import _BaseAutoModelClass
from transformers.utils import TRANSFORMERS_DYNAMIC_MODULE_NAME

from kdcli.custom_code import custom_code_allowed
from kdcli.errors import UsageError

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


@functools.cache
def _modules() -> list[ModuleType]:
    files = sorted(Path(__file__).parent.glob("modeling_*.py"))
    return [importlib.import_module(f"{__package__}.{file.stem}") for file in files]


def class_named(name: str) -> type[PreTrainedModel] | None:
    """Return the custom class with a name, or None."""
    for module in _modules():
        custom = getattr(module, name, None)
        is_model = isinstance(custom, type) and issubclass(custom, PreTrainedModel)
        if is_model and custom.__module__ == module.__name__:
            return custom
    return None


def needs_custom_class(config: Mapping[str, Any]) -> bool:
    """Return whether a configuration is of a model whose class is custom."""
    if any(key in config for key in CUSTOM_KEYS):
        return True
    names = config.get("architectures")
    return isinstance(names, list) and bool(names) and class_named(str(names[0])) is not None


def custom_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Return the custom class that a configuration needs, or None if it needs none.

    Raises UsageError if the configuration needs a custom class but does not name a known one.
    """
    if not needs_custom_class(vars(config)):
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


def runs_own_code(config: PreTrainedConfig) -> bool:
    """Return whether a configuration's network is code that comes with the model."""
    if needs_custom_class(vars(config)):
        return False
    return custom_code_allowed() and "AutoModel" in (getattr(config, "auto_map", None) or {})


def class_for(config: PreTrainedConfig, auto_class: type[_BaseAutoModelClass]) -> str | None:
    """Return the name of the class that an auto class makes of a configuration, or None.

    Own code has the heads that it names. A head of transformers would be on another network.
    """
    if runs_own_code(config):
        name = config.auto_map.get(auto_class.__name__)
        return None if name is None else str(name).rpartition(".")[2]
    mapping = auto_class._model_mapping
    return str(mapping[type(config)].__name__) if type(config) in mapping else None


def classes_in_code(config: PreTrainedConfig) -> list[str]:
    """Return the names of the classes in the code that comes with a model and may run."""
    if not runs_own_code(config):
        return []
    return [str(name).rpartition(".")[2] for name in config.auto_map.values()]


def has_own_code(thing: PreTrainedModel | PreTrainedConfig) -> bool:
    """Return whether the class of a model or a configuration came with the model."""
    package: str = type(thing).__module__.split(".")[0]
    return bool(package == TRANSFORMERS_DYNAMIC_MODULE_NAME)


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


def fill_buffers(model: PreTrainedModel) -> list[str]:
    """Compute the buffers of own code that are not saved, such as tables of positions.

    transformers builds a model without memory before it loads the weights, so these buffers are
    empty unless the code's `_init_weights` fills them. Returns the names of those that were empty.
    """
    with no_init_weights(), torch.random.fork_rng(devices=[]):
        fresh = dict(type(model)(model.config).named_modules())
    changed = []
    for path, module in model.named_modules():
        for name in module._non_persistent_buffers_set:
            own, new = module._buffers[name], fresh[path]._buffers[name]
            if own is not None and new is not None and not torch.equal(own, new.to(own.dtype)):
                module._buffers[name] = new
                changed.append(f"{path}.{name}".lstrip("."))
    return changed


def save_network(model: PreTrainedModel, folder: Path, *, weights: bool = True) -> None:
    """Save a model's configuration and weights, and the code of a class that transformers lacks."""
    # Each of several processes may save its own model, but transformers writes in the first only.
    model.should_save_on_this_rank = lambda is_main_process: True
    if is_custom(model) and weights:
        describe_code(model)
        shutil.copy(code_of(model), folder)
    if has_own_code(model):
        _save_code(model, folder)
    with _any_setting(model.config):
        (model if weights else model.config).save_pretrained(folder)


def _save_code(model: PreTrainedModel, folder: Path) -> None:
    """Copy the code of all classes of a model, so that the directory needs no other place."""
    named = code_of(model).parent, Path(model.config.name_or_path)
    kept: dict[str, object] = {}
    for auto, names in (getattr(model.config, "auto_map", None) or {}).items():
        # A tokenizer has two names. A model of the hub's cache names its repository too.
        local = [name and name.rpartition("--")[2] for name in _listed(names)]
        files = [Path(f"{name.partition('.')[0]}.py") for name in local if name]
        found = [next((p / f for p in named if (p / f).is_file()), None) for f in files]
        if None in found:
            # It still loads from the repository that it names, but not from nowhere.
            kept |= {auto: names} if all("--" in name for name in _listed(names) if name) else {}
            continue
        kept[auto] = local if isinstance(names, list | tuple) else local[0]
        for file in filter(None, found):
            for part in (file, *map(Path, get_relative_import_files(file))):
                shutil.copy(part, folder)
    model.config.auto_map = kept


def _listed(names: object) -> list[str | None]:
    return list(names) if isinstance(names, list | tuple) else [str(names)]


@contextmanager
def _any_setting(config: PreTrainedConfig) -> Iterator[None]:
    """Let own code have settings with the names of generation settings, such as `max_length`.

    transformers would refuse to save them.
    """
    if not has_own_code(config):
        yield
        return
    kind: Any = type(config)
    kind._get_generation_parameters = lambda self: {}
    try:
        yield
    finally:
        del kind._get_generation_parameters


def forget_custom_classes(config: PreTrainedConfig) -> None:
    """Remove the keys of a custom class from a configuration that another class takes over."""
    if needs_custom_class(vars(config)):
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
