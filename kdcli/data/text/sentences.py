"""Texts for embedding models: sentences of documents, or pairs and triples of columns.

Columns `query` (or `anchor`), `positive`, and `negative`, `negative_1` ... make pairs and triples.
Any other source holds documents, which are split into sentences after `.`, `!`, `?` and their CJK
counterparts, and at the ends of lines. Duplicate texts are removed.
"""

import itertools
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import regex  # type: ignore[import-untyped]

from kdcli.data.accounts import ACCOUNTS, CUT, REPEATED, RowAccount
from kdcli.data.labelled.kept import kept_rows
from kdcli.data.labelled.label_values import list_in
from kdcli.data.labelled.partition import DividedRows, Partition, Pools, text_hashes
from kdcli.data.readers import text_column
from kdcli.data.rows import (
    BadRow,
    Row,
    RowValues,
    check_encodable,
    columns_in,
    hash_of,
    names_in,
    take_first,
    unused_columns,
)
from kdcli.data.sources import Source, describe_unread, open_source
from kdcli.data.text.shards import is_tokens
from kdcli.disk import disk_errors
from kdcli.errors import UsageError
from kdcli.messages import log_fact
from kdcli.types import Array, RowHashes

HASHES_IN_MEMORY = 1 << 19
BUCKET_BITS = 10  # Hashes on disk are sorted into this many bits of buckets, which are read apart.
SPARE_ROWS = 1000  # Candidates above the number of chosen texts, before the largest are dropped.


class Unit(NamedTuple):
    """A text as it is read, its place, and its positive and negatives."""

    text: str
    where: str = ""
    role: str = ""
    positive: str | None = None
    negatives: tuple[str, ...] = ()


@dataclass(slots=True)
class Candidate:
    """A text that may be chosen.

    Attributes:
        text: The text.
        hash: Its hash.
        role: The role in which it was read first; see `Texts.roles`.
        where: The place where it was read first.
        position: Its position among the texts that were read; -1 for a positive or a negative.
        positive: A text that should be near; None if there is none.
        negatives: Texts that should be far.
    """

    text: str
    hash: int
    role: str
    where: str
    position: int = -1
    positive: str | None = None
    negatives: tuple[str, ...] = ()


