"""Load the examples of a labelled task: the training set and the evaluation sets.

Evaluation sets hold no rows that a model was trained on.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from kdcli.data import demo
from kdcli.data.hub import HubId
from kdcli.data.labelled.checks import BadRows, class_counts
from kdcli.data.labelled.examples import example_of
from kdcli.data.labelled.kept import kept_rows
from kdcli.data.labelled.own import own_task
from kdcli.data.labelled.partition import VERIFICATION, Partition, Pools
from kdcli.data.labelled.rows import choose_rows, deciding_hashes, hashes_of, held_back
from kdcli.data.rows import FORMATS, BadRow, OnBadRow, Row
from kdcli.data.sources import DemoSource, FileSource, HubSource, Log, Source, open_source
from kdcli.data.storage import NotFound, list_folder
from kdcli.data.tasks import OWN, task_of
from kdcli.errors import UsageError
from kdcli.types import Example, Head, RowHashes, Task

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
        has_labels: whether the rows have labels.
    """

    task: Task
    train: list[Example]
    sets: dict[str, list[Example]]
    split: str
    notes: list[str] = field(default_factory=list)
    has_labels: bool = True

    @cached_property
    def rows(self) -> RowHashes:
        """The sorted hashes of the training rows, without duplicates."""
        return np.unique(hashes_of(self.train))


@kept_rows
def open_labelled(
    name: str,
    *,
    source: str | None,
    train_source: str | None = None,
    columns: Mapping[str, str | list[str]] | None = None,
    split: str = "validation",
    split_seed: int = 0,
    partition: str | None = None,
    train_rows: int | None = None,
    judged_rows: int | None = None,
    skip_bad: bool = False,
    trained: Mapping[str, RowHashes] | None = None,
    judge_trained_rows: bool = False,
    training: bool = True,
    withheld: bool = False,
    head: Head | None = None,
    log: Log,
) -> Labelled:
    """Load a task. Evaluation examples that any of the models was trained on are skipped.

    Args:
        name: the name of a task, or `own`.
        source: the value of `--data`; None for the hub, or the demo.
        train_source: the source of the training split if it is another one, as for cross-lingual
            tasks.
        columns: role -> column, for `own` only.
        split: the split to evaluate on, `validation`, `test` or `verification`.
        split_seed: the seed that chooses the rows to hold out if there is no validation split.
        partition: a file that names the selection and verification rows, whatever their split.
        train_rows, judged_rows: the maximum number of rows to train and to evaluate on. Rows are
            chosen by their hashes, so that all runs choose the same.
        skip_bad: whether to skip rows that do not fit the task.
        trained: model -> hashes of the rows that it was trained on.
        judge_trained_rows: whether to evaluate on these rows too.
        training: whether to read the training split.
        withheld: whether rows may lack labels. Labels are then ignored, and an own task comes from
            the head.
        head: what a model's head predicts. It gives an own task its classes, and its kind if the
            rows have no labels.
        log: called with each message.

    Raises:
        UsageError: the task is unknown, there is no such data, rows do not fit the task (the
            message names the file and the row), or too few evaluation examples remain.
    """
    if split == VERIFICATION and partition is None:
        raise UsageError(
            "data.split=verification needs data.partition",
            "give the partition.safetensors of a run of kdcli compress",
        )
    chosen = None if partition is None else Partition.read(partition)
    bad_rows = BadRows()
    try:
        if name == OWN:
            opened = _own_source(source, train_source if training else None)
            reads_split = not training and chosen is None and opened.has(split)
            rows_of = split if reads_split else "train"
            task = _own_task(
                opened,
                rows_of,
                columns or {},
                head,
                log,
                bad_rows,
                skip_bad=skip_bad,
                ignores_labels=withheld,
            )
        else:
            task = _named_task(name, columns)
        withheld = withheld or not task.label
        notes: list[str] = []

        def settle(count: int) -> None:
            notes.extend(bad_rows.settle(count, skip=skip_bad))
            for note in notes:
                log(note)

        trained = dict(trained or {})
        if chosen is not None:
            pools = read_splits(task, source, train_source, bad_rows, withheld=withheld, log=log)
            train = pools.training(chosen) if training else []
            settle(len(pools.train))
            sets = pools.evaluated(chosen, split)
            published = False
        else:
            train, sets, split = _train_and_sets(
                task,
                source,
                train_source,
                split,
                split_seed,
                trained,
                bad_rows,
                settle,
                training=training,
                withheld=withheld,
                log=log,
            )
            published = split in ("validation", "test") and name != OWN
    except NotFound as error:
        needed = _files_needed(name, split, training, withheld)
        hint = f"give --data PATH (for distill: eval.source): {needed}"
        raise UsageError(f"task {name}: {error.message}", hint) from None
    train = choose_rows(train, train_rows) if training else []
    task = replace(task, sets=tuple(filter(None, sets)))
    data = Labelled(task, train, sets, split, notes, has_labels=not withheld)
    if training:
        trained[THIS_RUN] = data.rows
    data = _skip_trained_rows(data, trained, keep=judge_trained_rows, published=published, log=log)
    return replace(
        data, sets={n: choose_rows(examples, judged_rows) for n, examples in data.sets.items()}
    )


