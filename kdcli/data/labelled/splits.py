"""Find the splits of a labelled task in files, on the hub or in the demo, and read them."""

import itertools
import math
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kdcli.data import demo
from kdcli.data.accounts import BAD, RowAccount
from kdcli.data.annotations import WORD, check_accepted
from kdcli.data.hub import HubId
from kdcli.data.labelled.columns import columns_of_task
from kdcli.data.labelled.kept import kept_rows
from kdcli.data.labelled.label_values import (
    IGNORED_WORD,
    NO_LABEL_NUMBERS,
    as_cell,
    class_number,
    labels_in,
    may_be_no_label,
    number_of,
    number_with_comma,
    single_label,
)
from kdcli.data.labelled.own import own_task
from kdcli.data.labelled.partition import (
    DividedRows,
    Partition,
    Pools,
    deciding_hashes,
    hashes_of,
)
from kdcli.data.labelled.request import RowsRequest
from kdcli.data.labelled.row_checks import WHOLE, BadRows, describe_repeats
from kdcli.data.rows import (
    FIRST_ROWS,
    BadRow,
    ClassName,
    OnBadRow,
    Remark,
    Row,
    RowValues,
    check_encodable,
    columns_in,
)
from kdcli.data.sources import (
    DemoSource,
    FileSource,
    HubSource,
    Source,
    describe_missing_parts,
    describe_unread,
    open_source,
)
from kdcli.data.storage import NotFound, base_name, list_folder, list_names
from kdcli.data.tasks import task_of
from kdcli.disk import user_path
from kdcli.errors import UsageError
from kdcli.listing import class_name, listed, numbered_classes
from kdcli.messages import log_fact, warn
from kdcli.types import (
    IGNORED,
    NAMED_BY,
    OWN,
    Answer,
    Example,
    Head,
    Kind,
    LabelAccount,
    RowHashes,
    Task,
)

IDS = ("id", "idx", "guid")  # Columns that may hold the id of an example.
_short = reprlib.repr
_COLUMN_HINT = (
    "all rows of all splits need the same columns; if the column has another name, give --set "
    "data.columns.ROLE=NAME"
)
_Label = int | float | str | tuple[int, ...] | tuple[Answer, ...]


