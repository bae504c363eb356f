"""The protocol that every kind of data follows.

A workload is a kind of data together with what it means to be good at it: how to load a model for
it, its examples, its loss, its scores, and how its models are saved. Verbs know workloads, and no
kind of data. A new kind of data is one file in this package that defines `TASKS`, the names under
which `--task` finds it, and `open_workload`.

    distill   make_student + a loss against targets + `hard`, weighted
    prune     load + masks + `hard` and `soft`
    finetune  load + `hard`
    cotrain   two models, `hard` of each and `soft` between them
    evaluate, export, compress   `evaluate`

Rows without labels are part of the protocol: `hard` then has no term, and a model is compared with
its teacher's outputs.
"""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kdcli.data.batches import BatchOrder, BucketOrder
from kdcli.data.labelled.features import TokenizedRows
from kdcli.deploy.exported import RunnerNetwork
from kdcli.deploy.runners import Runner
from kdcli.engine.launch import Session, make_schedule
from kdcli.engine.progress import Progress
from kdcli.errors import UsageError
from kdcli.metrics.bootstrap import Scorer, paired_bootstrap
from kdcli.models.capture import Capture, capture, params_without_grad
from kdcli.models.load import save_model
from kdcli.models.model import Model
from kdcli.models.shape import InitializedStudent, build_student
from kdcli.recipe.sections import KdSettings, TrainSettings
from kdcli.report.schema import Comparison, Evaluation, Quality
from kdcli.targets.targets import StorePlace, Targets, targets_of
from kdcli.types import (
    Batch,
    Count,
    Examples,
    Job,
    ModelShape,
    Needs,
    Order,
    RowHashes,
    Schedule,
    Signals,
    StepLoss,
    Term,
)
from kdcli.workloads.settings import (
    FinetuneTrainSettings,
    GenerationSettings,
    LabelledSettings,
    TaskHeadSettings,
)

Array = np.ndarray[Any, Any]
RESAMPLES = 1000
LOGITS = Needs(logits=True)
OUTPUTS = ("logits", "start_logits", "end_logits", "last_hidden_state")
MODEL_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
DEFAULT_POOL = 64
"""Batches whose groups of rows of similar length are formed together."""
Keep = Literal["last", "best"]


@dataclass(frozen=True)
class WorkloadRequest:
    """A request to open a workload for training.

    Attributes:
        task: the name given to `--task`.
        model: the model whose tokenizer reads the rows.
        data: where the rows are and how they are read.
        head: settings of a task head.
        settings: keys of the workload's own section of the recipe.
        metrics: further metrics of the `evaluate` library.
        choose_on: the set that chooses among evaluations; None for the mean over all sets.
        seed: of a new head.
        new_head: whether a model without a fitting head gets a new one. Otherwise it is refused.
        other_models: further models that the run scores or learns from. Rows that trained any of
            them are dropped from the evaluation.
        generates: whether the verb handles tasks whose targets are texts.
        generation: how such targets are masked and decoded.
    """

    task: str
    model: str
    data: LabelledSettings
    head: TaskHeadSettings = field(default_factory=TaskHeadSettings)
    settings: Mapping[str, Any] = field(default_factory=dict)
    metrics: Sequence[str] = ()
    choose_on: str | None = None
    seed: int = 0
    new_head: bool = True
    other_models: Sequence[str] = ()
    generates: bool = False
    generation: GenerationSettings = field(default_factory=GenerationSettings)


@dataclass(frozen=True)
class EvaluationRequest:
    """A request to open a workload for evaluating models.

    Attributes:
        task: the name given to `--task`.
        models: the evaluated models. The first decides between head and vectors, and names the
            classes of an own task if it has any.
        data: where the rows are and how they are read.
        trained: model -> hashes of the rows that trained it, which are dropped.
        metrics: further metrics of the `evaluate` library.
        pooling: makes plain encoders embedding models.
        by_head: models are scored by their heads, whatever the first one is.
    """

    task: str
    models: Sequence[str]
    data: LabelledSettings
    trained: Mapping[str, RowHashes] = field(default_factory=dict)
    metrics: Sequence[str] = ()
    pooling: str | None = None
    by_head: bool = False


