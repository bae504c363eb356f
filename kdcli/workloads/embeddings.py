"""Training and evaluation of embedding models, which encode texts as vectors.

Training uses unlabelled texts: sentences, documents, or the two sides of pairs. Evaluation needs no
fine-tuning. It uses pairs of texts with a score, which is correlated with the cosine of their
vectors, texts with classes, on whose vectors regressions are fitted, and retrieval, in which the
vectors rank a corpus for each query.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from kdcli.data.labelled.features import TokenizedRows
from kdcli.data.labelled.partition import DividedRows, Partition
from kdcli.data.labelled.task_data import Labelled
from kdcli.data.text.sentences import Texts, held_out_count, read_texts
from kdcli.deploy.runners import Runner
from kdcli.deploy.sparse.mask_file import TaskFacts
from kdcli.disk import cache_dir
from kdcli.engine.session import Session
from kdcli.errors import UsageError
from kdcli.losses import build_objective
from kdcli.losses.embedding import check_dimensions
from kdcli.messages import log, log_fact
from kdcli.models.capture import Capture, capture
from kdcli.models.choose import Pooling
from kdcli.models.embedding_format import Pool, read_format, save_embedder
from kdcli.models.model import NO_ROWS
from kdcli.recipe.methods import own_settings
from kdcli.recipe.sections import RecipeValues, Section, TrainSettings
from kdcli.report.front import EMBEDDER
from kdcli.report.schema import Quality
from kdcli.targets.cache import DEFAULT_GROUPS, GroupSize, SignalStore, StorePlace
from kdcli.targets.targets import (
    LazyVectors,
    Teacher,
    Vectors,
    VectorTargets,
    anchors_of,
)
from kdcli.types import (
    Array,
    Batch,
    Examples,
    ModelShape,
    Needs,
    Objective,
    RowHashes,
    Signals,
    Start,
)
from kdcli.workloads.agreement import TeacherAgreement, vectors_of_texts
from kdcli.workloads.beir import RETRIEVAL, open_index, read_retrieval
from kdcli.workloads.embedder import Embedder, cosines
from kdcli.workloads.embedding_texts import (
    TextRows,
    column_of_texts,
    divided_texts,
    evaluated_texts,
    read_all,
)
from kdcli.workloads.eval_sets import (
    ClassEvaluation,
    EvalSet,
    PairEvaluation,
    RetrievalEvaluation,
    open_eval_sets,
    open_labelled_set,
)
from kdcli.workloads.labelled_tasks import open_rows as open_labelled_rows
from kdcli.workloads.requests import EvaluationRequest, WorkloadRequest
from kdcli.workloads.scores import RESAMPLES, EvaluationResult, ModelScores, compare
from kdcli.workloads.settings import POOLING, PoolingName, TaskHeadSettings
from kdcli.workloads.training import Plan, bucketed
from kdcli.workloads.workload import MODEL_INPUTS, Workload

TASKS = ("embedding", "retrieval")
METHOD = "embedding"
GROUP = 16
"""Number of rows of similar length in a batch, and by default in a micro-batch."""
HELD_OUT = 256
"""Number of held-out texts, but at most a tenth of all texts."""
POOLED = Needs(pooled=True)
MAX_BYTES_AT_ONCE = 1 << 22
"""Bytes of texts, with padding, that a server is asked for in one forward pass."""


class Settings(Section):
    """The `workload` section of verbs that train embedding models."""

    pooling: PoolingName | None = Field(None, description=POOLING)
    unit: Literal["sentence", "document"] = "sentence"
    """Training unit: single sentences, or whole documents."""
    rows: int | None = Field(None, gt=1)
    """Maximum number of texts (default: all)."""
    anchors: int = Field(1024, gt=0)
    """Number of anchor texts of the similarity and contrastive losses."""
    cache_gb: float = Field(20.0, gt=0)
    """Disk budget for the teacher's vectors, in GB; later runs reuse them."""


