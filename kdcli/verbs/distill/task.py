"""Distilling on a task: checks of recipe, models and data before anything is trained."""

import json
from dataclasses import replace
from pathlib import Path

from kdcli.data.augment.copies import rows
from kdcli.disk import check_writable, write_atomic
from kdcli.engine.launch import Session, choose_output_dir, launch
from kdcli.engine.progress import Progress
from kdcli.engine.run_dir import RunDir
from kdcli.errors import UsageError
from kdcli.losses import masks_text, on_tasks
from kdcli.models.load import load_encoder, load_tokenizer, location
from kdcli.models.model import Model
from kdcli.models.shape import parse_shape, shape_of
from kdcli.models.training_rows import training_rows
from kdcli.recipe.resolve import Resolved, defaulted
from kdcli.recipe.sections import RunOptions
from kdcli.targets.given import read_soft_labels
from kdcli.targets.task_teacher import (
    ROW_KINDS,
    GivenLogits,
    check_vocabulary,
    load_teacher,
    same_tokens,
)
from kdcli.types import ModelShape
from kdcli.verbs.distill.augment import Copies, augmented, open_words
from kdcli.verbs.distill.recipes import (
    SOFT_TARGETS,
    general_recipe,
    stage_settings,
    undistilled_recipe,
)
from kdcli.verbs.distill.settings import DistillRecipe, TaskDistillRecipe
from kdcli.verbs.distill.stages import START, STUDENT, TaskRun
from kdcli.verbs.distill.student import relation_kernel
from kdcli.verbs.distill.text import TextRun, prepare_text, read_text
from kdcli.workloads.as_trained import as_trained
from kdcli.workloads.recipes import as_finetune
from kdcli.workloads.task import PreparedTask, order_and_schedule, prepare, read_by

GENERAL = "general"  # Directory of the stage on text, inside the run


def check_teacher(recipe: TaskDistillRecipe) -> None:
    """Raise a `UsageError` without a teacher or a task."""
    if recipe.soft_labels is not None:
        _check_soft_labels(recipe)
    elif recipe.teacher is None:
        raise UsageError(
            "no teacher given",
            "kdcli distill TEACHER --task TASK --to LxH; TEACHER is fine-tuned on it",
        )
    if recipe.task is None:
        raise UsageError(
            "no task given", "add --task, for example --task sst2, or --task own for your own files"
        )


def _check_soft_labels(recipe: TaskDistillRecipe) -> None:
    if recipe.teacher is not None or recipe.more_teachers:
        given = recipe.teacher or recipe.more_teachers[0]
        raise UsageError(
            f"--soft-labels and teacher {given} contradict each other",
            "the file takes the teacher's place: give one",
        )
    if recipe.student.source is None:
        raise UsageError(
            "--soft-labels needs --student", "there is no teacher to copy: name an encoder to train"
        )
    if recipe.method != SOFT_TARGETS:
        raise UsageError(
            f"method {recipe.method} reads a teacher's states, and --soft-labels has none",
            f"leave --method out, or take {SOFT_TARGETS}",
        )
    if recipe.augment.use:
        raise UsageError(
            "--soft-labels has no labels of the copies that --augment makes",
            "leave one of them out",
        )


def check_task(recipe: TaskDistillRecipe) -> None:
    """Raise a `UsageError` for a mistake in the recipe alone, before models and data are read."""
    check_teacher(recipe)
    if len(recipe.student.to) > 1:
        raise UsageError(
            f"on a task one student is distilled at a time, {len(recipe.student.to)} shapes were given",
            "run the command once for each --to",
        )
    if not recipe.student.to and recipe.student.source is None:
        raise UsageError(
            "no student given", "add --to LxH, for example --to 6x384, or --student DIR"
        )
    if recipe.general.use and recipe.student.source is not None:
        raise UsageError(
            "--student brings a student, and the stage on text would make one",
            "leave one of them out",
        )
    on_tasks(recipe.method)
    if masks_text(recipe.method, recipe.loss):
        raise UsageError(
            "loss.masked_lm_weight: the examples of a task are not masked",
            "leave it out; for the stage on text set general.overrides.loss.masked_lm_weight",
        )
    stage_settings(recipe)
    undistilled_recipe(recipe, STUDENT)


