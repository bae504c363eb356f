"""Check a recipe before models and data are read, and the models against the recipe."""

from collections.abc import Mapping

from kdcli.deploy.runners import check_backend
from kdcli.errors import UsageError
from kdcli.losses import build_objective, check_settings, inputs_of, masks_text, on_tasks
from kdcli.models.grammar import goal_of, is_family, is_static_shape
from kdcli.models.layout import check_relations
from kdcli.models.source import is_address
from kdcli.recipe.resolve import Resolved
from kdcli.report.schema import STUDENT
from kdcli.types import ModelShape, Needs, task_title
from kdcli.verbs.distill.distill_recipes import (
    general_recipe,
    stage_settings,
    undistilled_recipe,
)
from kdcli.verbs.distill.settings import EMBEDDING, SOFT_TARGETS, DistillRecipe, StudentSettings
from kdcli.verbs.distill.space import StudentVectors, vector_settings
from kdcli.workloads.embedder import Embedder
from kdcli.workloads.embeddings import METHOD
from kdcli.workloads.requests import required_task
from kdcli.workloads.task_models import same_tokens

TOKEN_WEIGHTS = ("relations_weight", "hidden_weight")
"""Weights of the terms of the embedding loss that compare token states."""
LABELLED_KEYS = (
    "method",
    "stage",
    "loss",
    "relation",
    "general",
    "augment",
    "intermediate",
    "undistilled",
    "more_teachers",
    "soft_labels",
)
"""Keys of a recipe that only labelled rows read."""


def check_recipe(recipe: DistillRecipe) -> None:
    """Check a recipe before models and data are read.

    Raises:
        UsageError: A key is missing, or keys contradict each other.
    """
    check = {
        "text": check_text_recipe,
        "embedding": check_embedding,
        "rows": check_task,
        "outputs": check_outputs,
    }
    _check_served(recipe)
    if is_family(recipe.student.to) and recipe.variants:
        raise UsageError(
            f"--to {recipe.student.to[0]} is one training, and --ablate compares several",
            "remove --ablate, or give one shape",
        )
    check[recipe.kind](recipe)
    check_untrained(recipe)
    check_goal(recipe)


def _check_served(recipe: DistillRecipe) -> None:
    """Check that nothing but vectors is wanted of a teacher behind an address."""
    address = next(filter(is_address, [recipe.teacher or "", *recipe.more_teachers]), None)
    if address is None:
        return
    if recipe.kind != "embedding":
        reads = f"method {recipe.method} reads its teacher's states"
        if recipe.task is not None:
            reads = f"{task_title(recipe.task)} reads its teacher's outputs"
        raise UsageError(
            f"{address} gives vectors of texts alone, and {reads}",
            f"omit --task and --method (or use --method {EMBEDDING}), or give a teacher on this "
            "machine or on the hub",
        )
    unread = [key for key in TOKEN_WEIGHTS if recipe.loss.get(key)]
    if unread:
        raise UsageError(
            f"{address} gives vectors of texts alone, and loss.{unread[0]} compares token states",
            f"leave loss.{unread[0]} at 0, or give a teacher on this machine or on the hub",
        )


def check_text_recipe(recipe: DistillRecipe) -> None:
    """Check a recipe before models and data are read.

    Raises:
        UsageError: A missing teacher or shape, a wrong setting, or a method for tasks.
    """
    _check_read_keys(recipe)
    if recipe.teacher is None:
        raise UsageError(
            "no teacher given",
            "kdcli distill TEACHER --to LxH; TEACHER is a hub id, a directory or 'demo'",
        )
    if not recipe.student.to:
        raise UsageError("no student shape given", "add --to LxH, for example --to 6x384")
    check_settings(recipe.method, recipe.loss)
    if not inputs_of(recipe.method) & {"text", "masked"}:
        raise UsageError(
            f"method {recipe.method} learns from a task's examples, not from text",
            "add --task TASK",
        )


