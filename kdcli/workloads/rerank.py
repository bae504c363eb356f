"""Training rerankers: cross-encoders with one output, which score a query with each of its passages.

Data flow: lists -> rows of tokens -> batches of whole lists -> scores -> loss over each list -> engine -> rankings.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from kdcli.data.batches import BucketOrder
from kdcli.data.labelled.features import Array, TokenizedRows
from kdcli.data.labelled.lists import RERANK, Lists
from kdcli.data.labelled.rows import hashes_of
from kdcli.deploy.latency import Subject
from kdcli.engine.launch import Session, make_schedule
from kdcli.engine.progress import Progress
from kdcli.engine.run_dir import RunDir
from kdcli.errors import UsageError
from kdcli.losses.ranking import label_loss, padded, score_loss
from kdcli.models.capture import capture
from kdcli.models.card import describe
from kdcli.models.heads import load_for_task, with_new_head
from kdcli.models.load import location, save_model
from kdcli.models.model import Model
from kdcli.models.shape import build_student, parse_shape, shape_of
from kdcli.models.training_rows import all_rows
from kdcli.recipe.resolve import Resolved
from kdcli.recipe.sections import RunOptions
from kdcli.report.finish import ReportContents, ReportedModel, measure, write_report
from kdcli.report.schema import TEACHER, UNDISTILLED
from kdcli.run.stages import StageJob
from kdcli.types import Batch, Card, Job, Needs, Outcome, RowHashes, StepLoss, Term
from kdcli.workloads.rankings import ranked
from kdcli.workloads.reranker import (
    METRICS,
    activation_of,
    per_query,
    read_by,
    scores_of,
    tokens_of_row,
)
from kdcli.workloads.settings import RerankRecipe
from kdcli.workloads.task import freeze_unused

STUDENT = "student"
ROWS_AT_ONCE = 32  # candidates of a micro-batch, about
ACTIVATIONS = {
    "Sigmoid": "torch.nn.modules.activation.Sigmoid",
    "Identity": "torch.nn.modules.linear.Identity",
}


@dataclass(frozen=True)
class ListRows:
    """Lists with their rows of tokens, an `Examples` whose examples are whole lists. `labels` counts the lists."""

    lists: Lists
    rows: TokenizedRows
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
        batch |= {
            "places": torch.from_numpy(places),
            "labels": torch.zeros(len(indices), dtype=torch.int64),
        }
        batch["relevance"] = torch.from_numpy(self.lists.labels[at].astype(np.float32))
        if self.scores is not None:
            batch["scores"] = torch.from_numpy(self.scores[at].astype(np.float32))
        return batch


def set_activation(model: PreTrainedModel, name: str) -> None:
    """Write what `CrossEncoder` applies to the score into a model's configuration."""
    if hasattr(model.config, "sbert_ce_default_activation_function"):
        del model.config.sbert_ce_default_activation_function
    model.config.sentence_transformers = {"activation_fn": name}


def student_of(
    recipe: RerankRecipe, source: str, session: Session, train: Lists
) -> Callable[[], Model]:
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

    def make() -> Model:
        if shape == full and recipe.student.init != "random":
            return replace(
                origin, model=copy.deepcopy(origin.model), tokenizer=copy.deepcopy(origin.tokenizer)
            )
        kept = recipe.student.model_dump(include={"init", "layers"})
        few = read_by(train.take(np.arange(min(len(train), 100))), origin, recipe.data.max_length)
        built = build_student(origin.model.base_model, shape, text=few, seed=seed, **kept)
        config, how = copy.deepcopy(built.model.config), {"trust_remote_code": trusted}
        model = with_new_head(built.model, config, RERANK, seed, source=source, **how)
        if recipe.student.init != "random" and shape.hidden == full.hidden:
            inside = f"{model.base_model_prefix}."
            head = {
                name: x
                for name, x in origin.model.state_dict().items()
                if not name.startswith(inside)
            }
            model.load_state_dict(head, strict=False)
        return replace(origin, model=model.eval(), tokenizer=copy.deepcopy(origin.tokenizer))

    return make


