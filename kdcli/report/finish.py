"""Finish a run: measure latency, write the report and the model cards."""

from __future__ import annotations

import datetime
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from markupsafe import escape
from pydantic import ValidationError
from transformers import PreTrainedModel

from kdcli.data.accounts import ACCOUNTS, LeftOut, RowAccount
from kdcli.deploy.cascade import KEY as CASCADE
from kdcli.deploy.environment import describe_environment, versions
from kdcli.deploy.exported import Export
from kdcli.deploy.latency import Latency, Subject
from kdcli.deploy.measurements import SchemaPart
from kdcli.deploy.usable import Usable
from kdcli.disk import (
    COMMITS,
    HASHES,
    MAX_REPORT_BYTES,
    REPORT_FILE,
    near_path,
    read_json,
    write_atomic,
)
from kdcli.engine.run_dir import RunDir
from kdcli.errors import UsageError, first_problem
from kdcli.models.card import describe, describe_source
from kdcli.models.files import LIBRARY_TYPE
from kdcli.models.load import location
from kdcli.models.model import Model
from kdcli.recipe.sections import Section
from kdcli.report.front import EMBEDDER
from kdcli.report.schema import (
    SCHEMA,
    UNDISTILLED,
    Comparison,
    Compression,
    CurvePoint,
    Evaluation,
    ModelEntry,
    Pruning,
    PublishedRow,
    Quality,
    Report,
    Role,
    Selection,
    Training,
    Trimming,
)
from kdcli.report.schema_decisions import Decision
from kdcli.report.sections.evaluations import set_name
from kdcli.report.sections.timings import PLAIN, form_of
from kdcli.report.tables import published_tables
from kdcli.report.text import Plot, paper_shape, short
from kdcli.report.views import first_pictures, html, model_card, terminal, write_views
from kdcli.types import REGULARIZER, Card, Outcome

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Entry:
    """A model that takes part in a run. Its name, role and other facts are as in `ModelEntry`.

    Attributes:
        card: The description; None for a model without files of its own.
        folder: The directory of a model that this run made, where its model card is written.
        made: How the run made the model, as the second half of a sentence: `distilled from ...`.
        source: The model that this one was made from.
        timed: The model as the latency worker loads it; None if its latency is not measured.
    """

    name: str
    role: Role
    card: Card | None
    baseline: str | None = None
    folder: Path | None = None
    made: str | None = None
    source: str | None = None
    of: str | None = None
    step: int | None = None
    backend: str | None = None
    dtype: str | None = None
    variant: str | None = None
    run: str | None = None
    timed: Subject | None = None

    @classmethod
    def loaded(cls, name: str, role: Role, model: Model, baseline: str | None = None) -> Self:
        """Describe a model that the run only reads."""
        network: object = model.model
        if isinstance(network, Export):
            timed = Subject(name, location(model.source), network.format, network.precision)
            if hasattr(network.config, CASCADE):
                # Its time depends on how often the larger model is asked.
                return cls(name, role, network.card, baseline)
            return cls(name, role, network.card, baseline, timed=timed)
        card = describe_source(model.model, model.source)
        return cls(name, role, card, baseline, timed=timed_subject(name, model))

    @classmethod
    def saved(
        cls,
        name: str,
        role: Role,
        network: PreTrainedModel,
        folder: Path,
        baseline: str | None = None,
        *,
        made: str | None = None,
        source: str | None = None,
    ) -> Self:
        """Describe a model that the run has made and saved in `folder`."""
        card, timed = describe(network, str(folder), folder), Subject(name, str(folder))
        return cls(name, role, card, baseline, folder, made, source, timed=timed)

    @classmethod
    def reported(cls, model: ModelEntry) -> Self:
        """Return the model of another report, which has no files here."""
        return cls(**dict(model))

    @classmethod
    def without_distillation(
        cls, student: str, role: Literal["untrained", "undistilled"] = "untrained"
    ) -> Self:
        """Name the student before its training, or the one that was trained without a teacher."""
        return cls(student + UNDISTILLED, role, None, of=student)

    def stored(self, run: Path) -> ModelEntry:
        """Return the entry of report.json.

        A model inside the run's directory is listed by its name, because the run may be moved.
        """
        card = self.card
        if card is not None and Path(card.id).is_relative_to(run):
            card = replace(card, id=short(card.id))
        facts = {name: getattr(self, name) for name in ModelEntry.model_fields}
        return ModelEntry.model_validate(facts | {"card": card})


