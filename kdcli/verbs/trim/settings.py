"""The recipe of `kdcli trim`."""

from typing import Annotated, Literal

from pydantic import Field

from kdcli.recipe.options import Option
from kdcli.recipe.sections import DATA_OPTION, MeasureSettings, Section


class TrimData(Section):
    """`data:` of `trim`."""

    source: Annotated[str | None, DATA_OPTION] = Field(
        None,
        description="Text whose tokens are kept: a hub id (or ID@REV), a file, a directory, a "
        "URL, or 'demo'.",
    )
    column: str | None = Field(
        None, description="Column of the text (default: every text of a row)."
    )


class TrimRecipe(Section):
    """The keys that `--set` takes."""

    verb: Literal["trim"] = "trim"
    model: Annotated[
        str | None, Option("model", metavar="MODEL", values="model", required=True)
    ] = Field(None, description="Model: a hub id, a directory, or 'demo'; its head is kept.")
    vocab_size: Annotated[int | None, Option("--vocab-size", metavar="N")] = Field(
        None,
        gt=0,
        description="Number of tokens to keep (default: every token that occurs in the data).",
    )
    data: TrimData = TrimData()
    measure: MeasureSettings = MeasureSettings(latency=False)


RECIPES: dict[str, type[Section]] = {"trim": TrimRecipe}
"""The settings model of each kind of recipe."""
