"""report.json, schema 2."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Self, TypeVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, model_validator

from kdcli.data.accounts import RowAccount
from kdcli.deploy.measurements import Agreement, Failure, LatencyRow, SchemaPart, Speedup
from kdcli.report.schema_decisions import Confusion, Decision
from kdcli.types import Card, LabelAccount

SCHEMA: Literal[2] = 2

# Usual names of models. Nothing reads a role from a name: roles are fields.
TEACHER, ASSISTANT, STUDENT, FINETUNED = "teacher", "assistant", "student", "finetuned"
UNDISTILLED = " undistilled"  # suffix of the name of a student without its distillation
HELD_OUT_LOSS = "held-out loss"  # the distillation loss, among the qualities
AT = " at step "  # between the name of a model and the step of its checkpoint

Role = Literal[
    "teacher",  # other models learn from it
    "assistant",  # learns from the teacher, teaches the students
    "student",
    "peer",  # one of two models that are trained together
    "finetuned",
    "pruned",
    "trimmed",
    "adapted",  # maps its vectors into the index of another model
    "candidate",  # evaluated or measured as it is, next to a baseline
    "baseline",  # other models are compared with it
    "untrained",  # a student before its training
    "undistilled",  # a student that was trained without its teacher
    "checkpoint",  # another model after an earlier step of its training
    "form",  # the weights of another model on another backend
]
"""The role of a model in its report."""

Quality = dict[str, dict[str, dict[str, float]]]
"""Task and set, or another measure -> model -> metric -> value."""


class ModelEntry(SchemaPart):
    """A model of the report.

    `card` is null for a model that has no files of its own, such as a student before its training.
    """

    model_config = ConfigDict(use_attribute_docstrings=True)
    name: str
    role: Role
    baseline: str | None = None
    """The model that this one is compared with."""
    card: Card | None = None
    of: str | None = None
    """The model whose checkpoint, form, or untrained start this one is."""
    step: int | None = None
    """The step of a checkpoint."""
    backend: str | None = None
    """The backend of a form."""
    dtype: str | None = None
    """The number format of a form."""
    variant: str | None = None
    """The variant of the method, in an ablation."""
    source: str | None = None
    """The model that this one was made from."""
    made: str | None = None
    """How the run made the model, as the second half of a sentence."""
    run: str | None = None
    """The run that measured it, in a comparison of runs."""


class Training(SchemaPart):
    """Cost and losses of the training."""

    steps: int
    tokens: int
    seconds: float
    tokens_per_second: float
    loss_first: float | None
    loss_last: float | None
    peak_memory_bytes: int
    resumed_from_step: int | None


class PublishedRow(SchemaPart):
    """A row of a paper's table.

    `shape` is the shape of the paper's model, where speed-ups or variants are compared. `values`
    has a value for each column. With a `task` and a `metric`, it has a value for each set, in per
    cent. `model` names our model that is the same variant of the method.
    """

    row: str
    source: str
    values: dict[str, float]
    shape: str | None = None
    task: str | None = None
    metric: str | None = None
    model: str | None = None


class CurvePoint(SchemaPart):
    """A logged step: the training loss and, after some steps, held-out losses and metrics.

    `loss` is without the regularizer of a pruning method, which held-out losses do not have.
    `held_out` gives the terms of the held-out loss of each model that is trained.
    """

    step: int
    loss: float | None
    held_out: dict[str, dict[str, float]] | None
    metrics: dict[str, float] | None = None


class ClassScore(SchemaPart):
    """Scores of one class. `span` tasks have the classes `answer` and `no answer`."""

    precision: float
    recall: float
    f1: float
    support: int


class Mistake(SchemaPart):
    """One of the worst examples, ordered by `error`: a loss, an error, or one minus F1.

    Reports of an earlier version call it `badness`.
    """

    id: str
    texts: list[str]
    label: str
    predicted: str
    error: float = Field(validation_alias=AliasChoices("error", "badness"))


class TrivialAnswer(SchemaPart):
    """The scores of always giving the same answer.

    The training labels choose the answer or, for a model that was not trained here, the labels of
    the evaluated rows.

    `answer` is the most frequent class, the most frequent tag of a word, the mean number or, for
    several labels, the label or set of labels with the best first metric on these rows. It
    is empty for rankings, whose scores are the expected ones of a random order.

    `is_beaten` is true if the first metric of the model is
    higher with 95 % confidence. If the same rows chose the step whose weights were kept, this is
    optimistic.
    """

    answer: str
    metrics: dict[str, float]
    is_beaten: bool


class Evaluation(SchemaPart):
    """The scores of one model on one set of a task.

    `set` is empty if the task has only one set. `reference` is what the outputs are compared with:
    the labels of the rows, or the teacher's outputs. `rows_sha256` is a hash of the examples that
    does not depend on their order. If a model was fine-tuned with several seeds, `metrics` are
    means over the seeds, and `deviations` are the sample standard deviations. `trivial` is given
    for models that were trained on labels, and for the first of the models that are compared.
    """

    model: str
    task: str
    set: str
    split: str
    n: int
    metrics: dict[str, float]
    reference: Literal["labels", "teacher"] = "labels"
    confusion: Confusion | None = None
    per_class: dict[str, ClassScore] = Field(default_factory=dict)
    worst: list[Mistake] = Field(default_factory=list)
    rows_sha256: str | None = None
    seeds: int = 1
    deviations: dict[str, float] = Field(default_factory=dict)
    trivial: TrivialAnswer | None = None
    classes: LabelAccount | None = None


class Comparison(SchemaPart):
    """A model's metric minus the baseline's on the same examples.

    `low` and `high` are the ends of its 95 % interval, see `kdcli.metrics.bootstrap`.
    `chosen_on_these_rows`: the same examples also chose the model, among steps, settings or
    candidates, so that the difference is optimistic.
    """

    model: str
    baseline: str
    task: str
    set: str
    metric: str
    difference: float
    low: float
    high: float
    confidence: float = 0.95
    chosen_on_these_rows: bool = False


class RunRow(SchemaPart):
    """One run of a grid: its settings and its metrics."""

    settings: dict[str, float | int | str]
    seed: int
    metrics: dict[str, float]


class Selection(SchemaPart):
    """The run that was chosen from several.

    The setting has the best mean of `metric` over its seeds, and the run has the best seed.
    """

    metric: str
    on: str
    settings: dict[str, float | int | str]
    seed: int
    runs: list[RunRow]


class PrunedMatrix(SchemaPart):
    """A masked matrix. `name` is its layer and type, such as `3.Q`.

    `kept` of its `weights` are not masked.
    """

    name: str
    layer: int
    kind: str
    weights: int
    kept: int


class Histogram(SchemaPart):
    """The distribution of the scores after a step.

    `counts[i]` scores lie between `edges[i]` and `edges[i + 1]`.
    """

    step: int
    edges: list[float]
    counts: list[int]


class DensityPoint(SchemaPart):
    """The share of the masked matrices' weights that is kept after a step."""

    step: int
    density: float


