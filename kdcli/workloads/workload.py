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
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic

import torch
from torch import Tensor
from typing_extensions import TypeVar

from kdcli.data.labelled.task_data import Labelled
from kdcli.deploy.exported import RunnerNetwork
from kdcli.deploy.runners import Runner
from kdcli.deploy.sparse.mask_file import TaskFacts
from kdcli.engine.session import Session
from kdcli.errors import UsageError
from kdcli.messages import log, log_fact
from kdcli.metrics.bootstrap import CONFIDENCE
from kdcli.models.capture import Capture, capture
from kdcli.models.choose import Comparison, Pooling, mean_pooling, rows_to_compare
from kdcli.models.heads import check_linear_head, student_with_fitted_head
from kdcli.models.load import save_model
from kdcli.models.model import Model
from kdcli.models.shape import InitializedStudent, build_student
from kdcli.recipe.sections import KdSettings, Section, TrainSettings
from kdcli.report.finish import Entry, ReportContents
from kdcli.report.schema import Quality
from kdcli.targets.cache import StorePlace
from kdcli.targets.targets import Targets, targets_of
from kdcli.types import (
    Array,
    Batch,
    Count,
    Examples,
    Job,
    ModelShape,
    Needs,
    Outcome,
    RowHashes,
    Schedule,
    Signals,
    Start,
)
from kdcli.workloads.scores import RESAMPLES, EvaluationResult, ModelScores, compare
from kdcli.workloads.settings import TaskHeadSettings
from kdcli.workloads.training import Keep, Plan, model_job

M = TypeVar("M", bound=Model, default=Any)
LOGITS = Needs(logits=True)
OUTPUTS = ("logits", "start_logits", "end_logits", "last_hidden_state")
MODEL_INPUTS = ("input_ids", "attention_mask", "token_type_ids")