@dataclass(frozen=True)
class TaskSource:
    """The places of a task's rows, and how its rows are read.

    Attributes:
        task: The task.
        source: The value of `--data`; None for the hub, or the demo.
        train_source: The source of the training split if it is another one.
        on_bad: Called with each row that does not fit the task.
        withheld: Whether rows may lack labels.
        columns: role -> column, from the user.
        refused: The places of rows whose labels do not fit the other labels.
        account: Counts the rows that are read.
        examples: All examples that were read.
    """

    task: Task
    source: str | None
    train_source: str | None
    on_bad: OnBadRow
    withheld: bool
    columns: Mapping[str, str | list[str]] = field(default_factory=dict)
    refused: tuple[str, ...] = ()
    account: RowAccount = field(default_factory=lambda: RowAccount(""))
    examples: list[Example] = field(default_factory=list)

    def training_split(self, *, needed: bool) -> tuple[Source, str]:
        """Return the source of the training examples and the name of their set.

        Raises:
            UsageError: `needed` is set, and there is no training split.
        """
        task, source = self.task, self.source
        name = task.sets[0] if task.sets else ""
        where = task.hub_train or task.hub
        if self.train_source is not None:
            return open_source(self.train_source), name
        if source is None:
            return (open_source("demo") if where is None else _hub_source(where, "")), name
        opened, folders = self._open(source)
        if opened is not None and (opened.has("train") or not folders):
            return opened, name
        # There are only folders of sets. Cross-lingual tasks are trained on the first set, English.
        first = open_source(str(user_path(source) / folders[0]))
        if needed and not first.has("train"):
            raise UsageError(
                f"{task.title}: no training split in {source} or its folder {folders[0]}/",
                "give training data of the same form with --set data.train=SOURCE",
            )
        return first, folders[0]

    def evaluation_splits(self, split: str) -> dict[str, tuple[Source, str]]:
        """Return the source and split of each evaluation set. Missing sets are skipped and
        logged."""
        task, source = self.task, self.source
        if source is None:
            if task.hub is None:
                return {"": (open_source("demo"), split)}
            named = task.split.replace("validation", split)
            return {
                name: (_hub_source(task.hub, name), named.replace("{set}", name))
                for name in task.sets or ("",)
            }
        whole, folders = self._open(source)
        opened = {name: open_source(str(user_path(source) / name)) for name in folders}
        splits = {name: (of_set, split) for name, of_set in opened.items() if of_set.has(split)}
        if whole is not None and not splits:
            splits = {
                name: (whole, f"{split}_{name}")
                for name in task.sets
                if whole.has(f"{split}_{name}")
            }
            if not splits and whole.has(split):
                # A split without a set in its name is the first set: matched, or English.
                splits = {task.sets[0] if task.sets else "": (whole, split)}
        missing = [name for name in task.sets if name not in splits]
        if splits and missing:
            log_fact(
                f"{task.name}: evaluating on {', '.join(splits)}; missing: {', '.join(missing)}"
            )
        return splits

    def _open(self, source: str) -> tuple[Source | None, list[str]]:
        """Open a source, and list the sets that have a folder in it.

        The source is None if it contains nothing but such folders.
        """
        folders = [name for name in self.task.sets if (user_path(source) / name).is_dir()]
        try:
            return open_source(source), folders
        except NotFound:
            if not folders:
                raise
            return None, folders

    @property
    def is_one_file(self) -> bool:
        """Whether the source is one file, or several without a split in their names.

        Such files count as `train`.
        """
        whole = None if self.source is None else self._open(self.source)[0]
        return isinstance(whole, FileSource) and list(whole.files) == ["train"]

    @property
    def content(self) -> str:
        """The content of a directory for a message; "" for other sources."""
        if self.source and user_path(self.source).is_dir():
            return f"; it holds {list_folder(user_path(self.source))}"
        return ""

    def read(self, source: Source, split: str) -> list[Example]:
        """Read the examples of a split.

        Raises:
            UsageError: There is no such split, or a file has no rows.
        """
        files = source.files.get(split, ()) if isinstance(source, FileSource) else ()
        if len(files) > 1:
            names = list_names([base_name(file) for file in files])
            log_fact(f"{split} is read from {len(files)} files: {names}")
        if (unread := describe_unread(source, self.task.sets)) and not self.examples:
            log_fact(unread)
        if missing := describe_missing_parts(map(base_name, files)):
            warn(f"{split}: {missing}")
        examples, bad_rows, account = _read_examples(
            self._task_in(source, split), source, split, self.refused, withheld=self.withheld
        )
        self.account.add(account)
        for row in bad_rows:
            self.on_bad(row)
        self.examples.extend(examples)
        return examples

    def _task_in(self, source: Source, split: str) -> Task:
        """Return the task with the columns that the rows of a split have."""
        if self.task.name == OWN:
            return self.task
        if isinstance(source, DemoSource):
            if self.columns and self.train_source in (None, self.source):
                roles = " and ".join(f"data.columns.{role}" for role in self.columns)
                raise UsageError(
                    f"{self.task.title}: {roles} cannot be used, because the demo has no columns",
                    "remove data.columns, or give your own rows with --data",
                )
            return self.task
        rows = (row for _, row in read_numbered_rows(source, split, lambda error: None))
        first = list(itertools.islice(rows, FIRST_ROWS))
        if not first:
            return self.task
        return columns_of_task(self.task, first, self.columns, withheld=self.withheld)

    def read_sets(self, places: Mapping[str, tuple[Source, str]]) -> dict[str, list[Example]]:
        """Read evaluation sets, set -> examples, from the places of `evaluation_splits`."""
        return {name: self.read(source, split) for name, (source, split) in places.items()}


