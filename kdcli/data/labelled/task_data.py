"""The examples of a labelled task: those to train on, and the sets to evaluate on."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from kdcli.data import demo
from kdcli.data.files import FORMATS, Log, NotFound, Row, Source, held_by, open_source
from kdcli.data.labelled.examples import example_of
from kdcli.data.labelled.own import own_task
from kdcli.data.tasks import OWN, task_of
from kdcli.errors import UsageError
from kdcli.types import Example, Task

HELD_BACK = 0.1  # Share of the training examples to evaluate on where there is no validation split.


@dataclass(frozen=True)
class Labelled:
    """A task with its examples."""

    task: Task  # with only those sets that have examples
    train: list[Example]  # may be empty
    sets: dict[str, list[Example]]  # to evaluate on, by name; "" where there is only one set
    split: str  # that is evaluated


def open_labelled(
    name: str,
    *,
    source: str | None,
    train_source: str | None = None,
    columns: Mapping[str, str | list[str]] | None = None,
    split: str = "validation",
    train_rows: int | None = None,
    judged_rows: int | None = None,
    training: bool = True,
    withheld: bool = False,
    labels: tuple[str, ...] | None = None,
    log: Log,
) -> Labelled:
    """Read a task's examples. `name`: of a task, or `own`, whose `columns` are role -> column. `source`: what `--data`
    takes; None for the hub, or the demo. `train_source`: where the training split is, if elsewhere (cross-lingual
    tasks). `split`: to evaluate on: `validation` or `test`; `withheld` if it has no labels. `train_rows`,
    `judged_rows`: only this many, always the same ones, so that runs compare. `training`: read the training split.
    `labels`: class names of an own task from elsewhere, taken where they cover those of its rows. Raises UsageError:
    unknown task, no such data, or rows that do not fit the task (file and row are named)."""
    try:
        if name == OWN:
            task = _own_task(columns or {}, source, train_source if training else None, split, training, labels, log)
        else:
            task = task_of(name)
            if columns:
                reads = f"{', '.join(task.texts)}, {task.label}"
                raise UsageError(f"data.columns is for --task own; task {name} reads {reads}")
        train: list[Example] = []
        train_set = ""
        if training:
            opened, train_set = _training(task, source, train_source)
            train = _sample(_read(task, opened, "train"), train_rows)
        places = _evaluated(task, source, split, training, log)
        if places:
            # A file without a split in its name counts as `train`.
            split = "train" if {s for _, s in places.values()} == {"train"} else split
            sets = {n: _read(task, o, s, withheld=withheld) for n, (o, s) in places.items()}
        elif training and split == "validation":
            held = _chosen(len(train), int(HELD_BACK * len(train)))
            if not held:
                raise UsageError(f"{len(train)} examples are too few to hold some back", "give a validation split")
            log(f"there is no validation split: {len(held):,} of the training examples are held back to judge by")
            split, sets = "held back from train", {train_set: [train[i] for i in held]}
            train = [train[i] for i in sorted({*range(len(train))}.difference(held))]
        else:
            there = f"; it holds {held_by(Path(source))}" if source and Path(source).is_dir() else ""
            raise NotFound(f"no {split} split in {source}{there}")
        sets = {name: _sample(examples, judged_rows) for name, examples in sets.items()}
        return Labelled(replace(task, sets=tuple(filter(None, sets))), train, sets, split)
    except NotFound as error:
        needed = _files_needed(name, split, training, withheld)
        hint = f"give --data PATH (of distill: eval.source): {needed}"
        raise UsageError(f"task {name}: {error.message}", hint) from None


def _files_needed(name: str, split: str, training: bool, withheld: bool) -> str:
    """The files and columns that a task needs, in words."""
    formats = f"({', '.join(f'.{f}' for f in FORMATS if f != 'txt')}, each also .gz)"
    needed = ["train.*"] if training else []
    if name == OWN:
        optional = " and perhaps validation.*" if training and split == "validation" else ""
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
    training: bool,
    labels: tuple[str, ...] | None,
    log: Log,
) -> Task:
    """The task of the user's own rows; see `open_labelled`."""
    if source is None:
        raise UsageError("task 'own' needs --data", "give a file or a directory with train.* and validation.*")
    opened = open_source(source if train_source is None else train_source)
    read_split = split if not training and opened.has(split) else "train"
    task = own_task((row for _, row in _rows(opened, read_split)), columns, log)
    return replace(task, labels=labels) if labels is not None and set(task.labels) <= set(labels) else task


