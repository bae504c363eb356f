"""The task that a user's own rows hold: found out from the names of the columns, then from their values."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, get_args

from kdcli.data.files import Row
from kdcli.data.labelled.own_labels import Labels, number_of, type_of
from kdcli.errors import UsageError, did_you_mean
from kdcli.types import Kind, Task

HEAD = 100
"""Rows that are looked at, and held, to find out which column is which."""
NAMES_SAID = 10

SPAN_LENGTH = 384
"""Tokens of a window of a context, as for SQuAD: beside the question and the overlap some must be left."""

KINDS: tuple[Kind, ...] = get_args(Kind)
_TEXT_ROLES = ("text", "pair", "label")
_ROLES: Mapping[Kind, tuple[str, ...]] = {
    **dict.fromkeys(("class", "multi", "score"), _TEXT_ROLES),
    "tokens": ("words", "label"),
    "span": ("question", "context", "answers"),
}
_METRICS: Mapping[Kind, tuple[str, ...]] = {
    "class": ("accuracy", "macro_f1"),
    "multi": ("micro_f1", "macro_f1", "exact"),
    "score": ("pearson", "spearman", "mse"),
    "tokens": ("f1", "precision", "recall", "accuracy"),
    "span": ("exact", "f1"),
}
_METRICS_OF_TWO = ("accuracy", "f1", "matthews")
_METRICS_IMPOSSIBLE = (
    *("f1", "exact", "best_f1", "best_f1_threshold", "best_exact", "best_exact_threshold"),
    *("answer_f1", "no_answer_accuracy"),
)

# Names as `_key` writes them. The first tier of which a column is there decides; two of one tier are ambiguous.
_Tiers = tuple[tuple[str, ...], ...]
_TEXT: _Tiers = (
    ("text",),
    ("sentence",),
    (
        *("review", "content", "document", "comment", "tweet", "utterance", "body", "message", "post", "passage"),
        *("article", "description", "question", "query", "utt", "abstract", "reviewbody", "reviewtext"),
    ),
    ("title", "headline", "subject", "summary"),
)
_LABEL: _Tiers = (
    *(("label",), ("labels",), ("class",), ("target",), ("y",), ("goldlabel",)),
    (
        *("category", "sentiment", "intent", "emotion", "topic", "score", "rating", "similarity", "stars"),
        *("similarityscore", "relatednessscore", "isduplicate"),
    ),
)
_WORDS: _Tiers = (("tokens",), ("words",))
_TAGS: _Tiers = (("nertags",), ("tags",), ("postags",), ("labels",), ("label",), ("upos",))
_PAIRS = (
    *(("sentence1", "sentence2"), ("premise", "hypothesis"), ("question1", "question2"), ("question", "sentence")),
    *(("texta", "textb"), ("text", "textpair"), ("text1", "text2"), ("sentencea", "sentenceb"), ("query", "passage")),
    *(("query", "document"), ("question", "passage"), ("claim", "evidence"), ("anchor", "positive")),
    ("question", "answer"),
)
_IDS = ("", "id", "idx", "guid", "index", "uid", "uuid", "unnamed0")


@dataclass(frozen=True)
class _Reading:
    """Which columns are read; `kind` None leaves the choice of class, multi and score to the labels."""

    kind: Kind | None
    texts: tuple[str, ...]
    label: str


def own_task(
    rows: Iterable[Row], columns: Mapping[str, str | list[str]], log: Callable[[str], None], name: str = "own"
) -> Task:
    """Find out, in one pass over the training rows, which task they hold.

    `str` of each label of the rows is a name in the task's `labels`; the labels of `score` and `span` have no names.

    Args:
        rows: all training rows; no text of them is kept.
        columns: what the user says: role (`text`, `pair`, `label`, `words`, `question`, `context`, `answers`) → column,
            of `text` perhaps a list of two; and `kind`, which is no column.
        log: takes the one sentence that says what was decided.
        name: of the task.

    Raises:
        UsageError: unknown role, no such column, columns that can be read in several ways, no rows, or rows that do not
            fit a task (file and line are named).
    """
    kind, given = _given(columns)
    rest = iter(rows)
    head = list(itertools.islice(rest, HEAD))
    if not head:
        raise UsageError("the training data holds no examples")
    reading = _Guess(head, given).reading(kind)
    labels = Labels(reading.label, reading.kind)
    for where, row in itertools.chain(head, rest):
        _check_texts(where, row, reading)
        labels.add(where, row[reading.label], len(row[reading.texts[0]]))
    found, names = labels.decide()
    impossible = found == "span" and labels.empty > 0
    metrics = _METRICS_OF_TWO if found == "class" and len(names) == 2 else _METRICS[found]
    metrics = _METRICS_IMPOSSIBLE if impossible else metrics
    said = [f"{labels.rows} examples of kind {found}", f"{' and '.join(reading.texts)} → {reading.label}"]
    if names:
        said.append(f"{len(names)} classes" + (f" ({', '.join(names)})" if len(names) <= NAMES_SAID else ""))
    if impossible:
        said.append(f"{labels.empty} without an answer")
    unread = [c for c in head[0][1] if c not in (*reading.texts, reading.label)]
    log(f"task {name}: {', '.join(said)}" + (f"; not read: {', '.join(unread)}" if unread else ""))
    length = SPAN_LENGTH if found == "span" else Task.max_length
    return Task(name, found, reading.texts, metrics, names, reading.label, impossible=impossible, max_length=length)


def _given(columns: Mapping[str, str | list[str]]) -> tuple[Kind | None, dict[str, tuple[str, ...]]]:
    """The kind that the user asks for, and role → columns."""
    roles = list(dict.fromkeys(itertools.chain(*_ROLES.values())))
    given: dict[str, tuple[str, ...]] = {}
    for role, value in columns.items():
        if role not in (*roles, "kind"):
            near = did_you_mean(role, [*roles, "kind"])
            raise UsageError(f"unknown role 'data.columns.{role}'{near}", f"known: {', '.join([*roles, 'kind'])}")
        given[role] = (value,) if isinstance(value, str) else tuple(value)
        if len(given[role]) != 1 and not (role == "text" and len(given[role]) == 2 and "pair" not in columns):
            raise UsageError(f"data.columns.{role} takes one column, got {value}", "of a pair give text and pair")
    (asked,) = given.pop("kind", (None,))
    kind = next((k for k in KINDS if k == asked), None)
    if asked is not None and kind is None:
        raise UsageError(
            f"unknown kind 'data.columns.kind={asked}'{did_you_mean(asked, KINDS)}", f"known: {', '.join(KINDS)}"
        )
    if "pair" in given and "text" in given:
        given["text"] += given.pop("pair")
    named = [column for names in given.values() for column in names]
    if twice := [column for column in named if named.count(column) > 1]:
        raise UsageError(f"data.columns gives column '{twice[0]}' two roles")
    return kind, given


class _Guess:
    """Which column is which, from the first rows and what the user says."""

    def __init__(self, head: list[Row], given: Mapping[str, tuple[str, ...]]) -> None:
        self.where, self.first = head[0]
        self.given = given
        named = [column for names in given.values() for column in names]
        for column in named:
            if column not in self.first:
                near = did_you_mean(column, self.first)
                raise UsageError(f"{self.where}: no column '{column}'{near}", f"there are {', '.join(self.first)}")
        self.free = [c for c in self.first if c not in named and not _is_id(c)]
        seen = {c: [row[c] for _, row in head if isinstance(row.get(c), str)] for c in self.free}
        # A CSV spells numbers as strings too.
        self.strings = [c for c in self.free if any(number_of(text) is None for text in seen[c])]
        self.lists = [c for c in self.free if isinstance(self.first[c], list)]

    def reading(self, kind: Kind | None) -> _Reading:
        """Which columns are read; `kind` is what the user asks for, None leaves it open.

        Raises:
            UsageError: roles that no kind reads together, or columns that can be read in several ways or in none.
        """
        kinds = [k for k in KINDS if kind in (None, k) and set(self.given) <= set(_ROLES[k])]
        if not kinds:
            raise UsageError(
                f"data.columns gives {', '.join(self.given)}, which "
                + (f"kind {kind} does not" if kind else "no kind")
                + (" all read" if kind else " reads together"),
                "; ".join(f"{k} reads {', '.join(_ROLES[k])}" for k in KINDS),
            )
        reading = None
        if "span" in kinds:
            reading = self._of_answers(must=kinds == ["span"])
        if "tokens" in kinds and not reading:
            reading = self._of_words(must=kinds == ["tokens"])
        return reading or self._of_texts(kind)

    def _of_answers(self, must: bool) -> _Reading | None:
        found = [self._role(role, ((role,),), self.free) for role in _ROLES["span"]]
        if None in found and not must:
            return None
        question, context, answers = (
            column or self._unclear(role) for column, role in zip(found, _ROLES["span"], strict=True)
        )
        return _Reading("span", (question, context), answers)

    def _of_words(self, must: bool) -> _Reading | None:
        words, tags = self._role("words", _WORDS, self.lists), self._role("label", _TAGS, self.lists)
        others = [c for c in self.lists if c != words]
        tags = tags or (others[0] if words and len(others) == 1 else None)
        if must:
            return _Reading("tokens", (words or self._unclear("words"),), tags or self._unclear("label"))
        if not words or not tags or not isinstance(self.first[tags], list):
            return None
        if "label" not in self.given and self._named("text", _TEXT, self.strings):
            label = self._named("label", _LABEL, [c for c in self.free if c not in self.lists])
            if label:
                self._unclear("kind", f"is it {tags} of {words} (kind tokens), or {label} of the text?")
        return _Reading("tokens", (words,), tags)

    def _of_texts(self, kind: Kind | None) -> _Reading:
        label = self._role("label", _LABEL, self.free)
        free = [c for c in self.free if c != label]
        strings = [c for c in self.strings if c != label]
        by_key = {_key(c): c for c in strings}
        texts = self.given.get("text", ())
        if not texts and "pair" not in self.given:
            texts = next(((by_key[a], by_key[b]) for a, b in _PAIRS if a in by_key and b in by_key), ())
        if not texts:
            only = strings[0] if len(strings) == 1 else None
            text = self._named("text", _TEXT, strings) or self._named("text", _TEXT, free) or only
            texts = (text or self._unclear("text"), *self.given.get("pair", ()))
        rest = [c for c in free if c not in texts]
        return _Reading(kind, texts, label or (rest[0] if len(rest) == 1 else self._unclear("label")))

    def _role(self, role: str, tiers: _Tiers, among: list[str]) -> str | None:
        return self.given[role][0] if role in self.given else self._named(role, tiers, among)

    def _named(self, role: str, tiers: _Tiers, among: list[str]) -> str | None:
        for tier in tiers:
            hits = [c for c in among if _key(c) in tier]
            if len(hits) > 1:
                self._unclear(role, f"which column holds the {role}, {' or '.join(hits)}?")
            if hits:
                return hits[0]
        return None

    def _unclear(self, role: str, why: str | None = None) -> NoReturn:
        why = why or f"which column holds the {role}?"
        value = "|".join(KINDS) if role == "kind" else "NAME"
        raise UsageError(
            f"{self.where}: {why} there are {', '.join(self.first)}", f"give --set data.columns.{role}={value}"
        )


def _check_texts(where: str, row: Mapping[str, Any], reading: _Reading) -> None:
    for column in (*reading.texts, reading.label):
        if column not in row:
            raise UsageError(f"{where}: column '{column}' is not there; there are {', '.join(row)}")
    for column in reading.texts:
        value = row[column]
        if reading.kind != "tokens" and not isinstance(value, str):
            raise UsageError(
                f"{where}: column '{column}' holds {type_of(value)}, not a text",
                "texts must be strings; another column is chosen with --set data.columns.ROLE=NAME",
            )
        if reading.kind == "tokens" and not (isinstance(value, list) and all(isinstance(w, str) for w in value)):
            raise UsageError(f"{where}: column '{column}' must be a list of words, all of them strings")
        if not value and reading.kind == "tokens":
            raise UsageError(f"{where}: column '{column}' holds no words", "leave such rows out")


def _key(column: str) -> str:
    """`Sentence_1`, `sentence 1` and `sentence1` are one name."""
    return re.sub(r"[\W_]", "", column.lower())


def _is_id(column: str) -> bool:
    return _key(column) in _IDS or column.lower().endswith("_id")
