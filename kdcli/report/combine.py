"""Combine the reports of several finished runs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from kdcli.engine.run_dir import RunDir
from kdcli.recipe.sections import Section
from kdcli.report.entry import Entry
from kdcli.report.finish import ReportContents, RunResult, write_report
from kdcli.report.schema import Quality, Report


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
        contents.pruning += [p.model_copy(update={"model": name}) for p in report.pruning]
        for model in report.models:
            variant = name if model.role == "student" else None
            models.setdefault(model.name, replace(Entry.reported(model), variant=variant))
        for task, by_model in report.quality.items():
            known = quality.setdefault(task, {})
            known |= {name: by_model[name] for name in by_model if name not in known}
    contents.models = list(models.values())
    return write_report(RunDir(folder), contents)
