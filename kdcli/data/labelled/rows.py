"""The identity of a labelled row: which rows are held back, which are taken of many, which trained
a model.

All follow from a hash of the row's texts, so that neither the order nor the number of rows in a
file, nor the verb, changes them. Texts that differ in case, white space or Unicode composition
alone have one hash. The label has no part in it.
"""

import unicodedata
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from kdcli.types import Example, RowHashes, Task

HELD_BACK = 0.1  # Share of the rows to judge by where there is no validation split.
_BETWEEN = "\x1f"  # White space for `str.split`, so no canonical text holds it.
_BYTES = 8


def hashes_of(examples: Sequence[Example]) -> RowHashes:
    """The hash of each row, [rows] uint64."""
    return np.fromiter((_hash(_canonical(e.texts)) for e in examples), np.uint64, len(examples))


def held_back(
    task: Task, examples: Sequence[Example], seed: int
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Whether each row is held back, [rows] bool. Of a `span` task the context alone decides, of
    `text` the first text: a passage with several questions is never on both sides."""
    of_passage = {"span": slice(1, None), "text": slice(1)}.get(task.kind, slice(None))
    parts = (e.texts[of_passage] for e in examples)
    salt = seed.to_bytes(_BYTES, "big")
    drawn = np.fromiter(
        (_hash(_canonical(texts), salt) for texts in parts), np.uint64, len(examples)
    )
    return drawn < np.uint64(HELD_BACK * 2**64)


def fewest(examples: Sequence[Example], count: int | None) -> list[Example]:
    """The `count` rows with the smallest hashes, in their own order; more rows contain the
    fewer."""
    if count is None or count >= len(examples):
        return list(examples)
    hashes = hashes_of(examples).tolist()
    # Rows of one hash may have different labels.
    by_hash = sorted(
        range(len(examples)), key=lambda i: (hashes[i], examples[i].texts, repr(examples[i].label))
    )
    return [examples[i] for i in sorted(by_hash[:count])]


def _canonical(texts: Sequence[str]) -> str:
    joined = _BETWEEN.join(" ".join(text.split()) for text in texts)
    return joined.lower() if joined.isascii() else _composed(_composed(joined).casefold())


def _composed(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def _hash(text: str, salt: bytes = b"") -> int:
    return int.from_bytes(
        blake2b(text.encode("utf-8"), digest_size=_BYTES, salt=salt).digest(), "big"
    )
