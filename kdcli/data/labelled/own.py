"""The task that a user's own rows hold: columns by convention or as given, kind and classes by the
labels."""

import itertools
import re
import reprlib
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn, get_args

from kdcli.data.documents import check_text
from kdcli.data.labelled.examples import number_of
from kdcli.data.rows import BadRow, OnBadRow, Row, raise_bad_row
from kdcli.data.sources import CONLL_HINT, Log, is_conll
from kdcli.data.tasks import OWN
from kdcli.data.tasks.squad import IMPOSSIBLE_METRICS
from kdcli.errors import UsageError, did_you_mean
from kdcli.types import Kind, Task

HEAD = 100  # Rows that are held and read to tell the columns apart.
MOST_CLASSES, CLASSES_LISTED = 1000, 10
MANY_ROWS = 50  # From here on, labels that mostly differ from row to row are refused as classes.
# Tokens of a row: of a window as for SQuAD, where there must be room next to the question and the
# overlap; of source and target as for summaries.
LENGTHS: Mapping[Kind, int] = {"span": 384, "text": 512}

KINDS: tuple[Kind, ...] = get_args(Kind)
_ROLES: Mapping[Kind, tuple[str, ...]] = {
    **dict.fromkeys(("class", "multi", "score"), ("text", "pair", "label")),
    "tokens": ("words", "label"),
    "span": ("question", "context", "answers"),
    "text": ("source", "target"),
}
_METRICS: Mapping[Kind, tuple[str, ...]] = {
    "class": ("accuracy", "macro_f1"),
    "multi": ("micro_f1", "macro_f1", "exact"),
    "score": ("pearson", "spearman", "mse"),
    "tokens": ("f1", "precision", "recall", "accuracy"),
    "span": ("exact", "f1"),
    "text": ("rougeL", "rouge1", "rouge2", "bleu", "exact"),
}
_METRICS_OF_TWO = ("accuracy", "f1", "matthews")

# Names as `_key` writes them. The first group with a column decides; two columns of one group are
# ambiguous.
_Groups = tuple[tuple[str, ...], ...]
_TEXT: _Groups = (("text",), ("sentence",), ("review", "content", "comment", "title"))
_LABEL: _Groups = (
    *(("label",), ("labels",), ("class",), ("target",), ("y",), ("goldlabel",)),
    ("category", "sentiment", "intent", "topic", "score", "rating", "stars"),
)
_WORDS: _Groups = (("tokens",), ("words",))
_TAGS: _Groups = (("nertags",), ("tags",), ("postags",), ("labels",), ("label",), ("upos",))
_PAIRS = (
    *(
        ("sentence1", "sentence2"),
        ("premise", "hypothesis"),
        ("question1", "question2"),
        ("question", "sentence"),
    ),
    *(("text", "textpair"), ("query", "passage")),
)
_IDS = ("", "id", "idx", "guid", "index", "unnamed0")


def own_task(
    rows: Iterable[Row],
    columns: Mapping[str, str | list[str]],
    log: Log,
    bad: OnBadRow = raise_bad_row,
) -> Task:
    """Find out, in one pass over the training rows, which task they hold. `str` of each label is a
    name in the task's `labels`; the labels of `score` and `span` have no names. `rows`: all
    training rows; no text of them is kept.
    `columns`: role (those of `_ROLES`) -> column, of `text` perhaps a list of two; and `kind`,
    which is no column.
    `log`: takes one sentence with the result. `bad`: takes rows whose label cannot be read, which
    then say nothing about the task. Raises UsageError: roles or columns that do not exist or are
    ambiguous, no rows, or labels that do not fit a task."""
    kind, given = _given(columns)
    rest = iter(rows)
    head = list(itertools.islice(rest, HEAD))
    if not head:
        raise UsageError("the training data holds no examples")
    kind, texts, label = _Columns(head, given).read(kind)
    labels = _Labels(label, kind)
    for where, row in itertools.chain(head, rest):
        try:
            if label not in row:
                raise BadRow(where, f"column '{label}' is not there; there are {', '.join(row)}")
            labels.add(where, row[label])
            labels.rows += 1
        except BadRow as error:
            bad(error)
    kind, names = labels.decide()
    impossible = kind == "span" and labels.empty > 0
    metrics = IMPOSSIBLE_METRICS if impossible else _METRICS[kind]
    message = f"task own: {labels.rows} examples of kind {kind}, {' and '.join(texts)} -> {label}"
    if names:
        metrics = _METRICS_OF_TWO if kind == "class" and len(names) == 2 else metrics
        message += f", {len(names)} classes" + (
            f" ({', '.join(names)})" if len(names) <= CLASSES_LISTED else ""
        )
    if impossible:
        message += f", {labels.empty} without an answer"
    unread = [c for c in head[0][1] if c not in (*texts, label)]
    log(message + (f"; not read: {', '.join(unread)}" if unread else ""))
    length = LENGTHS.get(kind, Task.max_length)
    return Task(OWN, kind, texts, metrics, names, label, impossible=impossible, max_length=length)


