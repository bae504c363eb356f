"""The cost of a training, estimated by a dry run, and the checks of the budget."""

import math
from dataclasses import dataclass

from kdcli.disk import cache_key
from kdcli.engine.progress import Progress
from kdcli.errors import KdcliError, MachineError, Stopped, UsageError
from kdcli.report.text import duration
from kdcli.verbs.compress.journal import Unrecorded
from kdcli.verbs.compress.judge import TEACHER
from kdcli.verbs.compress.question import VERIFIED
from kdcli.verbs.compress.runner import StepRunner
from kdcli.verbs.compress.search import Search
from kdcli.verbs.compress.steps import Step

TIMED = "timed "
"""The beginning of the journal's keys of timings."""


class BudgetError(UsageError):
    """A budget that is too small for any candidate."""


@dataclass(frozen=True)
class TrainingCost:
    """The optimiser steps and seconds of a training; `error` says why it would fail."""

    steps: int
    seconds: float
    error: str = ""


def estimate(runner: StepRunner, name: str, step: Step) -> TrainingCost:
    """Return the cost of a training, from the journal if it is known for this machine."""
    key = f"estimate {name} {cache_key(runner.place)[:8]}"
    try:
        return runner.journal.once(key, TrainingCost, lambda: training_cost(runner, step))
    except Unrecorded as why:
        return TrainingCost(0, 0.0, str(why))


def check_cost(runner: StepRunner, name: str, cost: TrainingCost) -> str:
    """Return why a training cannot begin; empty if it can, or if it has begun already."""
    if cost.error:
        return cost.error
    if runner.has_begun(name):
        return ""
    why = too_long(runner, name, cost.seconds)
    if not why:
        Progress.log(f"{name}: its training takes about {duration(cost.seconds)}")
    return why


def too_long(runner: StepRunner, training: str, seconds: float) -> str:
    """Return why a training takes longer than the time that is left; empty if it does not.

    The journal keeps the answer. A resumed run has less time left, but must decide as before.
    Another budget, or another question to a finished run, decides from the time that is left.
    """
    journal = runner.journal
    if journal.budget is None:
        return ""

    def reason() -> str:
        if seconds <= journal.left:
            return ""
        left = duration(max(0.0, journal.left))
        return f"it takes about {duration(seconds)}, {left} are left"

    earlier = len(journal.known(VERIFIED))
    key = f"time for {training}: {seconds} of {journal.budget} after {earlier} questions"
    return journal.once(key, str, reason)


def training_cost(runner: StepRunner, step: Step) -> TrainingCost:
    """Estimate a training by a dry run."""
    try:
        stages = runner.estimate(step).stages
    except Stopped:
        raise
    except MachineError as error:
        raise Unrecorded(error.message) from None
    except KdcliError as error:
        return TrainingCost(0, 0.0, error.message)
    return TrainingCost(stages[-1].steps, sum(stage.seconds for stage in stages))


def check_timing(search: Search) -> None:
    """Raise a BudgetError if measuring the backends takes longer than the budget."""
    runner = search.runner
    if runner.journal.known(TIMED):
        return
    seconds = runner.recipe.measure.min_seconds * (1 + len(search.backends))
    if runner.journal.left < seconds:
        hint = "raise it, or give a fine-tuned model and fewer plan.shapes"
        raise _too_small(f"timing the backends takes {duration(seconds)} at least", hint)


def timing_stopped(runner: StepRunner, seconds: float) -> BudgetError:
    """Return the error of a timing that the budget ended. `seconds`: what it takes as a whole."""
    took = duration(seconds)
    why = f"it ended while models were timed and compared, which takes about {took} in all"
    return _too_small(why, _larger(runner, 2 * seconds))


def check_budget(runner: StepRunner, *, is_fine_tuned: bool) -> None:
    """Raise a BudgetError if the budget is too small for any candidate.

    A run whose steps have begun has passed this check. Later, its budget only ends trainings.
    """
    if runner.recipe.budget is None or runner.has_steps:
        return
    spent = runner.journal.seconds
    if runner.journal.left <= 0:
        why = f"timing the backends and the untrained shapes took {duration(spent)}"
        raise _too_small(why, _larger(runner, 2 * spent))
    if is_fine_tuned:
        return
    cost = estimate(runner, TEACHER, finetuning(runner))
    why = check_cost(runner, TEACHER, cost)
    if cost.error:
        raise UsageError(f"{TEACHER} failed: {why}")
    if why:
        why = f"fine-tuning comes first, and {why}"
        raise _too_small(why, _larger(runner, spent + 2 * cost.seconds))


def _too_small(why: str, hint: str) -> BudgetError:
    return BudgetError(f"--budget is too small for any candidate: {why}", hint)


def _larger(runner: StepRunner, seconds: float) -> str:
    """Return a hint that names a budget of at least these seconds."""
    least = f"use --budget {math.ceil(seconds / 60)}m or more"
    if not runner.journal.known(TIMED) or runner.replaces_run:
        return least
    command = runner.continuing_command(seconds)
    return f"{least}; {runner.folder} has the timings so far: {command}"


def finetuning(runner: StepRunner) -> Step:
    """Return the step that fine-tunes the model."""
    recipe = runner.recipe
    return runner.trainer.finetune(str(recipe.model), recipe.plan.finetune)
