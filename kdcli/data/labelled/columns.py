"""Choose the columns of a user's own rows: the columns that the user names, or else conventions."""

import itertools
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NoReturn, get_args

from kdcli.data import conll
from kdcli.data.labelled.label_values import number_of
from kdcli.data.readers import format_of, header_hint
from kdcli.data.rows import (
    MUCH_LONGER,
    TEXT_COLUMNS,
    Row,
    column_key,
    columns_in,
    median_length,
    names_in,
    strings_in,
    unused_columns,
)
from kdcli.data.sources import SPLIT
from kdcli.data.storage import base_name
from kdcli.errors import UsageError, check_known, did_you_mean
from kdcli.messages import log_fact
from kdcli.types import Head, Kind, Task

TASK_KINDS: tuple[Kind, ...] = get_args(Kind)
_ROLES: Mapping[Kind, tuple[str, ...]] = {
    **dict.fromkeys(("class", "multi", "score"), ("text", "pair", "label")),
    "tokens": ("words", "label"),
    "span": ("question", "context", "answers"),
    "text": ("source", "target"),
}
# Names as `column_key` writes them. The first group that matches a column decides. Two matching
# columns in one group are ambiguous.
_Groups = tuple[tuple[str, ...], ...]
_TEXT: _Groups = (*TEXT_COLUMNS, ("title",))
_LABEL: _Groups = (
    *(("label",), ("labels",), ("class",), ("target",), ("y",), ("goldlabel",)),
    ("category", "sentiment", "intent", "topic", "score", "rating", "stars"),
    ("similarityscore", "relatednessscore"),
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
    *(("text", "textpair"), ("query", "passage"), ("text1", "text2"), ("sentencea", "sentenceb")),
)
MANY_WORDS = 3
"""Number of words from which the name of a column looks like a text."""
FLAGS = ("0", "1", "0.0", "1.0", "False", "True")
_IDS = ("", "id", "idx", "guid", "index", "unnamed0")


def parse_columns(
    columns: Mapping[str, str | list[str]],
) -> tuple[Kind | None, dict[str, tuple[str, ...]]]:
    """Return the kind that the user gave, if any, and role -> columns."""
    roles = [*dict.fromkeys(itertools.chain(*_ROLES.values())), "kind"]
    by_role: dict[str, tuple[str, ...]] = {}
    for role, value in columns.items():
        check_known("role of data.columns", role, roles)
        by_role[role] = (value,) if isinstance(value, str) else tuple(value)
        if len(by_role[role]) != 1 and not (
            role == "text" and len(by_role[role]) == 2 and "pair" not in columns
        ):
            raise UsageError(
                f"data.columns.{role} takes one column, got {value}",
                "for pairs, set data.columns.text and data.columns.pair",
            )
    (name,) = by_role.pop("kind", (None,))
    kind = next((k for k in TASK_KINDS if k == name), None)
    if name is not None and kind is None:
        near = did_you_mean(name, TASK_KINDS)
        raise UsageError(
            f"unknown kind 'data.columns.kind={name}'{near}", f"known: {', '.join(TASK_KINDS)}"
        )
    if "pair" in by_role and "text" in by_role:
        by_role["text"] += by_role.pop("pair")
    named = [column for names in by_role.values() for column in names]
    if repeated := [column for column in named if named.count(column) > 1]:
        raise UsageError(f"data.columns gives column '{repeated[0]}' two roles")
    return kind, by_role


