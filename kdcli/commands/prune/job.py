"""Pruning as the engine sees it: a task's job with a method's masks, terms and paces, and a teacher's soft loss."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kdcli.commands.prune.settings import PruneRecipe
from kdcli.disk import write_atomic
from kdcli.downstream.task import PreparedTask, build_job, load_model, order_and_schedule, task_loss
from kdcli.models.capture import Capture, capture, prepare_teacher
from kdcli.models.heads import TaskModel
from kdcli.models.layout import layout_for
from kdcli.pruners import Pruner, build_pruner, cap
from kdcli.teachers.task_teacher import Store, cached_signals, kd_terms, load_teacher
from kdcli.teachers.teacher import Teacher
from kdcli.types import Batch, Job, Needs, Schedule, Signals, StepLoss

TRACE = "pruning.json"
"""Density and scores over training, beside log.jsonl while the run goes on."""

BINS = 40
"""Bars of a histogram of scores."""

NOTED = 20
"""How often density and scores are noted in a run."""


def load_soft_teacher(task: PreparedTask, recipe: PruneRecipe, headed: TaskModel) -> TaskModel | None:
    """The recipe's teacher; None where it names none.

    Raises:
        UsageError: see `load_teacher`.
    """
    if recipe.teacher is None:
        return None
    return load_teacher(recipe.teacher, task, headed.tokenizer, str(recipe.model), recipe.head.label_map)


def _last(model: PreTrainedModel) -> Needs:
    return Needs(hidden=frozenset({len(layout_for(model.config).modules(model.base_model))}))


def _job(
    task: PreparedTask,
    recipe: PruneRecipe,
    headed: TaskModel,
    pruner: Pruner,
    teacher: TaskModel | None,
    store: Store | None,
    trace: Trace,
) -> tuple[Job, Schedule]:
    """What the engine is handed: the task's job with the method's terms, paces and masks."""
    plain, schedule = build_job(task, recipe, headed)
    of_teacher = None
    if teacher is not None:
        order, _ = order_and_schedule(task, recipe)
        # Methods that contrast states need the teacher's too, of which only the first token's would be read.
        needs, store = (Needs(), store) if pruner.contrast is None else (_last(teacher.model), None)
        of_teacher = cached_signals(
            teacher, task, Needs(logits=True) | needs, schedule.steps / order.steps_of_pass, store
        )
    kind, kd = task.data.task.kind, recipe.kd
    listened = plain.modules["model"]
    assert isinstance(listened, Capture)
    before: Teacher | None = None
    if pruner.contrast is not None:
        listened.needs = listened.needs | _last(headed.model)
        untouched = load_model(
            recipe, task.data.task, trust_remote_code=task.session.trust_remote_code
        ).model.base_model
        pretrained = prepare_teacher(untouched.to(task.session.device), torch.float32)
        before = Teacher(str(recipe.model), capture(pretrained, _last(pretrained)))

    def step(batch: Batch) -> StepLoss:
        # First, for what comes first is differentiated last: its gradients, as large as the scores, then are not there
        # while the activations still are.
        own = pruner.terms() if torch.is_grad_enabled() else {}
        # Before the model, for it takes out of the batch what no model reads.
        heard = of_teacher.signals(batch) if of_teacher is not None and "labels" in batch else None
        loss, signals = task_loss(kind, listened, batch)
        terms = dict(kd_terms(kind, kd, loss, signals, [heard] if heard else []))
        if signals.labels is not None and pruner.contrast is not None and before is not None:
            states = {cap.PRETRAINED: _first(before.signals(batch))}
            states |= {cap.FINETUNED: _first(heard)} if heard is not None else {}
            terms |= pruner.contrast(_first(signals), states, signals.labels if kind == "class" else None)
        terms |= own
        return StepLoss(torch.stack([t.float() for t in terms.values()]).sum(), terms, signals.logits)

    def after(done: int) -> None:
        pruner.after(done)
        trace.after(done)

    examples = plain.examples if of_teacher is None else of_teacher.examples
    return replace(plain, step=step, on_step_end=after, param_group=pruner.pace, examples=examples), schedule


def _first(signals: Signals) -> Tensor:
    """The last layer's states of the first tokens, [B, D]."""
    ((_, hidden_BLD),) = signals.hidden.items()
    return hidden_BLD[:, 0]


