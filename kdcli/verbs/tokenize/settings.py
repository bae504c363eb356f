"""The options of `kdcli tokenize`."""

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from kdcli.recipe.options import OF_OPTIONS, Option
from kdcli.recipe.sections import MAX_PROCESSES


@dataclass(frozen=True, config=OF_OPTIONS)
class TokenizeOptions:
    """Options of `kdcli tokenize`."""

    source: Annotated[str, Option("source", metavar="SOURCE", values="data")]
    """Text: a hub id, a file, a directory, a URL (hf://, s3://, https://), or 'demo'."""
    tokenizer: Annotated[str, Option("--tokenizer", metavar="MODEL")]
    """Model that will read the text: a hub id, a directory, or 'demo'."""
    column: Annotated[str | None, Option("--column", metavar="NAME")] = None
    """Column of the text (default: 'text', 'body' ..., or the only column of strings)."""
    share: Annotated[float, Option("--share", metavar="SHARE"), Field(gt=0, le=1)] = 1.0
    """Share of the training rows that is read."""
    workers: Annotated[
        int | None, Option("--workers", metavar="N"), Field(gt=0, le=MAX_PROCESSES)
    ] = None
    """Number of processes (default: one per core)."""


OPTIONS = {"tokenize": TokenizeOptions}
