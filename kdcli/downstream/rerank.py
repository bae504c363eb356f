"""Training and judging rerankers: cross-encoders with one output, which score a query with each of its passages.

Data flow: lists -> rows of tokens -> batches of whole lists -> scores -> loss over each list -> engine -> rankings.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from kdcli.bench.latency import Subject
from kdcli.data.batches import BatchOrder, BucketOrder
from kdcli.data.labelled.features import Array, Encoded, encode
from kdcli.data.labelled.lists import RERANK, Lists, hashes_of_lists
from kdcli.downstream.settings import RerankRecipe
from kdcli.downstream.task import freeze_unused
from kdcli.errors import UsageError
from kdcli.losses.ranking import label_loss, padded, score_loss
from kdcli.metrics.bootstrap import Scorer, paired_bootstrap
from kdcli.metrics.retrieval import ranking_metrics
from kdcli.models.capture import capture
from kdcli.models.card import describe
from kdcli.models.embedder import PROMPTS, beside_model
from kdcli.models.heads import TaskModel, load_for_task, with_new_head
from kdcli.models.load import load_config, location, save_model
from kdcli.models.shape import build_student, parse_shape, positions_of, shape_of
from kdcli.models.training_rows import all_rows
from kdcli.recipe.resolve import Resolved
from kdcli.recipe.sections import Invocation
from kdcli.report.finish import measure, write_report
from kdcli.report.schema import TEACHER, UNDISTILLED
from kdcli.report.stages import StageJob
from kdcli.training.evaluation import evaluate
from kdcli.training.launch import Session, make_schedule
from kdcli.training.progress import Progress
from kdcli.training.run_dir import RunDir
from kdcli.types import Batch, Job, Needs, Outcome, RowHashes, StepLoss, Term

STUDENT = "student"
ROWS_AT_ONCE = 32  # candidates of a micro-batch, about
METRICS = RERANK.metrics
ACTIVATIONS = {"Sigmoid": "torch.nn.modules.activation.Sigmoid", "Identity": "torch.nn.modules.linear.Identity"}


def read_by(lists: Lists, model: TaskModel, max_length: int | None) -> Encoded:
    """Query and passage of each candidate as a model's tokens."""
    length = tokens_of_row(model, max_length)
    # As `CrossEncoder` reads a pair: with token types only if the tokenizer gives them unasked.
    types = model.token_types and "token_type_ids" in model.tokenizer.model_input_names
    return encode(RERANK, lists.examples, model.tokenizer, max_length=length, token_types=types)


def tokens_of_row(model: TaskModel, max_length: int | None) -> int:
    """Tokens of a row at most."""
    return int(min(max_length or RERANK.max_length, positions_of(model.model.config) or 1 << 30))


@dataclass(frozen=True)
class ListRows:
    """Lists with their rows of tokens, an `Examples` whose examples are whole lists. `labels` counts the lists."""

    lists: Lists
    rows: Encoded
    scores: Array | None  # of a teacher, [R]

    def __len__(self) -> int:
        return len(self.lists)

    @property
    def lengths(self) -> Array:
        """Tokens of the longest row of each list, [Q]."""
        return np.maximum.reduceat(self.rows.lengths, self.lists.ends - self.lists.sizes)

    def batch(self, indices: Array) -> Batch:
        """The rows of some lists, `places` [Q, M] of each list's rows (-1 behind them), `labels` [Q] that count the
        lists once each, `relevance` [R] and perhaps `scores` [R]."""
        at = self.lists.rows_of(indices)
        batch = self.rows.batch(at)
        sizes = self.lists.sizes[indices]
        within = np.arange(sizes.max())
        places = np.where(within < sizes[:, None], (np.cumsum(sizes) - sizes)[:, None] + within, -1)
        batch |= {"places": torch.from_numpy(places), "labels": torch.zeros(len(indices), dtype=torch.int64)}
        batch["relevance"] = torch.from_numpy(self.lists.labels[at].astype(np.float32))
        if self.scores is not None:
            batch["scores"] = torch.from_numpy(self.scores[at].astype(np.float32))
        return batch


def scores_of(session: Session, model: PreTrainedModel, rows: Encoded) -> Array:
    """A cross-encoder's score of each row, before its activation, [R] float32."""
    captured, by_length = capture(model, Needs(logits=True)), rows.by_length()

    def step(batch: Batch) -> StepLoss:
        logits = captured(batch).logits
        return StepLoss({"loss": Term(logits.new_zeros(()), "rows")}, logits)

    order = BatchOrder(len(rows), 1, 0)
    job = Job({"model": captured}, step, by_length, order, by_length, compute_metrics=lambda outputs: {})
    found = np.empty(len(rows), np.float32)
    found[by_length.example] = np.stack(evaluate(session, job).outputs)[:, 0]
    return found


