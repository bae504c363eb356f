"""One fine-tuning in a directory of its own: claimed, resumed, saved and reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kdcli.bench.latency import Latency, Subject
from kdcli.downstream.settings import FinetuneRecipe
from kdcli.downstream.task import Downstream, fit, quality_of
from kdcli.models.card import describe
from kdcli.models.heads import AUTO_CLASS, Headed
from kdcli.models.load import save_model
from kdcli.recipe.resolve import Resolved
from kdcli.report.finish import Finished, finish, measured
from kdcli.report.views import FINETUNED
from kdcli.training.launch import taken_up
from kdcli.training.progress import Progress
from kdcli.training.run_dir import RunDir
from kdcli.types import Outcome

WEIGHTS = "model.safetensors"

WORST = 20
"""Mistakes of a model that its report shows."""


def run_inside(task: Downstream, resolved: Resolved[FinetuneRecipe], folder: Path) -> Finished:
    """A run that lives in the directory of another and goes on whenever that does; read back when it is done."""
    if taken_up(task.accelerator, folder, resolved):
        return Finished.read(folder)
    Progress.say(f"run {folder.name}")
    return run_claimed(task, resolved.recipe, folder, headed=None, measure=False)


def run_claimed(
    task: Downstream, recipe: FinetuneRecipe, folder: Path, *, headed: Headed | None, measure: bool
) -> Finished:
    """Fine-tune in a claimed directory, save and report.

    Args:
        headed: the recipe's model where it was just loaded; None loads it.
        measure: whether latency is measured as the recipe says, or not at all.
    """
    fitted = fit(task, recipe, RunDir(folder), headed)
    if task.accelerator.is_main_process:
        model = fitted.headed.model
        save_model(model, fitted.headed.tokenizer, folder)
        finish_run(
            task,
            folder,
            recipe,
            card=describe(model, str(folder), folder),
            measure=measure,
            outcome=fitted.outcome,
            notes=[*task.notes, *_on_best(task, recipe, fitted.outcome)],
            evaluations=task.judge.evaluations(FINETUNED, task.data.split, fitted.predictions, WORST),
        )
    task.accelerator.wait_for_everyone()
    return Finished.read(folder)


def finish_run(
    task: Downstream,
    folder: Path,
    recipe: FinetuneRecipe,
    *,
    card: dict[str, Any],
    measure: bool,
    outcome: Outcome,
    notes: list[str],
    evaluations: list[dict[str, Any]],
    selection: dict[str, Any] | None = None,
) -> Finished:
    """Report a fine-tuned model; see `kdcli.report.finish`."""
    latency = Latency()
    if measure:
        of = Subject(FINETUNED, str(folder))
        latency = measured([of], recipe.measure, task.device, trust_remote_code=task.trust_remote_code)
    return finish(
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


def chosen_on(task: Downstream, recipe: FinetuneRecipe) -> str:
    """What the choice among evaluations and runs is made on, in words."""
    several = "the mean over all sets of " if len(task.data.sets) > 1 else ""
    return f"{recipe.choose_on} {task.data.split}" if recipe.choose_on else f"{several}{task.data.split}"


def _on_best(task: Downstream, recipe: FinetuneRecipe, outcome: Outcome) -> list[str]:
    if outcome.best_step is None:
        return []
    return [
        f"the weights of step {outcome.best_step} were kept, by {task.data.task.metrics[0]} on "
        f"{chosen_on(task, recipe)}, on which the scores are also reported"
    ]
