"""Load the examples of a labelled task: the training set and the evaluation sets.

Evaluation sets hold no rows that a model was trained on.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from kdcli.data import demo
from kdcli.data.hub import HubId
from kdcli.data.labelled.checks import BadRows, class_counts
from kdcli.data.labelled.examples import example_of
from kdcli.data.labelled.own import own_task
from kdcli.data.labelled.rows import choose_rows, hashes_of, held_back
from kdcli.data.rows import FORMATS, BadRow, OnBadRow, Row
from kdcli.data.sources import DemoSource, FileSource, HubSource, Log, Source, open_source
from kdcli.data.storage import NotFound, list_folder
from kdcli.data.tasks import OWN, task_of
from kdcli.errors import UsageError
from kdcli.types import Example, RowHashes, Task

THIS_RUN = "this run"
HELD, ALL = "held back from train", "all rows"  # Names of the split if the files have none.
MIN_ROWS = 20  # Rows that must remain for an evaluation after training rows are skipped.
# Share of a benchmark's own validation split that may also be in its training split.
MAX_DUPLICATES = 0.05


@dataclass(frozen=True)
class Labelled:
    """A task with its examples.

    Attributes:
        task: the task, with only the sets that have examples.
        train: the training examples; may be empty.
        sets: name -> evaluation examples. A single set has the name "".
        split: the name of the evaluated split.
        notes: messages about skipped rows. They are logged already.
    """

    task: Task
    train: list[Example]
    sets: dict[str, list[Example]]
    split: str
    notes: list[str] = field(default_factory=list)

    @cached_property
    def rows(self) -> RowHashes:
        """The sorted hashes of the training rows, without duplicates."""
        return np.unique(hashes_of(self.train))


def open_labelled(
    name: str,
    *,
    source: str | None,
    train_source: str | None = None,
    columns: Mapping[str, str | list[str]] | None = None,
    split: str = "validation",
    split_seed: int = 0,
    train_rows: int | None = None,
    judged_rows: int | None = None,
    skip_bad: bool = False,
    trained: Mapping[str, RowHashes] | None = None,
    judge_trained_rows: bool = False,
    training: bool = True,
    withheld: bool = False,
    labels: tuple[str, ...] | None = None,
    log: Log,
) -> Labelled:
    """Load a task. Evaluation examples that any of the models was trained on are skipped.

    Args:
        name: the name of a task, or `own`.
        source: the value of `--data`; None for the hub, or the demo.
        train_source: the source of the training split if it is another one, as for cross-lingual
            tasks.
        columns: role -> column, for `own` only.
        split: the split to evaluate on, `validation` or `test`.
        split_seed: the seed that chooses the rows to hold out if there is no validation split.
        train_rows, judged_rows: the maximum number of rows to train and to evaluate on. Rows are
            chosen by their hashes, so that all runs choose the same.
        skip_bad: whether to skip rows that do not fit the task.
        trained: model -> hashes of the rows that it was trained on.
        judge_trained_rows: whether to evaluate on these rows too.
        training: whether to read the training split.
        withheld: whether the evaluated split has no labels.
        labels: class names of an earlier run of an own task. They are used if they contain all
            class names in the rows.
        log: called with each message.

    Raises:
        UsageError: the task is unknown, there is no such data, rows do not fit the task (the
            message names the file and the row), or too few evaluation examples remain.
    """
    bad_rows = BadRows()
    try:
        task = (
            _own_task(
                columns or {},
                source,
                train_source if training else None,
                split,
                training=training,
                labels=labels,
                log=log,
                bad_rows=bad_rows,
                skip_bad=skip_bad,
            )
            if name == OWN
            else _named_task(name, columns)
        )
        splits, trained = _evaluation_splits(task, source, split, log), dict(trained or {})
        has_split = bool(splits)
        train: list[Example] = []
        train_set = ""
        use_all = not training and not has_split and _is_one_file(task, source)
        if training or not has_split:
            opened, train_set = _training_source(
                task, source, train_source if training else None, needed=training
            )
            if training or opened.has("train"):
                train = _read(task, opened, "train", bad_rows, withheld=withheld)
        sets = {n: _read(task, s, of, bad_rows, withheld=withheld) for n, (s, of) in splits.items()}
        notes = bad_rows.settle(sum(map(len, [train, *sets.values()])), skip=skip_bad)
        for note in notes:
            log(note)
        if use_all and split == "validation":
            use_all = not _trained_on(task, train, trained, split_seed)
        if use_all:
            split, sets = ALL, {"": train}
        elif not has_split and train and split == "validation":
            train, held_out = _hold_out(task, train, split_seed, log)
            split, sets = HELD, {train_set: held_out}
        elif not has_split:
            raise NotFound(f"no {split} split in {source}{_content_of(source)}")
    except NotFound as error:
        needed = _files_needed(name, split, training, withheld)
        hint = f"give --data PATH (for distill: eval.source): {needed}"
        raise UsageError(f"task {name}: {error.message}", hint) from None
    train = choose_rows(train, train_rows) if training else []
    data = Labelled(replace(task, sets=tuple(filter(None, sets))), train, sets, split, notes)
    if training:
        trained[THIS_RUN] = data.rows
    published = has_split and name != OWN
    data = _skip_trained_rows(data, trained, keep=judge_trained_rows, published=published, log=log)
    return replace(
        data, sets={n: choose_rows(examples, judged_rows) for n, examples in data.sets.items()}
    )


def _named_task(name: str, columns: Mapping[str, str | list[str]] | None) -> Task:
    task = task_of(name)
    if columns:
        raise UsageError(
            f"data.columns is for --task own; task {name} reads the columns "
            f"{', '.join(task.texts)}, {task.label}"
        )
    return task


def _content_of(source: str | None) -> str:
    """List the content of a directory for a message; "" for other sources."""
    if source and Path(source).is_dir():
        return f"; it holds {list_folder(Path(source))}"
    return ""


def _is_one_file(task: Task, source: str | None) -> bool:
    """Whether a source is one file, or several without a split in their names.

    Such files count as `train`.
    """
    whole = _folders(task, source)[0] if source is not None else None
    return isinstance(whole, FileSource) and list(whole.files) == ["train"]


def _hold_out(
    task: Task, examples: list[Example], seed: int, log: Log
) -> tuple[list[Example], list[Example]]:
    """Divide examples into a training set and a validation set."""
    held = held_back(task, examples, seed)
    if held.all() or not held.any():
        raise UsageError(
            f"{len(examples)} examples are too few to hold some back", "give a validation split"
        )
    log(
        f"there is no validation split: {held.sum():,} of the {len(examples):,} training examples "
        "are held out for evaluation"
    )
    pairs = list(zip(examples, held, strict=True))
    return [e for e, is_held in pairs if not is_held], [e for e, is_held in pairs if is_held]


def _trained_on(
    task: Task, examples: list[Example], trained: Mapping[str, RowHashes], seed: int
) -> bool:
    """Whether models were trained on this file.

    In that case they know all of its rows that are not held out or, as `choose_rows` takes them,
    the ones with the smallest hashes.
    """
    known = np.unique(np.concatenate([*trained.values(), np.empty(0, np.uint64)]))
    held = held_back(task, examples, seed)
    offered = np.unique(
        hashes_of([e for e, is_held in zip(examples, held, strict=True) if not is_held])
    )
    count = int(np.isin(offered, known).sum())
    return count > 0 and bool(np.isin(offered[:count], known).all())


def _skip_trained_rows(
    data: Labelled, trained: Mapping[str, RowHashes], *, keep: bool, published: bool, log: Log
) -> Labelled:
    """Skip evaluation rows that a model was trained on, and log how many.

    Args:
        data: the task with its examples.
        trained: model -> hashes of its training rows.
        keep: whether to keep these rows instead; the split's name then counts them.
        published: whether the split belongs to a benchmark. If few of its rows are also in its
            training split, they are kept, because published results include them.
        log: called with each message.

    Raises UsageError: too few rows remain.
    """
    sets, notes, split = {}, list(data.notes), data.split
    for name, examples in data.sets.items():
        hashes = hashes_of(examples)
        by_model = {
            model: n for model, rows in trained.items() if (n := int(np.isin(hashes, rows).sum()))
        }
        known = np.isin(hashes, np.concatenate([*trained.values(), np.empty(0, np.uint64)]))
        count, total = int(known.sum()), len(examples)
        sets[name] = examples
        if not count:
            continue
        where = {ALL: "", HELD: f" {HELD}"}.get(data.split, f" of {data.split} {name}".rstrip())
        rows = f"{count:,} of {total:,} rows{where}"
        reason = _training_counts(by_model)
        if published and count <= MAX_DUPLICATES * total:
            notes.append(f"kept {rows}, as published results do, although {reason}")
        elif keep:
            notes.append(f"kept {rows} (data.judge_trained_rows), although {reason}")
            split = f"{data.split}, {count:,} of {total:,} rows trained a model"
        elif total - count < min(MIN_ROWS, (total + 1) // 2):
            raise UsageError(
                f"cannot evaluate on {rows}: {reason}",
                "give --data with other rows, or evaluate on these rows with --set "
                "data.judge_trained_rows=true",
            )
        else:
            notes.append(f"skipped {rows}: {reason}")
            sets[name] = [e for e, is_known in zip(examples, known, strict=True) if not is_known]
        log(notes[-1])
    return replace(data, sets=sets, split=split, notes=notes)


def _training_counts(by_model: Mapping[str, int]) -> str:
    """Tell for a message how many rows each model was trained on."""
    counts = [
        (model, f"{n:,} of them" if len(by_model) > 1 else "them") for model, n in by_model.items()
    ]
    return " and ".join(
        f"this run trains on {n}" if model == THIS_RUN else f"{model} was trained on {n}"
        for model, n in counts
    )


def _files_needed(name: str, split: str, training: bool, withheld: bool) -> str:
    """Describe the files and columns that a task needs."""
    formats = f"({', '.join(f'.{f}' for f in FORMATS if f != 'txt')}, each also .gz)"
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


def _own_task(
    columns: Mapping[str, str | list[str]],
    source: str | None,
    train_source: str | None,
    split: str,
    *,
    training: bool,
    labels: tuple[str, ...] | None,
    log: Log,
    bad_rows: BadRows,
    skip_bad: bool,
) -> Task:
    """Derive the task of the user's own rows; for the arguments see `open_labelled`."""
    if source is None:
        raise UsageError(
            "task 'own' needs --data", "give a file or a directory with train.* and validation.*"
        )
    opened = open_source(source if train_source is None else train_source)
    read_split = split if not training and opened.has(split) else "train"
    try:
        rows = (row for _, row in _rows(opened, read_split, bad_rows))
        task = own_task(rows, columns, log, bad_rows)
    except UsageError:
        if not skip_bad:
            # Bad rows are the likely cause, so report them first.
            bad_rows.settle(0, skip=False)
        raise
    return (
        replace(task, labels=labels)
        if labels is not None and set(task.labels) <= set(labels)
        else task
    )