def _check_read_keys(recipe: DistillRecipe) -> None:
    """Check that a recipe sets no key that only embedding students read."""
    if recipe.data.partition is not None:
        raise UsageError(
            f"data.partition divides texts, and method {recipe.method} reads blocks of text",
            f"remove it, or use --method {EMBEDDING}",
        )
    if recipe.more_teachers:
        raise UsageError(
            f"--also-teacher: method {recipe.method} compares the states of one teacher",
            f"several teachers need --method {EMBEDDING}, or --task T",
        )
    if recipe.student.source is not None:
        raise UsageError(
            f"--student: method {recipe.method} compares token states, so its student starts from "
            "the teacher",
            f"distil another encoder with --method {EMBEDDING}, or on a task with --task T "
            f"--method {SOFT_TARGETS}",
        )
    if vector_settings(recipe) != StudentVectors():
        raise UsageError(
            f"the keys of workload: are for --method {EMBEDDING}, not for {recipe.method}",
            "omit them",
        )


def is_masked(recipe: DistillRecipe) -> bool:
    """Return whether the loss reads masked text."""
    return masks_text(recipe.method, recipe.loss)


def check_embedding(recipe: DistillRecipe) -> None:
    """Check a recipe before models and texts are read.

    Raises:
        UsageError: A missing teacher or shape, or a key that this method does not use.
    """
    if recipe.teacher is None or not (recipe.student.to or recipe.student.source):
        missing = "no teacher" if recipe.teacher is None else "no student shape"
        raise UsageError(
            f"{missing} given", "kdcli distill TEACHER --to LxH --method embedding --data TEXT"
        )
    check_settings(METHOD, recipe.loss)
    if vector_settings(recipe).vectors and recipe.more_teachers:
        raise UsageError(
            "--teacher-vectors replaces the teachers' vectors, so --also-teacher has no effect",
            "omit one of them",
        )
    if recipe.data.pack_isolated:
        raise UsageError(
            "data.pack_isolated is for methods that read blocks of text, not for embedding"
        )
    if recipe.variants or recipe.eval.at:
        raise UsageError(
            f"--ablate and eval.at are for methods that read blocks of text, not for {METHOD}"
        )


def check_signals(
    recipe: DistillRecipe, teacher: Embedder, origin: Embedder, shapes: Mapping[str, ModelShape]
) -> None:
    """Check that a loss that compares tokens has a student with the teacher's tokens and layers.

    Raises:
        UsageError: The student's tokenizer is another one, the student is static, or the teacher is
            causal. Also if a static student starts from another encoder, or its teacher's vectors
            have a length that counts.
    """
    if any(to.is_static for to in shapes.values()):
        _check_static_vectors(recipe, teacher)
    other_tokens = bool(recipe.student.source) and not same_tokens(
        teacher.tokenizer, origin.tokenizer
    )
    for name, to in shapes.items():
        needs = build_objective(METHOD, recipe.loss, teacher.shape, to).teacher_needs
        check_relations(teacher.model.config, needs)
        if needs == Needs():
            continue
        if to.is_static:
            raise UsageError(
                "loss.relations_weight and loss.hidden_weight compare token states, and a static "
                f"student ({name}) has none",
                "leave them at 0",
            )
        if other_tokens:
            raise UsageError(
                "loss.relations_weight and loss.hidden_weight compare tokens, and "
                f"{origin.source} has other tokens than {teacher.source}",
                "leave them at 0: the other terms compare whole texts",
            )


def check_static_start(student: StudentSettings, *, teacher_is_whole: bool = False) -> None:
    """Check how a static student starts.

    Args:
        student: The settings of the student.
        teacher_is_whole: Whether the teacher gives vectors alone, so that another encoder gives the
            student its tokens.

    Raises:
        UsageError: From an encoder although its teacher has tokens, or from layers.
    """
    if student.source and not teacher_is_whole:
        raise UsageError(
            "--student: a static student has the teacher's tokens and starts from its vectors",
            "omit --student, or give a shape with layers",
        )
    if student.layers is not None:
        raise UsageError(
            "student.layers names layers to copy, and a static student has none",
            "omit it, or give a shape with layers",
        )
    if student.init == "copied":
        raise UsageError(
            "student.init=copied copies layers, and a static student has none",
            "omit it, or give a shape with layers",
        )