class TextChoice:
    """Chooses texts while they are read.

    Attributes:
        read: The number of texts that were read, without positives and negatives.
        distinct: The number of distinct texts, after `close`.
        cut: The number of distinct texts that were read and not chosen, after `close`.
        first_cut: The place of the first of them.
    """

    def __init__(self, rows: int | None, account: RowAccount, *, paired: bool) -> None:
        """Start a choice.

        Args:
            rows: The maximum number of chosen texts; None for no maximum.
            account: Counts repeated texts. The place of the first one is not known if more than
                `HASHES_IN_MEMORY` texts that are not chosen come before it.
            paired: Whether the texts have positives and negatives.
        """
        self.read = self.distinct = self.cut = 0
        self.first_cut = ""
        self._rows = rows
        self._account = account
        self._paired = paired
        self._candidates: dict[str, Candidate] = {}
        self._limit = 1 << 64  # Texts with this hash or a larger one are not chosen.
        self._cut_read = DistinctHashes()
        self._cut_texts = DistinctHashes() if paired else self._cut_read
        self._first_cut_position: int | None = None
        self._has_repeated = False

    def add(self, unit: Unit) -> None:
        """Take the next text, its positive and its negatives."""
        text, where, role, positive, negatives = unit
        if self._rows is not None and len(self._candidates) > self._rows * 9 // 8 + SPARE_ROWS:
            self._drop_largest()
        candidate = self._candidates.get(text) or self._new_candidate(text, role, where, self.read)
        if candidate is not None:
            if candidate.position < 0:
                candidate.position, candidate.where = self.read, where
            elif candidate.position != self.read:
                self._note_repeated(where)
            if positive is not None:
                candidate.positive, candidate.negatives = positive, negatives
        self.read += 1
        if positive is None:
            return
        for other in (positive, *negatives):
            if other not in self._candidates:
                linked = self._new_candidate(other, "document", where, -1)
                if linked is not None and other == positive:
                    linked.positive = text

    def close(self) -> list[Candidate]:
        """Return the chosen texts in the order of their hashes, and complete the account."""
        chosen = self._drop_largest()
        self._candidates = {}
        self.cut = self._cut_read.count()
        cut_texts = self._cut_texts.count() if self._paired else self.cut
        self.distinct = len(chosen) + cut_texts
        distinct_read = self.cut + sum(one.position >= 0 for one in chosen)
        repeated = self.read - distinct_read - self._has_repeated
        if repeated:
            self._account.leave_out(REPEATED, "", repeated)
        return chosen

    def _new_candidate(self, text: str, role: str, where: str, position: int) -> Candidate | None:
        """Add a text to the candidates; None if its hash is too large."""
        value = hash_of(text)
        if value >= self._limit:
            self._cut_one(value, where, position)
            return None
        candidate = self._candidates[text] = Candidate(text, value, role, where, position)
        return candidate

    def _drop_largest(self) -> list[Candidate]:
        """Keep only as many candidates as are chosen, and return them in the order of hashes."""
        by_hash = sorted(self._candidates.values(), key=attrgetter("hash"))
        if self._rows is None or len(by_hash) <= self._rows:
            return by_hash
        for one in by_hash[self._rows :]:
            del self._candidates[one.text]
            self._cut_one(one.hash, one.where, one.position)
        del by_hash[self._rows :]
        self._limit = by_hash[-1].hash
        return by_hash

    def _cut_one(self, value: int, where: str, position: int) -> None:
        """Count a text that is not chosen."""
        if self._paired:
            self._cut_texts.add(value)
        if position < 0:
            return
        if not self._cut_read.add(value):
            self._note_repeated(where)
        if self._first_cut_position is None or position < self._first_cut_position:
            self._first_cut_position, self.first_cut = position, where

    def _note_repeated(self, where: str) -> None:
        """Count the first repeated text with its place."""
        if not self._has_repeated and not self._cut_read.spilled:
            self._has_repeated = True
            self._account.leave_out(REPEATED, where)


