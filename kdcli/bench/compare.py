"""Combine reports of several runs into one; nothing is measured again."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kdcli.bench.old_machines.portable import read_portable
from kdcli.errors import UsageError


@dataclass
class Gathered:
    """Parts of a report, each model under the name of its run; `shapes` maps names without a card to their shape."""

    cards: dict[str, dict[str, Any]] = field(default_factory=dict)
    shapes: dict[str, str] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    speedups: dict[str, dict[str, Any]] = field(default_factory=dict)
    quality: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def gather(sources: Sequence[Path]) -> Gathered:
    """Read run directories, `report.json` files and results of the portable runner. Raises UsageError: a file is
    missing, damaged, or neither a report nor a portable result."""
    gathered = Gathered()
    for source in sources:
        file, run = (source / "report.json", source.name) if source.is_dir() else (source, source.stem)
        raw = _read(file)
        if "models" in raw and "command" in raw:
            _add_report(gathered, run, raw, file)
        else:
            _add_portable(gathered, file)
    return gathered


def _read(file: Path) -> dict[str, Any]:
    try:
        raw = json.loads(file.read_text("utf-8"))
    except OSError as error:
        hint = "give a run directory, its report.json, or a portable result"
        raise UsageError(f"{file} cannot be read: {error.strerror}", hint) from None
    except ValueError as error:
        raise UsageError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise UsageError(f"{file} must hold a JSON object, not a {type(raw).__name__}")
    return raw


def _add_report(gathered: Gathered, run: str, raw: dict[str, Any], file: Path) -> None:
    try:
        names = {name: run if len(raw["models"]) == 1 else f"{run}: {name}" for name in raw["models"]}
        gathered.cards |= {names[name]: card for name, card in raw["models"].items()}
        gathered.rows += [row | {"model": names[row["model"]]} for row in raw["latency"]]
        gathered.speedups |= {f"{run}: {key}": speedup for key, speedup in raw["speedup"].items()}
        for task, by_model in raw["quality"].items():
            if known := {names[m]: metrics for m, metrics in by_model.items() if m in names}:
                gathered.quality.setdefault(task, {}).update(known)
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{file} is not a report of kdcli: {type(error).__name__} {error}") from None


def _add_portable(gathered: Gathered, file: Path) -> None:
    result = read_portable(file)
    gathered.rows += [row | {"model": f"{file.stem}: {row['model']}"} for row in result["rows"]]
    gathered.shapes |= {f"{file.stem}: {row['model']}": row["model"] for row in result["rows"]}
    gathered.speedups |= {f"{file.stem}: {key}": speedup for key, speedup in result["speedup"].items()}
    gathered.notes.append(f"{file.stem}: {json.dumps(result['environment'], ensure_ascii=False)}")
