"""Choose labelled rows by a hash of their texts.

The hash decides which rows are held out, which rows belong to a subset, and which rows a model was
trained on. The choice is therefore the same for any order and number of rows in a file, and for
every verb. Texts that differ only in case, white space or Unicode composition have the same hash.
The label does not affect it.
"""

import unicodedata
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from kdcli.types import Example, RowHashes, Task

HELD_BACK = 0.1  # Share of the rows that is held out if there is no validation split.
_SEPARATOR = "\x1f"  # White space for `str.split`, so no canonical text contains it.
_BYTES = 8


def hashes_of(examples: Sequence[Example]) -> RowHashes:
    """Return the hash of each row, [rows] uint64."""
    return np.fromiter((_hash(_canonical(e.texts)) for e in examples), np.uint64, len(examples))


def text_groups(examples: Sequence[Example]) -> NDArray[np.int64] | None:
    """Return the number of each row's text, [rows] int64; None if no text is repeated."""
    texts, groups = np.unique(hashes_of(examples), return_inverse=True)
    return None if len(texts) == len(examples) else groups


def held_back(task: Task, examples: Sequence[Example], seed: int) -> NDArray[np.bool_]:
    """Choose the rows to hold out, [rows] bool.

    Only the context decides for `span` tasks, and only the first text for `text` tasks. All
    questions about a passage are thus in the same part.
    """
    hashes = deciding_hashes(task, examples, seed.to_bytes(_BYTES, "big"))
    return hashes < np.uint64(HELD_BACK * 2**64)


def deciding_hashes(task: Task, examples: Sequence[Example], salt: bytes = b"") -> RowHashes:
    """Return the hash that decides about each row's part, [rows] uint64; see `held_back`."""
    deciding = {"span": slice(1, None), "text": slice(1)}.get(task.kind, slice(None))
    texts = (e.texts[deciding] for e in examples)
    return np.fromiter((_hash(_canonical(t), salt) for t in texts), np.uint64, len(examples))


def choose_subset(examples: Sequence[Example], count: int | None) -> list[Example]:
    """Return the `count` rows with the smallest hashes, in their original order.

    A larger subset contains every smaller one.
    """
    if count is None or count >= len(examples):
        return list(examples)
    hashes = hashes_of(examples).tolist()
    # Rows with the same hash may have different labels.
    by_hash = sorted(
        range(len(examples)), key=lambda i: (hashes[i], examples[i].texts, repr(examples[i].label))
    )
    return [examples[i] for i in sorted(by_hash[:count])]


def _canonical(texts: Sequence[str]) -> str:
    joined = _SEPARATOR.join(" ".join(text.split()) for text in texts)
    return joined.lower() if joined.isascii() else _composed(_composed(joined).casefold())


def _composed(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def _hash(text: str, salt: bytes = b"") -> int:
    return int.from_bytes(
        blake2b(text.encode("utf-8"), digest_size=_BYTES, salt=salt).digest(), "big"
    )
