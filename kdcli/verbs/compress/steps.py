"""The verbs that a compression runs besides its trainings, as steps.

The recipe of a step is resolved when the step runs, so that an error in it fails the step and not
the compression.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from kdcli.data.labelled.partition import VERIFICATION
from kdcli.disk import REPORT_FILE
from kdcli.errors import MachineError
from kdcli.recipe.resolve import resolve
from kdcli.recipe.sections import RecipeValues, RunOptions
from kdcli.report.finish import RunResult
from kdcli.report.titles import SELECTION
from kdcli.verbs.compress.recipes import RecipeKeys, dotted
from kdcli.verbs.compress.runner import Step
from kdcli.verbs.compress.scores import latency_rows
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


def trim_step(
    verbs: Verbs, name: str, model: str, text: Callable[[], Path], keys: RecipeKeys
) -> Step:
    """Trim a model's vocabulary to the tokens of a text, unless the keys name another text."""

    def call(options: RunOptions) -> object:
        values = {"data.source": str(text())} | dotted(keys) | {"model": model}
        return verbs.trim(resolve(TrimRecipe, recipe=None, options=values), options)

    return Step(name, "trim", {"model": model, "keys": keys}, call)


def export_step(
    verbs: Verbs,
    recipe: CompressRecipe,
    name: str,
    model: str,
    backend: str,
    *,
    max_drop: float | None = None,
) -> Step:
    """Write a model for a backend, such as `onnx-int8`.

    With `max_drop`, products stay in float32 until the file loses at most this many points of the
    task's metric.
    """
    format, _, precision = backend.partition("-")

    def call(options: RunOptions) -> object:
        # The texts of the rows choose the integers.
        reads_rows = max_drop is not None or precision in QUANTISED
        return verbs.export(
            model,
            format=format,
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

    values = {"model": model, "backend": backend, "max_drop": max_drop}
    return Step(name, "export", values, call)


def select(
    verbs: Verbs, recipe: CompressRecipe, models: Mapping[str, str], machine: object
) -> Step:
    """Score models, given by name, on the selection rows and measure their latency in turns.

    `machine` is what latencies depend on besides the models.
    """
    measure = recipe.measure.model_dump(include={"min_runs", "min_seconds"})
    keys = {f"measure.{key}": value for key, value in measure.items()}
    keys |= {"measure.latency": True, "worst": 0}
    keys |= {"max_class_drop": recipe.goal.max_class_drop}
    score = _evaluate(verbs, recipe, models, keys)

    def call(options: RunOptions) -> object:
        result = score(options)
        assert isinstance(result, RunResult)
        try:
            latency_rows(result.report)
        except MachineError:
            # A step that has a report is not called again.
            (result.folder / REPORT_FILE).unlink()
            raise
        return result

    values: dict[str, object] = {"models": dict(sorted(models.items())), "machine": machine}
    return Step(SELECTION, "evaluate", values, call)


def verification(
    verbs: Verbs, recipe: CompressRecipe, models: Mapping[str, str], confidence: float
) -> Step:
    """Score the teacher and the chosen model, given by name, on the verification rows."""
    # The ends of wider intervals need more resamples.
    resamples = min(round(RESAMPLES * 0.05 / (1 - confidence)), MAX_RESAMPLES)
    keys: RecipeValues = {"data.split": VERIFICATION}
    keys |= {"confidence": confidence, "resamples": resamples}
    keys["max_class_drop"] = recipe.goal.max_class_drop
    name = f"{VERIFICATION}-{list(models)[-1]}"
    call = _evaluate(verbs, recipe, models, keys)
    return Step(name, "evaluate", {"models": dict(models)}, call, is_look=True)


def _evaluate(
    verbs: Verbs, recipe: CompressRecipe, models: Mapping[str, str], keys: RecipeKeys
) -> Callable[[RunOptions], object]:
    def call(options: RunOptions) -> object:
        values = task_data(recipe) | {"models": list(models.values()), "task": recipe.task}
        values |= {"pooling": recipe.pooling, **keys}
        resolved = resolve(EvaluateRecipe, recipe=None, options=values)
        return verbs.evaluate(resolved, options, Extras(names=list(models)))

    return call


def task_data(recipe: CompressRecipe) -> RecipeValues:
    """Return the keys of `data:` for a verb that reads the task's rows."""
    own = recipe.data.model_dump(
        exclude_defaults=True, exclude={"selection_rows", "verification_rows"}
    )
    return dotted({"data": own})