def timed_subject(name: str, model: Model) -> Subject | None:
    """Return a model as the latency worker loads it; None if the worker cannot load it."""
    by_library = model.model.config.model_type == LIBRARY_TYPE
    return None if by_library else Subject(name, location(model.source))


def with_baseline(models: Iterable[Entry]) -> list[Entry]:
    """Make the first model the baseline of the others."""
    first, *others = models
    return [
        replace(first, role="baseline"),
        *(replace(other, baseline=first.name) for other in others),
    ]


BEST = "best"
"""The directory of a compression's chosen model, ready to ship."""


@dataclass(frozen=True)
class RunResult(Usable):
    """A finished run: its report, its directory and its model.

    Attributes:
        report: The content of report.json.
        folder: The directory of the run.
    """

    # A report would fill a console with its repr.
    report: Report = field(repr=False)
    folder: Path
    trust_remote_code: bool = False

    @classmethod
    def read(cls, folder: Path) -> RunResult:
        """Read a finished run.

        Raises:
            UsageError: There is no run, or it is not finished; or its report is damaged or has
                another schema.
        """
        if not (folder / REPORT_FILE).is_file():
            if RunDir(folder).is_run:
                hint = "rerun the command that started it, with --resume"
                raise UsageError(f"the run in {folder} is not finished", hint)
            near = near_path(str(folder))
            raise UsageError(f"no run at {folder}{near}", "give the directory of a finished run")
        return cls(
            checked_report(
                read_json(folder / REPORT_FILE, max_bytes=MAX_REPORT_BYTES), folder / REPORT_FILE
            ),
            folder,
        )

    def to_json(self) -> str:
        return self.report.to_json()

    def to_frame(self) -> pd.DataFrame:
        """Return a table with a row for each model; see `frame`."""
        return frame(self.report)

    @property
    def best(self) -> Path:
        """The directory to ship: `best/` of a compression, otherwise the run's own."""
        return self.folder / BEST if self.report.compression is not None else self.folder

    def plot(self) -> Plot:
        """Return the first pictures of report.html, which a notebook shows.

        Of a compression, they are quality over latency and over size, as in pareto.png.

        Raises:
            UsageError: The report has no picture.
        """
        pictures = first_pictures(self.report)
        if not pictures:
            raise UsageError(
                f"the report of {self.folder} has no pictures: it measured too little to draw",
                "run longer, or measure latency; to_frame() has the numbers",
            )
        return Plot(tuple(pictures))

    def _repr_html_(self) -> str:
        """Return report.html with its pictures, for a notebook."""
        # Relative links would lead nowhere from a notebook.
        page = escape(html(self.report, links=False))
        return f'<iframe srcdoc="{page}" width="100%" height="640" frameborder="0"></iframe>'

    def renderables(self) -> Iterable[object]:
        yield from terminal(self.report)
        has_model = (self.folder / "config.json").is_file()
        yield f"{'model and report' if has_model else 'report'} in {self.folder} (report.html)"


