"""Builds the engine's job of one pruning: the task's loss, the method's masks and terms, a teacher's soft loss."""

import copy
import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kdcli.disk import disk_errors, write_atomic
from kdcli.engine.run_dir import CHECKPOINTS
from kdcli.models.capture import Capture, capture, prepare_teacher
from kdcli.models.card import describe_source
from kdcli.models.layout import layout_for
from kdcli.models.model import Model
from kdcli.pruners import Pruner, build_pruner, cap
from kdcli.targets.task_teacher import CachedSignals, cached_signals, kd_terms, store_in
from kdcli.targets.teacher import Teacher
from kdcli.types import Batch, Card, Job, Needs, Schedule, Signals, StepLoss, Term
from kdcli.verbs.prune.settings import PruneRecipe
from kdcli.workloads.task import PreparedTask, build_job, order_and_schedule, task_loss

TRACE = f"{CHECKPOINTS}/pruning.json"  # Density and scores over training; gone with the checkpoints
TRACE_POINTS, BINS = 20, 40  # Points of the density curve; bars of a histogram of scores
SAFE_STEP = 0.001  # Share of the weights that scores alone may remove in one step without harm (docs/results.md)


@dataclass(frozen=True)
class Pruning:
    """A model under masks and its job."""

    recipe: PruneRecipe
    headed: Model
    dense: Card  # card of the model as it was loaded
    pruner: Pruner
    job: Job
    schedule: Schedule
    warnings: list[str]


def build_pruning(
    task: PreparedTask,
    recipe: PruneRecipe,
    headed: Model,
    teacher: Model | None,
    folder: Path | None,
) -> Pruning:
    """Put masks on a model and make its job. `teacher`: fine-tuned on the task; its logits, and its states for methods
    that contrast, are learned too. `folder`: of the run, for the trace (main process) and the teacher's signals; None
    writes nothing."""
    schedule, dense = (
        order_and_schedule(task, recipe)[1],
        describe_source(headed.model, str(recipe.model)),
    )
    density, steps, lr = 1 - recipe.sparsity[0], schedule.steps, recipe.train.lr
    pruner = build_pruner(
        recipe.method, recipe.pruner, headed.model, density=density, steps=steps, lr=lr
    )
    inside = {id(p) for p in _encoder(headed.model).values()}
    for parameter in headed.model.parameters():
        if id(parameter) not in inside:
            # A head of label words is never trained; another always is, with its pooler.
            parameter.requires_grad_(recipe.head.kind == "scratch")
    job, schedule = _job(task, recipe, headed, pruner, teacher, folder)
    if not pruner.trains_weights:
        # Frozen weights in the compute dtype: half the memory and no casts. After `_job`, which runs without autocast.
        for parameter in _encoder(headed.model).values():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(task.session.compute_dtype)
    return Pruning(
        recipe, headed, dense, pruner, job, schedule, density_warnings(recipe, pruner, steps)
    )


def restore_precision(model: PreTrainedModel, base: PreTrainedModel) -> None:
    """Give the frozen weights of a masked model their float32 values back, from the encoder it was loaded from."""
    weights = base.state_dict()
    for name, parameter in _encoder(model).items():
        if parameter.dtype != torch.float32:
            parameter.data = weights[name.replace("parametrizations.weight.original", "weight")].to(
                parameter.device, copy=True
            )


def _encoder(model: PreTrainedModel) -> dict[str, torch.nn.Parameter]:
    """Parameters of the encoder; the pooler belongs to the head."""
    return {
        name: p for name, p in model.base_model.named_parameters() if not name.startswith("pooler.")
    }


