"""Texts for embedding models: sentences of documents, or pairs and triples of columns.

Columns `query` (or `anchor`), `positive`, and `negative`, `negative_1` ... make pairs and triples.
Any other source holds documents, which are split into sentences after `.`, `!`, `?` and their CJK
counterparts, and at the ends of lines. Duplicate texts are removed.
"""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import regex  # type: ignore[import-untyped]

from kdcli.data.accounts import ACCOUNTS, CUT, RowAccount
from kdcli.data.labelled.kept import kept_rows
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
from kdcli.data.sources import Log, Source, describe_unread, open_source
from kdcli.data.text.choice import Candidate, TextChoice, Unit
from kdcli.errors import UsageError
from kdcli.types import Array, RowHashes

# Closing quotes and brackets belong to the sentence. No space follows CJK marks.
SPACE = r"[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"
ENDS = re.compile(rf"""[.!?]["'”’)\]]*(?={SPACE})|[。！？][”’」』）]?|[\r\n]+""")
MIN_WORDS = 2  # Minimum number of words per sentence. CJK characters count as words.
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|\w+")
LETTER = regex.compile(r"\p{L}")  # Numbers alone are no sentence.
QUERY_COLUMNS = ("query", "anchor")
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
    log: Log,
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
        log: Called with a message about the number of texts.
        share: The share of the training rows that is read.
        paired: Whether the caller needs pairs.
        split: The split that is read.

    Raises:
        UsageError: The source cannot be read or has no such split, a pair lacks its query or
            positive, there is no pair although the caller needs pairs, or there are fewer than two
            texts.
    """
    read = _read_texts(source, column, unit, rows, share, split)
    for message in read.messages:
        log(message)
    for account, kept in read.accounts:
        ACCOUNTS.close(account, kept, log)
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
    name, units = _read_units(opened, split, column, unit, of_rows)
    of_texts = RowAccount.of_split(source, split, name) if name == SENTENCES else of_rows
    choice = TextChoice(rows, of_texts, paired=name == PAIRS)
    for one in units:
        choice.add(one)
    taken = choice.close()
    if choice.distinct < 2:
        raise _too_few_texts(opened, split, column, choice.distinct)
    message = f"{choice.read:,} {name}, {choice.distinct:,} distinct texts"
    messages = [message + (f"; using {len(taken):,}" if rows else "")]
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
) -> tuple[str, Iterator[Unit]]:
    """Read the texts of a source, and return them with their name for a message.

    `account` counts the rows.
    """
    tables = list(source.tables(split))
    first, _ = take_first(row for table in tables for row in table.rows)
    if not first:
        part = "" if split == "train" else f"the {split} split of "
        within = f" in {source.share:g} of its rows" if source.share < 1 else ""
        raise UsageError(f"{part}{source.name} holds no text{within}")
    names = names_in(first)
    queries = [name for name in QUERY_COLUMNS if name in names]
    if column is None and (queries or POSITIVE_COLUMN in names):
        rows = (row for table in source.tables(split, account.on_bad) for row in table.rows)
        return PAIRS, _read_pairs(rows, queries[0] if queries else "query", account)
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
