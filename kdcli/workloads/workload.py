"""The base class of all workloads.

A workload is a kind of data together with everything needed to train and evaluate on it: the
examples, the loss, the scores, and how models are loaded and saved. Verbs only use this interface
and do not depend on the kind of data. To add a kind of data, add a module to this package that
defines `open_workload`, `open_evaluation` and `TASKS`, the names that `--task` accepts for it.

The verbs use workloads as follows:

    distill   `make_student`, then a weighted sum of a loss against targets and `hard`
    prune     `load`, then masks trained with `hard` and `soft`
    finetune  `load`, then `hard`
    cotrain   two models, with `hard` for each and `soft` between them
    evaluate, export, compress   `evaluate`

Rows may be unlabelled. In this case, `hard` returns no terms and the model is compared with its
teacher's outputs.
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
from kdcli.data.labelled.task_data import Labelled
from kdcli.deploy.exported import RunnerNetwork
from kdcli.deploy.runners import Runner
from kdcli.engine.launch import Session, make_schedule
from kdcli.engine.progress import Progress
from kdcli.errors import UsageError
from kdcli.metrics.bootstrap import CONFIDENCE, Scorer, paired_bootstrap
from kdcli.models.capture import Capture, capture, params_without_grad
from kdcli.models.load import save_model
from kdcli.models.model import Model
from kdcli.models.shape import InitializedStudent, build_student
from kdcli.recipe.sections import KdSettings, TrainSettings
from kdcli.report.schema import Comparison, Evaluation, Quality
from kdcli.targets.targets import StorePlace, Targets, targets_of
from kdcli.types import (
    Array,
    Batch,
    Count,
    Example,
    Examples,
    Job,
    ModelShape,
    Needs,
    Order,
    RowHashes,
    Schedule,
    Signals,
    StepLoss,
    Task,
    Term,
)
from kdcli.workloads.settings import (
    FinetuneTrainSettings,
    GenerationSettings,
    LabelledSettings,
    TaskHeadSettings,
)

RESAMPLES = 1000
LOGITS = Needs(logits=True)
OUTPUTS = ("logits", "start_logits", "end_logits", "last_hidden_state")
MODEL_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
DEFAULT_POOL = 64
"""Number of batches that are drawn together and grouped by row length."""
Keep = Literal["last", "best"]


@dataclass(frozen=True)
class WorkloadRequest:
    """A request to open a workload for training.

    Attributes:
        task: the value of `--task`.
        model: the model whose tokenizer reads the rows.
        data: the recipe's `data` section.
        head: settings of the task head.
        settings: keys of the recipe section that belongs to the workload.
        metrics: additional metrics from the `evaluate` library.
        choose_on: the evaluation set that decides which evaluation is best; None for the mean over
            all sets.
        seed: seed for the weights of a new head.
        new_head: add a new head to a model that has no fitting head. If False, such a model is
            refused.
        other_models: other models that the run scores or learns from. Rows that any of them was
            trained on are dropped from the evaluation.
        generates: whether the verb supports tasks that generate text.
        generation: masking and decoding settings of tasks that generate text.
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
        task: the value of `--task`.
        models: the models to evaluate. The first model decides whether heads or vectors are scored.
            If it has class names, they are also the class names of task `own`.
        data: the recipe's `data` section.
        trained: model -> hashes of the rows it was trained on. These rows are dropped.
        metrics: additional metrics from the `evaluate` library.
        pooling: pooling that turns plain encoders into embedding models.
        by_head: score heads even if the first model is an embedding model.
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
        evaluations: one evaluation per set, in the format of the report. `model` is empty.
        scorers: set -> function that maps row numbers to metrics, for paired bootstrap intervals.
        counts: set -> number of rows.
        predictions: one prediction per row, if the workload makes predictions.
        task: the task of the predictions.
        examples: set -> the examples of the predictions, with the labels they are compared with.
        temperature: the calibration temperature in the model's configuration, if it has one.
        notes: notes on how the model read the rows, for the report.
    """

    evaluations: list[Evaluation]
    scorers: Mapping[str, Scorer]
    counts: Mapping[str, int]
    predictions: Sequence[Any] = ()
    notes: Sequence[str] = ()
    task: Task | None = None
    examples: Mapping[str, Sequence[Example]] = field(default_factory=dict)
    temperature: float | None = None

    def rows(self, name: str) -> list[Evaluation]:
        """Return the evaluations with a model's name filled in."""
        return [row.model_copy(update={"model": name}) for row in self.evaluations]

    def against_teacher(self) -> ModelScores:
        """Return the same scores, marked as agreement with the teacher."""
        marked = [row.model_copy(update={"reference": "teacher"}) for row in self.evaluations]
        return replace(self, evaluations=marked)