@dataclass(frozen=True)
class Splits(DividedRows):
    """All examples of a task.

    Attributes:
        task: The task.
        train: The training split.
        train_set: The set that the training split belongs to.
        validation, test: set -> examples; empty if there is no such split.
    """

    task: Task
    train: list[Example]
    train_set: str
    validation: dict[str, list[Example]]
    test: dict[str, list[Example]]

    def pools(self, trained: RowHashes) -> Pools:
        """Return the hashes of the rows of each split. `trained` has the models' training rows."""
        parts = [[e for _, e in part] for part in self._by_split()]
        hashes = [deciding_hashes(self.task, examples) for examples in parts]
        known = [h[np.isin(hashes_of(e), trained)] for h, e in zip(hashes, parts, strict=True)]
        train, validation, test = hashes
        return Pools(train, validation, test, np.concatenate(known))

    def notes(self) -> list[str]:
        """Return a note if texts are repeated."""
        evaluated = itertools.chain(*self.validation.values(), *self.test.values())
        return list(filter(None, [describe_repeats(self.task, [*self.train, *evaluated], WHOLE)]))

    def training_texts(self, partition: Partition) -> Iterable[str]:
        """Return every different text of the training examples of a partition."""
        return dict.fromkeys(text for e in self.training(partition) for text in e.texts)

    def training(self, partition: Partition) -> list[Example]:
        """Return the training examples of a partition."""
        kept = partition.is_training(deciding_hashes(self.task, self.train))
        return list(itertools.compress(self.train, kept))

    def evaluated(self, partition: Partition, split: str) -> dict[str, list[Example]]:
        """Return the evaluation examples of a partition, set -> examples.

        An example that is in several splits is taken from the last one: test, else validation.

        Raises:
            UsageError: The partition names no row of this data.
        """
        parts = self._by_split()
        hashes = [deciding_hashes(self.task, [e for _, e in part]) for part in parts]
        chosen = partition.evaluated_rows(hashes, split, "row")
        sets: dict[str, list[Example]] = {}
        rows = itertools.chain.from_iterable(map(itertools.compress, parts, chosen))
        for name, example in rows:
            sets.setdefault(name, []).append(example)
        return sets

    def _by_split(self) -> list[list[tuple[str, Example]]]:
        """Return the training, validation and test examples, each with its set."""
        sets = ({self.train_set: self.train}, self.validation, self.test)
        return [[(name, e) for name, of_set in part.items() for e in of_set] for part in sets]


def read_splits(rows: TaskSource) -> Splits:
    """Read every split of a task. Only an own task has a test split, because others hide labels."""
    source, train_set = rows.training_split(needed=False)
    train = rows.read(source, "train") if source.has("train") else []
    validation = rows.read_sets(rows.evaluation_splits("validation"))
    test: dict[str, list[Example]] = {}
    if rows.task.name == OWN:
        test = rows.read_sets(rows.evaluation_splits("test"))
    # A training split without a set of its own extends the first set that is evaluated.
    return Splits(rows.task, train, next(iter(validation), train_set), validation, test)


def read_numbered_rows(source: Source, split: str, on_bad: OnBadRow) -> Iterator[tuple[int, Row]]:
    """Yield the rows of a split, each with its number in its file.

    Raises:
        UsageError: A file has no rows.
    """
    for name, table in source.tables(split, on_bad):
        number = -1
        for number, row in enumerate(table):
            yield number, row
        if number < 0:
            raise UsageError(f"{name} holds no rows")


def describe_needed_files(name: str, split: str, *, training: bool, withheld: bool) -> str:
    """Describe the files and columns that a task needs, for a message.

    Args:
        name: The task.
        split: The split to evaluate on.
        training: Whether the training split is needed.
        withheld: Whether labels are ignored.
    """
    formats = "(.jsonl, .csv, .tsv, .parquet, each also .gz)"
    needed = ["train.*"] if training else []
    if name == OWN:
        optional = " and optionally validation.*" if training and split == "validation" else ""
        files = " and ".join(needed if optional else [*needed, f"{split}.*"])
        return f"a file, or a directory with {files}{optional} {formats}"
    task = task_of(name)
    if "{set}" in task.split:
        needed += [f"{split}_{s}.*" for s in task.sets]
    elif task.sets:
        needed = [f"train.* or {task.sets[0]}/train.*"] if training else []
        needed.append(f"LANGUAGE/{split}.* (LANGUAGE: {', '.join(task.sets)})")
    else:
        needed.append(f"{split}.*")
    label = f"{task.label} ({', '.join(task.labels)})" if task.labels else task.label
    columns = task.texts if withheld else (*task.texts, label)
    return f"a directory with {', '.join(needed)} {formats} and the columns {', '.join(columns)}"


def _hub_source(where: tuple[str, str | None], name: str) -> Source:
    """Return a data set of the hub; `{set}` in its configuration becomes the set's name."""
    repository, config = where
    config = config.replace("{set}", name) if config else None
    return HubSource(f"{repository}{':' + config if config else ''}", HubId(repository, config))


