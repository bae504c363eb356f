"""`kdcli distill`: distil students of a teacher on text or, with `--task`, on a task.

`--ablate` compares variants of a recipe.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from kdcli.data.augment.copies import rows
from kdcli.data.sources import open_source
from kdcli.disk import write_atomic
from kdcli.engine.inputs import check_output_file, local_paths, texts_in
from kdcli.engine.launch import launch
from kdcli.engine.run_dir import RunDir
from kdcli.errors import UsageError
from kdcli.losses import on_tasks
from kdcli.messages import log
from kdcli.models.load import load_encoder, load_tokenizer
from kdcli.models.model import Model
from kdcli.recipe.resolve import Resolved, defaulted, set_among
from kdcli.recipe.sections import RunOptions
from kdcli.report.finish import RunResult
from kdcli.report.schema import STUDENT, TEACHER, Report
from kdcli.report.text import directory_word
from kdcli.run.context import RunContext
from kdcli.run.dry_run import Estimate
from kdcli.run.stages import Run, run_command
from kdcli.targets.precomputed import read_soft_labels
from kdcli.types import ModelShape, task_title
from kdcli.verbs.distill.augment import Copies, augmented, open_words
from kdcli.verbs.distill.distill_recipes import general_recipe, stage_settings, undistilled_recipe
from kdcli.verbs.distill.distillation import Planned, card_of, student_shapes, with_measured_layers
from kdcli.verbs.distill.fast import like_first, with_shape
from kdcli.verbs.distill.recipe_checks import check_goals, check_recipe, check_teacher
from kdcli.verbs.distill.settings import (
    ONLY_ON_TASK,
    ONLY_ON_TEXT,
    SOFT_TARGETS,
    DistillRecipe,
    Kind,
)
from kdcli.verbs.distill.student import relation_kernel
from kdcli.verbs.distill.student_groups import open_text, read_text
from kdcli.verbs.distill.task_stages import (
    START_FOLDER,
    WITHOUT,
    OutputDistillation,
    TaskDistillation,
)
from kdcli.verbs.distill.vectors import open_vectors, with_layers, with_learning_rate
from kdcli.workloads import open_workload as open_any_workload
from kdcli.workloads.detect import as_trained
from kdcli.workloads.finetune_recipes import as_finetune
from kdcli.workloads.finetuning import request_of
from kdcli.workloads.labelled import ROW_KINDS, LabelledWorkload
from kdcli.workloads.labelled_tasks import open_workload
from kdcli.workloads.settings import TaskHeadSettings
from kdcli.workloads.study import (
    Member,
    Members,
    Study,
    report_on_all,
    run_study,
    without_repeated,
)
from kdcli.workloads.task_models import check_vocabulary, same_tokens

OPEN: Mapping[Kind, Callable[[RunContext[DistillRecipe]], Run]] = {
    "text": open_text,
    "embedding": open_vectors,
    "rows": lambda context: open_task(context).run,
    "outputs": lambda context: open_outputs(context).run,
}
"""The function that checks and opens the models and the data, for each kind of data."""


def distill(resolved: Resolved[DistillRecipe], options: RunOptions) -> RunResult | Estimate | None:
    """Distil, measure and report; see `run_command` for what it returns."""
    resolved = complete(resolved)
    recipe = resolved.recipe
    check_recipe(recipe)
    if recipe.kind == "embedding":
        resolved = with_layers(with_learning_rate(resolved))
    elif recipe.kind == "text":
        read_text(recipe, options)
    elif recipe.kind == "rows":
        read_general(recipe, options)
    return run_command(resolved, options, run_name(recipe), OPEN[recipe.kind])


def complete(resolved: Resolved[DistillRecipe]) -> Resolved[DistillRecipe]:
    """Fill in the keys that the user did not set from the teacher's files and from the method.

    Raises:
        UsageError: The user set a key that this kind of data has no use for.
    """
    if resolved.recipe.task is None:
        if (name := set_among(resolved, ONLY_ON_TASK)) is not None:
            raise UsageError(f"{name} needs --task", "it belongs to distilling on a task")
        return resolved
    if (name := set_among(resolved, ONLY_ON_TEXT)) is not None:
        raise UsageError(f"{name} belongs to distilling on text, not to distilling on a task")
    resolved = as_trained(resolved, resolved.recipe.teacher)
    method = resolved.recipe.method
    kd = {f"kd.{key}": value for key, value in on_tasks(method)[1].items()}
    return defaulted(resolved, kd, f"method {method}")


def run_name(recipe: DistillRecipe) -> str:
    """Return the name of the run's directory."""
    source = str(recipe.teacher or recipe.soft_labels or recipe.student.source)
    parts = ["distill", Path(source).name]
    if recipe.task is not None:
        parts.append(directory_word(recipe.task, recipe.data.source))
    student = "student" if recipe.student.source is None else Path(recipe.student.source).name
    return "-".join([*parts, "+".join(recipe.student.to).replace(",", "+") or student])


