"""One report over several finished runs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdcli.bench.latency import Latency
from kdcli.report.finish import RunResult, quality_of, write_report
from kdcli.training.run_dir import RunDir
from kdcli.types import Outcome


@dataclass(frozen=True)
class Part:
    """A finished run and what a combined report shows of it: `name` is that of its pruning and, with `beside`, of its
    held-out curve; `models` maps names in the run's report to names in the combined one, others are left out."""

    name: str
    result: RunResult
    models: Mapping[str, str]
    beside: bool = False


def combine_reports(
    folder: Path,
    *,
    command: str,
    parts: Sequence[Part],
    recipe: Mapping[str, Any] | None = None,
    notes: Iterable[str] = (),
    cards: Mapping[str, Mapping[str, Any]] | None = None,
    evaluations: Iterable[Mapping[str, Any]] = (),
    quality: Mapping[str, Mapping[str, Mapping[str, float]]] | None = None,
    folders: Mapping[str, Path] | None = None,
    latency: Latency | None = None,
    outcome: Outcome | None = None,
    selection: Mapping[str, Any] | None = None,
    auto_class: str = "AutoModel",
) -> RunResult:
    """Write the report of `folder` over the models, scores and prunings of several runs, and of those trained here.

    Each name is shown once, as in the first part that has it. The last model of `cards` stays last, since the report's
    first numbers are about the last model. A model in `folders` is named by its directory. What is not given by
    `recipe` is the first part's; other arguments are as in `write_report`."""
    own = {name: dict(card) for name, card in (cards or {}).items()}
    shown = dict(list(own.items())[:-1])
    scores = [dict(e) for e in evaluations]
    merged = {task: dict(models) for task, models in (quality_of(scores) if quality is None else quality).items()}
    for part in parts:
        report = part.result.report
        scored = {e["model"] for e in scores}
        names = {model: name for model, name in part.models.items() if name not in scored}
        scores += [e.model_dump() | {"model": names[e.model]} for e in report.evaluations if e.model in names]
        for model, name in part.models.items():
            if model in report.models and name not in own:
                shown.setdefault(name, report.models[model].model_dump())
        for task, by_model in report.quality.items():
            for model, values in by_model.items():
                if model in part.models:
                    merged.setdefault(task, {}).setdefault(part.models[model], values)
    shown |= own
    for name, own_folder in (folders or {}).items():
        shown[name]["id"] = str(own_folder)
    return write_report(
        RunDir(folder),
        command=command,
        recipe=recipe if recipe is not None else parts[0].result.report.recipe,
        cards=shown,
        folders=folders,
        latency=latency,
        outcome=outcome,
        quality=merged,
        notes=notes,
        auto_class=auto_class,
        evaluations=scores,
        selection=selection,
        pruning=[p.model_dump() | {"model": part.name} for part in parts for p in part.result.report.pruning],
        beside={part.name: part.result for part in parts if part.beside},
    )
