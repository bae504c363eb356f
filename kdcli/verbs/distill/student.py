"""Build the engine's job for a distillation.

Each student has its own loss against the signals of one teacher.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial, reduce
from operator import or_

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kdcli.engine.progress import Progress
from kdcli.engine.session import Session
from kdcli.errors import MachineError
from kdcli.losses import build_objective
from kdcli.losses.relation import why_no_triton
from kdcli.losses.states import StateProjection
from kdcli.models.capture import capture, params_without_grad
from kdcli.models.least_squares import Inputs, fit_linear
from kdcli.models.sample import real_states, sample_of
from kdcli.models.shape import positions_of
from kdcli.targets.targets import Targets
from kdcli.types import (
    Batch,
    Examples,
    Job,
    ModelShape,
    Needs,
    Objective,
    Order,
    Signals,
    StepLoss,
    Term,
)
from kdcli.verbs.distill.family import family_job
from kdcli.verbs.distill.settings import DistillRecipe
from kdcli.workloads.workload import Workload


@cache
def relation_kernel(wanted: str, device: torch.device, dtype: torch.dtype) -> str:
    """Choose the kernel of the relations, one of `kdcli.losses.relation.KERNEL`.

    Args:
        wanted: The value of `relation.kernel`.
        device: The device that runs it.
        dtype: The compute dtype.

    Raises:
        MachineError: The recipe asks for Triton, which cannot run here.
    """
    if wanted == "torch" or (wanted == "auto" and device.type != "cuda"):
        return "torch"
    if wanted == "auto" and torch.cuda.get_device_capability(device) < (8, 0):
        return "torch"  # Triton has no tensor cores there.
    reason = why_no_triton(device, dtype)
    if reason is not None and wanted == "triton":
        raise MachineError(
            f"relation.kernel=triton cannot run here: {reason}", "set relation.kernel=auto or torch"
        )
    Progress.log(
        "relations: Triton kernels, see relation.kernel"
        if reason is None
        else f"no Triton kernels: {reason}"
    )
    return wanted if reason is None else "torch"


def objective_of(
    recipe: DistillRecipe, teacher: ModelShape, to: ModelShape, session: Session
) -> Objective:
    """Build a student's objective, with projections that are drawn from the seed alone.

    Args:
        recipe: The recipe with the student's method and loss.
        teacher: The teacher's shape.
        to: The student's shape.
        session: The device and the compute dtype.
    """
    kernel = relation_kernel(recipe.relation.kernel, session.device, session.compute_dtype)
    torch.manual_seed(recipe.train.seed)
    return build_objective(recipe.method, recipe.loss, teacher, to, kernel=kernel)


class Student(nn.Module):
    """An encoder, its loss and the loss's projections.

    They are trained, clipped and checkpointed together.
    """

    def __init__(
        self, encoder: PreTrainedModel, objective: Objective, pool: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.objective = objective
        self.captured = capture(encoder, objective.student_needs, pool)
        self.projections = objective.projections

    @property
    def encoder(self) -> PreTrainedModel:
        return self.captured.model

    def forward(self, batch: Batch, teacher: Signals) -> Mapping[str, Term]:
        return objective_terms(self.objective, teacher, self.captured(batch))


def objective_terms(objective: Objective, teacher: Signals, student: Signals) -> dict[str, Term]:
    """Return the terms of an objective, each with the units that it is a mean over."""
    return {
        name: Term(value, objective.over[name])
        for name, value in objective.terms(teacher, student).items()
    }


def teacher_needs(students: Mapping[str, Student]) -> Needs:
    """Return the teacher's signals that the losses of all students read."""
    return reduce(or_, (student.objective.teacher_needs for student in students.values()))