def distill_variants(
    variants: Mapping[str, Resolved[DistillRecipe]], options: RunOptions
) -> RunResult | Estimate | None:
    """Distil on a task once for each variant, and compare the students; see `run_study`."""
    variants = {name: complete(resolved) for name, resolved in variants.items()}
    for resolved in variants.values():
        check_recipe(resolved.recipe)
    check_goals(variants)
    first = next(iter(variants.values()))
    options.check_pushed(len(variants))
    for name, resolved in variants.items():
        inside = options.output_dir / name if options.output_dir else None
        read_general(resolved.recipe, replace(options, output_dir=inside))
    data = directory_word(str(first.recipe.task), first.recipe.data.source)
    members = [Member(name, Path(name), own, OPEN["rows"]) for name, own in variants.items()]
    return run_study(members, first, options, f"ablate-{data}", _check_variants)


def _check_variants(
    context: RunContext[DistillRecipe], members: Members[DistillRecipe]
) -> Study[DistillRecipe]:
    """Open the first variant, and check the objectives of the others with its models."""
    first = members[0]
    inside = context.folder / first.folder
    own = context.inside(inside, first.resolved, overwrite=context.options.overwrite)
    opened = open_task(own)
    chosen = opened.context.resolved
    members = without_repeated(
        [replace(one, resolved=like_first(chosen, one.resolved)) for one in members]
    )
    for one in members[1:]:
        replace(opened, context=replace(context, resolved=one.resolved)).objectives()
    context = replace(context, resolved=like_first(chosen, context.resolved))
    report = partial(report_on_all, _names, context, members)
    shares = any(one.resolved.recipe.general.run is not None for one in members)
    return Study(members, report, context.resolved, begins_alone=shares)


def _names(report: Report, variant: str) -> dict[str, str]:
    """Name the student of a run by its variant.

    All variants share the teacher. They also share the undistilled student, up to its start.
    """
    return {TEACHER: TEACHER, STUDENT: variant, WITHOUT: WITHOUT}


GENERAL = "general"
"""Directory of the stage on text, inside the run."""


def read_general(recipe: DistillRecipe, options: RunOptions) -> None:
    """Tokenise the text for the stage on text, unless the stage is done; see `read_text`."""
    if recipe.general.use:
        inside = options.output_dir / GENERAL if options.output_dir else None
        start = Path(recipe.general.run) if recipe.general.run else inside
        if start is None or options.overwrite or not RunDir(start).done:
            read_text(general_recipe(recipe).recipe, options)


