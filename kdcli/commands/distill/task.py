"""A task's distillation: [text →] [copies of the examples →] intermediate stage → prediction stage.

Every stage is a run in a directory of its own below the output directory, gone on with after a kill and never repeated
when it is done; the prediction stage is the run of the output directory itself. The same student is fine-tuned without
a teacher beside it: whether distillation was worth it is the first question.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from kdcli.commands.distill.augment import WordSource, open_words
from kdcli.commands.distill.recipes import general_recipe, stage_settings, undistilled_recipe
from kdcli.commands.distill.settings import TaskDistillRecipe
from kdcli.commands.distill.stages import STUDENT
from kdcli.commands.distill.text import TextRun, prepare_text
from kdcli.downstream.settings import FinetuneRecipe
from kdcli.downstream.task import PreparedTask, order_and_schedule, prepare
from kdcli.errors import UsageError
from kdcli.losses import build_objective, on_tasks
from kdcli.models.heads import TaskModel
from kdcli.models.load import load_encoder, load_tokenizer
from kdcli.models.shape import parse_shape, shape_of
from kdcli.recipe.resolve import Resolved, defaulted
from kdcli.recipe.sections import Invocation
from kdcli.teachers.task_teacher import check_vocabulary, load_teacher
from kdcli.training.launch import choose_output_dir
from kdcli.training.progress import Progress
from kdcli.training.run_dir import RunDir
from kdcli.training.session import Session
from kdcli.types import ModelShape, Objective

GENERAL, START = "general", "start"
"""Directories of a run: the stage on text, and the student before any stage."""


@dataclass(frozen=True)
class TaskRun:
    """A task's distillation, checked and ready to run.

    Attributes:
        task: with the examples as they are; no copies yet.
        teachers: the first is the one of the method's objective.
        shape: of the student.
        text: the stage on text, where it is still to be run; `general` is its directory in any case.
        words: where those in the copies of examples come from, where copies are wanted.
    """

    resolved: Resolved[TaskDistillRecipe]
    invocation: Invocation
    task: PreparedTask
    teachers: list[TaskModel]
    shape: ModelShape
    folder: Path
    general: Path | None
    text: TextRun | None
    words: WordSource | None

    @property
    def recipe(self) -> TaskDistillRecipe:
        """What to do."""
        return self.resolved.recipe

    @property
    def start(self) -> str:
        """Where the student is loaded from before any stage of the task."""
        if self.general is not None:
            return str(self.general)
        return self.recipe.student.source or str(self.folder / START)

    @property
    def stage(self) -> str:
        """Where the method's objective is trained."""
        return self.recipe.stage or on_tasks(self.recipe.method)[0]

    def objective(self) -> Objective:
        """The method's, its projections drawn from the seed."""
        recipe = self.recipe
        torch.manual_seed(recipe.train.seed)
        return build_objective(recipe.method, recipe.loss, shape_of(self.teachers[0].model.config), self.shape)


def check_teacher(recipe: TaskDistillRecipe) -> None:
    """Raise a `UsageError` where no teacher or no task was given."""
    if recipe.teacher is None:
        raise UsageError("no teacher given", "kdcli distill TEACHER --task TASK --to LxH; TEACHER is fine-tuned on it")
    if recipe.task is None:
        raise UsageError("no task given", "add --task, for example --task sst2, or --task own for your own files")


def check_task(recipe: TaskDistillRecipe) -> None:
    """Check what needs no model and no data.

    Raises:
        UsageError: no teacher, task or student; a method that reads no tasks; a wrong key of a stage.
    """
    check_teacher(recipe)
    if len(recipe.student.to) > 1:
        raise UsageError(
            f"on a task one student is distilled at a time, {len(recipe.student.to)} shapes were given",
            "run the command once for each --to",
        )
    if not recipe.student.to and recipe.student.source is None:
        raise UsageError("no student given", "add --to LxH, for example --to 6x384, or --student DIR")
    if recipe.general.use and recipe.student.source is not None:
        raise UsageError("--student brings a student, and the stage on text would make one", "leave one of them out")
    on_tasks(recipe.method)
    stage_settings(recipe)
    undistilled_recipe(recipe, STUDENT)


