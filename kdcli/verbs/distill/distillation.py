"""Students that learn from teachers: how they are described, and the objective that trains them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from transformers import PretrainedConfig, PreTrainedModel

from kdcli.disk import RECIPE_FILE, as_directory
from kdcli.engine.run_dir import RunDir, flatten_recipe
from kdcli.errors import UsageError
from kdcli.losses import build_objective, check_settings, masks_text
from kdcli.messages import log
from kdcli.models.card import describe, describe_source
from kdcli.models.choose import ROWS, measured_layers
from kdcli.models.grammar import is_family, parse_shape, shapes_in
from kdcli.models.layout import check_packing, check_relations
from kdcli.models.model import Model, all_rows
from kdcli.models.shape import InitializedStudent, shape_of
from kdcli.recipe.resolve import Resolved, flatten
from kdcli.report.finish import Entry, timed_subject
from kdcli.report.schema import TEACHER, UNDISTILLED, Role
from kdcli.run.context import RunContext
from kdcli.targets.cache import StorePlace
from kdcli.targets.targets import targets_of
from kdcli.types import Card, Job, ModelShape, RowHashes, Start
from kdcli.verbs.distill.fast import how_distilled
from kdcli.verbs.distill.settings import DistillRecipe, OnTextDownstream, StudentSettings
from kdcli.verbs.distill.student import (
    Student,
    check_members,
    distill_job,
    fit_projections,
    freeze_unreached,
    members,
    nested_layers,
    teacher_needs,
)
from kdcli.workloads.training import Plan
from kdcli.workloads.workload import Workload


@dataclass(eq=False)
class Distillation:
    """Students that learn from the same teachers on the same data, in one stage.

    A subclass builds the objective and the targets of one kind of data.

    Attributes:
        context: The run, or the stage of a run.
        workload: The data.
        teachers: The teachers. An objective reads the first one. Empty if a file teaches.
        origin: The model that students are made from, or whose tokenizer they have.
        students: The students by name.
        card: The description of the first teacher as it was loaded; None without a teacher.
    """

    context: RunContext[DistillRecipe]
    workload: Workload
    teachers: Sequence[Model]
    origin: Model
    students: Mapping[str, Planned]
    card: Card | None

    @property
    def recipe(self) -> DistillRecipe:
        """The recipe of the stage."""
        return self.context.recipe

    @property
    def folder(self) -> Path:
        """The directory of the stage."""
        return self.context.folder

    @property
    def rows(self) -> RowHashes:
        """The labelled rows that trained the teachers, their students or what these start from."""
        models = (self.origin, *self.teachers)
        return all_rows(self.workload.rows, *(model.rows for model in models))

    def model_folder(self, name: str) -> Path:
        """Return where a student is saved: the stage's directory, or its own directory in it."""
        if len(self.students) == 1:
            return self.folder
        return self.folder / as_directory(name).replace(" ", "-")

    def initialized(
        self,
        shapes: Mapping[str, ModelShape],
        make: Callable[[ModelShape], InitializedStudent],
    ) -> dict[str, InitializedStudent]:
        """Make students before training: each one, or the members of a family from the largest."""
        if not is_family(self.recipe.student.to):
            return {name: make(shape) for name, shape in shapes.items()}
        largest = max(shapes.values(), key=lambda shape: shape.layers)
        depths = {name: shape.layers for name, shape in shapes.items()}
        nested = nested_layers(set(depths.values()))
        lists = {len(one): one for one in self.recipe.student.layer_lists}
        if len(lists) > 1:
            every = lists[largest.layers]
            nested = {depth: [every.index(n) + 1 for n in one] for depth, one in lists.items()}
        return members(make(largest), depths, nested)

    def members(self, whole: PreTrainedModel) -> dict[str, PreTrainedModel]:
        """Return the student, or the members of a family, given the largest one."""
        shapes = {name: planned.shape for name, planned in self.students.items()}
        made = self.initialized(shapes, lambda shape: InitializedStudent(whole, []))
        return {name: built.model for name, built in made.items()}

    def cards(self, networks: Mapping[str, PreTrainedModel]) -> dict[str, Card]:
        """Describe the first teacher and the students, for a dry run."""
        if not self.context.dry_run:
            return {}
        cards = {} if self.card is None else {TEACHER: self.card}
        for name, network in networks.items():
            cards[name] = describe(network, str(self.model_folder(name)), None)
        return cards

    def entries(
        self,
        networks: Mapping[str, PreTrainedModel],
        *,
        role: Role = "student",
        folder: Path | None = None,
    ) -> list[Entry]:
        """Describe the first teacher and the students, which have been saved.

        Args:
            networks: The students by name.
            role: Their role.
            folder: Where a single student was saved; None for `model_folder`.
        """
        models, baseline, source = list[Entry](), None, None
        if self.teachers:
            baseline, source = TEACHER, self.teachers[0].source
            timed = timed_subject(TEACHER, self.teachers[0])
            models.append(Entry(TEACHER, "teacher", self.card, timed=timed))
        made = how_distilled(self.card, self.recipe)
        for name, network in networks.items():
            place = folder or self.model_folder(name)
            saved = Entry.saved(name, role, network, place, baseline, made=made, source=source)
            models.append(replace(saved, variant=self.students[name].variant))
        return models


