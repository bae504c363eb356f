"""Divide the data into selection and verification rows, and warn if they decide little."""

import numpy as np

from kdcli.data.labelled.partition import (
    SELECTION_SIZE,
    VERIFICATION_SIZE,
    Partition,
    Pools,
    choose_partition,
)
from kdcli.errors import UsageError
from kdcli.listing import joined
from kdcli.messages import log
from kdcli.models.load import location
from kdcli.models.model import training_rows
from kdcli.run.context import cpu_session
from kdcli.verbs.compress.limits import GoalSettings
from kdcli.verbs.compress.search import evaluation_request
from kdcli.verbs.compress.settings import CompressRecipe
from kdcli.verbs.compress.steps import Steps
from kdcli.workloads import open_rows

PARTITION = "partition.safetensors"
"""The file of the chosen rows."""
MIN_DATA = 200
"""The number of rows that a hint asks for if they are too few."""
MIN_SELECTION = 200
"""With fewer selection rows, a note warns that chance decides among similar candidates."""
MIN_ROWS = 100
"""With fewer verification rows, a note warns that the interval is wide."""


def divide_rows(recipe: CompressRecipe, steps: Steps) -> tuple[Partition, list[str]]:
    """Choose the selection and verification rows, unless the recipe or an earlier process did.

    Returns:
        The partition, and notes for the log and the report.

    Raises:
        UsageError: There are too few rows.
    """
    file = steps.folder / PARTITION
    data, session = recipe.data, cpu_session()
    rows = open_rows(evaluation_request(recipe), session)
    pools = rows.pools(training_rows(location(str(recipe.model))))
    is_new = False
    if data.partition is not None:
        partition = Partition.read(data.partition)
    elif file.is_file() and not steps.options.overwrite:
        partition = Partition.read(str(file))
    else:
        is_new = True
        partition = choose_partition(
            pools,
            selection=SELECTION_SIZE.given(data.selection_rows),
            verification=VERIFICATION_SIZE.given(data.verification_rows),
            seed=data.split_seed,
        )
    if not len(partition.verification) or not len(partition.selection):
        too_few, wanted = "too few to choose a candidate and to verify it", f"{MIN_DATA} rows"
        if len(pools.known):
            too_few = f"{pools.untrained:,} of them did not train {recipe.model}: {too_few}"
            wanted += " that did not train the model"
        raise UsageError(
            f"the data has {pools.count:,} row{'s' if pools.count != 1 else ''}, {too_few}",
            f"give --data with at least {wanted}; they need no labels",
        )
    selection, verification = map(pools.count_in, (partition.selection, partition.verification))
    log(
        f"{pools.count:,} rows in all splits: {selection:,} choose among candidates, "
        f"{verification:,} verify the chosen model"
    )
    taken = {"selection_rows": (SELECTION_SIZE, selection)}
    taken["verification_rows"] = (VERIFICATION_SIZE, verification)
    short = [
        f"data.{key}={wanted}, but this part has {count:,} rows: a part of a split, or at most a "
        "third of the training rows, without rows that trained the model"
        for key, (size, count) in taken.items()
        if is_new and size.given(wanted := getattr(data, key)).is_given and count < wanted
    ]
    # The note on rows that trained the model has a hint of its own.
    hint = "" if _rows_trained(pools, partition) else "; give more rows"
    few = goal_notes(recipe.goal, selection, verification, hint)
    return partition, [*rows.notes(), *row_notes(pools, partition), *short, *few]


def row_notes(pools: Pools, partition: Partition) -> list[str]:
    """Return notes on rows that trained the model, and on training rows that are evaluated too."""
    notes = []
    if known := _rows_trained(pools, partition):
        note = (
            f"{known:,} of {pools.count:,} rows trained the model, so they neither choose a "
            "candidate nor verify it"
        )
        few = ["selection"] * (pools.count_in(partition.selection) < MIN_SELECTION)
        few += ["verification"] * (pools.count_in(partition.verification) < MIN_ROWS)
        if few:
            note += (
                f", which leaves few {joined(few)} rows: give other rows, or train without some of "
                "them"
            )
        notes.append(note)
    own_split = np.union1d(pools.validation, pools.test)
    repeated = np.isin(pools.train, own_split) & ~partition.is_training(pools.train)
    if repeats := int(repeated.sum()):
        notes.append(
            f"{repeats:,} training rows are also in the validation or test split: they are "
            "excluded from training and count once in the score"
        )
    return notes


def _rows_trained(pools: Pools, partition: Partition) -> int:
    """Return the number of rows that trained the model, and are not evaluated."""
    every = np.concatenate([pools.train, pools.validation, pools.test])
    return int((np.isin(every, pools.known) & partition.is_training(every)).sum())


def goal_notes(goal: GoalSettings, selection: int, rows: int, hint: str = "") -> list[str]:
    """Return notes about few selection or verification rows, and about a maximum drop of 0.

    Args:
        goal: The goal.
        selection: The number of selection rows.
        rows: The number of verification rows.
        hint: What to do about few selection rows.
    """
    notes = []
    if selection < MIN_SELECTION:
        notes.append(
            f"only {selection} selection rows: chance decides among candidates with similar scores"
            f"{hint}"
        )
    if rows < MIN_ROWS:
        note = f"only {rows} verification rows, so the interval is wide"
        if goal.max_drop is not None:
            note += (
                ", and with --strict all of it must stay within --max-drop"
                if goal.strict
                else ". Without --strict, only the measured drop must stay within --max-drop, not "
                "the whole interval"
            )
        notes.append(note)
    if goal.max_drop == 0:
        notes.append(
            "--max-drop 0 allows no measured loss, so about half of the models that are as good "
            "as the teacher miss it by chance; use 0.5 or 1.0 instead"
        )
    return notes
