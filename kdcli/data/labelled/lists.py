"""Queries with their candidate passages, for rerankers.

A row has one of three forms:

* `query` and `passage`, with an optional `label` and `score`. All rows of a query form its list.
* `query` and `passages`, with optional `labels` and `scores`.
* `query`, `positive`, and `negative`, `negative_1` ..., with optional `scores`.

A label is a relevance of 0 or more. A score comes from a teacher.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kdcli.data.accounts import (
    ACCOUNTS,
    OTHER_PART,
    REPEATED,
    RowAccount,
)
from kdcli.data.labelled.label_values import BRACKETS, list_in, number_of, parse_list
from kdcli.data.labelled.partition import (
    HELD_OUT_SPLIT,
    DividedRows,
    Partition,
    Pools,
    hashes_of,
    held_back,
    text_hashes,
)
from kdcli.data.rows import BadRow, ClassName, Row, RowValues, columns_in, unused_columns
from kdcli.data.sources import DemoSource, open_source
from kdcli.data.text.sentences import (
    NEGATIVE_COLUMN,
    POSITIVE_COLUMN,
    QUERIES,
    negatives_in,
    text_in,
    usual_names,
)
from kdcli.errors import UsageError
from kdcli.messages import log_fact
from kdcli.types import Array, Example, RowHashes, Task

RERANK_TASK = Task("rerank", "score", ("query", "passage"), ("ndcg@10", "mrr@10"), max_length=256)
PASSAGES = ("passage", "sentence", "document")
LIST_COLUMNS = (
    *(*QUERIES, *PASSAGES, "passages", POSITIVE_COLUMN),
    *("label", "labels", "score", "scores"),
)
LABELS = ("label", "labels")
BOOLEANS = {"true": 1, "false": 0}
"""The relevances that a label may say in words."""
UNSCORED = "without a label for each passage, or with labels of one kind"
FORM_HINT = "a row holds query and passage, or query and passages, or query, positive and negative"


@dataclass(frozen=True)
class Lists:
    """Queries, each with a list of candidates.

    Attributes:
        queries: The queries, without duplicates.
        ends: Where the list of each query ends, [Q] int64.
        passages: The R candidates of all lists. A list has no duplicates.
        labels: The relevance of each candidate, or NaN, [R] float64.
        scores: A teacher's score of each candidate, or NaN, [R] float64.
    """

    queries: list[str]
    ends: Array
    passages: list[str]
    labels: Array
    scores: Array

    def __len__(self) -> int:
        return len(self.queries)

    @property
    def sizes(self) -> Array:
        """The number of candidates of each query, [Q]."""
        return np.diff(self.ends, prepend=0)

    @property
    def examples(self) -> list[Example]:
        """An example for each candidate: its query and passage."""
        owners = np.repeat(np.arange(len(self)), self.sizes)
        pairs = zip(owners.tolist(), self.passages, strict=True)
        return [Example("", str(n), (self.queries[q], p), None) for n, (q, p) in enumerate(pairs)]

    def unlabelled(self) -> "Lists":
        """Return the same lists without labels."""
        return replace(self, labels=np.full(len(self.passages), np.nan))

    @property
    def query_hashes(self) -> RowHashes:
        """The hash of each query, which decides about the part of its list, [Q]."""
        return text_hashes(self.queries)

    def known(self, trained: RowHashes) -> Array:
        """Whether a model was trained on any candidate of each query, [Q] bool."""
        if not len(self):
            return np.empty(0, dtype=bool)
        known_R = np.isin(hashes_of(self.examples), trained)
        return np.asarray(np.logical_or.reduceat(known_R, self.ends - self.sizes))

    def rows_of(self, at: Array) -> Array:
        """Return the indices of the candidates of some queries, list after list."""
        sizes = self.sizes[at]
        within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return np.asarray(np.repeat(self.ends[at] - sizes, sizes) + within)

    def take(self, at: Array) -> "Lists":
        """Select queries, with their lists, by index."""
        rows = self.rows_of(at)
        passages = [self.passages[n] for n in rows]
        ends = np.cumsum(self.sizes[at])
        return Lists(
            [self.queries[n] for n in at], ends, passages, self.labels[rows], self.scores[rows]
        )

    @property
    def can_score(self) -> Array:
        """Whether a ranking of each list can be scored, [Q] bool.

        All candidates need a label, at least one above 0 and one of 0.
        """
        begins = self.ends - self.sizes
        parts = [self.labels[b:e] for b, e in zip(begins, self.ends, strict=True)]
        return np.array(
            [bool(not np.isnan(p).any() and (p > 0).any() and (p <= 0).any()) for p in parts],
            dtype=bool,
        )


@dataclass(frozen=True)
class ListSplits(DividedRows):
    """The lists of all splits. Missing splits are None."""

    train: Lists
    validation: Lists | None
    test: Lists | None

    @property
    def labelled(self) -> bool:
        """Whether any candidate has a label."""
        return any(not np.isnan(part.labels).all() for part in self.parts)

    @property
    def count(self) -> int:
        """The number of queries of all splits."""
        return sum(map(len, self.parts))

    @property
    def parts(self) -> list[Lists]:
        """The splits that there are."""
        parts = (self.train, self.validation, self.test)
        return [part for part in parts if part is not None]

    def named(self, split: str) -> Lists | None:
        """Return the lists of a split to evaluate on; None without a validation split.

        Raises:
            UsageError: There is no such split.
        """
        if split == "validation":
            return self.validation
        if split != "test":
            raise UsageError(f"data.split={split} needs data.partition")
        if self.test is None:
            raise UsageError("data.split=test: the data have no test split")
        return self.test

    def pools(self, trained: RowHashes) -> Pools:
        """Return the hashes of the queries of each split. `trained` has the models' training
        rows."""
        empty = self.train.take(np.empty(0, np.int64))
        parts = [self.train, self.validation or empty, self.test or empty]
        known = [part.query_hashes[part.known(trained)] for part in parts]
        train, validation, test = (part.query_hashes for part in parts)
        return Pools(train, validation, test, np.concatenate(known))

    def training_texts(self, partition: Partition) -> Iterable[str]:
        """Return the different queries and passages of the training lists of a partition."""
        train = self.train.take(np.flatnonzero(partition.is_training(self.train.query_hashes)))
        return dict.fromkeys([*train.queries, *train.passages])


class ListData(NamedTuple):
    """The lists of a training run.

    Attributes:
        train: The lists to train on.
        evaluated: The lists to evaluate on.
        split: The name of the evaluated split.
        has_labels: Whether the evaluation uses the labels.
        notes: How the split was made, if the data has none.
    """

    train: Lists
    evaluated: Lists
    split: str
    has_labels: bool
    notes: list[str]


def read_list_splits(source: str) -> ListSplits:
    """Read the lists of candidates of every split.

    Raises:
        UsageError: A row has none of the three forms.
    """
    opened = open_source(source)
    if isinstance(opened, DemoSource):
        raise UsageError(
            "the demo has no lists of candidates", f"give --data FILE_OR_DIRECTORY: {FORM_HINT}"
        )
    account = RowAccount(source)

    def read(split: str) -> Lists | None:
        has_split = opened.has(split)
        return _read(opened.tables(split, account.on_bad), account) if has_split else None

    train = read("train") or _read(iter(()), account)
    splits = ListSplits(train, read("validation"), read("test"))
    ACCOUNTS.close(account, account.used)
    return splits


def read_lists(
    source: str,
    *,
    seed: int,
    labelled: bool | None = None,
    partition: str | None = None,
    split: str = "validation",
    trains: bool = True,
) -> ListData:
    """Read lists of candidates.

    The evaluation lists come from the `validation` or the `test` split. Without a validation split,
    a share of the queries is held out from `train`, chosen by hash; or all of them are evaluated if
    nothing is trained. No query is in both parts.

    Args:
        source: The value of `--data`.
        seed: The seed that chooses the queries to hold out.
        labelled: Whether evaluation needs labels; None if it does when there are any. Lists that
            cannot be scored are then skipped.
        partition: A file that names the queries to evaluate on.
        split: The split, or the part of the partition, that is evaluated.
        trains: Whether the run trains a model.

    Raises:
        UsageError: A row has none of the three forms, there is no test split, no query is left to
            train on, or no list can be scored.
    """
    splits = read_list_splits(source)
    notes: list[str] = []
    if not trains and partition is None and splits.named(split) is None:
        train, evaluated, split = splits.train.take(np.array([], np.int64)), splits.train, "train"
    else:
        train, evaluated, split = _divided(splits, seed, partition, split, notes)
    if trains and not len(train):
        raise UsageError(f"{source} holds no query to train on")
    if not len(evaluated):
        raise UsageError(
            f"{source} has {len(train):,} queries, and none of them is held out for evaluation",
            "give more queries, a validation split, or another data.split_seed",
        )
    account = RowAccount(source, "queries", splits.count)
    if others := splits.count - len(train) - len(evaluated):
        account.leave_out(OTHER_PART, "", others)
    if labelled is None:
        labelled = splits.labelled
    if not labelled:
        ACCOUNTS.close(account, len(train) + len(evaluated))
        train, evaluated = train.unlabelled(), evaluated.unlabelled()
        return ListData(train, evaluated, split, has_labels=False, notes=notes)
    evaluated = _scorable(evaluated, f"{split} split of {Path(source).name}", account)
    ACCOUNTS.close(account, len(train) + len(evaluated))
    training = ""
    if len(train):
        passages = f"{train.sizes.mean():.1f} passages on average"
        training = f"{len(train):,} training queries with {passages}; "
    log_fact(f"{training}{len(evaluated):,} evaluation queries")
    return ListData(train, evaluated, split, has_labels=True, notes=notes)


def _scorable(evaluated: Lists, name: str, account: RowAccount) -> Lists:
    """Return the lists whose rankings can be scored; `account` counts the others.

    Raises:
        UsageError: There is no such list.
    """
    can_score = evaluated.can_score
    if not can_score.any():
        raise UsageError(
            f"no query of the {name} can be scored",
            "to score a list, each passage needs a label, at least one above 0 and one of 0 (or "
            "give positive and negative)",
        )
    if not can_score.all():
        log_fact(
            f"skipped {(~can_score).sum():,} of {len(evaluated):,} evaluation queries, because "
            "their passages are not all labelled or not both relevant and irrelevant"
        )
        first = evaluated.queries[int(np.argmin(can_score))]
        account.leave_out(UNSCORED, repr(first), int((~can_score).sum()))
    return evaluated.take(np.flatnonzero(can_score))


def _divided(
    splits: ListSplits,
    seed: int,
    partition: str | None,
    split: str,
    notes: list[str],
) -> tuple[Lists, Lists, str]:
    """Return the lists to train on, the lists to evaluate on, and the name of their split."""
    train = splits.train
    if partition is not None:
        chosen = Partition.read(partition)
        parts = splits.parts
        at = chosen.evaluated_rows([part.query_hashes for part in parts], split, "query")
        evaluated = concatenate_lists(
            [part.take(np.flatnonzero(n)) for part, n in zip(parts, at, strict=True)]
        )
        kept = np.flatnonzero(chosen.is_training(train.query_hashes))
        return train.take(kept), evaluated, split
    if (named := splits.named(split)) is not None:
        known = set(named.queries)
        kept = np.array(
            [n for n, query in enumerate(train.queries) if query not in known], dtype=np.int64
        )
        if len(kept) < len(train):
            count = len(train) - len(kept)
            log_fact(f"skipped {count:,} training queries that are also in the {split} split")
        return train.take(kept), named, split
    held = held_back(
        RERANK_TASK, [Example("", "", (query,), None) for query in train.queries], seed
    )
    notes.append(
        f"there is no validation split: {held.sum():,} of {len(train):,} queries are held out "
        "for evaluation"
    )
    evaluated = train.take(np.flatnonzero(held))
    return train.take(np.flatnonzero(~held)), evaluated, HELD_OUT_SPLIT


def concatenate_lists(parts: Sequence[Lists]) -> Lists:
    """Return the lists of several parts as one."""
    sizes = np.concatenate([part.sizes for part in parts])
    return Lists(
        [query for part in parts for query in part.queries],
        np.cumsum(sizes),
        [passage for part in parts for passage in part.passages],
        np.concatenate([part.labels for part in parts]),
        np.concatenate([part.scores for part in parts]),
    )


ScoredPassage = tuple[str, float, float]
"""A passage, its label and its score."""


def _read(tables: Iterator[tuple[str, Iterator[Row]]], account: RowAccount) -> Lists:
    """Read the lists of all files of a split."""
    conflicts, first_boolean = 0, ""
    names: dict[str, None] = {}
    by_query: dict[str, dict[str, tuple[float, float]]] = {}
    for name, rows in tables:
        where = ""
        for where, given in rows:
            row = usual_names(given)
            query, candidates = _candidates(where, row)
            labels = (str(x).casefold() for name in LABELS for x in _cells(row.get(name)))
            if not first_boolean and not BOOLEANS.keys().isdisjoint(labels):
                first_boolean = where
            names.update(dict.fromkeys(row))
            account.read += 1
            by_passage = by_query.setdefault(query, {})
            if candidates and all(passage in by_passage for passage, _, _ in candidates):
                account.leave_out(REPEATED, where)
            for passage, label, score in candidates:
                first_label, first_score = by_passage.setdefault(passage, (label, score))
                if not _same(first_score, score):
                    message = (
                        f"{where}: the passage {passage!r:.60} of {query!r:.60} has a different "
                        "score in an earlier row"
                    )
                    raise UsageError(message, "give each pair once")
                if not _same(first_label, label):
                    # The passage was mined as a negative of a query that it answers elsewhere.
                    conflicts += 1
                    by_passage[passage] = (np.fmax(first_label, label), score)
        if not where:
            raise UsageError(f"{name} holds no rows", FORM_HINT)
    negatives = filter(NEGATIVE_COLUMN.fullmatch, names)
    if unused := unused_columns(names, {*LIST_COLUMNS, *negatives}):
        log_fact(f"{len(by_query):,} queries{unused}")
    if first_boolean:
        log_fact(f"labels true and false are read as 1 and 0 (first: {first_boolean})")
    if conflicts:
        log_fact(
            f"{conflicts:,} pairs of query and passage have several labels; the highest label is "
            "used"
        )
    passages = [passage for by_passage in by_query.values() for passage in by_passage]
    values = np.array(
        [pair for by_passage in by_query.values() for pair in by_passage.values()]
    ).reshape(-1, 2)
    sizes = [len(by_passage) for by_passage in by_query.values()]
    ends = np.cumsum(np.array(sizes, dtype=np.int64))
    return Lists(list(by_query), ends, passages, values[:, 0], values[:, 1])


def _same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


def _candidates(where: str, row: RowValues) -> tuple[str, list[ScoredPassage]]:
    """Return the query of a row and its candidates."""
    query = _text(where, row, QUERIES)
    if POSITIVE_COLUMN in row:
        positives = _texts(where, row, POSITIVE_COLUMN)
        negatives = negatives_in(where, row, FORM_HINT)
        if not negatives:
            raise BadRow(
                where, "the query has no negative to rank the positive against", hint=FORM_HINT
            )
        passages = [*positives, *negatives]
        labels = [1.0] * len(positives) + [0.0] * len(negatives)
        scores = _numbers(where, row, "scores", len(passages))
        return query, list(zip(passages, labels, scores, strict=True))
    if "passages" in row:
        passages = _texts(where, row, "passages")
        numbers = [_numbers(where, row, name, len(passages)) for name in ("labels", "scores")]
    else:
        passages = [_text(where, row, PASSAGES)]
        numbers = [
            _numbers(where, {name: [row[name]]} if row.get(name) is not None else {}, name, 1)
            for name in ("label", "score")
        ]
    if any(label < 0 for label in numbers[0]):
        raise BadRow(where, "a label is a relevance, 0 or more", f", got {min(numbers[0])}")
    return query, list(zip(passages, *numbers, strict=True))


def _text(where: str, row: RowValues, names: tuple[str, ...]) -> str:
    """Return the text of the first of some columns that a row has."""
    name = next((name for name in names if name in row), None)
    if name is None:
        raise BadRow(where, f"no column {' or '.join(names)}", f"; {columns_in(row)}", FORM_HINT)
    return text_in(where, row, name, row[name], FORM_HINT)


def _texts(where: str, row: RowValues, name: str) -> list[str]:
    values = list_in(row[name])
    if not values:
        raise BadRow(where, f"'{name}' is empty", hint=FORM_HINT)
    return [text_in(where, row, name, value, FORM_HINT) for value in values]


def _numbers(where: str, row: RowValues, name: str, count: int) -> list[float]:
    """Return the numbers in a column, or NaN for each passage if there is no such column."""
    if row.get(name) is None:
        return [math.nan] * count
    values = _cells(row[name])
    try:
        known = [BOOLEANS.get(str(x).casefold(), x) if name in LABELS else x for x in values]
        known = [x.number if isinstance(x, ClassName) else x for x in known]
        known = [number_of(x) if isinstance(x, str) else x for x in known]
        numbers = [math.nan if isinstance(x, bool) else float(x) for x in known]
    except (TypeError, ValueError):
        numbers = []
    if len(numbers) != count or not all(map(math.isfinite, numbers)):
        raise BadRow(
            where,
            f"'{name}' must hold a finite number for each",
            f" of {count} passages, got {values!r:.80}",
            "write a number for each passage; labels may also be true and false",
        )
    return numbers


def _cells(values: object) -> list[Any]:
    """Return the elements of a list, which may be in a cell of CSV. Anything else is the only
    element."""
    cells = parse_list(values, BRACKETS) if isinstance(values, str) else values
    return cells if isinstance(cells, list) else [values]
