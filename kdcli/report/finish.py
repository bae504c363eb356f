"""What every training verb does at its end: describe the models, measure them, write the report, tidy up."""

import datetime
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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
from kdcli.recipe.sections import MeasureSettings
from kdcli.report.frame import frame
from kdcli.report.published import published_for
from kdcli.report.schema import Report, Training
from kdcli.report.sections.evaluations import set_name
from kdcli.report.views import html, model_card, short, terminal, write_views
from kdcli.types import Outcome


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


def quality_of(evaluations: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Evaluations as `quality` of a report: task and set -> model -> metric -> value."""
    quality: dict[str, dict[str, dict[str, float]]] = {}
    for e in evaluations:
        quality.setdefault(set_name(e["task"], e["set"]), {})[e["model"]] = dict(e["metrics"])
    return quality


def _named(source: str, run: Path) -> str:
    """A model that lies in the directory of a run by its name, since the run may move; others as they were given."""
    return short(source) if Path(source).is_relative_to(run) else source


def write_report(
    run: RunDir,
    *,
    command: str,
    recipe: Mapping[str, Any],
    cards: Mapping[str, Mapping[str, Any]],  # By name of the model, teacher first
    folders: Mapping[str, Path] | None = None,  # Of each model that this run made
    latency: Latency | None = None,
    outcome: Outcome | None = None,  # Of the training, where something was trained
    quality: Mapping[str, Mapping[str, Mapping[str, float]]]
    | None = None,  # None takes the evaluations'
    notes: Iterable[str] = (),
    auto_class: str = "AutoModel",  # Loads the models in `folders`
    evaluations: Iterable[Mapping[str, Any]] = (),
    comparisons: Iterable[Mapping[str, Any]] = (),
    selection: Mapping[str, Any] | None = None,
    pruning: Iterable[Mapping[str, Any]] = (),
    beside: Mapping[str, RunResult]
    | None = None,  # Runs whose curves the report shows too, by name
    compression: Mapping[str, Any] | None = None,
) -> RunResult:
    """Write the report and the model cards, drop the checkpoints; the log of `run` gives the curve. What has no comment
    is as in `kdcli.report.schema`."""
    latency, evaluations = latency or Latency(), list(evaluations)
    quality = quality_of(evaluations) if quality is None else quality
    cards = {
        name: dict(card) | {"id": _named(card["id"], run.path)} for name, card in cards.items()
    }
    shapes = {
        name: f"{card['layers']}x{card['hidden']}"
        for name, card in cards.items()
        if name != "teacher"
    }
    report = Report.model_validate(
        {
            "schema": 1,
            "command": command,
            "status": "done",
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "versions": versions(),
            "environment": environment(),
            "recipe": dict(recipe),
            "models": cards,
            "training": outcome
            and {name: getattr(outcome, name) for name in Training.model_fields},
            "curve": [
                {k: r.get(k) for k in ("step", "loss", "held_out", "metrics")}
                for r in run.read_log()
            ],
            "beside": {name: run.report.curve for name, run in (beside or {}).items()},
            "quality": {
                task: {m: dict(v) for m, v in models.items()} for task, models in quality.items()
            },
            "latency": latency.rows,
            "speedup": latency.speedups,
            "failures": latency.failures,
            "agreements": latency.agreements,
            "published": published_for(shapes.values(), command, recipe, shapes),
            "notes": [
                *notes,
                *(f"data {source}: commit {commit}" for source, commit in COMMITS.items()),
            ],
            "evaluations": evaluations,
            "comparisons": list(comparisons),
            "selection": selection,
            "pruning": list(pruning),
            "compression": compression,
        }
    )
    for name, folder in (folders or {}).items():
        of_folder = {"own_code": any(folder.glob("modeling_*.py"))}
        of_folder["generates"] = (folder / "generation_config.json").is_file()
        card = model_card(report, name, auto_class, **of_folder)
        write_atomic(folder / "README.md", card)
    write_views(run.path, report)
    run.drop_checkpoints()
    return RunResult(report, run.path)
