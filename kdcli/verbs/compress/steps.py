"""The verbs that a compression runs, each called as a function in this process.

Each function returns a `Step`: a verb with its model, data and recipe keys. The recipe is resolved
when the step runs, so that an error in it fails the step and not the compression.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from accelerate.state import AcceleratorState, GradientState

from kdcli.data.labelled.partition import VERIFICATION
from kdcli.deploy.exported import FACTS
from kdcli.deploy.measurements import LatencyRow
from kdcli.disk import COMMITS
from kdcli.engine.memory import release_memory
from kdcli.engine.run_dir import RunDir
from kdcli.errors import MachineError
from kdcli.recipe.resolve import resolve
from kdcli.recipe.sections import RecipeValues, RunOptions
from kdcli.report.finish import RunResult
from kdcli.report.schema import Report
from kdcli.report.sections.latency import first_cell
from kdcli.run.dry_run import Estimate
from kdcli.verbs.compress.recipes import RecipeKeys, dotted
from kdcli.verbs.compress.settings import CompressRecipe
from kdcli.verbs.compress.verbs import Verbs
from kdcli.verbs.evaluate.run import Extras
from kdcli.verbs.evaluate.settings import EvaluateRecipe
from kdcli.verbs.export.gate import QUANTISED
from kdcli.verbs.trim.settings import TrimRecipe
from kdcli.workloads.scores import RESAMPLES
from kdcli.workloads.settings import LabelledSettings

MAX_RESAMPLES = 20_000
"""Maximum number of bootstrap resamples for the interval of a late look at the rows."""
TRAININGS = ("finetune", "distill", "prune")
"""The verbs that train. They resume from a checkpoint and count against the budget."""


@dataclass(frozen=True)
class Step:
    """A verb that is ready to run in a directory of its own."""

    verb: str
    call: Callable[[RunOptions], object]

    @property
    def trains(self) -> bool:
        """Whether the verb trains a model."""
        return self.verb in TRAININGS

    @property
    def is_evaluation(self) -> bool:
        """Whether the verb scores models on rows that another goal scores again."""
        return self.verb == "evaluate"

    def run(self, options: RunOptions) -> None:
        """Run the verb as if it were alone in this process, and free its models afterwards."""
        self._call_alone(options)

    def estimate(self, options: RunOptions) -> Estimate:
        """Return the estimate of the verb's dry run."""
        estimate = self._call_alone(options)
        assert isinstance(estimate, Estimate)
        return estimate

    def _call_alone(self, options: RunOptions) -> object:
        # Each verb chooses its own device and precision, and names the data it read itself.
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        before = dict(COMMITS)
        COMMITS.clear()
        try:
            return self.call(options)
        finally:
            # The report of the compression names the data of all its steps.
            COMMITS.update(before)
            release_memory()


def is_done(folder: Path) -> bool:
    """Whether a verb has written all its files to a directory."""
    return (folder / FACTS).is_file() or RunDir(folder).done


def trim_step(verbs: Verbs, model: str, text: Callable[[], Path], keys: RecipeKeys) -> Step:
    """Trim a model's vocabulary to the tokens of a text, unless the keys name another text."""

    def call(options: RunOptions) -> object:
        values = {"data.source": str(text())} | dotted(keys) | {"model": model}
        return verbs.trim(resolve(TrimRecipe, recipe=None, options=values), options)

    return Step("trim", call)


def export_step(
    verbs: Verbs, recipe: CompressRecipe, model: str, backend: str, *, max_drop: float | None = None
) -> Step:
    """Write a model for a backend, such as `onnx-int8`.

    With `max_drop`, products stay in float32 until the file loses at most this many points of the
    task's metric.
    """
    name, _, precision = backend.partition("-")

    def call(options: RunOptions) -> object:
        # The texts of the rows choose the integers.
        reads_rows = max_drop is not None or precision in QUANTISED
        return verbs.export(
            model,
            format=name,
            precisions=[precision or "fp32"],
            data=recipe.data if reads_rows else LabelledSettings(),
            pooling=recipe.pooling,
            task=recipe.task if reads_rows else None,
            max_drop=max_drop,
            # The file must meet the goal, which allows no excess.
            exact=True,
            output_dir=options.output_dir,
            overwrite=options.overwrite,
        )

    return Step("export", call)


def select(verbs: Verbs, recipe: CompressRecipe, models: Mapping[str, str]) -> Step:
    """Score models, given by name, on the selection rows and measure their latency in turns."""
    measure = recipe.measure.model_dump(include={"min_runs", "min_seconds"})
    keys = {f"measure.{key}": value for key, value in measure.items()}
    keys |= {"measure.latency": True, "worst": 0}
    scoring = _evaluate(
        verbs, recipe, models, keys | {"max_class_drop": recipe.goal.max_class_drop}
    )

    def call(options: RunOptions) -> object:
        result = scoring.call(options)
        assert isinstance(result, RunResult)
        # Only a step that fails is tried again.
        latency_rows(result.report)
        return result

    return Step(scoring.verb, call)


def latency_rows(report: Report) -> dict[str, LatencyRow]:
    """Return the rows of the first latency cell, by model.

    Raises MachineError: a model was not measured.
    """
    rows = {row.model: row for row in first_cell(report)}
    for name in report.cards:
        if name not in rows:
            failures = [failure.reason for failure in report.failures if failure.model == name]
            why = "; ".join(dict.fromkeys(failures)) or "it gave no result"
            raise MachineError(f"the latency of {name} was not measured: {why}")
    return rows


def verification(
    verbs: Verbs, recipe: CompressRecipe, models: Mapping[str, str], confidence: float
) -> Step:
    """Score the teacher and the chosen model, given by name, on the verification rows."""
    # The ends of wider intervals need more resamples.
    resamples = min(round(RESAMPLES * 0.05 / (1 - confidence)), MAX_RESAMPLES)
    keys: RecipeValues = {"data.split": VERIFICATION}
    keys |= {"confidence": confidence, "resamples": resamples}
    keys["max_class_drop"] = recipe.goal.max_class_drop
    return _evaluate(verbs, recipe, models, keys)


def _evaluate(
    verbs: Verbs, recipe: CompressRecipe, models: Mapping[str, str], keys: RecipeKeys
) -> Step:
    def call(options: RunOptions) -> object:
        values = task_data(recipe) | {"models": list(models.values()), "task": recipe.task}
        values |= {"pooling": recipe.pooling, **keys}
        resolved = resolve(EvaluateRecipe, recipe=None, options=values)
        return verbs.evaluate(resolved, options, Extras(names=list(models)))

    return Step("evaluate", call)


def task_data(recipe: CompressRecipe) -> RecipeValues:
    """Return the keys of `data:` for a verb that reads the task's rows."""
    own = recipe.data.model_dump(
        exclude_defaults=True, exclude={"selection_rows", "verification_rows"}
    )
    return dotted({"data": own})
