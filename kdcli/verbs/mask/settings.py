"""The options of `kdcli mask`."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from kdcli.recipe.options import Option


@dataclass(frozen=True)
class InfoOptions:
    """Options of `kdcli mask info`."""

    file: Annotated[Path, Option("file", metavar="FILE"), Field(description="Mask file.")]


@dataclass(frozen=True)
class DiffOptions:
    """Options of `kdcli mask diff`."""

    first: Annotated[Path, Option("first", metavar="FIRST"), Field(description="Mask file.")]
    second: Annotated[
        Path,
        Option("second", metavar="SECOND"),
        Field(description="Another mask file of the same base."),
    ]


@dataclass(frozen=True, config=ConfigDict(allow_inf_nan=False))
class ApplyOptions:
    """Options of `kdcli mask apply`."""

    file: Annotated[
        Path,
        Option("file", metavar="FILE"),
        Field(description="Mask file, or an .npy of the SMP authors."),
    ]
    base: Annotated[
        str | None,
        Option("--base", metavar="MODEL"),
        Field(
            description="Model to which the mask applies (default: the model that the mask names)."
        ),
    ] = None
    task: Annotated[
        str | None,
        Option("--task", metavar="TASK", values="task"),
        Field(description="Task of an .npy's head (default: the one in the file's name)."),
    ] = None
    sparsity: Annotated[
        float | None,
        Option("--sparsity", metavar="SHARE"),
        Field(
            ge=0,
            lt=1,
            description="Share of the weights to remove, chosen by the stored scores (default: the "
            "stored mask).",
        ),
    ] = None
    masking: Annotated[
        Literal["local", "global", "proportional"] | None,
        Option("--masking", metavar="NAME"),
        Field(
            description="Where weights compete to be kept: local in each matrix, global all "
            "together; proportional keeps more of a matrix with higher scores (default: "
            "proportional)."
        ),
    ] = None


@dataclass(frozen=True)
class CompactOptions(ApplyOptions):
    """Options of `kdcli mask compact`."""

    drop_rows_below: Annotated[
        int,
        Option("--drop-rows-below", metavar="N"),
        Field(description="Treat rows with fewer weights as empty."),
    ] = 0


OPTIONS = {
    "info": InfoOptions,
    "diff": DiffOptions,
    "apply": ApplyOptions,
    "compact": CompactOptions,
}
