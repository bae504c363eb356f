"""Build the engine's job for one pruning.

The job learns from the labels, from a teacher's outputs, and from the method's own terms.
"""

import copy
import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kdcli.disk import write_atomic
from kdcli.engine.run_dir import CHECKPOINTS
from kdcli.models.capture import Capture, capture, prepare_teacher
from kdcli.models.card import describe_source
from kdcli.models.layout import layout_for
from kdcli.models.model import Model
from kdcli.pruners import Pruner, build_pruner, cap
from kdcli.report.schema import DensityPoint, Histogram
from kdcli.run.context import RunContext
from kdcli.targets.targets import Targets, Teacher, store_in
from kdcli.types import Batch, Card, Job, Needs, Schedule, Signals, StepLoss, Term
from kdcli.verbs.prune.settings import PruneRecipe
from kdcli.workloads.training import (
    first_rows,
    freeze_unused,
    log_padding,
    mixed_terms,
    total_loss,
    training_job,
)
from kdcli.workloads.workload import Workload

TRACE = f"{CHECKPOINTS}/pruning.json"
"""File of the density and the scores over training; it is deleted with the checkpoints."""
TRACE_POINTS, HISTOGRAM_BINS = 20, 40
"""Number of points of the density curve, and of bars in a histogram of scores."""
SAFE_STEP = 0.001
"""Share of the weights that scores alone may remove in one step without harm.

docs/evidence/pruning.md has the measurements.
"""


@dataclass(frozen=True)
class BuiltPruning:
    """A model under masks and its job.

    Attributes:
        recipe: The recipe of the run.
        teacher: The model that teaches; None if the recipe names none.
        model: The model under masks.
        dense: The description of the model as it was loaded.
        pruner: The method, bound to the model.
        job: The job that trains the model.
        schedule: The schedule of the job.
        steps_per_pass: The number of optimiser steps in one pass over the examples.
        warnings: Problems that the user should know before hours are spent.
    """

    recipe: PruneRecipe
    teacher: Model | None
    model: Model
    dense: Card
    pruner: Pruner
    job: Job
    schedule: Schedule
    steps_per_pass: float
    warnings: list[str]


def build_pruning(
    context: RunContext[PruneRecipe],
    workload: Workload,
    recipe: PruneRecipe,
    model: Model,
    teacher: Model | None,
    folder: Path | None,
) -> BuiltPruning:
    """Put masks on a model and make its job.

    Args:
        context: Where and how the verb runs.
        workload: The rows that the model learns.
        recipe: The recipe of the run.
        model: The model to prune.
        teacher: A model that was fine-tuned for the workload. The model also learns its outputs
            and, if the method contrasts, its states. Without labels and without a teacher, the
            model learns its own outputs before pruning.
        folder: The run directory for the trace and the teacher's signals; None writes nothing.
    """
    plan = workload.plan(recipe.train)
    # Describe the model before a copy of it is cast to the compute dtype.
    dense = describe_source(model.model, str(recipe.model))
    source = teacher
    if source is None and not workload.has_labels:
        source = replace(model, model=copy.deepcopy(model.model))
    pruner = build_pruner(
        recipe.method,
        recipe.pruner,
        model.model,
        density=1 - recipe.sparsity[0],
        steps=plan.schedule.steps,
        lr=recipe.train.lr,
    )
    encoder = encoder_parameters(model.model)
    inside = {id(p) for p in encoder.values()}
    for parameter in model.model.parameters():
        if id(parameter) not in inside:
            parameter.requires_grad_(workload.trains_head(recipe.head))
    job = _job(context, workload, recipe, model, pruner, source, folder)
    if not pruner.trains_weights and layout_for(model.model.config).autocast:
        # Frozen weights in the compute dtype take half the memory and need no casts. This comes
        # after `_job`, which runs without autocast. Some models never run under autocast.
        for parameter in encoder_parameters(model.model).values():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(context.session.compute_dtype)
    return BuiltPruning(
        recipe,
        teacher,
        model,
        dense,
        pruner,
        job,
        plan.schedule,
        plan.steps_per_pass,
        density_warnings(recipe, pruner, plan.schedule.steps),
    )


def restore_precision(model: PreTrainedModel, base: PreTrainedModel) -> None:
    """Restore the float32 values of a masked model's frozen weights.

    Args:
        model: The masked model.
        base: The encoder that the model was loaded from.
    """
    weights = base.state_dict()
    for name, parameter in encoder_parameters(model).items():
        if parameter.dtype != torch.float32:
            original = weights[name.replace("parametrizations.weight.original", "weight")]
            parameter.data = original.to(parameter.device, copy=True)


