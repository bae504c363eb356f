"""Texts for embedding models: sentences of documents, or pairs and triples of columns.

Columns `query` (or `anchor`), `positive`, and `negative`, `negative_1` ... make pairs and triples.
Any other source holds documents, which are split into sentences after `.`, `!`, `?` and their CJK
counterparts, and at the ends of lines. Duplicate texts are removed.
"""

import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import regex  # type: ignore[import-untyped]

from kdcli.data.accounts import ACCOUNTS, CUT, REPEATED, RowAccount
from kdcli.data.labelled.partition import DividedRows, Partition, Pools, text_hashes
from kdcli.data.rows import (
    BadRow,
    Row,
    RowValues,
    check_encodable,
    columns_in,
    names_in,
    take_first,
)
from kdcli.data.sources import Log, Source, open_source
from kdcli.errors import UsageError
from kdcli.types import Array, RowHashes

# Closing quotes and brackets belong to the sentence. No space follows CJK marks.
ENDS = regex.compile(
    r"""(?<=[.!?]["'”’)\]]*)\s+|(?<=[。！？])(?![”’」』）])|(?<=[。！？][”’」』）])|[\r\n]+"""
)
MIN_WORDS = 2  # Minimum number of words per sentence. CJK characters count as words.
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|\w+")
LETTER = regex.compile(r"\p{L}")  # Numbers alone are no sentence.
QUERY_COLUMNS = ("query", "anchor")
POSITIVE_COLUMN = "positive"
PAIR_HINT = "pairs have the columns query, positive and optionally negative"
NEGATIVE_COLUMN = re.compile(r"negatives?(_\d+)?")
SENTENCES = "sentences"
MAX_HELD_OUT = 0.1  # Maximum share of the texts that are held out.


