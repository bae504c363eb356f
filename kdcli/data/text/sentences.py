"""Texts for embedding models: sentences cut from documents, or pairs and triples from columns, each text once.

Columns `query` (or `anchor`), `positive` and `negative`, `negative_1` ... make pairs and triples; any other source is
documents, whose sentences are cut at the end of `.`, `!`, `?` and their CJK counterparts, and at line ends.
"""

import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import regex  # type: ignore[import-untyped]

from kdcli.data.documents import check_text
from kdcli.data.rows import Row
from kdcli.data.sources import Log, Source, open_source
from kdcli.errors import UsageError

# With closing quotes and brackets; behind CJK marks stands no space.
ENDS = regex.compile(
    r"""(?<=[.!?]["'”’)\]]*)\s+|(?<=[。！？])(?![”’」』）])|(?<=[。！？][”’」』）])|[\r\n]+"""
)
SHORTEST = 2  # Words of a sentence; CJK characters count as words.
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|\w+")
QUERY, POSITIVE, NEGATIVE = ("query", "anchor"), "positive", re.compile(r"negatives?(_\d+)?")
HELD_OUT = 0.1  # Share of the texts that may be held out, at most

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Texts:
    """Distinct texts in the order of their hashes, so that a held-out part is a prefix that no order changes.

    Attributes:
        texts: each once.
        roles: of each, the name of the prompt for it: `query`, `document`, or "" of a sentence.
        positive: of each, a text that should be near, or -1. [N] int64
        negatives: of each, texts that should be far, or -1. [N, M] int64, M may be 0
        rows: of each, its place among the `read` texts of the source; -1 of a positive or negative. [N] int64
    """

    texts: list[str]
    roles: list[str]
    positive: Array
    negatives: Array
    rows: Array
    read: int

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def paired(self) -> bool:
        """Whether any text has a positive."""
        return bool((self.positive >= 0).any())


def read_texts(
    source: str, *, column: str | None, unit: str, rows: int | None, log: Log, paired: bool = False
) -> Texts:
    """The distinct training texts of a source. `unit`: `sentence` cuts documents, `document` does not. `rows`: at most
    so many, those with the smallest hashes. `paired`: pairs are wanted. Raises UsageError: see `kdcli.data.sources`; a
    pair without a positive, or no pair where they are wanted; fewer than two texts."""
    opened = open_source(source)
    links: dict[str, tuple[str | None, tuple[str, ...]]] = {}  # text -> its positive and negatives
    roles: dict[str, str] = {}
    places: dict[str, int] = {}
    read = 0
    first, units = _peeked(opened, column, unit)
    for text, role, positive, negatives in units:
        places.setdefault(text, read)
        read += 1
        roles.setdefault(text, role)
        if positive is not None or text not in links:
            links[text] = positive, negatives
        for other in (positive, *negatives):
            if other is not None:
                roles.setdefault(other, "document")
                links.setdefault(other, (text, ()) if other == positive else (None, ()))
    if len(links) < 2:
        raise UsageError(f"{source} holds {len(links)} texts, too few to learn from")
    ordered = sorted(links, key=_hash)[: rows or len(links)]
    log(
        f"{read:,} {first}, {len(links):,} distinct texts"
        + (f"; {len(ordered):,} are taken" if rows else "")
    )
    number = {text: n for n, text in enumerate(ordered)}
    width = max((len(negatives) for _, negatives in links.values()), default=0)
    positive_N = np.array([number.get(links[t][0] or "", -1) for t in ordered], dtype=np.int64)
    negatives_NM = np.full((len(ordered), width), -1, dtype=np.int64)
    for n, text in enumerate(ordered):
        for m, negative in enumerate(links[text][1]):
            negatives_NM[n, m] = number.get(negative, -1)
    rows_N = np.array([places.get(t, -1) for t in ordered], dtype=np.int64)
    found = Texts(ordered, [roles[t] for t in ordered], positive_N, negatives_NM, rows_N, read)
    if paired and not found.paired:
        raise UsageError(
            f"no text of {source} has a positive among the {len(found):,} taken, so nothing can be contrasted",
            "give rows of query and positive, or leave loss.contrastive_weight at 0",
        )
    return found


def held_out_count(texts: Sequence[str], wanted: int) -> int:
    """How many of the texts, the first ones, are held out: `wanted`, or a tenth of few."""
    return max(1, min(wanted, int(HELD_OUT * len(texts))))


def sentences(document: str) -> Iterator[str]:
    """The sentences of a document that have at least `SHORTEST` words."""
    for part in ENDS.split(document):
        if part and len(WORD.findall(part)) >= SHORTEST:
            yield part.strip()


Unit = tuple[str, str, str | None, tuple[str, ...]]


def _peeked(source: Source, column: str | None, unit: str) -> tuple[str, Iterator[Unit]]:
    """What the source holds, and its texts: (text, role, positive, negatives)."""
    tables = list(source.tables("train"))
    first = next(tables[0][1], None) if tables else None
    if first is None:
        raise UsageError(f"{source.name} holds no text")
    names = [name for name in QUERY if name in first.values]
    if column is None and (names or POSITIVE in first.values):
        rest = itertools.chain.from_iterable(rows for _, rows in tables)
        return "pairs", _pairs(itertools.chain([first], rest), names[0] if names else "query")
    what = "documents" if unit == "document" else "sentences"
    return what, _cut(open_source(source.name).documents("train", column), unit)


def _cut(documents: Iterator[str], unit: str) -> Iterator[Unit]:
    for document in documents:
        for text in (document.strip(),) if unit == "document" else sentences(document):
            yield text, "", None, ()


def _pairs(rows: Iterator[Row], query: str) -> Iterator[Unit]:
    for where, row in rows:
        text, positive = (_text(where, row, name) for name in (query, POSITIVE))
        negatives: list[str] = []
        for name in row:
            if NEGATIVE.fullmatch(name) and row[name] is not None:
                given = row[name] if isinstance(row[name], list) else [row[name]]
                negatives += [_text(where, {name: each}, name) for each in given]
        yield text, "query", positive, tuple(negatives)


def _text(where: str, row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str) or not value.strip():
        raise UsageError(
            f"{where}: '{name}' must be a text, got {value!r:.60}; there are {', '.join(row)}",
            "pairs have the columns query, positive and perhaps negative",
        )
    return check_text(where, name, value).strip()


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
