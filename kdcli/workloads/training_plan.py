"""The order of training examples, in batches of rows with similar lengths."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from kdcli.data.batches import BatchOrder, BucketOrder
from kdcli.engine.launch import make_schedule
from kdcli.engine.progress import Progress
from kdcli.errors import UsageError
from kdcli.recipe.sections import TrainSettings
from kdcli.types import Array, Order, Schedule
from kdcli.workloads.settings import FinetuneTrainSettings

DEFAULT_POOL = 64
"""Number of batches that are drawn together and grouped by row length."""


class Plan(NamedTuple):
    """The order of the training examples and the schedule.

    Attributes:
        order: The examples of each step.
        schedule: Number of steps and learning rates.
        steps_per_pass: Optimiser steps in one pass over the examples.
    """

    order: Order
    schedule: Schedule
    steps_per_pass: float


def bucketed(lengths: Array, settings: TrainSettings, group: int) -> Plan:
    """Plan batches of groups of rows with similar lengths.

    A micro-batch is a group, unless `train.micro_batch_size` sets another size. The size decides
    nothing but the memory and the padding, so the same rows share a batch with any size.

    Args:
        lengths: Number of tokens in each row.
        settings: The recipe's `train` section.
        group: Number of rows in a group.

    Raises:
        UsageError: No row has a token, or the warm-up is as long as the run.
    """
    if not lengths.any():
        raise UsageError(
            f"none of the {len(lengths):,} rows has a token: the tokenizer finds nothing in them",
            "check the column of the texts and the tokenizer files of the model",
        )
    pool = settings.pool if isinstance(settings, FinetuneTrainSettings) else DEFAULT_POOL
    order = BucketOrder(lengths, settings.batch_size, group, settings.seed, pool)
    schedule = make_schedule(settings, order.steps_of_pass)
    micro = settings.micro_batch_size or group
    return Plan(order, replace(schedule, micro_batch_size=micro), order.steps_of_pass)


def log_padding(order: Order) -> None:
    """Log the share of padding, and what it would be with random batches."""
    if not isinstance(order, BucketOrder):
        return
    lengths = order.lengths
    plain = BatchOrder(len(lengths), order.batch_size, order.seed)
    steps = range(1, min(200, order.steps_of_pass) + 1)
    drawn = [lengths[plain.indices(step)] for step in steps]
    random = 1 - sum(int(b.sum()) for b in drawn) / sum(len(b) * int(b.max()) for b in drawn)
    Progress.log(
        f"{len(lengths):,} rows of {lengths.mean():.0f} tokens on average; grouping by length "
        f"leaves {order.padding():.1%} padding (random batches: {random:.1%})"
    )