@dataclass(frozen=True)
class ModelScores:
    """The scores of one model.

    Attributes:
        evaluations: one per set of rows, as a report shows them; `model` is still empty.
        scorers: set -> function from row numbers to metrics, for paired intervals.
        counts: set -> number of rows.
        predictions: one per row, if the workload predicts rows.
        notes: facts about how the model read the rows.
    """

    evaluations: list[Evaluation]
    scorers: Mapping[str, Scorer]
    counts: Mapping[str, int]
    predictions: Sequence[Any] = ()
    notes: Sequence[str] = ()

    def rows(self, name: str) -> list[Evaluation]:
        """The evaluations under a model's name."""
        return [row.model_copy(update={"model": name}) for row in self.evaluations]

    def against_teacher(self) -> ModelScores:
        """The same scores, marked as agreement with a teacher."""
        marked = [row.model_copy(update={"reference": "teacher"}) for row in self.evaluations]
        return replace(self, evaluations=marked)


@dataclass(frozen=True)
class EvaluationResult:
    """Scores of several models on the same rows, and their paired differences."""

    evaluations: list[Evaluation] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)


def compare(
    task: str,
    scores: Mapping[str, ModelScores],
    baselines: Mapping[str, str] | None = None,
    *,
    chosen: Collection[str] = (),
    resamples: int = RESAMPLES,
) -> EvaluationResult:
    """Gather the scores of several models and compare them on the same rows.

    Args:
        task: the task's name in the report.
        scores: model -> its scores.
        baselines: model -> the model it is compared with; None compares all with the first.
        chosen: models that were chosen, among steps or settings, on the very rows.
        resamples: number of bootstrap resamples.
    """
    first, *others = scores
    pairs = dict.fromkeys(others, first) if baselines is None else baselines
    evaluations = [row for name, found in scores.items() for row in found.rows(name)]
    comparisons: list[Comparison] = []
    for model, baseline in pairs.items():
        Progress.log(f"{resamples:,} resamples of {task}: {model} compared with {baseline}")
        for set_name, count in scores[model].counts.items():
            ours, theirs = (scores[each].scorers[set_name] for each in (model, baseline))
            differences = paired_bootstrap(ours, theirs, count, resamples=resamples)
            comparisons += [
                Comparison(
                    model=model,
                    baseline=baseline,
                    task=task,
                    set=set_name,
                    metric=metric,
                    difference=difference,
                    low=low,
                    high=high,
                    chosen_on_these_rows=model in chosen,
                )
                for metric, (difference, low, high) in differences.items()
            ]
    return EvaluationResult(evaluations, comparisons)


class Plan(NamedTuple):
    """When which examples are trained on.

    Attributes:
        order: the examples of each step.
        schedule: steps and learning rates.
        steps_per_pass: optimiser steps in one pass over the examples.
    """

    order: Order
    schedule: Schedule
    steps_per_pass: float


