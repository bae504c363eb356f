"""The rows that choose a candidate and those that verify it, and notes about them."""

from dataclasses import dataclass, field

import numpy as np

from kdcli.data.labelled.partition import Partition, Pools, choose_partition
from kdcli.engine.progress import Progress
from kdcli.errors import UsageError
from kdcli.models.training_rows import NO_ROWS
from kdcli.run.context import cpu_session
from kdcli.verbs.compress.runner import PARTITION, StepRunner, evaluation_request
from kdcli.verbs.compress.settings import GoalSettings
from kdcli.workloads import open_rows

MIN_DATA = 200
"""With fewer rows, a message warns that the result depends on a few of them."""
MIN_ROWS = 100
"""With fewer verification rows, a note warns that the interval is wide."""


@dataclass(frozen=True)
class DividedData:
    """The selection and verification rows, and notes about them for the log and the report."""

    partition: Partition
    notes: list[str] = field(default_factory=list)


def divide_rows(runner: StepRunner) -> DividedData:
    """Choose the selection and verification rows, unless the recipe or an earlier process did.

    Raises UsageError: there are too few rows.
    """
    data, file = runner.recipe.data, runner.folder / PARTITION
    if data.partition is not None:
        return DividedData(Partition.read(data.partition))
    if file.is_file() and not runner.options.overwrite:
        return DividedData(Partition.read(str(file)))
    request = evaluation_request(runner.recipe)
    rows = open_rows(request, cpu_session(trust_remote_code=runner.options.trust_remote_code))
    pools = rows.pools(np.concatenate([NO_ROWS, *request.trained.values()]))
    count = len(pools.train) + len(pools.validation) + len(pools.test)
    partition = choose_partition(
        pools,
        selection_rows=data.selection_rows,
        verification_rows=data.verification_rows,
        seed=data.split_seed,
    )
    if not len(partition.verification) or not len(partition.selection):
        known = f", and {runner.recipe.model} was trained on some of them" * bool(len(pools.known))
        raise UsageError(
            f"{count:,} rows are too few to choose a candidate and to verify it{known}",
            f"give --data with at least {MIN_DATA} other rows; they need no labels",
        )
    Progress.log(
        f"{count:,} rows: {len(partition.selection):,} choose among candidates, "
        f"{len(partition.verification):,} verify the chosen model"
    )
    return DividedData(partition, row_notes(pools, partition))


def row_notes(pools: Pools, partition: Partition) -> list[str]:
    """Return notes on few rows, and on training rows that repeat evaluated ones."""
    notes = []
    count = len(pools.train) + len(pools.validation) + len(pools.test)
    if count < MIN_DATA:
        notes.append(f"only {count} rows: the choice and its score depend on a few of them")
    own_split = np.union1d(pools.validation, pools.test)
    repeated = np.isin(pools.train, own_split) & ~partition.is_training(pools.train)
    if repeats := int(repeated.sum()):
        notes.append(
            f"{repeats:,} training rows are also in the validation or test split: they are not "
            "trained on, and count once in the score"
        )
    return notes


def goal_notes(goal: GoalSettings, partition: Partition) -> list[str]:
    """Return notes on a goal that the verification rows can hardly decide."""
    notes, rows = [], len(partition.verification)
    if rows < MIN_ROWS:
        holds = "must hold" if goal.strict else "need not hold without --strict"
        limit = f", and --max-drop {holds} for its lower end" if goal.max_drop is not None else ""
        notes.append(f"only {rows} verification rows: the interval is wide{limit}")
    if goal.max_drop == 0:
        notes.append(
            "--max-drop 0 allows no measured loss at all: about half of the models that are as "
            "good as the teacher miss it by chance; 0.5 or 1.0 is a goal that they meet"
        )
    return notes
