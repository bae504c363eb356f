"""Report the score of the fine-tuned teacher before any candidate learns from it."""

from collections.abc import Sequence
from statistics import fmean

from kdcli.engine.progress import Progress
from kdcli.report.schema import Evaluation, Report
from kdcli.report.text import number
from kdcli.verbs.compress.judge import TEACHER
from kdcli.verbs.compress.runner import StepRunner

HARDLY = 0.9
"""A training loss whose mean at the end is above this share of the mean at the start has hardly
fallen."""
ENDS = 0.05
"""The share of the logged losses that counts as the start, and as the end, of a training."""
MIN_LOSSES = 3
"""The minimum number of losses at each end, because the loss of a single batch is noisy."""
REMEDY = (
    "train it longer, such as with --set plan.finetune.train.epochs=10, or faster, such as with "
    "--set plan.finetune.train.lr=1e-3 for a small model"
)


def log_teacher(runner: StepRunner) -> list[str]:
    """Log and return the scores of the fine-tuned teacher, next to those of the trivial answer."""
    notes = teacher_notes(runner.result(TEACHER).report)
    for note in notes:
        Progress.log(note)
    return notes


def teacher_notes(report: Report) -> list[str]:
    """Return a note on each score of a fine-tuned teacher, and a warning if it learned little.

    A teacher that has learned nothing can be compressed without any loss. Its score is not clearly
    better than the trivial answer's. A training loss that hardly fell is a weaker sign, because
    labels that contradict each other limit how far it can fall.
    """
    scores = [_scored(one) for one in report.evaluations]
    hardly = _hardly_fell([point.loss for point in report.curve if point.loss is not None])
    if any(one.trivial is not None and not one.trivial.is_beaten for one in report.evaluations):
        worse = "its score is not clearly better than always giving the same answer"
        found = f"may have learned little or nothing: {' and '.join(filter(None, [worse, hardly]))}"
    elif hardly:
        found = f"may not have learned all that it can: {hardly}"
    else:
        return scores
    return [
        *scores,
        f"the fine-tuned teacher {found}. Every candidate learns from it, so {REMEDY}",
    ]


def _scored(one: Evaluation) -> str:
    """Write a score of the teacher, and the trivial answer's score if there is one."""
    metric, score = next(iter(one.metrics.items()))
    where = f"{one.n:,} selection rows of {one.set}".removesuffix(" of ")
    scored = f"the fine-tuned teacher has {metric} {number(score)} on {where}"
    if one.trivial is None:
        return scored
    always = f"answering {one.trivial.answer} to every text has"
    return f"{scored}; {always} {number(one.trivial.metrics[metric])}"


def _hardly_fell(losses: Sequence[float]) -> str:
    """Describe a training loss that hardly fell; empty if it fell, or if it was logged once."""
    count = max(min(MIN_LOSSES, len(losses) // 2), round(ENDS * len(losses)))
    if count == 0:
        return ""
    first, last = fmean(losses[:count]), fmean(losses[-count:])
    if last < HARDLY * first:
        return ""
    return f"its training loss only went from {number(first)} to {number(last)} on average"