def _check_static_vectors(recipe: DistillRecipe, teacher: Embedder) -> None:
    """Check that a static student can learn from a teacher.

    Raises:
        UsageError: The recipe gives the student layers or an encoder, or the teacher's vectors have
            a length that counts.
    """
    fmt = teacher.format
    check_static_start(recipe.student, teacher_is_whole=fmt.library)
    if fmt.similarity != "cosine" and not fmt.normalize:
        raise UsageError(
            f"the vectors of {teacher.source} are compared by {fmt.similarity}, so that their "
            "length counts; a static student's vectors have length 1",
            "give a shape with layers, such as 3x384",
        )


def check_task(recipe: DistillRecipe) -> None:
    """Check a recipe before models and data are read.

    Raises:
        UsageError: A key is missing, or keys contradict each other.
    """
    check_teacher(recipe)
    check_one_student(recipe)
    if recipe.general.use and recipe.student.source is not None:
        raise UsageError(
            "--student names a student, but the stage on text would make one",
            "omit one of them",
        )
    if any(map(is_static_shape, recipe.student.to)):
        _check_static_rows(recipe)
    on_tasks(recipe.method)
    if recipe.general.use:
        general_recipe(recipe)
    if masks_text(recipe.method, recipe.loss):
        raise UsageError(
            "loss.masked_lm_weight: the examples of a task are not masked",
            "omit it; for the stage on text set general.overrides.loss.masked_lm_weight",
        )
    stage_settings(recipe)
    if recipe.train.trains:
        undistilled_recipe(recipe, STUDENT)


def check_teacher(recipe: DistillRecipe) -> None:
    """Check that a recipe has a teacher and a task.

    Raises:
        UsageError: The teacher or the task is missing, or the soft labels contradict other keys.
    """
    if recipe.soft_labels is not None:
        _check_soft_labels(recipe)
    elif recipe.teacher is None:
        raise UsageError(
            "no teacher given",
            "kdcli distill TEACHER --task TASK --to LxH; TEACHER is fine-tuned on the task",
        )
    required_task(recipe.task)


def _check_soft_labels(recipe: DistillRecipe) -> None:
    """Check that soft labels contradict no other key of the recipe."""
    if recipe.teacher is not None or recipe.more_teachers:
        teacher = recipe.teacher or recipe.more_teachers[0]
        raise UsageError(
            f"--soft-labels and teacher {teacher} contradict each other",
            "the file takes the teacher's place: give one of them",
        )
    if recipe.student.source is None:
        raise UsageError(
            "--soft-labels needs --student", "there is no teacher to copy: name an encoder to train"
        )
    if recipe.method != SOFT_TARGETS:
        raise UsageError(
            f"method {recipe.method} reads a teacher's states, and --soft-labels has none",
            f"omit --method, or choose {SOFT_TARGETS}",
        )
    if recipe.augment.use:
        raise UsageError(
            "--soft-labels has no labels of the copies that --augment makes",
            "omit one of them",
        )


def _check_static_rows(recipe: DistillRecipe) -> None:
    """Check that no key of the recipe needs a student with layers."""
    check_static_start(recipe.student)
    if recipe.method != SOFT_TARGETS and recipe.stage != "none":
        raise UsageError(
            f"method {recipe.method} compares token states, and a static student has none",
            f"omit --method, or choose {SOFT_TARGETS}",
        )
    if recipe.general.use:
        raise UsageError(
            "a static student learns the task alone, so there is no stage on text",
            "omit --corpus and --general, or give a shape with layers",
        )
    if recipe.head.kind not in (None, "scratch"):
        raise UsageError(
            f"head.kind={recipe.head.kind}: a static student has no masked-language-model head",
            "omit it, or give a shape with layers",
        )


