"""The result of a compression in sentences."""

from collections.abc import Mapping

from kdcli.deploy.measurements import MEASURE_AGAIN
from kdcli.metrics.resolution import exceeds
from kdcli.report.sections.latency import milliseconds
from kdcli.report.text import loses, megabytes, number, points_interval
from kdcli.verbs.compress.choice import all_misses, conflict, misses
from kdcli.verbs.compress.judge import POINT, CandidateScores, ScoredModel, Verification
from kdcli.verbs.compress.settings import GoalSettings


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
    if missed and not misses(goal, scores.teacher, selected):
        return (
            f"{chosen.name} met the goal on the selection rows but misses it on the verification "
            f"rows: {'; '.join(missed.values())}. {won}."
        )
    if missed:
        both = conflict(all_misses(goal, scores).values())
        why = "; ".join([*missed.values(), *([both] if both else [])])
        return f"The goal cannot be met with what was tried. Nearest: {won}. It misses: {why}."
    _, high = _loss(verified)
    is_within = goal.max_drop is None or not exceeds(high, goal.max_drop)
    return f"{won}{'' if is_within else '; the interval reaches beyond the goal'}."


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


def _loss(verified: Verification) -> tuple[float, float]:
    """Return the ends of the interval of the points that the chosen candidate lost."""
    return (
        (verified.teacher.score - verified.chosen.high) / POINT,
        (verified.teacher.score - verified.chosen.low) / POINT,
    )


def _lost(metric: str, verified: Verification, *, has_labels: bool) -> str:
    """Write the points that the chosen candidate lost, with their interval and the rows."""
    what = metric
    if not has_labels:
        named = "" if metric == "agreement" else f" ({metric})"
        what = f"agreement with the teacher{named}"
    teacher = verified.teacher.score
    points = (teacher - verified.chosen.score) / POINT
    low, high = _loss(verified)
    ends = points_interval(low, high, verified.confidence, " of the loss")
    if has_labels:
        ends = f"{number(verified.chosen.score)} instead of {number(teacher)}; {ends}"
    return f"It {loses(points, what)} ({ends}) on {verified.rows:,} verification rows"
