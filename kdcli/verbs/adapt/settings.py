"""The recipe of `kdcli adapt`."""

from typing import Annotated, Literal

from pydantic import Field

from kdcli.recipe.options import DATA, Option
from kdcli.recipe.sections import DATA_OPTION, MeasureSettings, Section
from kdcli.workloads.settings import Pooling


class AdaptData(Section):
    """`data:` of `adapt`."""

    source: Annotated[str | None, DATA_OPTION] = None
    """Texts of the index: a file, a directory, a hub id or a URL. With a directory in BEIR's
    format, its queries and their relevant documents are scored too."""
    column: str | None = None
    """Column of the text (default: 'text', 'body' ..., or the only column of strings)."""
    rows: int | None = Field(None, gt=0)
    """Maximum number of texts that are encoded, a random sample of the index (default: 20,000,
    or all documents in BEIR's format)."""


class AdaptRecipe(Section):
    """A recipe of `kdcli adapt`."""

    verb: Literal["adapt"] = "adapt"
    model: Annotated[
        str | None, Option("model", metavar="MODEL", values="model", required=True)
    ] = None
    """New embedding model: a hub id, a directory, or 'demo'."""
    vectors: Annotated[str | None, Option("--index", metavar="VECTORS", panel=DATA)] = None
    """Vectors of the texts by the old model: a .npy, .safetensors, .parquet, .arrow or .jsonl
    file, a directory or pattern of shards, a URL, or a hub data set."""
    index_model: Annotated[
        str | None, Option("--index-model", metavar="MODEL", panel=DATA, values="model")
    ] = None
    """Old model, if it is at hand: kdcli checks that it made the index."""
    encodes: Annotated[
        Literal["queries", "documents"], Option("--encodes", panel=DATA, metavar="WHAT")
    ] = "queries"
    """What the adapted model encodes: new queries, which search the old index, or new documents,
    which the old model's queries search."""
    pooling: Pooling = None
    data: AdaptData = AdaptData()
    measure: MeasureSettings = MeasureSettings(latency=False)


RECIPES: dict[str, type[Section]] = {"adapt": AdaptRecipe}
"""The settings model of each kind of recipe."""
