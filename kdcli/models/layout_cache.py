"""Keep the derived layouts of a process.

The copy from which a layout is derived has sizes of its own, so one derivation serves all sizes of
a model type, and a student has its teacher's layout.
"""

import copy
import json
from dataclasses import replace

from transformers import PreTrainedConfig

from kdcli.messages import log_fact
from kdcli.models.custom_class import runs_own_code
from kdcli.models.derived_layout import NotDerivedError, derive, layout_of_states, small_copies
from kdcli.models.files import TASK_KEY
from kdcli.models.layout import WRITTEN, Layout, Written

UNRELATED = (
    *("architectures", "id2label", "label2id", "problem_type", TASK_KEY, "dtype"),
    *("return_dict", "output_hidden_states", "output_attentions"),
)
"""Settings that do not change a base model's network."""
_BY_SETTINGS: dict[str, Layout] = {}
_BY_COPY: dict[str, Layout] = {}
_LOGGED: set[tuple[str, Layout]] = set()


def cached_layout(config: PreTrainedConfig) -> Layout:
    """Return the layout of a configuration's base model, and log it once.

    If the layers cannot be used, the layout says why (`missing`). Raises NotDerivedError if the
    model returns no hidden states.
    """
    own_code = runs_own_code(config)
    kind = f"{type(config).__qualname__} {config.name_or_path if own_code else ''}"
    settings = {name: x for name, x in vars(config).items() if not name.startswith("_")}
    # Callers ask often and have few configurations. A copy takes ten times as long.
    asked = json.dumps([kind, settings], default=str)
    if asked not in _BY_SETTINGS:
        written = Written() if own_code else WRITTEN.get(config.model_type, Written())
        _BY_SETTINGS[asked] = replace(_layout(config, kind), **vars(written))
    return _BY_SETTINGS[asked]


def forget() -> None:
    """Forget all layouts."""
    for kept in (_BY_SETTINGS, _BY_COPY, _LOGGED):
        kept.clear()


def _layout(config: PreTrainedConfig, kind: str) -> Layout:
    copies = small_copies(config)
    keys = [_key(small, kind) for small in copies]
    for key in keys:
        if key in _BY_COPY:
            return _BY_COPY[key]
    row, key = _derived(config, copies, keys)
    _BY_COPY[key] = row
    # Students of a very small model may have copies of their own.
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
        log_fact(row.missing)
        return
    parts = vars(row)
    names = ", ".join(f"{name} {parts[name]}" for name in ("layers", *"qkvo", "up", "down"))
    # Users of well-known types need not read this in each run.
    if kind not in WRITTEN:
        log_fact(f"{kind}: its layout was derived from the network and verified ({names})")


def _key(small: PreTrainedConfig, kind: str) -> str:
    settings = {
        name: x
        for name, x in small.to_dict().items()
        if name not in UNRELATED and (name == "pad_token_id" or not name.endswith("_token_id"))
    }
    return json.dumps([kind, settings], sort_keys=True, default=str)
