"""Decide the kind and the classes of a user's own task by the labels of its training rows."""

import reprlib
import sys
from collections.abc import Mapping

from kdcli.data.class_names import ClassName
from kdcli.data.labelled.examples import number_of
from kdcli.data.rows import BadRow, check_encodable
from kdcli.errors import UsageError
from kdcli.types import Kind

MAX_CLASSES = 1000
MANY_ROWS = 50  # From this number on, labels that mostly differ are not accepted as classes.

_TYPES = {
    str: "a string",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    list: "a list",
    dict: "an object",
}
_LABEL_HINT = "if the label is in another column, give --set data.columns.label=NAME"


class TrainingLabels:
    """The labels of all training rows, added one by one.

    Memory does not grow with the number of rows.

    Attributes:
        rows: The number of labels.
        empty: The number of labels without a class or an answer.
    """

    def __init__(self, column: str, kind: Kind | None) -> None:
        self.column, self.kind = column, kind
        self.rows = self.empty = 0
        self._first_at = ""
        # Label as a string -> the number it spells and the first place where it occurs. At most
        # MAX_CLASSES + 1 labels are kept.
        self._seen: dict[str, tuple[int | float | None, str]] = {}
        # Name -> number, for labels whose source numbers them.
        self.class_numbers: dict[str, int] = {}
        self._types: dict[bool, tuple[str, str]] = {}
        self._first_set: frozenset[str] | None = None
        self._sets_differ = self._has_word = self._has_fraction = False
        self._infinite_at = ""

    def add(self, where: str, label: object) -> None:
        """Add a row's label.

        Raises:
            BadRow: The label is missing, does not fit the kind, or its type differs from the
                earlier labels.
        """
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
                "for one label per word, give the words' column (--set data.columns.words=NAME)",
            )
        self.empty += not names
        self._first_set = frozenset(names) if self._first_set is None else self._first_set
        self._sets_differ |= self._first_set != frozenset(names)

    def first_row(self, name: str) -> str:
        """Return the place of the first row with a label, which is one of the names of `decide`."""
        return self._seen[name][1]

    def decide(self, *, one_is_enough: bool = False) -> tuple[Kind, tuple[str, ...]]:
        """Return the kind of the task and the names of its classes.

        Numbers are ordered by size and other names alphabetically. For `tokens`, `O` comes first.

        Args:
            one_is_enough: Whether all rows may have the same label.

        Raises:
            UsageError: There is only one label or too many, a label is not finite, or two labels
                are spellings of one class.
        """
        if self.kind == "text":
            return "text", ()
        if self.kind == "span":
            if self.empty == self.rows:
                raise UsageError(
                    f"{self._first_at}: from here on no example has an answer in '{self.column}'"
                )
            return "span", ()
        in_schema = self._seen.keys() == self.class_numbers.keys()
        is_score = self._has_fraction and not self._has_word and not in_schema
        by_labels: Kind = "score" if is_score else "class"
        kind = self.kind or ("multi" if self._first_set is not None else by_labels)
        if kind in ("class", "score") and self._infinite_at and not self._has_word:
            raise UsageError(
                f"{self._infinite_at}: the label in '{self.column}' is not a finite number"
            )
        # The identity of a label: its number if all labels are numbers, otherwise its name without
        # surrounding white space.
        keys: dict[str, str | int | float] = {
            name: name.strip() if number is None or self._has_word else number
            for name, (number, _) in self._seen.items()
        }
        if not one_is_enough:
            self._check_several(kind, keys)
        if kind == "score":
            return kind, ()
        self._check_count(kind, len(keys), in_schema=in_schema)
        self._check_spellings(keys)
        if in_schema:
            names = sorted(keys, key=self.class_numbers.__getitem__)
        elif self._has_word:
            names = sorted(keys, key=lambda name: (kind == "tokens" and name != "O", name))
        else:
            numbers = {n: number for n, (number, _) in self._seen.items() if number is not None}
            names = sorted(numbers, key=numbers.__getitem__)
        return kind, tuple(names)

    def _check_several(self, kind: Kind, keys: Mapping[str, str | int | float]) -> None:
        """Raise a UsageError if all rows have the same label."""
        if kind == "multi":
            differ = self._sets_differ
        else:
            differ = len(set(keys.values()) if kind == "score" else keys) > 1
        if differ:
            return
        unit = "word" if kind == "tokens" else "example"
        names = ", ".join(keys) or "[]"
        raise UsageError(
            f"{self._first_at}: from here on every {unit} has the label {names} in "
            f"'{self.column}': nothing to learn",
            _LABEL_HINT,
        )

    def _check_count(self, kind: Kind, count: int, *, in_schema: bool) -> None:
        """Raise a UsageError if there are too many labels for classes."""
        beyond = count > MAX_CLASSES
        mostly_differ = self.rows >= MANY_ROWS and 2 * count > self.rows and not in_schema
        if not (beyond or (kind == "class" and not self.kind and mostly_differ)):
            return
        number = f"more than {MAX_CLASSES}" if beyond else count
        message = (
            f"{self._first_at}: from here on '{self.column}' holds {number} different labels in "
            f"{self.rows} examples, too many for classes"
        )
        hint = _LABEL_HINT
        if not self._has_word:
            hint += "; if the numbers are scores, --set data.columns.kind=score"
        if not beyond:
            hint += "; if they are classes, --set data.columns.kind=class"
        raise UsageError(message, hint)

    def _check_spellings(self, keys: Mapping[str, str | int | float]) -> None:
        """Raise a UsageError if one class is spelled in two ways."""
        by_key: dict[str | int | float, str] = {}
        for name, key in keys.items():
            first = by_key.setdefault(key, name)
            if first != name:
                (_, first_at), (_, where) = self._seen[first], self._seen[name]
                raise UsageError(
                    f"{where}: the label {name!r} in '{self.column}' is spelled {first!r} at "
                    f"{first_at}"
                )

    def _check_type(self, where: str, value: object, *, in_list: bool) -> None:
        """Raise a BadRow if a label, or an element of one, is missing or has the wrong type."""
        if value is None or (isinstance(value, str) and not value.strip()):
            raise BadRow(
                where,
                f"the label '{self.column}' is missing",
                hint="remove rows without a label",
            )
        value_type = str if isinstance(value, ClassName) else type(value)
        type_name = _TYPES.get(value_type, f"a {value_type.__name__}")
        allowed = ["a string", "a number", "a boolean", "a list"]
        if in_list:
            type_name = "a number with a point" if isinstance(value, float) else type_name
            allowed = allowed[:2]
        elif self.kind:
            allowed = allowed[3:] if self.kind in ("multi", "tokens") else allowed[:3]
        subject = "an element of" if in_list else "the label"
        problem = f"{subject} '{self.column}' is {type_name}"
        value_text = f", {reprlib.repr(value)}"
        if type_name not in allowed:
            kinds = self.kind or "class, multi or score"
            raise BadRow(
                where,
                problem,
                f"{value_text}; kind {kinds} takes {' or '.join(allowed)}",
                _LABEL_HINT,
            )
        first_type, first_at = self._types.setdefault(in_list, (type_name, where))
        if type_name != first_type:
            raise BadRow(
                where,
                problem,
                f"{value_text}, but {first_type} at {first_at}",
                "all labels must be of one type",
            )

    def _name(self, where: str, value: object) -> str:
        """Return the name of a label, and remember what a new label looks like."""
        if isinstance(value, ClassName) and self.kind == "score":
            value = value.number
        name = str(value)
        if name in self._seen:
            return name
        if isinstance(value, ClassName) and len(self.class_numbers) <= MAX_CLASSES:
            self.class_numbers[name] = value.number
        number: int | float | None = None
        if isinstance(value, str):
            number = number_of(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            number = value
        if number is None:
            self._has_word = True
            if self.kind == "score":
                raise BadRow(
                    where, f"the score '{self.column}' is not a number", f": {reprlib.repr(value)}"
                )
        elif not abs(number) <= sys.float_info.max:
            self._infinite_at = self._infinite_at or where
        else:
            self._has_fraction |= number != int(number)
        if len(self._seen) <= MAX_CLASSES:
            self._seen[check_encodable(where, self.column, name)] = number, where
        return name
