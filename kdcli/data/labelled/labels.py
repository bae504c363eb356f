"""Decide the kind and the classes of a user's own task by the labels of its training rows."""

import math
import reprlib
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from kdcli.data.labelled.label_values import (
    BRACKETS,
    IGNORED_WORD,
    NO_ANSWER,
    SCORE_COLUMNS,
    Number,
    form_of_lists,
    has_decimal_comma,
    has_thousands_comma,
    is_of_a_scale,
    may_be_no_label,
    missing_labels,
    number_of,
    number_with_comma,
    parse_list,
    separator_in,
    single_label,
    spelling,
)
from kdcli.data.rows import BadRow, ClassName, check_encodable, column_key
from kdcli.errors import UsageError
from kdcli.types import Head, Kind

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
_LIST_HINT = (
    "list the names or numbers of the classes that apply, not a 0 or 1 for each class; for one "
    "label per word, give the words' column (--set data.columns.words=NAME)"
)


class TrainingLabels:
    """The labels of all training rows, added one by one.

    Memory does not grow with the number of rows.

    Attributes:
        rows: The number of labels.
        empty: The number of labels without a class or an answer.
        ignored: The number of words that losses and metrics ignore.
        notes: What the labels may mean, for the log; filled by `decide`.
        comma_at: The place of the first number with a decimal comma; "" without any.
    """

    def __init__(self, column: str, kind: Kind | None) -> None:
        self.column, self.kind = column, kind
        self.rows = self.empty = self.ignored = 0
        self.notes: list[str] = []
        self._first_at = ""
        # Label as a string -> the number it spells and the first place where it occurs. At most
        # MAX_CLASSES + 1 labels are kept.
        self._seen: dict[str, tuple[Number, str]] = {}
        self._counts: Counter[str] = Counter()
        # Name -> number, for labels whose source numbers them.
        self.class_numbers: dict[str, int] = {}
        self._types: dict[bool, tuple[str, str]] = {}
        self._first_set: frozenset[str] | None = None
        self._sets_differ = self._has_fraction = False
        self._first_list: list[str] = []
        self._orders_differ = False
        self._one_each = True  # Whether each list holds one label.
        # A comma in other columns may separate two labels.
        self._reads_commas = kind == "score" or (
            kind is None and column_key(column) in SCORE_COLUMNS
        )
        self.comma_at = self._point_at = ""
        self._are_thousands = True  # Whether each comma may separate thousands.

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
        if self.kind == "class":
            label = single_label(label)
        self._check_type(where, label, in_list=False)
        if not isinstance(label, list):
            self._name(where, label)
            return
        if self.kind == "tokens":
            labelled = [each for each in label if str(each) != IGNORED_WORD]
            self.ignored += len(label) - len(labelled)
            label = labelled
        for element in label:
            self._check_type(where, element, in_list=True)
        names = [self._name(where, element) for element in label]
        if self.kind != "tokens":
            self._check_distinct(where, label, names)
        self.empty += not names
        self._one_each &= len(names) == 1
        self._first_set = frozenset(names) if self._first_set is None else self._first_set
        self._first_list = self._first_list or names
        self._sets_differ |= self._first_set != frozenset(names)
        self._orders_differ |= self._first_list != names

    def _check_distinct(self, where: str, label: object, names: Sequence[str]) -> None:
        """Raise a BadRow if a label is a list that holds a name twice."""
        if len(set(names)) < len(names):
            detail = f": {reprlib.repr(label)}"
            raise BadRow(where, f"'{self.column}' holds a class twice", detail, _LIST_HINT)

    def first_row(self, name: str) -> str:
        """Return the place of the first row with a label, which is one of the names of `decide`."""
        return self._seen[name][1]

    def first_rows(self, names: Collection[str]) -> dict[str, str]:
        """Return the place of the first row with each name, in the order of the rows."""
        return {name: row for name, (_, row) in self._seen.items() if name in names}

    def decide(
        self, *, one_is_enough: bool = False, of_head: Kind | None = None
    ) -> tuple[Kind, tuple[str, ...]]:
        """Return the kind of the task and the names of its classes.

        Numbers are ordered by size and other names alphabetically. For `tokens`, `O` comes first.
        Labels that stand for no label are no classes.

        Args:
            one_is_enough: Whether all rows may have the same label.
            of_head: The kind of a head that predicts these labels, if there is one.

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
        several = "multi" in (self.kind, of_head)
        holds_lists = self._first_set is not None or self._split_lists(several=several)
        if holds_lists and self._one_each and self.kind is None:
            holds_lists = self._are_several(of_head)
        in_schema = bool(self._seen) and self._seen.keys() == self.class_numbers.keys()
        if not in_schema:
            self._drop_missing(of_head)
        numbers = {name: number for name, (number, _) in self._seen.items()}
        has_word = None in numbers.values()
        is_score = not has_word and not in_schema and (self._has_fraction or of_head == "score")
        kind: Kind = self.kind or ("multi" if holds_lists else "score" if is_score else "class")
        infinite = [name for name, number in numbers.items() if not _is_finite(number)]
        if kind in ("class", "score") and not has_word and infinite:
            raise UsageError(
                f"{self.first_row(infinite[0])}: the label in '{self.column}' is not a finite "
                "number"
            )
        # The identity of a label: its number if all labels are numbers, otherwise what is visible
        # of its name.
        keys: dict[str, str | int | float] = {
            name: spelling(name) if number is None or has_word else number
            for name, number in numbers.items()
        }
        if not one_is_enough or (kind == "multi" and self._orders_differ):
            self._check_several(kind, keys)
        if kind == "score":
            self._check_commas()
            return kind, ()
        self._check_count(kind, len(keys), in_schema=in_schema, has_word=has_word)
        self._check_spellings(keys)
        if in_schema:
            names = sorted(keys, key=self.class_numbers.__getitem__)
        elif has_word:
            names = sorted(keys, key=lambda name: (kind == "tokens" and name != "O", name))
        else:
            names = sorted(numbers, key=lambda name: numbers[name] or 0)
        return kind, tuple(names)

    def _check_commas(self) -> None:
        """Raise a UsageError if it is unclear what the commas in numbers mean."""
        problem = ""
        if self.comma_at and self._point_at:
            problem = f"has a decimal comma, but the one at {self._point_at} has a point"
        elif self.comma_at and self._are_thousands:
            problem = "has a comma that may separate thousands, and so have all others"
        if problem:
            raise UsageError(
                f"{self.comma_at}: the number in '{self.column}' {problem}",
                "write all numbers with a point and without separators, such as 1234.5",
            )

    def _are_several(self, of_head: Kind | None) -> bool:
        """Whether lists of one label are of a task in which a text may have several."""
        lists = f"each list in '{self.column}' holds one label"
        if of_head == "class":
            self.notes.append(f"{lists}, which is read as the class of its text")
            return False
        if of_head is None:
            self.notes.append(
                f"{lists}; if each text has one class, give --set data.columns.kind=class"
            )
        return True

    def check_outputs(self, head: Head) -> None:
        """Check that a head with one output has no two labels to decide between.

        Raises:
            UsageError: It is unclear which label a high output stands for.
        """
        has_one_output = head.kind in ("score", "multi") and len(head.labels) <= 1
        if not has_one_output or self._first_set is not None or len(self._seen) != 2:
            return
        (_, first_at), (_, second_at) = self._seen.values()
        first, second = self._seen
        hints = []
        if head.labels:
            name = head.labels[0] if head.named else second
            hints.append(f'for a yes or no decision, write the label as a list, [] or ["{name}"]')
        if head.kind == "score":
            hints.append(
                "to compare the output with numbers, write numbers and give --set "
                "data.columns.kind=score"
            )
        raise UsageError(
            f"the model has one output, but '{self.column}' holds two labels: {first!r} "
            f"({first_at}) and {second!r} ({second_at})",
            "; ".join(hints),
        )

    def _split_lists(self, *, several: bool) -> bool:
        """Whether the labels are strings that list labels. If so, keep their parts instead.

        Raises:
            UsageError: The labels may be numbers with a decimal comma.
        """
        first_type, _ = self._types.get(False, ("", ""))
        texts = [name for name in self._seen if name.strip().casefold() not in NO_ANSWER]
        if first_type != "a string" or self.kind not in (None, "multi") or self.class_numbers:
            return False
        commas = [text for text in texts if has_decimal_comma(text)]
        are_numbers = all(each in commas or number_of(each) is not None for each in texts)
        if commas and are_numbers and not several:
            if self._reads_commas:
                return False
            raise UsageError(
                f"{self.first_row(commas[0])}: the label '{commas[0]}' in '{self.column}' may be a "
                "number with a decimal comma, or two labels",
                "for numbers, give --set data.columns.kind=score; for several labels, "
                "--set data.columns.kind=multi",
            )
        if texts and self.kind is None and all(map(is_of_a_scale, texts)):
            raise UsageError(
                f"{self.first_row(texts[0])}: the label '{texts[0]}' in '{self.column}' may be a "
                "number",
                "write the number alone, without a percent sign or a maximum; for classes, give "
                "--set data.columns.kind=class",
            )
        form = form_of_lists(texts, several=several)
        if form is None:
            separator = separator_in(texts)
            if separator is not None and not several:
                count = sum(self._counts[text] for text in texts if separator in text)
                self.notes.append(
                    f"{count:,} labels that contain {separator!r} are each read as one class; if "
                    "they are lists of labels, give --set data.columns.kind=multi"
                )
            self._sets_differ = len(self._seen) > 1
            return several
        seen: dict[str, tuple[Number, str]] = {}
        sets = set()
        for text in texts:
            where = self.first_row(text)
            parts = parse_list(text, form)
            parts = [text] if parts is None else parts
            self._check_distinct(where, text, parts)
            sets.add(frozenset(parts))
            for part in parts:
                seen.setdefault(part, (number_of(part), where))
        shown = "in brackets" if form == BRACKETS else f"separated by {form!r}"
        self.notes.append(
            f"'{self.column}' holds lists of labels {shown}; if each one is a single class, give "
            "--set data.columns.kind=class"
        )
        self._one_each = all(len(each) == 1 for each in sets)
        self._seen, self._sets_differ = seen, len(sets) > 1 or len(texts) < len(self._seen)
        return True

    def _drop_missing(self, of_head: Kind | None) -> None:
        """Forget the labels that stand for no label. Their rows are refused or skipped later."""
        numbers = {name: number for name, (number, _) in self._seen.items()}
        missing = missing_labels(numbers, signed=self.kind != "tokens")
        what, consequence = "label", "it is no class"
        if "score" in (self.kind, of_head) or self._has_fraction:
            # A score may be any number.
            what, consequence = "score", "its rows cannot be used"
            missing = {name for name in missing if not _is_finite(numbers[name])}
            suspects = {name for name in numbers if may_be_no_label(name)} - missing
            for name in sorted(suspects):
                self.notes.append(f"score {self._suspect(name)}; if so, remove these rows")
        for name in sorted(missing):
            self.notes.append(f"{what} {self._suspect(name)}, so {consequence}")
            if self._first_set is None:
                self.rows -= self._counts[name]
            del self._seen[name]

    def _suspect(self, name: str) -> str:
        _, where = self._seen[name]
        count = self._counts[name]
        return f"{name!r} ({count:,} times, first in {where}) looks like a missing label"

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
            _LIST_HINT if kind == "multi" and self._orders_differ else _LABEL_HINT,
        )

    def _check_count(self, kind: Kind, count: int, *, in_schema: bool, has_word: bool) -> None:
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
        if not has_word:
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
                    f"{first_at}",
                    "write one of the two in all rows: every class needs one name",
                )

    def _check_type(self, where: str, value: object, *, in_list: bool) -> None:
        """Raise a BadRow if a label, or an element of one, is missing or has the wrong type."""
        is_nan = isinstance(value, float) and math.isnan(value)
        if value is None or is_nan or (isinstance(value, str) and not value.strip()):
            raise BadRow(
                where,
                f"there is no label in '{self.column}'",
                hint="remove rows without a label; a text that has none of several labels has []",
            )
        value_type = str if isinstance(value, ClassName) else type(value)
        type_name = _TYPES.get(value_type, f"a {value_type.__name__}")
        allowed = ["a string", "a number", "a boolean", "a list"]
        if in_list:
            type_name = "a number with a point" if isinstance(value, float) else type_name
            allowed = allowed[:2]
        elif self.kind:
            in_rows = {"multi": ["a string", "a list"], "tokens": ["a list"]}
            allowed = in_rows.get(self.kind, allowed[:3])
        subject = "an element of" if in_list else "the label in"
        problem = f"{subject} '{self.column}' is {type_name}"
        value_text = f", {reprlib.repr(value)}"
        if type_name not in allowed:
            kinds = self.kind or "class, multi or score"
            raise BadRow(
                where,
                problem,
                f"{value_text}; kind {kinds} takes {' or '.join(allowed)}",
                _LIST_HINT if in_list else _LABEL_HINT,
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
            self._counts[name] += 1
            return name
        if isinstance(value, ClassName) and len(self.class_numbers) <= MAX_CLASSES:
            self.class_numbers[name] = value.number
        number: Number = None
        if isinstance(value, str):
            number = self._number_in(where, value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            number = value
        if number is None and self.kind == "score":
            detail = f": {reprlib.repr(value)}"
            problem = f"the score in '{self.column}' is not a number"
            raise BadRow(where, problem, detail, "write a number alone, such as 4.2")
        self._has_fraction |= number is not None and _is_finite(number) and number != int(number)
        if len(self._seen) <= MAX_CLASSES:
            self._seen[check_encodable(where, self.column, name)] = number, where
            self._counts[name] = 1
        return name

    def _number_in(self, where: str, text: str) -> Number:
        """Return the number that a string spells, and note how its fraction is written."""
        number = number_of(text)
        if number is not None:
            self._point_at = self._point_at or (where if "." in text else "")
        elif self._reads_commas and has_decimal_comma(text):
            number = number_with_comma(text)
            self.comma_at = self.comma_at or where
            self._are_thousands &= has_thousands_comma(text)
            # Also if all fractions are 0.
            self._has_fraction = True
        return number


def _is_finite(number: Number) -> bool:
    return number is not None and abs(number) <= sys.float_info.max
