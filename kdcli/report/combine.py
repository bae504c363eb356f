"""Combine the reports of several finished runs."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from kdcli.engine.run_dir import RunDir
from kdcli.recipe.sections import Section
from kdcli.report.finish import Entry, ReportContents, RunResult, write_report
from kdcli.report.schema import Evaluation, Quality, Report

COMPARED = ("student", "peer", "pruned")
"""The roles of the models that differ between the runs."""


def combine_reports(
    folder: Path,
    *,
    command: str,
    recipe: Section,
    reports: Mapping[str, Report],
    notes: Sequence[str] = (),
) -> RunResult:
    """Write a report to `folder` with the models, scores and prunings of several runs.

    A model that occurs in several runs is taken from the first one.

    Args:
        folder: The directory of the combined report.
        command: The verb.
        recipe: The recipe of the combined run.
        reports: The reports of the runs, with their models as the combined report names them. The
            key is the name of the run's student or pruned model.
        notes: Sentences for the report.
    """
    models: dict[str, Entry] = {}
    quality: Quality = {}
    contents = ReportContents(command, recipe, [], quality=quality, notes=list(notes))
    for name, report in reports.items():
        contents.evaluations += [e for e in report.evaluations if e.model not in models]
        named = [model.name for model in report.models]
        contents.pruning += [
            p if p.model in named else p.model_copy(update={"model": name}) for p in report.pruning
        ]
        for model in report.models:
            variant = model.name if model.role in COMPARED else None
            models.setdefault(model.name, replace(Entry.reported(model), variant=variant))
        for task, by_model in report.quality.items():
            known = quality.setdefault(task, {})
            known |= {name: by_model[name] for name in by_model if name not in known}
    contents.models = list(models.values())
    return write_report(RunDir(folder), contents)


def mean_of_seeds(runs: Sequence[Evaluation]) -> Evaluation:
    """Average the scores of runs with different seeds. Mistakes of single runs are dropped."""
    first = runs[0]
    if len(runs) == 1:
        return first
    values = {metric: [run.metrics[metric] for run in runs] for metric in first.metrics}
    return first.model_copy(
        update={
            "confusion": None,
            "per_class": {},
            "worst": [],
            "metrics": {metric: statistics.fmean(v) for metric, v in values.items()},
            "deviations": {metric: statistics.stdev(v) for metric, v in values.items()},
            "seeds": len(runs),
        }
    )


def mean_report(reports: Sequence[Report]) -> Report:
    """Return the first of several runs that differ in their seeds, with the means of all scores."""
    first = reports[0]
    quality = {
        task: {
            name: {
                metric: statistics.fmean(each.quality[task][name][metric] for each in reports)
                for metric in metrics
            }
            for name, metrics in by_model.items()
        }
        for task, by_model in first.quality.items()
    }
    runs = zip(*(each.evaluations for each in reports), strict=True)
    means = [mean_of_seeds(of_seeds) for of_seeds in runs]
    return first.model_copy(update={"quality": quality, "evaluations": means})