class Pruning(SchemaPart):
    """A pruned model.

    `sparsity` was requested, and `density` is the share of the weights that is left. `heads` has
    for each layer the share of Q, K, V and O that each attention head keeps.
    """

    model: str
    method: str
    masking: str | None
    sparsity: float
    density: float
    matrices: list[PrunedMatrix]
    heads: list[list[float]]
    curve: list[DensityPoint]
    histograms: list[Histogram]


class Trimming(SchemaPart):
    """The tokens that a trimmed model keeps.

    It has `kept` of `whole` tokens. All tokens that occur in the `texts` texts, with the tokens
    that are always kept, are `needed`. `coverage` has the share of each text's tokens that are
    kept, and `new` the estimated share of the tokens of further texts that are not.
    """

    kept: int
    whole: int
    needed: int
    coverage: dict[str, float]
    texts: int = 0
    new: float = 0.0

    @property
    def covered(self) -> str:
        """The share of each text, such as `99.120% of the training text`."""
        return ", ".join(f"{share:.3%} of {name}" for name, share in self.coverage.items())


class Throughput(SchemaPart):
    """Texts per second of a model in one cell, and the price of a million texts at that rate.

    An `unstable` measurement is stated by the 90th percentile of its time. `cost_per_million` is
    null if the report has no `price_per_hour`.
    """

    batch_size: int
    seq_len: int
    texts_per_second: float
    unstable: bool
    cost_per_million: float | None = None

    @classmethod
    def of(cls, row: LatencyRow, price_per_hour: float | None) -> Self:
        """Return the throughput of a measurement."""
        facts = row.priced(price_per_hour).model_dump(include=set(cls.model_fields))
        return cls(**facts, unstable=row.unstable)


class StepReport(SchemaPart):
    """The report of a step: the verb that made it, and its directory relative to the run's."""

    name: str
    command: str
    folder: str


