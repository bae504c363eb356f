"""The recipe of `kdcli trim`."""

from typing import Annotated, Literal

from pydantic import Field

from kdcli.recipe.options import GOAL, Option
from kdcli.recipe.sections import DATA_OPTION, MeasureSettings, Section
from kdcli.workloads.settings import Pooling, TaskName, TextShare


class TrimData(Section):
    """`data:` of `trim`."""

    source: Annotated[str | None, DATA_OPTION] = None
    """Text whose tokens are kept: a hub id (or ID@REV), a file, a directory, a URL, or 'demo'."""
    column: str | None = None
    """Column of the text (default: every text of a row)."""
    share: TextShare = 1.0


class TrimRecipe(Section):
    """The keys that `--set` takes."""

    verb: Literal["trim"] = "trim"
    model: Annotated[
        str | None, Option("model", metavar="MODEL", values="model", required=True)
    ] = None
    """Model: a hub id, a directory, 'demo' or 'demo-classifier'; its head is kept."""
    vocab_size: Annotated[int | None, Option("--vocab-size", metavar="N")] = Field(None, gt=0)
    """Number of tokens to keep (default: every token that occurs in the data)."""
    max_drop: Annotated[float | None, Option("--max-drop", panel=GOAL, metavar="POINTS")] = Field(
        None, ge=0
    )
    """Keep the fewest tokens with which the score drops by at most this many points (1 point =
    0.01): the task's metric, or agreement with the model if there are no labels."""
    task: TaskName = None
    pooling: Pooling = None
    data: TrimData = TrimData()
    measure: MeasureSettings = MeasureSettings(latency=False)


RECIPES: dict[str, type[Section]] = {"trim": TrimRecipe}
"""The settings model of each kind of recipe."""
