"""Keep derived layouts, in this process and in the cache on disk.

An entry is named by all that decides its layout: the versions of torch and transformers, the code
of the model's class and of the derivation, and the configuration of the small copy that is derived.
The copy has sizes of its own, so one entry serves all sizes of a model type, and a student has its
teacher's layout.
"""

import copy
import hashlib
import inspect
import json
import logging
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
import transformers
from pydantic import TypeAdapter, ValidationError
from transformers import PreTrainedConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from kdcli import attention
from kdcli.custom_code import code_errors
from kdcli.disk import cache_dir, cache_key, lock_entry, use_entry, write_atomic
from kdcli.errors import KdcliError, raise_machine_error
from kdcli.models.custom_class import runs_own_code
from kdcli.models.derived_layout import NotDerivedError, derive, layout_of_states, small_copies
from kdcli.models.files import TASK_KEY
from kdcli.models.layout import WRITTEN, Layout, Written, base_class

UNRELATED = (
    *("architectures", "id2label", "label2id", "problem_type", TASK_KEY, "dtype"),
    *("return_dict", "output_hidden_states", "output_attentions"),
)
"""Settings that do not change a base model's network."""
LOG = logging.getLogger("kdcli.models")
ENTRY = TypeAdapter(Layout)
_BY_SETTINGS: dict[str, Layout] = {}
_BY_KEY: dict[str, Layout] = {}
_LOGGED: set[tuple[str, Layout]] = set()


def cached_layout(config: PreTrainedConfig) -> Layout:
    """Return the layout of a configuration's base model, and log it once.

    If the layers cannot be used, the layout says why (`missing`). Raises NotDerivedError if the
    model returns no hidden states.
    """
    kind, source = type(config).__qualname__, str(config.name_or_path)
    settings = {name: x for name, x in vars(config).items() if not name.startswith("_")}
    # Callers ask often and have few configurations. A key of an entry takes ten times as long.
    own_code = runs_own_code(config)
    asked = json.dumps([kind, source, own_code, settings], default=str)
    if asked not in _BY_SETTINGS:
        written = Written() if own_code else WRITTEN.get(config.model_type, Written())
        _BY_SETTINGS[asked] = replace(_layout(config), **vars(written))
    return _BY_SETTINGS[asked]


def forget() -> None:
    """Forget the layouts of this process, but not those on disk."""
    for kept in (_BY_SETTINGS, _BY_KEY, _LOGGED):
        kept.clear()


def _layout(config: PreTrainedConfig) -> Layout:
    copies, code = small_copies(config), _code_of(config)
    keys = [_key(small, code) for small in copies]
    for key in keys:
        if key in _BY_KEY:
            return _BY_KEY[key]
    for key in keys:
        row = _read(key) if code else None
        if row is not None:
            break
    else:
        row, key = _derived(config, copies, keys)
        if code:
            _write(key, row, config.model_type)
    _BY_KEY[key] = row
    # Students of a very small model may have entries of their own.
    if (config.model_type, row) not in _LOGGED:
        _LOGGED.add((config.model_type, row))
        _log(config.model_type, row)
    return row


def _derived(
    config: PreTrainedConfig, copies: list[PreTrainedConfig], keys: list[str]
) -> tuple[Layout, str]:
    """Derive a layout from the first copy from which it can be derived."""
    for small, key in zip(copies, keys, strict=True):
        try:
            return derive(small), key
        except NotDerivedError as error:
            reason = error
    try:
        return layout_of_states(copies[-1], reason), keys[-1]
    except NotDerivedError:
        # Its number of layers may depend on other settings.
        return layout_of_states(copy.deepcopy(config), reason), keys[-1]


def _log(kind: str, row: Layout) -> None:
    if row.missing:
        LOG.info("%s", row.missing)
        return
    parts = vars(row)
    names = ", ".join(f"{name} {parts[name]}" for name in ("layers", *"qkvo", "up", "down"))
    # Users of well-known types need not read this in each run.
    level = logging.DEBUG if kind in WRITTEN else logging.INFO
    LOG.log(level, "%s: its layout was derived from the network and verified (%s)", kind, names)


def _code_of(config: PreTrainedConfig) -> str | None:
    """Return a hash of the code of a configuration's network, or None if it is in no file."""
    auto = base_class(config)
    try:
        if runs_own_code(config):
            name = config.auto_map[auto.__name__]
            network = get_class_from_dynamic_module(name, config.name_or_path)
            files = sorted(Path(inspect.getfile(network)).parent.glob("*.py"))
        else:
            files = [Path(inspect.getfile(auto._model_mapping[type(config)]))]
        return _hash(*files)
    except code_errors((OSError, TypeError, LookupError)) as error:
        # A fault of the code is found again by the derivation.
        raise_machine_error(error)
        return None


def _hash(*files: Path) -> str:
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


@cache
def _derivation() -> str:
    # A derivation also builds, saves and loads a student, which takes most of this folder.
    return _hash(Path(inspect.getfile(attention)), *sorted(Path(__file__).parent.glob("*.py")))


def _key(small: PreTrainedConfig, code: str | None) -> str:
    settings = {
        name: x
        for name, x in small.to_dict().items()
        if name not in UNRELATED and (name == "pad_token_id" or not name.endswith("_token_id"))
    }
    text = json.dumps(settings, sort_keys=True, default=str)
    kind = type(small).__qualname__
    versions = torch.__version__, transformers.__version__
    return cache_key(*versions, _derivation(), code, kind, text)


def _path(key: str) -> Path:
    return cache_dir() / "layouts" / f"{key}.json"


def _read(key: str) -> Layout | None:
    """Return an entry of the cache. None if there is none, or if it is damaged."""
    path = _path(key)
    with suppress(OSError, KdcliError, ValidationError):
        if path.is_file():
            use_entry(path)
            content = path.read_bytes()
            row = ENTRY.validate_json(content)
            # Validation accepts an object without any part of a layout.
            return row if ENTRY.dump_json(row) == content else None
    return None


def _write(key: str, row: Layout, about: str) -> None:
    """Write an entry, unless the cache cannot be written."""
    path = _path(key)
    with suppress(OSError, KdcliError):
        path.parent.mkdir(parents=True, exist_ok=True)
        use_entry(path, about)
        with lock_entry(path):
            write_atomic(path, ENTRY.dump_json(row))
