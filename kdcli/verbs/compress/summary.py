"""The result of a compression in sentences."""

from collections.abc import Mapping

from kdcli.deploy.measurements import MEASURE_AGAIN
from kdcli.metrics.resolution import exceeds
from kdcli.report.sections.latency import milliseconds
from kdcli.report.text import loses, megabytes, number, points_interval
from kdcli.verbs.compress.choice import all_misses
from kdcli.verbs.compress.limits import POINT, GoalSettings, conflict
from kdcli.verbs.compress.scores import ERROR, CandidateScores, ScoredModel, Verification

NOTABLE_POINTS = 0.5
"""Smallest difference between two losses, in points, that can change a decision."""


def sentence(
    scores: CandidateScores,
    verified: Verification,
    missed: Mapping[str, str],
    goal: GoalSettings,
    *,
    model: str,
    has_labels: bool,
) -> str:
    """Summarise gain and loss of the chosen candidate, or how far it misses the goal.

    Args:
        scores: The scores of all candidates.
        verified: The scores of the chosen candidate on the verification rows.
        missed: How it misses the goal, by limit.
        goal: The limits.
        model: The name of the model that was compressed.
        has_labels: Whether labels are the reference; otherwise it is the teacher.
    """
    teacher, chosen = verified.teacher, verified.chosen
    ratio = chosen.speedup
    assert ratio is not None  # It is None for the teacher only.
    times = f"{'at most ' if chosen.unstable else ''}{milliseconds(chosen.ms)} ms a text"
    times += "" if ratio.unstable else f" instead of {milliseconds(teacher.ms)}"
    smaller = (
        f"{_size_change(teacher.mb, chosen.mb)} ({megabytes(chosen.mb)} MB instead of "
        f"{megabytes(teacher.mb)})"
    )
    if ratio.is_inconclusive:
        unstable = f"The times are unstable ({times}) and give no speed-up; {MEASURE_AGAIN}"
        won = f"{chosen.name} is {smaller}. {unstable}"
    else:
        won = (
            f"{chosen.name} is {ratio.phrase()} as {model} ({ratio.trust()}; {times}) and {smaller}"
        )
    won += f". {_lost(scores.metric, verified, has_labels=has_labels)}"
    selected = next(one for one in scores.candidates if one.name == chosen.name)
    apart = _selection_loss(scores, selected, verified, has_labels=has_labels)
    if missed and not goal.misses(selected, scores.teacher):
        return (
            f"{chosen.name} met the goal on the selection rows but misses it on the verification "
            f"rows: {'; '.join(missed.values())}. {won}.{apart}"
        )
    if missed:
        both = conflict(list(all_misses(goal, scores).values()))
        why = "; ".join([*missed.values(), *([both] if both else [])])
        return (
            f"The goal cannot be met with what was tried. Nearest: {won}. It misses: {why}.{apart}"
        )
    _, high = _loss(teacher, chosen)
    is_within = goal.max_drop is None or not exceeds(high, goal.max_drop)
    return f"{won}{'' if is_within else '; the interval reaches beyond the goal'}.{apart}"


def describe_next(scores: CandidateScores, one: ScoredModel, command: str) -> str:
    """Describe the next candidate, with the command that verifies it."""
    ratio = one.speedup
    assert ratio is not None  # It is None for the teacher only.
    speed = "unstable times" if ratio.is_inconclusive else ratio.phrase()
    return (
        f"The next candidate is {one.name}: {number(one.score)} {scores.metric} on the selection "
        f"rows, {speed}, {megabytes(one.mb)} MB. To verify it, run: {command}"
    )


def _size_change(before: float, after: float) -> str:
    """Write how much smaller or larger a model became: `1.5 times smaller`."""
    if after > before:
        return f"{after / before:.1f} times as large"
    return f"{before / after:.1f} times smaller"


def _loss(teacher: ScoredModel, model: ScoredModel) -> tuple[float, float]:
    """Return the ends of the interval of the points that a candidate lost."""
    return (teacher.score - model.high) / POINT, (teacher.score - model.low) / POINT


def _selection_loss(
    scores: CandidateScores, selected: ScoredModel, verified: Verification, *, has_labels: bool
) -> str:
    """Write the loss on the selection rows if it clearly differs from the verified loss.

    The result is empty if the intervals of the two losses overlap, or if the losses differ too
    little to change a decision.
    """
    low, high = _loss(scores.teacher, selected)
    verified_low, verified_high = _loss(verified.teacher, verified.chosen)
    points = (scores.teacher.score - selected.score) / POINT
    verified_points = (verified.teacher.score - verified.chosen.score) / POINT
    overlaps = low <= verified_high and verified_low <= high
    if overlaps or abs(points - verified_points) < NOTABLE_POINTS:
        return ""
    lost = loses(points, _metric_phrase(scores.metric, has_labels=has_labels))
    ends = points_interval(low, high, 1 - ERROR, " of the loss")
    return (
        f" On the {scores.rows:,} selection rows it {lost} ({ends}). These losses differ by more "
        "than chance explains: expect the one whose rows resemble your own texts."
    )


def _metric_phrase(metric: str, *, has_labels: bool) -> str:
    """Name the metric, as agreement if the teacher is the reference."""
    if has_labels:
        return metric
    return f"agreement with the teacher{'' if metric == 'agreement' else f' ({metric})'}"


def _lost(metric: str, verified: Verification, *, has_labels: bool) -> str:
    """Write the points that the chosen candidate lost, with their interval and the rows."""
    what = _metric_phrase(metric, has_labels=has_labels)
    teacher = verified.teacher.score
    points = (teacher - verified.chosen.score) / POINT
    low, high = _loss(verified.teacher, verified.chosen)
    ends = points_interval(low, high, verified.confidence, " of the loss")
    if has_labels:
        ends = f"{number(verified.chosen.score)} instead of {number(teacher)}; {ends}"
    return f"It {loses(points, what)} ({ends}) on {verified.rows:,} verification rows"
