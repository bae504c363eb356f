"""Labelled tasks: single labels, multiple labels, scores, token labels and answer spans.

Data flow: examples -> rows of tokens -> batches of similar length -> logits -> loss -> engine ->
predictions -> metrics.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kdcli.data.batches import BatchOrder
from kdcli.data.labelled.features import TokenizedRows, unknown_share
from kdcli.data.labelled.task_data import Labelled
from kdcli.data.text.shards import tokenizer_hash
from kdcli.deploy.exported import in_own_runtime, is_export
from kdcli.deploy.sparse.mask_file import TaskFacts
from kdcli.engine.evaluation import evaluate_job
from kdcli.engine.session import Session
from kdcli.errors import UsageError
from kdcli.losses.hard import hard_loss, mean_over
from kdcli.losses.soft_targets import soft_loss
from kdcli.messages import Fact, log_fact, warn
from kdcli.metrics.finite import check_finite
from kdcli.models.heads import AUTO_CLASS, load_for_task, misfit_of
from kdcli.models.identity import weights_hash
from kdcli.models.load import load_config
from kdcli.models.model import Model
from kdcli.models.shape import InitializedStudent
from kdcli.models.temperature import stored_temperature
from kdcli.recipe.sections import TrainSettings
from kdcli.report.text import percent
from kdcli.targets.cache import SignalStore, StorePlace
from kdcli.targets.outputs import load_or_compute_outputs
from kdcli.targets.targets import PrecomputedLogits, Targets, Teacher
from kdcli.types import (
    IGNORED,
    Array,
    Batch,
    Count,
    Examples,
    Job,
    Kind,
    ModelShape,
    Needs,
    RowHashes,
    Signals,
    Start,
    StepLoss,
    Term,
)
from kdcli.workloads.cascades import Cascade, describe_asked
from kdcli.workloads.embedder import network_outputs
from kdcli.workloads.predictions import (
    Evaluator,
    Features,
    Prediction,
    RowFormat,
    as_label,
    doubt_of_order,
    trivial_predictions,
)
from kdcli.workloads.scores import ModelScores
from kdcli.workloads.settings import LabelledSettings, TaskHeadSettings
from kdcli.workloads.static_students import static_classifier
from kdcli.workloads.task_models import (
    check_vocabulary,
    describe_cut,
    load_scored,
    load_trained,
    row_format,
    same_tokens,
)
from kdcli.workloads.training import Plan, bucketed, total_loss
from kdcli.workloads.workload import LOGITS, Workload

GROUP, SHORT_ROW = 8, 20
"""Number of rows of similar length in a batch, which is also the default size of a micro-batch, and
the mean row length up to which the number is doubled."""
"""The key that sets the maximum number of tokens of a row, for messages."""
MAX_UNKNOWN = 0.05
"""From this share of unknown tokens on, a warning asks whether model and text fit together."""
WORST = 20
"""Number of mistakes that the report of a training run lists."""
ROW_KINDS: tuple[Kind, ...] = ("class", "multi", "score")
"""Kinds of task with one output per row. Their teacher may use a different tokenizer, and their
student may be static."""


@dataclass
class LabelledWorkload(Workload[Model]):
    """A labelled task, tokenised for models that share a tokenizer.

    Attributes:
        data: The examples.
        settings: The recipe's `data` section.
        train: The tokenised training examples; None if the workload only evaluates.
        evaluator: The tokenised evaluation sets; None if every model uses its own tokenizer.
        max_length: Maximum number of tokens in a row; None if every model has its own maximum.
        tokenizer: The tokenizer of `train` and `evaluator`.
        metric_names: Additional metrics from Hugging Face's `evaluate` library.
        choose_on: The evaluation set that decides which evaluation is best; None for the mean over
            all sets.
        reference: The teacher whose outputs replace the labels; None if the labels are used.
    """

    session: Session
    data: Labelled
    settings: LabelledSettings
    train: Features | None
    evaluator: Evaluator | None
    max_length: int | None
    tokenizer: PreTrainedTokenizerBase | None = None
    notes: list[str] = field(default_factory=list)
    metric_names: Sequence[str] = ()
    choose_on: str | None = None
    reference: str | None = None

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.data.task.name

    @property
    def kind(self) -> Kind:
        """The kind of labels."""
        return self.data.task.kind

    @property
    def split(self) -> str:  # type: ignore[override]
        return self.data.split

    @property
    def rows(self) -> RowHashes:  # type: ignore[override]
        return self.data.rows

    @property
    def metric(self) -> str:  # type: ignore[override]
        return self.data.task.metrics[0]

    @property
    def has_labels(self) -> bool:  # type: ignore[override]
        return self.data.has_labels

    @property
    def has_classes(self) -> bool:  # type: ignore[override]
        return self.kind == "class" and self.has_labels

    @property
    def over(self) -> Count:  # type: ignore[override]
        over = mean_over(self.kind)
        # Without labels, the first token of each word is unknown, so all tokens count.
        return over if self.has_labels or over != "labels" else "tokens"

    @property
    def auto_class(self) -> str:  # type: ignore[override]
        return str(AUTO_CLASS[self.kind].__name__)

    @property
    def evaluated_on(self) -> str:
        """Description of the rows that decide which evaluation or run is best."""
        if self.choose_on:
            return f"{self.choose_on} {self.split}"
        several = "the mean over all sets of " if len(self.data.sets) > 1 else ""
        return f"{several}{self.split}"

    # -- examples ---------------------------------------------------------------------------

    @property
    def train_rows(self) -> TokenizedRows:
        """The training rows."""
        assert self.train is not None, "this workload only evaluates"
        return self.train.rows

    @property
    def examples(self) -> Examples:
        return self.train_rows

    @property
    def held_out(self) -> Examples:
        assert self.evaluator is not None
        return self.evaluator.features.rows

    def plan(self, settings: TrainSettings) -> Plan:
        lengths = self.train_rows.lengths
        # With too few tokens in a batch, the processor waits for the weights to load.
        group = 2 * GROUP if lengths.mean() <= SHORT_ROW else GROUP
        return bucketed(lengths, settings, group)

    def reads_as_it_is(self, model: Model) -> bool:
        """Return whether a model reads the rows as they were tokenised for another one."""
        if self.evaluator is None or not same_tokens(self.tokenizer, model.tokenizer):
            return False
        has_types = self.evaluator.features.rows.types_T is not None
        # The only text of a row has the default type.
        return has_types == model.token_types or len(self.data.task.texts) == 1

    def needs_own_rows(self, teacher: Model) -> bool:
        """Return whether a teacher's logits come from its own tokenisation of the rows.

        Labels of tokens belong to the tokens of the workload's rows, so all their teachers read
        these rows.
        """
        return self.kind in ROW_KINDS and not self.reads_as_it_is(teacher)

    def retokenize_for(self, model: Model) -> LabelledWorkload:
        """Tokenise the same examples for another model."""
        form = row_format(self.settings, self.data.task, model)
        train = self.train and Features.of(
            self.data.task, self.train.examples, model.tokenizer, form
        )
        evaluator = self.make_evaluator(model, form)
        if self.reference is not None:
            evaluator = evaluator.without_row_labels()
        return replace(
            self,
            train=train,
            evaluator=evaluator,
            max_length=form.max_length,
            tokenizer=model.tokenizer,
        )

    def trains_head(self, head: TaskHeadSettings) -> bool:
        # Heads of label words stay frozen.
        return head.kind == "scratch"

    def mask_facts(self, head: TaskHeadSettings) -> TaskFacts:
        task = self.data.task
        words = tuple(head.words or task.words) if head.kind != "scratch" else ()
        return TaskFacts(
            task=task.name, labels=task.labels, label_words=words, max_length=self.max_length
        )

    def with_examples(self, features: Features) -> LabelledWorkload:
        """Return a copy of the workload with other training examples."""
        return replace(self, train=features)

    @property
    def needs_reference(self) -> bool:
        return not self.has_labels and self.reference is None

    def with_reference(self, teacher: Model) -> LabelledWorkload:
        predictions = iter(self.predict(teacher))
        task = self.data.task
        sets = {
            name: [as_label(task, e, p) for e, p in zip(examples, predictions, strict=False)]
            for name, examples in self.data.sets.items()
        }
        workload = replace(self, data=replace(self.data, sets=sets), reference=teacher.source)
        if self.evaluator is not None:
            # Only the examples get the labels. The rows have none, so no loss can learn from them.
            examples = list(itertools.chain(*sets.values()))
            features = replace(self.evaluator.features, examples=examples)
            workload.evaluator = replace(self.evaluator, features=features)
        note = f"scores are the agreement with {teacher.source}: no labels were read"
        return replace(workload, notes=[*workload.notes, note])

    def make_evaluator(self, model: Model, form: RowFormat) -> Evaluator:
        """Tokenise the evaluation sets for a model."""
        task, sets = self.data.task, self.data.sets
        evaluator = Evaluator.of(task, sets, model.tokenizer, form, choose_on=self.choose_on)
        return evaluator.with_metrics(self.metric_names)

    def evaluator_for(self, model: Model) -> tuple[Evaluator, int]:
        """Return the evaluation sets tokenised for a model, and its maximum row length."""
        if self.reads_as_it_is(model):
            assert self.evaluator is not None
            assert self.max_length is not None
            return self.evaluator, self.max_length
        form = row_format(self.settings, self.data.task, model)
        return self.make_evaluator(model, form), form.max_length

    # -- models -----------------------------------------------------------------------------

    def load(
        self, source: str, *, head: TaskHeadSettings, seed: int = 0, new_head: bool = True
    ) -> Model:
        task = self.data.task
        if is_export(source) or not new_head:
            return load_scored(source, task, label_map=head.label_map)
        return load_trained(source, task, head, seed=seed)

    def load_teacher(
        self, source: str, reader: Model, *, head: TaskHeadSettings, own_tokens: bool = False
    ) -> Model:
        """Load a teacher that was fine-tuned on the task.

        Args:
            source: The teacher.
            reader: The model whose tokenizer is used.
            head: Settings of the teacher's head.
            own_tokens: Allow a teacher with a different vocabulary.

        Raises:
            UsageError: The teacher's head does not fit the task, or its vocabulary differs.
        """
        teacher = load_for_task(source, self.data.task, label_map=head.label_map, new_head=False)
        if not own_tokens:
            check_vocabulary(teacher, reader.tokenizer, reader.source)
        log_fact(f"teacher {source}: {teacher.note}")
        return teacher

    def misfit(self, source: str, label_map: Sequence[int] | None = None) -> str | None:
        config = load_config(source)
        return misfit_of(source, config, self.data.task, label_map)

    def make_student(
        self,
        teacher: Model,
        shape: ModelShape,
        start: Start,
    ) -> InitializedStudent:
        if shape.is_static:
            return static_classifier(
                self.train_rows,
                teacher,
                self.data.task,
                shape.hidden,
                self.session,
                init=start.init,
                seed=start.seed,
            )
        return super().make_student(teacher, shape, start)

    def save(self, model: Model, folder: Path, rows: RowHashes) -> None:
        # Users of the saved model must truncate rows at the length that it was trained with.
        model.tokenizer.model_max_length = self.max_length
        super().save(model, folder, rows)

    def targets(
        self,
        teacher: Model,
        needs: Needs,
        *,
        passes: float = 1.0,
        place: StorePlace | None = None,
        dry_run: bool = False,
    ) -> Targets:
        if not self.needs_own_rows(teacher):
            return super().targets(teacher, needs, passes=passes, place=place)
        if not dry_run and (place is None or not place.limit_bytes):
            raise UsageError(
                f"teacher {teacher.source} needs its own tokenisation of the rows (other tokens or "
                "token types), so its logits must be cached",
                "set cache_gb above 0",
            )
        return self.logits_by_own_tokens(teacher, place)

    def logits_by_own_tokens(self, teacher: Model, place: StorePlace | None) -> PrecomputedLogits:
        """Compute the logits of a teacher with rows of its own, once for every example.

        Args:
            teacher: The fine-tuned teacher.
            place: Where to store the logits; None returns zeros, for a dry run.

        Raises:
            UsageError: The logits do not fit in the store.
        """
        own = self.retokenize_for(teacher)
        assert own.evaluator is not None
        fingerprint = weights_hash(teacher.model)
        live = Teacher.frozen(teacher.source, teacher.model, LOGITS, self.session).captured
        parts = []
        for rows in (own.train_rows, own.evaluator.features.rows):
            logits_NC = np.zeros((len(rows), teacher.model.config.num_labels), np.float32)
            if place is not None:
                store = SignalStore.open(place, rows, live, LOGITS, fingerprint, self.session)
                if store is None:
                    raise UsageError(
                        "the teacher's logits do not fit on the disk",
                        "raise cache_gb, or free disk space",
                    )
                logits_NC[rows.example] = store.vectors(np.arange(len(rows)))
            parts.append(logits_NC)
        return self.precomputed(parts[0], parts[1])

    def precomputed(self, train_NC: Array, held_out_NC: Array | None) -> PrecomputedLogits:
        """Turn the logits of the examples, [N, C], into targets for their rows."""
        assert self.evaluator is not None
        example_of_row = self.evaluator.features.rows.example
        held_out_RC = None if held_out_NC is None else held_out_NC[example_of_row]
        return PrecomputedLogits(train_NC[self.train_rows.example], held_out_RC)

    # -- losses -----------------------------------------------------------------------------

    def hard(self, signals: Signals, batch: Batch) -> Mapping[str, Tensor]:
        if signals.labels is None:
            return {}
        assert signals.logits is not None
        mask_BL = batch["attention_mask"]
        return {"task": hard_loss(self.kind, signals.logits, signals.labels, mask_BL)}

    def soft(
        self, teacher: Signals, student: Signals, batch: Batch, temperature: float
    ) -> Mapping[str, Tensor]:
        assert teacher.logits is not None
        assert student.logits is not None
        labels = student.labels
        if labels is None and self.kind == "tokens":
            real_BL = batch["attention_mask"].bool()
            labels = torch.where(real_BL, 0, IGNORED)
        logits = teacher.logits, student.logits
        loss = soft_loss(self.kind, *logits, labels, batch["attention_mask"], temperature)  # type: ignore[arg-type]
        return {"kd": loss}

    def metrics(self, outputs: Sequence[Array]) -> dict[str, float]:
        assert self.evaluator is not None
        return self.evaluator.metrics(outputs)

    # -- scores -----------------------------------------------------------------------------

    @property
    def row_count(self) -> int:
        return sum(map(len, self.data.sets.values()))

    @property
    def gated_metrics(self) -> Sequence[str]:
        metrics = self.data.task.metrics
        # A gate is a lower bound, but errors and thresholds are not better when they are higher.
        higher = [m for m in metrics if m != "mse" and not m.endswith("_threshold")]
        return [*higher, *(f"{name}/{m}" for name in self.data.sets if name for m in higher)]

    @property
    def predicted(self) -> Labelled:
        return self.data

    def texts_of_rows(self) -> list[str]:
        return [" ".join(e.texts) for rows in self.data.sets.values() for e in rows]

    def score(self, model: Model, *, worst: int = 0) -> ModelScores:
        evaluator, max_length = self.evaluator_for(model)
        predictions = self.predict(model, evaluator)
        truncated = evaluator.features.rows.truncated
        cut = truncated / max(1, sum(map(len, self.data.sets.values())))
        file = next((rows[0].file for rows in self.data.sets.values() if rows), "")
        of_cut = describe_cut(self.kind, "examples", cut, max_length, model, file)
        unknown, warnings = describe_unknown(evaluator.features.rows, model)
        warn(*warnings)
        asked = describe_asked(predictions)
        notes = ["; ".join([model.note, *asked, *of_cut, *unknown]), *warnings]
        scores = scores_of(evaluator, self.split, predictions, worst, notes)
        doubts = [
            doubt
            for each in scores.evaluations
            if (doubt := doubt_of_order(self.data.task, each)) is not None
        ]
        if doubts and self.reference is None:
            warn(*doubts)
            scores = replace(scores, notes=[*scores.notes, *doubts])
        scores = replace(scores, temperature=stored_temperature(model.model.config))
        if self.reference is None:
            return scores
        is_own = all(
            as_label(evaluator.task, example, prediction) == example
            for example, prediction in zip(evaluator.features.examples, predictions, strict=True)
        )
        return scores.against_teacher(is_own=is_own)

    def trivial(self, model: Model) -> ModelScores | None:
        if not self.has_labels:
            return None
        evaluator, _ = self.evaluator_for(model)
        examples = evaluator.features.examples
        if self.train is None and all(each.label == examples[0].label for each in examples):
            # Rows of one class cannot tell a model from the same answer to all.
            return None
        chosen_from = examples if self.train is None else self.train.examples
        predictions = trivial_predictions(self.data.task, chosen_from, examples)
        own_metrics = replace(evaluator, extra_metrics=())
        return scores_of(own_metrics, self.split, predictions) if predictions else None

    def predict(self, model: Model, evaluator: Evaluator | None = None) -> list[Prediction]:
        """Predict all evaluation examples with a model, or with an export in its own runtime."""
        if evaluator is None:
            evaluator, _ = self.evaluator_for(model)
        if isinstance(model, Cascade):
            return model.answers(self.predict)
        network = in_own_runtime(model.model)
        if network is not None:
            outputs = network_outputs(network, evaluator.features.rows, self.session)
        else:
            outputs = load_or_compute_outputs(
                model.model,
                lambda: weights_hash(model.model),
                evaluator.features.rows,
                self.session,
                lambda: evaluate_job(self.session, self.evaluation_job(model, evaluator)).outputs,
            )
        for row in outputs:
            check_finite(row, f"outputs of {model.source} for a row")
        return evaluator.features.predictions(outputs)

    def evaluation_job(self, model: Model, evaluator: Evaluator) -> Job:
        """Build a job that only runs a model on the evaluation rows."""
        captured, rows = self.capture(model), evaluator.features.rows

        def step(batch: Batch) -> StepLoss:
            signals = self.forward(captured, batch)
            losses = self.hard(signals, batch)
            loss = Term(total_loss(losses, signals), self.over)
            return StepLoss({"loss": loss}, self.outputs(signals, batch))

        order = BatchOrder(max(1, len(rows)), 1, 0)
        modules = {"model": captured}
        return Job(modules, step, rows, order, rows, compute_metrics=evaluator.metrics)


def describe_unknown(rows: TokenizedRows, model: Model) -> tuple[list[str], list[str]]:
    """Return a note on the share of unknown tokens, or a warning if it is large.

    Both are empty if the tokenizer knows every token.
    """
    share = unknown_share(rows, model.tokenizer)
    if not share:
        return [], []
    if share < MAX_UNKNOWN:
        return [f"{percent(share, 1)}% of the tokens are unknown"], []
    warning = (
        f"the tokenizer of {model.source} does not know {share:.0%} of the tokens: is the text in "
        "another language, or in other letters, than the model's vocabulary?"
    )
    return [], [Fact(warning, f"unknown tokens of {tokenizer_hash(model.tokenizer)}")]


def scores_of(
    evaluator: Evaluator,
    split: str,
    predictions: Sequence[Prediction],
    worst: int = 0,
    notes: Sequence[str] = (),
) -> ModelScores:
    """Score predictions for all evaluation examples."""
    counts = {name: end - begin for name, (begin, end) in evaluator.bounds.items()}
    evaluations = evaluator.evaluations("", split, predictions, worst)
    all_examples = evaluator.features.examples
    return ModelScores(
        evaluations,
        evaluator.scorers(predictions),
        counts,
        predictions,
        notes,
        task=evaluator.task,
        examples={name: all_examples[begin:end] for name, (begin, end) in evaluator.bounds.items()},
    )