class Workload(ABC):
    """A kind of data and what it means to be good at it.

    Attributes:
        session: where everything is computed.
        name: the task's name in reports and directories.
        notes: facts about the rows for the report.
        split: the split that is evaluated.
        rows: hashes of the labelled training rows.
        metric: the metric that a single number means.
        needs: the signals that `hard` and `soft` read.
        over: what the losses are means over.
        auto_class: the class of transformers that loads a saved model.
        pipeline: the hub's name of the task; None for the one of `auto_class`.
        has_labels: whether the training rows have labels.
        has_classes: whether each row has one class.
        has_metrics: whether `metrics` can score the outputs during training.
        one_pass: whether a model's outputs take one forward pass, so that any runner can compute
            them.
        held_out_size: size of a held-out example relative to a training example, in sequences.
    """

    session: Session
    name: str
    notes: list[str]
    split: str
    rows: RowHashes
    metric: str
    needs: Needs = LOGITS
    over: Count = "rows"
    auto_class: str = "AutoModel"
    pipeline: str | None = None
    has_labels: bool = True
    has_classes: bool = False
    has_metrics: bool = True
    one_pass: bool = True
    held_out_size: float = 1.0

    @property
    def evaluated_on(self) -> str:
        """Description of the rows that the best evaluation or run is chosen on."""
        return self.split

    # -- examples ---------------------------------------------------------------------------

    @property
    @abstractmethod
    def examples(self) -> Examples:
        """The training examples."""

    @property
    @abstractmethod
    def held_out(self) -> Examples:
        """The examples that are evaluated during training."""

    @abstractmethod
    def plan(self, settings: TrainSettings) -> Plan:
        """The order of the training examples and the schedule.

        Raises:
            UsageError: the warm-up is as long as the run.
        """

    def with_reference(self, teacher: Model) -> Workload:
        """The same examples, whose evaluation compares with a teacher's outputs, not with labels.

        Used for rows without labels, for which `hard` returns no term. The teacher is in float32.

        Raises:
            UsageError: this workload cannot be used without labels.
        """
        raise self.unsupported("training or evaluation without labels")

    def unsupported(self, what: str) -> UsageError:
        """The error for an operation that a workload does not implement."""
        return UsageError(f"task {self.name} does not support {what}", "choose another task")

    # -- models -----------------------------------------------------------------------------

    @abstractmethod
    def load(
        self, source: str, *, head: TaskHeadSettings, seed: int = 0, new_head: bool = True
    ) -> Model:
        """Load a model for this workload.

        Raises:
            UsageError: the model cannot be used, or has no fitting head and gets none.
        """

    def load_teacher(self, source: str, reader: Model, *, head: TaskHeadSettings) -> Model:
        """Load a model that was trained for this workload, to learn from.

        Args:
            reader: the model whose tokenizer reads the rows.

        Raises:
            UsageError: the model cannot be used, or cannot read the same rows.
        """
        teacher = self.load(source, head=head, new_head=False)
        Progress.log(f"teacher {source}: {teacher.note}")
        return teacher

    def fits(self, source: str) -> bool:
        """Whether a model can be scored as it is, without training it first."""
        return True

    def make_student(
        self,
        teacher: Model,
        shape: ModelShape,
        *,
        init: str = "teacher",
        layers: list[int] | None = None,
        dropout: float | None = None,
        seed: int = 0,
    ) -> InitializedStudent:
        """Make an encoder of a shape from a teacher's encoder, fitted to it on the training rows.

        Raises:
            UsageError: see `kdcli.models.shape.build_student`.
        """
        return build_student(
            teacher.model.base_model,
            shape,
            init=init,
            layers=layers,
            dropout=dropout,
            text=self.sample,
            seed=seed,
        )

    @property
    def sample(self) -> Examples | None:
        """Rows that a student is fitted to its teacher on."""
        return self.examples

    def student(
        self,
        origin: Model,
        shape: ModelShape,
        *,
        init: str = "teacher",
        layers: list[int] | None = None,
        seed: int = 0,
    ) -> Model:
        """Make a whole model of a shape, with what this workload has on top of an encoder.

        Raises:
            UsageError: see `kdcli.models.shape.build_student`.
        """
        built = self.make_student(origin, shape, init=init, layers=layers, seed=seed)
        with tempfile.TemporaryDirectory() as aside:
            save_model(built.model, origin.tokenizer, Path(aside), origin.rows)
            student = self.load(aside, head=TaskHeadSettings(), seed=seed)
        return replace(student, source=origin.source)

    def targets(
        self,
        teacher: Model,
        needs: Needs,
        *,
        passes: float = 1.0,
        place: StorePlace | None = None,
        dry_run: bool = False,
    ) -> Targets:
        """The signals of a frozen teacher for the training examples.

        The teacher is on the device and in the compute dtype afterwards.

        Args:
            needs: further signals; what `soft` reads is always included.
            passes: number of times that training reads the examples.
            place: where signals may be stored.
            dry_run: stand-ins will do.
        """
        needs = self.needs | needs
        return targets_of(teacher, self.examples, needs, self.session, passes=passes, place=place)

    def capture(self, model: Model, needs: Needs | None = None) -> Capture:
        """Wrap a model in a module that returns the signals of this workload and `needs`."""
        return capture(model.model, self.needs | (needs or Needs()))

    def save(self, model: Model, folder: Path, rows: RowHashes) -> None:
        """Save a model that `rows` trained in the form that this workload's users load."""
        save_model(model.model, model.tokenizer, folder, rows)

    def trains_head(self, head: TaskHeadSettings) -> bool:
        """Whether pruning trains what lies on top of the encoder."""
        return True

    def mask_facts(self, head: TaskHeadSettings) -> dict[str, Any]:
        """Fields of `MaskInfo` that describe the task."""
        return {}

    def encode(self, model: Model, batch: Batch) -> list[Tensor]:
        """A model's outputs for a batch on the CPU, to compare two forms of one model."""
        inputs = {name: x for name, x in batch.items() if name in MODEL_INPUTS}
        with torch.no_grad():
            outputs = model.model(**inputs)
        return [outputs[name] for name in OUTPUTS if name in outputs]

    def resemblance(self, models: Mapping[str, Model], reference: str) -> Quality:
        """How near the models' outputs are to a reference model's, for the report."""
        return {}

    # -- losses -----------------------------------------------------------------------------

    def forward(self, captured: Capture, batch: Batch) -> Signals:
        """Run a captured model on a batch."""
        signals: Signals = captured(batch)
        return signals

    @abstractmethod
    def hard(self, signals: Signals, batch: Batch) -> Mapping[str, Tensor]:
        """The losses against the labels of a batch, by their names in the log; none without
        labels."""

    @abstractmethod
    def soft(
        self, teacher: Signals, student: Signals, batch: Batch, temperature: float
    ) -> Mapping[str, Tensor]:
        """The losses of a student's outputs against a teacher's, by their names in the log. No
        gradient reaches the teacher."""

    def outputs(self, signals: Signals, batch: Batch) -> Tensor | None:
        """The outputs of a batch that `metrics` reads, [B, ...]."""
        return signals.logits

    def metrics(self, outputs: Sequence[Array]) -> dict[str, float]:
        """The metrics during training, from the outputs of all held-out examples in order."""
        return {}

    def job(self, model: Model, settings: TrainSettings, keep: Keep) -> tuple[Job, Schedule]:
        """The job that trains one model against the labels, and its schedule.

        Raises:
            UsageError: the rows have no labels.
        """
        self.require_labels()
        return self.model_job(model, settings, keep)

    def require_labels(self) -> None:
        """Raise a `UsageError` if the training rows have no labels."""
        if not self.has_labels:
            raise UsageError(
                f"task {self.name}: the rows have no labels to train on",
                "distill or prune learn from a teacher's outputs instead",
            )

    def model_job(self, model: Model, settings: TrainSettings, keep: Keep) -> tuple[Job, Schedule]:
        """A job over one model, `model`, whose loss is the labels'; without labels it is zero.

        Parameters that the labels' loss does not reach are frozen.
        """
        captured = self.capture(model)
        plan = self.plan(settings)

        def step(batch: Batch) -> StepLoss:
            signals = self.forward(captured, batch)
            loss = self.total(self.hard(signals, batch), signals)
            return StepLoss({"loss": Term(loss, self.over)}, self.outputs(signals, batch))

        job = self.training_job({"model": captured}, step, plan.order, keep)
        batch = first_rows(self.examples)
        signals = self.forward(captured, batch)
        outputs = next(x for x in (signals.logits, signals.pooled) if x is not None)
        losses = self.hard(signals, batch)
        freeze_unused(captured, self.total(losses, signals) if losses else outputs.sum())
        return job, plan.schedule

    def taught_job(
        self,
        model: Model,
        settings: TrainSettings,
        keep: Keep,
        targets: Sequence[Targets],
        kd: KdSettings,
        extra_terms: Callable[[Signals, Signals], Mapping[str, Term]] | None = None,
    ) -> tuple[Job, Schedule]:
        """The job that trains one model against the labels and its teachers' targets.

        The loss is that of `mixed_terms`. Held-out rows without targets count by their labels
        alone.

        Args:
            extra_terms: further terms, from the signals of the first teacher and of the model.
        """
        job, schedule = self.model_job(model, settings, keep)
        captured = job.modules["model"]
        assert isinstance(captured, Capture)
        examples, held_out = self.examples, self.held_out
        for each in targets:
            examples, held_out = each.attach(examples, held_out)

        def step(batch: Batch) -> StepLoss:
            # First, because it takes tensors out of the batch that no model reads.
            taught = [s for each in targets if (s := each.signals(batch)) is not None]
            own = self.forward(captured, batch)
            terms = self.mixed_terms(own, taught, batch, kd)
            if extra_terms is not None and taught:
                terms |= extra_terms(taught[0], own)
            return StepLoss(terms, self.outputs(own, batch))

        return replace(job, step=step, examples=examples, held_out=held_out), schedule

    def mixed_terms(
        self,
        student: Signals,
        teachers: Sequence[Signals],
        batch: Batch,
        kd: KdSettings,
    ) -> dict[str, Term]:
        """The terms of (1 - weight) * hard + weight * soft.

        `soft` is the mean over the teachers, whose gradient is that of the loss against their mean
        distribution. Without teachers the labels have the whole weight, and without labels the
        teachers.
        """
        hard = self.hard(student, batch)
        if not teachers:
            terms = {name: Term(value, self.over) for name, value in hard.items()}
            return terms or {"loss": Term(self.total({}, student), self.over)}
        weight = kd.weight if hard else 1.0
        terms = {}
        if weight < 1:
            terms = {name: Term((1 - weight) * v, self.over) for name, v in hard.items()}
        if weight > 0:
            losses = [self.soft(t, student, batch, kd.temperature) for t in teachers]
            for name, first in losses[0].items():
                total = sum((each[name] for each in losses), first.new_zeros(()))
                terms[name] = Term(weight * (total / len(losses)), self.over)
        return terms

    def training_job(
        self,
        modules: Mapping[str, torch.nn.Module],
        step: Callable[[Batch], StepLoss],
        order: Order,
        keep: Keep,
    ) -> Job:
        """A job over this workload's examples, with its metrics.

        Raises:
            UsageError: `keep` needs a metric during training, which this task does not have.
        """
        if keep == "best" and not self.has_metrics:
            raise UsageError(
                f"keep: best needs a metric during training, and task {self.name} has none",
                "omit keep; the last weights are kept",
            )
        return Job(
            modules,
            step,
            self.examples,
            order,
            self.held_out,
            compute_metrics=self.metrics if self.has_metrics else None,
            best=self.metric if keep == "best" else None,
            held_out_size=self.held_out_size,
        )

    @staticmethod
    def total(losses: Mapping[str, Tensor], signals: Signals) -> Tensor:
        """The sum of some losses; zero, on the device of the signals, if there are none."""
        values = list(losses.values())
        if values:
            return values[0] if len(values) == 1 else torch.stack(values).sum()
        first = next(t for t in (signals.logits, signals.pooled, signals.mask) if t is not None)
        return first.new_zeros((), dtype=torch.float32)

    # -- scores -----------------------------------------------------------------------------

    @property
    def row_count(self) -> int:
        """Number of evaluated rows."""
        raise self.unsupported("kdcli compress")

    @property
    def gated_metrics(self) -> Sequence[str]:
        """The metrics that a gate may bound from below; `SET/METRIC` for one of several sets."""
        return (self.metric,)

    def texts_of_rows(self) -> list[str]:
        """The evaluated texts, to compare outputs on."""
        raise self.unsupported("kdcli export --task")

    def rows_for(self, model: Model) -> TokenizedRows:
        """The evaluated rows as a model's tokens, to measure the error of its products on."""
        raise self.unsupported("kdcli export --max-drop")

    @abstractmethod
    def score(self, model: Model, *, worst: int = 0) -> ModelScores:
        """Score a model, an export included, on the held-out rows.

        Args:
            worst: the number of mistakes per set that the report lists.
        """

    def evaluate(
        self,
        models: Mapping[str, Model],
        baselines: Mapping[str, str] | None = None,
        *,
        worst: int = 0,
        resamples: int = RESAMPLES,
    ) -> EvaluationResult:
        """Score several models on the same rows and compare them; see `compare`."""
        scores = {name: self.score(model, worst=worst) for name, model in models.items()}
        return self.compare(scores, baselines, resamples=resamples)

    def compare(
        self,
        scores: Mapping[str, ModelScores],
        baselines: Mapping[str, str] | None = None,
        *,
        resamples: int = RESAMPLES,
    ) -> EvaluationResult:
        """Gather the scores of several models and compare them; see `compare`."""
        return compare(self.name, scores, baselines, resamples=resamples)

    def run_by(self, model: Model, runner: Runner, outputs: Sequence[str] | None = None) -> Model:
        """A model whose outputs a runner computes in place of torch.

        Args:
            outputs: names of the runner's outputs; None for the last hidden state or the logits.
        """
        network: Any = RunnerNetwork(runner, model.model.config)
        return replace(model, model=network)


