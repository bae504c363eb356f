"""Combine reports of several runs into one; nothing is measured again."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kdcli.deploy.old_machines.portable import read_portable
from kdcli.disk import MOST_REPORT, read_json
from kdcli.types import Card


@dataclass
class Gathered:
    """Parts of a report, each model under the name of its run; `shapes` maps names without a card to their shape."""

    cards: dict[str, Card] = field(default_factory=dict)
    shapes: dict[str, str] = field(default_factory=dict)
    runs: dict[str, str] = field(default_factory=dict)  # model -> the run that measured it
    rows: list[dict[str, Any]] = field(default_factory=list)
    speedups: dict[str, dict[str, Any]] = field(default_factory=dict)
    quality: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    judged_on: dict[str, dict[str, tuple[str, str]]] = field(
        default_factory=dict
    )  # task -> run -> hash, words

    def differing(self) -> list[str]:
        """A sentence for every task that runs were judged on different examples of."""
        said = []
        for task, runs in self.judged_on.items():
            if len({rows for rows, _ in runs.values()}) > 1:
                on = "; ".join(f"{run}: {words}" for run, (_, words) in runs.items())
                said.append(
                    f"{task} was judged on different examples, so its scores cannot be compared ({on})"
                )
        return said


def gather(sources: Sequence[Path], check: Callable[[dict[str, Any], Path], object]) -> Gathered:
    """Read run directories, `report.json` files and results of the portable runner; `check` validates a report. Raises
    UsageError: a file is missing, damaged, or neither a report nor a portable result."""
    gathered = Gathered()
    for source in sources:
        file, run = (
            (source / "report.json", source.name) if source.is_dir() else (source, source.stem)
        )
        raw = read_json(file, most_bytes=MOST_REPORT)
        if "models" in raw and "command" in raw:
            check(raw, file)
            _add_report(gathered, run, raw)
        else:
            _add_portable(gathered, file)
    return gathered


def _add_report(gathered: Gathered, run: str, raw: dict[str, Any]) -> None:
    names = {name: run if len(raw["models"]) == 1 else f"{run}: {name}" for name in raw["models"]}
    gathered.runs |= dict.fromkeys(names.values(), run)
    gathered.cards |= {names[name]: Card(**card) for name, card in raw["models"].items()}
    gathered.rows += [
        row | {"model": names.get(row["model"], row["model"])} for row in raw["latency"]
    ]
    gathered.speedups |= {_renamed(key, names): speedup for key, speedup in raw["speedup"].items()}
    for task, by_model in raw["quality"].items():
        # A model on a backend other than torch in float32 is scored as `MODEL on onnx int8`.
        whole = {
            m: names.get(m.split(" on ")[0], "") + m.removeprefix(m.split(" on ")[0])
            for m in by_model
        }
        if known := {
            whole[m]: metrics for m, metrics in by_model.items() if m.split(" on ")[0] in names
        }:
            gathered.quality.setdefault(task, {}).update(known)
    for e in raw.get("evaluations", []):
        data = raw["recipe"].get("data")
        source = data.get("source") if isinstance(data, dict) else None
        on = f"{e['n']:,} examples of {source or 'its own data'}, {e['split']}"
        gathered.judged_on.setdefault(f"{e['task']} {e['set']}".strip(), {})[run] = (
            e.get("rows_sha256") or on,
            on,
        )


def _renamed(key: str, names: Mapping[str, str]) -> str:
    """The name of a speed-up, `MODEL[/BACKEND]_vs_BASELINE[@CELL]`, with the models' names in the comparison."""
    if not names:
        return key
    baseline = next(iter(names))
    ratio, over, cell = key.rpartition(f"_vs_{baseline}")
    model = max(
        (name for name in names if ratio == name or ratio.startswith(f"{name}/")),
        key=len,
        default="",
    )
    return f"{names.get(model, '')}{ratio[len(model) :]}{over.replace(baseline, names[baseline])}{cell}"


def _add_portable(gathered: Gathered, file: Path) -> None:
    result = read_portable(file)
    gathered.rows += [row | {"model": f"{file.stem}: {row['model']}"} for row in result["rows"]]
    gathered.runs |= {f"{file.stem}: {row['model']}": file.stem for row in result["rows"]}
    gathered.shapes |= {f"{file.stem}: {row['model']}": row["model"] for row in result["rows"]}
    gathered.speedups |= {
        f"{file.stem}: {key}": speedup for key, speedup in result["speedup"].items()
    }
    gathered.notes.append(f"{file.stem}: {json.dumps(result['environment'], ensure_ascii=False)}")