def _given(
    columns: Mapping[str, str | list[str]],
) -> tuple[Kind | None, dict[str, tuple[str, ...]]]:
    """The kind that the user gives, and role -> columns."""
    roles = [*dict.fromkeys(itertools.chain(*_ROLES.values())), "kind"]
    given: dict[str, tuple[str, ...]] = {}
    for role, value in columns.items():
        if role not in roles:
            near = did_you_mean(role, roles)
            raise UsageError(
                f"unknown role 'data.columns.{role}'{near}", f"known: {', '.join(roles)}"
            )
        given[role] = (value,) if isinstance(value, str) else tuple(value)
        if len(given[role]) != 1 and not (
            role == "text" and len(given[role]) == 2 and "pair" not in columns
        ):
            raise UsageError(
                f"data.columns.{role} takes one column, got {value}", "of a pair give text and pair"
            )
    (name,) = given.pop("kind", (None,))
    kind = next((k for k in KINDS if k == name), None)
    if name is not None and kind is None:
        near = did_you_mean(name, KINDS)
        raise UsageError(
            f"unknown kind 'data.columns.kind={name}'{near}", f"known: {', '.join(KINDS)}"
        )
    if "pair" in given and "text" in given:
        given["text"] += given.pop("pair")
    named = [column for names in given.values() for column in names]
    if twice := [column for column in named if named.count(column) > 1]:
        raise UsageError(f"data.columns gives column '{twice[0]}' two roles")
    return kind, given


# Kind, columns of the texts and of the label; None leaves the choice of class, multi and score to
# the labels.
_Reading = tuple[Kind | None, tuple[str, ...], str]


class _Columns:
    """The columns of the first rows: those that the user gives, the others by their names."""

    def __init__(self, head: list[Row], given: Mapping[str, tuple[str, ...]]) -> None:
        self.where, self.first = head[0]
        self.given = given
        named = [column for names in given.values() for column in names]
        for column in named:
            if column not in self.first:
                near = did_you_mean(column, self.first)
                raise UsageError(
                    f"{self.where}: no column '{column}'{near}",
                    f"there are {', '.join(self.first)}",
                )
        self.free = [
            c
            for c in self.first
            if c not in named and _key(c) not in _IDS and not c.lower().endswith("_id")
        ]
        # A CSV spells numbers as strings too.
        texts = {c: [row[c] for _, row in head if isinstance(row.get(c), str)] for c in self.free}
        self.strings = [c for c in self.free if any(number_of(text) is None for text in texts[c])]
        self.lists = [c for c in self.free if isinstance(self.first[c], list)]

    def read(self, kind: Kind | None) -> _Reading:
        """The columns to read for a kind, or for any; a UsageError where there are several ways, or
        none."""
        kinds = [k for k in KINDS if kind in (None, k) and set(self.given) <= set(_ROLES[k])]
        if not kinds:
            no_kind = f"kind {kind} does not all read" if kind else "no kind reads together"
            known = "; ".join(f"{k} reads {', '.join(_ROLES[k])}" for k in KINDS)
            raise UsageError(f"data.columns gives {', '.join(self.given)}, which {no_kind}", known)
        reading = self._span(must=kinds == ["span"]) if "span" in kinds else None
        if "tokens" in kinds and not reading:
            reading = self._tokens(must=kinds == ["tokens"])
        if "text" in kinds and not reading:
            reading = self._generated(must=kinds == ["text"])
        return reading or self._texts(kind)

    def _span(self, must: bool) -> _Reading | None:
        columns = {role: self._role(role, ((role,),), self.free) for role in _ROLES["span"]}
        if missing := [role for role, column in columns.items() if column is None]:
            return self._unclear(missing[0], self.free) if must else None
        question, context, answers = map(str, columns.values())
        return "span", (question, context), answers

    def _tokens(self, must: bool) -> _Reading | None:
        words, tags = (
            self._role("words", _WORDS, self.lists),
            self._role("label", _TAGS, self.lists),
        )
        others = [c for c in self.lists if c != words]
        tags = tags or (others[0] if words and len(others) == 1 else None)
        if words is None or tags is None:
            return self._unclear("label" if words else "words", others) if must else None
        if not must:
            if not isinstance(self.first[tags], list):
                return None
            label = self._named("label", _LABEL, [c for c in self.free if c not in self.lists])
            if "label" not in self.given and label and self._named("text", _TEXT, self.strings):
                self._unclear(
                    "kind", KINDS, f"is it {tags} of {words} (kind tokens), or {label} of the text?"
                )
        return "tokens", (words,), tags

    def _generated(self, must: bool) -> _Reading | None:
        source, target = (self._role(role, ((role,),), self.strings) for role in _ROLES["text"])
        if source is None or target is None:
            return self._unclear("target" if source else "source", self.strings) if must else None
        # A target is a label too, of a text that came from a source.
        if not must and self._named("text", _TEXT, self.strings):
            return None
        return "text", (source,), target

    def _texts(self, kind: Kind | None) -> _Reading:
        label = self._role("label", _LABEL, self.free)
        strings = [c for c in self.strings if c != label]
        by_key = {_key(c): c for c in strings}
        texts = self.given.get("text", ())
        if not texts and "pair" not in self.given:
            texts = next(
                ((by_key[a], by_key[b]) for a, b in _PAIRS if a in by_key and b in by_key), ()
            )
        if not texts:
            text = self._named("text", _TEXT, [c for c in self.free if c != label])
            text = text or (strings[0] if len(strings) == 1 else self._unclear("text", strings))
            texts = (text, *self.given.get("pair", ()))
        rest = [c for c in self.free if c not in texts]
        return kind, texts, label or (rest[0] if len(rest) == 1 else self._unclear("label", rest))

    def _role(self, role: str, groups: _Groups, among: list[str]) -> str | None:
        return self.given[role][0] if role in self.given else self._named(role, groups, among)

    def _named(self, role: str, groups: _Groups, among: list[str]) -> str | None:
        for group in groups:
            hits = [c for c in among if _key(c) in group]
            if len(hits) > 1:
                self._unclear(role, hits, f"which column holds the {role}, {' or '.join(hits)}?")
            if hits:
                return hits[0]
        return None

    def _unclear(self, role: str, choices: Iterable[str], why: str | None = None) -> NoReturn:
        file = self.where.rpartition(":")[0]
        if file.removesuffix(".gz").endswith(".txt"):
            hint = (
                CONLL_HINT
                if is_conll(Path(file), str(self.first["text"]))
                else "give jsonl, csv, tsv or parquet with a column of labels"
            )
            raise UsageError(f"{file} is plain text: its lines hold no labels", hint)
        message = (
            f"{self.where}: {why or f'which column holds the {role}?'} there are "
            f"{', '.join(self.first)}"
        )
        of_pair = "; of a pair also data.columns.pair" if role == "text" else ""
        raise UsageError(
            message, f"give --set data.columns.{role}={'|'.join(choices) or 'NAME'}{of_pair}"
        )