def read_general(recipe: TaskDistillRecipe, invocation: RunOptions) -> None:
    """Tokenise the text of the stage on text, unless that is done: see `read_text`."""
    if recipe.general.use:
        inside = invocation.output_dir / GENERAL if invocation.output_dir else None
        start = Path(recipe.general.run) if recipe.general.run else inside
        if start is None or invocation.overwrite or not RunDir(start).done:
            read_text(general_recipe(recipe).recipe, invocation)


def prepare_task(
    resolved: Resolved[TaskDistillRecipe], invocation: RunOptions, session: Session
) -> TaskRun:
    """Check models and data against each other for all stages, and tokenise; claims nothing. Raises KdcliError: the
    recipe, models or data cannot be used."""
    method = resolved.recipe.method
    kd = {f"kd.{key}": value for key, value in on_tasks(method)[1].items()}
    resolved = defaulted(resolved, kd, f"method {method}")
    recipe, trusted = resolved.recipe, session.trust_remote_code
    relation_kernel(recipe.relation.kernel, session.device, session.compute_dtype)
    name = recipe.student.to[0] if recipe.student.to else Path(str(recipe.student.source)).name
    name = f"distill-{Path(str(recipe.teacher or recipe.soft_labels)).name}-{recipe.task}-{name}".replace(
        ":", "_"
    )
    folder = choose_output_dir(name, resolved, invocation, session)
    task, reader = load_task(recipe, session)
    teacher, teachers, soft = reader, [reader], None
    if recipe.soft_labels is not None:
        labels_NC, how = read_soft_labels(Path(recipe.soft_labels), task.data.task, task.data.train)
        Progress.log(f"soft labels of {recipe.soft_labels}: {how}")
        teachers, soft = [], GivenLogits(labels_NC, None)
    shape, task, reader = _student_shape(recipe, task, reader, session)
    own = {"own_tokens": task.data.task.kind in ROW_KINDS}
    teachers += [
        load_teacher(t, task, reader.tokenizer, reader.source, None, **own)
        for t in recipe.more_teachers
    ]
    start, text = Path(recipe.student.source or folder / START), None
    if recipe.general.use:
        start = Path(recipe.general.run or folder / GENERAL)
        # `--overwrite` deletes a run inside the output directory; one elsewhere may serve other tasks too.
        anew = invocation.overwrite and start.resolve().is_relative_to(folder.resolve())
        inside = replace(invocation, output_dir=start, resume=not anew, overwrite=anew)
        text = _prepare_general(general_recipe(recipe), start, inside, session, teacher)
    words = (
        open_words(recipe.augment, task, teachers[0], trust_remote_code=trusted)
        if recipe.augment.use
        else None
    )
    run = TaskRun(
        resolved,
        invocation,
        folder,
        task,
        teachers,
        reader,
        soft,
        shape,
        start,
        text,
        words,
    )
    Progress.log(*run.objective().notes)
    # The warm-up must leave steps in every stage; copies, whose number is not known yet, only add steps.
    prediction = as_finetune(recipe, str(recipe.teacher or recipe.student.source))
    order_and_schedule(task, prediction)
    if run.stage == "separate" and not recipe.augment.use:
        order_and_schedule(task, prediction.model_copy(update={"train": stage_settings(recipe)}))
    if recipe.undistilled.use:
        order_and_schedule(task, undistilled_recipe(recipe, STUDENT).recipe)
    return run


def load_task(recipe: TaskDistillRecipe, session: Session) -> tuple[PreparedTask, Model]:
    """The task's rows, and the teacher with its own head; without a teacher, the student."""
    if recipe.teacher is None:
        return prepare(as_finetune(recipe, str(recipe.student.source)), session)
    head = recipe.head.model_copy(update={"kind": None, "words": None})
    teacher = as_finetune(recipe, str(recipe.teacher), head=head)
    others = [
        *recipe.more_teachers,
        *filter(None, [recipe.student.source, recipe.general.run, recipe.general.teacher]),
    ]
    beside = {source: training_rows(location(str(source))) for source in map(str, others)}
    return prepare(teacher, session, new_head=False, beside=beside)


