"""The recipe of `kdcli benchmark`."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from kdcli.deploy.backends import BackendName
from kdcli.recipe.options import GOAL, OF_OPTIONS, Option
from kdcli.recipe.sections import (
    DATA_OPTION,
    BatchSize,
    MeasureSettings,
    PricePerHour,
    Section,
)
from kdcli.workloads.settings import TASK_OPTION, LabelledSettings

NOT_MEASURED = (
    "--max-latency-ms",
    "--min-speedup",
    "--strict",
    "--task",
    "--baseline",
    "--backend",
    "--padding",
)
"""Options that only apply to a measurement, not to `--portable` or `--compare`."""


class BenchmarkDataSettings(LabelledSettings):
    """`data:` of `benchmark`: the task's examples, or text."""

    source: Annotated[str | None, DATA_OPTION] = None
    """Text, or with a task its examples: a hub id (or ID@REV), a file, a directory, or 'demo'
    (default: the task's own, or 'demo')."""
    column: str | None = None
    """Column of the text (default: 'text', 'body' ..., or the only column of strings)."""
    judged_rows: int | None = Field(1000, gt=0)
    """Number of evaluated rows, which are the same in every run; null takes all."""


class BenchmarkRecipe(Section):
    """A recipe of `kdcli benchmark`."""

    verb: Literal["benchmark"] = "benchmark"
    models: Annotated[list[str], Option("models", metavar="MODEL", values="model")] = Field(
        default_factory=list
    )
    """Hub ids, directories, or shapes such as 6x384: 6 layers of width 384."""
    baseline: Annotated[str | None, Option("--baseline", metavar="MODEL")] = None
    """Model to compare with (default: the first)."""
    preset: Annotated[
        Literal["papers", "minilm", "tinybert", "serving"] | None,
        Option("--preset", metavar="NAME"),
    ] = None
    """List of models, batch sizes and lengths to measure where you give none (default: papers,
    if you give no model)."""
    backends: Annotated[
        list[BackendName], Option("--backend", metavar="NAME[-DTYPE]", values="backend")
    ] = Field(default_factory=lambda: ["torch"], min_length=1)
    """Backend: torch, sparse, compile, onnx or openvino, perhaps with a number format, such as
    onnx-int8; may be repeated."""
    dtype: Annotated[Literal["fp32", "bf16", "fp16"], Option("--dtype", rare=True)] = "fp32"
    """Number format of the baseline, and of backends without one of their own."""
    batch_sizes: Annotated[list[BatchSize], Option("--batch-size", metavar="N")] = Field(
        default_factory=list
    )
    """Sequences per call; may be repeated (default: the preset's, or 1 and 8)."""
    seq_lens: Annotated[
        list[Annotated[int, Field(gt=0, le=2**20)]], Option("--seq-len", metavar="N")
    ] = Field(default_factory=list)
    """Tokens per sequence; may be repeated (default: the preset's, or 128)."""
    padding: Annotated[
        Literal["full", "random", "data"], Option("--padding", metavar="KIND", rare=True)
    ] = "full"
    """Lengths of the sequences in a batch; data takes --data's."""
    task: Annotated[str | None, TASK_OPTION] = None
    """Task on which every backend is evaluated too (default: none)."""
    max_drop: float = Field(2.0, ge=0)
    """Maximum drop of the task's first metric below torch in float32, in points (1 point =
    0.01); a backend that loses more fails."""
    data: BenchmarkDataSettings = BenchmarkDataSettings()
    price_per_hour: PricePerHour = None
    measure: MeasureSettings = MeasureSettings()


@dataclass(frozen=True, config=OF_OPTIONS)
class BenchmarkOptions:
    """Options of `kdcli benchmark` that are not recipe keys."""

    portable: Annotated[
        Path | None,
        Option(
            "--portable",
            metavar="DIR",
            terminal=True,
            excludes=(*NOT_MEASURED, "--price-per-hour"),
            rare=True,
        ),
    ] = None
    """Write a runner for old machines to this directory."""
    compare: Annotated[
        list[Path] | None,
        Option(
            "--compare",
            metavar="RUN",
            excludes=(
                *("models", "--portable", "--preset", "--batch-size", "--seq-len"),
                *NOT_MEASURED,
            ),
        ),
    ] = None
    """Compare the reports of runs and measure nothing; may be repeated."""
    max_latency_ms: Annotated[
        float | None, Option("--max-latency-ms", panel=GOAL, metavar="MS"), Field(gt=0)
    ] = None
    """Exit with 5 if the median at the first batch size and length is above this."""
    min_speedup: Annotated[
        float | None, Option("--min-speedup", panel=GOAL, metavar="FACTOR"), Field(gt=0)
    ] = None
    """Exit with 5 if the speed-up at the first batch size and length is below this."""
    strict: Annotated[bool, Option("--strict", panel=GOAL, rare=True)] = False
    """Exit with 6 if a measurement is unstable."""


RECIPES: dict[str, type[Section]] = {"benchmark": BenchmarkRecipe}
"""The settings model of each folder of `recipes/`."""
OPTIONS = {"benchmark": BenchmarkOptions}
