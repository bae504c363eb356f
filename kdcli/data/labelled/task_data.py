"""The examples of a labelled task: those to train on, and the sets to evaluate on, of which no row
trained a model."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from kdcli.data import demo
from kdcli.data.hub import HubId
from kdcli.data.labelled.checks import BadRows, class_counts
from kdcli.data.labelled.examples import example_of
from kdcli.data.labelled.own import own_task
from kdcli.data.labelled.rows import fewest, hashes_of, held_back
from kdcli.data.rows import FORMATS, BadRow, OnBadRow, Row
from kdcli.data.sources import DemoSource, FileSource, HubSource, Log, Source, open_source
from kdcli.data.storage import NotFound, list_folder
from kdcli.data.tasks import OWN, task_of
from kdcli.errors import UsageError
from kdcli.types import Example, RowHashes, Task

THIS_RUN = "this run"
HELD, ALL = "held back from train", "all rows"  # Names of the evaluated split where files have none
LEAST = 20  # Rows to judge by where others are left out.
NATURAL = 0.05  # Share of a benchmark's own validation split that its training split may hold too.


@dataclass(frozen=True)
class Labelled:
    """A task with its examples."""

    task: Task  # with only those sets that have examples
    train: list[Example]  # may be empty
    sets: dict[str, list[Example]]  # to evaluate on, by name; "" where there is only one set
    split: str  # that is evaluated
    notes: list[str] = field(default_factory=list)  # on rows that were left out, logged already

    @cached_property
    def rows(self) -> RowHashes:
        """The hashes of the training rows, sorted, each once."""
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
    """Read a task's examples; none to evaluate on trained a model.

    Args:
        name: of a task, or `own`, whose `columns` are role -> column.
        source: what `--data` takes; None for the hub, or the demo.
        train_source: where the training split is, if elsewhere (cross-lingual tasks).
        split: to evaluate on: `validation` or `test`; `withheld` if it has no labels.
        split_seed: of the choice of rows to hold back where there is no validation split.
        train_rows, judged_rows: only this many, chosen by their hashes, so that runs compare.
        skip_bad: leave out rows that do not fit the task.
        trained: model -> hashes of the rows that trained it; they are left out of the evaluated
        sets.
        judge_trained_rows: keep them.
        training: read the training split.
        labels: class names of an own task from elsewhere, taken where they cover those of its rows.

    Raises:
        UsageError: unknown task, no such data, rows that do not fit the task (file and row are
            named), or too few rows that trained no model.
    """
    try:
        bad = BadRows()
        if name == OWN:
            how: dict[str, Any] = {
                "training": training,
                "labels": labels,
                "log": log,
                "bad": bad,
                "skip_bad": skip_bad,
            }
            task = _own_task(
                columns or {}, source, train_source if training else None, split, **how
            )
        else:
            task = task_of(name)
            if columns:
                reads = f"{', '.join(task.texts)}, {task.label}"
                raise UsageError(f"data.columns is for --task own; task {name} reads {reads}")
        places, trained = _evaluated(task, source, split, log), dict(trained or {})
        train: list[Example] = []
        train_set = ""
        single = not training and not places and _is_one_file(task, source)
        if training or not places:
            opened, train_set = _training(
                task, source, train_source if training else None, needed=training
            )
            train = (
                _read(task, opened, "train", bad, withheld=withheld)
                if training or opened.has("train")
                else []
            )
        sets = {n: _read(task, o, s, bad, withheld=withheld) for n, (o, s) in places.items()}
        usable = sum(map(len, [train, *sets.values()]))
        for note in (notes := bad.settle(usable, skip=skip_bad)):
            log(note)
        own_split = bool(places)
        if places:
            pass
        elif single and not (
            split == "validation" and _trained_on(task, train, trained, split_seed)
        ):
            split, sets = ALL, {"": train}
        elif train and split == "validation":
            held = held_back(task, train, split_seed)
            if held.all() or not held.any():
                raise UsageError(
                    f"{len(train)} examples are too few to hold some back",
                    "give a validation split",
                )
            which = f"{held.sum():,} of the {len(train):,} training examples"
            log(f"there is no validation split: {which} are held back to judge by")
            split, sets = HELD, {train_set: [e for e, h in zip(train, held, strict=True) if h]}
            train = [e for e, h in zip(train, held, strict=True) if not h]
        else:
            there = (
                f"; it holds {list_folder(Path(source))}"
                if source and Path(source).is_dir()
                else ""
            )
            raise NotFound(f"no {split} split in {source}{there}")
        train = fewest(train, train_rows) if training else []
        found = Labelled(replace(task, sets=tuple(filter(None, sets))), train, sets, split, notes)
        if training:
            trained[THIS_RUN] = found.rows
        published = own_split and name != OWN
        found = judgeable(found, trained, keep=judge_trained_rows, published=published, log=log)
        return replace(
            found, sets={n: fewest(examples, judged_rows) for n, examples in found.sets.items()}
        )
    except NotFound as error:
        needed = _files_needed(name, split, training, withheld)
        hint = f"give --data PATH (of distill: eval.source): {needed}"
        raise UsageError(f"task {name}: {error.message}", hint) from None


def _is_one_file(task: Task, source: str | None) -> bool:
    """Whether a source is one file, or files without a split in their names; they count as
    `train`."""
    whole = _folders(task, source)[0] if source is not None else None
    return isinstance(whole, FileSource) and list(whole.files) == ["train"]


def _trained_on(
    task: Task, examples: list[Example], trained: Mapping[str, RowHashes], seed: int
) -> bool:
    """Whether models were trained on these very data: they know those rows that are not held back,
    or the smallest hashes of them, as `fewest` takes them."""
    known = np.unique(np.concatenate([*trained.values(), np.empty(0, np.uint64)]))
    offered = np.unique(
        hashes_of(
            [e for e, h in zip(examples, held_back(task, examples, seed), strict=True) if not h]
        )
    )
    count = int(np.isin(offered, known).sum())
    return count > 0 and bool(np.isin(offered[:count], known).all())


def judgeable(
    found: Labelled, trained: Mapping[str, RowHashes], *, keep: bool, published: bool, log: Log
) -> Labelled:
    """Leave the rows that trained a model out of the evaluated sets, and say so. `trained`: model
    -> hashes. `keep`: leave them in, and name the split so. `published`: a benchmark with a split
    of its own keeps its few rows that its training split holds too, as published results do. Raises
    UsageError: too few other rows."""
    sets, notes, split = {}, list(found.notes), found.split
    for name, examples in found.sets.items():
        hashes = hashes_of(examples)
        by_model = {
            model: n for model, rows in trained.items() if (n := int(np.isin(hashes, rows).sum()))
        }
        known = np.isin(hashes, np.concatenate([*trained.values(), np.empty(0, np.uint64)]))
        count, total = int(known.sum()), len(examples)
        where = {ALL: "", HELD: f" {HELD}"}.get(found.split, f" of {found.split} {name}".rstrip())
        sets[name] = examples
        if not count:
            continue
        counted = {
            model: f"{n:,}" if len(by_model) > 1 else "they" for model, n in by_model.items()
        }
        who = "; ".join(
            f"{n} are training rows of this run" if m == THIS_RUN else f"{n} trained {m}"
            for m, n in counted.items()
        )
        few = published and count <= NATURAL * total
        if few or keep:
            why = (
                "kept, as published results keep them"
                if few
                else "kept, as data.judge_trained_rows says"
            )
            notes.append(f"{count:,} of {total:,} rows{where} are training rows ({who}): {why}")
            split = split if few else f"{found.split}, {count:,} of {total:,} rows trained a model"
        elif total - count < min(LEAST, (total + 1) // 2):
            raise UsageError(
                f"{count:,} of {total:,} rows{where} cannot be judged by: {who}",
                "give --data with other rows; or judge on them all the same with --set "
                "data.judge_trained_rows=true",
            )
        else:
            notes.append(f"left out {count:,} of {total:,} rows{where}: {who}")
            sets[name] = [e for e, is_known in zip(examples, known, strict=True) if not is_known]
        log(notes[-1])
    return replace(found, sets=sets, split=split, notes=notes)


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
    *,
    training: bool,
    labels: tuple[str, ...] | None,
    log: Log,
    bad: BadRows,
    skip_bad: bool,
) -> Task:
    """The task of the user's own rows; see `open_labelled`."""
    if source is None:
        raise UsageError(
            "task 'own' needs --data", "give a file or a directory with train.* and validation.*"
        )
    opened = open_source(source if train_source is None else train_source)
    read_split = split if not training and opened.has(split) else "train"
    try:
        task = own_task((row for _, row in _rows(opened, read_split, bad)), columns, log, bad)
    except UsageError:
        if not skip_bad:
            # The cause: without these rows the others do not make a task.
            bad.settle(0, skip=False)
        raise
    return (
        replace(task, labels=labels)
        if labels is not None and set(task.labels) <= set(labels)
        else task
    )