def first_rows(examples: Examples) -> Batch:
    """A batch of two rows, on the CPU, or of one if there is no other."""
    return examples.batch(np.arange(min(2, len(examples))))


def freeze_unused(model: torch.nn.Module, loss: Tensor) -> list[str]:
    """Exclude the parameters that a loss does not depend on from training; return their names.

    Weight decay would shrink them, and several processes would sum their zero gradients.
    """
    names = params_without_grad(dict(model.named_parameters()), loss)
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return names


def bucketed(lengths: Array, settings: TrainSettings, group: int) -> Plan:
    """Plan batches of groups in which rows have similar lengths.

    Args:
        lengths: tokens of each row.
        group: rows in a group, which is a micro-batch.

    Raises:
        UsageError: the warm-up is as long as the run.
    """
    pool = settings.pool if isinstance(settings, FinetuneTrainSettings) else DEFAULT_POOL
    order = BucketOrder(lengths, settings.batch_size, group, settings.seed, pool)
    schedule = make_schedule(settings, order.steps_of_pass)
    return Plan(order, replace(schedule, micro_batch_size=group), order.steps_of_pass)


def log_padding(order: Order) -> None:
    """Log the share of padding, and the share that random batches would have."""
    if not isinstance(order, BucketOrder):
        return
    lengths = order.lengths
    plain = BatchOrder(len(lengths), order.batch_size, order.seed)
    steps = range(1, min(200, order.steps_of_pass) + 1)
    drawn = [lengths[plain.indices(step)] for step in steps]
    random = 1 - sum(int(b.sum()) for b in drawn) / sum(len(b) * int(b.max()) for b in drawn)
    Progress.log(
        f"{len(lengths):,} rows of {lengths.mean():.0f} tokens on average; grouping by length "
        "leaves "
        f"{order.padding():.1%} padding (random batches: {random:.1%})"
    )
