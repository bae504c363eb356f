"""`kdcli distill`: students of a teacher, on text or, with `--task`, on a task."""

from __future__ import annotations

from kdcli.distill_run import check_text, claim_text, prepare_text, probe_text, run_text
from kdcli.engine import track
from kdcli.estimate import Estimate
from kdcli.finish import Finished
from kdcli.launch import launch
from kdcli.recipe import Resolved
from kdcli.settings import DistillRecipe, Invocation


def run(resolved: Resolved[DistillRecipe], invocation: Invocation) -> Finished | Estimate | None:
    """Distil on text, measure and report.

    Returns:
        The report of the last leg, or the estimate of a dry run; None in a process that has nothing to print.

    Raises:
        KdcliError: see `kdcli.errors`; nothing was claimed or written if the recipe, models or data cannot be used.
    """
    check_text(resolved.recipe)
    launched = launch(resolved.recipe.train.dtype, invocation)
    if launched is None:
        return None
    accelerator, device = launched
    text = prepare_text(resolved, invocation, accelerator, device)
    if invocation.dry_run:
        return probe_text(text)
    claim_text(text)
    track(accelerator, text.legs[-1].folder)
    result = run_text(text)
    accelerator.end_training()
    return result