@dataclass(frozen=True)
class Splits:
    """All examples of a task.

    Attributes:
        task: the task.
        train: the training split.
        train_set: the set that the training split belongs to.
        validation, test: set -> examples; empty if there is no such split.
    """

    task: Task
    train: list[Example]
    train_set: str
    validation: dict[str, list[Example]]
    test: dict[str, list[Example]]

    def pools(self, trained: RowHashes) -> Pools:
        """Return the hashes of the rows of each split. `trained` has the models' training rows."""
        parts = [
            self.train,
            list(itertools.chain(*self.validation.values())),
            list(itertools.chain(*self.test.values())),
        ]
        hashes = [deciding_hashes(self.task, examples) for examples in parts]
        known = [h[np.isin(hashes_of(e), trained)] for h, e in zip(hashes, parts, strict=True)]
        train, validation, test = hashes
        return Pools(train, validation, test, np.concatenate(known))

    def training_texts(self, partition: Partition) -> Iterator[str]:
        """Return every text of the training examples of a partition."""
        return itertools.chain.from_iterable(e.texts for e in self.training(partition))

    def training(self, partition: Partition) -> list[Example]:
        """Return the training examples of a partition."""
        kept = partition.is_training(deciding_hashes(self.task, self.train))
        return list(itertools.compress(self.train, kept))

    def evaluated(self, partition: Partition, split: str) -> dict[str, list[Example]]:
        """Return the evaluation examples of a partition, set -> examples."""
        sets: dict[str, list[Example]] = {}
        for source in ({self.train_set: self.train}, self.validation, self.test):
            for name, examples in source.items():
                chosen = partition.is_evaluated(deciding_hashes(self.task, examples), split)
                if chosen.any():
                    sets.setdefault(name, []).extend(itertools.compress(examples, chosen))
        if not sets:
            raise UsageError(
                f"data.partition names no {split} row of this data",
                "give the data for which kdcli compress wrote the file",
            )
        return sets


@kept_rows
def read_splits(
    task: Task,
    source: str | None,
    train_source: str | None,
    bad_rows: OnBadRow,
    *,
    withheld: bool,
    log: Log,
) -> Splits:
    """Read every split of a task. Only an own task has a test split, because others hide labels."""
    opened, train_set = _training_source(task, source, train_source, needed=False)
    train = []
    if opened.has("train"):
        train = _read(task, opened, "train", bad_rows, withheld=withheld)
    held = {}
    for split in ("validation", "test") if task.name == OWN else ("validation",):
        places = _evaluation_splits(task, source, split, log)
        held[split] = {
            n: _read(task, s, of, bad_rows, withheld=withheld) for n, (s, of) in places.items()
        }
    # A training split without a set of its own extends the first set that is evaluated.
    train_set = next(iter(held["validation"]), train_set)
    return Splits(task, train, train_set, held["validation"], held.get("test", {}))


def _train_and_sets(
    task: Task,
    source: str | None,
    train_source: str | None,
    split: str,
    split_seed: int,
    trained: Mapping[str, RowHashes],
    bad_rows: BadRows,
    settle: Callable[[int], None],
    *,
    training: bool,
    withheld: bool,
    log: Log,
) -> tuple[list[Example], dict[str, list[Example]], str]:
    """Read the training examples and the evaluation sets; for the arguments see `open_labelled`.

    `settle` is called with the number of examples before they are divided.

    Returns the training examples, the evaluation sets, and the name of the evaluated split.
    """
    places = _evaluation_splits(task, source, split, log)
    train: list[Example] = []
    train_set = ""
    use_all = not training and not places and _is_one_file(task, source)
    if training or not places:
        opened, train_set = _training_source(
            task, source, train_source if training else None, needed=training
        )
        if training or opened.has("train"):
            train = _read(task, opened, "train", bad_rows, withheld=withheld)
    sets = {n: _read(task, s, of, bad_rows, withheld=withheld) for n, (s, of) in places.items()}
    settle(len(train) + sum(map(len, sets.values())))
    if use_all and split == "validation":
        use_all = not _trained_on(task, train, trained, split_seed)
    if use_all:
        return train, {"": train}, ALL
    if not places and train and split == "validation":
        train, held_out = _hold_out(task, train, split_seed, log)
        return train, {train_set: held_out}, HELD
    if not places:
        raise NotFound(f"no {split} split in {source}{_content_of(source)}")
    return train, sets, split


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


def _own_source(source: str | None, train_source: str | None) -> Source:
    """Open the user's own rows. Raises UsageError: no source is given."""
    if source is None:
        raise UsageError(
            "task 'own' needs --data", "give a file or a directory with train.* and validation.*"
        )
    return open_source(source if train_source is None else train_source)


def _own_task(
    opened: Source,
    split: str,
    columns: Mapping[str, str | list[str]],
    head: Head | None,
    log: Log,
    bad_rows: BadRows,
    *,
    skip_bad: bool,
    ignores_labels: bool,
) -> Task:
    """Derive the task of the user's own rows; for the arguments see `open_labelled`."""
    if not opened.has(split):
        # There may be no training split, but only one to evaluate on.
        split = next(iter(opened.splits()), split)
    try:
        rows = (row for _, row in _rows(opened, split, bad_rows))
        return own_task(rows, columns, log, bad_rows, head=head, ignores_labels=ignores_labels)
    except UsageError:
        if not skip_bad:
            # Bad rows are the likely cause, so report them first.
            bad_rows.settle(0, skip=False)
        raise


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
        if task.name not in (OWN, *demo.TASKS):
            raise UsageError(
                f"the demo has no task {task.name}",
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