@kept_rows
def _read_examples(
    task: Task, source: Source, split: str, refused: tuple[str, ...], *, withheld: bool
) -> tuple[list[Example], list[BadRow], RowAccount]:
    """Return the examples of a split, the rows that cannot be read, and the account of both."""
    refused_places = frozenset(refused)
    bad_rows: list[BadRow] = []
    account = RowAccount(source.name)
    if isinstance(source, DemoSource):
        examples = _demo_examples(task, split)
        account.read = len(examples)
        return examples, bad_rows, account

    def on_bad(row: BadRow) -> None:
        if isinstance(row, Remark):
            account.on_bad(row)
            return
        bad_rows.append(row)
        account.read += 1
        account.leave_out(BAD, row.where)

    examples = []
    for number, row in read_numbered_rows(source, split, on_bad):
        try:
            if row.where in refused_places:
                raise BadRow(row.where, "the label does not fit the other labels")
            examples.append(example_of(task, row, number, withheld=withheld))
            account.read += 1
        except BadRow as error:
            on_bad(error)
    return examples, bad_rows, account


def _demo_examples(task: Task, split: str) -> list[Example]:
    if task.name not in (OWN, *demo.TASKS):
        raise UsageError(
            f"the demo has no {task.title}",
            f"its tasks: {', '.join(demo.TASKS)}; or give --data",
        )
    if split not in demo.DOCUMENTS:
        raise UsageError(f"the demo has no {split} split; it has {', '.join(demo.DOCUMENTS)}")
    if task.name == OWN:
        return [
            Example(f"demo {split}", str(i), (text,), None)
            for i, text in enumerate(demo.demo_sentences(split))
        ]
    rows = demo.demo_task(task.name, split)
    return [Example(f"demo {split}", str(i), (e.text,), e.label) for i, e in enumerate(rows)]


def open_task(
    request: RowsRequest,
    bad_rows: BadRows,
    *,
    preferred: tuple[str, ...],
    head: Head | None,
    trains: bool,
    withheld: bool,
) -> TaskSource:
    """Return the places of a task's rows, and log its classes.

    Args:
        request: Which rows to read.
        bad_rows: Collects the rows that cannot be used.
        preferred, head, trains: See `_own_task`.
        withheld: Whether the rows count as unlabelled.

    Raises:
        UsageError: The task is unknown, or its rows fit no task.
    """
    if request.task == OWN:
        task = _own_task(
            request,
            bad_rows,
            preferred=preferred,
            head=head,
            trains=trains,
            ignores_labels=withheld,
        )
    else:
        task = task_of(request.task)
    has_labels = bool(task.label) and not withheld
    task = replace(task, account=task.account or _account_of(task, has_labels=has_labels))
    for line in describe_account(task):
        log_fact(line)
    return TaskSource(
        task,
        request.source,
        request.train_source,
        bad_rows,
        withheld=not has_labels,
        columns=request.columns,
        refused=bad_rows.places,
        account=RowAccount(request.source or request.task),
    )


def _own_task(
    request: RowsRequest,
    bad_rows: BadRows,
    *,
    preferred: tuple[str, ...],
    head: Head | None,
    trains: bool,
    ignores_labels: bool,
) -> Task:
    """Derive the task of the user's own rows.

    Args:
        request: Which rows to read.
        bad_rows: Collects the rows whose labels cannot be read.
        preferred: The splits that the task is derived from, the first choice first.
        head: What a model's head predicts.
        trains: Whether a model learns from the rows.
        ignores_labels: Whether the rows count as unlabelled.

    Raises:
        UsageError: No source is given, or the rows fit no task.
    """
    source = request.source if request.train_source is None else request.train_source
    if request.source is None or source is None:
        raise UsageError(
            "no data given", "add --data: a file, or a directory with train.* and validation.*"
        )
    opened = open_source(source)
    # There may be no training split, but only one to evaluate on.
    present = [split for split in (*preferred, *opened.splits()) if opened.has(split)]
    split = present[0] if present else preferred[-1]
    try:
        rows = (row for _, row in read_numbered_rows(opened, split, bad_rows))
        return own_task(
            rows,
            request.columns,
            bad_rows,
            head=head,
            trains=trains,
            ignores_labels=ignores_labels,
        )
    except UsageError:
        if not request.skip_bad:
            # Bad rows are the likely cause, so report them first.
            bad_rows.settle(0, skip=False)
        raise