def open_task(context: RunContext[DistillRecipe]) -> TaskDistillation:
    """Check models and data against each other for all stages, and tokenise.

    The run directory is not claimed.
    """
    recipe, session = context.recipe, context.session
    relation_kernel(recipe.relation.kernel, session.device, session.compute_dtype)
    workload, reader = load_task(context)
    teacher, teachers, soft_NC = reader, [reader], None
    if recipe.soft_labels is not None:
        data = workload.data
        soft_NC, match = read_soft_labels(Path(recipe.soft_labels), data.task, data.train)
        log(f"soft labels of {recipe.soft_labels}: {match}")
        teachers = []
    context = with_shape(context, workload, teacher)
    recipe = context.recipe
    shapes, workload, reader = _student_shapes(context, workload, reader)
    if recipe.student.source is None and not recipe.general.use:
        context = with_measured_layers(context, workload, teacher, shapes.values())
    own_tokens = workload.kind in ROW_KINDS
    teachers += [
        workload.load_teacher(source, reader, head=TaskHeadSettings(), own_tokens=own_tokens)
        for source in recipe.more_teachers
    ]
    start, text = Path(recipe.student.source or context.folder / START_FOLDER), None
    if recipe.general.use:
        start = Path(recipe.general.run or context.folder / GENERAL)
        text = _open_general(context, start, teacher)
    words = None
    if recipe.augment.use and recipe.train.trains:
        words = open_words(recipe.augment, workload, teachers[0])
    students = {name: Planned(name, shape, recipe) for name, shape in shapes.items()}
    card = card_of(teachers)
    whole = TaskDistillation(
        context, workload, teachers, reader, students, card, soft_NC, start, text, words
    )
    log(*(note for each in whole.objectives().values() for note in each.notes))
    # Planning checks that the warm-up leaves steps in every stage. The number of copies is not
    # known yet, but they only add steps.
    workload.plan(recipe.train)
    if whole.stage == "separate" and not recipe.augment.use:
        workload.plan(stage_settings(recipe))
    if whole.has_undistilled:
        workload.plan(undistilled_recipe(recipe, STUDENT).recipe.train)
    return whole


def open_outputs(context: RunContext[DistillRecipe]) -> OutputDistillation:
    """Check models and data of a workload with a module of its own, such as rerankers.

    The run directory is not claimed.
    """
    recipe = context.recipe
    source = str(recipe.student.source or recipe.teacher)
    others = [] if recipe.teacher is None else [recipe.teacher]
    request = request_of(as_finetune(recipe, source), source, other_models=others)
    workload, origin = open_any_workload(request, context.session)
    teachers: list[Model] = []
    if recipe.teacher is None:
        workload.check_given_outputs()
        workload.notes.append(f"the student learned the scores in {recipe.data.source}")
    else:
        if not recipe.train.trains and (misfit := workload.misfit(recipe.teacher)) is not None:
            raise UsageError(
                f"no student can start from {recipe.teacher}: {misfit}",
                "train the student: remove --max-steps 0",
            )
        teachers = [workload.load_teacher(recipe.teacher, origin, head=TaskHeadSettings())]
        workload.notes.append(f"the teacher is {recipe.teacher}")
    context = with_shape(context, workload, origin)
    recipe = context.recipe
    shapes = {STUDENT: origin.shape}
    if recipe.student.to:
        shapes = student_shapes(recipe, origin.shape)
    context = with_measured_layers(context, workload, origin, shapes.values())
    students = {name: Planned(name, shape, recipe) for name, shape in shapes.items()}
    return OutputDistillation(context, workload, teachers, origin, students, card_of(teachers))


def load_task(context: RunContext[DistillRecipe]) -> tuple[LabelledWorkload, Model]:
    """Load the task's rows, and the teacher with its own head; without a teacher, the student."""
    recipe = context.recipe
    if recipe.teacher is None:
        student = as_finetune(recipe, str(recipe.student.source))
        return open_workload(request_of(student, str(student.model)), context.session)
    head = recipe.head.model_copy(update={"kind": None, "words": None})
    teacher = as_finetune(recipe, recipe.teacher, head=head)
    sources = [recipe.student.source, recipe.general.run, recipe.general.teacher]
    others = [*recipe.more_teachers, *(source for source in sources if source)]
    request = request_of(teacher, recipe.teacher, new_head=False, other_models=others)
    return open_workload(request, context.session)


