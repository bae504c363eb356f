"""`kdcli distill`: students of a teacher, on text or, with `--task`, on a task."""

from kdcli.commands.distill.settings import DistillRecipe, TaskDistillRecipe
from kdcli.commands.distill.task import check_task, prepare_task
from kdcli.commands.distill.text import check_text, prepare_text
from kdcli.recipe.resolve import Resolved
from kdcli.recipe.sections import Invocation
from kdcli.report.dry_run import Estimate
from kdcli.report.finish import RunResult
from kdcli.report.stages import run_command


def run(resolved: Resolved[DistillRecipe], invocation: Invocation) -> RunResult | Estimate | None:
    """Distil on text, measure and report; returns and raises as `run_command`."""
    check_text(resolved.recipe)
    return run_command(resolved, invocation, prepare_text)


def run_on_task(resolved: Resolved[TaskDistillRecipe], invocation: Invocation) -> RunResult | Estimate | None:
    """Distil on a task, measure and report; returns and raises as `run_command`."""
    check_task(resolved.recipe)
    return run_command(resolved, invocation, prepare_task)