def columns_of_task(
    task: Task, first: list[Row], columns: Mapping[str, str | list[str]], *, withheld: bool
) -> Task:
    """Return a named task with the columns of some rows.

    A column of the task that the rows lack is the one that the user names, or else the one that
    `own` recognises.

    Args:
        task: The task, with its published columns.
        first: The first rows.
        columns: role -> column, from the user.
        withheld: Whether the rows may lack labels.

    Raises:
        UsageError: Several choices are possible, or none.
    """
    kind, by_role = parse_columns(columns)
    if kind not in (None, task.kind):
        raise UsageError(
            f"data.columns.kind={kind}, but {task.title} is of kind {task.kind}",
            "remove data.columns.kind, or give --task own",
        )
    names = names_in(first)
    wanted = task.texts if withheld else (*task.texts, task.label)
    if not by_role and set(wanted) <= set(names):
        return task
    where, _ = first[0]
    problem = f"{where}: {task.title} needs the columns {', '.join(wanted)}; {columns_in(names)}"
    if task.kind == "text" and len(task.texts) > 1:
        raise UsageError(problem, "rename the columns")
    published: dict[str, tuple[str, ...]] = {"text": task.texts, "label": (task.label,)}
    if task.kind in ("span", "text"):
        roles = zip(_ROLES[task.kind], (*task.texts, task.label), strict=False)
        published = {role: (column,) for role, column in roles}
    there = {role: of_role for role, of_role in published.items() if set(of_role) <= set(names)}
    chosen = Columns(first, there | by_role)
    if withheld:
        texts, label = chosen.texts(task.kind), task.label
    else:
        _, texts, label = chosen.choose(task.kind)
    for role, of_role in by_role.items():
        is_withheld = withheld and role in ("label", "answers")
        unread = [column for column in of_role if column not in (*texts, label)]
        if unread and not is_withheld:
            raise UsageError(
                f"{where}: data.columns.{role} is '{unread[0]}', but {task.title} reads "
                f"{' and '.join(texts)} -> {label}",
                f"remove data.columns.{role}, or name all texts of a row in data.columns.text",
            )
    if len(texts) != len(task.texts):
        if "text" in by_role:
            problem = (
                f"{where}: {task.title} reads {len(task.texts)} columns of text, but "
                f"data.columns names {' and '.join(texts)}"
            )
        raise UsageError(
            problem,
            "rename the columns, or name each one with --set data.columns.ROLE=NAME (ROLE: "
            f"{', '.join(_ROLES[task.kind])})",
        )
    log_fact(f"{chosen.file}: {task.title} reads {' and '.join(texts)} -> {label}")
    return replace(task, texts=texts, label=label)


ColumnChoice = tuple[Kind | None, tuple[str, ...], str]
"""The kind of the task, the columns of the texts, and the column of the label.

If the kind is None, the labels decide between class, multi and score.
"""