def _thaw_or_freeze_head(headed: TaskModel, recipe: PruneRecipe) -> None:
    """A head of label words is never trained; another always is, with the pooler that belongs to it."""
    inside = {id(p) for name, p in headed.model.base_model.named_parameters() if not name.startswith("pooler.")}
    for parameter in headed.model.parameters():
        if id(parameter) not in inside:
            parameter.requires_grad_(recipe.head.kind == "scratch")


@dataclass(frozen=True)
class Prepared:
    """A model under masks, ready to be trained."""

    pruner: Pruner
    job: Job
    schedule: Schedule


def prepared(
    task: PreparedTask,
    recipe: PruneRecipe,
    headed: TaskModel,
    teacher: TaskModel | None,
    *,
    folder: Path | None,
    store: Store | None,
) -> Prepared:
    """Put masks on a model.

    Args:
        teacher: see `load_soft_teacher`.
        store: where what it says may be kept, see `remembered`.
        folder: where density and scores over training are noted; None notes nothing.
    """
    _, schedule = order_and_schedule(task, recipe)
    pruner = build_pruner(
        recipe.method,
        recipe.pruner,
        headed.model,
        density=1 - recipe.sparsity[0],
        steps=schedule.steps,
        lr=recipe.train.lr,
    )
    _thaw_or_freeze_head(headed, recipe)
    trace = Trace(pruner, folder, max(1, schedule.steps // NOTED), schedule.steps)
    job, schedule = _job(task, recipe, headed, pruner, teacher, store, trace)
    if not pruner.trains_weights:
        # Not before: making the job asks the model once, without autocast.
        _to_compute_dtype(headed.model, task.session.compute_dtype)
    return Prepared(pruner, job, schedule)


def _to_compute_dtype(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Hold what is frozen in the type it is computed in: half the memory, and nothing to cast in every step."""
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def to_full_precision(model: PreTrainedModel, dense: PreTrainedModel) -> None:
    """Give a model under masks the frozen weights as they were: those of `dense`, which never went through rounding."""
    held = dict(dense.named_parameters())
    for name, parameter in model.named_parameters():
        before = held.get(name.replace("parametrizations.weight.original", "weight"))
        if before is not None and parameter.dtype != before.dtype:
            parameter.data = before.detach().to(parameter.device, copy=True)


class Trace:
    """Density and distribution of the scores after every so many steps; goes on where a resumed run does."""

    def __init__(self, pruner: Pruner, folder: Path | None, every: int, steps: int) -> None:
        self.pruner, self.every, self.steps = pruner, every, steps
        self.file = folder / TRACE if folder is not None else None
        self.points: list[dict[str, Any]] = []
        self.histograms: list[dict[str, Any]] = []
        if self.file is not None and self.file.is_file():
            before = json.loads(self.file.read_text("utf-8"))
            self.points, self.histograms = before["curve"], before["histograms"]

    def after(self, done: int) -> None:
        """Note what is there after a step."""
        self.points, self.histograms = (
            [p for p in noted if p["step"] < done] for noted in (self.points, self.histograms)
        )
        if done % self.every and done != self.steps:
            return
        masks, scores = self.pruner.masks.masks(), self.pruner.masks.scores()
        kept, total = sum(int(m.sum()) for m in masks.values()), sum(m.numel() for m in masks.values())
        self.points.append({"step": done, "density": kept / total})
        if scores:
            self.histograms.append({"step": done, **_histogram(scores)})
        if self.file is not None:
            write_atomic(self.file, json.dumps({"curve": self.points, "histograms": self.histograms}))


def _histogram(scores: Mapping[str, Tensor]) -> dict[str, Any]:
    """Counts of all scores between their extremes."""
    extremes = [(float(s.min()), float(s.max())) for s in scores.values()]
    low, high = min(a for a, _ in extremes), max(b for _, b in extremes)
    # All scores of a run that has just begun are the same.
    high = high if high > low else low + 1.0
    counts = sum(torch.histc(s.float(), BINS, low, high) for s in scores.values())
    assert isinstance(counts, Tensor)
    return {"edges": np.linspace(low, high, BINS + 1).tolist(), "counts": counts.long().tolist()}
