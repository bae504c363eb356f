"""One report over several finished runs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdcli.engine.run_dir import RunDir
from kdcli.report.finish import RunResult, write_report


@dataclass(frozen=True)
class Part:
    """A finished run and what a combined report shows of it: `name` is that of its pruning; `models` maps names in the
    run's report to names in the combined one, others are left out."""

    name: str
    result: RunResult
    models: Mapping[str, str]


def combine_reports(
    folder: Path,
    *,
    command: str,
    parts: Sequence[Part],
    recipe: Mapping[str, Any] | None = None,
    notes: Iterable[str] = (),
) -> RunResult:
    """Write the report of `folder` over the models, scores and prunings of several runs. Each name is shown once, as in
    the first part that has it. Without `recipe` the first part's is shown; other arguments are as in `write_report`."""
    cards: dict[str, dict[str, Any]] = {}
    scores: list[dict[str, Any]] = []
    quality: dict[str, dict[str, dict[str, float]]] = {}
    for part in parts:
        report = part.result.report
        scored = {e["model"] for e in scores}
        names = {model: name for model, name in part.models.items() if name not in scored}
        scores += [
            e.model_dump() | {"model": names[e.model]}
            for e in report.evaluations
            if e.model in names
        ]
        for model, name in part.models.items():
            if model in report.models:
                cards.setdefault(name, report.models[model].model_dump())
        for task, by_model in report.quality.items():
            for model, values in by_model.items():
                if model in part.models:
                    quality.setdefault(task, {}).setdefault(part.models[model], values)
    return write_report(
        RunDir(folder),
        command=command,
        recipe=recipe if recipe is not None else parts[0].result.report.recipe,
        cards=cards,
        quality=quality,
        notes=notes,
        evaluations=scores,
        pruning=[
            p.model_dump() | {"model": part.name}
            for part in parts
            for p in part.result.report.pruning
        ],
    )
