"""Rerankers: models with one output that score the candidate passages of a query.

Data flow: lists of candidates -> rows of tokens -> batches of whole lists -> scores -> loss over
each list -> engine -> rankings.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field
from torch import Tensor

from kdcli.data.batches import BatchOrder
from kdcli.data.labelled.features import TokenizedRows
from kdcli.data.labelled.lists import RERANK_TASK, ListData, Lists, read_list_splits, read_lists
from kdcli.data.labelled.partition import HELD_OUT_SPLIT, DividedRows, hashes_of
from kdcli.deploy.exported import in_own_runtime
from kdcli.disk import cache_dir
from kdcli.engine.evaluation import evaluate_job
from kdcli.engine.session import Session
from kdcli.errors import UsageError
from kdcli.losses.ranking import label_loss, pad_lists, score_loss
from kdcli.messages import log, log_fact
from kdcli.metrics.cascade import Rankings, ranked_twice
from kdcli.metrics.finite import check_finite
from kdcli.models.cross_encoder import (
    ACTIVATION_CLASSES,
    activation_of,
    set_activation,
)
from kdcli.models.heads import kind_of_head, load_for_task, with_new_head
from kdcli.models.identity import weights_hash
from kdcli.models.load import load_config, save_model
from kdcli.models.model import NO_ROWS, Model
from kdcli.recipe.methods import own_settings
from kdcli.recipe.sections import KdSettings, Section, TrainSettings
from kdcli.targets.cache import SignalStore, StorePlace
from kdcli.targets.outputs import load_or_compute_outputs
from kdcli.targets.targets import Teacher
from kdcli.types import (
    Array,
    Batch,
    Count,
    Examples,
    Job,
    ModelShape,
    Needs,
    RowHashes,
    Schedule,
    Signals,
    Start,
    StepLoss,
    Term,
)
from kdcli.workloads.cascades import Cascade
from kdcli.workloads.embedder import Embedder, cosines, network_outputs
from kdcli.workloads.rankings import (
    METRICS,
    metrics_by_query,
    random_order_metrics,
    ranking_scores,
)
from kdcli.workloads.requests import EvaluationRequest, WorkloadRequest
from kdcli.workloads.rerank_rows import ListRows, ScoreTargets, tokenize_lists, tokens_in_row
from kdcli.workloads.scores import ModelScores
from kdcli.workloads.settings import LabelledSettings, TaskHeadSettings
from kdcli.workloads.task_models import describe_cut, load_scored
from kdcli.workloads.training import Keep, Plan, bucketed, taught_job
from kdcli.workloads.workload import LOGITS, Workload

TASKS = ("rerank",)
ROWS_AT_ONCE = 32
"""Approximate number of candidates in a micro-batch."""
SAMPLED_LISTS = 100
"""Number of lists on which a student is fitted to its teacher."""


class Settings(Section):
    """The `workload` section of rerankers, with their loss."""

    loss: Literal["margin-mse", "listwise", "pointwise"] | None = None
    """Loss (default: margin-mse for scores, listwise if there are only labels)."""
    weight: float = Field(1.0, ge=0, le=1)
    """Weight of the loss on scores; labels get the rest."""
    temperature: float = Field(1.0, gt=0)
    """Temperature of the listwise loss."""


@dataclass
class RerankWorkload(Workload[Model]):
    """Queries with their candidates, tokenised for cross-encoders that share a tokenizer.

    Attributes:
        train: Training lists; None if the workload only evaluates.
        evaluated: Evaluation lists.
        settings: The recipe's `workload` section.
        row_length: Maximum number of tokens in a row; None for the task's default, or for the
            length that a model was trained with if the workload only evaluates.
        reader: The model whose tokenizer reads the rows; None if the workload only evaluates.
        pooling: Pooling that turns plain encoders into embedding models.
        labels: Source of a passage's relevance: the labels in the data, or the teacher's scores.
    """

    session: Session
    train: Lists | None
    evaluated: Lists
    split: str
    settings: Settings
    row_length: int | None
    reader: Model | None
    pooling: str | None = None
    notes: list[str] = field(default_factory=list)
    labels: Literal["data", "teacher"] = "data"
    name: str = RERANK_TASK.name
    metric: str = METRICS[0]
    over: Count = "labels"
    auto_class: str = "AutoModelForSequenceClassification"
    pipeline: str | None = "text-ranking"
    _rows: tuple[ListRows, ListRows] | None = None

    @property
    def rows(self) -> RowHashes:  # type: ignore[override]
        return hashes_of(self._train.examples)

    @property
    def scored(self) -> bool:
        """Whether every training passage comes with a teacher's score."""
        return not np.isnan(self._train.scores).any()

    @property
    def has_labels(self) -> bool:  # type: ignore[override]
        return self.labels == "data" and not np.isnan(self._train.labels).all()

    @property
    def held_out_size(self) -> float:  # type: ignore[override]
        return max(1.0, float(self.evaluated.sizes.max() / self._train.sizes.mean()))

    @property
    def _train(self) -> Lists:
        assert self.train is not None, "this workload only evaluates"
        return self.train

    # -- examples ---------------------------------------------------------------------------

    @property
    def list_rows(self) -> tuple[ListRows, ListRows]:
        """The training and evaluation lists, tokenised for the reader."""
        if self._rows is None:
            assert self.reader is not None
            parts = [
                ListRows(lists, tokenize_lists(lists, self.reader, self.row_length))
                for lists in (self._train, self.evaluated)
            ]
            self._rows = parts[0], parts[1]
        return self._rows

    @property
    def examples(self) -> Examples:
        return self.list_rows[0]

    @property
    def held_out(self) -> Examples:
        return self.list_rows[1]

    @property
    def needs_reference(self) -> bool:
        return self.labels == "teacher" and bool(np.isnan(self.evaluated.labels).any())

    def with_reference(self, teacher: Model) -> RerankWorkload:
        if not self.needs_reference:
            # Only the training lists have no labels.
            return self
        scores_R = self.candidate_scores(teacher, self.evaluated).astype(np.float64)
        begins = self.evaluated.ends - self.evaluated.sizes
        gains_R = _gains(scores_R, self.evaluated)
        # A list whose candidates the teacher does not tell apart has no best ranking.
        kept_Q = np.flatnonzero(np.maximum.reduceat(gains_R, begins) > 0)
        if not len(kept_Q):
            raise UsageError(
                f"{teacher.source} gives the same score to all passages of every query",
                "give queries with several different passages",
            )
        evaluated = replace(self.evaluated, labels=gains_R).take(kept_Q)
        notes = [*self.notes, f"gains are the scores of {teacher.source}: no labels were read"]
        if dropped := len(self.evaluated) - len(kept_Q):
            notes.append(f"skipped {dropped:,} queries whose passages have the same score")
        rows = None
        if self._rows is not None:
            held_out = self._rows[1].rows.take(self.evaluated.rows_of(kept_Q))
            rows = self._rows[0], ListRows(evaluated, held_out)
        return replace(self, evaluated=evaluated, notes=notes, labels="teacher", _rows=rows)

    @property
    def sample(self) -> Examples:
        assert self.reader is not None
        lists = self._train.take(np.arange(min(len(self._train), SAMPLED_LISTS)))
        return tokenize_lists(lists, self.reader, self.row_length)

    def plan(self, settings: TrainSettings) -> Plan:
        group = max(1, int(ROWS_AT_ONCE // self._train.sizes.mean()))
        return bucketed(self.list_rows[0].lengths, settings, group)

    # -- models -----------------------------------------------------------------------------

    def load(
        self, source: str, *, head: TaskHeadSettings, seed: int = 0, new_head: bool = True
    ) -> Model:
        if not new_head:
            return open_reranker(source, pooling=self.pooling)
        return load_cross_encoder(source, seed=seed)

    def misfit(self, source: str, label_map: Sequence[int] | None = None) -> str | None:
        if is_reranker(source):
            return None
        return "it has no head with one output"

    def student(
        self,
        origin: Model,
        shape: ModelShape,
        start: Start,
    ) -> Model:
        """Make a cross-encoder from another one.

        The student copies the head if its hidden size stays the same. Otherwise it gets a new head.

        Args:
            origin: The cross-encoder that the student is made from.
            shape: The student's shape.
            start: How the student's weights start.

        Raises:
            UsageError: The student cannot have this shape, initialisation or choice of layers.
        """
        full = origin.shape
        if shape == full and start.init != "random":
            network = copy.deepcopy(origin.model)
            return replace(origin, model=network, tokenizer=copy.deepcopy(origin.tokenizer))
        built = self.make_student(origin, shape, start)
        config = copy.deepcopy(built.model.config)
        model = with_new_head(built.model, config, RERANK_TASK, start.seed, source=origin.source)
        if start.init != "random" and shape.hidden == full.hidden:
            inside = f"{model.base_model_prefix}."
            weights = origin.model.state_dict().items()
            head = {name: x for name, x in weights if not name.startswith(inside)}
            model.load_state_dict(head, strict=False)
        return replace(origin, model=model.eval(), tokenizer=copy.deepcopy(origin.tokenizer))

    def adapt_student(self, student: Model, teacher: Model) -> None:
        set_activation(student.model, activation_taught_by(teacher))

    def targets(
        self,
        teacher: Model,
        needs: Needs,
        *,
        passes: float = 1.0,
        place: StorePlace | None = None,
        dry_run: bool = False,
    ) -> ScoreTargets:
        """Compute a teacher's score for every candidate.

        Held-out candidates are scored in float32. Training candidates are scored by a cross-encoder
        in the compute dtype, and cached.

        Args:
            teacher: A cross-encoder, an embedding model or an export.
            needs: Ignored, because only scores are used.
            passes: Scores are computed once, and for held-out candidates alone if it is 0.
            place: Gives the size limit of the cache; None sets no limit.
            dry_run: Return zeros.

        Raises:
            UsageError: The scores do not fit on the disk.
        """
        train = self._train
        if dry_run:
            zeros = [np.zeros(len(lists.passages), np.float32) for lists in (train, self.evaluated)]
            return ScoreTargets(*zeros)
        held_out_R = self.candidate_scores(teacher, self.evaluated)
        if not passes:
            return ScoreTargets(np.zeros(len(train.passages), np.float32), held_out_R)
        if isinstance(teacher, Embedder) or in_own_runtime(teacher.model) is not None:
            return ScoreTargets(self.candidate_scores(teacher, train), held_out_R)
        rows = tokenize_lists(train, teacher, self.row_length)
        fingerprint = f"{weights_hash(teacher.model)}-{self.session.compute_dtype}"
        live = Teacher.frozen(teacher.source, teacher.model, LOGITS, self.session).captured
        limit = place.limit_bytes if place else 1 << 62
        cache = StorePlace(cache_dir() / "scores", limit, teacher.source)
        store = SignalStore.open(cache, rows, live, LOGITS, fingerprint, self.session)
        if store is None:
            raise UsageError(
                "the teacher's scores do not fit on the disk", "raise cache_gb, or free disk space"
            )
        return ScoreTargets(store.vectors(np.arange(len(rows)))[:, 0], held_out_R)

    def kd_settings(self, given: KdSettings) -> KdSettings:
        if given != KdSettings():
            raise UsageError(
                "the keys of kd: do not apply to task rerank",
                "use workload.weight and workload.temperature",
            )
        own = self.settings
        return KdSettings(weight=own.weight, temperature=own.temperature)

    def check_given_outputs(self) -> None:
        if not self.scored:
            unscored = int(np.isnan(self._train.scores).sum())
            raise UsageError(
                f"{unscored:,} of {len(self._train.passages):,} training passages have no score",
                "name a teacher, or train on the labels alone with kdcli finetune MODEL --task "
                "rerank",
            )

    def require_labels(self) -> None:
        self._check_targets()
        if self.needs_reference:
            raise UsageError(
                f"the lists of the {self.split} split have no labels, which score the model",
                "add labels to them, or use distill, whose teacher can rank them",
            )

    def _check_targets(self) -> None:
        if not self.scored and not self.has_labels:
            raise UsageError(
                "the training passages have neither labels nor scores",
                "the ranking is learned from labels or scores, so add one of them",
            )

    def job(self, model: Model, settings: TrainSettings, keep: Keep) -> tuple[Job, Schedule]:
        """Build the job that trains a model on the labels and, if the data has them, on scores.

        Raises:
            UsageError: The training lists have neither labels nor scores.
        """
        self._check_targets()
        if not self.scored and self.settings.loss == "margin-mse":
            raise UsageError(
                "workload.loss margin-mse needs a score for each passage, and some have none",
                "choose listwise",
            )
        note = f"trained on {'scores in the data' if self.scored else 'labels alone'}"
        notes = [note]
        if self.scored and not self.has_labels and np.isnan(self.evaluated.scores).any():
            notes.append("some evaluated passages have no score, so the held-out loss is always 0")
        self.notes = list(dict.fromkeys([*self.notes, *notes]))
        targets = [ScoreTargets(self._train.scores, self.evaluated.scores)] if self.scored else []
        return taught_job(self, model, settings, keep, targets, self.kd_settings(KdSettings()))

    def save(self, model: Model, folder: Path, rows: RowHashes) -> None:
        # A model that learned only from labels outputs the logits of relevance probabilities.
        default = ACTIVATION_CLASSES["Identity" if self.scored else "Sigmoid"]
        set_activation(model.model, activation_of(model.source, model.model.config) or default)
        model.tokenizer.model_max_length = tokens_in_row(model, self.row_length)
        save_model(model.model, model.tokenizer, folder, rows)

    # -- losses -----------------------------------------------------------------------------

    def hard(self, signals: Signals, batch: Batch) -> Mapping[str, Tensor]:
        if not self.has_labels:
            return {}
        s_QM, labels_QM, real_QM = self._lists(signals, batch)
        return {"labels": label_loss(self.settings.loss or "listwise", s_QM, labels_QM, real_QM)}

    def soft(
        self, teacher: Signals, student: Signals, batch: Batch, temperature: float
    ) -> Mapping[str, Tensor]:
        s_QM, labels_QM, real_QM = self._lists(student, batch)
        assert teacher.logits is not None
        t_QM = pad_lists(teacher.logits[:, 0], batch["places"])
        kind = self.settings.loss or "margin-mse"
        return {"scores": score_loss(kind, s_QM, t_QM, labels_QM, real_QM, temperature)}

    @staticmethod
    def _lists(signals: Signals, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return scores, relevance and a mask of the real candidates, [Q, M] each."""
        assert signals.logits is not None
        places_QM = batch["places"]
        s_QM = pad_lists(signals.logits[:, 0], places_QM)
        return s_QM, pad_lists(batch["relevance"], places_QM), places_QM >= 0

    def outputs(self, signals: Signals, batch: Batch) -> Tensor | None:
        return self._lists(signals, batch)[0]

    def metrics(self, outputs: Sequence[Array]) -> dict[str, float]:
        if self.needs_reference:
            # A dry run does not wait for the teacher's scores of the held-out lists.
            return {}
        values = metrics_by_query(self.evaluated, self._without_padding(outputs))
        return {name: float(of_query.mean()) for name, of_query in values.items()}

    def _without_padding(self, outputs: Sequence[Array]) -> Array:
        """Return the scores of all evaluated candidates, [R], of outputs with a row per list."""
        sizes = self.evaluated.sizes
        return np.concatenate([output[:n] for output, n in zip(outputs, sizes, strict=True)])

    # -- scores -----------------------------------------------------------------------------

    @property
    def row_count(self) -> int:
        return len(self.evaluated)

    @property
    def gated_metrics(self) -> Sequence[str]:
        return METRICS

    def texts_of_rows(self) -> list[str]:
        return self.evaluated.passages

    def rows_for(self, model: Model) -> TokenizedRows:
        return tokenize_lists(self.evaluated, model, self.row_length)

    def score(self, model: Model, *, worst: int = 0) -> ModelScores:
        note = model.note
        if not isinstance(model, Embedder):
            rows = self.rows_for(model)
            cut, length = rows.truncated / len(rows), tokens_in_row(model, self.row_length)
            first_query = self.evaluated.queries[0]
            of_cut = describe_cut("score", "candidates", cut, length, model, first_query)
            note = "; ".join([note, *of_cut])
        return self.score_values(self.candidate_scores(model, self.evaluated), [note])

    def score_trained(
        self, model: Model, outputs: Sequence[Array] | None, *, worst: int = 0
    ) -> ModelScores:
        # Lists without a best ranking are dropped when a teacher becomes the reference.
        if outputs is None or len(outputs) != len(self.evaluated):
            return self.score(model, worst=worst)
        return self.score_values(self._without_padding(outputs), [model.note])

    def trivial(self, model: Model) -> ModelScores | None:
        if self.labels != "data":
            return None
        return ranking_scores(self.name, self.split, random_order_metrics(self.evaluated))

    def score_values(self, scores_R: Array, notes: Sequence[str] = ()) -> ModelScores:
        """Evaluate the rankings that the candidates' scores produce."""
        check_finite(scores_R, "scores of candidates")
        values = metrics_by_query(self.evaluated, scores_R)
        ends = self.evaluated.ends[:-1]
        scores, gains = (
            [part.tolist() for part in np.split(each_R.astype(np.float64), ends)]
            for each_R in (scores_R, self.evaluated.labels)
        )
        rankings = Rankings(scores=scores, gains=gains)
        if self.labels == "data":
            own = ranking_scores(self.name, self.split, values, notes)
            return replace(own, rankings=rankings)
        # Every passage but one has a positive gain, so only graded metrics are meaningful.
        values = {self.metric: values[self.metric]}
        # Scores of other batches differ by rounding.
        gains_R = _gains(scores_R.astype(np.float64), self.evaluated)
        is_own = np.allclose(gains_R, self.evaluated.labels, atol=1e-5)
        own = replace(ranking_scores(self.name, self.split, values, notes), rankings=rankings)
        return own.against_teacher(is_own=is_own)

    def candidate_scores(self, model: Model, lists: Lists) -> Array:
        """Compute a model's score for each candidate, [R] float32, before any activation.

        A cross-encoder reads query and passage together. For an embedding model, the score is the
        cosine of their vectors.
        """
        if isinstance(model, Cascade):
            keep, ends = model.settings.keep, lists.ends[:-1]
            assert keep is not None
            both = [self.candidate_scores(m, lists) for m in (model.first, model.second)]
            pairs = zip(*(np.split(scores_R, ends) for scores_R in both), strict=True)
            return np.concatenate([ranked_twice(a, b, keep) for a, b in pairs])
        if isinstance(model, Embedder):
            passages, places = np.unique(
                np.array(lists.passages, dtype=object), return_inverse=True
            )
            queries_QE = model.vectors(lists.queries, "query", self.session)
            passages_PE = model.vectors(passages.tolist(), "document", self.session)
            query_of_row = np.repeat(np.arange(len(lists)), lists.sizes)
            return cosines(queries_QE[query_of_row], passages_PE[places]).astype(np.float32)
        return self._cross_scores(model, tokenize_lists(lists, model, self.row_length))

    def _cross_scores(self, model: Model, rows: TokenizedRows) -> Array:
        network = in_own_runtime(model.model)
        if network is not None:
            outputs = network_outputs(network, rows, self.session)
            return np.stack(outputs)[:, 0].astype(np.float32)
        captured, by_length = self.capture(model), rows.by_length()

        def step(batch: Batch) -> StepLoss:
            logits = captured(batch).logits
            return StepLoss({"loss": Term(logits.new_zeros(()), "rows")}, logits)

        order = BatchOrder(len(rows), 1, 0)
        modules = {"model": captured}
        job = Job(modules, step, by_length, order, by_length, compute_metrics=lambda outputs: {})
        outputs = load_or_compute_outputs(
            model.model,
            lambda: weights_hash(model.model),
            by_length,
            self.session,
            lambda: evaluate_job(self.session, job).outputs,
        )
        scores_R = np.empty(len(rows), np.float32)
        scores_R[by_length.example] = np.stack(outputs)[:, 0]
        return scores_R


def open_workload(request: WorkloadRequest, session: Session) -> tuple[RerankWorkload, Model]:
    """Read the lists and load the cross-encoder to train.

    Raises:
        UsageError: There is no data, the rows have the wrong format, or the model cannot have a
            head with one output.
    """
    unread = ["choose_on"] * (request.choose_on is not None) + ["metrics"] * bool(request.metrics)
    unread += ["head.label_map"] * (request.head.label_map is not None)
    unread += ["head.words"] * (request.head.words is not None)
    if unread:
        raise UsageError(f"task rerank does not read {', '.join(unread)}", "omit it")
    data = read_data(request.data)
    log_fact(*data.notes)
    model = load_cross_encoder(request.model, seed=request.seed)
    log_fact(f"{request.model}: {model.note}")
    settings = own_settings(Settings, request.settings, "workload", "task rerank")
    workload = RerankWorkload(
        session, data.train, data.evaluated, data.split, settings, request.data.max_length, model
    )
    workload.labels = "data" if data.has_labels else "teacher"
    return workload, model


def open_evaluation(request: EvaluationRequest, session: Session) -> RerankWorkload:
    """Open lists to evaluate rerankers.

    Queries that any of the models was trained on are dropped.

    Raises:
        UsageError: The data cannot be used, or every query was used to train one of the models.
    """
    data = read_data(request.data, trains=False)
    lists, split = data.evaluated, data.split
    known_Q = lists.known(np.concatenate([NO_ROWS, *request.trained.values()]))
    count, keep = int(known_Q.sum()), request.data.judge_trained_rows
    if known_Q.all() and not keep:
        raise UsageError(
            f"all {len(lists):,} queries of the {split} split were used to train one of the models",
            "use other --data, or keep these queries with --set data.judge_trained_rows=true",
        )
    if count and keep:
        split = f"{split}, {count:,} of {len(lists):,} trained a model"
    dropped = []
    if count and not keep:
        what = f"{count:,} of {len(lists):,} queries that were used to train one of the models"
        dropped.append(f"dropped {what}")
        log(*dropped)
        lists = lists.take(np.flatnonzero(~known_Q))
        split = HELD_OUT_SPLIT if split == "train" else split
    size = f"{len(lists):,} queries, {len(lists.passages):,} candidates"
    length, pooling = request.data.max_length, request.pooling
    return RerankWorkload(
        session,
        None,
        lists,
        split,
        Settings(),
        length,
        None,
        pooling,
        [*data.notes, *dropped, size],
        "data" if data.has_labels else "teacher",
    )


def open_rows(request: EvaluationRequest, session: Session) -> DividedRows:
    """Read the lists of all splits."""
    return read_list_splits(list_source(request.data.source))


def read_data(data: LabelledSettings, *, trains: bool = True) -> ListData:
    """Read the lists of a recipe's `data` section; see `read_lists`."""
    data.refuse_choices("lists of candidates")
    return read_lists(
        list_source(data.source),
        seed=data.split_seed,
        labelled={"data": True, "teacher": False, None: None}[data.labels],
        partition=data.partition,
        split=data.split,
        trains=trains,
    )


def list_source(source: str | None) -> str:
    """Check that the lists have a source, and return it.

    Raises:
        UsageError: `source` is None.
    """
    if source is None:
        raise UsageError(
            "task rerank needs --data", "give a file or directory of queries with their passages"
        )
    return source


def _gains(scores_R: Array, lists: Lists) -> Array:
    """Turn a teacher's scores into gains. They must not be negative, so each list begins at 0."""
    lowest_Q = np.minimum.reduceat(scores_R, lists.ends - lists.sizes)
    gains_R: Array = scores_R - np.repeat(lowest_Q, lists.sizes)
    return gains_R


def load_cross_encoder(
    source: str,
    *,
    seed: int,
) -> Model:
    """Load a cross-encoder to train, and store its activation in its configuration.

    A model without a head of one output gets a new one.

    Raises:
        UsageError: The model cannot be loaded, or cannot have such a head.
    """
    model = load_for_task(source, RERANK_TASK, new_head=True, seed=seed)
    activation = activation_of(model.source, model.model.config)
    if activation is not None:
        set_activation(model.model, activation)
    return model


def activation_taught_by(teacher: Model) -> str:
    """Return the activation of a student that learns a teacher's scores.

    It is the teacher's own. Cosines, the scores of an embedding model, have none.
    """
    if isinstance(teacher, Embedder):
        return ACTIVATION_CLASSES["Identity"]
    own = activation_of(teacher.source, teacher.model.config)
    # `CrossEncoder` assumes this one for a model that names none.
    return own or ACTIVATION_CLASSES["Sigmoid"]


def open_reranker(source: str, *, pooling: str | None = None) -> Model:
    """Load a cross-encoder, an embedding model or an export of either, to score candidates.

    Raises:
        UsageError: The model cannot be loaded, or is neither.
    """
    if pooling is None and is_reranker(source):
        model = load_scored(source, RERANK_TASK)
        # Refuse an activation that would order the candidates differently.
        activation_of(source, model.model.config)
        return model
    embedder = Embedder.open_scored(source, pooling=pooling)
    return replace(embedder, note=f"cosines of its vectors; {embedder.note}")


def is_reranker(
    source: str,
) -> bool:
    """Whether a model is a cross-encoder with one output.

    Raises:
        UsageError: The model's configuration cannot be loaded.
    """
    config = load_config(source, weights=False, compacted=True)
    names = config.architectures or ()
    return config.num_labels == 1 and any(kind_of_head(config, n) == "class" for n in names)