def card_of(teachers: Sequence[Model]) -> Card | None:
    """Describe the first teacher. Call it before a stage changes the teacher's weights."""
    return describe_source(teachers[0].model, teachers[0].source) if teachers else None


def objective_job(
    students: Mapping[str, Student],
    teacher: Model,
    workload: Workload,
    plan: Plan,
    *,
    place: StorePlace | None = None,
    trains: bool = True,
    on_step_end: Callable[[int], None] | None = None,
) -> Job:
    """Build the job that trains objectives against one teacher's signals, without labels.

    Both models must be on the CPU. The teacher is moved to the device afterwards.

    Args:
        students: The students by name.
        teacher: The teacher.
        workload: The data.
        plan: The order and number of the steps.
        place: Where the teacher's signals may be stored; None computes them in every step.
        trains: Whether the students are trained. Otherwise no weight needs to be frozen.
        on_step_end: See `Job.on_step_end`.
    """
    for student in students.values():
        fit_projections(student.objective, teacher.model, student.encoder, workload.sample)
    if trains:
        freeze_unreached(students, teacher.model, workload.examples.batch(np.arange(1)))
    targets = targets_of(
        teacher,
        workload.examples,
        teacher_needs(students),
        workload.session,
        passes=plan.schedule.steps / plan.steps_per_pass,
        place=place,
    )
    return distill_job(students, targets, workload, plan.order, on_step_end=on_step_end)


def log_notes(name: str, notes: Sequence[str]) -> None:
    """Log how a student was made and how it learns."""
    for note in notes:
        log(f"{name}: {note}")