def frame(report: Report) -> pd.DataFrame:
    """Return a table with a row for each model, and for each backend that it ran on.

    If a model ran on several backends, its rows on other ones than torch in float32 are named
    `MODEL on onnx int8`. The columns are sizes, every metric and, for every cell, the median in
    milliseconds (`ms BATCHxTOKENS`), the median speed-up, and whether one of the two is `unstable`.
    Unstable medians are replaced by the 90th percentile, unstable speed-ups by their lower bound
    or, if it is below 1, by NaN.
    """
    # Import here: training and the other forms of a report do not need pandas.
    import pandas as pd

    rows: dict[str, dict[str, object]] = defaultdict(dict)
    backends: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for row in report.latency:
        backends[row.model].add((row.backend, row.dtype))
    for name, card in report.cards.items():
        rows[name] |= {"layers": card.layers, "hidden": card.hidden}
        rows[name] |= {"parameters": card.params_total, "bytes": card.bytes}
    for task, models in report.quality.items():
        for name, metrics in models.items():
            rows[name] |= {f"{task} {metric}": value for metric, value in metrics.items()}
    for row in report.latency:
        name, cell = form_of(report, row).name, f"{row.batch_size}x{row.seq_len}"
        is_plain = (row.backend, row.dtype) in PLAIN or len(backends[row.model]) == 1
        if name == row.model and not is_plain:
            name = f"{row.model} on {row.backend} {row.dtype}"
        rows[name][f"ms {cell}"] = row.stated_ms
        unstable = row.unstable
        if row.speedup is not None:
            rows[name][f"speed-up {cell}"] = row.speedup.stated
            unstable = unstable or row.speedup.unstable
        rows[name][f"unstable {cell}"] = unstable
    return pd.DataFrame.from_dict(rows, orient="index")


def checked_report(raw: Mapping[str, object], file: Path) -> Report:
    """Check a report that was read from a file.

    Raises:
        UsageError: It is damaged or has another schema.
    """
    schema = raw.get("schema")
    if isinstance(schema, int) and schema != SCHEMA:
        raise UsageError(
            f"{file} is a report of schema {schema}; this version of kdcli reads schema {SCHEMA}",
            "run its recipe.yaml again, or read it with the version of kdcli that wrote it",
        )
    try:
        # JSON has no such numbers, but Python reads them.
        text = json.dumps(raw, allow_nan=False)
    except ValueError:
        raise UsageError(
            f"{file} holds a number that is NaN or infinite, which no report of kdcli has",
            "copy it again, or run its recipe.yaml again",
        ) from None
    try:
        return Report.model_validate_json(text)
    except ValidationError as error:
        raise UsageError(f"{file} is not a report of kdcli: {first_problem(error, raw)}") from None


def quality_of(evaluations: Iterable[Evaluation]) -> Quality:
    """Arrange the metrics of evaluations by task and set, then by model."""
    quality: Quality = {}
    for e in evaluations:
        quality.setdefault(set_name(e.task, e.set), {})[e.model] = dict(e.metrics)
    return quality


@dataclass
class ReportContents:
    """The content of a report.

    Attributes:
        command: The verb.
        recipe: The recipe that repeats the run.
        models: The models in the order of the tables.
        outcome: The outcome of the training; None if nothing was trained.
        quality: The metrics by task and model; None takes them from the evaluations.
        auto_class: The class that loads the models that this run made.
        pipeline: The hub's name of the task; None takes the task of `auto_class`.
        focus: The main subject of the report, which its views show first.
        compared_runs: The runs whose curves are drawn next to this run's, by name.
        command_line: The command as it was typed; None if the run was started from Python.
        price_per_hour: The price of the machine; None without a price.
    """

    command: str
    recipe: Section
    models: list[Entry]
    outcome: Outcome | None = None
    latency: Latency = field(default_factory=Latency)
    evaluations: list[Evaluation] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    quality: Quality | None = None
    notes: list[str] = field(default_factory=list)
    auto_class: str = "AutoModel"
    pipeline: str | None = None
    focus: Literal["quality", "latency"] = "quality"
    selection: Selection | None = None
    pruning: list[Pruning] = field(default_factory=list)
    trimming: Trimming | None = None
    compared_runs: Mapping[str, RunResult] = field(default_factory=dict)
    compression: Compression | None = None
    command_line: str | None = None
    price_per_hour: float | None = None


