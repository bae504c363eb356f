"""`kdcli distill`."""

from typing import TYPE_CHECKING

from kdcli.cli.verb import COMPRESS, TRAINING, Given, Printable, verb
from kdcli.errors import UsageError

if TYPE_CHECKING:
    from kdcli.recipe.resolve import Resolved
    from kdcli.verbs.distill.settings import DistillRecipe

EMBEDDING = "embedding"
"""The task and the method of embedding models, which are distilled on text."""
RETRIEVAL = "retrieval"
"""The task that scores embedding models on searches."""


@verb(
    *TRAINING,
    examples=(
        "kdcli distill demo --to 2x64 --max-steps 100",
        "kdcli distill runs/teacher --task mrpc --to 3x384",
    ),
    panel=COMPRESS,
)
def distill(given: Given) -> Printable | None:
    """Train a smaller student of an encoder: on unlabelled text, or on a task with --task."""
    if (named := given["named_teacher"]) is not None:
        if given["teacher"] is not None:
            raise UsageError(
                f"{given['teacher']} and --teacher {named} are two teachers",
                "give one of them; --student MODEL names the encoder that the student starts from",
            )
        given.values["teacher"] = named
    _check_shapes(given)
    if given["task"] == RETRIEVAL:
        raise UsageError(
            f"task {RETRIEVAL} scores embedding models, and trains none",
            f"distil with --data TEXT instead of --task, and score with --eval-task {RETRIEVAL} "
            "--set eval.source=DIR",
        )
    if given.recipe is None:
        _choose_embedding(given)
    from kdcli.recipe.resolve import ablations, variant_origin
    from kdcli.verbs.distill.distill_recipes import distill_recipe
    from kdcli.verbs.distill.settings import DistillOptions

    options, own = given.run_options, given.of(DistillOptions)
    resolved = distill_recipe(recipe=given.recipe, sets=given.sets, options=given.keys())
    chosen = {"task", "method"} & resolved.origins.keys()
    if given["teacher"] is not None and given.recipe is None and not chosen:
        _detect_task(given, resolved)
        resolved = distill_recipe(recipe=None, sets=given.sets, options=given.keys())
    keys = given.keys()
    changes = ablations(own.ablate) if own.ablate is not None else {}
    if changes and resolved.recipe.kind in ("text", "embedding"):
        keys["variants"] = changes
        resolved = distill_recipe(recipe=given.recipe, sets=given.sets, options=keys)
    if own.augment_only is not None and resolved.recipe.kind != "rows":
        raise UsageError("--augment-only needs --task", "it copies the rows of a task")
    from kdcli.verbs.distill import run

    if own.augment_only is not None:
        return given.show(run.write_copies(resolved, options, own.augment_only))
    if changes and resolved.recipe.kind == "outputs":
        raise UsageError(
            f"--ablate compares students on text or on labelled rows, not on task "
            f"{resolved.recipe.task}",
            "start one run for each variant",
        )
    if changes and resolved.recipe.kind == "rows":
        variants = {
            name: distill_recipe(
                recipe=given.recipe,
                sets=given.sets,
                options=keys,
                above={variant_origin(str(own.ablate), name): changed},
            )
            for name, changed in changes.items()
        }
        return given.show(run.distill_variants(variants, options))
    return given.show(run.distill(resolved, options))


def _choose_embedding(given: Given) -> None:
    """Choose method `embedding` for the task of this name, and for options that only it reads."""
    from kdcli.models.source import is_address

    served = is_address(given["teacher"] or "")
    wants_vectors = served or given["pooling"] or given["teacher_vectors"]
    if given["task"] == EMBEDDING:
        if given["method"] not in (None, EMBEDDING):
            raise UsageError(
                f"--task {EMBEDDING} is distilled with --method {EMBEDDING}, not {given['method']}",
                "remove --task or --method",
            )
        given.values["task"] = None
    elif given["task"] is not None or not wants_vectors:
        return
    if given["method"] is None:
        given.values["method"] = EMBEDDING


def _check_shapes(given: Given) -> None:
    """Raise UsageError for a shape that does not fit, before torch is loaded."""
    from kdcli.models.grammar import goal_of, is_static_shape, parse_shape, shapes_in
    from kdcli.models.source import sizes_on_disk

    if goal_of(given["to"] or []) is not None:
        return

    # With --student, a shape is relative to another model.
    is_relative = given["teacher"] is not None and given["student"] is None
    sizes = sizes_on_disk(given["teacher"]) if is_relative else None
    if sizes is None:
        return
    for text in shapes_in(given["to"] or [], sizes):
        # The width of the teacher's vectors is known when the teacher is loaded.
        if not is_static_shape(text):
            parse_shape(text, sizes)


def _detect_task(given: Given, resolved: "Resolved[DistillRecipe]") -> None:
    """Set the task that the teacher was trained for, unless an option is for text alone."""
    from kdcli.messages import log
    from kdcli.recipe.resolve import set_among
    from kdcli.types import task_title
    from kdcli.verbs.distill.settings import ONLY_ON_TEXT
    from kdcli.workloads.detect import task_to_distill

    teacher = given["teacher"]
    if set_among(resolved, (*ONLY_ON_TEXT, "workload.vectors")) is not None:
        return
    if (task := task_to_distill(teacher, given["data"])) is not None:
        given.values["task"] = task
        log(f"{teacher} is distilled on {task_title(task)}; --method distils its encoder")