@dataclass(frozen=True)
class RerankTeacher:
    """What gives each candidate a score. `scores`: lists and whether they are judged by -> [R] float32; those judged
    by are asked for first."""

    source: str
    scores: Callable[[Lists, bool], Array]
    card: Card
    rows: RowHashes


@dataclass
class RerankRun:
    """The training of a reranker, checked; its one stage."""

    resolved: Resolved[RerankRecipe]
    invocation: RunOptions
    folder: Path
    session: Session
    command: str
    make: Callable[[], Model]  # the student, the same each time
    teacher: RerankTeacher | None
    train: Lists
    held_out: Lists
    split: str
    notes: list[str] = field(default_factory=list)
    student: Model = field(init=False)
    rows: TokenizedRows = field(init=False)  # of the lists it is judged by
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
                terms["labels"] = Term(
                    label_loss(kind, s_QM, labels_QM, real_QM), "labels", 1 - weight or 1.0
                )
            return StepLoss(terms, s_QM)

        def metrics(outputs: Sequence[Array]) -> dict[str, float]:
            parts = [
                output[:size] for output, size in zip(outputs, self.held_out.sizes, strict=True)
            ]
            return {
                name: float(v.mean())
                for name, v in per_query(self.held_out, np.concatenate(parts)).items()
            }

        group = recipe.train.micro_batch_size or max(
            1, int(ROWS_AT_ONCE // self.train.sizes.mean())
        )
        order = BucketOrder(
            train.lengths, recipe.train.batch_size, group, recipe.train.seed, recipe.train.pool
        )
        schedule = replace(make_schedule(recipe.train, order.steps_of_pass), micro_batch_size=group)
        best = METRICS[0] if recipe.keep == "best" else None
        size = max(1.0, float(self.held_out.sizes.max() / self.train.sizes.mean()))
        judging: dict[str, Any] = {"compute_metrics": metrics, "best": best, "held_out_size": size}
        job = Job({"model": captured}, step, train, order, held_out, **judging)
        freeze_unused(captured, step(train.batch(np.arange(1))).total)
        cards = (
            {STUDENT: describe(student.model, str(self.folder), None)}
            if self.invocation.dry_run
            else {}
        )
        return StageJob(job, schedule, order.steps_of_pass, cards)

    def finish(self, outcome: Outcome) -> None:
        """Judge, save and report."""
        recipe, session, student = self.resolved.recipe, self.session, self.student
        scores = {} if self.of_teacher is None else {TEACHER: self.of_teacher}
        scores[STUDENT] = scores_of(session, student.model, self.rows)
        scores[STUDENT + UNDISTILLED] = scores_of(session, self.make().model, self.rows)
        if not session.is_main:
            return
        per_model = {name: per_query(self.held_out, of_model) for name, of_model in scores.items()}
        evaluations, comparisons = ranked(RERANK.name, self.split, per_model)
        # Scores learnt from labels alone are logits of a relevance.
        learnt_scores = self.teacher is not None or not np.isnan(self.train.scores).any()
        own = "Identity" if learnt_scores else "Sigmoid"
        set_activation(student.model, activation_of(student) or ACTIVATIONS[own])
        student.tokenizer.model_max_length = tokens_of_row(student, recipe.data.max_length)
        rows = all_rows(
            hashes_of(self.train.examples),
            student.rows,
            *([self.teacher.rows] if self.teacher else []),
        )
        save_model(student.model, student.tokenizer, self.folder, rows)
        models, subjects = [], []
        if self.teacher is not None:
            models.append(ReportedModel(TEACHER, "teacher", self.teacher.card))
            subjects.append(Subject(TEACHER, location(self.teacher.source)))
        card = describe(student.model, str(self.folder), self.folder)
        baseline = TEACHER if self.teacher is not None else None
        models.append(ReportedModel(STUDENT, "student", card, baseline, self.folder))
        subjects.append(Subject(STUDENT, str(self.folder)))
        contents = ReportContents(
            self.command,
            recipe,
            models,
            outcome=outcome,
            latency=measure(subjects, recipe.measure, session),
            evaluations=evaluations,
            comparisons=comparisons,
            notes=self.notes,
            auto_class="AutoModelForSequenceClassification",
        )
        write_report(RunDir(self.folder), contents)

    def report(self) -> None:
        """The stage wrote it."""
