"""Derive a task from a user's own rows.

The columns are named by the user or found by convention. The labels decide the kind of the task and
its classes.
"""

import itertools
import re
import reprlib
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn, get_args

from kdcli.data.documents import check_text, columns_in
from kdcli.data.labelled.examples import number_of
from kdcli.data.rows import BadRow, OnBadRow, Row, raise_bad_row
from kdcli.data.sources import CONLL_HINT, Log, is_conll
from kdcli.data.tasks import OWN
from kdcli.data.tasks.squad import IMPOSSIBLE_METRICS
from kdcli.errors import UsageError, did_you_mean
from kdcli.types import Head, Kind, Task

HEAD = 100  # Number of rows kept in memory to tell the columns apart.
MAX_CLASSES, CLASSES_LISTED = 1000, 10
MANY_ROWS = 50  # From this number on, labels that mostly differ are not accepted as classes.
# Maximum number of tokens per row. A `span` window has the length used for SQuAD, because it must
# hold the question, the overlap and more. A `text` row has the length used for summaries.
MAX_LENGTHS: Mapping[Kind, int] = {"span": 384, "text": 512}

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

# Column names, normalised by `_key`. The first group that matches a column decides. Two matching
# columns in one group are ambiguous.
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
    on_bad: OnBadRow = raise_bad_row,
    *,
    head: Head | None = None,
    ignores_labels: bool = False,
) -> Task:
    """Derive the task from the training rows, in one pass.

    The class names in the task's `labels` are the labels as strings. Tasks of the kinds `score`,
    `span` and `text` have no class names. If the rows have no labels, or labels are ignored, the
    task is what the model's head predicts, and its `label` is empty.

    Args:
        rows: all training rows. Their texts are not kept.
        columns: role -> column, with the roles of `_ROLES`. `text` may have a list of two columns.
            The key `kind` holds the kind of the task rather than a column.
        log: called with one sentence that describes the task.
        on_bad: called with each row whose label cannot be read. Such rows are ignored.
        head: what the head of the model predicts; None if there is no head.
        ignores_labels: whether the rows count as unlabelled, whatever columns they have.

    Raises:
        UsageError: a role or column does not exist or is ambiguous, there are no rows, or the
            labels do not fit any task.
    """
    kind, by_role = _parse_columns(columns)
    rest = iter(rows)
    first_rows = list(itertools.islice(rest, HEAD))
    if not first_rows:
        raise UsageError("the training data holds no examples")
    found = _Columns(first_rows, by_role)
    if head is not None and (ignores_labels or not found.has_label(head)):
        return _unlabelled_task(found, head, log)
    kind, texts, label = found.choose(kind)
    labels = _Labels(label, kind)
    for where, row in itertools.chain(first_rows, rest):
        try:
            if label not in row:
                raise BadRow(where, f"there is no column '{label}'; {columns_in(row)}")
            labels.add(where, row[label])
            labels.rows += 1
        except BadRow as error:
            on_bad(error)
    kind, names = labels.decide()
    impossible = kind == "span" and labels.empty > 0
    metrics = IMPOSSIBLE_METRICS if impossible else _METRICS[kind]
    message = f"task own: {labels.rows} examples of kind {kind}, {' and '.join(texts)} -> {label}"
    if names:
        metrics = _METRICS_OF_TWO if kind == "class" and len(names) == 2 else metrics
        message += f", {len(names)} classes"
        message += f" ({', '.join(names)})" if len(names) <= CLASSES_LISTED else ""
    if impossible:
        message += f", {labels.empty} without an answer"
    log(message + found.unused(*texts, label))
    length = MAX_LENGTHS.get(kind, Task.max_length)
    names = _names_of_head(names, head)
    return Task(OWN, kind, texts, metrics, names, label, impossible=impossible, max_length=length)


def _unlabelled_task(columns: "_Columns", head: Head, log: Log) -> Task:
    """Return the task of rows without labels."""
    texts = columns.texts(head.kind)
    log(
        f"task own: no labels, so {' and '.join(texts)} of each row is read as the model's head "
        f"reads it (kind {head.kind}){columns.unused(*texts)}"
    )
    length = MAX_LENGTHS.get(head.kind, Task.max_length)
    impossible = head.kind == "span"
    metrics = _METRICS[head.kind]
    return Task(
        OWN, head.kind, texts, metrics, head.labels, "", impossible=impossible, max_length=length
    )


def _names_of_head(names: tuple[str, ...], head: Head | None) -> tuple[str, ...]:
    """Return the class names of a head if the labels are among them, by name or by number."""
    if head is None or not head.named or not names:
        return names
    by_number = all(number_of(name) in range(len(head.labels)) for name in names)
    return head.labels if set(names) <= set(head.labels) or by_number else names


