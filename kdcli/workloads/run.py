"""One fine-tuning in its own directory: a `Stage` that trains, saves and reports."""

import json
from dataclasses import dataclass
from pathlib import Path

from kdcli.deploy.latency import Latency, Subject
from kdcli.disk import write_atomic
from kdcli.engine.progress import Progress
from kdcli.engine.run_dir import RunDir
from kdcli.metrics.bootstrap import Scorer
from kdcli.models.card import describe
from kdcli.models.heads import AUTO_CLASS
from kdcli.models.load import save_model
from kdcli.models.model import Model
from kdcli.models.training_rows import FILE, all_rows
from kdcli.recipe.resolve import Resolved
from kdcli.report.finish import (
    ReportContents,
    ReportedModel,
    RunResult,
    measure,
    write_report,
)
from kdcli.report.schema import FINETUNED, Evaluation, Selection
from kdcli.run.stages import StageJob, run_stage
from kdcli.types import Card, Outcome
from kdcli.workloads import task as downstream
from kdcli.workloads.predictions import Prediction
from kdcli.workloads.settings import FinetuneRecipe, TaskRecipe
from kdcli.workloads.task import PreparedTask, TrainedModel, order_and_schedule

WEIGHTS = "model.safetensors"
PREDICTIONS = "predictions.json"  # the predicted value of every judged example
WORST = 20  # mistakes of a model that its report shows


@dataclass
class FinetuneStage:
    """A fine-tuning of one model; see `kdcli.run.stages.Stage`. `headed`: the loaded model; None loads it in
    `build`. Dropped when the stage is done. `timed`: measure latency as the recipe says; False measures none.
    `repeats`: see `StageJob`. `source`: where the model is, if the recipe names it relative to `folder`; `predictions`
    then stay in the directory, to compare models by."""

    task: PreparedTask
    resolved: Resolved[FinetuneRecipe]
    folder: Path
    headed: Model | None = None
    timed: bool = False
    repeats: int = 1
    source: str | None = None

    def build(self) -> StageJob:
        """Load the model and make the job."""
        recipe = self.resolved.recipe
        if not self.timed:
            Progress.log(f"run {self.folder.name}")
        self.headed = self.headed or self.task.load(
            recipe.model_copy(update={"model": self.source or recipe.model})
        )
        job, schedule = downstream.build_job(self.task, recipe, self.headed)
        order, _ = order_and_schedule(self.task, recipe)
        downstream.log_padding(order)
        card = describe(self.headed.model, FINETUNED, None)
        return StageJob(job, schedule, order.steps_of_pass, {FINETUNED: card}, self.repeats)

    def finish(self, outcome: Outcome) -> None:
        """Predict, save and report."""
        assert self.headed is not None
        trained, self.headed = downstream.trained_model(self.task, self.headed, outcome), None
        if self.source is not None and self.task.session.is_main:
            values = [prediction.value for prediction in trained.predictions]
            write_atomic(self.folder / PREDICTIONS, json.dumps(values))
        finish_claimed(self.task, self.resolved.recipe, self.folder, trained, timed=self.timed)


def finish_claimed(
    task: PreparedTask, recipe: FinetuneRecipe, folder: Path, trained: TrainedModel, *, timed: bool
) -> None:
    """Save and report a model fine-tuned in a claimed directory."""
    if not task.session.is_main:
        return
    headed, step, notes = trained.headed, trained.outcome.best_step, list(task.notes)
    save_model(headed.model, headed.tokenizer, folder, all_rows(headed.rows, task.data.rows))
    if step is not None:
        chosen = f"by {task.data.task.metrics[0]} on {chosen_on(task, recipe)}"
        notes.append(
            f"the weights of step {step} were kept, {chosen}, on which the scores are also reported"
        )
    card = describe(headed.model, str(folder), folder)
    evaluations = task.evaluator.evaluations(FINETUNED, task.data.split, trained.predictions, WORST)
    write_finetune_report(
        task, folder, recipe, card, trained.outcome, notes, evaluations, timed=timed
    )


def run_inside(
    task: PreparedTask, resolved: Resolved[FinetuneRecipe], folder: Path, source: str
) -> RunResult:
    """A fine-tuning of the model at `source` inside another run's directory; resumed with that run and read back if
    done."""
    run_stage(task.session, FinetuneStage(task, resolved, folder, source=source))
    return RunResult.read(folder)


def scorers_of(task: PreparedTask, folder: Path) -> dict[str, Scorer]:
    """Set -> the scorer of the predictions that a run inside another left in its directory."""
    return task.evaluator.scorers(
        [Prediction(v, v, []) for v in json.loads((folder / PREDICTIONS).read_text("utf-8"))]
    )


def drop_weights(folder: Path) -> None:
    """Delete a model of which only the scores are wanted."""
    for name in (WEIGHTS, FILE):
        (folder / name).unlink(missing_ok=True)


def write_finetune_report(
    task: PreparedTask,
    folder: Path,
    recipe: FinetuneRecipe,
    card: Card,
    outcome: Outcome,
    notes: list[str],
    evaluations: list[Evaluation],
    selection: Selection | None = None,
    *,
    timed: bool,
) -> None:
    """Write the report of a fine-tuned model; `timed` also measures its latency."""
    subject, latency = Subject(FINETUNED, str(folder)), Latency()
    if timed:
        latency = measure([subject], recipe.measure, task.session)
    contents = ReportContents(
        "finetune",
        recipe,
        [ReportedModel(FINETUNED, "finetuned", card, folder=folder)],
        outcome=outcome,
        latency=latency,
        evaluations=evaluations,
        notes=notes,
        selection=selection,
        auto_class=AUTO_CLASS[task.data.task.kind].__name__,
    )
    write_report(RunDir(folder), contents)


def chosen_on(task: PreparedTask, recipe: TaskRecipe) -> str:
    """Words for what evaluations and runs are chosen on."""
    several = "the mean over all sets of " if len(task.data.sets) > 1 else ""
    return (
        f"{recipe.choose_on} {task.data.split}"
        if recipe.choose_on
        else f"{several}{task.data.split}"
    )
