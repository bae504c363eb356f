"""The training steps that a budget pays for when it is too short for the whole plan."""

import math
from dataclasses import dataclass

from kdcli.report.text import duration
from kdcli.verbs.compress.search import Search
from kdcli.verbs.compress.steps import Step, Steps, TrainingCost

MARGIN = 0.8
"""Share of the time left that a training is given, because a machine may become busier after the
dry run."""
FEWEST = 20
"""Number of optimiser steps below which a student is only fitted."""


@dataclass(frozen=True)
class PaidSteps:
    """The optimiser steps of a training that the budget pays for.

    Attributes:
        steps: The steps; 0 for a student that is only fitted by least squares.
        total: The steps of the whole training.
        seconds: The budget that would pay for all of them.
        why: Why there is no time even for a fit; empty if there is.
    """

    steps: int
    total: int
    seconds: float
    why: str = ""

    @property
    def done(self) -> str:
        """What was done to the student, as a predicate after `is`."""
        if not self.steps:
            return f"fitted by least squares, but not trained ({self.total:,} steps were planned)"
        return f"trained for {self.steps:,} of {self.total:,} steps"

    def note(self, shape: str, steps: Steps) -> str:
        """Say what the budget pays for, and which budget would pay for the whole training."""
        command = steps.continuing_command(self.seconds)
        return f"{shape} is {self.done}, because the budget ends. For the whole training: {command}"


def paid_steps(search: Search, step: Step, cost: TrainingCost) -> PaidSteps:
    """Return how many steps of a training the budget pays for.

    The spare time also pays for the preparation of the training, which takes as long as its dry
    run, and for its exports and scores.

    Args:
        search: The search.
        step: The whole training.
        cost: Its cost.
    """
    steps = search.steps
    if cost.error:
        return PaidSteps(0, 0, 0.0, cost.error)

    def compute() -> PaidSteps:
        around = cost.setup + steps.seconds_after_training()
        if steps.left <= cost.setup:
            why = f"a fit takes about {duration(cost.setup)}, "
            return PaidSteps(0, cost.steps, 0.0, f"{why}{duration(max(0.0, steps.left))} are left")
        # A student that is only fitted is exported and scored even if the budget ends before.
        left = max(0.0, steps.spare - around)
        answer = steps.left - steps.spare
        whole = steps.seconds + around + cost.seconds / MARGIN + answer
        if cost.seconds <= MARGIN * left:
            return PaidSteps(cost.steps, cost.steps, whole)
        count = math.floor(MARGIN * left / cost.seconds * cost.steps)
        return PaidSteps(count if count >= FEWEST else 0, cost.steps, whole)

    values = [*step.identity, search.machine, steps.budget]
    return steps.once(f"paid-{step.name}", values, PaidSteps, compute)