def _parse_columns(
    columns: Mapping[str, str | list[str]],
) -> tuple[Kind | None, dict[str, tuple[str, ...]]]:
    """Return the kind that the user gave, if any, and role -> columns."""
    roles = [*dict.fromkeys(itertools.chain(*_ROLES.values())), "kind"]
    by_role: dict[str, tuple[str, ...]] = {}
    for role, value in columns.items():
        if role not in roles:
            near = did_you_mean(role, roles)
            raise UsageError(
                f"unknown role 'data.columns.{role}'{near}", f"known: {', '.join(roles)}"
            )
        by_role[role] = (value,) if isinstance(value, str) else tuple(value)
        if len(by_role[role]) != 1 and not (
            role == "text" and len(by_role[role]) == 2 and "pair" not in columns
        ):
            raise UsageError(
                f"data.columns.{role} takes one column, got {value}",
                "for pairs, set data.columns.text and data.columns.pair",
            )
    (name,) = by_role.pop("kind", (None,))
    kind = next((k for k in KINDS if k == name), None)
    if name is not None and kind is None:
        near = did_you_mean(name, KINDS)
        raise UsageError(
            f"unknown kind 'data.columns.kind={name}'{near}", f"known: {', '.join(KINDS)}"
        )
    if "pair" in by_role and "text" in by_role:
        by_role["text"] += by_role.pop("pair")
    named = [column for names in by_role.values() for column in names]
    if repeated := [column for column in named if named.count(column) > 1]:
        raise UsageError(f"data.columns gives column '{repeated[0]}' two roles")
    return kind, by_role


# The kind of the task, the columns of the texts, and the column of the label. If the kind is None,
# the labels decide between class, multi and score.
_Choice = tuple[Kind | None, tuple[str, ...], str]


