"""Plan the students of a distillation: shapes, losses, assistants, and how they start."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from transformers import PretrainedConfig

from kdcli.disk import RECIPE_FILE
from kdcli.engine.progress import Progress
from kdcli.engine.run_dir import flatten_recipe
from kdcli.errors import UsageError
from kdcli.losses import build_objective, check_settings, masks_text
from kdcli.models.choose import ROWS, measured_layers
from kdcli.models.grammar import is_family, parse_shape, shapes_in
from kdcli.models.layout import check_packing, check_relations
from kdcli.models.model import Model
from kdcli.models.shape import shape_of
from kdcli.recipe.resolve import Resolved, flatten
from kdcli.run.context import RunContext
from kdcli.types import ModelShape, Start
from kdcli.verbs.distill.family import check_members
from kdcli.verbs.distill.settings import DistillRecipe, OnTextDownstream, StudentSettings
from kdcli.workloads.workload import Workload


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
        UsageError: A shape is given twice, or is none, or the members of a family differ in more
            than their layers.
    """
    texts = shapes_in(recipe.student.to, teacher)
    if len(set(texts)) < len(texts):
        raise UsageError(f"--to names a shape twice: {', '.join(texts)}")
    parsed = {text: parse_shape(text, teacher, static_width=static_width) for text in texts}
    if is_family(recipe.student.to):
        check_members(recipe.student.to[0], parsed.values())
        parsed = dict(sorted(parsed.items(), key=lambda member: -member[1].layers))
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


def start_of(student: StudentSettings, seed: int) -> Start:
    """Return how the student of a recipe starts, once its layers are chosen."""
    return Start(student.init, student.copied, student.dropout, seed)


def with_measured_layers(
    context: RunContext[DistillRecipe], workload: Workload, teacher: Model, depths: set[int]
) -> RunContext[DistillRecipe]:
    """Return the context of a run whose recipe lists the layers instead of `measured`.

    A resumed run has the layers of its own recipe. A dry run takes evenly spaced layers, because
    they cost as much.

    Args:
        context: The run.
        workload: The texts on which choices are tried.
        teacher: The model whose layers are copied.
        depths: The numbers of layers of the students.

    Raises:
        UsageError: The students have different depths.
    """
    if context.recipe.student.layers != "measured":
        return context
    if len(depths) > 1:
        raise UsageError(
            "student.layers=measured chooses layers for one depth, but the students have "
            f"{', '.join(map(str, sorted(depths)))} layers",
            "run the command once for each depth",
        )
    layers = None
    if not context.dry_run:
        (depth,) = depths
        layers = context.session.on_main(
            lambda: (
                _stored(context)
                or measured_layers(workload.comparison(teacher, ROWS), depth, Progress.log)
            )
        )
    student = context.recipe.student.model_copy(update={"layers": layers})
    recipe = context.recipe.model_copy(update={"student": student})
    origins = {**context.resolved.origins, "student.layers": "measured"}
    return replace(context, resolved=Resolved(recipe, origins))


def _stored(context: RunContext[DistillRecipe]) -> list[int] | None:
    """Return the layers in the recipe of the run that is resumed; None if it has none."""
    file = context.folder / RECIPE_FILE
    if not (context.options.resume and file.is_file()):
        return None
    layers = json.loads(flatten_recipe(file.read_text("utf-8"))["student.layers"])
    return layers if isinstance(layers, list) else None
