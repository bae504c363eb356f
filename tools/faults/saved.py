"""Saved models with one changed setting.

kdcli must give what the library that owns the file gives, or refuse the directory.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import test_settings_contract as contract

from tools.faults.campaign import Case, Fault, Kind
from tools.faults.files import is_intact, read

TYPES = ("bert", "distilbert", "roberta", "electra", "albert", "modernbert", "mpnet", "deberta-v2")
HEADS = {"classifier": "SequenceClassification", "tagger": "TokenClassification"}
VALUES: tuple[object, ...] = (
    *(True, False, 0, 1, 2, 3, 5, -1, 0.5, 1e-12, 10.0),
    *("", "w3", "[SEP]", "mean", "relu", [], ["w3"], ["input_ids"], {}),
)
"""Values for a setting. Only those of its type are tried."""


def save(folder: Path, kind: str, model_type: str) -> None:
    """Save a tiny random model. The type matters for models with a head."""
    import torch
    import transformers
    from encoders import tiny_config

    torch.manual_seed(0)
    folder.mkdir()
    if kind not in HEADS:
        contract.SAVED[kind](folder)
        return
    labels = dict(enumerate(["O", "PER", "LOC"]))
    sizes = {"vocab_size": len(contract.VOCABULARY), "initializer_range": 0.3, "id2label": labels}
    head = getattr(transformers, f"AutoModelFor{HEADS[kind]}")
    contract.save_stock(head.from_config(tiny_config(model_type, **sizes)), folder)


def _leaves(tree: Any, path: str = "") -> Iterator[str]:
    """Yield the keys that lead to each value of a JSON tree, as `a/b/c`."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in items:
        if "/" in str(key):
            continue
        inside = f"{path}/{key}" if path else str(key)
        yield inside
        if isinstance(value, dict | list):
            yield from _leaves(value, inside)


def _inside(tree: Any, key: str) -> Any:
    return tree[int(key)] if isinstance(tree, list) else tree[key]


def draw_change(rng: random.Random, folder: Path, kind: str) -> tuple[str, str, object]:
    """Return a file, the keys of a setting, and another value for it.

    Half of the changes are those of the tests, and the others are of any setting.
    """
    if rng.random() < 0.5:
        tables = contract.OBEYED, contract.REFUSED
        known = [
            (file, path, value)
            for table in tables
            for (owner, file), of_file in table.items()
            if owner == kind
            for path, values in of_file.items()
            for value in values
        ]
        changes: tuple[str, str, object] = rng.choice(known)
        return changes
    file = rng.choice(sorted(folder.rglob("*.json")))
    tree = json.loads(file.read_text("utf-8"))
    path = rng.choice(list(_leaves(tree)) or ["no_such_setting"])
    old = functools.reduce(_inside, path.split("/"), tree) if path != "no_such_setting" else None
    values = [value for value in VALUES if type(value) is type(old) or old is None]
    return str(file.relative_to(folder)), path, rng.choice([*values, None, contract.GONE])


def check_outputs(
    what: str,
    of_owner: Callable[[], object],
    of_kdcli: Callable[[], object],
    *,
    is_valid: bool = False,
) -> None:
    """Compare the outputs of kdcli with those of the library that owns the files.

    Raises:
        Fault: They differ, kdcli refused a valid model, or it used a model that its owner cannot.
    """
    ours = read(what, of_kdcli, is_valid=is_valid)
    if ours is None:
        return
    try:
        theirs = of_owner()
    except Exception as error:  # noqa: BLE001 - any library
        raise Fault(f"{what}: its owner raises {type(error).__name__}: {error}"[:400]) from None
    try:
        contract.assert_same(theirs, ours)
    except AssertionError:
        raise Fault(f"{what}: {ours!r:.250}, its owner gives {theirs!r:.250}") from None


def saved(case: Case) -> None:
    """Change one setting of a saved model, and compare kdcli's outputs with its owner's."""
    import torch
    from accelerate import Accelerator

    from kdcli.engine.session import Session

    rng, model = case.rng, case.folder / "model"
    kind = rng.choice(list(contract.SAVED))
    model_type = rng.choice(TYPES) if kind in HEADS else "bert"
    save(model, kind, model_type)
    what = f"{kind} of {model_type}"
    if not is_intact(case):
        file, path, value = draw_change(rng, model, kind)
        what += f" with {path} = {json.dumps(value)} in {file}"
        try:
            contract.change(model, file, path, value)
        except (KeyError, IndexError, TypeError):
            # Another type has no such setting.
            return
    of_owner, of_kdcli = contract.OUTPUTS[kind]
    session = Session(Accelerator(cpu=True), torch.device("cpu"))
    folder = str(model)
    check_outputs(
        what,
        lambda: of_owner(folder),
        lambda: of_kdcli(folder, session),
        is_valid=is_intact(case),
    )


KINDS = [Kind("saved", 4_000, saved, chunk=40, wall=120)]