def held_out_losses(run_dir: RunDir, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Read each student's held-out loss and its terms from the log of a run.

    They are read before training, under the name of the undistilled student, and after training.
    Without training, there is only the student.
    """
    records = [record for record in run_dir.read_log() if "held_out" in record]
    first, last = records[0], records[-1]
    quality: dict[str, dict[str, float]] = {}
    for name in names:
        prefix = f"{name}/" if len(names) > 1 else ""
        labels = [(name, last["held_out"])]
        if last["step"]:
            labels.insert(0, (name + UNDISTILLED, first["held_out"]))
        for label, losses in labels:
            terms = {
                k.removeprefix(prefix): v
                for k, v in losses.items()
                if k.startswith(prefix) and k != "loss"
            }
            quality[label] = {"loss": sum(terms.values())} | terms
    return quality


@dataclass(frozen=True)
class Planned:
    """A student that will be trained.

    Attributes:
        like: The name of its shape.
        shape: Its shape.
        recipe: The recipe with its method and loss.
        assistant: The shape of the assistant that teaches it; None for no assistant.
        variant: The name of its variant; None without variants.
    """

    like: str
    shape: ModelShape
    recipe: DistillRecipe
    assistant: ModelShape | None = None
    variant: str | None = field(default=None, compare=False)


def plan(recipe: DistillRecipe, config: PretrainedConfig) -> dict[str, Planned]:
    """Return the students by their name in the report.

    There is one student for each shape and variant. A student is skipped if another one would be
    trained in exactly the same way.

    Raises:
        UsageError: The teacher cannot keep documents apart, the teacher or an assistant cannot
            teach a shape, or variants differ in more than their methods, losses and assistants.
    """
    check_packing(config, isolated=recipe.data.pack_isolated)
    teacher = shape_of(config)
    shapes, variants = student_shapes(recipe, teacher), variants_of(recipe)
    planned: dict[str, Planned] = {}
    for variant, own in variants.items():
        assistant = assistant_shape(own, teacher, shapes)
        if assistant is not None:
            _check_assistant(recipe, assistant, teacher, shapes)
        for like, shape in shapes.items():
            objective = build_objective(own.method, own.loss, assistant or teacher, shape)
            check_relations(config, objective.teacher_needs)
            one = Planned(like, shape, own, assistant, variant or None)
            if any(_trains_as(other, one) for other in planned.values()):
                continue
            name = like
            if recipe.variants:
                name = variant if len(shapes) == 1 else f"{variant} {like}"
            planned[name] = one
    if len({masks_text(own.method, own.loss) for own in variants.values()}) > 1:
        raise UsageError(
            "some variants read masked text and some do not", "compare them in separate runs"
        )
    return planned


def _check_assistant(
    recipe: DistillRecipe,
    assistant: ModelShape,
    teacher: ModelShape,
    students: Mapping[str, ModelShape],
) -> None:
    """Check that an assistant can learn from the teacher and can teach the students.

    Raises:
        UsageError: The method cannot train the assistant, or a student is larger.
    """
    try:
        build_objective(recipe.method, recipe.loss, teacher, assistant)
    except UsageError as error:
        raise error.of(f"the teacher assistant {assistant}", "--assistant none omits it") from None
    for like, shape in students.items():
        if shape.layers > assistant.layers or shape.hidden > assistant.hidden:
            raise UsageError(
                f"student '{like}' ({shape}) is larger than its teacher assistant {assistant}",
                "give an --assistant that is at least as deep and wide, or --assistant none",
            )


def _trains_as(one: Planned, other: Planned) -> bool:
    """Return whether two students have the same shapes, and the same method and settings."""
    if replace(one, recipe=other.recipe) != other:
        return False
    settings = [
        (own.method, check_settings(own.method, own.loss)) for own in (one.recipe, other.recipe)
    ]
    return settings[0] == settings[1]


def variants_of(recipe: DistillRecipe) -> dict[str, DistillRecipe]:
    """Return the recipe of each variant by name; without variants, the recipe itself.

    A variant with another method keeps no key of the recipe's loss.

    Raises:
        UsageError: A variant sets a key other than the method, the loss and the assistant.
    """
    recipes = {}
    for name, changes in recipe.variants.items():
        changed = dict(flatten(changes))
        if wrong := [
            k for k in changed if k not in ("method", "assistant") and not k.startswith("loss.")
        ]:
            message = (
                f"variant {name} sets {wrong[0]}; variants of a run on text set method, loss and "
                "assistant"
            )
            raise UsageError(message, "compare other keys in separate runs")
        method = changed.get("method", recipe.method)
        loss = dict(recipe.loss) if method == recipe.method else {}
        loss |= {
            key.removeprefix("loss."): value
            for key, value in changed.items()
            if key.startswith("loss.")
        }
        update = {
            "method": method,
            "loss": loss,
            "assistant": changed.get("assistant", recipe.assistant),
        }
        recipes[name] = recipe.model_copy(update=update | {"variants": {}})
    return recipes or {"": recipe}


def student_shapes(
    recipe: DistillRecipe, teacher: ModelShape, static_width: int | None = None
) -> dict[str, ModelShape]:
    """Return the students' shapes by their name in the report.

    A single student is called `student`. Several students are called by their shapes as given. The
    members of a family are sorted from the largest to the smallest.

    Args:
        recipe: The recipe.
        teacher: The shape of the model that students are made from.
        static_width: The maximum width of a static student; None allows none.

    Raises:
        UsageError: A shape is invalid or repeated, the members of a family differ in more than
            their number of layers, or the lists in `student.layers` do not match the students.
    """
    texts = shapes_in(recipe.student.to, teacher)
    if len(set(texts)) < len(texts):
        raise UsageError(f"--to names a shape twice: {', '.join(texts)}")
    parsed = {text: parse_shape(text, teacher, static_width=static_width) for text in texts}
    if is_family(recipe.student.to):
        check_members(recipe.student.to[0], parsed.values())
        parsed = dict(sorted(parsed.items(), key=lambda member: -member[1].layers))
    depths = {shape.layers for shape in parsed.values()}
    lists = recipe.student.layer_lists
    if len(lists) > 1 and sorted(map(len, lists)) != sorted(depths):
        named = ", ".join(str(len(one)) for one in lists)
        raise UsageError(
            f"student.layers has lists of {named} layers, but the students have "
            f"{', '.join(map(str, sorted(depths)))}",
            "give one list for each depth",
        )
    if is_family(recipe.student.to):
        for small, large in pairwise(sorted(lists, key=len)):
            if not set(small) < set(large) or small[-1] != large[-1]:
                raise UsageError(
                    f"student.layers: {small} must be a subset of {large} and end in the same "
                    f"layer, because the members of --to {recipe.student.to[0]} share their layers",
                    "name such layers, or omit student.layers",
                )
    return parsed if len(parsed) > 1 else {"student": next(iter(parsed.values()))}


def assistant_shape(
    recipe: DistillRecipe, teacher: ModelShape, students: Mapping[str, ModelShape]
) -> ModelShape | None:
    """Return the shape of the teacher assistant that teaches all students; None for no assistant.

    A student with at most half the teacher's layers and half its width learns better from an
    assistant (MiniLM, arXiv 2002.10957, section 3.3). The assistant has the teacher's layers and
    the student's width, and learns from the teacher.

    Raises:
        UsageError: The students need different assistants.
    """
    # An assistant that is not trained has nothing to teach.
    is_useless = recipe.assistant == "auto" and not recipe.train.trains
    if recipe.assistant == "none" or is_useless:
        return None
    if recipe.assistant != "auto":
        return parse_shape(recipe.assistant, teacher)
    needed: dict[str, ModelShape | None] = dict.fromkeys(students)
    for name, shape in students.items():
        if 2 * shape.layers <= teacher.layers and 2 * shape.hidden <= teacher.hidden:
            needed[name] = replace(shape, layers=teacher.layers)
    if len(set(needed.values())) > 1:
        listed = "; ".join(f"{name}: {shape or 'none'}" for name, shape in needed.items())
        raise UsageError(
            f"the students need different teacher assistants ({listed}), so one teacher pass "
            "cannot serve them",
            "distil them one by one, or give one --assistant for all of them (none, or LxH)",
        )
    return next(iter(needed.values()))


def assistant_recipe(resolved: Resolved[DistillRecipe], short: str) -> Resolved[DistillRecipe]:
    """Return the recipe that repeats the assistant's stage alone; `short` is its shape."""
    recipe = resolved.recipe
    student = recipe.student.model_copy(update={"to": [short], "layers": None})
    origins = dict(resolved.origins) | {
        "student.to": "teacher assistant",
        "assistant": "teacher assistant",
    }
    changes = {"student": student, "assistant": "none", "variants": {}}
    return Resolved(recipe.model_copy(update=changes), origins)


def variants_recipe(
    resolved: Resolved[DistillRecipe], students: Iterable[Planned]
) -> Resolved[DistillRecipe]:
    """Return the recipe that repeats the stage of some variants' students alone."""
    recipe, wanted = resolved.recipe, {student.variant for student in students}
    kept = {v: changes for v, changes in recipe.variants.items() if v in wanted}
    return replace(
        resolved, recipe=recipe.model_copy(update={"variants": kept, "eval": OnTextDownstream()})
    )


def start_of(student: StudentSettings, depth: int, seed: int) -> Start:
    """Return how a student with `depth` layers starts, once the layers are chosen."""
    return Start(student.init, student.copied(depth), student.dropout, seed)


def with_measured_layers(
    context: RunContext[DistillRecipe],
    workload: Workload,
    teacher: Model,
    shapes: Iterable[ModelShape],
) -> RunContext[DistillRecipe]:
    """Return the context of a run whose recipe lists the layers instead of `measured`.

    A resumed run has the layers of its own recipe. A dry run takes evenly spaced layers, because
    they cost as much.

    Args:
        context: The run.
        workload: The texts on which choices are tried.
        teacher: The model whose layers are copied.
        shapes: The shapes of the students.
    """
    if context.recipe.student.layers != "measured":
        return context
    layers: list[int] | list[list[int]] | None = None
    if not context.dry_run:
        depths = sorted({shape.layers for shape in shapes}, reverse=True)
        nested = is_family(context.recipe.student.to)
        lists = context.session.on_main(
            lambda: _stored(context) or _tried(workload, teacher, depths, nested=nested)
        )
        layers = lists if len(lists) > 1 else lists[0]
    student = context.recipe.student.model_copy(update={"layers": layers})
    recipe = context.recipe.model_copy(update={"student": student})
    origins = {**context.resolved.origins, "student.layers": "measured"}
    return replace(context, resolved=Resolved(recipe, origins))


def _tried(
    workload: Workload, teacher: Model, depths: Sequence[int], *, nested: bool
) -> list[list[int]]:
    """Choose the teacher's layers for each depth by trial, from the largest depth down.

    Args:
        workload: The texts on which choices are tried.
        teacher: The model whose layers are copied.
        depths: The depths.
        nested: Whether each choice is a subset of the next larger one and ends in the same layer.
    """
    chosen: list[list[int]] = []
    comparison = workload.comparison(teacher, ROWS)
    for depth in depths:
        among = chosen[-1] if nested and chosen else None
        chosen.append(measured_layers(comparison, depth, among))
    return chosen


def _stored(context: RunContext[DistillRecipe]) -> list[list[int]]:
    """Return the layers that the run that is resumed has chosen."""
    file = context.folder / RECIPE_FILE
    if not (context.options.resume and file.is_file()):
        return []
    layers = json.loads(flatten_recipe(file.read_text("utf-8"))["student.layers"])
    return StudentSettings(layers=layers).layer_lists
