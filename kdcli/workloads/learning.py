"""Tell whether a model that was fine-tuned has learned anything."""

from collections.abc import Sequence
from statistics import fmean

from kdcli.report.schema import Evaluation
from kdcli.report.text import number

HARDLY = 0.9
"""A training loss whose mean at the end is above this share of the mean at the start has hardly
fallen."""
ENDS = 0.05
"""The share of the logged losses that counts as the start, and as the end, of a training."""
MIN_LOSSES = 3
"""The minimum number of losses at each end, because the loss of a single batch is noisy."""


def describe_score(one: Evaluation, model: str, rows: str) -> str:
    """Write a score of a model, and the trivial answer's score if there is one.

    Args:
        one: The scores.
        model: A description of the model.
        rows: A description of the rows, such as `selection rows`.
    """
    metric, score = next(iter(one.metrics.items()))
    where = f"{one.n:,} {rows} of {one.set}".removesuffix(" of ")
    scored = f"{model} has {metric} {number(score)} on {where}"
    if one.trivial is None:
        return scored
    always = f"answering {one.trivial.answer} to every text has"
    return f"{scored}; {always} {number(one.trivial.metrics[metric])}"


def describe_learning(evaluations: Sequence[Evaluation], losses: Sequence[float]) -> str:
    """Describe the signs that a model learned little; empty if there are none.

    A model that has learned nothing has a score that is not clearly better than the trivial
    answer's. A training loss that hardly fell is a weaker sign, because labels that contradict each
    other limit how far it can fall.

    Args:
        evaluations: The scores of the model.
        losses: The logged losses of its training.
    """
    hardly = _hardly_fell(losses)
    if any(one.trivial is not None and not one.trivial.is_beaten for one in evaluations):
        worse = "its score is not clearly better than always giving the same answer"
        return f"may have learned little or nothing: {' and '.join(filter(None, [worse, hardly]))}"
    return f"may not have learned all that it can: {hardly}" if hardly else ""


def _hardly_fell(losses: Sequence[float]) -> str:
    """Describe a training loss that hardly fell; empty if it fell, or if it was logged once."""
    count = max(min(MIN_LOSSES, len(losses) // 2), round(ENDS * len(losses)))
    if count == 0:
        return ""
    first, last = fmean(losses[:count]), fmean(losses[-count:])
    if last < HARDLY * first:
        return ""
    return f"its training loss only went from {number(first)} to {number(last)} on average"
