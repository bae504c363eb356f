"""The examples of a labelled task: where they lie, which are trained on, which are judged and under what name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from kdcli.data import demo
from kdcli.data.files import FORMATS, NotFound, Row, Source, held_by, open_source
from kdcli.data.labelled.examples import example_of
from kdcli.data.labelled.own import own_task
from kdcli.data.tasks import OWN, task_of
from kdcli.errors import UsageError
from kdcli.types import Example, Task

HELD_BACK = 0.1
"""Share of the training examples that is judged where there is no validation split."""


@dataclass(frozen=True)
class Labelled:
    """A task with its examples.

    Attributes:
        task: its row, with only those sets that are here.
        train: to train on; empty when that was not asked for.
        sets: what is judged, by name; "" where there is only one set.
        split: what the judged examples are called.
    """

    task: Task
    train: list[Example]
    sets: dict[str, list[Example]]
    split: str


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
    log: Callable[[str], None],
) -> Labelled:
    """Read a task's examples.

    Args:
        name: of a task, or `own`.
        source: what `--data` takes; None for where the task's row says.
        train_source: where the training split is, if elsewhere (cross-lingual tasks).
        columns: role → column, of an own task.
        split: what is judged: `validation` or `test`.
        train_rows, judged_rows: use only so many, drawn once and for all, so that runs compare.
        training: whether the training split is wanted.
        withheld: the judged split has no labels.
        labels: the names of the classes of an own task, where they are known better than from its rows.
        log: told what was decided.

    Raises:
        UsageError: unknown task, no such data, or rows that do not fit the task (file and row are named).
    """
    with _expected(name, split, training, withheld):
        task = _task(name, columns or {}, source, train_source, split, training, labels, log)
        train: list[Example] = []
        trained_set = ""
        if training:
            opened, of_split, trained_set = _training(task, source, train_source)
            train = _drawn(_read(task, opened, of_split), train_rows)
        found = _judged(task, source, split, training, log)
        if not found and training and split == "validation":
            train, held = _hold_back(train)
            log(f"there is no validation split: {len(held):,} of the training examples are held back to judge by")
            sets = {trained_set: _drawn(held, judged_rows)}
            return Labelled(_with_sets(task, list(sets)), train, sets, "held back from train")
        if not found:
            there = f"; it holds {held_by(Path(source))}" if source and Path(source).is_dir() else ""
            raise NotFound(f"no {split} split in {source}{there}")
        # One file that has no split in its name is all there is; it is called what it is.
        split = "train" if {p for _, p in found.values()} == {"train"} else split
        sets = {s: _drawn(_read(task, o, p, withheld=withheld), judged_rows) for s, (o, p) in found.items()}
        return Labelled(_with_sets(task, list(sets)), train, sets, split)


@contextmanager
def _expected(name: str, split: str, training: bool, withheld: bool) -> Iterator[None]:
    """What is not there is answered with what should be."""
    try:
        yield
    except NotFound as error:
        raise UsageError(
            f"task {name}: {error.message}",
            f"give --data PATH (of distill: eval.source): {_layout(name, split, training, withheld)}",
        ) from None


def _layout(name: str, split: str, training: bool, withheld: bool) -> str:
    """The files that a task is read from, and their columns, in words."""
    formats = f"({', '.join(f'.{f}' for f in FORMATS if f != 'txt')}, each also .gz)"
    needed = ["train.*"] if training else []
    if name == OWN:
        perhaps = " and perhaps validation.*" if training and split == "validation" else ""
        files = " and ".join(needed if perhaps else [*needed, f"{split}.*"])
        return f"a file, or a directory with {files}{perhaps} {formats}"
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


def _task(
    name: str,
    columns: Mapping[str, str | list[str]],
    source: str | None,
    train_source: str | None,
    split: str,
    training: bool,
    labels: tuple[str, ...] | None,
    log: Callable[[str], None],
) -> Task:
    """The row of a named task, or that of the user's own rows; see `open_labelled`."""
    if name != OWN:
        task = task_of(name)
        if columns:
            raise UsageError(f"data.columns is for --task own; task {name} reads {', '.join(task.texts)}, {task.label}")
        return task
    if source is None:
        raise UsageError("task 'own' needs --data", "give a file or a directory with train.* and validation.*")
    opened = open_source(train_source if training and train_source is not None else source)
    shown = split if not training and opened.has(split) else "train"
    task = own_task((row for _, row in _rows(opened, shown)), columns, log)
    return replace(task, labels=labels) if labels is not None and set(task.labels) <= set(labels) else task


