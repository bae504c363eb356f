"""Training and evaluation of embedding models, which encode texts as vectors.

Training uses unlabelled texts: sentences, documents, or the two sides of pairs. Evaluation needs no
fine-tuning. It uses pairs of texts with a score, which is correlated with the cosine of their
vectors, and retrieval, in which the vectors rank a corpus for each query.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from kdcli.data.labelled.features import TokenizedRows
from kdcli.data.labelled.partition import DividedRows, Partition, text_hashes
from kdcli.data.labelled.task_data import Labelled, open_labelled
from kdcli.data.tasks import OWN, named_tasks, task_of
from kdcli.data.text.sentences import Texts, held_out_count, read_texts
from kdcli.deploy.runners import Runner
from kdcli.disk import cache_dir
from kdcli.engine.launch import Session
from kdcli.engine.progress import Progress
from kdcli.errors import UsageError
from kdcli.losses import build_objective
from kdcli.losses.embedding import check_dimensions
from kdcli.metrics.bootstrap import Scorer
from kdcli.metrics.regression import spearman
from kdcli.metrics.retrieval import RETRIEVAL_METRICS
from kdcli.models.capture import Capture, capture
from kdcli.models.embedder import Pool, read_format, save_embedder
from kdcli.models.model import Model
from kdcli.models.training_rows import NO_ROWS
from kdcli.recipe.sections import TrainSettings
from kdcli.report.schema import Evaluation, Quality
from kdcli.targets.targets import (
    StorePlace,
    Vectors,
    VectorTargets,
    anchors_of,
    stored_signals,
)
from kdcli.targets.teacher import Teacher
from kdcli.types import Array, Batch, Examples, Needs, Objective, RowHashes, Signals, Task
from kdcli.workloads.embedder import Embedder, cosines
from kdcli.workloads.labelled import DATA_KEYS, LabelledWorkload, scores_of
from kdcli.workloads.predictions import Prediction
from kdcli.workloads.recipes import downstream_recipe
from kdcli.workloads.retrieval import RETRIEVAL, Retrieval, read_retrieval
from kdcli.workloads.settings import (
    DownstreamSettings,
    LabelledSettings,
    TaskHeadSettings,
    VectorSettings,
)
from kdcli.workloads.tasks import open_rows as open_labelled_rows
from kdcli.workloads.workload import (
    MODEL_INPUTS,
    RESAMPLES,
    EvaluationRequest,
    EvaluationResult,
    ModelScores,
    Plan,
    Workload,
    WorkloadRequest,
    bucketed,
    compare,
)

TASKS = ("embedding", RETRIEVAL)
METHOD = "embedding"
GROUP = 16
"""Number of rows of similar length in a batch, and by default in a micro-batch."""
MAX_EVALUATED = 5000
"""Maximum number of texts that are scored if no partition chooses them."""
HELD_OUT = 256
"""Number of held-out texts, but at most a tenth of all texts."""
POOLED = Needs(pooled=True)


@dataclass(frozen=True)
class TextRows:
    """A selection of the texts, tokenised.

    Attributes:
        rows: all texts.
        numbers: the numbers of the selected texts.
    """

    rows: TokenizedRows
    numbers: Array

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def lengths(self) -> Array:
        """Number of tokens in each text."""
        return self.rows.lengths[self.numbers]

    def batch(self, indices: Array) -> Batch:
        """Collate a batch of texts."""
        return self.rows.batch(self.numbers[indices])


@dataclass
class PairEvaluation(LabelledWorkload):
    """Evaluation of embedding models on pairs of texts with a score.

    The metric is the correlation of the scores with the cosines of the vectors.
    """

    def score(self, model: Model, *, worst: int = 0) -> ModelScores:
        assert isinstance(model, Embedder)
        evaluator, max_length = self.evaluator_for(model)
        examples = evaluator.features.examples
        first, second = (
            model.vectors([e.texts[side] for e in examples], "", self.session) for side in (0, 1)
        )
        cosine_of_example = cosines(first, second)
        outputs = [cosine_of_example[[int(n)]] for n in evaluator.features.rows.example]
        predictions: list[Prediction] = evaluator.features.predictions(outputs)
        cut = evaluator.features.rows.truncated / max(1, sum(map(len, self.data.sets.values())))
        note = (
            f"cosine of its vectors; {model.note}; {cut:.1%} of the examples were cut at "
            f"{max_length} tokens"
        )
        # Cosines and scores have different scales, so no pair can be called a mistake.
        return scores_of(evaluator, self.split, predictions, 0, [note])


@dataclass(frozen=True)
class RetrievalEvaluation:
    """Evaluation of embedding models on retrieval."""

    data: Retrieval
    session: Session
    name: str = RETRIEVAL
    gated_metrics: Sequence[str] = RETRIEVAL_METRICS

    @property
    def row_count(self) -> int:
        """Number of queries."""
        return len(self.data.queries)

    def score(self, model: Model) -> ModelScores:
        """Rank the corpus for each query and score the rankings."""
        assert isinstance(model, Embedder)
        return self.data.score(model, self.session)


PAIRS, NEIGHBOURS = 10_000, 10
"""Number of text pairs whose cosines are compared, and number of nearest neighbours per text."""


@dataclass(frozen=True)
class TeacherAgreement:
    """Evaluation of embedding models by their agreement with a teacher on held-out texts.

    `spearman` is the correlation between the model's and the teacher's cosines of random pairs.
    `neighbours@10` is the share of a text's ten nearest neighbours according to the teacher that
    are also among its ten nearest neighbours according to the model.

    Attributes:
        texts: the held-out texts.
        vectors_NE: the teacher's vectors for the texts.
        session: the device on which vectors are computed.
        seed: seed for drawing the pairs.
        split: name of the held-out texts in the report.
    """

    texts: Texts
    vectors_NE: Array
    session: Session
    seed: int
    split: str = "held-out texts"
    name: str = "agreement with the teacher"
    gated_metrics: Sequence[str] = ("spearman", "neighbours@10")

    @property
    def row_count(self) -> int:
        """Number of texts."""
        return len(self.texts)

    def score(self, model: Model) -> ModelScores:
        """Compare a model's vectors with the teacher's."""
        assert isinstance(model, Embedder)
        own_ND = vectors_of_texts(model, self.texts, self.session)
        count = len(self.texts)
        score = agreement_scorer(own_ND, self.vectors_NE, self.seed)
        evaluation = Evaluation(
            model="",
            task=self.name,
            set="",
            split=self.split,
            n=count,
            metrics=score(np.arange(count)),
            reference="teacher",
        )
        return ModelScores([evaluation], {"": score}, {"": count}, notes=[model.note])


def vectors_of_texts(model: Embedder, texts: Texts, session: Session) -> Array:
    """Compute the vectors of texts, each with the prompt of its role, [N, E] float32."""
    roles = np.array(texts.roles)
    vectors_NE: Array | None = None
    for role in dict.fromkeys(texts.roles):
        at = np.flatnonzero(roles == role)
        of_role = model.vectors([texts.texts[n] for n in at], role, session)
        if vectors_NE is None:
            vectors_NE = np.empty((len(texts), of_role.shape[1]), np.float32)
        vectors_NE[at] = of_role
    assert vectors_NE is not None, "there are no texts"
    return vectors_NE


def agreement_scorer(own_ND: Array, teacher_NE: Array, seed: int) -> Scorer:
    """Return the metrics of `TeacherAgreement` as a function of the selected texts.

    The pairs are drawn among the selected texts. A bootstrap therefore draws texts with all their
    pairs. The pairs of a text resemble each other, so an interval from single pairs would be far
    too narrow.

    Args:
        own_ND, teacher_NE: the vectors of the model and the teacher for the same texts.
        seed: seed for drawing the pairs.
    """
    share_2P = np.random.default_rng(seed).random((2, PAIRS))
    own_NN, teacher_NN = _cosines(own_ND), _cosines(teacher_NE)
    shared_N = _shared_neighbours(own_NN, teacher_NN, min(NEIGHBOURS, len(own_ND) - 1))
    is_same = np.array_equal(own_ND, teacher_NE)

    def score(rows: Array) -> dict[str, float]:
        left_P, right_P = rows[(share_2P * len(rows)).astype(np.int64)]
        # A text and itself agree in every model. Rounding may differ in (i, j) and (j, i).
        differ_P = left_P != right_P
        first_P, second_P = (f(left_P, right_P)[differ_P] for f in (np.minimum, np.maximum))
        own_P, teacher_P = own_NN[first_P, second_P], teacher_NN[first_P, second_P]
        # The teacher itself is a baseline, so do not sort its cosines for every resample.
        correlation = float(own_P.size > 0) if is_same else spearman(own_P, teacher_P)
        return {"spearman": correlation, "neighbours@10": float(shared_N[rows].mean())}

    return score


def _cosines(x_ND: Array) -> Array:
    """Compute the cosines of all pairs of vectors, [N, N]."""
    unit_ND = x_ND / np.maximum(np.linalg.norm(x_ND, axis=1, keepdims=True), 1e-12)
    cosines_NN: Array = unit_ND @ unit_ND.T
    return cosines_NN


def _shared_neighbours(x_NN: Array, y_NN: Array, count: int) -> Array:
    """Compute the share of each row's `count` nearest neighbours in y that x shares, [N].

    Both are cosines of all pairs.
    """
    nearest = []
    for cosines_NN in (x_NN, y_NN):
        others_NN = np.where(np.eye(len(cosines_NN), dtype=bool), -np.inf, cosines_NN)
        nearest.append(np.argsort(-others_NN, axis=1, kind="stable")[:, :count])
    pairs = zip(*nearest, strict=True)
    return np.array([len(np.intersect1d(a, b)) / count for a, b in pairs])


class EvalSet(Protocol):
    """A data set on which embedding models are scored without fine-tuning."""

    @property
    def name(self) -> str: ...

    @property
    def row_count(self) -> int: ...

    @property
    def gated_metrics(self) -> Sequence[str]: ...

    def score(self, model: Model) -> ModelScores: ...


@dataclass
class EmbeddingWorkload(Workload):
    """Training texts for embedding models, and the sets on which their vectors are scored.

    Attributes:
        reader: the model whose tokenizer reads the texts; None if the workload only evaluates.
        texts: distinct texts; None if the workload only evaluates.
        eval_sets: data sets for evaluation.
        settings: the recipe's `embedding` section.
        loss: the recipe's `loss` section, with the settings of the embedding loss.
        max_length: maximum number of tokens in a text; None for the reader's own maximum.
        held_out_texts: number of held-out texts.
        seed: seed for drawing the anchors.
        partitioned: number of held-out texts if a partition chose them, else None.
    """

    session: Session
    reader: Embedder | None
    texts: Texts | None
    eval_sets: Sequence[EvalSet]
    settings: VectorSettings = field(default_factory=VectorSettings)
    loss: Mapping[str, Any] = field(default_factory=dict)
    max_length: int | None = None
    held_out_texts: int = HELD_OUT
    seed: int = 0
    notes: list[str] = field(default_factory=list)
    name: str = METHOD
    split: str = "held-out texts"
    metric: str = "spearman"
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
            Progress.log(
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

    @property
    def needs_reference(self) -> bool:
        return not self.eval_sets

    def with_reference(self, teacher: Model) -> EmbeddingWorkload:
        assert isinstance(teacher, Embedder)
        texts = self.all_texts.take(np.arange(self.held))
        vectors_NE = vectors_of_texts(teacher, texts, self.session)
        agreement = TeacherAgreement(texts, vectors_NE, self.session, self.seed, self.split)
        note = f"scores are the agreement with {teacher.source} on {len(texts):,} texts"
        return replace(self, eval_sets=[*self.eval_sets, agreement], notes=[*self.notes, note])

    def plan(self, settings: TrainSettings) -> Plan:
        return bucketed(self.tokens.lengths[self.train_numbers], settings, GROUP)

    # -- models -----------------------------------------------------------------------------

    def load(
        self, source: str, *, head: TaskHeadSettings, seed: int = 0, new_head: bool = True
    ) -> Model:
        trusted, pooling = self.session.trust_remote_code, self.settings.pooling
        if new_head:
            return Embedder.open(source, pooling=pooling, trust_remote_code=trusted)
        return Embedder.open_scored(source, pooling=pooling, trust_remote_code=trusted)

    def capture(self, model: Model, needs: Needs | None = None) -> Capture:
        assert isinstance(model, Embedder)
        pool = Pool(model.format).requires_grad_(False)
        return capture(model.model, self.needs | (needs or Needs()), pool)

    def save(self, model: Model, folder: Path, rows: RowHashes) -> None:
        assert isinstance(model, Embedder)
        save_embedder(model.model, model.tokenizer, model.format, folder, rows)

    def trains_head(self, head: TaskHeadSettings) -> bool:
        # No vector depends on a pooler.
        return False

    def mask_facts(self, head: TaskHeadSettings) -> dict[str, Any]:
        assert self.reader is not None
        own = read_format(self.reader.source) is not None
        pooling = None if own else self.reader.format.pooling
        return {"pooling": pooling, "max_length": self.reader.max_length}

    def encode(self, model: Model, batch: Batch) -> list[Tensor]:
        assert isinstance(model, Embedder)
        inputs = {name: x for name, x in batch.items() if name in MODEL_INPUTS}
        with torch.no_grad():
            states_BLD = model.model(**inputs).last_hidden_state
            return [Pool(model.format)(states_BLD, batch["attention_mask"])]

    def targets(
        self,
        teacher: Model,
        needs: Needs,
        *,
        passes: float = 1.0,
        place: StorePlace | None = None,
        dry_run: bool = False,
    ) -> VectorTargets:
        assert isinstance(teacher, Embedder)
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
        vectors = self.vectors_of(teacher, tokens, dry_run=dry_run)
        count = self.settings.anchors
        anchors_RE = anchors_of(vectors, self.train_numbers, count, self.seed)
        # All vectors are stored, so the teacher is not needed on the device any more.
        teacher.model.cpu()
        return VectorTargets(vectors, texts, anchors_RE.to(self.session.device))

    # -- losses -----------------------------------------------------------------------------

    @property
    def objective(self) -> Objective:
        """The embedding loss between two models of the reader's shape.

        Raises:
            UsageError: the settings compare tokens, which requires the teacher in every step.
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

    def vectors_of(self, teacher: Embedder, tokens: TokenizedRows, *, dry_run: bool) -> Vectors:
        """Compute a teacher's vectors for the texts, or read them from the cache.

        Freezes the teacher, moves it to the device and converts it to the compute dtype.

        Args:
            teacher: the teacher.
            tokens: the texts, tokenised for the teacher.
            dry_run: return random vectors and leave the teacher unchanged.

        Raises:
            UsageError: the vectors take more than `embedding.cache_gb`, or do not fit on the disk.
        """
        if dry_run:
            width = teacher.format.width(teacher.model.config.hidden_size)
            return lambda at: np.random.default_rng(0).standard_normal(
                (len(at), width), dtype=np.float32
            )
        session, pool = self.session, Pool(teacher.format)
        frozen = Teacher.frozen(teacher.source, teacher.model, POOLED, session, pool)
        fingerprint = f"{teacher.fingerprint}-{session.compute_dtype}"
        place = StorePlace(cache_dir() / "vectors", int(self.settings.cache_gb * 1e9))
        store = stored_signals(frozen.captured, tokens, POOLED, fingerprint, place, session)
        if store is None:
            raise UsageError(
                "the teacher's vectors do not fit on the disk",
                "raise embedding.cache_gb, or lower embedding.rows",
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
            elif isinstance(eval_set, PairEvaluation):
                rows = [e for examples in eval_set.data.sets.values() for e in examples]
                texts += [text for example in rows for text in example.texts]
        return texts

    def rows_for(self, model: Model) -> TokenizedRows:
        assert isinstance(model, Embedder)
        texts = self.texts_of_rows()
        return model.tokenize(texts, [""] * len(texts))

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

    def score(self, model: Model, *, worst: int = 0) -> ModelScores:
        (eval_set,) = self.eval_sets
        return eval_set.score(model)

    def run_by(self, model: Model, runner: Runner, outputs: Sequence[str] | None = None) -> Model:
        assert isinstance(model, Embedder)
        return replace(model, runner=runner, outputs=outputs or model.outputs)

    def evaluate(
        self,
        models: Mapping[str, Model],
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

    def resemblance(self, models: Mapping[str, Model], reference: str) -> Quality:
        texts = self.all_texts.texts[: self.held]
        vectors = {}
        for name, model in models.items():
            assert isinstance(model, Embedder)
            vectors[name] = model.vectors(texts, "", self.session)
        quality: dict[str, dict[str, float]] = {}
        for name, vectors_NE in vectors.items():
            if name != reference:
                cosines_N = cosines(vectors_NE, vectors[reference])
                quality[name] = {"mean": float(cosines_N.mean()), "least": float(cosines_N.min())}
        return {f"cosine to the {reference} model's vectors, held-out texts": quality}


def open_workload(request: WorkloadRequest, session: Session) -> tuple[EmbeddingWorkload, Embedder]:
    """Read the texts and load the embedding model to train.

    Raises:
        UsageError: there are no texts, or the model does not specify its pooling.
    """
    settings = VectorSettings.model_validate(dict(request.settings.get("embedding", {})))
    loss = dict(request.settings.get("loss", {}))
    evaluation = request.settings.get("eval") or DownstreamSettings()
    trusted = session.trust_remote_code
    model = Embedder.open(request.model, pooling=settings.pooling, trust_remote_code=trusted)
    Progress.log(f"{model.source}: {model.note}")
    if request.data.source is None:
        raise UsageError(
            "no text given", "give --data TEXT, a file or directory of texts to encode"
        )
    texts = read_texts(
        request.data.source,
        column=None,
        unit=settings.unit,
        rows=settings.rows,
        log=Progress.log,
        paired=loss.get("contrastive_weight", 0) > 0,
    )
    texts, partitioned = divided_texts(texts, request.data.partition)
    eval_sets = open_eval_sets(evaluation, {model.source: model.rows}, session)
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
        UsageError: the task cannot be scored with vectors, or its data cannot be used.
    """
    eval_set: EvalSet
    if request.task == METHOD:
        return _open_texts(request, session)
    if request.task == RETRIEVAL:
        data = read_retrieval(request.data.source or "")
        if request.data.partition is not None:
            data = data.part(Partition.read(request.data.partition), request.data.split)
        eval_set = RetrievalEvaluation(data, session)
        notes = [f"{len(data.queries):,} queries, {len(data.documents):,} documents"]
    else:
        eval_set = open_pairs(request.task, request.data, request.trained, session)
        notes = list(eval_set.notes)
    settings = VectorSettings(pooling=request.pooling)
    return EmbeddingWorkload(
        session, None, None, [eval_set], settings, notes=notes, name=eval_set.name
    )


def _open_texts(request: EvaluationRequest, session: Session) -> EmbeddingWorkload:
    """Open texts on which the vectors of models are compared with a teacher's."""
    texts = _read_all(request)
    split = "all texts"
    if (file := request.data.partition) is not None:
        split = request.data.split
        chosen = Partition.read(file).is_evaluated(text_hashes(texts.texts), split)
        if not chosen.any():
            raise UsageError(
                f"data.partition names no {split} text of this data",
                "give the data for which kdcli compress wrote the file",
            )
        texts = texts.take(np.flatnonzero(chosen))
    else:
        # The texts are ordered by hash, so this is a random sample.
        texts = texts.take(np.arange(min(len(texts), request.data.judged_rows or MAX_EVALUATED)))
    settings = VectorSettings(pooling=request.pooling)
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


def _read_all(request: EvaluationRequest) -> Texts:
    """Read the texts of a request. Raises UsageError: there are no texts."""
    if request.data.source is None:
        raise UsageError("no text given", "give --data TEXT, a file or directory of texts")
    return read_texts(
        request.data.source, column=None, unit="sentence", rows=None, log=Progress.log
    )


def open_rows(request: EvaluationRequest, session: Session) -> DividedRows:
    """Read the texts, queries or pairs on which the request's models are scored.

    Raises:
        UsageError: the data cannot be used.
    """
    if request.task == METHOD:
        return _read_all(request)
    if request.task == RETRIEVAL:
        return read_retrieval(request.data.source or "")
    return open_labelled_rows(request, session)


def divided_texts(texts: Texts, partition: str | None) -> tuple[Texts, int | None]:
    """Drop the verification texts of a partition and put its selection texts first.

    Returns:
        The texts, and the number of selection texts; None without a partition.
    """
    if partition is None:
        return texts, None
    chosen, hashes = Partition.read(partition), text_hashes(texts.texts)
    selected = np.flatnonzero(chosen.is_evaluated(hashes, "validation"))
    training = np.flatnonzero(chosen.is_training(hashes))
    if not len(selected) or not len(training):
        # The texts are others than the rows on which the models are scored.
        return texts.take(training), None
    return texts.take(np.concatenate([selected, training])), len(selected)


def open_eval_sets(
    settings: DownstreamSettings, trained: Mapping[str, RowHashes], session: Session
) -> list[EvalSet]:
    """Open the tasks in the recipe's `eval` section.

    Args:
        settings: the recipe's `eval` section.
        trained: model -> hashes of the rows it was trained on.
        session: the session that evaluates.

    Raises:
        UsageError: a task cannot be scored with vectors, or its data cannot be used.
    """
    sets: list[EvalSet] = []
    for name in settings.tasks:
        if name == RETRIEVAL:
            sets.append(RetrievalEvaluation(read_retrieval(settings.source or ""), session))
            continue
        recipe = downstream_recipe(settings, name, 0).recipe
        sets.append(open_pairs(name, recipe.data, trained, session))
    return sets


def open_pairs(
    name: str, settings: LabelledSettings, trained: Mapping[str, RowHashes], session: Session
) -> PairEvaluation:
    """Open a task of text pairs with a score.

    Rows that any of the models was trained on are dropped.

    Args:
        name: the task.
        settings: the recipe's `data` section.
        trained: model -> hashes of the rows it was trained on.
        session: the session that evaluates.

    Raises:
        UsageError: the task has no scored pairs, or its data cannot be used.
    """
    if name != OWN and not scores_pairs(task_of(name)):
        raise UsageError(
            f"task {name} cannot be scored with vectors, because it has no pairs with a number",
            f"use stsb, own (two texts and a number) or {RETRIEVAL}; other tasks need a "
            "fine-tuned model",
        )
    data: Labelled = open_labelled(
        name,
        training=False,
        trained=trained,
        log=Progress.log,
        **settings.model_dump(include=DATA_KEYS),
    )
    if not scores_pairs(data.task):
        raise UsageError(
            f"the rows of task {name} are of kind {data.task.kind}, but vectors are scored on "
            "pairs with a number",
            "name two text columns; if the labels are integers, also set data.columns.kind=score",
        )
    # Cosines and scores have different scales, so the usual metric is a rank correlation.
    data = replace(data, task=replace(data.task, metrics=("spearman", "pearson")))
    return PairEvaluation(session, data, settings, None, None, None, notes=list(data.notes))


def scores_pairs(task: Task) -> bool:
    """Whether a task has two texts and a number, so that vectors can be scored on it."""
    return task.kind == "score" and len(task.texts) == 2


def by_vectors(task: str, model: str, pooling: str | None = None) -> bool:
    """Whether models are scored on a task by the cosines of their vectors.

    This is the case if the task has pairs with a number, and the first model is an embedding model
    or `pooling` turns it into one.

    Args:
        task: the task.
        model: the first model.
        pooling: the pooling chosen by the user, if any.
    """
    pairs = task == OWN or (task in named_tasks() and scores_pairs(task_of(task)))
    return pairs and (pooling is not None or read_format(model) is not None)