@torch.no_grad()
def fit_projections(
    objective: Objective, teacher: PreTrainedModel, student: PreTrainedModel, text: Examples | None
) -> None:
    """Fit the projections of narrower states to the teacher's states by least squares.

    The fit uses a sample of `text`. Random projections would first pull the student's states away
    from their start. Both models must be on the CPU.
    """
    fitted = [
        p
        for p in objective.projections.modules()
        if isinstance(p, StateProjection) and p.in_features < p.out_features
    ]
    if not fitted or text is None:
        return
    sample = sample_of(text, student.config, positions_of(student.config))

    def states(model: PreTrainedModel, layers: Iterable[int]) -> dict[int, Tensor]:
        training = model.training
        hidden = capture(model.eval(), Needs(hidden=frozenset(layers)))(sample).hidden
        model.train(training)
        return {n: real_states(x_BLD, sample).double() for n, x_BLD in hidden.items()}

    pairs = [pair for p in fitted for pair in p.pairs]
    student_states = states(student, (m for m, _ in pairs))
    teacher_states = states(teacher, (n for _, n in pairs))
    for p in fitted:
        p.weight.zero_()
        fit_linear(
            p,
            Inputs(torch.cat([student_states[m] for m, _ in p.pairs]), has_bias=p.bias is not None),
            torch.cat([teacher_states[n] for _, n in p.pairs]),
        )


def freeze_unreached(
    students: Mapping[str, Student], teacher: PreTrainedModel, batch: Batch
) -> None:
    """Freeze and log the weights that a student's loss does not depend on.

    All models and the batch must be on the CPU.
    """
    with torch.no_grad():
        signals = capture(teacher, teacher_needs(students))(batch)
    freeze_unused_weights(students, batch, signals)


def freeze_unused_weights(students: Mapping[str, Student], batch: Batch, signals: Signals) -> None:
    """Freeze and log unreached weights, given the teacher's signals for the batch."""
    unreached: dict[str, list[str]] = {}
    reached = set[int]()
    for name, student in students.items():
        weights = dict(student.named_parameters())
        unreached[name] = params_without_grad(weights, StepLoss(student(batch, signals)).total)
        reached |= {id(weight) for n, weight in weights.items() if n not in unreached[name]}
    for name, student in students.items():
        # Members of a family share weights, which one of them may reach, or has frozen already.
        named = {n: student.get_parameter(n) for n in unreached[name]}
        frozen = [n for n, p in named.items() if p.requires_grad and id(p) not in reached]
        for parameter in frozen:
            named[parameter].requires_grad_(False)
        if frozen:
            modules = {p.rpartition("captured.model.")[2].rsplit(".", 1)[0] for p in frozen}
            Progress.log(
                f"{name}: the loss does not use {len(frozen)} tensors after the last compared "
                f"layer; they are not trained: {', '.join(sorted(modules))}"
            )


def distill_job(
    students: Mapping[str, Student],
    targets: Targets,
    workload: Workload,
    order: Order,
    *,
    on_step_end: Callable[[int], None] | None = None,
) -> Job:
    """Build the job that trains students of one teacher on a workload's examples."""
    weights = [id(weight) for student in students.values() for weight in student.parameters()]
    if len(set(weights)) < len(weights):
        alone = partial(distill_job, targets=targets, workload=workload, order=order)
        jobs = {name: alone({name: one}, on_step_end=on_step_end) for name, one in students.items()}
        depths = {n: int(one.encoder.config.num_hidden_layers) for n, one in students.items()}
        return family_job(jobs, depths)
    examples, held_out = targets.attach(workload.examples, workload.held_out)

    def step(batch: Batch) -> StepLoss:
        teacher = targets.signals(batch)
        assert teacher is not None
        terms: dict[str, Term] = {}
        for name, student in students.items():
            prefix = f"{name}/" if len(students) > 1 else ""
            terms |= {f"{prefix}{name}": term for name, term in student(batch, teacher).items()}
        return StepLoss(terms)

    return Job(students, step, examples, order, held_out, on_step_end=on_step_end)