@dataclass(frozen=True)
class EvaluationResult:
    """Scores of several models on the same rows, and their paired differences.

    Attributes:
        evaluations: the scores, as the report shows them.
        comparisons: the paired differences.
        scores: model -> its scores, with its predictions; empty if there are several sets of rows.
    """

    evaluations: list[Evaluation] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    scores: Mapping[str, ModelScores] = field(default_factory=dict)


def compare(
    task: str,
    scores: Mapping[str, ModelScores],
    baselines: Mapping[str, str] | None = None,
    *,
    chosen: Collection[str] = (),
    resamples: int = RESAMPLES,
    confidence: float = CONFIDENCE,
) -> EvaluationResult:
    """Gather the scores of several models and compare them on the same rows.

    Args:
        task: the task's name in the report.
        scores: model -> its scores.
        baselines: model -> the model it is compared with; None compares all models with the first.
        chosen: models whose step or settings were selected on the same rows.
        resamples: number of bootstrap resamples.
        confidence: level of the intervals.
    """
    first, *others = scores
    pairs = dict.fromkeys(others, first) if baselines is None else baselines
    evaluations = [row for name, of_model in scores.items() for row in of_model.rows(name)]
    comparisons: list[Comparison] = []
    for model, baseline in pairs.items():
        Progress.log(f"{resamples:,} resamples of {task}: {model} compared with {baseline}")
        for set_name, count in scores[model].counts.items():
            scorer, base = (scores[name].scorers[set_name] for name in (model, baseline))
            differences = paired_bootstrap(
                scorer, base, count, resamples=resamples, confidence=confidence
            )
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
                    confidence=confidence,
                    chosen_on_these_rows=model in chosen,
                )
                for metric, (difference, low, high) in differences.items()
            ]
    return EvaluationResult(evaluations, comparisons, scores)


class Plan(NamedTuple):
    """The order of the training examples and the schedule.

    Attributes:
        order: the examples of each step.
        schedule: number of steps and learning rates.
        steps_per_pass: optimiser steps in one pass over the examples.
    """

    order: Order
    schedule: Schedule
    steps_per_pass: float