class CascadeFacts(SchemaPart):
    """A cascade: `first` answers, and `second` is asked where `first` is unsure.

    `setting` is the threshold, or the number of candidates that `second` ranks. On the selection
    rows, `second` read the share `asked` of the texts. With 95 % confidence, at most the share
    `risk` of the answers differs from the teacher's; for rerankers, it is the mean loss.
    """

    first: str
    second: str
    setting: float
    asked: float
    risk: float

    @property
    def ranks(self) -> bool:
        """Whether `setting` is a number of candidates, because thresholds are below 1."""
        return self.setting >= 1


CandidateCost = str
"""A cost of a candidate: `ms` is its latency, `mb` its size, and others are keys of `costs`."""


class Candidate(SchemaPart):
    """A candidate of a compression. A candidate that was skipped has no numbers.

    `low` and `high` are the ends of the paired interval of `score`. `ms` and `speedup` are for one
    sequence of 128 tokens: `ms` is the median, or the 90th percentile if it is `unstable`.
    `speedup` is null for the teacher. `throughput` is from the largest batch that was measured of
    all candidates. `mb` is the size of the files, and `outcome` is the result in words.
    `dominated_by` names a candidate that is at least as good in score, size and latency and meets
    the same limits, if there is one. `costs` has further costs that a limit measures, by label.
    The `ms` of a `cascade` is a mean over the texts.
    """

    name: str
    score: float | None = None
    low: float | None = None
    high: float | None = None
    ms: float | None = None
    unstable: bool = False
    speedup: Speedup | None = None
    throughput: Throughput | None = None
    mb: float | None = None
    outcome: str
    dominated_by: str | None = None
    costs: dict[str, float] = Field(default_factory=dict)
    cascade: CascadeFacts | None = None

    def cost(self, cost: CandidateCost) -> float:
        """Return a cost of a candidate that was measured."""
        value = {"ms": self.ms, "mb": self.mb, **self.costs}[cost]
        assert value is not None, f"{self.name} was not measured"
        return value


class Verified(SchemaPart):
    """The scores of the teacher and the chosen candidate on the verification rows.

    These rows chose nothing. `low` and `high` are the ends of the paired interval of `score`, with
    the level `confidence`. `look` counts the answers that these rows gave. `reference` is what the
    outputs are compared with. `risk` is that of `CascadeFacts`, with the level `confidence`.
    """

    rows: int
    teacher: float
    score: float
    low: float
    high: float
    confidence: float
    look: int
    reference: Literal["labels", "teacher"]
    risk: float | None = None


class GoalLimit(SchemaPart):
    """A limit of the goal in words, and where a chart draws it.

    `axis` is `score` or a cost of the candidates, and `line` a value on it.
    """

    phrase: str
    axis: str = ""
    line: float | None = None


class Compression(SchemaPart):
    """The candidates of a compression, the teacher first.

    The numbers of the candidates are from `rows` selection rows, which chose among them.
    `steps` has the steps whose reports exist. `goal` has the limits that the user set, with
    `max_drop` in points. `missed` says by how much the goal is missed, and `advice` what to try. If
    only the verification rows miss the goal, `next_candidate` is the one that the same command
    verifies next.
    """

    task: str
    metric: str
    rows: int
    goal: dict[str, float]
    limits: list[GoalLimit] = Field(default_factory=list)
    strict: bool
    cascade: bool = False
    met: bool
    missed: str = ""
    chosen: str
    sentence: str
    advice: str = ""
    candidates: list[Candidate]
    next_candidate: str | None = None
    verification: Verified | None = None
    steps: list[StepReport] = Field(default_factory=list)


PARTS_OF_MODELS = (
    "latency",
    "evaluations",
    "comparisons",
    "decisions",
    "pruning",
    "failures",
    "agreements",
    "published",
)
"""Keys of a report with lists, each of whose items is about a model."""

PartT = TypeVar("PartT", bound=BaseModel)


def renamed(part: PartT, names: Mapping[str, str]) -> PartT:
    """Return a part of a report with the new names of the models that it names.

    A model that is not in `names` is no longer named.
    """
    update: dict[str, object] = {
        key: names.get(getattr(part, key))
        for key in ("model", "baseline", "of")
        if getattr(part, key, None) is not None
    }
    if isinstance(part, LatencyRow) and part.speedup is not None:
        update["speedup"] = renamed(part.speedup, names)
    if isinstance(part, Decision):
        update["calibration"] = {
            names[model]: each for model, each in part.calibration.items() if model in names
        }
    return part.model_copy(update=update)


