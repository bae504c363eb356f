"""Say how good the teacher is that a compression fine-tuned, before anything learns from it."""

from kdcli.engine.progress import Progress
from kdcli.report.schema import Evaluation, Report, Training
from kdcli.report.text import number
from kdcli.verbs.compress.runner import StepRunner
from kdcli.verbs.compress.search import TEACHER

HARDLY = 0.9
"""A training loss that stays above this share of the first one has hardly fallen."""
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

    A teacher that has learned nothing can be compressed without any loss. Signs of it are a score
    that is not clearly above the one of the trivial answer, and a training loss that hardly fell.
    """
    scores = [_scored(one) for one in report.evaluations]
    signs = []
    if any(one.trivial is not None and not one.trivial.is_beaten for one in report.evaluations):
        signs.append("its score is not clearly above the one of the same answer to every text")
    if report.training is not None and (hardly := _hardly_fell(report.training)):
        signs.append(hardly)
    if not signs:
        return scores
    warning = (
        f"the fine-tuned teacher may have learned little or nothing: {' and '.join(signs)}. Every "
        f"candidate learns from it, so {REMEDY}"
    )
    return [*scores, warning]


def _scored(one: Evaluation) -> str:
    """Write a score of the teacher, and the one of the trivial answer if there is one."""
    metric, score = next(iter(one.metrics.items()))
    where = f"{one.n:,} selection rows of {one.set}".removesuffix(" of ")
    scored = f"the fine-tuned teacher has {metric} {number(score)} on {where}"
    if one.trivial is None:
        return scored
    always = f"answering {one.trivial.answer} to every text has"
    return f"{scored}; {always} {number(one.trivial.metrics[metric])}"


def _hardly_fell(training: Training) -> str:
    """Describe a training loss that hardly fell; empty if it fell."""
    first, last = training.loss_first, training.loss_last
    if first is None or last is None or last < HARDLY * first:
        return ""
    return f"its training loss only went from {number(first)} to {number(last)}"