class Workload(ABC):
    """A kind of data, with its losses, its scores, and the way its models are loaded and saved.

    Attributes:
        session: device, precision and processes.
        name: the task's name in reports and directories.
        notes: notes on the rows, for the report.
        split: the evaluation split.
        rows: hashes of the labelled training rows.
        metric: the main metric.
        needs: the signals that `hard` and `soft` read.
        over: the unit over which the losses are averaged.
        auto_class: the transformers class that loads a saved model.
        pipeline: the hub's name for the task; None for the default of `auto_class`.
        has_labels: whether the training rows have labels.
        has_classes: whether every row has exactly one class.
        has_metrics: whether `metrics` can score the outputs during training.
        one_pass: whether one forward pass computes a model's outputs, so that any runner can be
            used.
        held_out_size: number of sequences in a held-out example, relative to a training example.
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
        """Description of the rows that decide which evaluation or run is best."""
        return self.split

    # -- examples ---------------------------------------------------------------------------

    @property
    @abstractmethod
    def examples(self) -> Examples:
        """The training examples."""

    @property
    @abstractmethod
    def held_out(self) -> Examples:
        """The examples for evaluation during training."""

    @abstractmethod
    def plan(self, settings: TrainSettings) -> Plan:
        """Plan the order of the training examples and the schedule.

        Raises:
            UsageError: the warm-up is as long as the run.
        """

    @property
    def needs_reference(self) -> bool:
        """Whether `score` needs a teacher, because there is nothing else to compare with.

        `with_reference` returns a copy that has one.
        """
        return False

    def with_reference(self, teacher: Model) -> Workload:
        """Return a copy of the workload that evaluates against a teacher's outputs, not labels.

        This is used for unlabelled rows, for which `hard` returns no terms.

        Args:
            teacher: the teacher, in float32.

        Raises:
            UsageError: the workload requires labels.
        """
        raise self.unsupported("training or evaluation without labels")

    def unsupported(self, what: str) -> UsageError:
        """Return the error for an operation that the workload does not implement."""
        return UsageError(f"task {self.name} does not support {what}", "choose another task")

    # -- models -----------------------------------------------------------------------------

    @abstractmethod
    def load(
        self, source: str, *, head: TaskHeadSettings, seed: int = 0, new_head: bool = True
    ) -> Model:
        """Load a model for this workload.

        Args:
            source: the model.
            head: settings of the task head.
            seed: seed for the weights of a new head.
            new_head: add a new head to a model that has no fitting head.

        Raises:
            UsageError: the model cannot be used, or has no fitting head and `new_head` is False.
        """

    def load_teacher(self, source: str, reader: Model, *, head: TaskHeadSettings) -> Model:
        """Load a teacher that was trained for this workload.

        Args:
            source: the teacher.
            reader: the model whose tokenizer reads the rows.
            head: settings of the teacher's head.

        Raises:
            UsageError: the teacher cannot be used, or cannot read the same rows.
        """
        teacher = self.load(source, head=head, new_head=False)
        Progress.log(f"teacher {source}: {teacher.note}")
        return teacher

    def fits(self, source: str) -> bool:
        """Whether a model can be scored without training it first."""
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
        """Make a student encoder from a teacher's encoder.

        The training rows are used to fit the student to the teacher.

        Args:
            teacher: the model that the student is made from.
            shape: the student's shape.
            init: how the student's weights start.
            layers: teacher layers to copy; None for evenly spaced layers.
            dropout: the student's dropout; None keeps the teacher's.
            seed: seed for random weights.

        Raises:
            UsageError: the student cannot have this shape, initialisation or choice of layers.
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
        """The rows on which a student is fitted to its teacher."""
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
        """Make a complete student, including any head that this workload needs.

        Args:
            origin: the model that the student is made from.
            shape: the student's shape.
            init: how the student's weights start.
            layers: layers of `origin` to copy; None for evenly spaced layers.
            seed: seed for random weights.

        Raises:
            UsageError: the student cannot have this shape, initialisation or choice of layers.
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
        """Return a frozen teacher's signals for the training examples.

        Moves the teacher to the device and converts it to the compute dtype.

        Args:
            teacher: the teacher.
            needs: additional signals. The signals that `soft` reads are always included.
            passes: number of passes over the examples.
            place: where signals may be stored; None does not store them.
            dry_run: placeholders are sufficient.
        """
        needs = self.needs | needs
        return targets_of(teacher, self.examples, needs, self.session, passes=passes, place=place)

    def capture(self, model: Model, needs: Needs | None = None) -> Capture:
        """Wrap a model in a module that returns the workload's own signals and those in `needs`."""
        return capture(model.model, self.needs | (needs or Needs()))

    def save(self, model: Model, folder: Path, rows: RowHashes) -> None:
        """Save a model for use on this workload, with the hashes of its training rows."""
        save_model(model.model, model.tokenizer, folder, rows)

    def trains_head(self, head: TaskHeadSettings) -> bool:
        """Whether pruning also trains the head."""
        return True

    def mask_facts(self, head: TaskHeadSettings) -> dict[str, Any]:
        """Return the fields of `MaskInfo` that describe the task."""
        return {}

    def encode(self, model: Model, batch: Batch) -> list[Tensor]:
        """Compute a model's outputs for a batch on the CPU, to compare two forms of the model."""
        inputs = {name: x for name, x in batch.items() if name in MODEL_INPUTS}
        with torch.no_grad():
            outputs = model.model(**inputs)
        return [outputs[name] for name in OUTPUTS if name in outputs]

    def resemblance(self, models: Mapping[str, Model], reference: str) -> Quality:
        """Compare the models' outputs with the outputs of a reference model, for the report."""
        return {}

    # -- losses -----------------------------------------------------------------------------

    def forward(self, captured: Capture, batch: Batch) -> Signals:
        """Run a captured model on a batch."""
        signals: Signals = captured(batch)
        return signals

    @abstractmethod
    def hard(self, signals: Signals, batch: Batch) -> Mapping[str, Tensor]:
        """Compute the losses against the labels of a batch.

        Returns:
            Name in the log -> loss. Empty if there are no labels.
        """

    @abstractmethod
    def soft(
        self, teacher: Signals, student: Signals, batch: Batch, temperature: float
    ) -> Mapping[str, Tensor]:
        """Compute the losses of a student's outputs against a teacher's outputs.

        The teacher receives no gradient.

        Returns:
            Name in the log -> loss.
        """

    def outputs(self, signals: Signals, batch: Batch) -> Tensor | None:
        """Return the outputs of a batch for `metrics`, [B, ...]."""
        return signals.logits

    def metrics(self, outputs: Sequence[Array]) -> dict[str, float]:
        """Compute the metrics during training, from the outputs of all held-out examples."""
        return {}

    def job(self, model: Model, settings: TrainSettings, keep: Keep) -> tuple[Job, Schedule]:
        """Build the job that trains a model on the labels, and its schedule.

        Raises:
            UsageError: the rows have no labels.
        """
        self.require_labels()
        return self.model_job(model, settings, keep)

    def require_labels(self) -> None:
        """Check that the training rows have labels.

        Raises:
            UsageError: the rows have no labels.
        """
        if not self.has_labels:
            raise UsageError(
                f"task {self.name}: the training rows have no labels",
                "add labels, or use distill or prune, which can learn from a teacher's outputs",
            )

    def model_job(self, model: Model, settings: TrainSettings, keep: Keep) -> tuple[Job, Schedule]:
        """Build the job that trains a model with the loss `hard`, and its schedule.

        Without labels, the loss is zero. Parameters that do not affect the loss are frozen.
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
        """Build the job that trains a model on the labels and its teachers' targets.

        The loss is the sum of `mixed_terms`. For held-out rows without targets, only the labels
        count.

        Args:
            model: the student.
            settings: the recipe's `train` section.
            keep: the weights to keep.
            targets: the targets from each teacher.
            kd: weight and temperature of the distillation loss.
            extra_terms: computes additional terms from the signals of the first teacher and the
                student.
        """
        job, schedule = self.model_job(model, settings, keep)
        captured = job.modules["model"]
        assert isinstance(captured, Capture)
        examples, held_out = self.examples, self.held_out
        for of_teacher in targets:
            examples, held_out = of_teacher.attach(examples, held_out)

        def step(batch: Batch) -> StepLoss:
            # Must come first: it takes out of the batch the tensors that a model does not accept.
            teachers = [s for t in targets if (s := t.signals(batch)) is not None]
            student = self.forward(captured, batch)
            terms = self.mixed_terms(student, teachers, batch, kd)
            if extra_terms is not None and teachers:
                terms |= extra_terms(teachers[0], student)
            return StepLoss(terms, self.outputs(student, batch))

        return replace(job, step=step, examples=examples, held_out=held_out), schedule

    def mixed_terms(
        self,
        student: Signals,
        teachers: Sequence[Signals],
        batch: Batch,
        kd: KdSettings,
    ) -> dict[str, Term]:
        """Compute the terms of (1 - weight) * hard + weight * soft.

        `soft` is the mean over the teachers. Its gradient equals the gradient of the loss against
        the teachers' mean distribution. Without teachers, the labels get the full weight. Without
        labels, the teachers get it.
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
                total = sum((loss[name] for loss in losses), first.new_zeros(()))
                terms[name] = Term(weight * (total / len(losses)), self.over)
        return terms

    def training_job(
        self,
        modules: Mapping[str, torch.nn.Module],
        step: Callable[[Batch], StepLoss],
        order: Order,
        keep: Keep,
    ) -> Job:
        """Build a job over this workload's examples, with its metrics.

        Raises:
            UsageError: `keep` is "best", but the task has no metrics during training.
        """
        if keep == "best" and not self.has_metrics:
            raise UsageError(
                f"keep: best needs a metric during training, and task {self.name} has none",
                "use keep: last, the default",
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
        """Add the losses. Without losses, return a zero on the device of the signals."""
        values = list(losses.values())
        if values:
            return values[0] if len(values) == 1 else torch.stack(values).sum()
        first = next(t for t in (signals.logits, signals.pooled, signals.mask) if t is not None)
        return first.new_zeros((), dtype=torch.float32)

    # -- scores -----------------------------------------------------------------------------

    @property
    def predicted(self) -> Labelled | None:
        """The examples that `ModelScores.predictions` refer to; None if models predict no rows."""
        return None

    @property
    def row_count(self) -> int:
        """Number of evaluation rows."""
        raise self.unsupported("kdcli compress")

    @property
    def gated_metrics(self) -> Sequence[str]:
        """Metrics that a gate may use as a lower bound. With several sets, also `SET/METRIC`."""
        return (self.metric,)

    def texts_of_rows(self) -> list[str]:
        """Return the evaluation texts, on which the outputs of two models are compared."""
        raise self.unsupported("kdcli export --task")

    def rows_for(self, model: Model) -> TokenizedRows:
        """Tokenise the evaluation rows for a model, to measure its quantisation error on them."""
        raise self.unsupported("kdcli export --max-drop")

    @abstractmethod
    def score(self, model: Model, *, worst: int = 0) -> ModelScores:
        """Score a model or an export on the held-out rows.

        Args:
            model: the model.
            worst: number of mistakes per set to list in the report.
        """

    def evaluate(
        self,
        models: Mapping[str, Model],
        baselines: Mapping[str, str] | None = None,
        *,
        worst: int = 0,
        resamples: int = RESAMPLES,
    ) -> EvaluationResult:
        """Score several models on the same rows and compare them.

        Args:
            models: name -> model.
            baselines: model -> the model it is compared with; None compares all models with the
                first.
            worst: number of mistakes per set to list in the report.
            resamples: number of bootstrap resamples.
        """
        scores = {name: self.score(model, worst=worst) for name, model in models.items()}
        return self.compare(scores, baselines, resamples=resamples)

    def compare(
        self,
        scores: Mapping[str, ModelScores],
        baselines: Mapping[str, str] | None = None,
        *,
        resamples: int = RESAMPLES,
        confidence: float = CONFIDENCE,
    ) -> EvaluationResult:
        """Compare the scores of several models under this workload's name; see `compare`."""
        return compare(self.name, scores, baselines, resamples=resamples, confidence=confidence)

    def run_by(self, model: Model, runner: Runner, outputs: Sequence[str] | None = None) -> Model:
        """Return a copy of a model that uses a runner instead of PyTorch.

        Args:
            model: the model.
            runner: computes the outputs.
            outputs: names of the runner's outputs; None for the last hidden state or the logits.
        """
        network: Any = RunnerNetwork(runner, model.model.config)
        return replace(model, model=network)


def first_rows(examples: Examples) -> Batch:
    """Return a batch on the CPU with the first two examples, or with the only one."""
    return examples.batch(np.arange(min(2, len(examples))))


def freeze_unused(model: torch.nn.Module, loss: Tensor) -> list[str]:
    """Freeze the parameters that a loss does not depend on, and return their names.

    Otherwise weight decay would shrink them, and several processes would sum their zero gradients.
    """
    names = params_without_grad(dict(model.named_parameters()), loss)
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return names


def bucketed(lengths: Array, settings: TrainSettings, group: int) -> Plan:
    """Plan batches of groups of rows with similar lengths.

    A micro-batch is a group, unless `train.micro_batch_size` sets another size. The size decides
    nothing but the memory and the padding, so the same rows share a batch with any size.

    Args:
        lengths: number of tokens in each row.
        settings: the recipe's `train` section.
        group: number of rows in a group.

    Raises:
        UsageError: the warm-up is as long as the run.
    """
    pool = settings.pool if isinstance(settings, FinetuneTrainSettings) else DEFAULT_POOL
    order = BucketOrder(lengths, settings.batch_size, group, settings.seed, pool)
    schedule = make_schedule(settings, order.steps_of_pass)
    micro = settings.micro_batch_size or group
    return Plan(order, replace(schedule, micro_batch_size=micro), order.steps_of_pass)


def log_padding(order: Order) -> None:
    """Log the share of padding, and what it would be with random batches."""
    if not isinstance(order, BucketOrder):
        return
    lengths = order.lengths
    plain = BatchOrder(len(lengths), order.batch_size, order.seed)
    steps = range(1, min(200, order.steps_of_pass) + 1)
    drawn = [lengths[plain.indices(step)] for step in steps]
    random = 1 - sum(int(b.sum()) for b in drawn) / sum(len(b) * int(b.max()) for b in drawn)
    Progress.log(
        f"{len(lengths):,} rows of {lengths.mean():.0f} tokens on average; grouping by length "
        f"leaves {order.padding():.1%} padding (random batches: {random:.1%})"
    )