def encoder_parameters(model: PreTrainedModel) -> dict[str, torch.nn.Parameter]:
    """Return the parameters of the encoder by name, without the pooler, which is the head's."""
    named = model.base_model.named_parameters()
    return {name: p for name, p in named if not name.startswith("pooler.")}


def _job(
    context: RunContext[PruneRecipe],
    workload: Workload,
    recipe: PruneRecipe,
    model: Model,
    pruner: Pruner,
    teacher: Model | None,
    folder: Path | None,
) -> Job:
    """Build the job of a pruning."""
    session, plan = context.session, workload.plan(recipe.train)
    contrast = pruner.contrast
    log_padding(plan.order)
    student = workload.capture(model, _last_layer(model.model) if contrast else None)
    writes = folder if session.is_main else None
    trace = Trace(pruner, writes, plan.schedule.steps)
    examples, held_out = workload.examples, workload.held_out
    targets = _targets(context, workload, recipe, teacher, folder, contrasts=contrast is not None)
    if targets is not None:
        examples, held_out = targets.attach(examples, held_out)
    shared = None
    if contrast is not None:
        shared = _contrasted(workload, recipe, model, pruner, targets)

    step = _step(workload, recipe, pruner, student, targets)

    def on_step_end(done: int) -> None:
        pruner.after(done)
        trace.after(done)

    if workload.has_labels:
        batch = first_rows(workload.examples)
        losses = workload.hard(signals := workload.forward(student, batch), batch)
        freeze_unused(student, total_loss(losses, signals))
    job = training_job(workload, {"model": student}, step, plan.order, recipe.keep)
    return replace(
        job,
        examples=examples,
        held_out=held_out,
        on_step_end=on_step_end,
        param_group=pruner.param_group,
        best=job.best if pruner.density else None,
        best_from=first_at_final_density(pruner, plan.schedule.steps),
        shared=shared,
    )


def _step(
    workload: Workload,
    recipe: PruneRecipe,
    pruner: Pruner,
    student: Capture,
    targets: Targets | None,
) -> Callable[[Batch], StepLoss]:
    """Return the function that computes the loss of a batch."""
    contrast = pruner.contrast

    def step(batch: Batch) -> StepLoss:
        # The method's terms come first, so that backward reaches them last, when the activations
        # are freed.
        own: dict[str, Term] = {}
        if torch.is_grad_enabled():
            own = {name: Term(value, "rows") for name, value in pruner.terms().items()}
        # The teacher runs before the model, because it takes tensors out of the batch.
        teacher_signals = targets.signals(batch) if targets is not None else None
        signals = workload.forward(student, batch)
        teachers = [teacher_signals] if teacher_signals else []
        terms = mixed_terms(workload, signals, teachers, batch, recipe.kd)
        if contrast is not None and "own_rows" in batch:
            contrasts = contrast(_first_token(signals), batch["own_rows"], batch)
            terms |= {name: Term(value, "rows") for name, value in contrasts.items()}
        return StepLoss(terms | own, workload.outputs(signals, batch))

    return step


def _targets(
    context: RunContext[PruneRecipe],
    workload: Workload,
    recipe: PruneRecipe,
    teacher: Model | None,
    folder: Path | None,
    *,
    contrasts: bool,
) -> Targets | None:
    """Return the teacher's signals for the examples; None without a teacher."""
    if teacher is None:
        return None
    plan = workload.plan(recipe.train)
    # Only the first token's state is read. Storing whole states would fill the store.
    place = store_in(folder, recipe.cache_gb) if folder is not None and not contrasts else None
    return workload.targets(
        teacher,
        _last_layer(teacher.model) if contrasts else Needs(),
        passes=plan.schedule.steps / plan.steps_per_pass,
        place=place,
        dry_run=context.dry_run,
    )


def _contrasted(
    workload: Workload,
    recipe: PruneRecipe,
    model: Model,
    pruner: Pruner,
    targets: Targets | None,
) -> Callable[[Batch], Mapping[str, Tensor]]:
    """Return a function from a batch to the states that the method contrasts with.

    These are the states of the model before pruning and the teacher's.
    """
    # Nothing is removed yet, so the folded copy is the model as it was loaded.
    untouched, masks = copy.deepcopy((model.model, pruner.masks))
    masks.fold()
    encoder = prepare_teacher(untouched.base_model.to(workload.session.device), torch.float32)
    pretrained = Teacher(str(recipe.model), capture(encoder, _last_layer(encoder)))

    def shared(batch: Batch) -> Mapping[str, Tensor]:
        states = {cap.PRETRAINED: _first_token(pretrained.signals(batch))}
        teacher_signals = targets.signals(batch) if targets is not None else None
        if teacher_signals is not None:
            states[cap.FINETUNED_GRADIENT] = _first_token(teacher_signals)
        return states | ({cap.CLASSES: batch["labels"]} if workload.has_classes else {})

    return shared