class DistinctHashes:
    """Counts distinct 64-bit hashes: the last ones in memory, the others in sorted runs on disk."""

    def __init__(self) -> None:
        self._recent: set[int] = set()
        self._file: IO[bytes] | None = None
        self._runs: list[Array] = []  # The index in the file at which each bucket of a run begins.
        self._written = 0

    @property
    def spilled(self) -> bool:
        """Whether hashes were written to disk, so that `add` does not know all."""
        return self._file is not None

    def add(self, value: int) -> bool:
        """Add a hash. Returns False if it is among those in memory."""
        if value in self._recent:
            return False
        self._recent.add(value)
        if len(self._recent) >= HASHES_IN_MEMORY:
            self._spill()
        return True

    def count(self) -> int:
        """Return the number of distinct hashes. Nothing can be added afterwards."""
        if self._file is None:
            return len(self._recent)
        self._spill()
        buckets = 1 << BUCKET_BITS
        step = max(1, buckets * HASHES_IN_MEMORY // self._written)
        total = 0
        with self._file as file, disk_errors(Path(tempfile.gettempdir())):
            for first in range(0, buckets, step):
                parts = []
                for begins in self._runs:
                    begin, end = begins[first], begins[min(first + step, buckets)]
                    file.seek(int(begin) * 8)
                    parts.append(np.frombuffer(file.read(int(end - begin) * 8), np.uint64))
                total += len(np.unique(np.concatenate(parts)))
        return total

    def _spill(self) -> None:
        values = np.fromiter(self._recent, np.uint64, len(self._recent))
        values.sort()
        self._recent = set()
        edges = np.arange(1, 1 << BUCKET_BITS, dtype=np.uint64) << np.uint64(64 - BUCKET_BITS)
        inner = np.searchsorted(values, edges)
        self._runs.append(self._written + np.concatenate([[0], inner, [len(values)]]))
        self._written += len(values)
        with disk_errors(Path(tempfile.gettempdir())):
            self._file = self._file or tempfile.TemporaryFile()  # noqa: SIM115
            self._file.write(values.tobytes())


# Closing quotes and brackets belong to the sentence. No space follows CJK marks.
SPACE = r"[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"
ENDS = re.compile(rf"""[.!?]["'”’)\]]*(?={SPACE})|[。！？][”’」』）]?|[\r\n]+""")
MIN_WORDS = 2  # Minimum number of words per sentence. CJK characters count as words.
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|\w+")
LETTER = regex.compile(r"\p{L}")  # Numbers alone are no sentence.
QUERIES = ("query", "question", "anchor")
POSITIVE_COLUMN = "positive"
PAIR_HINT = "pairs have the columns query, positive and optionally negative"
NEGATIVE_COLUMN = re.compile(r"negatives?(_\d+)?")
SENTENCES, PAIRS = "sentences", "pairs"
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


def read_texts(
    source: str,
    *,
    column: str | None,
    unit: str,
    rows: int | None,
    share: float = 1.0,
    paired: bool = False,
    split: str = "train",
) -> Texts:
    """Read the distinct texts of a split of a source.

    Args:
        source: A value of `--data`.
        column: The column of the text; None chooses it.
        unit: `sentence` splits documents into sentences, `document` keeps them whole.
        rows: The maximum number of texts. The texts with the smallest hashes are chosen.
        share: The share of the training rows that is read.
        paired: Whether the caller needs pairs.
        split: The split that is read.

    Raises:
        UsageError: The source cannot be read or has no such split, a pair lacks its query or
            positive, there is no pair although the caller needs pairs, or there are fewer than two
            texts.
    """
    if is_tokens(source):
        raise UsageError(
            f"{source} holds tokens of kdcli tokenize, and this training needs the text itself",
            "give the text, or a method that learns from tokens (--method minilm)",
        )
    read = _read_texts(source, column, unit, rows, share, split)
    for message in read.messages:
        log_fact(message)
    for account, kept in read.accounts:
        ACCOUNTS.close(account, kept)
    texts = read.texts
    if paired and not texts.paired:
        raise UsageError(
            f"no text of {source} has a positive among the {len(texts):,} chosen texts, so there "
            "is nothing to contrast",
            "give rows of query and positive, or leave loss.contrastive_weight at 0",
        )
    return texts


class _ReadTexts(NamedTuple):
    """The texts of a source, messages about them, and their accounts with what is kept of each."""

    texts: Texts
    messages: list[str]
    accounts: list[tuple[RowAccount, int]]


@kept_rows
def _read_texts(
    source: str, column: str | None, unit: str, rows: int | None, share: float, split: str
) -> _ReadTexts:
    """Read texts as `read_texts` does. The accounts are not closed, as each step needs them."""
    opened = open_source(source, share)
    of_rows = RowAccount.of_split(source, split)
    name, units, unused = _read_units(opened, split, column, unit, of_rows)
    of_texts = RowAccount.of_split(source, split, name) if name == SENTENCES else of_rows
    choice = TextChoice(rows, of_texts, paired=name == PAIRS)
    for one in units:
        choice.add(one)
    taken = choice.close()
    if choice.distinct < 2:
        raise _too_few_texts(opened, split, column, choice.distinct)
    message = f"{choice.read:,} {name}, {choice.distinct:,} distinct texts"
    messages = [message + (f"; using {len(taken):,}" if choice.cut else "") + unused]
    if unread := describe_unread(opened):
        messages.insert(0, unread)
    if choice.cut:
        of_texts.leave_out(CUT, choice.first_cut, choice.cut)
    accounts = [(of_texts, sum(one.position >= 0 for one in taken))]
    if of_texts is not of_rows:
        of_texts.read = choice.read
        accounts.insert(0, (of_rows, of_rows.used))
    return _ReadTexts(_link(taken, choice.read), messages, accounts)


def held_out_count(texts: Sequence[str], wanted: int) -> int:
    """Return how many of the first texts are held out: `wanted`, but at most a tenth of all."""
    return max(1, min(wanted, int(MAX_HELD_OUT * len(texts))))


def sentences(document: str) -> Iterator[str]:
    """Yield the sentences of a document that have at least `MIN_WORDS` words and a letter."""
    begin = 0
    for end in (*(match.end() for match in ENDS.finditer(document)), len(document)):
        part, begin = document[begin:end], end
        words = itertools.islice(WORD.finditer(part), MIN_WORDS)
        if sum(1 for _ in words) == MIN_WORDS and LETTER.search(part):
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


def _link(taken: Sequence[Candidate], read: int) -> Texts:
    """Number the chosen texts, and their positives and negatives among them."""
    linked = {text for one in taken for text in (one.positive, *one.negatives)}
    numbers = {one.text: number for number, one in enumerate(taken) if one.text in linked}
    width = max(len(one.negatives) for one in taken)
    negatives_NM = np.full((len(taken), width), -1, dtype=np.int64)
    for row_M, one in zip(negatives_NM, taken, strict=True):
        negatives = [numbers.get(negative, -1) for negative in one.negatives]
        row_M[: len(negatives)] = negatives
    positive_N = (numbers.get(one.positive or "", -1) for one in taken)
    return Texts(
        texts=[one.text for one in taken],
        roles=[one.role for one in taken],
        positive=np.fromiter(positive_N, np.int64, len(taken)),
        negatives=negatives_NM,
        rows=np.fromiter((one.position for one in taken), np.int64, len(taken)),
        read=read,
    )


def _read_units(
    source: Source, split: str, column: str | None, unit: str, account: RowAccount
) -> tuple[str, Iterator[Unit], str]:
    """Read the texts of a source.

    `account` counts the rows.

    Returns:
        The name of the texts for a message, the texts, and the columns that are not used.
    """
    tables = list(source.tables(split))
    first, _ = take_first(row for table in tables for row in table.rows)
    if not first:
        part = "" if split == "train" else f"the {split} split of "
        within = f" in {source.share:g} of its rows" if source.share < 1 else ""
        raise UsageError(f"{part}{source.name} holds no text{within}")
    names = list(usual_names(dict.fromkeys(names_in(first))))
    queries = [name for name in QUERIES if name in names]
    # A question may also stand next to the context that answers it.
    is_paired = POSITIVE_COLUMN in names or not {"question"}.issuperset(queries)
    if column is None and is_paired:
        rows = (row for table in source.tables(split, account.on_bad) for row in table.rows)
        query, *_ = *queries, "query"
        used = {query, POSITIVE_COLUMN, *filter(NEGATIVE_COLUMN.fullmatch, names)}
        return PAIRS, _read_pairs(rows, query, account), unused_columns(names, used)
    unused = unused_columns(names_in(first), [column or text_column(first)])
    documents = source.placed_documents(split, column, account)
    if unit == "document":
        units = (Unit(document.strip(), where) for where, document in documents)
        return "documents", units, unused
    return SENTENCES, _read_sentences(documents, account), unused


def usual_names(values: RowValues) -> RowValues:
    """Write the names of columns as pairs and lists have them, such as `negative_1`."""
    usual = {name: re.sub(r"[\s-]+", "_", name.strip().lower()) for name in values}
    # Two columns keep their names if they would have the same one.
    counts = Counter(usual.values())
    return {usual[name] if counts[usual[name]] == 1 else name: v for name, v in values.items()}


def _read_sentences(documents: Iterator[tuple[str, str]], account: RowAccount) -> Iterator[Unit]:
    for where, document in documents:
        is_used = False
        for sentence in sentences(document):
            is_used = True
            yield Unit(sentence, where)
        if not is_used:
            account.leave_out(f"without a sentence of {MIN_WORDS} words", where)


def _read_pairs(rows: Iterator[Row], query: str, account: RowAccount) -> Iterator[Unit]:
    for where, row in rows:
        values = usual_names(row)
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
        for text in list_in(value)
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