def prepare_task(resolved: Resolved[TaskDistillRecipe], invocation: Invocation, session: Session) -> TaskRun:
    """Check models and data against each other and tokenise; whatever a later stage would stumble over is found here.

    Raises:
        KdcliError: see `kdcli.errors`; nothing was claimed or written.
    """
    method = resolved.recipe.method
    kd = {f"kd.{key}": value for key, value in on_tasks(method)[1].items()}
    resolved = defaulted(resolved, kd, f"method {method}")
    recipe, trusted = resolved.recipe, invocation.trust_remote_code
    of_student = recipe.student.to[0] if recipe.student.to else Path(str(recipe.student.source)).name
    name = f"distill-{Path(str(recipe.teacher)).name}-{recipe.task}-{of_student}".replace(":", "_")
    folder = choose_output_dir(name, resolved, invocation, session)
    task, teacher = prepare(_of_teacher(recipe), session, new_head=False)
    teachers = [teacher] + [
        load_teacher(source, task, teacher.tokenizer, str(recipe.teacher), None) for source in recipe.more_teachers
    ]
    above = shape_of(teacher.model.config)
    if recipe.student.source is not None:
        found = load_encoder(recipe.student.source, trust_remote_code=trusted)
        check_vocabulary(teacher, found.tokenizer, recipe.student.source)
        shape = found.shape
        if recipe.student.to and parse_shape(recipe.student.to[0], above) != shape:
            raise UsageError(f"{recipe.student.source} is {shape}, not {recipe.student.to[0]}", "leave --to out")
    else:
        shape = parse_shape(recipe.student.to[0], above)
    general = text = None
    if recipe.general.use:
        general = Path(recipe.general.run or folder / GENERAL)
        # What lies inside an output directory is overwritten with it; what lies elsewhere other tasks use too.
        anew = invocation.overwrite and general.resolve().is_relative_to(folder.resolve())
        inside = replace(invocation, output_dir=general, resume=not anew, overwrite=anew)
        text = _text(recipe, inside, session, teacher)
    words = open_words(recipe.augment, task, teacher, trust_remote_code=trusted) if recipe.augment.use else None
    run = TaskRun(resolved, invocation, task, teachers, shape, folder, general, text, words)
    for note in run.objective().notes:
        Progress.log(note)
    _check_plans(run)
    return run


def _check_plans(run: TaskRun) -> None:
    """Whether each stage has steps left after its warm-up; copies, whose number is known, only add to them."""
    recipe = run.recipe
    of_prediction = finetune_recipe(recipe, str(recipe.teacher))
    order_and_schedule(run.task, of_prediction)
    if run.stage == "separate" and not recipe.augment.use:
        order_and_schedule(run.task, of_prediction.model_copy(update={"train": stage_settings(recipe)}))
    if recipe.undistilled.use:
        order_and_schedule(run.task, undistilled_recipe(recipe, STUDENT).recipe)


def _text(
    recipe: TaskDistillRecipe,
    invocation: Invocation,
    session: Session,
    teacher: TaskModel,
) -> TextRun | None:
    """The stage on text; None where it is done already."""
    resolved = general_recipe(recipe)
    tokenizer = load_tokenizer(str(resolved.recipe.teacher), trust_remote_code=invocation.trust_remote_code)
    check_vocabulary(teacher, tokenizer, str(resolved.recipe.teacher))
    assert invocation.output_dir is not None
    if RunDir(invocation.output_dir).done and not invocation.overwrite:
        RunDir(invocation.output_dir).check(resolved.to_yaml(), resume=True, overwrite=False)
        Progress.log(f"{invocation.output_dir} is done already")
        return None
    return prepare_text(resolved, invocation, session)


def prepare_copies(
    resolved: Resolved[TaskDistillRecipe], invocation: Invocation, session: Session
) -> tuple[PreparedTask, TaskModel, WordSource]:
    """What copies are made of: the task, its teacher, and where other words come from.

    Raises:
        KdcliError: as `prepare_task`, of what belongs to the student nothing is looked at.
    """
    recipe, trusted = resolved.recipe, invocation.trust_remote_code
    task, teacher = prepare(_of_teacher(recipe), session, new_head=False)
    return task, teacher, open_words(recipe.augment, task, teacher, trust_remote_code=trusted)


def _of_teacher(recipe: TaskDistillRecipe) -> FinetuneRecipe:
    head = recipe.head.model_copy(update={"kind": None, "words": None})
    return finetune_recipe(recipe, str(recipe.teacher)).model_copy(update={"head": head})


def finetune_recipe(recipe: TaskDistillRecipe, model: str) -> FinetuneRecipe:
    """What the parts that train one model on a task want to know; its `train:` is that of the prediction stage."""
    shared = {key: getattr(recipe, key) for key in ("task", "keep", "choose_on", "data", "train", "measure")}
    head = recipe.head.model_copy(update={"label_map": None})
    return FinetuneRecipe(model=model, head=head, **shared)