def _account_of(task: Task, *, has_labels: bool) -> LabelAccount | None:
    """Return the label account of a task with a name."""
    if not task.labels:
        return None
    return LabelAccount(task.labels, "task", "name" if has_labels else "none")


def describe_account(task: Task) -> list[str]:
    """Return a line that says what the classes are, where their names come from, and how labels
    were read as classes. A task without classes has none."""
    account = task.account
    if account is None:
        return []
    classes = numbered_classes(account.names)
    source = NAMED_BY[account.names_from]
    line = f"classes of {task.title}: {classes}; their names are from {source}"
    if account.numbers:
        read = listed(f"{number} is {class_name(name)}" for number, name in account.numbers.items())
        line += (
            "; the data and the model have no names of classes in common, so their numbers decide: "
            f"{read}; if this is wrong, write names into the data, or set head.label_map"
        )
    elif account.mapping in ("number", "order"):
        line += "; the model's classes have no names, so its outputs are taken in this order"
    return [line]


def example_of(task: Task, row: Row, number: int, *, withheld: bool = False) -> Example:
    """Check a row, and convert it to an example of the task.

    Args:
        task: The task.
        row: The row.
        number: The number of the row in its file. It is the example's id if the row has none.
        withheld: Whether the split may have no labels, as test sets do. A missing label, or GLUE's
            -1, is then not an error.

    Raises:
        BadRow: A column is missing or has the wrong type, or the label does not belong to the task.
    """
    where, values = row
    check_accepted(where, values, task.label)
    example_id = next((values[c] for c in IDS if values.get(c) is not None), number)
    read = _words if task.kind == "tokens" else _texts
    texts = read(task, where, values)
    name = check_encodable(where, "id", str(example_id))
    label = as_cell(values.get(task.label))
    if withheld and (label is None or str(label) in ("-1", "-1.0")):
        return Example(where, name, texts, None)
    if label is None:
        problem = "is empty" if task.label in values else f"is missing; {columns_in(values)}"
        raise BadRow(
            where,
            f"column '{task.label}', the label of {task.title}, {problem}",
            hint=_COLUMN_HINT,
        )
    return Example(where, name, texts, _LABELS[task.kind](task, where, label, texts))


def _texts(task: Task, where: str, values: RowValues) -> tuple[str, ...]:
    for column in task.texts:
        if column not in values:
            problem = f"{task.title} needs the column '{column}'; {columns_in(values)}"
            raise BadRow(where, problem, hint=_COLUMN_HINT)
        if task.kind == "text" and isinstance(values[column], dict):
            # The answers of SQuAD. The question belongs to the first one.
            answers = _answers(replace(task, label=column), where, values[column], ())
            values = {**values, column: answers[0].text}
        if not isinstance(values[column], str):
            got = type(values[column]).__name__
            hint = _COLUMN_HINT if values[column] is not None else "remove rows without a text"
            raise BadRow(where, f"column '{column}' must hold text, got {got}", hint=hint)
    return tuple(check_encodable(where, column, values[column]) for column in task.texts)


def _words(task: Task, where: str, values: RowValues) -> tuple[str, ...]:
    (column,) = task.texts
    words = values.get(column)
    if isinstance(words, str) and not task.label:
        # Rows without labels may be plain text. Taggers are trained on words and punctuation marks.
        words = WORD.findall(words)
    if (
        not isinstance(words, list | tuple)
        or not words
        or not all(isinstance(w, str) for w in words)
    ):
        got = f"got {_short(words)}" if column in values else columns_in(values)
        raise BadRow(
            where, f"column '{column}' must hold a list of words", f"; {got}", _COLUMN_HINT
        )
    return tuple(check_encodable(where, column, word) for word in words)


