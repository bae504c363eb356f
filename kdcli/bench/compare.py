"""Reports of several runs as one: what they measured side by side, nothing measured again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kdcli.bench.old_machines.portable import read_portable
from kdcli.errors import UsageError

REPORT = "report.json"


@dataclass
class Gathered:
    """Parts of a report, each model under the name of its run; `shapes` are models by name that have no card yet."""

    cards: dict[str, dict[str, Any]] = field(default_factory=dict)
    shapes: dict[str, str] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    speedups: dict[str, dict[str, Any]] = field(default_factory=dict)
    quality: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def gather(sources: Sequence[Path]) -> Gathered:
    """Read run directories, `report.json` files and results of the portable runner.

    Raises:
        UsageError: not there, damaged, or of another form (the file is named).
    """
    found = Gathered()
    for source in sources:
        file = source / REPORT if source.is_dir() else source
        raw = _read(file)
        if "models" in raw and "command" in raw:
            _add(found, source.name if source.is_dir() else source.stem, raw, file)
        else:
            result = read_portable(file)
            found.rows += [row | {"model": f"{file.stem}: {row['model']}"} for row in result["rows"]]
            found.shapes |= {f"{file.stem}: {row['model']}": row["model"] for row in result["rows"]}
            found.speedups |= {f"{file.stem}: {key}": speedup for key, speedup in result["speedup"].items()}
            found.notes.append(f"{file.stem}: {json.dumps(result['environment'], ensure_ascii=False)}")
    return found


def _read(file: Path) -> dict[str, Any]:
    try:
        raw = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise UsageError(
            f"{file} cannot be read: {error.strerror}", "give a run directory, its report.json, or a portable result"
        ) from None
    except ValueError as error:
        raise UsageError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise UsageError(f"{file} must hold a JSON object, not a {type(raw).__name__}")
    return raw


def _add(found: Gathered, run: str, raw: dict[str, Any], file: Path) -> None:
    try:
        names = {name: run if len(raw["models"]) == 1 else f"{run}: {name}" for name in raw["models"]}
        found.cards |= {names[name]: card for name, card in raw["models"].items()}
        found.rows += [row | {"model": names[row["model"]]} for row in raw["latency"]]
        for key, speedup in raw["speedup"].items():
            found.speedups[f"{run}: {key}"] = speedup
        for task, of in raw["quality"].items():
            known = {names[m]: metrics for m, metrics in of.items() if m in names}
            if known:
                found.quality.setdefault(task, {}).update(known)
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{file} is not a report of kdcli: {type(error).__name__} {error}") from None