def _job(
    task: PreparedTask,
    recipe: PruneRecipe,
    headed: Model,
    pruner: Pruner,
    teacher: Model | None,
    folder: Path | None,
) -> tuple[Job, Schedule]:
    plain, schedule = build_job(task, recipe, headed)
    trace = Trace(pruner, folder if task.session.is_main else None, schedule.steps)
    kind, student, contrast = task.data.task.kind, plain.modules["model"], pruner.contrast
    assert isinstance(student, Capture)
    taught: CachedSignals | None = None
    if teacher is not None:
        passes = schedule.steps / order_and_schedule(task, recipe)[0].steps_of_pass
        needs = Needs(logits=True) | (_last_layer(teacher.model) if contrast else Needs())
        # Whole states, of which only the first token's are read, would fill the store.
        store = store_in(folder, recipe.cache_gb) if folder is not None and not contrast else None
        taught = cached_signals(teacher, task, needs, passes, store)
    shared: Callable[[Batch], Mapping[str, Tensor]] | None = None
    if contrast is not None:
        student.needs = student.needs | _last_layer(headed.model)
        # Nothing is removed yet: the folded copy is the model as it was loaded.
        untouched, masks = copy.deepcopy((headed.model, pruner.masks))
        masks.fold()
        encoder = prepare_teacher(untouched.base_model.to(task.session.device), torch.float32)
        pretrained = Teacher(str(recipe.model), capture(encoder, _last_layer(encoder)))

        def shared(batch: Batch) -> Mapping[str, Tensor]:
            found = {cap.PRETRAINED: _first_token(pretrained.signals(batch))}
            if taught is not None:
                found[cap.FINETUNED] = _first_token(taught.signals(batch))
            return found | ({cap.CLASSES: batch["labels"]} if kind == "class" else {})

    def step(batch: Batch) -> StepLoss:
        # The method's terms come first: backward runs them last, when the activations are freed.
        own = (
            {name: Term(value, "rows") for name, value in pruner.terms().items()}
            if torch.is_grad_enabled()
            else {}
        )
        # The teacher before the model: it takes keys out of the batch that no model accepts.
        of_teacher = taught.signals(batch) if taught is not None and "labels" in batch else None
        loss, signals = task_loss(kind, student, batch)
        terms = dict(kd_terms(kind, recipe.kd, loss, signals, [of_teacher] if of_teacher else []))
        if contrast is not None and "own_rows" in batch:
            contrasts = contrast(_first_token(signals), batch["own_rows"], batch)
            terms |= {name: Term(value, "rows") for name, value in contrasts.items()}
        return StepLoss(terms | own, signals.logits)

    def on_step_end(done: int) -> None:
        pruner.after(done)
        trace.after(done)

    examples = plain.examples if taught is None else taught.examples
    job = replace(
        plain, step=step, on_step_end=on_step_end, param_group=pruner.param_group, examples=examples
    )
    best, first = (
        plain.best if pruner.density else None,
        first_at_final_density(pruner, schedule.steps),
    )
    return replace(job, best=best, best_from=first, shared=shared), schedule


def first_at_final_density(pruner: Pruner, steps: int) -> int:
    """The first step after which the density is the one asked for; the last one if it cannot be asked for. Scores
    before it are those of larger models."""
    if pruner.density is None:
        return steps
    final = pruner.density(steps)
    return next(done for done in range(1, steps + 1) if pruner.density(done) == final)


def _last_layer(model: PreTrainedModel) -> Needs:
    return Needs(hidden=frozenset({len(layout_for(model.config).modules(model.base_model))}))


def _first_token(signals: Signals) -> Tensor:
    """The last layer's states of the first tokens, [B, D]."""
    ((_, hidden_BLD),) = signals.hidden.items()
    return hidden_BLD[:, 0]


def density_warnings(recipe: PruneRecipe, pruner: Pruner, steps: int) -> list[str]:
    """What to know about a method and a number of steps before hours are spent on them."""
    if pruner.density is None:
        last = [
            "keep: best has no effect here, for no two evaluations have the same density: the last weights are kept"
        ]
        return [
            *(last if recipe.keep == "best" else []),
            f"{recipe.method} here has no density that can be asked for: its regularizer, its learning rate of "
            f"scores and the number of steps decide how much goes, and sparsity {recipe.sparsity[0]:g} is what it is "
            "compared with",
        ]
    densities = [pruner.density(done) for done in range(steps + 1)]
    most = max((a - b for a, b in itertools.pairwise(densities)), default=0.0)
    if most <= SAFE_STEP or pruner.regularise is not None or not pruner.masks.scores():
        return []
    return [
        f"{recipe.method} removes up to {most:.2%} of the weights in one of these {steps:,} steps, chosen by their "
        f"scores alone; models lost what they had learned above about {SAFE_STEP:.1%}: take more steps, or prune less"
    ]


class Trace:
    """Density and histogram of the scores at some steps; a resumed run continues the file."""

    def __init__(self, pruner: Pruner, folder: Path | None, steps: int) -> None:
        self.pruner, self.every, self.steps = pruner, max(1, steps // TRACE_POINTS), steps
        self.file = folder / TRACE if folder is not None else None
        self.lists: dict[str, list[dict[str, Any]]] = {"curve": [], "histograms": []}
        if self.file is not None and self.file.is_file():
            self.lists = json.loads(self.file.read_text("utf-8"))

    def after(self, done: int) -> None:
        self.lists = {
            name: [p for p in points if p["step"] < done] for name, points in self.lists.items()
        }
        if done % self.every and done != self.steps:
            return
        # The device is waited for, at so many points of the run.
        self.lists["curve"].append({"step": done, "density": self.pruner.masks.density()})
        if scores := self.pruner.masks.scores():
            self.lists["histograms"].append({"step": done, **_histogram(scores)})
        if self.file is not None:
            with disk_errors(self.file):
                self.file.parent.mkdir(exist_ok=True)
            write_atomic(self.file, json.dumps(self.lists))


def _histogram(scores: Mapping[str, Tensor]) -> dict[str, Any]:
    """Counts of all scores between their extremes."""
    extremes = [(float(s.min()), float(s.max())) for s in scores.values()]
    low, high = min(a for a, _ in extremes), max(b for _, b in extremes)
    # Before the first step all scores are equal.
    high = high if high > low else low + 1.0
    counts = torch.stack([torch.histc(s.float(), BINS, low, high) for s in scores.values()]).sum(0)
    return {"edges": np.linspace(low, high, BINS + 1).tolist(), "counts": counts.long().tolist()}