def _class(task: Task, where: str, label: object, texts: tuple[str, ...]) -> int:
    """Return the number of a class from its name or number.

    In a CSV file, numbers are strings. In a user's own files, numbers are names, unless a schema or
    a model numbers the classes: their order in the training rows is alphabetical.
    """
    if (by_name := class_number(task.labels, str(label))) is not None:
        return by_name
    if (single := single_label(label)) is not label:
        return _class(task, where, single, texts)
    if isinstance(label, ClassName) and str(label.number) in task.labels:
        return task.labels.index(str(label.number))
    number = number_of(str(label)) if isinstance(label, str | int | float) else None
    account = task.account
    has_order = account is None or (
        account.names_from in ("schema", "task") or account.mapping == "number"
    )
    # If any name is a number, numbers are names.
    takes_numbers = has_order and all(number_of(name) is None for name in task.labels)
    if takes_numbers and number is not None and number in range(len(task.labels)):
        return int(number)
    names = map(class_name, task.labels)
    allowed = listed(f"{i} ({name})" if takes_numbers else name for i, name in enumerate(names))
    problem = f"'{task.label}' of {task.title} must be one of {allowed}"
    hint = None
    if not str(label).strip() or may_be_no_label(str(label)) or number in NO_LABEL_NUMBERS:
        hint = f"{_short(label)} looks like a missing label: remove the rows without a label"
    raise BadRow(where, problem, f", got {_short(label)}", hint)


def _classes(task: Task, where: str, label: object, texts: tuple[str, ...]) -> tuple[int, ...]:
    if isinstance(label, str):
        label = labels_in(label, task.labels)
    if not isinstance(label, list | tuple):
        raise BadRow(where, f"'{task.label}' must hold a list of labels", f", got {_short(label)}")
    return tuple(sorted({_class(task, where, name, texts) for name in label}))


def _score(task: Task, where: str, label: Any, texts: tuple[str, ...]) -> float:
    if isinstance(label, ClassName):
        label = label.number
    try:
        number: Any = label
        if isinstance(label, str):
            number = (number_with_comma if task.decimal_comma else number_of)(label)
        score = math.nan if isinstance(label, bool) else float(number)
    except (TypeError, ValueError, OverflowError):
        score = math.nan
    if not math.isfinite(score):
        raise BadRow(
            where,
            f"'{task.label}' of {task.title} must be a finite number",
            f", got {_short(label)}",
            f"write a number alone, such as {'4,2' if task.decimal_comma else '4.2'}",
        )
    return score


def _word_labels(task: Task, where: str, label: object, texts: tuple[str, ...]) -> tuple[int, ...]:
    if not isinstance(label, list | tuple) or len(label) != len(texts):
        got = f"{len(label)} labels" if isinstance(label, list | tuple) else _short(label)
        raise BadRow(
            where,
            f"'{task.label}' must hold a label for each",
            f" of the {len(texts)} words, got {got}",
        )
    return tuple(
        IGNORED if _is_ignored(task, name) else _class(task, where, name, texts) for name in label
    )


def _is_ignored(task: Task, label: object) -> bool:
    """Whether a word's label says that losses and metrics ignore the word."""
    return str(label) == IGNORED_WORD and IGNORED_WORD not in task.labels


def _answers(task: Task, where: str, label: object, texts: tuple[str, ...]) -> tuple[Answer, ...]:
    answers, starts = (
        (label.get("text"), label.get("answer_start")) if isinstance(label, dict) else (None, None)
    )
    if (
        not isinstance(answers, list | tuple)
        or not isinstance(starts, list | tuple)
        or [type(v) for v in (*answers, *starts)] != [str] * len(answers) + [int] * len(answers)
    ):
        form = '{"text": [...], "answer_start": [...]} as in SQuAD'
        raise BadRow(where, f"'{task.label}' must be {form}", f", got {_short(label)}")
    if not answers and not task.impossible:
        raise BadRow(
            where,
            f"the question has no answer, but {task.title} needs one",
            hint="questions without an answer must also occur in the training data; for SQuAD, "
            "give --task squad_v2",
        )
    return tuple(
        Answer(check_encodable(where, task.label, a), s)
        for a, s in zip(answers, starts, strict=True)
    )


def _target(task: Task, where: str, label: object, texts: tuple[str, ...]) -> str:
    if not isinstance(label, str) or not label.strip():
        got = f", got {_short(label)}" if label != "" else ", which is empty"
        raise BadRow(where, f"'{task.label}', the target of {task.title}, must be a text", got)
    return check_encodable(where, task.label, label)


_LABELS: Mapping[Kind, Callable[[Task, str, Any, tuple[str, ...]], _Label]] = {
    "class": _class,
    "multi": _classes,
    "score": _score,
    "tokens": _word_labels,
    "span": _answers,
    "text": _target,
}
