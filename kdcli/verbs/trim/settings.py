"""The recipe of `kdcli trim`."""

from typing import Literal

from pydantic import Field

from kdcli.recipe.sections import MeasureSettings, Section


class TrimData(Section):
    """`data:`. `column` null reads every text of a row."""

    source: str | None = None
    column: str | None = None


class TrimRecipe(Section):
    """The recipe of `kdcli trim`. `vocab_size` null keeps every token that the data need."""

    verb: Literal["trim"] = "trim"
    model: str | None = None
    vocab_size: int | None = Field(None, gt=0)
    data: TrimData = TrimData()
    measure: MeasureSettings = MeasureSettings(latency=False)


RECIPES: dict[str, type[Section]] = {"trim": TrimRecipe}  # Folder of `recipes/` -> settings model
