"""Load the examples of a labelled task: the training set and the evaluation sets.

Evaluation sets hold no rows that a model was trained on.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from kdcli.data.accounts import ACCOUNTS, CUT, OTHER_PART, STRICT_HINT, TRAINED, RowAccount
from kdcli.data.labelled.kept import kept_rows
from kdcli.data.labelled.partition import (
    HELD_OUT_SPLIT,
    VERIFICATION,
    Partition,
    choose_subset,
    hashes_of,
    held_back,
)
from kdcli.data.labelled.request import RowsRequest
from kdcli.data.labelled.row_checks import (
    BadRows,
    class_counts,
    describe_empty,
    describe_repeats,
)
from kdcli.data.labelled.splits import (
    TaskSource,
    describe_needed_files,
    open_task,
    read_splits,
)
from kdcli.data.storage import NotFound
from kdcli.errors import UsageError
from kdcli.messages import log_fact
from kdcli.types import OWN, Example, Head, RowHashes, Task

THIS_RUN = "this run"
# Names of the split if the files have none.
ALL_ROWS = "all rows"
MIN_EVALUATION_ROWS = 20  # Rows that must remain for an evaluation after training rows are skipped.
# Share of a benchmark's own validation split that may also be in its training split.
MAX_DUPLICATES = 0.05


@dataclass(frozen=True)
class Labelled:
    """A task with its examples.

    Attributes:
        task: The task, with only the sets that have examples.
        train: The training examples; may be empty.
        sets: name -> evaluation examples. A single set has the name "".
        split: The name of the evaluated split.
        notes: Messages about skipped rows. They are logged already.
        has_labels: Whether the rows have labels.
        account: The account of the rows.
    """

    task: Task
    train: list[Example]
    sets: dict[str, list[Example]]
    split: str
    notes: list[str] = field(default_factory=list)
    has_labels: bool = True
    account: RowAccount = field(default_factory=lambda: RowAccount(""))

    @property
    def count(self) -> int:
        """The number of evaluation examples."""
        return sum(map(len, self.sets.values()))

    @cached_property
    def rows(self) -> RowHashes:
        """The sorted hashes of the training rows, without duplicates."""
        return np.unique(hashes_of(self.train))


def open_labelled(
    request: RowsRequest,
    *,
    trained: Mapping[str, RowHashes] | None = None,
    training: bool = True,
    skip_repeated: bool = True,
    withheld: bool = False,
    head: Head | None = None,
) -> Labelled:
    """Load a task. Evaluation examples that any of the models was trained on are skipped.

    Args:
        request: Which rows to read.
        trained: model -> hashes of the rows that it was trained on.
        training: Whether to read the training split.
        skip_repeated: Whether to skip evaluation examples that are also in the training split.
        withheld: Whether rows may lack labels. Labels are then ignored, and an own task comes from
            the head.
        head: What a model's head predicts. It gives an own task its classes, and its kind if the
            rows have no labels.

    Raises:
        UsageError: The task is unknown, there is no such data, rows do not fit the task (the
            message names the file and the row), or too few evaluation examples remain.
    """
    data = _open_labelled(
        request,
        trained=trained,
        training=training,
        skip_repeated=skip_repeated,
        withheld=withheld,
        head=head,
    )
    # Rows that are kept in memory for several steps are in the account of each. A dry run, which
    # is quiet, may have read them.
    ACCOUNTS.close(data.account, data.account.kept)
    return data


@kept_rows
def _open_labelled(
    request: RowsRequest,
    *,
    trained: Mapping[str, RowHashes] | None,
    training: bool,
    skip_repeated: bool,
    withheld: bool,
    head: Head | None,
) -> Labelled:
    """Read the rows of `open_labelled`, log what they are, and close their account."""
    if not training:
        request = replace(request, train_source=None)
    partition = _open_partition(request)
    bad_rows = BadRows()
    notes: list[str] = []

    def settle(usable: int) -> None:
        notes.extend(bad_rows.settle(usable, skip=request.skip_bad))
        for note in notes:
            log_fact(note)

    try:
        evaluates_split = not training and partition is None
        rows = open_task(
            request,
            bad_rows,
            preferred=(request.split, "train") if evaluates_split else ("train",),
            head=head,
            trains=training,
            withheld=withheld,
        )
        if partition is None:
            division = _by_split(rows, request, trained or {}, settle, training=training)
        else:
            division = _by_partition(rows, request, partition, settle)
    except NotFound as error:
        needed = describe_needed_files(
            request.task, request.split, training=training, withheld=withheld
        )
        hint = f"give --data PATH (for distill: eval.source): {needed}"
        raise UsageError(f"task {request.task}: {error.message}", hint) from None
    for note in division.notes:
        (log_fact if training else notes.append)(note)
    if not training:
        division = replace(division, train=[])
    data = replace(_choose_training(division, rows, request.train_rows), notes=notes)
    known = dict(trained or {})
    if training and skip_repeated:
        known[THIS_RUN] = data.rows
    is_own = request.task == OWN
    published = partition is None and not is_own and data.split in ("validation", "test")
    data = _choose_evaluated(data, request, known, rows.account, published=published)
    ACCOUNTS.close(rows.account, len(data.train) + data.count)
    if ACCOUNTS.strict:
        _check_texts(data)
    if is_own:
        evaluated = data.sets[""]
        findings = [describe_empty(evaluated, "evaluated row")]
        if partition is None:
            # Of parts, the repeated texts were described when the rows were divided.
            is_whole = len(evaluated) == len(rows.examples)
            repeats = describe_repeats(data.task, evaluated, "evaluated rows", with_whole=is_whole)
            findings.insert(0, repeats)
        for note in filter(None, findings):
            log_fact(note)
            data.notes.append(note)
    return replace(data, account=rows.account)


def _check_texts(data: Labelled) -> None:
    """Raise a UsageError if rows have no text, or rows of an own task repeat an earlier one."""
    examples = list(itertools.chain(data.train, *data.sets.values()))
    problem = describe_empty(examples, "row")
    if not problem and data.task.name == OWN:
        problem = describe_repeats(data.task, examples, "rows")
    if problem:
        raise UsageError(problem, STRICT_HINT)


def _by_partition(
    rows: TaskSource, request: RowsRequest, partition: Partition, settle: Callable[[int], None]
) -> Labelled:
    """Read all splits, and divide their rows as a partition does."""
    splits = read_splits(rows)
    settle(len(splits.train))
    evaluated = splits.evaluated(partition, request.split)
    return Labelled(rows.task, splits.training(partition), evaluated, request.split)


def _choose_training(division: Labelled, rows: TaskSource, count: int | None) -> Labelled:
    """Choose among the training rows, and account for those that no part uses.

    Args:
        division: The training rows and the evaluated ones.
        rows: All rows that were read, and their account.
        count: The number of training rows; None for all.
    """
    train = choose_subset(division.train, count)
    evaluated = itertools.chain.from_iterable(division.sets.values())
    rows.account.leave_out_missing(OTHER_PART, rows.examples, [*division.train, *evaluated])
    rows.account.leave_out_missing(CUT, division.train, train)
    return replace(
        division,
        task=replace(rows.task, sets=tuple(filter(None, division.sets))),
        train=train,
        has_labels=not rows.withheld,
    )


def _choose_evaluated(
    data: Labelled,
    request: RowsRequest,
    trained: Mapping[str, RowHashes],
    account: RowAccount,
    *,
    published: bool,
) -> Labelled:
    """Skip evaluation rows that a model was trained on, choose among the rest, and name them.

    Args:
        data: The task with all examples of the evaluated split.
        request: Which rows to read.
        trained, published: See `_skip_trained_rows`.
        account: Counts the rows that are left out.

    Raises:
        UsageError: Too few rows remain.
    """
    remaining, kept = _skip_trained_rows(
        data, trained, keep=request.judge_trained_rows, published=published
    )
    sets = {name: choose_subset(rows, request.judged_rows) for name, rows in remaining.sets.items()}
    chosen = replace(remaining, sets=sets)
    for reason, before, after in ((TRAINED, data, remaining), (CUT, remaining, chosen)):
        for name, rows in before.sets.items():
            account.leave_out_missing(reason, rows, after.sets[name])
    skipped = data.count - remaining.count
    return replace(chosen, split=_split_name(chosen, data.count, skipped, kept))


def _split_name(data: Labelled, total: int, skipped: int, kept: RowHashes) -> str:
    """Name the rows that are evaluated.

    Args:
        data: The task with these rows.
        total: The number of rows of the split.
        skipped: The number of rows that were skipped because they trained a model.
        kept: The hashes of the rows that were kept although they trained a model.
    """
    name = data.split
    if name == ALL_ROWS and data.count < total - skipped:
        name = f"{data.count:,} of {total:,} rows"
        name += f", without {skipped:,} that trained a model" if skipped else ""
    elif name == ALL_ROWS and skipped:
        name = f"all but {skipped:,} rows that trained a model"
    trained = sum(int(np.isin(hashes_of(rows), kept).sum()) for rows in data.sets.values())
    return f"{name}, {trained:,} of {data.count:,} rows trained a model" if trained else name


def _open_partition(request: RowsRequest) -> Partition | None:
    """Read the file of a partition.

    Raises:
        UsageError: It is needed and not given, or damaged.
    """
    if request.partition is not None:
        return Partition.read(request.partition)
    if request.split == VERIFICATION:
        raise UsageError(
            "data.split=verification needs data.partition",
            "give the partition.safetensors of a run of kdcli compress",
        )
    return None


def _by_split(
    rows: TaskSource,
    request: RowsRequest,
    trained: Mapping[str, RowHashes],
    settle: Callable[[int], None],
    *,
    training: bool,
) -> Labelled:
    """Read the training split and the evaluated split. Notes tell how the split was made, if the
    data has none.

    Without an evaluated split, rows of the training split are held out. If nothing is trained, all
    rows of a single file are evaluated, unless a model was trained on the file.

    Args:
        rows: The places of the rows.
        request: Which rows to read.
        trained: model -> hashes of the rows that it was trained on.
        settle: Called with the number of examples before they are divided.
        training: Whether to read the training split.

    Raises:
        NotFound: There is no evaluated split, and no rows can be held out for it.
    """
    task, split, seed = rows.task, request.split, request.split_seed
    places = rows.evaluation_splits(split)
    train: list[Example] = []
    train_set = ""
    if training or not places:
        opened, train_set = rows.training_split(needed=training)
        if training or opened.has("train"):
            train = rows.read(opened, "train")
    sets = rows.read_sets(places)
    settle(len(train) + sum(map(len, sets.values())))
    if places:
        return Labelled(task, train, sets, split)
    if not training and rows.is_one_file:
        holds_out = split == "validation" and not request.judge_trained_rows
        if not (holds_out and _trained_on(task, train, trained, seed)):
            return Labelled(task, train, {"": train}, ALL_ROWS)
    if train and split == "validation":
        kept, held_out = _hold_out(rows, train, seed)
        note = (
            f"there is no validation split: {len(held_out):,} of the {len(train):,} training "
            "examples are held out for evaluation"
        )
        return Labelled(task, kept, {train_set: held_out}, HELD_OUT_SPLIT, [note])
    raise NotFound(f"no {split} split in {rows.source}{rows.content}")


def _hold_out(
    rows: TaskSource, examples: list[Example], seed: int
) -> tuple[list[Example], list[Example]]:
    """Divide examples of a source into a training set and a validation set."""
    held = held_back(rows.task, examples, seed)
    if held.all() or not held.any():
        raise UsageError(
            f"{rows.source}: {len(examples)} examples with {len({e.texts for e in examples})} "
            "different texts are too few to hold some back",
            "give a validation split",
        )
    pairs = list(zip(examples, held, strict=True))
    return [e for e, is_held in pairs if not is_held], [e for e, is_held in pairs if is_held]


def _trained_on(
    task: Task, examples: list[Example], trained: Mapping[str, RowHashes], seed: int
) -> bool:
    """Whether models were trained on this file.

    In that case they know all of its rows that are not held out or, as `choose_subset` takes them,
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
    data: Labelled, trained: Mapping[str, RowHashes], *, keep: bool, published: bool
) -> tuple[Labelled, RowHashes]:
    """Skip evaluation rows that a model was trained on, and log how many.

    Args:
        data: The task with its examples.
        trained: model -> hashes of its training rows.
        keep: Whether to keep these rows instead.
        published: Whether the split belongs to a benchmark. If few of its rows are also in its
            training split, they are kept, because published results include them.

    Returns:
        The remaining data, and the hashes of the rows that `keep` kept.

    Raises:
        UsageError: Too few rows remain.
    """
    sets, notes, kept = {}, list(data.notes), [np.empty(0, np.uint64)]
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
        where = {ALL_ROWS: "", HELD_OUT_SPLIT: " held out"}.get(
            data.split, f" of {data.split} {name}".rstrip()
        )
        rows = f"{count:,} of {total:,} rows{where}"
        reason = _training_counts(by_model)
        if published and count <= MAX_DUPLICATES * total:
            notes.append(f"kept {rows}, as published results do, although {reason}")
        elif keep:
            notes.append(f"kept {rows} (data.judge_trained_rows), although {reason}")
            kept.append(hashes[known])
        elif total - count < min(MIN_EVALUATION_ROWS, (total + 1) // 2):
            raise UsageError(
                f"cannot evaluate on {rows}: {reason}",
                "give --data with other rows, or evaluate on these rows with --set "
                "data.judge_trained_rows=true",
            )
        else:
            notes.append(
                f"skipped {rows}: {reason}, so their scores would be too high; "
                f"{total - count:,} rows remain"
            )
            sets[name] = [e for e, is_known in zip(examples, known, strict=True) if not is_known]
        log_fact(notes[-1])
    return replace(data, sets=sets, notes=notes), np.concatenate(kept)


def _training_counts(by_model: Mapping[str, int]) -> str:
    """Tell for a message how many rows each model was trained on."""
    counts = [
        (model, f"{n:,} of them" if len(by_model) > 1 else "them") for model, n in by_model.items()
    ]
    return " and ".join(
        f"this run trains on {n}" if model == THIS_RUN else f"{model} was trained on {n}"
        for model, n in counts
    )


def check_training(labelled: Labelled) -> None:
    """Raise a UsageError if there are no training examples, or none for some of the classes."""
    task = labelled.task
    if not labelled.train:
        raise UsageError(f"{task.title} has no training examples")
    if task.kind in ("class", "multi", "tokens"):
        counts = zip(task.labels, class_counts(task, labelled.train), strict=True)
        if missing := [name for name, count in counts if not count]:
            message = f"{task.title}: no training example has the label {', '.join(missing)}"
            raise UsageError(message, "train on more rows, or remove the label from the data")