def curve_of(log: Iterable[Mapping[str, Any]], trained: Sequence[str]) -> list[CurvePoint]:
    """Read the curve of a run from its log.

    The log names the terms of the held-out loss `MODEL/TERM` if several models are trained; the
    total over the models is dropped then. `trained` are the models that the run trains.
    """
    points = []
    for record in log:
        held_out: dict[str, dict[str, float]] = {}
        for model in trained:
            prefix = f"{model}/" if len(trained) > 1 else ""
            terms = {
                key.removeprefix(prefix): value
                for key, value in record.get("held_out", {}).items()
                if key.startswith(prefix)
            }
            if terms:
                held_out[model] = terms
        loss = record.get("loss")
        if loss is not None:
            # Held-out losses have no regularizer.
            loss -= record.get("terms", {}).get(REGULARIZER, 0.0)
        points.append(
            CurvePoint(
                step=record["step"],
                loss=loss,
                held_out=held_out or None,
                metrics=record.get("metrics"),
            )
        )
    return points


def write_report(run: RunDir, contents: ReportContents) -> RunResult:
    """Write the report and the model cards of a finished run, and delete its checkpoints.

    The training curve is read from the run's log.
    """
    report = _report(run, contents)
    for model in contents.models:
        if model.folder is None:
            continue
        card = model_card(
            report,
            model.name,
            contents.auto_class,
            pipeline=contents.pipeline,
            own_code=any(model.folder.glob("modeling_*.py")),
            generates=(model.folder / "generation_config.json").is_file(),
        )
        write_atomic(model.folder / "README.md", card)
    write_views(run.path, report)
    run.drop_checkpoints()
    return RunResult(report, run.path)


def _report(run: RunDir, contents: ReportContents) -> Report:
    """Build and check the report of a run."""
    latency, evaluations, outcome = contents.latency, contents.evaluations, contents.outcome
    recipe = contents.recipe.model_dump()
    models = [model.stored(run.path) for model in contents.models]
    trained = [model.name for model in contents.models if model.folder is not None]
    training = outcome and {name: getattr(outcome, name) for name in Training.model_fields}
    compared = {name: other.report.curve for name, other in contents.compared_runs.items()}
    facts = {name: value for name, value in vars(contents).items() if name in Report.model_fields}
    return Report.model_validate(
        facts
        | {
            "status": "done",
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "versions": versions(),
            "environment": describe_environment(),
            "recipe": recipe,
            "data_versions": _data_versions(recipe),
            "models": models,
            "training": training,
            "curve": curve_of(run.read_log(), trained),
            "compared_runs": compared,
            "quality": quality_of(evaluations) if contents.quality is None else contents.quality,
            "latency": [row.priced(contents.price_per_hour) for row in latency.rows],
            "failures": latency.failures,
            "agreements": latency.agreements,
            "accounts": [_stored(account) for account in ACCOUNTS.by_key.values()],
            "published": published_for(models, recipe, embeds=contents.auto_class == EMBEDDER),
        }
    )


def _stored(account: RowAccount) -> RowAccount:
    """Return an account without directories of this machine."""
    left_out = [_without_folder(one) for one in account.left_out]
    breaks = account.line_breaks and _without_folder(account.line_breaks)
    source = short(account.source)
    return replace(account, source=source, left_out=left_out, line_breaks=breaks)


def _without_folder(left_out: LeftOut) -> LeftOut:
    """Return a count whose first place, such as `data/rows.csv:3`, has no directory."""
    file, colon, line = left_out.first.rpartition(":")
    return replace(left_out, first=f"{short(file)}:{line}") if colon else left_out


def _data_versions(recipe: Mapping[str, object]) -> dict[str, str]:
    """Return the commits of the hub's data sets, and hashes of the files that a recipe names."""
    data = recipe.get("data")
    sources = [data.get("source") if isinstance(data, dict) else None, recipe.get("text")]
    names = [source for source in sources if isinstance(source, str)]
    versions = {source: f"commit {commit}" for source, commit in COMMITS.items()}
    hashes = {short(name): f"sha256 {HASHES[name]}" for name in names if name in HASHES}
    return versions | hashes