def _training(
    task: Task, source: str | None, train_source: str | None, *, needed: bool
) -> tuple[Source, str]:
    """Source and set of the training examples; `needed`: a UsageError where there are none."""
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
    if needed and not first.has("train"):
        hint = "--set data.train=SOURCE names data of the same form to train on"
        raise UsageError(
            f"task {task.name}: no training split in {source} nor in {folders[0]}/ below it", hint
        )
    return first, folders[0]


def _folders(task: Task, source: str) -> tuple[Source | None, list[str]]:
    """A source, None where it is nothing but folders of sets, and the sets that have a folder of
    their own."""
    folders = [name for name in task.sets if (Path(source) / name).is_dir()]
    try:
        return open_source(source), folders
    except NotFound:
        if not folders:
            raise
        return None, folders


def _evaluated(
    task: Task, source: str | None, split: str, log: Log
) -> dict[str, tuple[Source, str]]:
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
        places = {
            name: (whole, f"{split}_{name}") for name in task.sets if whole.has(f"{split}_{name}")
        }
        if not places and whole.has(split):
            # A plain split is the first set: matched, or English.
            places = {task.sets[0] if task.sets else "": (whole, split)}
    if places and (missing := [s for s in task.sets if s not in places]):
        log(f"{task.name}: judged on {', '.join(places)}; not there: {', '.join(missing)}")
    return places