class Workload(ABC, Generic[M]):
    """A kind of data, with its losses, its scores, and the way its models are loaded and saved.

    `M` is the class of its models.

    Attributes:
        session: Device, precision and processes.
        name: The task's name in reports and directories.
        notes: Notes on the rows, for the report.
        split: The evaluation split.
        rows: Hashes of the labelled training rows.
        metric: The main metric.
        needs: The signals that `hard` and `soft` read.
        over: The unit over which the losses are averaged.
        auto_class: The transformers class that loads a saved model.
        pipeline: The hub's name for the task; None for the default of `auto_class`.
        has_labels: Whether the training rows have labels.
        has_classes: Whether every row has exactly one class.
        has_metrics: Whether `metrics` can score the outputs during training.
        one_pass: Whether one forward pass computes a model's outputs, so that any runner can be
            used.
        held_out_size: Number of sequences in a held-out example, relative to a training example.
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
            UsageError: The warm-up is as long as the run.
        """

    @property
    def needs_reference(self) -> bool:
        """Whether `score` needs a teacher, because there is nothing else to compare with.

        `with_reference` returns a copy that has one.
        """
        return False

    def with_reference(self, teacher: M) -> Workload[M]:
        """Return a copy of the workload that evaluates against a teacher's outputs, not labels.

        This is used for unlabelled rows, for which `hard` returns no terms.

        Args:
            teacher: The teacher, in float32.

        Raises:
            UsageError: The workload requires labels.
        """
        raise self.unsupported("training or evaluation without labels")

    def unsupported(self, what: str) -> UsageError:
        """Return the error for an operation that the workload does not implement."""
        return UsageError(f"task {self.name} does not support {what}", "choose another task")

    # -- models -----------------------------------------------------------------------------

    @abstractmethod
    def load(
        self, source: str, *, head: TaskHeadSettings, seed: int = 0, new_head: bool = True
    ) -> M:
        """Load a model for this workload.

        Args:
            source: The model.
            head: Settings of the task head.
            seed: Seed for the weights of a new head.
            new_head: Add a new head to a model that has no fitting head.

        Raises:
            UsageError: The model cannot be used, or has no fitting head and `new_head` is False.
        """

    def load_teacher(self, source: str, reader: M, *, head: TaskHeadSettings) -> M:
        """Load a teacher that was trained for this workload.

        Args:
            source: The teacher.
            reader: The model whose tokenizer reads the rows.
            head: Settings of the teacher's head.

        Raises:
            UsageError: The teacher cannot be used, or cannot read the same rows.
        """
        teacher = self.load(source, head=head, new_head=False)
        log_fact(f"teacher {source}: {teacher.note}")
        return teacher

    def needs_own_rows(self, teacher: M) -> bool:
        """Whether a teacher's outputs come from its own tokenisation of the rows."""
        return False

    def misfit(self, source: str, label_map: Sequence[int] | None = None) -> str | None:
        """Return why a model cannot be scored before it is trained; None if it can.

        Args:
            source: The model.
            label_map: The data's class of each output of its head; None for the names of both.
        """
        return None

    def make_student(
        self,
        teacher: M,
        shape: ModelShape,
        start: Start,
    ) -> InitializedStudent:
        """Make a student encoder from a teacher's encoder.

        The training rows are used to fit the student to the teacher.

        Args:
            teacher: The model that the student is made from.
            shape: The student's shape.
            start: How the student's weights start.

        Raises:
            UsageError: The student cannot have this shape, initialisation or choice of layers.
        """
        return build_student(
            teacher.model.base_model,
            shape,
            start,
            text=self.sample,
            dtype=self._dtype_of_fit(teacher),
        )

    @property
    def sample(self) -> Examples | None:
        """The rows on which a student is fitted to its teacher."""
        return self.examples

    def text_pooling(self, model: M) -> Pooling:
        """Return how hidden states become the vector by which texts are compared."""
        return mean_pooling

    def comparison(self, teacher: M, rows: int) -> Comparison:
        """Compare untrained students with a teacher on this number of training rows."""
        assert self.sample is not None, "this workload only evaluates"
        encoder = teacher.model.base_model
        texts = rows_to_compare(self.sample, encoder.config, rows)
        dtype = self._dtype_of_fit(teacher)
        return Comparison(encoder, texts, self.text_pooling(teacher), dtype)

    def _dtype_of_fit(self, teacher: M) -> torch.dtype:
        """Return the number format in which a teacher and its student run while they are fitted.

        A teacher that is still on the CPU runs in float32 there if the session's format was chosen
        for another device.
        """
        is_chosen_for = teacher.model.device.type == self.session.device.type
        return self.session.compute_dtype if is_chosen_for else torch.float32

    def student(
        self,
        origin: M,
        shape: ModelShape,
        start: Start,
    ) -> M:
        """Make a complete student, including any head that this workload needs.

        Args:
            origin: The model that the student is made from.
            shape: The student's shape.
            start: How the student's weights start.

        Raises:
            UsageError: The student cannot have this shape, initialisation or choice of layers.
        """
        built = self.make_student(origin, shape, start)
        with tempfile.TemporaryDirectory() as aside:
            save_model(built.model, origin.tokenizer, Path(aside), origin.rows)
            student = self.load(aside, head=TaskHeadSettings(), seed=start.seed)
        return replace(student, source=origin.source)

    def fitted_student(
        self,
        teacher: M,
        shape: ModelShape,
        start: Start,
    ) -> M:
        """Make a complete student that is used without training; see `student`.

        Any head is fitted to the teacher's outputs, because a new one would return noise.

        Raises:
            UsageError: The student cannot be made, or the teacher has no head to fit it to.
        """
        check_linear_head(teacher)
        built = self.make_student(teacher, shape, start)
        for note in built.notes:
            log(note)
        assert self.sample is not None
        # A table of token vectors is fitted on the device.
        teacher.model.cpu()
        return student_with_fitted_head(
            teacher, built, self.sample, init=start.init, seed=start.seed
        )

    def adapt_student(self, student: M, teacher: M) -> None:
        """Adapt a new student to the teacher whose outputs it learns."""
        return

    def targets(
        self,
        teacher: M,
        needs: Needs,
        *,
        passes: float = 1.0,
        place: StorePlace | None = None,
        dry_run: bool = False,
    ) -> Targets:
        """Return a frozen teacher's signals for the training examples.

        Moves the teacher to the device and converts it to the compute dtype.

        Args:
            teacher: The teacher.
            needs: Additional signals. The signals that `soft` reads are always included.
            passes: Number of passes over the examples; 0 if only held-out examples are read.
            place: Where signals may be stored; None does not store them.
            dry_run: Placeholders are sufficient.
        """
        needs = self.needs | needs
        return targets_of(teacher, self.examples, needs, self.session, passes=passes, place=place)

    def capture(self, model: M, needs: Needs | None = None) -> Capture:
        """Wrap a model in a module that returns the workload's own signals and those in `needs`."""
        return capture(model.model, self.needs | (needs or Needs()))

    def save(self, model: M, folder: Path, rows: RowHashes) -> None:
        """Save a model for use on this workload, with the hashes of its training rows."""
        save_model(model.model, model.tokenizer, folder, rows)

    def trains_head(self, head: TaskHeadSettings) -> bool:
        """Whether pruning also trains the head."""
        return True

    def mask_facts(self, head: TaskHeadSettings) -> TaskFacts:
        """Return the fields of `MaskInfo` that describe the task."""
        return TaskFacts()

    def encode(self, model: M, batch: Batch) -> list[Tensor]:
        """Compute a model's outputs for a batch on the CPU, to compare two forms of the model."""
        inputs = {name: x for name, x in batch.items() if name in MODEL_INPUTS}
        with torch.no_grad():
            outputs = model.model(**inputs)
        return [outputs[name] for name in OUTPUTS if name in outputs]

    def resemblance(self, models: Mapping[str, M], reference: str) -> Quality:
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

    def kd_settings(self, given: KdSettings) -> KdSettings:
        """Return how a teacher's outputs are weighted against the labels.

        Args:
            given: The recipe's `kd` section.
        """
        return given

    def check_given_outputs(self) -> None:
        """Check that the data hold the outputs of a teacher, for a distillation without a teacher.

        Raises:
            UsageError: The data hold no outputs.
        """
        raise self.unsupported("distillation without a teacher")

    def job(self, model: M, settings: TrainSettings, keep: Keep) -> tuple[Job, Schedule]:
        """Build the job that trains a model on the labels, and its schedule.

        Raises:
            UsageError: The rows have no labels.
        """
        self.require_labels()
        return model_job(self, model, settings, keep)

    def require_labels(self) -> None:
        """Check that the training rows have labels.

        Raises:
            UsageError: The rows have no labels.
        """
        if not self.has_labels:
            raise UsageError(
                f"task {self.name}: the training rows have no labels",
                "add labels, or use distill or prune, which can learn from a teacher's outputs",
            )

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

    @abstractmethod
    def score(self, model: M, *, worst: int = 0) -> ModelScores:
        """Score a model or an export on the held-out rows.

        Args:
            model: The model.
            worst: Number of mistakes per set to list in the report.
        """

    def score_trained(
        self, model: M, outputs: Sequence[Array] | None, *, worst: int = 0
    ) -> ModelScores:
        """Score a model after its training.

        Args:
            model: The model.
            outputs: The outputs of the last evaluation, if it was of these weights. A workload may
                use them instead of computing them again.
            worst: Number of mistakes per set to list in the report.
        """
        return self.score(model, worst=worst)

    def trivial(self, model: M) -> ModelScores | None:
        """Score the same answer to all held-out rows.

        The training labels alone choose it or, where nothing is trained, the labels of these rows.
        For rankings, it is a random order. A model that has learned something scores higher.
        Returns None if there is no such answer.

        Args:
            model: A model that is scored on the same rows.
        """
        return None

    def evaluate(
        self,
        models: Mapping[str, M],
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
            worst: Number of mistakes per set to list in the report.
            resamples: Number of bootstrap resamples.
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

    def report(
        self,
        command: str,
        recipe: Section,
        entries: Sequence[Entry],
        outcome: Outcome | None = None,
        *,
        result: EvaluationResult | None = None,
        notes: Sequence[str] = (),
    ) -> ReportContents:
        """Begin the report of a run on this data.

        Args:
            command: The verb.
            recipe: The recipe that repeats the run.
            entries: The models that took part.
            outcome: The outcome of the training; None if nothing was trained.
            result: Their scores.
            notes: Further notes than the workload's own.
        """
        result = result or EvaluationResult()
        return ReportContents(
            command,
            recipe,
            list(entries),
            outcome,
            evaluations=result.evaluations,
            comparisons=result.comparisons,
            notes=[*self.notes, *notes],
            auto_class=self.auto_class,
            pipeline=self.pipeline,
        )

    def run_by(self, model: M, runner: Runner, outputs: Sequence[str] | None = None) -> M:
        """Return a copy of a model that uses a runner instead of PyTorch.

        Args:
            model: The model.
            runner: Computes the outputs.
            outputs: Names of the runner's outputs; None for the last hidden state or the logits.
        """
        network: Any = RunnerNetwork(runner, model.model.config)
        return replace(model, model=network)