@dataclass
class EmbeddingWorkload(Workload[Embedder]):
    """Training texts for embedding models, and the sets on which their vectors are scored.

    Attributes:
        reader: The model whose tokenizer reads the texts; None if the workload only evaluates.
        texts: Distinct texts; None if the workload only evaluates.
        eval_sets: Data sets for evaluation.
        settings: The recipe's `workload` section.
        loss: The recipe's `loss` section, with the settings of the embedding loss.
        max_length: Maximum number of tokens in a text; None for the reader's own maximum.
        held_out_texts: Number of held-out texts.
        seed: Seed for drawing the anchors.
        partitioned: Number of held-out texts if a partition chose them, else None.
    """

    session: Session
    reader: Embedder | None
    texts: Texts | None
    eval_sets: Sequence[EvalSet]
    settings: Settings = field(default_factory=Settings)
    loss: RecipeValues = field(default_factory=dict)
    max_length: int | None = None
    held_out_texts: int = HELD_OUT
    seed: int = 0
    notes: list[str] = field(default_factory=list)
    name: str = METHOD
    split: str = "held-out texts"
    metric: str = "spearman"
    auto_class: str = EMBEDDER
    needs: Needs = POOLED
    has_labels: bool = False
    has_metrics: bool = False
    rows: RowHashes = field(default_factory=NO_ROWS.copy)
    partitioned: int | None = None
    _tokens: TokenizedRows | None = None
    _objective: Objective | None = None

    # -- examples ---------------------------------------------------------------------------

    @property
    def tokens(self) -> TokenizedRows:
        """All texts, tokenised for the reader."""
        if self._tokens is None:
            assert self.reader is not None
            texts = self.all_texts
            self._tokens = self.reader.tokenize(texts.texts, texts.roles, self.max_length)
            log_fact(
                f"{len(self._tokens):,} texts of {self._tokens.lengths.mean():.0f} tokens on "
                "average"
            )
        return self._tokens

    @property
    def all_texts(self) -> Texts:
        """All texts, with the held-out texts first."""
        assert self.texts is not None, "this workload only evaluates"
        return self.texts

    @property
    def held(self) -> int:
        """Number of held-out texts, which come first."""
        if self.partitioned is not None:
            return self.partitioned
        return held_out_count(self.all_texts.texts, self.held_out_texts)

    @property
    def train_numbers(self) -> Array:
        """Numbers of the training texts."""
        return np.arange(self.held, len(self.all_texts))

    @property
    def examples(self) -> Examples:
        return TextRows(self.tokens, self.train_numbers)

    @property
    def held_out(self) -> Examples:
        return TextRows(self.tokens, np.arange(self.held))

    @property
    def sample(self) -> Examples:
        """About a thousand training texts."""
        step = max(1, (len(self.tokens) - self.held) // 1000)
        return self.tokens.take(np.arange(self.held, len(self.tokens))[::step])

    def text_pooling(self, model: Embedder) -> Pooling:
        return Pool(model.format)

    @property
    def needs_reference(self) -> bool:
        return not self.eval_sets

    def with_reference(self, teacher: Embedder) -> EmbeddingWorkload:
        texts = self.all_texts.take(np.arange(self.held))
        if len(texts) < 2:
            raise UsageError(
                f"agreement with {teacher.source} compares texts with each other, and there is "
                "only 1 text to score",
                "give more texts; if the task trains a model, a tenth of them is scored",
            )
        vectors_NE = vectors_of_texts(teacher, texts, self.session)
        agreement = TeacherAgreement(texts, vectors_NE, self.session, self.seed, self.split)
        note = f"scores are the agreement with {teacher.source} on {len(texts):,} texts"
        return replace(self, eval_sets=[*self.eval_sets, agreement], notes=[*self.notes, note])

    def plan(self, settings: TrainSettings) -> Plan:
        return bucketed(self.tokens.lengths[self.train_numbers], settings, GROUP)

    # -- models -----------------------------------------------------------------------------

    def load(
        self, source: str, *, head: TaskHeadSettings, seed: int = 0, new_head: bool = True
    ) -> Embedder:
        pooling = self.settings.pooling
        if new_head:
            return Embedder.open(source, pooling=pooling)
        return Embedder.open_scored(source, pooling=pooling)

    def capture(self, model: Embedder, needs: Needs | None = None) -> Capture:
        pool = Pool(model.format).requires_grad_(False)
        return capture(model.model, self.needs | (needs or Needs()), pool)

    def save(self, model: Embedder, folder: Path, rows: RowHashes) -> None:
        save_embedder(model.model, model.tokenizer, model.format, folder, rows)

    def trains_head(self, head: TaskHeadSettings) -> bool:
        # No vector depends on a pooler.
        return False

    def mask_facts(self, head: TaskHeadSettings) -> TaskFacts:
        assert self.reader is not None
        own = read_format(self.reader.source) is not None
        pooling = None if own else self.reader.format.pooling
        return TaskFacts(pooling=pooling, max_length=self.reader.max_length)

    def encode(self, model: Embedder, batch: Batch) -> list[Tensor]:
        inputs = {name: x for name, x in batch.items() if name in MODEL_INPUTS}
        with torch.no_grad():
            states_BLD = model.model(**inputs).last_hidden_state
            return [Pool(model.format)(states_BLD, batch["attention_mask"])]

    def targets(
        self,
        teacher: Embedder,
        needs: Needs,
        *,
        passes: float = 1.0,
        place: StorePlace | None = None,
        dry_run: bool = False,
    ) -> VectorTargets:
        assert self.reader is not None
        width, teacher_width = (e.format.width(e.shape.hidden) for e in (self.reader, teacher))
        if width != teacher_width:
            raise UsageError(
                f"the teacher {teacher.source} has vectors of {teacher_width} numbers, but "
                f"{self.reader.source} has vectors of {width}",
                "choose a teacher with the same vector size",
            )
        tokens, texts = self.tokens, self.all_texts
        if teacher.source != self.reader.source:
            tokens = teacher.tokenize(texts.texts, texts.roles, self.max_length)
        vectors = self.vectors_of(teacher, tokens, dry_run=dry_run, stored=passes > 0)
        count = self.settings.anchors
        anchors_RE = anchors_of(vectors, self.train_numbers, count, self.seed)
        if passes > 0:
            # All vectors are stored, so the teacher is not needed on the device any more.
            teacher.model.cpu()
        return VectorTargets(vectors, texts, anchors_RE.to(self.session.device))

    # -- losses -----------------------------------------------------------------------------

    @property
    def objective(self) -> Objective:
        """The embedding loss between two models of the reader's shape.

        Raises:
            UsageError: The settings compare tokens, which requires the teacher in every step.
        """
        if self._objective is None:
            assert self.reader is not None
            shape = self.reader.shape
            objective = build_objective(METHOD, self.loss, shape, shape)
            if objective.teacher_needs != Needs():
                raise UsageError(
                    "loss.relations_weight and loss.hidden_weight work with kdcli distill, not "
                    "with prune",
                    "set both to 0",
                )
            check_dimensions(self.loss, self.reader.format.width(shape.hidden))
            self._objective = objective
        return self._objective

    def hard(self, signals: Signals, batch: Batch) -> Mapping[str, Tensor]:
        return {}

    def soft(
        self, teacher: Signals, student: Signals, batch: Batch, temperature: float
    ) -> Mapping[str, Tensor]:
        return self.objective.terms(teacher, student)

    def outputs(self, signals: Signals, batch: Batch) -> Tensor | None:
        return None

    def fitted_student(
        self,
        teacher: Embedder,
        shape: ModelShape,
        start: Start,
    ) -> Embedder:
        # Vectors need no head.
        return self.student(teacher, shape, start)

    def vectors_of(
        self, teacher: Embedder, tokens: TokenizedRows, *, dry_run: bool, stored: bool = True
    ) -> Vectors:
        """Compute a teacher's vectors for the texts, or read them from the cache.

        Freezes the teacher, moves it to the device and converts it to the compute dtype.

        Args:
            teacher: The teacher.
            tokens: The texts, tokenised for the teacher.
            dry_run: Return random vectors and leave the teacher unchanged.
            stored: Compute all vectors now, and store them. Otherwise they are computed when they
                are read, because few of them are.

        Raises:
            UsageError: The vectors take more than `workload.cache_gb`, or do not fit on the disk.
        """
        if dry_run:
            if teacher.rows_at_once is not None:
                log(
                    f"{teacher.source} would be asked for the vectors of {len(tokens):,} texts, "
                    "except stored ones"
                )
            width = teacher.format.width(teacher.model.config.hidden_size)
            return lambda at: np.random.default_rng(0).standard_normal(
                (len(at), width), dtype=np.float32
            )
        session, pool = self.session, Pool(teacher.format)
        frozen = Teacher.frozen(teacher.source, teacher.model, POOLED, session, pool)
        if not stored:
            return LazyVectors(frozen, tokens, session.device)
        fingerprint = f"{teacher.fingerprint}-{session.compute_dtype}"
        limit = int(self.settings.cache_gb * 1e9)
        place = StorePlace(cache_dir() / "vectors", limit, teacher.source)
        rows = teacher.rows_at_once
        size = DEFAULT_GROUPS if rows is None else GroupSize(MAX_BYTES_AT_ONCE, rows)
        teaches = frozen.captured
        store = SignalStore.open(place, tokens, teaches, POOLED, fingerprint, session, size)
        if store is None:
            raise UsageError(
                "the teacher's vectors do not fit on the disk",
                "raise workload.cache_gb, or lower workload.rows",
            )
        return store.vectors

    # -- scores -----------------------------------------------------------------------------

    @property
    def row_count(self) -> int:
        if self.needs_reference:
            return self.held
        return sum(eval_set.row_count for eval_set in self.eval_sets)

    def texts_of_rows(self) -> list[str]:
        texts: list[str] = []
        if self.texts is not None:
            return self.texts.texts[: self.held]
        for eval_set in self.eval_sets:
            if isinstance(eval_set, RetrievalEvaluation):
                retrieval = eval_set.data
                texts += [*retrieval.queries.values(), *retrieval.documents.values()]
            elif isinstance(eval_set, PairEvaluation | ClassEvaluation):
                rows = [e for examples in eval_set.data.sets.values() for e in examples]
                texts += [text for example in rows for text in example.texts]
        return texts

    @property
    def gated_metrics(self) -> Sequence[str]:
        if self.needs_reference:
            return TeacherAgreement.gated_metrics
        (eval_set,) = self.eval_sets
        return eval_set.gated_metrics

    @property
    def predicted(self) -> Labelled | None:
        (eval_set,) = self.eval_sets
        return eval_set.data if isinstance(eval_set, PairEvaluation) else None

    def score(self, model: Embedder, *, worst: int = 0) -> ModelScores:
        (eval_set,) = self.eval_sets
        return eval_set.score(model)

    def run_by(
        self, model: Embedder, runner: Runner, outputs: Sequence[str] | None = None
    ) -> Embedder:
        return replace(model, runner=runner, outputs=outputs or model.outputs)

    def evaluate(
        self,
        models: Mapping[str, Embedder],
        baselines: Mapping[str, str] | None = None,
        *,
        worst: int = 0,
        resamples: int = RESAMPLES,
    ) -> EvaluationResult:
        result = EvaluationResult()
        for eval_set in self.eval_sets:
            scores = {name: eval_set.score(model) for name, model in models.items()}
            of_set = compare(eval_set.name, scores, baselines, resamples=resamples)
            result.evaluations.extend(of_set.evaluations)
            result.comparisons.extend(of_set.comparisons)
        return result

    def resemblance(self, models: Mapping[str, Embedder], reference: str) -> Quality:
        texts = self.all_texts.texts[: self.held]
        vectors = {name: model.vectors(texts, "", self.session) for name, model in models.items()}
        quality: dict[str, dict[str, float]] = {}
        for name, vectors_NE in vectors.items():
            if name != reference:
                cosines_N = cosines(vectors_NE, vectors[reference])
                quality[name] = {"mean": float(cosines_N.mean()), "least": float(cosines_N.min())}
        return {f"cosine to the {reference} model's vectors, held-out texts": quality}


def open_workload(request: WorkloadRequest, session: Session) -> tuple[EmbeddingWorkload, Embedder]:
    """Read the texts and load the embedding model to train.

    Raises:
        UsageError: There are no texts, or the model does not specify its pooling.
    """
    settings = own_settings(Settings, request.settings, "workload", "task embedding")
    loss = dict(request.loss)
    model = Embedder.open(request.model, pooling=settings.pooling)
    log_fact(f"{model.source}: {model.note}")
    if request.data.source is None:
        raise UsageError(
            "no text given", "give --data TEXT, a file or directory of texts to encode"
        )
    request.data.refuse_choices("texts without a task", allowed=["columns", "judged_rows"])
    texts = read_texts(
        request.data.source,
        column=column_of_texts(request.data),
        unit=settings.unit,
        rows=settings.rows,
        paired=loss.get("contrastive_weight", 0) > 0,
    )
    texts, partitioned = divided_texts(texts, request.data.partition)
    eval_sets = open_eval_sets(request.evaluation, {model.source: model.rows}, session)
    workload = EmbeddingWorkload(
        session,
        model,
        texts,
        eval_sets,
        settings,
        loss,
        request.data.max_length,
        seed=request.seed,
        partitioned=partitioned,
    )
    workload.notes = [f"{model.source}: {model.note}", f"{len(texts):,} distinct texts"]
    # Checks the settings of the loss before a run directory is created.
    assert workload.objective is not None
    return workload, model


def open_evaluation(request: EvaluationRequest, session: Session) -> EmbeddingWorkload:
    """Open scored pairs, a retrieval task or plain texts to evaluate embedding models.

    Raises:
        UsageError: The task cannot be scored with vectors, or its data cannot be used.
    """
    eval_set: EvalSet
    if request.task == METHOD:
        return _open_texts(request, session)
    if request.task == RETRIEVAL:
        request.data.refuse_choices("the queries and documents of a retrieval task")
        max_length = request.data.max_length
        partition, split = request.data.partition, request.data.split
        is_chosen = partition is None and "split" in request.data.model_fields_set
        data = read_retrieval(request.data.source or "", split if is_chosen else None)
        if partition is not None:
            data = data.part(Partition.read(partition), split)
        index = None
        if (source := request.documents) is not None:
            texts = list(data.documents.values())
            index = open_index(source, texts, request.pooling, session, max_length)
        eval_set = RetrievalEvaluation(data, session, index=index, max_length=max_length)
        size = f"{len(data.queries):,} queries, {len(data.documents):,} documents"
        notes = [size, *data.notes()]
        if max_length is not None:
            notes.append(f"longer texts were cut at {max_length} tokens (data.max_length)")
    else:
        eval_set = open_labelled_set(
            request.task,
            request.data,
            request.trained,
            session,
            request.samples_per_label,
        )
        notes = list(eval_set.notes)
    settings = Settings(pooling=request.pooling)
    return EmbeddingWorkload(
        session, None, None, [eval_set], settings, notes=notes, name=eval_set.name
    )


def _open_texts(request: EvaluationRequest, session: Session) -> EmbeddingWorkload:
    """Open texts on which the vectors of models are compared with a teacher's."""
    texts, split = evaluated_texts(request)
    settings = Settings(pooling=request.pooling)
    return EmbeddingWorkload(
        session,
        None,
        texts,
        [],
        settings,
        split=split,
        partitioned=len(texts),
        notes=[f"{len(texts):,} distinct texts"],
    )


def open_rows(request: EvaluationRequest, session: Session) -> DividedRows:
    """Read the texts, queries or pairs on which the request's models are scored."""
    if request.task == METHOD:
        return read_all(request)
    if request.task == RETRIEVAL:
        return read_retrieval(request.data.source or "")
    return open_labelled_rows(request, session)
