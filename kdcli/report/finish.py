"""Finish a run: measure latency, write the report and the model cards."""

import datetime
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd
from markupsafe import escape
from pydantic import ValidationError

from kdcli.deploy.environment import environment, versions
from kdcli.deploy.latency import Latency, Protocol, Subject, measure_latency
from kdcli.disk import COMMITS, MOST_REPORT, read_json, write_atomic
from kdcli.engine.launch import Session
from kdcli.engine.progress import Progress
from kdcli.engine.run_dir import REPORT, RunDir
from kdcli.errors import UsageError
from kdcli.recipe.sections import MeasureSettings, Section
from kdcli.report.frame import frame
from kdcli.report.published import published_for
from kdcli.report.schema import (
    Comparison,
    Compression,
    Evaluation,
    Pruning,
    Quality,
    Report,
    Role,
    Selection,
    Training,
)
from kdcli.report.sections.evaluations import set_name
from kdcli.report.views import html, model_card, short, terminal, write_views
from kdcli.types import Card, Outcome


@dataclass(frozen=True)
class RunResult:
    """A finished run: its report, and where it lies."""

    report: Report
    folder: Path

    @classmethod
    def read(cls, folder: Path) -> "RunResult":
        """Read back a run that is done. Raises UsageError: its report is damaged or of another version."""
        return cls(
            checked_report(read_json(folder / REPORT, most_bytes=MOST_REPORT), folder / REPORT),
            folder,
        )

    def to_json(self) -> str:
        return self.report.to_json()

    def to_frame(self) -> pd.DataFrame:
        """A row a model, see `kdcli.report.frame`."""
        return frame(self.report)

    def _repr_html_(self) -> str:
        """report.html with its pictures, as a notebook shows it."""
        return f'<iframe srcdoc="{escape(html(self.report))}" width="100%" height="640" frameborder="0"></iframe>'

    def renderables(self) -> Iterable[Any]:
        yield from terminal(self.report)
        what = "model and report" if (self.folder / "config.json").is_file() else "report"
        yield f"{what} in {self.folder} (report.html)"


def checked_report(raw: Mapping[str, Any], file: Path) -> Report:
    """A report that was read from a file. Raises UsageError: it is damaged or of another version."""
    try:
        return Report.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "as a whole"
        raise UsageError(
            f"{file} is not a report of kdcli that this version reads: {where}: {first['msg']}"
        ) from None


def measure(subjects: Iterable[Subject], settings: MeasureSettings, session: Session) -> Latency:
    """Latency in float32, the first subject the baseline; nothing where it is not wanted."""
    if not settings.latency:
        return Latency()
    Progress.log("measuring latency")
    how = settings.model_dump(include={"min_runs", "min_seconds"})
    protocol = Protocol(
        device=str(session.device), trust_remote_code=session.trust_remote_code, **how
    )
    return measure_latency(list(subjects), protocol)


def quality_of(evaluations: Iterable[Evaluation]) -> Quality:
    """Arrange the metrics of evaluations by task and set, then by model."""
    quality: Quality = {}
    for e in evaluations:
        quality.setdefault(set_name(e.task, e.set), {})[e.model] = dict(e.metrics)
    return quality


@dataclass(frozen=True)
class ReportedModel:
    """A model of a report.

    `baseline` names the model that it is compared with. `folder` is set for a model that this run
    made, which then gets a model card. `run` names the run that measured the model, in a comparison
    of runs.
    """

    name: str
    role: Role
    card: Card
    baseline: str | None = None
    folder: Path | None = None
    run: str | None = None


@dataclass
class ReportContents:
    """What a verb reports.

    Attributes:
        recipe: the recipe that repeats the run.
        models: in the order of the tables.
        outcome: of the training; None if nothing was trained.
        quality: metrics by task and model; None takes them from the evaluations.
        auto_class: the class that loads the models that this run made.
        compared_runs: runs whose curves are drawn next to this one's, by name.
    """

    command: str
    recipe: Section
    models: list[ReportedModel]
    outcome: Outcome | None = None
    latency: Latency = field(default_factory=Latency)
    evaluations: list[Evaluation] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    quality: Quality | None = None
    notes: list[str] = field(default_factory=list)
    auto_class: str = "AutoModel"
    selection: Selection | None = None
    pruning: list[Pruning] = field(default_factory=list)
    compared_runs: Mapping[str, RunResult] = field(default_factory=dict)
    compression: Compression | None = None


def _portable_card(card: Card, run: Path) -> Card:
    """Identify a model inside the run's directory by its name alone, since the run may move."""
    return replace(card, id=short(card.id)) if Path(card.id).is_relative_to(run) else card


def write_report(run: RunDir, contents: ReportContents) -> RunResult:
    """Write the report and the model cards of a finished run, and delete its checkpoints.

    The training curve is read from the run's log.
    """
    latency, evaluations, outcome = contents.latency, contents.evaluations, contents.outcome
    quality = quality_of(evaluations) if contents.quality is None else contents.quality
    recipe = contents.recipe.model_dump()
    shapes = {
        model.name: f"{model.card.layers}x{model.card.hidden}"
        for model in contents.models
        if model.role != "teacher"
    }
    report = Report.model_validate(
        {
            "schema": 1,
            "command": contents.command,
            "status": "done",
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "versions": versions(),
            "environment": environment(),
            "recipe": recipe,
            "models": {m.name: asdict(_portable_card(m.card, run.path)) for m in contents.models},
            "runs": {m.name: m.run for m in contents.models if m.run is not None},
            "training": outcome
            and {name: getattr(outcome, name) for name in Training.model_fields},
            "curve": [
                {k: r.get(k) for k in ("step", "loss", "held_out", "metrics")}
                for r in run.read_log()
            ],
            "beside": {name: other.report.curve for name, other in contents.compared_runs.items()},
            "quality": quality,
            "latency": latency.rows,
            "speedup": latency.speedups,
            "failures": latency.failures,
            "agreements": latency.agreements,
            "published": published_for(shapes.values(), contents.command, recipe, shapes),
            "notes": [
                *contents.notes,
                *(f"data {source}: commit {commit}" for source, commit in COMMITS.items()),
            ],
            "evaluations": evaluations,
            "comparisons": contents.comparisons,
            "selection": contents.selection,
            "pruning": contents.pruning,
            "compression": contents.compression,
        }
    )
    for model in contents.models:
        if model.folder is None:
            continue
        card = model_card(
            report,
            model.name,
            contents.auto_class,
            own_code=any(model.folder.glob("modeling_*.py")),
            generates=(model.folder / "generation_config.json").is_file(),
        )
        write_atomic(model.folder / "README.md", card)
    write_views(run.path, report)
    run.drop_checkpoints()
    return RunResult(report, run.path)
