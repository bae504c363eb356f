"""Report the score of the fine-tuned teacher before any candidate learns from it."""

from kdcli.engine.progress import Progress
from kdcli.report.finish import RunResult
from kdcli.report.schema import Report
from kdcli.workloads.learning import describe_learning, describe_score

NAME = "the fine-tuned teacher"
REMEDY = (
    "train it for more epochs, such as with --set plan.finetune.train.epochs=10, or with a larger "
    "learning rate, such as with --set plan.finetune.train.lr=1e-3 for a small model"
)


def log_teacher(result: RunResult) -> list[str]:
    """Log and return the scores of the fine-tuned teacher and of the trivial answer."""
    notes = teacher_notes(result.report)
    for note in notes:
        Progress.log(note)
    return notes


def teacher_notes(report: Report) -> list[str]:
    """Return a note on each score of a fine-tuned teacher, and a warning if it learned little.

    A teacher that has learned nothing can be compressed without any loss.
    """
    scores = [describe_score(one, NAME, "selection rows") for one in report.evaluations]
    losses = [point.loss for point in report.curve if point.loss is not None]
    signs = describe_learning(report.evaluations, losses)
    if not signs:
        return scores
    return [*scores, f"{NAME} {signs}. Every candidate learns from it, so {REMEDY}"]