class _Columns:
    """The columns of the first rows, with the roles that the user gave to some of them.

    Attributes:
        head: the first rows.
        where, first: the place and the values of the first row.
        by_role: role -> columns, from the user.
        free: columns without a role, except ids.
        strings, lists: the free columns that hold strings or lists.
    """

    def __init__(self, head: list[Row], by_role: Mapping[str, tuple[str, ...]]) -> None:
        self.head = head
        self.where, self.first = head[0]
        self.by_role = by_role
        named = [column for names in by_role.values() for column in names]
        for column in named:
            if column not in self.first:
                near = did_you_mean(column, self.first)
                raise UsageError(
                    f"{self.where}: no column '{column}'{near}", columns_in(self.first)
                )
        self.free = [
            c
            for c in self.first
            if c not in named and _key(c) not in _IDS and not c.lower().endswith("_id")
        ]
        # In a CSV file, numbers are strings too.
        texts = {c: [row[c] for _, row in head if isinstance(row.get(c), str)] for c in self.free}
        self.strings = [c for c in self.free if any(number_of(text) is None for text in texts[c])]
        self.lists = [c for c in self.free if isinstance(self.first[c], list)]

    def has_label(self, head: Head) -> bool:
        """Whether a column holds labels: by its name or, if it is the only other one, by its
        values."""
        if "label" in self.by_role or "answers" in self.by_role:
            return True
        if head.kind == "span":
            return self._by_name("answers", (("answers",),), self.free) is not None
        if head.kind == "tokens":
            return self._by_name("label", _TAGS, self.lists) is not None
        if self._by_name("label", _LABEL, self.free) is not None:
            return True
        if len(self.free) != 2 or not self.strings:
            return False
        text = self._by_name("text", _TEXT, self.strings) or self.strings[0]
        (other,) = (c for c in self.free if c != text)
        values = {str(row.get(other)) for _, row in self.head}
        return bool(head.labels) and values <= set(head.labels)

    def texts(self, kind: Kind) -> tuple[str, ...]:
        """Choose the columns of the texts for rows without labels.

        Raises UsageError: several choices are possible, or none.
        """
        if kind == "span":
            columns = [self._column(role, ((role,),), self.free) for role in _ROLES[kind][:2]]
            for role, column in zip(_ROLES[kind], columns, strict=False):
                if column is None:
                    self._refuse(role, self.strings)
            return tuple(map(str, columns))
        if kind == "tokens":
            words = self._column("words", _WORDS, self.lists)
            return (words or self._text(),)
        return self._pair_or_text()

    def unused(self, *used: str) -> str:
        """List the columns that are not used, for a message."""
        unused = [c for c in self.first if c not in used]
        return f"; unused columns: {', '.join(unused)}" if unused else ""

    def choose(self, kind: Kind | None) -> _Choice:
        """Choose the columns for a kind, or for any kind if it is None.

        Raises UsageError: several choices are possible, or none.
        """
        kinds = [k for k in KINDS if kind in (None, k) and set(self.by_role) <= set(_ROLES[k])]
        if not kinds:
            roles = ", ".join(self.by_role)
            problem = f"kind {kind} does not take all of them" if kind else "no kind takes them all"
            known = "; ".join(f"{k} takes {', '.join(_ROLES[k])}" for k in KINDS)
            raise UsageError(f"data.columns gives {roles}, but {problem}", known)
        choice = self._span(must=kinds == ["span"]) if "span" in kinds else None
        if "tokens" in kinds and not choice:
            choice = self._tokens(must=kinds == ["tokens"])
        if "text" in kinds and not choice:
            choice = self._generation(must=kinds == ["text"])
        return choice or self._texts(kind)

    def _span(self, must: bool) -> _Choice | None:
        columns = {role: self._column(role, ((role,),), self.free) for role in _ROLES["span"]}
        if missing := [role for role, column in columns.items() if column is None]:
            return self._refuse(missing[0], self.free) if must else None
        question, context, answers = map(str, columns.values())
        return "span", (question, context), answers

    def _tokens(self, must: bool) -> _Choice | None:
        words = self._column("words", _WORDS, self.lists)
        tags = self._column("label", _TAGS, self.lists)
        others = [c for c in self.lists if c != words]
        tags = tags or (others[0] if words and len(others) == 1 else None)
        if words is None or tags is None:
            return self._refuse("label" if words else "words", others) if must else None
        if not must:
            if not isinstance(self.first[tags], list):
                return None
            label = self._by_name("label", _LABEL, [c for c in self.free if c not in self.lists])
            if "label" not in self.by_role and label and self._by_name("text", _TEXT, self.strings):
                self._refuse(
                    "kind",
                    KINDS,
                    f"is the label {tags} of {words} (kind tokens), or {label} of the text?",
                )
        return "tokens", (words,), tags

    def _generation(self, must: bool) -> _Choice | None:
        source, target = (self._column(role, ((role,),), self.strings) for role in _ROLES["text"])
        if source is None or target is None:
            return self._refuse("target" if source else "source", self.strings) if must else None
        # Next to a text, `target` may be a class and `source` the origin of the text.
        if not must and self._by_name("text", _TEXT, self.strings):
            return None
        return "text", (source,), target

    def _texts(self, kind: Kind | None) -> _Choice:
        label = self._column("label", _LABEL, self.free)
        texts = self._pair_or_text(label)
        rest = [c for c in self.free if c not in texts]
        return kind, texts, label or (rest[0] if len(rest) == 1 else self._refuse("label", rest))

    def _pair_or_text(self, label: str | None = None) -> tuple[str, ...]:
        """Choose the columns of the one or two texts."""
        by_key = {_key(c): c for c in self.strings if c != label}
        texts = self.by_role.get("text", ())
        if not texts and "pair" not in self.by_role:
            texts = next(
                ((by_key[a], by_key[b]) for a, b in _PAIRS if a in by_key and b in by_key), ()
            )
        return texts or (self._text(label), *self.by_role.get("pair", ()))

    def _text(self, label: str | None = None) -> str:
        if text := self._by_name("text", _TEXT, [c for c in self.free if c != label]):
            return text
        strings = [c for c in self.strings if c != label]
        return strings[0] if len(strings) == 1 else self._refuse("text", strings)

    def _column(self, role: str, groups: _Groups, candidates: list[str]) -> str | None:
        """Return the user's column for a role, or else the column that is named by convention."""
        if role in self.by_role:
            return self.by_role[role][0]
        return self._by_name(role, groups, candidates)

    def _by_name(self, role: str, groups: _Groups, candidates: list[str]) -> str | None:
        for group in groups:
            hits = [c for c in candidates if _key(c) in group]
            if len(hits) > 1:
                self._refuse(role, hits, f"which column holds the {role}, {' or '.join(hits)}?")
            if hits:
                return hits[0]
        return None

    def _refuse(self, role: str, choices: Iterable[str], question: str | None = None) -> NoReturn:
        """Ask the user for the column of a role."""
        file = self.where.rpartition(":")[0]
        if file.removesuffix(".gz").endswith(".txt"):
            hint = (
                CONLL_HINT
                if is_conll(Path(file), str(self.first["text"]))
                else "give jsonl, csv, tsv or parquet with a column of labels; or give a "
                "fine-tuned model, which is its own reference"
            )
            raise UsageError(f"{file} is plain text: its lines hold no labels", hint)
        question = question or f"which column holds the {role}?"
        for_pairs = "; for pairs also data.columns.pair" if role == "text" else ""
        raise UsageError(
            f"{self.where}: {question} {columns_in(self.first)}",
            f"give --set data.columns.{role}={'|'.join(choices) or 'NAME'}{for_pairs}",
        )


