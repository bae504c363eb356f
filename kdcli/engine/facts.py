"""Facts that the processes of a run compare before the first step."""

import hashlib
import math

import numpy as np

from kdcli.engine.evaluation import CPU_MICRO_BATCH
from kdcli.engine.session import Fact
from kdcli.types import Examples, Job, Schedule

COMPARED_ROWS = 1_024
"""Number of rows per data set that are compared, evenly spaced."""


def facts_of(job: Job, schedule: Schedule) -> dict[str, Fact]:
    """Return what must be equal in all processes of a run, by the name that an error shows."""
    facts: dict[str, Fact] = {"optimiser steps": schedule.steps}
    data = {"training examples": job.examples, "held-out examples": job.held_out}
    for name, examples in data.items():
        if examples is not None:
            facts[f"number of {name}"] = len(examples)
            facts[f"hash of the {name}"] = _digest(examples)
    for name, module in job.modules.items():
        for path, parameter in module.named_parameters():
            facts[f"weights {name}.{path}"] = float(parameter.detach().double().norm())
    return facts


def _digest(examples: Examples) -> str:
    """Return a hash of evenly spaced rows.

    Numbers that were computed for the rows are excluded, because they may differ by rounding.
    """
    digest = hashlib.sha256()
    if len(examples):
        rows = np.unique(np.linspace(0, len(examples) - 1, COMPARED_ROWS).astype(np.int64))
        for part in np.array_split(rows, math.ceil(len(rows) / CPU_MICRO_BATCH)):
            for name, tensor in sorted(examples.batch(part).items()):
                if name == "labels" or not tensor.is_floating_point():
                    digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