class PaperRow(PublishedRow):
    """A row of published.toml, with the runs that it is shown for.

    Attributes:
        shapes: The shapes of models that it is shown for.
        role: The only role of these models; None for every role but the teacher's.
        density: The share of the weights that the run keeps.
        on_task: Whether the row is shown only for runs on a task.
    """

    shapes: Sequence[str] = ()
    role: Role | None = None
    density: float | None = None
    on_task: bool = False

    def shown(self, values: Mapping[str, float] | None = None) -> PublishedRow:
        """Return the row as a report has it, with all of its values or some."""
        facts = self.model_dump(include=set(PublishedRow.model_fields))
        return PublishedRow.model_validate(facts | ({} if values is None else {"values": values}))

    def fits(self, models: Sequence[ModelEntry], sparsities: Sequence[float]) -> bool:
        """Whether a model has one of the shapes and the role, and the run has the density."""
        shapes = {
            paper_shape(model.card)
            for model in models
            if model.card is not None
            and (model.role == self.role if self.role else model.role != "teacher")
        }
        is_kept = self.density is None or any(
            math.isclose(1 - sparsity, self.density) for sparsity in sparsities
        )
        return is_kept and not shapes.isdisjoint(self.shapes)


class PaperAblation(SchemaPart):
    """A paper's scores for the variants of one of the lists in recipes/ablations.

    Attributes:
        ablate: The name of the list.
        shape: The shape of the paper's model.
        source: The paper and its tables.
        task: The task.
        metric: Its metric.
        values: The name of a variant -> its scores by set, in per cent.
    """

    ablate: str
    shape: str
    source: str
    task: str
    metric: str
    values: Mapping[str, dict[str, float]]

    def row(self, variant: str, model: str) -> PublishedRow:
        """Return the scores of a variant as a report has them, for our model."""
        return PublishedRow(
            row=f"{self.shape}, {variant}",
            source=self.source,
            values=self.values[variant],
            shape=self.shape,
            task=self.task,
            metric=self.metric,
            model=model,
        )


def published_for(
    models: Sequence[ModelEntry],
    recipe: Mapping[str, Any] | None = None,
    *,
    embeds: bool = False,
) -> list[PublishedRow]:
    """Return the rows of published.toml for the models of a run, except its teacher.

    They are the rows of the models' shapes and roles. On a task they have that task's columns only;
    for a pruning they are the rows of its densities. Tasks on which the run evaluates models add
    rows by set, and the papers' results for the variants of its `--ablate`. A run that only trims a
    vocabulary has no rows, because it trained no model. A run of embedding models (`embeds`) has
    none, because the papers score fine-tuned models.
    """
    if embeds or any(model.role == "trimmed" for model in models):
        return []
    content, recipe = published_tables(), recipe or {}
    tasks, task = content["tasks"], recipe.get("task")
    papers = [PaperRow.model_validate(row) for row in content["row"]]
    evaluated = {task, *((recipe.get("eval") or {}).get("tasks") or ())} - {None}
    rows = []
    for row in papers:
        if row.task is not None or not row.fits(models, recipe.get("sparsity") or ()):
            continue
        if task is None:
            values = {} if row.on_task else row.values
        else:
            values = {k: v for k, v in row.values.items() if tasks.get(k, task) == task}
        if values and (task is None or not tasks.keys().isdisjoint(values)):
            rows.append(row.shown(values=values))
    rows += [row.shown() for row in papers if row.task in evaluated]
    listed = recipe.get("ablate")
    # Another method has variants of the same names.
    if recipe.get("method", listed) != listed:
        return rows
    ablations = [PaperAblation.model_validate(one) for one in content["ablation"]]
    of_list = [one for one in ablations if one.ablate == listed and one.task in evaluated]
    return rows + list(_variants(of_list, models))


def _variants(
    ablations: Sequence[PaperAblation], models: Sequence[ModelEntry]
) -> Iterator[PublishedRow]:
    """Yield what a paper reports for the variants of a list.

    The rows have the model's shape or, if there are none, the paper's smallest shape.
    """
    variants = [model for model in models if model.variant is not None]
    # A single variant has nothing to be compared with.
    for model in variants if len(variants) > 1 else []:
        assert model.card is not None
        same = [one for one in ablations if model.variant in one.values]
        shapes = [one.shape for one in same]
        shape = paper_shape(model.card)
        shape = shape if shape in shapes or not shapes else shapes[-1]
        yield from (one.row(str(model.variant), model.name) for one in same if one.shape == shape)