@dataclass(frozen=True)
class Texts(DividedRows):
    """Distinct texts in the order of their hashes.

    The held-out texts are a prefix, which the order of the source does not change.

    Attributes:
        texts: The texts, without duplicates.
        roles: The name of the prompt for each text: `query`, `document`, or "" for a sentence.
        positive: For each text, the number of a text that should be near, or -1. [N] int64
        negatives: For each text, the numbers of texts that should be far, or -1. [N, M] int64,
            where M may be 0.
        rows: For each text, its position among the `read` texts of the source; -1 for a positive
            or a negative. [N] int64
        read: The number of texts that were read from the source.
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

    def pools(self, trained: RowHashes) -> Pools:
        """Return the hashes of the texts, which are all one split."""
        return Pools(text_hashes(self.texts))

    def training_texts(self, partition: Partition) -> Iterator[str]:
        """Return the training texts of a partition."""
        return itertools.compress(self.texts, partition.is_training(text_hashes(self.texts)))

    def take(self, numbers: Array) -> "Texts":
        """Return some texts in the given order. Links to other texts are dropped."""
        # The last entry stands for "no text", whose number is -1.
        place = np.full(len(self) + 1, -1, dtype=np.int64)
        place[numbers] = np.arange(len(numbers))
        return Texts(
            texts=[self.texts[n] for n in numbers],
            roles=[self.roles[n] for n in numbers],
            positive=place[self.positive[numbers]],
            negatives=place[self.negatives[numbers]],
            rows=self.rows[numbers],
            read=self.read,
        )


class Unit(NamedTuple):
    """A text as it is read, its place, and its positive and negatives."""

    text: str
    where: str = ""
    role: str = ""
    positive: str | None = None
    negatives: tuple[str, ...] = ()


def read_texts(
    source: str,
    *,
    column: str | None,
    unit: str,
    rows: int | None,
    log: Log,
    paired: bool = False,
    split: str = "train",
) -> Texts:
    """Read the distinct texts of a split of a source.

    Args:
        source: A value of `--data`.
        column: The column of the text; None chooses it.
        unit: `sentence` splits documents into sentences, `document` keeps them whole.
        rows: The maximum number of texts. The texts with the smallest hashes are chosen.
        log: Called with a message about the number of texts.
        paired: Whether the caller needs pairs.
        split: The split that is read.

    Raises:
        UsageError: The source cannot be read or has no such split, a pair lacks its query or
            positive, there is no pair although the caller needs pairs, or there are fewer than two
            texts.
    """
    opened = open_source(source)
    of_rows = RowAccount(source)
    name, units = _read_units(opened, split, column, unit, of_rows)
    of_texts = RowAccount(source, name) if name == SENTENCES else of_rows
    links: dict[str, Unit] = {}
    roles: dict[str, str] = {}
    positions: dict[str, int] = {}
    read = 0
    for one in units:
        if positions.setdefault(one.text, read) != read:
            of_texts.leave_out(REPEATED, one.where)
        read += 1
        roles.setdefault(one.text, one.role)
        if one.positive is not None or one.text not in links:
            links[one.text] = one
        for other in (one.positive, *one.negatives):
            if other is not None:
                roles.setdefault(other, "document")
                positive = one.text if other == one.positive else None
                links.setdefault(other, Unit(other, one.where, positive=positive))
    if len(links) < 2:
        raise _too_few_texts(opened, split, column, len(links))
    taken = sorted(links, key=_hash)[: rows or len(links)]
    message = f"{read:,} {name}, {len(links):,} distinct texts"
    log(message + (f"; using {len(taken):,}" if rows else ""))
    used = set(taken)
    if unused := [text for text in positions if text not in used]:
        of_texts.leave_out(CUT, links[unused[0]].where, len(unused))
    if of_texts is not of_rows:
        of_texts.read = read
        ACCOUNTS.close(of_rows, of_rows.used, log)
    ACCOUNTS.close(of_texts, len(positions) - len(unused), log)
    texts = _link(taken, links, roles, positions, read)
    if paired and not texts.paired:
        raise UsageError(
            f"no text of {source} has a positive among the {len(texts):,} chosen texts, so there "
            "is nothing to contrast",
            "give rows of query and positive, or leave loss.contrastive_weight at 0",
        )
    return texts


def held_out_count(texts: Sequence[str], wanted: int) -> int:
    """Return how many of the first texts are held out: `wanted`, but at most a tenth of all."""
    return max(1, min(wanted, int(MAX_HELD_OUT * len(texts))))


def sentences(document: str) -> Iterator[str]:
    """Yield the sentences of a document that have at least `MIN_WORDS` words and a letter."""
    for part in ENDS.split(document):
        if part and len(WORD.findall(part)) >= MIN_WORDS and LETTER.search(part):
            yield part.strip()


def _too_few_texts(source: Source, split: str, column: str | None, count: int) -> UsageError:
    """Return the error for a source with fewer than two texts."""
    if count and split != "train":
        return UsageError(
            f"the {split} split of {source.name} holds only one text",
            "give at least two different texts; thousands are better",
        )
    if count:
        return UsageError(
            f"{source.name} holds only one text, too few to learn from",
            "give a source with at least two different texts; thousands are better",
        )
    first, _ = take_first(row for table in source.tables(split) for row in table.rows)
    where = f" in column '{column}'" if column else ""
    return UsageError(
        f"no row of {source.name} holds a sentence of at least {MIN_WORDS} words, with a letter"
        f"{where}; {columns_in(names_in(first))}",
        f"give texts of at least {MIN_WORDS} words, or keep texts whole, such as proteins: --set "
        "workload.unit=document",
    )


def _link(
    taken: list[str],
    links: Mapping[str, Unit],
    roles: Mapping[str, str],
    positions: Mapping[str, int],
    read: int,
) -> Texts:
    """Number the chosen texts, and their positives and negatives among them."""
    numbers = {text: number for number, text in enumerate(taken)}
    width = max((len(unit.negatives) for unit in links.values()), default=0)
    positive_N = [numbers.get(links[text].positive or "", -1) for text in taken]
    negatives_NM = np.full((len(taken), width), -1, dtype=np.int64)
    for row_M, text in zip(negatives_NM, taken, strict=True):
        negatives = [numbers.get(negative, -1) for negative in links[text].negatives]
        row_M[: len(negatives)] = negatives
    return Texts(
        texts=taken,
        roles=[roles[text] for text in taken],
        positive=np.array(positive_N, dtype=np.int64),
        negatives=negatives_NM,
        rows=np.array([positions.get(text, -1) for text in taken], dtype=np.int64),
        read=read,
    )


def _read_units(
    source: Source, split: str, column: str | None, unit: str, account: RowAccount
) -> tuple[str, Iterator[Unit]]:
    """Read the texts of a source, and return them with their name for a message.

    `account` counts the rows.
    """
    tables = list(source.tables(split))
    first, _ = take_first(row for table in tables for row in table.rows)
    if not first:
        part = "" if split == "train" else f"the {split} split of "
        raise UsageError(f"{part}{source.name} holds no text")
    names = names_in(first)
    queries = [name for name in QUERY_COLUMNS if name in names]
    if column is None and (queries or POSITIVE_COLUMN in names):
        rows = (row for table in source.tables(split, account.on_bad) for row in table.rows)
        return "pairs", _read_pairs(rows, queries[0] if queries else "query", account)
    documents = source.placed_documents(split, column, account)
    if unit == "document":
        return "documents", (Unit(document.strip(), where) for where, document in documents)
    return SENTENCES, _read_sentences(documents, account)


def _read_sentences(documents: Iterator[tuple[str, str]], account: RowAccount) -> Iterator[Unit]:
    for where, document in documents:
        is_used = False
        for sentence in sentences(document):
            is_used = True
            yield Unit(sentence, where)
        if not is_used:
            account.leave_out(f"without a sentence of {MIN_WORDS} words", where)


def _read_pairs(rows: Iterator[Row], query: str, account: RowAccount) -> Iterator[Unit]:
    for where, values in rows:
        account.read += 1
        text, positive = (
            text_in(where, values, name, values.get(name), PAIR_HINT)
            for name in (query, POSITIVE_COLUMN)
        )
        negatives = negatives_in(where, values, PAIR_HINT)
        yield Unit(text, where, "query", positive, tuple(negatives))


def negatives_in(where: str, values: RowValues, hint: str) -> list[str]:
    """Return the texts of a row's negatives.

    Raises:
        BadRow: One of them is no text.
    """
    by_column = {n: v for n, v in values.items() if NEGATIVE_COLUMN.fullmatch(n) and v is not None}
    return [
        text_in(where, values, name, text, hint)
        for name, value in by_column.items()
        for text in (value if isinstance(value, list) else [value])
    ]


def text_in(where: str, values: RowValues, name: str, text: object, hint: str) -> str:
    """Return a text of the column `name`, without surrounding white space.

    Raises:
        BadRow: It is no text, or blank.
    """
    if not isinstance(text, str) or not text.strip():
        detail = f", got {text!r:.60}; {columns_in(values)}"
        raise BadRow(where, f"'{name}' must be a text", detail, hint)
    return check_encodable(where, name, text).strip()


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