def _training(task: Task, source: str | None, train_source: str | None) -> tuple[Source, str]:
    """Source and set of the training examples."""
    name = task.sets[0] if task.sets else ""
    where = task.hub_train or task.hub
    if train_source is None and source is None and where is not None:
        return _hub(where, ""), name
    if train_source is not None or source is None:
        return open_source("demo" if train_source is None else train_source), name
    opened, folders = _folders(task, source)
    if opened is not None and (opened.has("train") or not folders):
        return opened, name
    # Only folders of sets: the first one, English, is what cross-lingual tasks are trained on.
    first = open_source(str(Path(source) / folders[0]))
    if not first.has("train"):
        hint = "--set data.train=SOURCE names data of the same form to train on"
        raise UsageError(f"task {task.name}: no training split in {source} nor in {folders[0]}/ below it", hint)
    return first, folders[0]


def _folders(task: Task, source: str) -> tuple[Source | None, list[str]]:
    """A source, None where it is nothing but folders of sets, and the sets that have a folder of their own."""
    folders = [name for name in task.sets if (Path(source) / name).is_dir()]
    try:
        return open_source(source), folders
    except NotFound:
        if not folders:
            raise
        return None, folders


def _evaluated(task: Task, source: str | None, split: str, training: bool, log: Log) -> dict[str, tuple[Source, str]]:
    """Set -> its source and split; missing sets are left out and logged."""
    if source is None:
        if task.hub is None:
            return {"": (open_source("demo"), split)}
        named = task.split.replace("validation", split)
        return {s: (_hub(task.hub, s), named.replace("{set}", s)) for s in task.sets or ("",)}
    whole, folders = _folders(task, source)
    opened = {name: open_source(str(Path(source) / name)) for name in folders}
    places = {name: (of_set, split) for name, of_set in opened.items() if of_set.has(split)}
    if whole is not None and not places:
        if not training and list(whole.files) == ["train"]:
            # One file, or files without a split in their names: all there is to evaluate on.
            return {"": (whole, "train")}
        places = {name: (whole, f"{split}_{name}") for name in task.sets if whole.has(f"{split}_{name}")}
        if not places and whole.has(split):
            # A plain split is the first set: matched, or English.
            places = {task.sets[0] if task.sets else "": (whole, split)}
    if places and (missing := [s for s in task.sets if s not in places]):
        log(f"{task.name}: judged on {', '.join(places)}; not there: {', '.join(missing)}")
    return places


def _hub(where: tuple[str, str | None], name: str) -> Source:
    repository, config = where
    config = config.replace("{set}", name) if config else None
    return Source(f"{repository}{':' + config if config else ''}", {}, (repository, config))


def _read(task: Task, source: Source, split: str, *, withheld: bool = False) -> list[Example]:
    if not source.files and not source.hub:
        if task.name not in demo.TASKS:
            raise UsageError(f"the demo has no task {task.name}", f"its tasks: {', '.join(demo.TASKS)}; or give --data")
        if split not in demo.DOCUMENTS:
            raise UsageError(f"the demo has no {split} split; it has {', '.join(demo.DOCUMENTS)}")
        rows = demo.demo_task(task.name, split)
        return [Example(f"demo {split}", str(i), (e.text,), e.label) for i, e in enumerate(rows)]
    return [example_of(task, row, number, withheld=withheld) for number, row in _rows(source, split)]


def _rows(source: Source, split: str) -> Iterator[tuple[int, Row]]:
    """The rows of a split, each with its number in its file; a file without any is an error."""
    for name, table in source.tables(split):
        number = -1
        for number, row in enumerate(table):
            yield number, row
        if number < 0:
            raise UsageError(f"{name} holds no rows")


def _sample(examples: list[Example], rows: int | None) -> list[Example]:
    """A fixed choice of `rows` examples, in their own order: files are often sorted, so the first ones are biased."""
    return examples if rows is None else [examples[i] for i in _chosen(len(examples), rows)]


def _chosen(total: int, count: int) -> list[int]:
    return sorted(np.random.Generator(np.random.PCG64(0)).permutation(total)[:count].tolist())


def check_training(labelled: Labelled) -> None:
    """Raise a UsageError for data without training examples, or classes without any (named)."""
    task = labelled.task
    if not labelled.train:
        raise UsageError(f"task {task.name} has no training examples")
    if task.kind in ("class", "multi", "tokens"):
        seen = {c for e in labelled.train for c in (e.label if isinstance(e.label, tuple) else (e.label,))}
        if missing := [name for number, name in enumerate(task.labels) if number not in seen]:
            message = f"task {task.name}: no training example has the label {', '.join(missing)}"
            raise UsageError(message, "train on more rows, or leave the label out of the data")
