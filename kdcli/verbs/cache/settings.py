"""The kinds of cache entries, and the options of `kdcli cache`."""

import re
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from kdcli.errors import UsageError
from kdcli.recipe.options import OF_OPTIONS, Option

KINDS = {
    "corpora": "tokens of a text",
    "vectors": "an embedding teacher's vectors for texts",
    "scores": "a reranker's scores for texts",
    "candidates": "candidates for the words of texts, for augmentation",
    "vocabularies": "token counts of a text",
    "tokenizers": "tokenizers that were trained on a text",
    "measurements": "measurements of this processor",
    "objects": "data and models that Python functions were given as objects",
}
"""Kind -> what its entries are. A kind is a directory of the cache, except `measurements`."""
OBJECTS = "objects"
UNITS = {"m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}


def age_of(text: str) -> float:
    """Parse an age such as `30d` to seconds.

    Raises:
        UsageError: The text has another form.
    """
    match = re.fullmatch(r"(\d{1,6}(?:\.\d+)?)([mhdw])", text.strip())
    if match is None:
        raise UsageError(
            f"--older-than takes a number with the unit m, h, d or w, got '{text}'",
            "for example --older-than 30d",
        )
    return float(match[1]) * UNITS[match[2]]


@dataclass(frozen=True, config=OF_OPTIONS)
class CleanOptions:
    """Options of `kdcli cache clean`."""

    kinds: Annotated[
        list[str], Option("kinds", metavar="KIND", choices=tuple(KINDS), show_default=False)
    ] = Field(default_factory=list)
    """Kinds of entries to delete (default: all except objects)."""
    older_than: Annotated[
        float | None, Option("--older-than", kind=str, parse=age_of, metavar="AGE")
    ] = None
    """Delete only entries that were last used this long ago, such as 30d."""
    yes: Annotated[bool, Option("--yes", "-y")] = False
    """Delete without asking."""


OPTIONS = {"clean": CleanOptions}