def per_query(lists: Lists, scores_R: Array) -> dict[str, Array]:
    """Metric -> its value for each query, [Q]. Of equal scores the less relevant passage comes first, so that a model
    that cannot tell them apart gains nothing."""
    values: dict[str, list[float]] = {name: [] for name in METRICS}
    for begin, end in zip(lists.ends - lists.sizes, lists.ends, strict=True):
        order = np.lexsort((lists.labels[begin:end], -scores_R[begin:end]))
        relevance = {str(n): float(label) for n, label in enumerate(lists.labels[begin:end])}
        found = ranking_metrics([str(n) for n in order], relevance)
        for name in METRICS:
            values[name].append(found[name])
    return {name: np.array(of_query) for name, of_query in values.items()}


def judged(lists: Lists, split: str, scores: Mapping[str, Array]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Evaluations and comparisons as a report takes them; the first model is the baseline of the others."""
    evaluations: list[dict[str, Any]] = []
    comparisons: list[dict[str, Any]] = []
    scorers: dict[str, Scorer] = {}
    for name, of_model in scores.items():
        values = per_query(lists, of_model)
        scorers[name] = _mean_scorer(values)
        row = {"model": name, "task": RERANK.name, "set": "", "split": split, "n": len(lists)}
        metrics = {metric: float(of_query.mean()) for metric, of_query in values.items()}
        evaluations.append(row | {"metrics": metrics, "confusion": None, "per_class": {}, "worst": []})
    (baseline, first), *others = scorers.items()
    for name, scorer in others:
        names = {"model": name, "baseline": baseline, "task": RERANK.name, "set": ""}
        found = paired_bootstrap(scorer, first, len(lists))
        comparisons += [
            names | {"metric": m, "difference": d, "low": low, "high": high} for m, (d, low, high) in found.items()
        ]
    return evaluations, comparisons


def _mean_scorer(values: Mapping[str, Array]) -> Scorer:
    return lambda at: {name: float(of_query[at].mean()) for name, of_query in values.items()}


def set_activation(model: PreTrainedModel, name: str) -> None:
    """Write what `CrossEncoder` applies to the score into a model's configuration."""
    if hasattr(model.config, "sbert_ce_default_activation_function"):
        del model.config.sbert_ce_default_activation_function
    model.config.sentence_transformers = {"activation_fn": name}


def activation_of(model: TaskModel) -> str | None:
    """What a cross-encoder's files say of its activation, in any of the keys that have been used."""
    config = model.model.config
    told = getattr(config, "sentence_transformers", None)
    found = told.get("activation_fn") if isinstance(told, dict) else None
    found = found or getattr(config, "sbert_ce_default_activation_function", None)
    found = found or (beside_model(model.source, PROMPTS) or {}).get("activation_fn")
    return found if isinstance(found, str) else None


def is_reranker(source: str, *, trust_remote_code: bool = False) -> bool:
    """Whether a model is a cross-encoder with one output. Raises UsageError: see `kdcli.models.load`."""
    config = load_config(source, trust_remote_code=trust_remote_code, weights=False, compacted=True)
    return config.num_labels == 1 and any("ForSequenceClassification" in n for n in config.architectures or ())


def student_of(recipe: RerankRecipe, source: str, session: Session) -> Callable[[], TaskModel]:
    """Makes a model of a source's weights in the recipe's shape, with the source's head where it fits, else one drawn
    from the seed. Raises UsageError: unusable model or shape."""
    seed, trusted = recipe.train.seed, session.trust_remote_code
    origin = load_for_task(source, RERANK, new_head=True, seed=seed, trust_remote_code=trusted)
    activation = activation_of(origin)
    if activation is not None:
        set_activation(origin.model, activation)
    Progress.log(f"{source}: {origin.note}")
    full, to = shape_of(origin.model.config), recipe.student.to
    shape = full if to is None else parse_shape(to, full)

    def make() -> TaskModel:
        if shape == full and recipe.student.init == "teacher":
            return replace(origin, model=copy.deepcopy(origin.model), tokenizer=copy.deepcopy(origin.tokenizer))
        kept = recipe.student.model_dump(include={"init", "layers"})
        built = build_student(origin.model.base_model, shape, seed=seed, **kept)
        config, how = copy.deepcopy(built.model.config), {"trust_remote_code": trusted}
        model = with_new_head(built.model, config, RERANK, seed, source=source, **how)
        if recipe.student.init == "teacher" and shape.hidden == full.hidden:
            inside = f"{model.base_model_prefix}."
            head = {name: x for name, x in origin.model.state_dict().items() if not name.startswith(inside)}
            model.load_state_dict(head, strict=False)
        return replace(origin, model=model.eval(), tokenizer=copy.deepcopy(origin.tokenizer))

    return make


@dataclass(frozen=True)
class RerankTeacher:
    """What gives each candidate a score. `scores`: lists and whether they are judged by -> [R] float32; those judged
    by are asked for first."""

    source: str
    scores: Callable[[Lists, bool], Array]
    cards: Mapping[str, Any]
    rows: RowHashes


@dataclass
class RerankRun:
    """The training of a reranker, checked; its one stage."""

    resolved: Resolved[RerankRecipe]
    invocation: Invocation
    folder: Path
    session: Session
    command: str
    make: Callable[[], TaskModel]  # the student, the same each time
    teacher: RerankTeacher | None
    train: Lists
    held_out: Lists
    split: str
    notes: list[str] = field(default_factory=list)
    student: TaskModel = field(init=False)
    rows: Encoded = field(init=False)  # of the lists it is judged by
    of_teacher: Array | None = field(init=False)  # scores of these

    @property
    def stages(self) -> "list[RerankRun]":
        return [self]

    def build(self) -> StageJob:
        recipe, settings = self.resolved.recipe, self.resolved.recipe.ranking
        self.student = student = self.make()
        # Those judged by first: the training lists are read in the compute dtype.
        self.of_teacher = self.teacher.scores(self.held_out, True) if self.teacher else None
        judged_scores = self.held_out.scores if self.of_teacher is None else self.of_teacher
        scores = self.teacher.scores(self.train, False) if self.teacher else self.train.scores
        learns = not np.isnan(scores).any()
        rows = read_by(self.train, student, recipe.data.max_length)
        train = ListRows(self.train, rows, scores if learns else None)
        known = learns and not np.isnan(judged_scores).any()
        self.rows = read_by(self.held_out, student, recipe.data.max_length)
        held_out = ListRows(self.held_out, self.rows, judged_scores if known else None)
        kind = settings.loss or ("margin-mse" if learns else "listwise")
        weight = settings.weight if learns else 0.0
        labelled = not np.isnan(self.train.labels).all()
        if weight < 1 and not labelled:
            raise UsageError("the data have no labels, so ranking.weight must be 1", "leave it out")
        captured = capture(student.model, Needs(logits=True))

        def step(batch: Batch) -> StepLoss:
            places_QM = batch["places"]
            real_QM = places_QM >= 0
            s_QM = padded(captured(batch).logits[:, 0], places_QM)
            labels_QM = padded(batch["relevance"], places_QM)
            terms: dict[str, Term] = {}
            if "scores" in batch and weight:
                t_QM = padded(batch["scores"], places_QM)
                loss = score_loss(kind, s_QM, t_QM, labels_QM, real_QM, settings.temperature)
                terms["scores"] = Term(loss, "labels", weight)
            if weight < 1 or not terms:
                terms["labels"] = Term(label_loss(kind, s_QM, labels_QM, real_QM), "labels", 1 - weight or 1.0)
            return StepLoss(terms, s_QM)

        def metrics(outputs: Sequence[Array]) -> dict[str, float]:
            parts = [output[:size] for output, size in zip(outputs, self.held_out.sizes, strict=True)]
            return {name: float(v.mean()) for name, v in per_query(self.held_out, np.concatenate(parts)).items()}

        group = recipe.train.micro_batch_size or max(1, int(ROWS_AT_ONCE // self.train.sizes.mean()))
        order = BucketOrder(train.lengths, recipe.train.batch_size, group, recipe.train.seed, recipe.train.pool)
        schedule = replace(make_schedule(recipe.train, order.steps_of_pass), micro_batch_size=group)
        best = METRICS[0] if recipe.keep == "best" else None
        job = Job({"model": captured}, step, train, order, held_out, compute_metrics=metrics, best=best)
        freeze_unused(captured, step(train.batch(np.arange(1))).total)
        cards = {STUDENT: describe(student.model, str(self.folder), None)} if self.invocation.dry_run else {}
        return StageJob(job, schedule, order.steps_of_pass, cards)

    def finish(self, outcome: Outcome) -> None:
        """Judge, save and report."""
        recipe, session, student = self.resolved.recipe, self.session, self.student
        scores = {} if self.of_teacher is None else {TEACHER: self.of_teacher}
        scores[STUDENT] = scores_of(session, student.model, self.rows)
        scores[STUDENT + UNDISTILLED] = scores_of(session, self.make().model, self.rows)
        if not session.is_main:
            return
        evaluations, comparisons = judged(self.held_out, self.split, scores)
        # Scores learnt from labels alone are logits of a relevance.
        learnt_scores = self.teacher is not None or not np.isnan(self.train.scores).any()
        own = "Identity" if learnt_scores else "Sigmoid"
        set_activation(student.model, activation_of(student) or ACTIVATIONS[own])
        student.tokenizer.model_max_length = tokens_of_row(student, recipe.data.max_length)
        rows = all_rows(hashes_of_lists(self.train), student.rows, *([self.teacher.rows] if self.teacher else []))
        save_model(student.model, student.tokenizer, self.folder, rows)
        cards = dict(self.teacher.cards) if self.teacher else {}
        subjects = [Subject(TEACHER, location(self.teacher.source))] if self.teacher else []
        write_report(
            RunDir(self.folder),
            command=self.command,
            recipe=recipe.model_dump(),
            cards=cards | {STUDENT: describe(student.model, str(self.folder), self.folder)},
            folders={STUDENT: self.folder},
            latency=measure([*subjects, Subject(STUDENT, str(self.folder))], recipe.measure, session),
            outcome=outcome,
            notes=self.notes,
            auto_class="AutoModelForSequenceClassification",
            evaluations=evaluations,
            comparisons=comparisons,
        )

    def report(self) -> None:
        """The stage wrote it."""