class Report(SchemaPart):
    """The content of report.json.

    `focus` is the main subject of the report, which views show first. `compared_runs` has the
    curves of other runs by name. `command_line` is the command as it was typed, or null if the run
    was started from Python. `price_per_hour` is the price of the machine that the user gave, in a
    currency of the user's choice. `data_versions` has the commit of each data set of the
    hub that the run read, and the sha256 of the local files and directories that `data.source` and
    `text` name, as they were when the run opened them. In the directory, `sha256sum FILES |
    sha256sum` gives its hash. URLs and directories above 1,000 files or 2 GiB have none.
    """

    schema_version: Literal[2] = Field(SCHEMA, alias="schema")
    command: str
    status: Literal["done"]
    focus: Literal["quality", "latency"] = "quality"
    created: str
    versions: dict[str, str]
    environment: dict[str, Any]
    recipe: dict[str, Any]
    command_line: str | None = None
    price_per_hour: float | None = None
    data_versions: dict[str, str] = Field(default_factory=dict)
    models: list[ModelEntry]
    training: Training | None
    curve: list[CurvePoint]
    compared_runs: dict[str, list[CurvePoint]] = Field(default_factory=dict)
    quality: Quality
    latency: list[LatencyRow]
    published: list[PublishedRow]
    notes: list[str]
    evaluations: list[Evaluation] = Field(default_factory=list)
    comparisons: list[Comparison] = Field(default_factory=list)
    decisions: list[Decision] = Field(default_factory=list)
    selection: Selection | None = None
    pruning: list[Pruning] = Field(default_factory=list)
    trimming: Trimming | None = None
    failures: list[Failure] = Field(default_factory=list)
    agreements: list[Agreement] = Field(default_factory=list)
    accounts: list[RowAccount] = Field(default_factory=list)
    compression: Compression | None = None

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        names = [model.name for model in self.models]
        if len(set(names)) < len(names):
            raise ValueError(f"two models have one name: {', '.join(names)}")
        for where, name in self._references():
            if name is not None and name not in names:
                raise ValueError(f"{where} names the model '{name}', which is not in models")
        return self

    def _references(self) -> Iterator[tuple[str, str | None]]:
        """Yield every name of a model in the report, and where it is."""
        for model in self.models:
            yield f"the model '{model.name}'", model.baseline
            yield f"the model '{model.name}'", model.of
        for point in self.curve:
            yield from (("curve", name) for name in point.held_out or ())
        for task, by_model in self.quality.items():
            yield from ((f"quality of {task}", name) for name in by_model)
        for row in self.latency:
            yield "latency", row.speedup.baseline if row.speedup else None
        for where in PARTS_OF_MODELS:
            for part in getattr(self, where):
                yield from ((where, getattr(part, key, None)) for key in ("model", "baseline"))

    @property
    def source(self) -> str | None:
        """The source of the recipe's rows or text; None if the recipe names none."""
        data = self.recipe.get("data")
        source = data.get("source") if isinstance(data, dict) else None
        return source if isinstance(source, str) else None

    @property
    def cards(self) -> dict[str, Card]:
        """The models that have a card, by name, in the order of the report."""
        return {model.name: model.card for model in self.models if model.card is not None}

    def model(self, name: str) -> ModelEntry:
        """Return the model of this name, which must be in the report."""
        for model in self.models:
            if model.name == name:
                return model
        raise KeyError(name)

    def with_role(self, *roles: Role) -> list[ModelEntry]:
        """Return the models that have one of some roles, in the order of the report."""
        return [model for model in self.models if model.role in roles]

    def renamed(self, names: Mapping[str, str]) -> Self:
        """Return the models in `names` under their new names, with all that is known about them.

        The training, its curve, and other papers' rows belong to the run and are dropped.
        """

        def kept(parts: Sequence[PartT]) -> list[PartT]:
            known = {None, *names}
            return [
                renamed(part, names)
                for part in parts
                if {getattr(part, key, None) for key in ("model", "baseline")} <= known
            ]

        quality = {
            task: {names[name]: values for name, values in by_model.items() if name in names}
            for task, by_model in self.quality.items()
        }
        return self.model_copy(
            update={
                "models": [
                    renamed(model, names).model_copy(update={"name": names[model.name]})
                    for model in self.models
                    if model.name in names
                ],
                "training": None,
                "curve": [],
                "quality": {task: by_model for task, by_model in quality.items() if by_model},
                **{where: kept(getattr(self, where)) for where in PARTS_OF_MODELS},
                "published": [],
            }
        )

    def to_json(self) -> str:
        return self.model_dump_json(indent=2, by_alias=True) + "\n"


if __name__ == "__main__":
    print(json.dumps(Report.model_json_schema(), indent=2))
