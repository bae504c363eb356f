"""Queries with their candidate passages, for rerankers.

A row is a pair (`query`, `passage`, perhaps `label` and `score`; rows of one query make its list),
or a list: `query` with `passages` (and `labels`, `scores`), or with `positive` and `negative`,
`negative_1` ... A label is a relevance, from 0; a score is a teacher's.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kdcli.data.documents import check_text
from kdcli.data.labelled.rows import held_back
from kdcli.data.rows import BadRow, Row
from kdcli.data.sources import DemoSource, Log, open_source
from kdcli.data.text.sentences import NEGATIVE, POSITIVE
from kdcli.errors import UsageError
from kdcli.types import Example, Task

Array = np.ndarray[Any, Any]
RERANK = Task("rerank", "score", ("query", "passage"), ("ndcg@10", "mrr@10"), max_length=256)
QUERIES, PASSAGES = ("query", "question", "anchor"), ("passage", "sentence", "document")
FORM = "rows hold query and passage, or query and passages, or query, positive and negative"


@dataclass(frozen=True)
class Lists:
    """Queries, each with its candidates, one list after another.

    Attributes:
        queries: each once.
        ends: where the list of each query ends. [Q] int64
        passages: of all lists. R of them, each once in its list
        labels: relevance, NaN where there is none. [R] float64
        scores: of a teacher, NaN where there is none. [R] float64
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
        """Candidates of each query, [Q]."""
        return np.diff(self.ends, prepend=0)

    @property
    def examples(self) -> list[Example]:
        """Query and passage of each candidate."""
        owners = np.repeat(np.arange(len(self)), self.sizes)
        pairs = zip(owners.tolist(), self.passages, strict=True)
        return [Example("", str(n), (self.queries[q], p), None) for n, (q, p) in enumerate(pairs)]

    def rows_of(self, at: Array) -> Array:
        """Where the candidates of these queries stand, list after list."""
        sizes = self.sizes[at]
        within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return np.asarray(np.repeat(self.ends[at] - sizes, sizes) + within)

    def take(self, at: Array) -> "Lists":
        """Some of the queries with their lists."""
        rows = self.rows_of(at)
        passages = [self.passages[n] for n in rows]
        ends = np.cumsum(self.sizes[at])
        return Lists(
            [self.queries[n] for n in at], ends, passages, self.labels[rows], self.scores[rows]
        )

    @property
    def judgeable(self) -> Array:
        """Queries with a relevant candidate and one that is not, all labelled. [Q] bool"""
        begins = np.concatenate([[0], self.ends[:-1]]).astype(np.int64)
        parts = [self.labels[b:e] for b, e in zip(begins, self.ends, strict=True)]
        return np.array(
            [bool(not np.isnan(p).any() and (p > 0).any() and (p <= 0).any()) for p in parts],
            dtype=bool,
        )


def read_lists(
    source: str, *, seed: int, log: Log, labelled: bool = True
) -> tuple[Lists, Lists, str]:
    """Lists to train on, lists to judge by, and the name of the judged split: `validation`, else
    whole queries held back from `train` by their hashes. A judged query is in no training list.
    Raises UsageError: rows of another form; no query has both relevant and other candidates to
    judge by."""
    opened = open_source(source)
    if isinstance(opened, DemoSource):
        raise UsageError(
            "the demo has no lists of candidates", f"give --data FILE_OR_DIRECTORY: {FORM}"
        )
    train, split = _read(opened.tables("train"), log), "validation"
    if opened.has("validation"):
        judged = _read(opened.tables("validation"), log)
        known = set(judged.queries)
        kept = np.array(
            [n for n, query in enumerate(train.queries) if query not in known], dtype=np.int64
        )
        if len(kept) < len(train):
            log(
                f"{len(train) - len(kept):,} queries are in the validation split too: not trained "
                "on"
            )
        train = train.take(kept)
    else:
        split = "held back from train"
        held = held_back(RERANK, [Example("", "", (query,), None) for query in train.queries], seed)
        log(
            f"there is no validation split: {held.sum():,} of {len(train):,} queries are held back "
            "to judge by"
        )
        judged, train = train.take(np.flatnonzero(held)), train.take(np.flatnonzero(~held))
    if not len(train):
        raise UsageError(f"{source} holds no query to train on")
    if not labelled:
        return train, judged, split
    able = judged.judgeable
    if not able.any():
        raise UsageError(
            f"no query of the {split} split of {Path(source).name} can be judged",
            "a judged list needs a label for each passage, one above 0 and one of 0 (or positive "
            "and negative)",
        )
    if not able.all():
        log(
            f"{(~able).sum():,} of {len(judged):,} judged queries are left out: none or all of "
            "their passages matter"
        )
    judged = judged.take(np.flatnonzero(able))
    log(f"{len(train):,} queries of {train.sizes.mean():.1f} passages; judged by {len(judged):,}")
    return train, judged, split