def _key(column: str) -> str:
    """Normalise a name, so that `Sentence_1`, `sentence 1` and `sentence1` are the same."""
    return re.sub(r"[\W_]", "", column.lower())


_TYPES = {
    str: "a string",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    list: "a list",
    dict: "an object",
}
_LABEL_HINT = "if the label is in another column, give --set data.columns.label=NAME"


class _Labels:
    """The labels of all training rows, added one by one.

    Memory does not grow with the number of rows.

    Attributes:
        rows: the number of labels.
        empty: the number of labels without a class or an answer.
    """

    def __init__(self, column: str, kind: Kind | None) -> None:
        self.column, self.kind = column, kind
        self.rows = self.empty = 0
        self._first_at = ""
        # Label as a string -> the number it spells and the first place where it occurs. At most
        # MAX_CLASSES + 1 labels are kept.
        self._seen: dict[str, tuple[int | float | None, str]] = {}
        self._types: dict[bool, tuple[str, str]] = {}
        self._first_set: frozenset[str] | None = None
        self._sets_differ = self._has_word = self._has_fraction = False
        self._infinite_at = ""

    def add(self, where: str, label: Any) -> None:
        """Add a row's label.

        Raises BadRow: the label is missing, does not fit the kind, or its type differs from the
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

    def decide(self) -> tuple[Kind, tuple[str, ...]]:
        """Return the kind of the task and the names of its classes.

        Numbers are ordered by size and other names alphabetically. For `tokens`, `O` comes first.

        Raises UsageError: there is only one label or too many, a label is not finite, or two
        labels are spellings of one class.
        """
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
        # The identity of a label: its number if all labels are numbers, otherwise its name without
        # surrounding white space.
        keys: dict[str, Any] = {
            name: name.strip() if number is None or self._has_word else number
            for name, (number, _) in self._seen.items()
        }
        self._check_several(kind, keys)
        if kind == "score":
            return kind, ()
        self._check_count(kind, len(keys))
        self._check_spellings(keys)
        order = {name: name if self._has_word else key for name, key in keys.items()}
        return kind, tuple(
            sorted(keys, key=lambda name: (kind == "tokens" and name != "O", order[name]))
        )

    def _check_several(self, kind: Kind, keys: Mapping[str, Any]) -> None:
        """Raise a UsageError if all rows have the same label."""
        if kind == "multi":
            differ = self._sets_differ
        else:
            differ = len(set(keys.values()) if kind == "score" else keys) > 1
        if differ:
            return
        unit, names = "word" if kind == "tokens" else "example", ", ".join(keys) or "[]"
        raise UsageError(
            f"{self._first_at}: from here on every {unit} has the label {names} in "
            f"'{self.column}': nothing to learn",
            _LABEL_HINT,
        )

    def _check_count(self, kind: Kind, count: int) -> None:
        """Raise a UsageError if there are too many labels for classes."""
        beyond = count > MAX_CLASSES
        mostly_differ = self.rows >= MANY_ROWS and 2 * count > self.rows
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

    def _check_spellings(self, keys: Mapping[str, Any]) -> None:
        """Raise a UsageError if one class is spelled in two ways."""
        by_key: dict[Any, str] = {}
        for name, key in keys.items():
            first = by_key.setdefault(key, name)
            if first != name:
                (_, first_at), (_, where) = self._seen[first], self._seen[name]
                raise UsageError(
                    f"{where}: the label {name!r} in '{self.column}' is spelled {first!r} at "
                    f"{first_at}"
                )

    def _check_type(self, where: str, value: Any, *, in_list: bool) -> None:
        """Raise a BadRow if a label, or an element of one, is missing or has the wrong type."""
        if value is None or (isinstance(value, str) and not value.strip()):
            raise BadRow(
                where,
                f"the label '{self.column}' is missing",
                hint="remove rows without a label",
            )
        type_name = _TYPES.get(type(value), f"a {type(value).__name__}")
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

    def _name(self, where: str, value: str | bool | int | float) -> str:
        """Return the name of a label, and remember what a new label looks like."""
        name = str(value)
        if name in self._seen:
            return name
        number: int | float | None
        if isinstance(value, str):
            number = number_of(value)
        else:
            number = None if isinstance(value, bool) else value
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
            self._seen[check_text(where, self.column, name)] = number, where
        return name