def _key(column: str) -> str:
    """`Sentence_1`, `sentence 1` and `sentence1` are one name."""
    return re.sub(r"[\W_]", "", column.lower())


_TYPES = {
    str: "a string",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    list: "a list",
    dict: "an object",
}
_LABEL_HINT = "if it is not the label, give --set data.columns.label=NAME"


class _Labels:
    """The labels of all training rows, added one by one; memory does not grow with the number of
    rows. `rows` counts the labels, `empty` those without a class or an answer."""

    def __init__(self, column: str, kind: Kind | None) -> None:
        self.column, self.kind = column, kind
        self.rows = self.empty = 0
        self._first_at = ""
        # `str` of a label -> the number it spells and where it first stands; at most MOST_CLASSES +
        # 1 of them.
        self._seen: dict[str, tuple[int | float | None, str]] = {}
        self._types: dict[bool, tuple[str, str]] = {}
        self._first_set: frozenset[str] | None = None
        self._sets_differ = self._has_word = self._has_fraction = False
        self._infinite_at = ""

    def add(self, where: str, label: Any) -> None:
        """Take a row's label; a BadRow if it is missing, of another type than those before, or not
        of the kind."""
        self._first_at = self._first_at or where
        if self.kind == "text":
            return
        if self.kind == "span":
            self.empty += not (isinstance(label, dict) and label.get("text"))
            return
        self._check_type(where, label, in_list=False)
        if not isinstance(label, list):
            self._name(where, label)
            return
        for element in label:
            self._check_type(where, element, in_list=True)
        names = [self._name(where, element) for element in label]
        if self.kind != "tokens" and len(set(names)) < len(names):
            raise BadRow(
                where,
                f"'{self.column}' holds a class twice",
                f": {reprlib.repr(label)}",
                "list the names or numbers of the classes that apply, not a 0 or 1 for each class; "
                "labels of words need a column of words (--set data.columns.words=NAME)",
            )
        self.empty += not names
        self._first_set = frozenset(names) if self._first_set is None else self._first_set
        self._sets_differ |= self._first_set != frozenset(names)

    def decide(self) -> tuple[Kind, tuple[str, ...]]:
        """The kind, and the names of its classes in order: numbers by size, the rest by name, of
        tokens `O` first. A UsageError for labels that cannot be learnt: only one, too many, not
        finite, or alike."""
        if self.kind == "text":
            return "text", ()
        if self.kind == "span":
            if self.empty == self.rows:
                raise UsageError(
                    f"{self._first_at}: from here on no example has an answer in '{self.column}'"
                )
            return "span", ()
        by_labels: Kind = "score" if self._has_fraction and not self._has_word else "class"
        kind = self.kind or ("multi" if self._first_set is not None else by_labels)
        if kind in ("class", "score") and self._infinite_at and not self._has_word:
            raise UsageError(
                f"{self._infinite_at}: the label in '{self.column}' is not a finite number"
            )
        # What no two labels may share: the number where all spell numbers, else the name but for
        # spaces around it.
        keys: dict[str, Any] = {
            name: name.strip() if number is None or self._has_word else number
            for name, (number, _) in self._seen.items()
        }
        if not (
            self._sets_differ
            if kind == "multi"
            else len(set(keys.values()) if kind == "score" else keys) > 1
        ):
            every = (
                f"every {'word' if kind == 'tokens' else 'example'} has the label "
                f"{', '.join(keys) or '[]'}"
            )
            message = f"{self._first_at}: from here on {every} in '{self.column}': nothing to learn"
            raise UsageError(message, _LABEL_HINT)
        if kind == "score":
            return kind, ()
        mostly_differ = self.rows >= MANY_ROWS and 2 * len(keys) > self.rows
        if (beyond := len(keys) > MOST_CLASSES) or (
            kind == "class" and not self.kind and mostly_differ
        ):
            held = (
                f"{f'more than {MOST_CLASSES}' if beyond else len(keys)} different labels in "
                f"{self.rows} examples"
            )
            message = (
                f"{self._first_at}: from here on '{self.column}' holds {held}, too many for classes"
            )
            scores = (
                ""
                if self._has_word
                else "; if its numbers are scores, --set data.columns.kind=score"
            )
            classes = "" if beyond else "; if they are classes, --set data.columns.kind=class"
            raise UsageError(message, f"{_LABEL_HINT}{scores}{classes}")
        by_key: dict[Any, str] = {}
        for name, key in keys.items():
            first = by_key.setdefault(key, name)
            if first != name:
                (_, first_at), (_, where) = self._seen[first], self._seen[name]
                raise UsageError(
                    f"{where}: the label {name!r} in '{self.column}' is spelled {first!r} at "
                    f"{first_at}"
                )
        order = {name: name if self._has_word else key for name, key in keys.items()}
        return kind, tuple(
            sorted(keys, key=lambda name: (kind == "tokens" and name != "O", order[name]))
        )

    def _check_type(self, where: str, value: Any, *, in_list: bool) -> None:
        if value is None or (isinstance(value, str) and not value.strip()):
            raise BadRow(
                where,
                f"the label '{self.column}' is missing",
                hint="leave rows without a label out",
            )
        type_name = _TYPES.get(type(value), f"a {type(value).__name__}")
        allowed = ["a string", "a number", "a boolean", "a list"]
        if in_list:
            type_name = "a number with a point" if isinstance(value, float) else type_name
            allowed = allowed[:2]
        elif self.kind:
            allowed = allowed[3:] if self.kind in ("multi", "tokens") else allowed[:3]
        what = "an element of" if in_list else "the label"
        problem, shown = f"{what} '{self.column}' is {type_name}", f", {reprlib.repr(value)}"
        if type_name not in allowed:
            kinds = self.kind or "class, multi or score"
            raise BadRow(
                where, problem, f"{shown}; kind {kinds} takes {' or '.join(allowed)}", _LABEL_HINT
            )
        first_type, first_at = self._types.setdefault(in_list, (type_name, where))
        if type_name != first_type:
            raise BadRow(
                where,
                problem,
                f"{shown}, but {first_type} at {first_at}",
                "all labels must be of one type",
            )

    def _name(self, where: str, value: str | bool | int | float) -> str:
        name = str(value)
        if name in self._seen:
            return name
        number = (
            number_of(value)
            if isinstance(value, str)
            else None
            if isinstance(value, bool)
            else value
        )
        if number is None:
            self._has_word = True
            if self.kind == "score":
                raise BadRow(
                    where, f"the score '{self.column}' is no number", f": {reprlib.repr(value)}"
                )
        elif not abs(number) <= sys.float_info.max:
            self._infinite_at = self._infinite_at or where
        else:
            self._has_fraction |= number != int(number)
        if len(self._seen) <= MOST_CLASSES:
            self._seen[check_text(where, self.column, name)] = number, where
        return name
