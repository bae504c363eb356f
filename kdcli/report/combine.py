"""Combine the reports of several finished runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kdcli.engine.run_dir import RunDir
from kdcli.recipe.sections import Section
from kdcli.report.finish import ReportContents, ReportedModel, RunResult, write_report
from kdcli.report.schema import Evaluation, ModelEntry, Quality


@dataclass(frozen=True)
class Part:
    """A finished run, and the models that the combined report takes from it.

    Attributes:
        name: The name of the run's pruned model in the combined report.
        result: The run.
        models: The names of the models in the combined report, by their names in the run's report.
            Other models are skipped.
        variants: The variants of the method, by the models' names in the run's report.
    """

    name: str
    result: RunResult
    models: Mapping[str, str]
    variants: Mapping[str, str] = field(default_factory=dict)

    def reported(self, model: ModelEntry) -> ReportedModel:
        """Return the entry of a model in the combined report."""
        return ReportedModel(
            name=self.models[model.name],
            role=model.role,
            card=model.card,
            baseline=self.models.get(model.baseline or ""),
            of=self.models.get(model.of or ""),
            step=model.step,
            backend=model.backend,
            dtype=model.dtype,
            variant=self.variants.get(model.name),
            source=model.source,
        )


def combine_reports(
    folder: Path,
    *,
    command: str,
    recipe: Section,
    parts: Sequence[Part],
    notes: Sequence[str] = (),
) -> RunResult:
    """Write a report to `folder` with the models, scores and prunings of several runs.

    A model that occurs in several runs is taken from the first one.
    """
    models: dict[str, ReportedModel] = {}
    evaluations: list[Evaluation] = []
    quality: Quality = {}
    for part in parts:
        report = part.result.report
        scored = {e.model for e in evaluations}
        names = {model: name for model, name in part.models.items() if name not in scored}
        evaluations += [
            e.model_copy(update={"model": names[e.model]})
            for e in report.evaluations
            if e.model in names
        ]
        for model in report.models:
            if model.name in part.models:
                models.setdefault(part.models[model.name], part.reported(model))
        for task, by_model in report.quality.items():
            for name, values in by_model.items():
                if name in part.models:
                    quality.setdefault(task, {}).setdefault(part.models[name], values)
    contents = ReportContents(
        command,
        recipe,
        list(models.values()),
        quality=quality,
        notes=list(notes),
        evaluations=evaluations,
        pruning=[
            p.model_copy(update={"model": part.name})
            for part in parts
            for p in part.result.report.pruning
        ],
    )
    return write_report(RunDir(folder), contents)