def _hub(where: tuple[str, str | None], name: str) -> Source:
    repository, config = where
    config = config.replace("{set}", name) if config else None
    return HubSource(f"{repository}{':' + config if config else ''}", HubId(repository, config))


def _read(
    task: Task, source: Source, split: str, bad: OnBadRow, *, withheld: bool = False
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
    for number, row in _rows(source, split, bad):
        try:
            examples.append(example_of(task, row, number, withheld=withheld))
        except BadRow as error:
            bad(error)
    return examples


def _rows(source: Source, split: str, bad: OnBadRow) -> Iterator[tuple[int, Row]]:
    """The rows of a split, each with its number in its file; a file without any is an error."""
    for name, table in source.tables(split, bad):
        number = -1
        for number, row in enumerate(table):
            yield number, row
        if number < 0:
            raise UsageError(f"{name} holds no rows")


def check_training(labelled: Labelled) -> None:
    """Raise a UsageError for data without training examples, or classes without any (named)."""
    task = labelled.task
    if not labelled.train:
        raise UsageError(f"task {task.name} has no training examples")
    if task.kind in ("class", "multi", "tokens"):
        counts = zip(task.labels, class_counts(task, labelled.train), strict=True)
        if missing := [name for name, count in counts if not count]:
            message = f"task {task.name}: no training example has the label {', '.join(missing)}"
            raise UsageError(message, "train on more rows, or leave the label out of the data")