def _with_sets(task: Task, names: list[str]) -> Task:
    return replace(task, sets=tuple(n for n in names if n))


def _training(task: Task, source: str | None, train_source: str | None) -> tuple[Source, str, str]:
    """Where the training split is, and of which set it is."""
    of = task.sets[0] if task.sets else ""
    if train_source is not None:
        return open_source(train_source), "train", of
    if source is None:
        where = task.hub_train or task.hub
        return (open_source("demo") if where is None else _hub(where, "")), "train", of
    inside = _folders(task, source)
    opened = _files(source, inside)
    if opened is not None and (opened.has("train") or not inside):
        return opened, "train", of
    # Only folders of sets: the first one, English, is what cross-lingual tasks are trained on.
    first = open_source(str(Path(source) / inside[0]))
    if not first.has("train"):
        raise UsageError(
            f"task {task.name}: no training split in {source} nor in {inside[0]}/ below it",
            "--set data.train=SOURCE names data of the same form to train on",
        )
    return first, "train", inside[0]


def _folders(task: Task, source: str) -> list[str]:
    """The sets that have a folder of their own."""
    return [name for name in task.sets if (Path(source) / name).is_dir()]


def _files(source: str, folders: list[str]) -> Source | None:
    """A source itself; None where it is nothing but folders of sets."""
    try:
        return open_source(source)
    except NotFound:
        if not folders:
            raise
        return None


def _judged(
    task: Task, source: str | None, split: str, training: bool, log: Callable[[str], None]
) -> dict[str, tuple[Source, str]]:
    """Set → where it is; sets that are not there are left out and named."""
    if source is None and task.hub is None:
        return {"": (open_source("demo"), split)}
    if source is None and task.hub is not None:
        named = task.split if split == "validation" else task.split.replace("validation", split)
        return {s: (_hub(task.hub, s), named.replace("{set}", s)) for s in task.sets or ("",)}
    found: dict[str, tuple[Source, str]] = {}
    inside = _folders(task, str(source))
    for name in inside:
        opened = open_source(str(Path(str(source)) / name))
        if opened.has(split):
            found[name] = opened, split
    whole = None if found else _files(str(source), inside)
    if whole is not None:
        if not training and list(whole.files) == ["train"]:
            # One file, or files without the name of a split: all there is to judge.
            return {"": (whole, "train")}
        found = {name: (whole, f"{split}_{name}") for name in task.sets if whole.has(f"{split}_{name}")}
        if not found and whole.has(split):
            # A plain split is the first set: matched, or English.
            found = {task.sets[0] if task.sets else "": (whole, split)}
    missing = [s for s in task.sets if s not in found]
    if found and missing:
        log(f"{task.name}: judged on {', '.join(found)}; not there: {', '.join(missing)}")
    return found


def _hub(where: tuple[str, str | None], name: str) -> Source:
    repository, config = where
    of_set = config.replace("{set}", name) if config else None
    return Source(f"{repository}{':' + of_set if of_set else ''}", {}, (repository, of_set))


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


def _drawn(examples: list[Example], rows: int | None) -> list[Example]:
    """A fixed choice of `rows` examples, in their own order: files are often sorted, so the first ones are not fair."""
    if rows is None or rows >= len(examples):
        return examples
    return [examples[i] for i in sorted(_chosen(len(examples), rows))]


def _hold_back(examples: list[Example]) -> tuple[list[Example], list[Example]]:
    held = _chosen(len(examples), int(HELD_BACK * len(examples)))
    if not held:
        raise UsageError(f"{len(examples)} examples are too few to hold some back", "give a validation split")
    return [e for i, e in enumerate(examples) if i not in held], [examples[i] for i in sorted(held)]


def _chosen(of: int, count: int) -> set[int]:
    return {int(i) for i in np.random.Generator(np.random.PCG64(0)).permutation(of)[:count]}


def check_training(labelled: Labelled) -> None:
    """What must be right before a model is trained: examples there, every class among them.

    Raises:
        UsageError: no examples, or classes without any (named).
    """
    task = labelled.task
    if not labelled.train:
        raise UsageError(f"task {task.name} has no training examples")
    if task.kind in ("class", "multi", "tokens"):
        seen = {c for e in labelled.train for c in (e.label if isinstance(e.label, tuple) else (e.label,))}
        missing = [name for number, name in enumerate(task.labels) if number not in seen]
        if missing:
            raise UsageError(
                f"task {task.name}: no training example has the label {', '.join(missing)}",
                "train on more rows, or leave the label out of the data",
            )