class Columns:
    """The columns of the first rows, with the roles that the user gave to some of them.

    Attributes:
        head: The first rows.
        where: The place of the first row.
        names: All columns.
        by_role: role -> columns, from the user.
        free: Columns without a role, except ids.
        strings, lists: The free columns that hold strings or lists.
    """

    def __init__(self, head: list[Row], by_role: Mapping[str, tuple[str, ...]]) -> None:
        self.head = head
        self.where, _ = head[0]
        self.names = names_in(head)
        self._check_header()
        self.by_role = by_role
        named = [column for names in by_role.values() for column in names]
        for column in named:
            if column not in self.names:
                near = did_you_mean(column, self.names)
                raise UsageError(
                    f"{self.where}: no column '{column}'{near}", columns_in(self.names)
                )
        self.free = [
            c
            for c in self.names
            if c not in named and column_key(c) not in _IDS and not c.lower().endswith("_id")
        ]
        # In a CSV file, numbers are strings too.
        self.strings = [
            c for c in self.free if any(number_of(text) is None for text in strings_in(head, c))
        ]
        self.lists = [c for c in self.free if _holds_lists(head, c)]

    def _check_header(self) -> None:
        """Raise a UsageError if the names of the columns look like a row of CSV or TSV."""
        hint = header_hint(self.file)
        last = self.names[-1] if self.names else ""
        tags = [last, *(str(values.get(last)) for _, values in self.head)]
        if hint and all(map(conll.TAG.fullmatch, tags)):
            raise UsageError(
                f"{self.file} has words and tags on its lines, but no names of columns",
                conll.RENAME_HINT,
            )
        positions = set(map(str, range(len(self.names))))
        like_values = [
            name
            for name in self.names
            if any(values.get(name) == name for _, values in self.head)
            or (number_of(name) is not None and name not in positions)
        ]
        long = [n for n in self.names if n not in like_values and len(n.split()) >= MANY_WORDS]
        if hint and like_values and len(like_values + long) > 1:
            raise UsageError(
                f"{self.file}:1 looks like a row, but it must name the columns: "
                f"{' and '.join(map(repr, [*long, *like_values]))}",
                hint,
            )

    @property
    def file(self) -> str:
        """The file of the first row."""
        return self.where.rpartition(":")[0]

    def check_unlabelled(self, rest: Iterable[Row], head: Head) -> None:
        """Check that the rows after the first ones have no labels either.

        Raises:
            UsageError: A later row has a label.
        """
        for where, values in rest:
            row = Row(where, values)
            if values.keys() - self.names and Columns([row], {}).has_label(head):
                raise UsageError(
                    f"{where}: there is a label, but none in the first {len(self.head)} rows",
                    "give labels in all rows, or name their column with --set "
                    "data.columns.label=NAME",
                )

    def has_label(self, head: Head) -> bool:
        """Whether a column holds labels, by its role, its name or its values."""
        if "label" in self.by_role or "answers" in self.by_role:
            return True
        if head.kind == "span":
            return self._by_name("answers", (("answers",),), self.free) is not None
        if head.kind == "tokens":
            return self._by_name("label", _TAGS, self.lists) is not None
        if self._by_name("label", _LABEL, self.free) is not None:
            return True
        values = {c: {str(row.get(c)) for _, row in self.head} for c in self.free}
        is_class = head.kind != "score"
        return is_class and any(each <= set(head.labels) for each in values.values())

    def texts(self, kind: Kind) -> tuple[str, ...]:
        """Choose the columns of the texts for rows without labels.

        Raises:
            UsageError: Several choices are possible, or none, or a column has a role that rows of
                this kind do not have.
        """
        if others := [role for role in self.by_role if role not in _ROLES[kind]]:
            raise UsageError(
                f"data.columns gives {', '.join(others)}, but rows of kind {kind} take "
                f"{', '.join(_ROLES[kind])}",
                f"remove data.columns.{others[0]}",
            )
        if kind == "tokens":
            words = self._column("words", _WORDS, self.lists)
            return (words or self._text(),)
        if self.lists and not self.strings:
            raise UsageError(
                f"{self.where}: the model reads texts, but '{self.lists[0]}' holds lists",
                "write the words of each row as one text; or fine-tune a token classifier first "
                "(kdcli finetune)",
            )
        if kind == "span":
            found = self._by_roles(_ROLES[kind][:2], self.strings, must=True)
            return tuple(found or ())
        if kind == "text":
            return (self._column("source", (("source",),), self.strings) or self._text(),)
        return self._pair_or_text()

    def unused(self, *used: str) -> str:
        """List the columns that are not used, for a message."""
        return unused_columns(self.names, used)

    def names_of_numbers(self, label: str) -> tuple[str, dict[str, str]]:
        """Return the column that names the numbers of the label, and number -> name.

        Such a column is called like that of the label, for example `label_text`, and has one name
        for each number in the first rows. Both are empty if there is none.
        """
        wanted = {f"{column_key(label)}{end}" for end in ("text", "name", "names", "string")}
        for column in self.strings:
            if column_key(column) not in wanted:
                continue
            pairs = {(str(row.get(label)), str(row.get(column))) for _, row in self.head}
            names = dict(pairs)
            one_to_one = len(pairs) == len(names) == len(set(names.values()))
            if one_to_one and all(isinstance(number_of(number), int) for number in names):
                return column, dict(sorted(names.items(), key=lambda pair: int(pair[0])))
        return "", {}

    def describe_splits(self, *used: str) -> str | None:
        """Return a warning if an unused column tells which split a row belongs to."""
        for column in self.names:
            values = dict.fromkeys(str(row.get(column)) for _, row in self.head)
            are_splits = all(SPLIT.fullmatch(value.lower()) for value in values)
            if column not in used and are_splits:
                return (
                    f"column '{column}' holds {', '.join(values)}, but all rows are read as one "
                    "split; to divide them, save each split as a file with its name, such as "
                    "train.csv and test.csv, and give their directory"
                )
        return None

    def longer_text(self, kind: Kind, texts: tuple[str, ...], label: str = "") -> str | None:
        """Return a warning if an unused column holds much longer text than the chosen ones.

        Args:
            kind: The kind of the task.
            texts: The columns of the texts.
            label: The column of the label.

        Returns None also if the user named the columns, or for kinds with several roles of texts.
        """
        role = "source" if kind == "text" else "text"
        if kind in ("tokens", "span") or {role, "pair"} & self.by_role.keys():
            return None
        lengths = {column: median_length(self.head, column) for column in self.names}
        chosen = max(texts, key=lengths.__getitem__)
        others = [c for c in self.strings if c not in (*texts, label)]
        longest = max(others, key=lengths.__getitem__, default=chosen)
        length, other = lengths[chosen], lengths[longest]
        if other <= MUCH_LONGER * length:
            return None
        return (
            f"using '{chosen}' as the text (median {length:.0f} characters), but the unused column "
            f"'{longest}' is longer (median {other:.0f}); to use it instead, add --set "
            f"data.columns.{role}={longest}"
        )

    def choose(self, kind: Kind | None) -> ColumnChoice:
        """Choose the columns for a kind, or for any kind if it is None.

        Raises:
            UsageError: Several choices are possible, or none.
        """
        kinds = [k for k in TASK_KINDS if kind in (None, k) and set(self.by_role) <= set(_ROLES[k])]
        if not kinds:
            roles = ", ".join(self.by_role)
            problem = f"kind {kind} does not take all of them" if kind else "no kind takes them all"
            known = "; ".join(f"{k} takes {', '.join(_ROLES[k])}" for k in TASK_KINDS)
            raise UsageError(f"data.columns gives {roles}, but {problem}", known)
        if "span" in kinds:
            columns = self._by_roles(_ROLES["span"], self.free, must=kinds == ["span"])
            if columns is not None:
                return "span", (columns[0], columns[1]), columns[2]
        if "tokens" in kinds and (choice := self._tokens(must=kinds == ["tokens"])):
            return choice
        # Next to a text, `target` may be a class and `source` the origin of the text.
        must = kinds == ["text"]
        if "text" in kinds and (must or not self._by_name("text", _TEXT, self.strings)):
            columns = self._by_roles(_ROLES["text"], self.strings, must=must)
            if columns is not None:
                return "text", (columns[0],), columns[1]
        label = self._column("label", _LABEL, self.free)
        texts = self._pair_or_text(label)
        rest = [c for c in self.free if c not in texts]
        # Without another column, one that looks like an id may be the label.
        rest = rest or [c for c in self.names if c not in texts]
        return kind, texts, label or self._refuse("label", rest)

    def _by_roles(
        self, roles: Sequence[str], candidates: list[str], *, must: bool
    ) -> list[str] | None:
        """Return the columns that the user named for roles, or that have the names of the roles."""
        found = [self._column(role, ((role,),), candidates) for role in roles]
        if must and None in found:
            self._refuse(roles[found.index(None)], candidates)
        columns = [column for column in found if column is not None]
        return columns if len(columns) == len(roles) else None

    def _tokens(self, must: bool) -> ColumnChoice | None:
        words = self._column("words", _WORDS, self.lists)
        tags = self._column("label", _TAGS, self.lists)
        if words is None or tags is None:
            others = [c for c in self.lists if c != words]
            return self._refuse("label" if words else "words", others) if must else None
        if not must:
            if "label" in self.by_role and not _holds_lists(self.head, tags):
                return None
            label = self._by_name("label", _LABEL, [c for c in self.free if c not in self.lists])
            if "label" not in self.by_role and label and self._by_name("text", _TEXT, self.strings):
                self._refuse(
                    "kind",
                    TASK_KINDS,
                    f"is the label {tags} of {words} (kind tokens), or {label} of the text?",
                )
        return "tokens", (words,), tags

    def _pair_or_text(self, label: str | None = None) -> tuple[str, ...]:
        """Choose the columns of the one or two texts."""
        by_key = {column_key(c): c for c in self.strings if c != label}
        texts = self.by_role.get("text", ())
        if not texts and "pair" not in self.by_role:
            texts = next(
                ((by_key[a], by_key[b]) for a, b in _PAIRS if a in by_key and b in by_key), ()
            )
        return texts or (self._text(label), *self.by_role.get("pair", ()))

    def _text(self, label: str | None = None) -> str:
        strings = [c for c in self.strings if c != label]
        found = self._by_name("text", _TEXT, strings)
        others = [c for c in self.free if c != label and c not in self.lists]
        return found or self._refuse("text", strings or others)

    def _column(self, role: str, groups: _Groups, candidates: list[str]) -> str | None:
        """Return the user's column for a role, or else the column that is named by convention."""
        if role in self.by_role:
            return self.by_role[role][0]
        return self._by_name(role, groups, candidates)

    def _by_name(self, role: str, groups: _Groups, candidates: list[str]) -> str | None:
        for group in groups:
            hits = [c for c in candidates if column_key(c) in group]
            if len(hits) > 1:
                self._refuse(role, hits, f"which column holds the {role}, {' or '.join(hits)}?")
            if hits:
                return hits[0]
        return None

    def _refuse(self, role: str, choices: Sequence[str], question: str | None = None) -> NoReturn:
        """Ask the user for the column of a role."""
        file = self.file
        form = format_of(base_name(file))
        if form is not None and form.name == "txt":
            hint = (
                conll.RENAME_HINT
                if conll.LINE.fullmatch(str(self.head[0][1]["text"]))
                else "give jsonl, csv, tsv or parquet with a column of labels; or give a "
                "fine-tuned model, which is its own reference"
            )
            raise UsageError(f"{file} is plain text: its lines hold no labels", hint)
        question = question or f"which column holds the {role}?"
        for_pairs = ""
        if role == "text":
            names = {column_key(column) for column in self.names}
            is_label_known = "label" in self.by_role or names & {*itertools.chain(*_LABEL)}
            for_label = "" if is_label_known else "; for the labels also data.columns.label"
            for_pairs = f"{for_label}; for pairs also data.columns.pair"
            if names & {*itertools.chain(*_WORDS)}:
                for_pairs += (
                    '; for a label of each word, write lists, such as {"tokens": ["Ann", "left"], '
                    '"tags": ["B-PER", "O"]} in .jsonl'
                )
        flags = [c for c in choices if all(str(v.get(c)) in FLAGS for _, v in self.head)]
        if role == "label" and len(flags) > 1:
            for_pairs = (
                f"; if {' and '.join(flags)} say which labels a text has, write the names of these "
                "labels as a list in one column"
            )
        header = f"; {header_hint(self.file)}" if header_hint(self.file) else ""
        first, *others = choices or [""]
        if first:
            # A shell would read a list of choices with bars between them as a pipe.
            alternatives = f" (or {', '.join(others)})" if others else ""
            hint = (
                f"give --set {shlex.quote(f'data.columns.{role}={first}')}{alternatives}{for_pairs}"
            )
        elif role == "label":
            hint = (
                "add a column with the label of each row; without labels, kdcli compress and "
                "distill learn from the answers of a fine-tuned model"
            )
        else:
            hint = (
                "no column can hold it: add one, or name another kind with --set data.columns.kind"
            )
        raise UsageError(f"{self.where}: {question} {columns_in(self.names)}", f"{hint}{header}")


def _holds_lists(rows: Iterable[Row], column: str) -> bool:
    return any(isinstance(values.get(column), list) for _, values in rows)
