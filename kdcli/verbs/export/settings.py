"""The recipe keys and options of `kdcli export`."""

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from kdcli.deploy.backends import PACKED
from kdcli.errors import UsageError
from kdcli.recipe.options import GOAL, OF_OPTIONS, Option
from kdcli.recipe.sections import DATA_OPTION, Section
from kdcli.workloads.settings import TASK_OPTION, LabelledSettings, Pooling


class ExportData(LabelledSettings):
    """`data:` of `export`: the task's examples, or text."""

    source: Annotated[str | None, DATA_OPTION] = None
    """Data on which each file is compared with torch: the task's examples, or text (default: the
    task's own data, or the data of the model's training run)."""


class ExportRecipe(Section):
    """The keys that `--set` takes."""

    verb: Literal["export"] = "export"
    data: ExportData = ExportData()


@dataclass(frozen=True, config=OF_OPTIONS)
class ExportOptions:
    """Options of `kdcli export` that are not recipe keys."""

    model: Annotated[str, Option("model", metavar="MODEL", values="model")]
    """Model: a hub id, a directory, 'demo' or 'demo-classifier'; its head is exported too."""
    file_format: Annotated[
        Literal["onnx", "openvino"], Option("--format", name="file_format", metavar="FORMAT")
    ] = "onnx"
    """Format of the file."""
    int8: Annotated[bool, Option("--int8")] = False
    """Quantise to 8 bits."""
    fp16: Annotated[bool, Option("--fp16")] = False
    """Convert to half precision; ONNX only."""
    q4: Annotated[bool, Option("--q4")] = False
    """Quantise weights to 4 bits; ONNX only."""
    pack: Annotated[bool, Option("--pack")] = False
    """Store the matrices of --int8, and its embedding tables of at least 4,096 rows, in about
    half the size at the same speed; ONNX only."""
    steps: Annotated[int, Option("--steps", metavar="N"), Field(ge=0)] = 0
    """Number of steps for training the packed weights on texts of --data, so that the file's
    outputs come closer to the model's."""
    max_drop: Annotated[float | None, Option("--max-drop", panel=GOAL, metavar="POINTS")] = None
    """Maximum drop of the task metric, in points (1 point = 0.01; --max-drop 1% too); kdcli keeps
    matrix products in float32 where needed."""
    weights: Annotated[bool, Option("--weights", rare=True)] = False
    """Write model.safetensors too."""
    pooling: Pooling = None
    task: Annotated[str | None, TASK_OPTION] = None
    """Task on which the file is evaluated (default: none)."""

    @property
    def precisions(self) -> list[str]:
        """The precisions of the files. If there are several, the first is float32."""
        if self.pack and not self.int8:
            raise UsageError("--pack halves the size of an int8 file", "add --int8")
        if self.pack and self.file_format != "onnx":
            raise UsageError(f"--pack does not work with --format {self.file_format}", "use onnx")
        if self.steps and not self.pack:
            raise UsageError("--steps trains the integers of a packed file", "add --int8 --pack")
        wanted = {PACKED if self.pack else "int8": self.int8, "fp16": self.fp16, "q4": self.q4}
        smaller = [name for name, is_wanted in wanted.items() if is_wanted]
        return smaller if len(smaller) == 1 else ["fp32", *smaller]


RECIPES: dict[str, type[Section]] = {"export": ExportRecipe}
"""The settings model of each kind of recipe."""
OPTIONS = {"export": ExportOptions}