def _training_source(
    task: Task, source: str | None, train_source: str | None, *, needed: bool
) -> tuple[Source, str]:
    """Return the source of the training examples and the name of their set.

    Raises UsageError: `needed` is set, and there is no training split.
    """
    name = task.sets[0] if task.sets else ""
    where = task.hub_train or task.hub
    if train_source is None and source is None and where is not None:
        return _hub(where, ""), name
    if train_source is not None or source is None:
        return open_source("demo" if train_source is None else train_source), name
    opened, folders = _folders(task, source)
    if opened is not None and (opened.has("train") or not folders):
        return opened, name
    # There are only folders of sets. Cross-lingual tasks are trained on the first set, English.
    first = open_source(str(Path(source) / folders[0]))
    if needed and not first.has("train"):
        raise UsageError(
            f"task {task.name}: no training split in {source} or its folder {folders[0]}/",
            "give training data of the same form with --set data.train=SOURCE",
        )
    return first, folders[0]


def _folders(task: Task, source: str) -> tuple[Source | None, list[str]]:
    """Open a source, and list the sets that have a folder in it.

    The source is None if it contains nothing but such folders.
    """
    folders = [name for name in task.sets if (Path(source) / name).is_dir()]
    try:
        return open_source(source), folders
    except NotFound:
        if not folders:
            raise
        return None, folders


