"""`kdcli cotrain`: two models trained together that learn from each other, on text or, with `--task`, on a task."""

from __future__ import annotations

from kdcli.commands.cotrain.plan import check_pair
from kdcli.commands.cotrain.settings import CotrainRecipe, CotrainTaskRecipe
from kdcli.commands.cotrain.task import check_task_pair, prepare_task_pair, probe_task_pair, run_task_pair
from kdcli.commands.cotrain.text import prepare_pair, probe_pair, run_pair
from kdcli.errors import UsageError
from kdcli.recipe.resolve import Resolved
from kdcli.recipe.sections import Invocation
from kdcli.report.dry_run import Estimate
from kdcli.report.finish import RunResult
from kdcli.training.launch import run_command


def weights(text: str | None) -> list[float] | None:
    """`1:1:1:4` as numbers; which are allowed is checked with the recipe.

    Raises:
        UsageError: something between the colons is no number.
    """
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(":")]
    except ValueError:
        raise UsageError(
            f"--weights takes four numbers, got '{text}'",
            "student against labels : student from teacher : teacher against labels : teacher from student, for "
            "example 1:1:1:4",
        ) from None


def run(resolved: Resolved[CotrainRecipe], invocation: Invocation) -> RunResult | Estimate | None:
    """Co-train on text, measure and report.

    Returns:
        The report, or the estimate of a dry run; None in a process that has nothing to print.

    Raises:
        KdcliError: see `kdcli.errors`; nothing was claimed or written if the recipe, models or data cannot be used.
    """
    check_pair(resolved.recipe)
    return run_command(resolved, invocation, prepare=prepare_pair, probe=probe_pair, run=run_pair)


def run_on_task(resolved: Resolved[CotrainTaskRecipe], invocation: Invocation) -> RunResult | Estimate | None:
    """Co-train on a task, measure and report; returns and raises as `run`."""
    check_pair(resolved.recipe)
    check_task_pair(resolved.recipe)
    return run_command(resolved, invocation, prepare=prepare_task_pair, probe=probe_task_pair, run=run_task_pair)