def _student_shape(
    recipe: TaskDistillRecipe, task: PreparedTask, teacher: Model, session: Session
) -> tuple[ModelShape, PreparedTask, Model]:
    """The student's shape, and the task as the student reads it with the model whose tokenizer that is. Raises
    UsageError: a student with other tokens, where the method or the kind of task compares tokens."""
    shape = (
        parse_shape(recipe.student.to[0], shape_of(teacher.model.config))
        if recipe.student.to
        else None
    )
    if recipe.student.source is None:
        assert shape is not None
        return shape, task, teacher
    source = recipe.student.source
    student = load_encoder(source, trust_remote_code=session.trust_remote_code)
    if shape not in (None, student.shape):
        raise UsageError(
            f"{source} is {student.shape}, not {recipe.student.to[0]}", "leave --to out"
        )
    if same_tokens(teacher.tokenizer, student.tokenizer):
        return student.shape, task, teacher
    if task.data.task.kind not in ROW_KINDS:
        raise UsageError(
            f"task {task.data.task.name} labels tokens, and {source} has others than {teacher.source}",
            "take a student of the teacher's tokenizer (--to), or fine-tune this one: kdcli finetune",
        )
    if recipe.method != SOFT_TARGETS and recipe.stage != "none":
        raise UsageError(
            f"method {recipe.method} compares token states, and {source} has other tokens than {teacher.source}",
            f"--method {SOFT_TARGETS} compares logits of whole rows; or --set stage=none leaves the states out",
        )
    reader = Model(student.model, student.tokenizer, source, "")
    Progress.log(f"{source} and {teacher.source} read the rows each with its own tokenizer")
    return student.shape, read_by(task, recipe.data, reader), reader


def _prepare_general(
    resolved: Resolved[DistillRecipe],
    folder: Path,
    invocation: RunOptions,
    session: Session,
    teacher: Model,
) -> TextRun | None:
    """The stages on text; None where they are done."""
    source = str(resolved.recipe.teacher)
    check_vocabulary(
        teacher, load_tokenizer(source, trust_remote_code=session.trust_remote_code), source
    )
    if not RunDir(folder).done or invocation.overwrite:
        return prepare_text(resolved, invocation, session)
    RunDir(folder).check(resolved.to_yaml(), resume=True, overwrite=False)
    Progress.log(f"{folder} is done already")
    return None


def write_copies(
    resolved: Resolved[TaskDistillRecipe], invocation: RunOptions, file: Path
) -> Copies | None:
    """Write the copies that `--augment` would train on, as jsonl in the task's columns. Raises KdcliError: as
    `run_on_task`; or the file exists and is not to be overwritten."""
    resolved = as_trained(resolved, resolved.recipe.teacher)
    recipe = resolved.recipe
    check_teacher(recipe)
    check_writable(file, directory=False)
    if not file.parent.is_dir():
        raise UsageError(f"--augment-only {file}: its directory is not there")
    if file.exists() and not invocation.overwrite:
        raise UsageError(
            f"--augment-only {file}: there is such a file",
            "--overwrite replaces it; or name another",
        )
    # A dry run starts no further processes.
    session = launch(recipe.train.dtype, replace(invocation, dry_run=True))
    if session is None:
        return None
    task, teacher = load_task(recipe, session)
    words = open_words(recipe.augment, task, teacher, trust_remote_code=session.trust_remote_code)
    made = augmented(recipe.augment, task, teacher, words, seed=recipe.train.seed)
    copies = made.examples[len(task.data.train) :]
    lines = [f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows(task.data.task, copies)]
    write_atomic(file, "".join(lines))
    return Copies(file, len(copies), made.notes)