def _evaluation_splits(
    task: Task, source: str | None, split: str, log: Log
) -> dict[str, tuple[Source, str]]:
    """Return the source and split of each evaluation set. Missing sets are skipped and logged."""
    if source is None:
        if task.hub is None:
            return {"": (open_source("demo"), split)}
        named = task.split.replace("validation", split)
        return {s: (_hub(task.hub, s), named.replace("{set}", s)) for s in task.sets or ("",)}
    whole, folders = _folders(task, source)
    opened = {name: open_source(str(Path(source) / name)) for name in folders}
    splits = {name: (of_set, split) for name, of_set in opened.items() if of_set.has(split)}
    if whole is not None and not splits:
        splits = {
            name: (whole, f"{split}_{name}") for name in task.sets if whole.has(f"{split}_{name}")
        }
        if not splits and whole.has(split):
            # A split without a set in its name is the first set: matched, or English.
            splits = {task.sets[0] if task.sets else "": (whole, split)}
    if splits and (missing := [s for s in task.sets if s not in splits]):
        log(f"{task.name}: evaluating on {', '.join(splits)}; missing: {', '.join(missing)}")
    return splits


def _hub(where: tuple[str, str | None], name: str) -> Source:
    repository, config = where
    config = config.replace("{set}", name) if config else None
    return HubSource(f"{repository}{':' + config if config else ''}", HubId(repository, config))