def first_at_final_density(pruner: Pruner, steps: int) -> int:
    """Return the first step after which the density is the requested one.

    Before this step the model is larger, so its scores do not count. If the method has no target
    density, it is the last step.
    """
    if pruner.density is None:
        return steps
    final = pruner.density(steps)
    return next(done for done in range(1, steps + 1) if pruner.density(done) == final)


def _last_layer(model: PreTrainedModel) -> Needs:
    """Return a request for the last layer's hidden states."""
    return Needs(hidden=frozenset({len(layout_for(model.config).modules(model.base_model))}))


def _first_token(signals: Signals) -> Tensor:
    """Return the last layer's states of the first tokens, [B, D]."""
    ((_, hidden_BLD),) = signals.hidden.items()
    return hidden_BLD[:, 0]


def density_warnings(recipe: PruneRecipe, pruner: Pruner, steps: int) -> list[str]:
    """Return warnings about a method and a number of steps, before hours are spent on them."""
    if pruner.density is None:
        warnings = [
            f"{recipe.method} here has no target density: its regularizer, its learning rate of "
            "scores and the number of steps decide how much is removed. Results are compared with "
            f"sparsity {recipe.sparsity[0]:g}"
        ]
        if recipe.keep == "best":
            warnings.insert(
                0,
                "keep: best has no effect here, because no two evaluations have the same density: "
                "the last weights are kept",
            )
        return warnings
    densities = [pruner.density(done) for done in range(steps + 1)]
    largest = max((a - b for a, b in itertools.pairwise(densities)), default=0.0)
    if largest <= SAFE_STEP or pruner.regularise is not None or not pruner.masks.scores():
        return []
    return [
        f"{recipe.method} removes up to {largest:.2%} of the weights in one of these {steps:,} "
        "steps, chosen by their scores alone; models lost what they had learned above about "
        f"{SAFE_STEP:.1%}: take more steps, or prune less"
    ]


class Trace:
    """Records the density and a histogram of the scores at some steps.

    A resumed run continues the file.
    """

    def __init__(self, pruner: Pruner, folder: Path | None, steps: int) -> None:
        self.pruner, self.every, self.steps = pruner, max(1, steps // TRACE_POINTS), steps
        self.file = folder / TRACE if folder is not None else None
        self.curve: list[DensityPoint] = []
        self.histograms: list[Histogram] = []
        if self.file is not None and self.file.is_file():
            lists = json.loads(self.file.read_text("utf-8"))
            self.curve = [DensityPoint.model_validate(each) for each in lists["curve"]]
            self.histograms = [Histogram.model_validate(each) for each in lists["histograms"]]

    def after(self, done: int) -> None:
        """Record the state after a step, if it is one of the recorded steps."""
        self.curve = [point for point in self.curve if point.step < done]
        self.histograms = [each for each in self.histograms if each.step < done]
        if done % self.every and done != self.steps:
            return
        # Reading the density waits for the device, so it is read at a few steps only.
        density = self.pruner.masks.density()
        self.curve.append(DensityPoint(step=done, density=density))
        if scores := self.pruner.masks.scores():
            self.histograms.append(_histogram(done, scores))
        if self.file is not None:
            lists = {
                "curve": [point.model_dump() for point in self.curve],
                "histograms": [each.model_dump() for each in self.histograms],
            }
            write_atomic(self.file, json.dumps(lists))


def _histogram(step: int, scores: Mapping[str, Tensor]) -> Histogram:
    """Count all scores in equal bins between the smallest and the largest."""
    extremes = [(float(s.min()), float(s.max())) for s in scores.values()]
    low, high = min(a for a, _ in extremes), max(b for _, b in extremes)
    # Before the first step all scores are equal.
    high = high if high > low else low + 1.0
    by_matrix = [torch.histc(s.float(), HISTOGRAM_BINS, low, high) for s in scores.values()]
    counts = torch.stack(by_matrix).sum(0)
    edges = np.linspace(low, high, HISTOGRAM_BINS + 1).tolist()
    return Histogram(step=step, edges=edges, counts=counts.long().tolist())
