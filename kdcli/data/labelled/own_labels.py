"""Labels of a user's own task: what kind they are, and the names and order of their classes."""

from __future__ import annotations

import re
import reprlib
import sys
from typing import Any

from kdcli.errors import UsageError
from kdcli.types import Kind

MOST_CLASSES = 1000
MANY_ROWS = 50
"""From so many rows on, labels that mostly differ from row to row are taken for no classes."""

Scalar = str | bool | int | float
_WHOLE = re.compile(r"[+-]?[0-9]+")
_REAL = re.compile(r"[+-]?(([0-9]+(\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]+)?|nan|inf|infinity)", re.IGNORECASE)
_LONGEST_NUMBER = 40
_TYPES = {str: "a string", bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}
_IN = {"label": "the label", "element": "an element of"}


def type_of(value: Any) -> str:
    """The type of a value of a row, in words."""
    return "null" if value is None else _TYPES.get(type(value), f"a {type(value).__name__}")


def number_of(text: str) -> int | float | None:
    """The number that a string spells, be it infinite or not a number; None if it spells none."""
    text = text.strip()
    if len(text) > _LONGEST_NUMBER or not _REAL.fullmatch(text):
        return None
    return int(text) if _WHOLE.fullmatch(text) else float(text)


class Labels:
    """The labels of all training rows, added one by one; what is kept does not grow with the number of rows.

    Args:
        column: that holds them, for messages.
        kind: None leaves the choice of class, multi and score to the labels.

    Attributes:
        rows: labels added.
        empty: those that name no class or answer.
    """

    def __init__(self, column: str, kind: Kind | None) -> None:
        self.column, self.kind = column, kind
        self.rows = self.empty = 0
        self._first_at = ""
        # What `str` makes of a label → the number it spells, if any, and where it first stands; not of all labels, when
        # there are too many for classes.
        self._seen: dict[str, tuple[int | float | None, str]] = {}
        self._types: dict[str, tuple[str, str]] = {}
        self._first_set: frozenset[str] | None = None
        self._sets_differ = False
        # Where the first label stands that is no number, or not a finite one.
        self._word_at: str | None = None
        self._infinite_at: str | None = None
        self._has_int = self._has_float = self._has_fraction = False

    def add(self, where: str, label: Any, words: int) -> None:
        """Take the label of a row; `words` is how many words it has, for kind tokens.

        Raises:
            UsageError: missing, of another type than those before, or none that the kind takes.
        """
        self.rows += 1
        self._first_at = self._first_at or where
        if self.kind == "span":
            self._add_answers(where, label)
            return
        self._check(where, label, "label")
        if not isinstance(label, list):
            self._name(where, label)
            return
        for element in label:
            self._check(where, element, "element")
        names = [self._name(where, element) for element in label]
        if self.kind == "tokens" and len(names) != words:
            raise UsageError(
                f"{where}: {words} words but {len(names)} labels in '{self.column}'", "a label for each word"
            )
        if self.kind != "tokens" and len(set(names)) < len(names):
            raise UsageError(
                f"{where}: '{self.column}' holds a class twice: {reprlib.repr(label)}",
                "list the names or numbers of the classes that apply, not a 0 or 1 for each class; "
                "labels of words need a column of words (--set data.columns.words=NAME)",
            )
        self.empty += not names
        self._first_set = frozenset(names) if self._first_set is None else self._first_set
        self._sets_differ |= self._first_set != frozenset(names)

    def decide(self) -> tuple[Kind, tuple[str, ...]]:
        """The kind, and the names of its classes in order: numbers by size, the rest by name, of tokens `O` first.

        Raises:
            UsageError: the labels cannot be learnt: only one, too many, not finite, or alike.
        """
        if self.kind == "span":
            if self.empty == self.rows:
                raise UsageError(f"{self._first_at}: from here on no example has an answer in '{self.column}'")
            return "span", ()
        kind = self.kind or self._kind()
        if kind in ("class", "score") and self._infinite_at and not self._word_at:
            raise UsageError(f"{self._infinite_at}: the label in '{self.column}' is not a finite number")
        keys = {name: self._key(name) for name in self._seen}
        differing = len(set(keys.values()) if kind == "score" else keys)
        if not self._sets_differ if kind == "multi" else differing < 2:
            every = "every word" if kind == "tokens" else "every example"
            raise UsageError(
                f"{self._first_at}: from here on {every} has the label {', '.join(keys) or '[]'} in '{self.column}': "
                "nothing to learn",
                "if it is not the label, give --set data.columns.label=NAME",
            )
        if kind == "score":
            return kind, ()
        mostly_differ = self.rows >= MANY_ROWS and 2 * len(keys) > self.rows
        if len(keys) > MOST_CLASSES or (kind == "class" and not self.kind and mostly_differ):
            raise self._too_many()
        by_key: dict[str | int | float, str] = {}
        for name, key in keys.items():
            if key in by_key:
                (_, first), (_, where) = self._seen[by_key[key]], self._seen[name]
                raise UsageError(
                    f"{where}: the label {name!r} in '{self.column}' is spelled {by_key[key]!r} at {first}"
                )
            by_key[key] = name
        order: dict[str, Any] = {name: name if self._word_at else key for name, key in keys.items()}
        return kind, tuple(sorted(keys, key=lambda name: (kind == "tokens" and name != "O", order[name])))

    def _kind(self) -> Kind:
        if self._types["label"][0] == "a list":
            return "multi"
        real = self._has_fraction or (self._has_int and self._has_float)
        return "score" if real and not self._word_at else "class"

    def _key(self, name: str) -> str | int | float:
        """What no two labels may share: the number where all spell numbers, else the name but for blanks around it."""
        number, _ = self._seen[name]
        return name.strip() if number is None or self._word_at else number

    def _check(self, where: str, value: Any, what: str) -> None:
        if value is None or (isinstance(value, str) and not value.strip()):
            raise UsageError(f"{where}: the label '{self.column}' is missing", "leave rows without a label out")
        found = type_of(value)
        allowed: tuple[str, ...] = ("a string", "a number", "a boolean", "a list")
        if what == "element":
            found = "a number with a point" if isinstance(value, float) else found
            allowed = ("a string", "a number")
        elif self.kind:
            allowed = ("a list",) if self.kind in ("multi", "tokens") else allowed[:-1]
        if found not in allowed:
            raise UsageError(
                f"{where}: {_IN[what]} '{self.column}' is {found}, {reprlib.repr(value)}; "
                f"kind {self.kind or 'class, multi or score'} takes {' or '.join(allowed)}",
                "if it is not the label, give --set data.columns.label=NAME",
            )
        known, first = self._types.setdefault(what, (found, where))
        if found != known:
            raise UsageError(
                f"{where}: {_IN[what]} '{self.column}' is {found}, {reprlib.repr(value)}, but {known} at {first}",
                "all labels must be of one type",
            )

    def _name(self, where: str, value: Scalar) -> str:
        name = str(value)
        if name in self._seen:
            return name
        number = number_of(value) if isinstance(value, str) else None if isinstance(value, bool) else value
        if number is None:
            self._word_at = self._word_at or where
            if self.kind == "score":
                raise UsageError(f"{where}: the score '{self.column}' is no number: {reprlib.repr(value)}")
        elif not abs(number) <= sys.float_info.max:
            self._infinite_at = self._infinite_at or where
        else:
            self._has_int |= isinstance(number, int)
            self._has_float |= isinstance(number, float)
            self._has_fraction |= number != int(number)
        if re.search("[\ud800-\udfff]", name):
            raise UsageError(f"{where}: half a surrogate pair in the label '{self.column}': {name!a}")
        if len(self._seen) <= MOST_CLASSES:
            self._seen[name] = number, where
        elif self._word_at:
            raise self._too_many()
        return name

    def _too_many(self) -> UsageError:
        count = f"more than {MOST_CLASSES}" if len(self._seen) > MOST_CLASSES else str(len(self._seen))
        return UsageError(
            f"{self._first_at}: from here on '{self.column}' holds {count} different labels in {self.rows} examples, "
            "too many for classes",
            "if it is not the label, give --set data.columns.label=NAME"
            + ("" if self._word_at else "; if its numbers are scores, --set data.columns.kind=score")
            + ("" if len(self._seen) > MOST_CLASSES else "; if they are classes, --set data.columns.kind=class"),
        )

    def _add_answers(self, where: str, value: Any) -> None:
        texts, starts = (value.get("text"), value.get("answer_start")) if isinstance(value, dict) else (None, None)
        if (
            not (isinstance(texts, list) and isinstance(starts, list) and len(texts) == len(starts))
            or not all(isinstance(text, str) and text for text in texts)
            or not all(isinstance(start, int) for start in starts)
        ):
            raise UsageError(
                f"{where}: '{self.column}' holds {reprlib.repr(value)}",
                'answers have the form {"text": ["Paris"], "answer_start": [17]}, both empty if there is none',
            )
        self.empty += not texts