def _read(
    task: Task, source: Source, split: str, on_bad: OnBadRow, *, withheld: bool = False
) -> list[Example]:
    if isinstance(source, DemoSource):
        if task.name not in demo.TASKS:
            raise UsageError(
                f"the demo has no task {task.name}",
                f"its tasks: {', '.join(demo.TASKS)}; or give --data",
            )
        if split not in demo.DOCUMENTS:
            raise UsageError(f"the demo has no {split} split; it has {', '.join(demo.DOCUMENTS)}")
        rows = demo.demo_task(task.name, split)
        return [Example(f"demo {split}", str(i), (e.text,), e.label) for i, e in enumerate(rows)]
    examples = []
    for number, row in _rows(source, split, on_bad):
        try:
            examples.append(example_of(task, row, number, withheld=withheld))
        except BadRow as error:
            on_bad(error)
    return examples


def _rows(source: Source, split: str, on_bad: OnBadRow) -> Iterator[tuple[int, Row]]:
    """Yield the rows of a split, each with its number in its file.

    Raises UsageError: a file has no rows.
    """
    for name, table in source.tables(split, on_bad):
        number = -1
        for number, row in enumerate(table):
            yield number, row
        if number < 0:
            raise UsageError(f"{name} holds no rows")


def check_training(labelled: Labelled) -> None:
    """Raise a UsageError if there are no training examples, or none for some of the classes."""
    task = labelled.task
    if not labelled.train:
        raise UsageError(f"task {task.name} has no training examples")
    if task.kind in ("class", "multi", "tokens"):
        counts = zip(task.labels, class_counts(task, labelled.train), strict=True)
        if missing := [name for name, count in counts if not count]:
            message = f"task {task.name}: no training example has the label {', '.join(missing)}"
            raise UsageError(message, "train on more rows, or remove the label from the data")