def _student_shapes(
    context: RunContext[DistillRecipe], workload: LabelledWorkload, teacher: Model
) -> tuple[dict[str, ModelShape], LabelledWorkload, Model]:
    """Find out the students' shapes, and tokenise the task for the students.

    Returns:
        The shapes by name, the workload in the students' tokens, and the model whose tokenizer
        they use.

    Raises:
        UsageError: The student has other tokens than the teacher, and the method or the kind of
            task compares tokens.
    """
    recipe = context.recipe
    static_width = teacher.shape.hidden if workload.kind in ROW_KINDS else None
    source = recipe.student.source
    if source is None:
        return student_shapes(recipe, teacher.shape, static_width), workload, teacher
    student = load_encoder(source)
    shapes = {STUDENT: student.shape}
    if recipe.student.to:
        shapes = student_shapes(recipe, teacher.shape, static_width)
    if max(shapes.values(), key=lambda shape: shape.layers) != student.shape:
        raise UsageError(f"{source} is {student.shape}, not {recipe.student.to[0]}", "omit --to")
    if workload.reads_as_it_is(student):
        return shapes, workload, teacher
    reader = replace(student, note="")
    if same_tokens(teacher.tokenizer, student.tokenizer):
        # Unlike the teacher, the student reads token types.
        return shapes, workload.retokenize_for(reader), reader
    if workload.kind not in ROW_KINDS:
        raise UsageError(
            f"{task_title(workload.name)} labels tokens, and {source} has other tokens than "
            f"{teacher.source}",
            "choose a student with the teacher's tokenizer (--to), or fine-tune this one with "
            "kdcli finetune",
        )
    if recipe.method != SOFT_TARGETS and recipe.stage != "none":
        raise UsageError(
            f"method {recipe.method} compares token states, and {source} has other tokens than "
            f"{teacher.source}",
            f"--method {SOFT_TARGETS} compares logits of whole rows; or --set stage=none trains "
            "without the states",
        )
    log(f"{source} and {teacher.source} each read the rows with their own tokenizer")
    return shapes, workload.retokenize_for(reader), reader


def _open_general(context: RunContext[DistillRecipe], folder: Path, teacher: Model) -> Run | None:
    """Open the stages on text; None if they are done."""
    resolved = general_recipe(context.recipe)
    source = str(resolved.recipe.teacher)
    check_vocabulary(teacher, load_tokenizer(source), source)
    # `--overwrite` only deletes a run inside the output directory, because a run elsewhere may
    # serve other tasks.
    # Path.resolve raises RuntimeError for a loop of links; opening the folder gives a clear error.
    inside = Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(context.folder))
    overwrite = context.options.overwrite and inside
    if not RunDir(folder).done or overwrite:
        text: RunContext[DistillRecipe] = context.inside(folder, resolved, overwrite=overwrite)
        return open_text(text)
    RunDir(folder).check(resolved.to_yaml(), resume=True, overwrite=False)
    log(f"{folder} is done already")
    if (text_source := resolved.recipe.data.source) and local_paths(text_source):
        # A continued run compares the content of the files that it opens.
        open_source(text_source)
    return None


def write_copies(
    resolved: Resolved[DistillRecipe], options: RunOptions, file: Path
) -> Copies | None:
    """Write the copies that `--augment` would train on, as jsonl in the task's columns.

    Returns:
        The file and the number of copies; None in a process that prints nothing.

    Raises:
        KdcliError: The recipe, the teacher or the data cannot be used, or the file exists and
            `--overwrite` was not given.
    """
    resolved = as_trained(resolved, resolved.recipe.teacher)
    recipe = resolved.recipe
    check_teacher(recipe)
    sources = texts_in(recipe.model_dump())
    check_output_file(file, sources, "--augment-only", overwrite=options.overwrite)
    if not file.parent.is_dir():
        raise UsageError(f"--augment-only {file}: its directory does not exist")
    # A dry run starts no other processes.
    dry = replace(options, dry_run=True)
    session = launch(recipe.train.dtype, dry)
    if session is None:
        return None
    context = RunContext(resolved, dry, session, file.parent)
    workload, teacher = load_task(context)
    words = open_words(recipe.augment, workload, teacher)
    copied = augmented(recipe.augment, workload, teacher, words, seed=recipe.train.seed)
    copies = copied.examples[len(workload.data.train) :]
    lines = [f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows(workload.data.task, copies)]
    write_atomic(file, "".join(lines))
    return Copies(file, len(copies), copied.notes)
