"""One fine-tuning in a directory of its own: claimed, resumed, saved and reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kdcli.bench.latency import Latency, Subject
from kdcli.downstream.settings import FinetuneRecipe
from kdcli.downstream.task import PreparedTask, TrainedModel, quality_of, train_model
from kdcli.models.card import describe
from kdcli.models.heads import AUTO_CLASS, TaskModel
from kdcli.models.load import save_model
from kdcli.recipe.resolve import Resolved
from kdcli.report.finish import RunResult, measure, write_report
from kdcli.report.views import FINETUNED
from kdcli.training.launch import claim_or_resume
from kdcli.training.progress import Progress
from kdcli.training.run_dir import RunDir
from kdcli.types import Outcome

WEIGHTS = "model.safetensors"

WORST = 20
"""Mistakes of a model that its report shows."""


def run_inside(task: PreparedTask, resolved: Resolved[FinetuneRecipe], folder: Path) -> RunResult:
    """A run that lives in the directory of another and goes on whenever that does; read back when it is done."""
    if claim_or_resume(task.session, folder, resolved):
        return RunResult.read(folder)
    Progress.log(f"run {folder.name}")
    return run_claimed(task, resolved.recipe, folder, headed=None, timed=False)


def run_claimed(
    task: PreparedTask, recipe: FinetuneRecipe, folder: Path, *, headed: TaskModel | None, timed: bool
) -> RunResult:
    """Fine-tune in a claimed directory, save and report.

    Args:
        headed: the recipe's model where it was just loaded; None loads it.
        timed: whether latency is measured as the recipe says, or not at all.
    """
    return finish_claimed(task, recipe, folder, train_model(task, recipe, RunDir(folder), headed), timed=timed)


def finish_claimed(
    task: PreparedTask, recipe: FinetuneRecipe, folder: Path, fitted: TrainedModel, *, timed: bool
) -> RunResult:
    """Save and report a model fine-tuned in a claimed directory."""
    if task.session.is_main:
        model = fitted.headed.model
        save_model(model, fitted.headed.tokenizer, folder)
        finish_run(
            task,
            folder,
            recipe,
            card=describe(model, str(folder), folder),
            timed=timed,
            outcome=fitted.outcome,
            notes=[*task.notes, *_on_best(task, recipe, fitted.outcome)],
            evaluations=task.evaluator.evaluations(FINETUNED, task.data.split, fitted.predictions, WORST),
        )
    task.session.wait()
    return RunResult.read(folder)


def finish_run(
    task: PreparedTask,
    folder: Path,
    recipe: FinetuneRecipe,
    *,
    card: dict[str, Any],
    timed: bool,
    outcome: Outcome,
    notes: list[str],
    evaluations: list[dict[str, Any]],
    selection: dict[str, Any] | None = None,
) -> RunResult:
    """Report a fine-tuned model; see `kdcli.report.finish`."""
    latency = Latency()
    if timed:
        of = Subject(FINETUNED, str(folder))
        latency = measure([of], recipe.measure, task.session)
    return write_report(
        RunDir(folder),
        command="finetune",
        recipe=recipe.model_dump(),
        cards={FINETUNED: card},
        folders={FINETUNED: folder},
        latency=latency,
        outcome=outcome,
        quality=quality_of(evaluations),
        notes=notes,
        auto_class=AUTO_CLASS[task.data.task.kind].__name__,
        evaluations=evaluations,
        selection=selection,
    )


def chosen_on(task: PreparedTask, recipe: FinetuneRecipe) -> str:
    """What the choice among evaluations and runs is made on, in words."""
    several = "the mean over all sets of " if len(task.data.sets) > 1 else ""
    return f"{recipe.choose_on} {task.data.split}" if recipe.choose_on else f"{several}{task.data.split}"


def _on_best(task: PreparedTask, recipe: FinetuneRecipe, outcome: Outcome) -> list[str]:
    if outcome.best_step is None:
        return []
    return [
        f"the weights of step {outcome.best_step} were kept, by {task.data.task.metrics[0]} on "
        f"{chosen_on(task, recipe)}, on which the scores are also reported"
    ]