Candidate = tuple[str, float, float]


def _read(tables: Iterator[tuple[str, Iterator[Row]]], log: Log) -> Lists:
    differ = 0
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for name, rows in tables:
        where = ""
        for where, row in rows:
            query, candidates = _candidates(where, row)
            of_query = found.setdefault(query, {})
            for passage, label, score in candidates:
                before = of_query.setdefault(passage, (label, score))
                if not _same(before[1], score):
                    message = (
                        f"{where}: the passage {passage!r:.60} of {query!r:.60} has another score "
                        "before"
                    )
                    raise UsageError(message, "give each pair once")
                if not _same(before[0], label):
                    # A passage mined as a negative of a query that it answers elsewhere.
                    differ += 1
                    of_query[passage] = (np.fmax(before[0], label), score)
        if not where:
            raise UsageError(f"{name} holds no rows", FORM)
    if differ:
        log(
            "pairs of query and passage with several labels, of which the highest counts: "
            f"{differ:,}"
        )
    passages = [passage for of_query in found.values() for passage in of_query]
    values = np.array([pair for of_query in found.values() for pair in of_query.values()]).reshape(
        -1, 2
    )
    ends = np.cumsum([len(of_query) for of_query in found.values()])
    return Lists(list(found), ends, passages, values[:, 0], values[:, 1])


def _same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


def _candidates(where: str, row: Mapping[str, Any]) -> tuple[str, list[Candidate]]:
    query = _text(where, row, _column(where, row, QUERIES))
    if POSITIVE in row:
        positives = _texts(where, row, POSITIVE)
        negatives = [
            t
            for name in row
            if NEGATIVE.fullmatch(name) and row[name] is not None
            for t in _texts(where, row, name)
        ]
        if not negatives:
            raise BadRow(
                where, "a query without a negative, which nothing can be ranked against", hint=FORM
            )
        passages, labels = [*positives, *negatives], [1.0] * len(positives) + [0.0] * len(negatives)
        scores = _numbers(where, row, "scores", len(passages))
        return query, list(zip(passages, labels, scores, strict=True))
    if "passages" in row:
        passages = _texts(where, row, "passages")
        numbers = [_numbers(where, row, name, len(passages)) for name in ("labels", "scores")]
    else:
        passages = [_text(where, row, _column(where, row, PASSAGES))]
        numbers = [
            _numbers(where, {name: [row[name]]} if row.get(name) is not None else {}, name, 1)
            for name in ("label", "score")
        ]
    if any(label < 0 for label in numbers[0]):
        raise BadRow(where, "a label is a relevance, 0 or more", f", got {min(numbers[0])}")
    return query, list(zip(passages, *numbers, strict=True))


def _column(where: str, row: Mapping[str, Any], names: tuple[str, ...]) -> str:
    column = next((name for name in names if name in row), None)
    if column is None:
        raise BadRow(
            where, f"no column {' or '.join(names)}", f"; there are {', '.join(row)}", FORM
        )
    return column


def _text(where: str, row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str) or not value.strip():
        raise BadRow(where, f"'{name}' must be a text", f", got {value!r:.60}", FORM)
    return check_text(where, name, value).strip()


def _texts(where: str, row: Mapping[str, Any], name: str) -> list[str]:
    given = row[name] if isinstance(row[name], list) else [row[name]]
    if not given:
        raise BadRow(where, f"'{name}' is empty", hint=FORM)
    return [_text(where, {name: each}, name) for each in given]


def _numbers(where: str, row: Mapping[str, Any], name: str, count: int) -> list[float]:
    """The numbers of a column, NaN where it is not there."""
    given = row.get(name)
    if given is None:
        return [math.nan] * count
    try:
        numbers = [math.nan if isinstance(x, bool) else float(x) for x in given]
    except (TypeError, ValueError):
        numbers = []
    if len(numbers) != count or not all(map(math.isfinite, numbers)):
        raise BadRow(
            where,
            f"'{name}' must hold a finite number for each",
            f" of {count} passages, got {given!r:.80}",
        )
    return numbers