def check_one_student(recipe: DistillRecipe) -> None:
    """Check that a recipe on a task has one student, or one family.

    Raises:
        UsageError: The recipe has no student or several, or a family has keys of one student.
    """
    if is_family(recipe.student.to):
        family = f"--to {recipe.student.to[0]}"
        if recipe.general.use:
            raise UsageError(
                f"the stage on text (--corpus, --general) makes one student, and {family} several",
                f"distil on text first (kdcli distill MODEL {family} --data TEXT), then each "
                "member on the task with --student",
            )
        if recipe.kind == "rows" and recipe.undistilled.use:
            raise UsageError(
                f"undistilled.use trains one student without its teacher, and {family} has several",
                "omit it, or compare with kdcli finetune",
            )
    if len(recipe.student.to) > 1:
        raise UsageError(
            "on a task, one student is distilled at a time, but "
            f"{len(recipe.student.to)} shapes were given",
            "run the command once for each --to",
        )
    if not recipe.student.to and recipe.student.source is None:
        raise UsageError(
            "no student given", "add --to LxH, for example --to 6x384, or --student DIR"
        )


def check_outputs(recipe: DistillRecipe) -> None:
    """Check a recipe before models and data are read.

    Raises:
        UsageError: There is no teacher or no student, or a key is set that such a distillation does
            not read.
    """
    plain = DistillRecipe(task=recipe.task, method=SOFT_TARGETS)
    unread = [name for name in LABELLED_KEYS if getattr(recipe, name) != getattr(plain, name)]
    task = task_title(str(recipe.task))
    if unread:
        raise UsageError(
            f"{task} does not read {', '.join(unread)}: its student learns the outputs of one "
            "teacher",
            "omit them",
        )
    if recipe.teacher is None and recipe.student.source is None:
        raise UsageError(
            "no teacher given",
            f"kdcli distill TEACHER --task {recipe.task} --to LxH --data DIR; or give --student "
            "and scores in the data",
        )
    check_one_student(recipe)


def check_untrained(recipe: DistillRecipe) -> None:
    """Check that a student that is not trained is made from its teacher.

    Raises:
        UsageError: Another model is the student.
    """
    if recipe.train.trains:
        return
    made_elsewhere = {
        "--student": recipe.student.source is not None,
        "the stage on text (--corpus, --general)": recipe.general.use,
    }
    for name, is_given in made_elsewhere.items():
        if is_given:
            raise UsageError(
                "--max-steps 0 saves a student made from its teacher without training, so it "
                f"cannot be combined with {name}",
                "omit one of them",
            )


def check_goal(recipe: DistillRecipe) -> None:
    """Check that no other key contradicts a goal, and that its backend can be used here.

    Raises:
        UsageError: Another key contradicts the goal.
        MachineError: The backend cannot be used here.
    """
    goal = goal_of(recipe.student.to)
    if goal is None:
        return
    if isinstance(recipe.student.layers, list):
        raise UsageError(
            f"student.layers names the layers of one shape, and --to {goal} chooses the shape",
            "remove it, set student.layers=measured, or give a shape",
        )
    if recipe.kind == "rows" and recipe.student.source is not None:
        raise UsageError(
            f"--student names the student, so --to {goal} has nothing to choose", "omit one of them"
        )
    backend, _, precision = recipe.student.backend.partition("-")
    check_backend(backend, precision or "fp32")


def check_goals(variants: Mapping[str, Resolved[DistillRecipe]]) -> None:
    """Check that variants with a goal can take the shape that is chosen for the first variant.

    Raises:
        UsageError: A variant has another goal or another backend.
    """
    first, *_ = (resolved.recipe.student for resolved in variants.values())
    expected = goal_of(first.to), first.backend
    for name, resolved in variants.items():
        student = resolved.recipe.student
        goal = goal_of(student.to)
        if goal is not None and (goal, student.backend) != expected:
            raise UsageError(
                f"variant {name} asks for {goal} on {student.backend}, but one shape is chosen for "
                f"all variants, for {''.join(first.to) or first.source} on {first.backend}",
                "use the same student.to and student.backend, or run the variants one by one",
            )
