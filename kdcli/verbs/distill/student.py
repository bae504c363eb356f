"""Build the engine's job for a distillation.

Each student has its own loss against the signals of one teacher.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial, reduce
from operator import or_

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kdcli.engine.session import Session
from kdcli.errors import MachineError, UsageError
from kdcli.listing import joined
from kdcli.losses import build_objective
from kdcli.losses.relation import why_no_triton
from kdcli.losses.states import StateProjection
from kdcli.messages import log
from kdcli.models.capture import capture, params_without_grad
from kdcli.models.layout import Layout, layout_for
from kdcli.models.least_squares import Inputs, fit_linear
from kdcli.models.sample import real_states, sample_of
from kdcli.models.shape import InitializedStudent, positions_of, shape_of, student_config
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
    log(
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
        total = StepLoss(student(batch, signals)).total
        if not torch.isfinite(total):
            raise UsageError(
                f"{name}: the loss of the first batch is NaN or infinite, before any training",
                "the teacher's states may be too large: give --set train.dtype=fp32",
            )
        unreached[name] = params_without_grad(weights, total)
        reached |= {id(weight) for n, weight in weights.items() if n not in unreached[name]}
    for name, student in students.items():
        # Members of a family share weights, which one of them may reach, or has frozen already.
        named = {n: student.get_parameter(n) for n in unreached[name]}
        frozen = [n for n, p in named.items() if p.requires_grad and id(p) not in reached]
        for parameter in frozen:
            named[parameter].requires_grad_(False)
        if frozen:
            modules = {p.rpartition("captured.model.")[2].rsplit(".", 1)[0] for p in frozen}
            log(
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


CHECKED_TOKENS = 16
"""Number of tokens on which a member is compared with the model that transformers loads."""
MAX_TURNS = 10_000
"""After so many turns, members have run nearly the same number of layers."""


def check_members(text: str, shapes: Iterable[ModelShape]) -> None:
    """Check that the members of a family differ in their numbers of layers alone.

    Raises:
        UsageError: A member is static, or differs in something else or in nothing.
    """
    first, *others = shapes
    alone = "repeat --to with single shapes to train them apart"
    for shape in (first, *others):
        if shape.is_static:
            raise UsageError(f"--to {text}: a static student has no layers to share", alone)
        if replace(shape, layers=first.layers) != first:
            raise UsageError(
                f"--to {text}: {shape} and {first} differ in more than their layers, which they "
                "would share",
                f"give all members the same width, such as {shape.layers}x{first.hidden}; or "
                f"{alone}",
            )
    if len({shape.layers for shape in (first, *others)}) <= len(others):
        raise UsageError(f"--to {text} names a number of layers twice", "remove one of them")


def nested_layers(depths: Collection[int]) -> dict[int, list[int]]:
    """Return the layers 1 ... N of the whole network that a member of each depth keeps.

    N is the largest depth. A member keeps the first and the last layer of the next larger member,
    and evenly spaced layers between them: 6, 4, 3 and 2 layers are all six, {1, 2, 4, 6},
    {1, 2, 6} and {1, 6}. A member with one layer keeps the last.
    """
    kept = list(range(1, max(depths) + 1))
    nested: dict[int, list[int]] = {}
    for depth in sorted(depths, reverse=True):
        last = len(kept) - 1
        places = [last] if depth == 1 else [m * last // (depth - 1) for m in range(depth)]
        kept = nested[depth] = [kept[place] for place in places]
    return nested


def members(
    whole: InitializedStudent, depths: Mapping[str, int], nested: Mapping[int, Sequence[int]]
) -> dict[str, InitializedStudent]:
    """Return views of a network with fewer layers, by name. They share its weights.

    Args:
        whole: The largest member.
        depths: The number of layers of each member.
        nested: The layers 1 ... N of the largest that a member of each depth keeps.

    Raises:
        UsageError: A layer works only in its place, so a view is not the model that transformers
            would load.
    """
    made = dict[str, InitializedStudent]()
    for name, depth in depths.items():
        kept = nested[depth]
        if depth == max(nested):
            made[name] = replace(whole, whole=whole.model)
            continue
        model = member(whole.model, kept)
        layers = f"layer{'s' * (len(kept) > 1)} {joined([*map(str, kept)])}"
        note = f"shares {layers} of the {max(nested)}-layer student"
        made[name] = replace(whole, model=model, notes=[note], whole=whole.model)
    return made


def member(whole: PreTrainedModel, kept: Sequence[int]) -> PreTrainedModel:
    """Return a view of a network, with a head or without, that runs some of its layers.

    The view has the class and the configuration of a stock model, and shares every module that it
    keeps.

    Raises:
        UsageError: The view differs from the model that transformers would load.
    """
    shape, layout = shape_of(whole.config), layout_for(whole.config)
    config = student_config(whole.config, replace(shape, layers=len(kept)), list(kept))
    with torch.random.fork_rng(devices=[]):
        view, stock = (type(whole)(config).float() for _ in range(2))
    _share(view, whole, _path(whole, layout), () if layout.shared else kept)
    try:
        stock.load_state_dict(view.state_dict())
        agrees = _same_outputs(view, stock)
    except RuntimeError:
        agrees = False
    if not agrees:
        raise UsageError(
            f"layers {', '.join(map(str, kept))} of a {whole.config.model_type} compute something "
            "else in a smaller model, so the members of a family cannot share them",
            "repeat --to with single shapes to train them apart",
        )
    return view.train(whole.training)


def turns_of(depths: Mapping[str, int]) -> list[str]:
    """Return the order in which members are trained, so that each runs the same number of layers.

    So a small member, which starts farthest from the teacher, has more steps. The next member is
    always the one that ran the fewest layers.
    """
    layers_run = dict.fromkeys(depths, 0)
    turns: list[str] = []
    while not turns or (len(set(layers_run.values())) > 1 and len(turns) < MAX_TURNS):
        turns.append(min(layers_run, key=lambda name: layers_run[name]))
        layers_run[turns[-1]] += depths[turns[-1]]
    return turns


class Family(nn.ModuleDict):
    """The modules of several jobs that share weights, by member, from the largest to the smallest.

    Each weight is trained and stored once.
    """

    def __init__(self, modules: Mapping[str, nn.Module], turns: Sequence[str]) -> None:
        super().__init__(modules)
        self.turns, self.done = turns, 0

    def in_turn(self) -> list[str]:
        """Return the member of a training step, or all members for the held-out loss."""
        return [self.turns[self.done % len(self.turns)]] if self.training else list(self)

    def zero_of_others(self, name: str) -> Tensor:
        """Return a zero that depends on all weights that a member lacks.

        So every step gives every weight a gradient, which several processes need to sum them.
        """
        own = set(map(id, self[name].parameters()))
        others = [p for p in self.parameters() if p.requires_grad and id(p) not in own]
        return 0 * torch.stack([p.sum() for p in others]).sum() if others else torch.zeros(())


def family_job(jobs: Mapping[str, Job], depths: Mapping[str, int]) -> Job:
    """Join jobs of members that share weights into one job, in which they take turns.

    A single job is returned as it is. The metrics are those of the first member.

    Args:
        jobs: The job of each member, from the largest to the smallest.
        depths: The number of layers of each member.
    """
    first, *others = jobs.values()
    if not others:
        return first
    modules = {name: nn.ModuleDict(dict(job.modules)) for name, job in jobs.items()}
    family = Family(modules, turns_of(depths))

    def step(batch: Batch) -> StepLoss:
        terms: dict[str, Term] = {}
        outputs: list[Tensor | None] = []
        for name in family.in_turn():
            # A step takes the teacher's signals out of its batch.
            loss = jobs[name].step(dict(batch))
            terms |= {f"{name}/{term}": value for term, value in loss.terms.items()}
            outputs.append(loss.outputs)
        if family.training:
            name, term = next(iter(terms.items()))
            zero = family.zero_of_others(name.partition("/")[0])
            terms[name] = replace(term, value=term.value + zero.to(term.value.device))
        return StepLoss(terms, outputs[0])

    def begin_next(done: int) -> None:
        family.done = done
        if first.on_step_end is not None:
            first.on_step_end(done)

    return replace(first, modules={"family": family}, step=step, on_step_end=begin_next)


def _path(model: PreTrainedModel, layout: Layout) -> list[str]:
    """Return the names that lead from a model, with a head or without, to its layers."""
    head = [] if model.base_model is model else [model.base_model_prefix]
    return [*head, *layout.layers.split(".")]


def _share(view: nn.Module, whole: nn.Module, path: Sequence[str], kept: Sequence[int]) -> None:
    """Replace the parts of `view` by those of `whole`, and its layers by the kept ones.

    Without `kept`, one module runs as every layer.
    """
    view._parameters, view._buffers = whole._parameters, whole._buffers
    own, shared = view._modules, dict(whole._modules)
    step = path[0]
    layers = shared[step]
    assert layers is not None
    if len(path) > 1:
        inner = own[step]
        assert inner is not None
        _share(inner, layers, path[1:], kept)
        shared[step] = inner
    elif kept:
        listed = list(layers.children())
        shared[step] = nn.ModuleList(listed[layer - 1] for layer in kept)
    view._modules = shared


@torch.no_grad()
def _same_outputs(view: PreTrainedModel, stock: PreTrainedModel) -> bool:
    """Return whether two models compute the same last hidden states or logits, bit for bit."""
    ids_BL = torch.arange(CHECKED_TOKENS)[None] % int(view.config.vocab_size)
    batch = {"input_ids": ids_BL, "attention_mask": torch.ones_like(ids_BL)}
    training = view.training
    first, second = (model.eval()(**batch)[0] for model in (view, stock))
    view.train(training)
    return torch.equal(first, second)
