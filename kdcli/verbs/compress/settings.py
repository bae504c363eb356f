"""The recipe of `kdcli compress`."""

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass

from kdcli.deploy.backends import FORMATS, BackendName
from kdcli.errors import UsageError
from kdcli.recipe.options import GOAL, RUN, Option
from kdcli.recipe.sections import (
    MeasureSettings,
    PricePerHour,
    RecipeValues,
    Section,
    Seed,
)
from kdcli.verbs.compress.limits import LIMITS, GoalSettings, option_of
from kdcli.workloads.settings import LabelledSettings, Pooling, TaskName

ASKS_OR_TRAINS = (
    *("model", "--task", "--data", "--pooling", "--seed", "--recipe", "--set", "--revision"),
    *(option_of(limit.key) for limit in LIMITS),
    *("--strict", "--budget", "--price-per-hour", "--output-dir", "--overwrite", "--resume"),
)
"""The options of a question or of a training, which printing the candidates would ignore."""
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def seconds_of(budget: str) -> float:
    """Parse a time such as `30m`. Raises UsageError: another form, or no time at all."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", budget.strip())
    if match is None or float(match[1]) == 0:
        raise UsageError(f"--budget takes a time such as 90s, 30m or 2h, got '{budget}'")
    return float(match[1]) * UNITS[match[2]]


def check_runs_exports(backend: str) -> str:
    """Return the name of a backend that runs exports. Raises UsageError: it runs none."""
    if backend.partition("-")[0] not in FORMATS:
        raise UsageError(
            f"compress exports its candidates, and {backend} runs no exports",
            f"plan.backends takes {' and '.join(FORMATS)}, such as onnx-int8",
        )
    return backend


class PlanSettings(Section):
    """`plan:`, the candidates of a recipe without steps."""

    backends: list[Annotated[BackendName, AfterValidator(check_runs_exports)]] = Field(
        default_factory=lambda: ["onnx-int8", "openvino-int8", "onnx"],
        min_length=1,
        description="Backends that are tried.",
    )
    shapes: list[str] = Field(
        default_factory=list,
        description="Student shapes that are tried, or a single goal such as 2x or 5ms on the "
        "fastest backend; none means shapes derived from the model.",
    )
    finetune: RecipeValues = Field(default_factory=dict, description="Keys of finetune.")
    distill: RecipeValues = Field(
        default_factory=dict,
        description="Keys of distill (default on a task: method tinybert, stage joint, learning "
        "rate 3e-4 at width 384, and 1 to 10 epochs, about 90,000 rows in all).",
    )
    prune: RecipeValues | None = Field(
        default_factory=dict,
        description="Keys of prune, with sparsity 0.9 unless given; null skips pruning.",
    )
    trim_from: float = Field(
        0.25,
        ge=0,
        le=1,
        description="Share of the embeddings among the parameters from which the vocabulary is "
        "trimmed too.",
    )
    undistilled: bool = Field(
        False,
        description="Whether the last shape is trained without its teacher as well, to show what "
        "the teacher adds.",
    )


class CompressData(LabelledSettings):
    """`data:` of `compress`."""

    selection_rows: int = Field(
        2000,
        gt=0,
        description="Number of rows that choose among candidates; at most a tenth of the training "
        "rows.",
    )
    verification_rows: int = Field(
        5000,
        gt=0,
        description="Number of rows that score the chosen model, once, at the end; at most a fifth "
        "of the training rows (default: the test split, or the validation split and training rows "
        "up to this number).",
    )


class CompressRecipe(Section):
    """A recipe of `kdcli compress`."""

    verb: Literal["compress"] = "compress"
    model: Annotated[str | None, Option("model", metavar="MODEL", values="model")] = Field(
        None,
        description="Model: a hub id, a directory, 'demo' or 'demo-classifier'; fine-tuned or not.",
    )
    task: TaskName = None
    text: str | None = Field(
        None,
        description="Text on which an embedding model is distilled (default: the task's data).",
    )
    pooling: Pooling = None
    budget: Annotated[
        float | None,
        Option("--budget", panel=GOAL, kind=str, parse=seconds_of, metavar="TIME"),
    ] = Field(
        None,
        gt=0,
        description="Time limit, such as 90s, 30m or 2h (default: none).",
    )
    goal: GoalSettings = GoalSettings()
    steps: list[dict[str, RecipeValues]] = Field(
        default_factory=list,
        description="Pipeline: each step maps distill, prune, trim, quantize or export to its "
        "keys; none means that candidates are planned.",
    )
    plan: PlanSettings = PlanSettings()
    data: CompressData = CompressData()
    seed: Seed = 0
    price_per_hour: PricePerHour = None
    measure: MeasureSettings = MeasureSettings(min_runs=30, min_seconds=3.0)


@dataclass(frozen=True)
class CompressOptions:
    """Options of `kdcli compress` that are no recipe keys."""

    front: Annotated[
        Path | None,
        Option(
            "--front",
            panel=RUN,
            metavar="RUN",
            excludes=ASKS_OR_TRAINS,
        ),
        Field(description="Print all candidates of a finished run, and stop."),
    ] = None


RECIPES: dict[str, type[Section]] = {"compress": CompressRecipe}
"""Folder of `recipes/` -> settings model."""
OPTIONS = {"compress": CompressOptions}
