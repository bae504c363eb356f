"""Which candidates meet the goal, and which one is chosen."""

from collections.abc import Collection, Mapping
from itertools import combinations

from kdcli.deploy.measurements import UNSTABLE_PHRASE
from kdcli.metrics.resolution import exceeds
from kdcli.report.pareto import SAME_LATENCY, Point, dominated_by
from kdcli.report.text import megabytes
from kdcli.verbs.compress.judge import POINT, CandidateScores, ScoredModel, Verification
from kdcli.verbs.compress.settings import GoalSettings
from kdcli.workloads.decisions import class_drop_misses, min_count

QUALITY = ("max_drop", "max_class_drop")
"""The limits of quality."""
LIMITS = ("speedup", "max_latency_ms", "max_mb")
"""The limits of speed and size."""


def points_lost(goal: GoalSettings, teacher: ScoredModel, one: ScoredModel) -> float:
    """Return the points that a candidate loses, with `strict` at its interval's lower end."""
    return (teacher.score - (one.low if goal.strict else one.score)) / POINT


def misses(goal: GoalSettings, teacher: ScoredModel, one: ScoredModel) -> dict[str, str]:
    """Return how a candidate misses the goal, by limit; empty if it meets the goal."""
    missed = {}
    lost = points_lost(goal, teacher, one)
    if goal.max_drop is not None and exceeds(lost, goal.max_drop):
        end = " at the interval's lower end" if goal.strict else ""
        missed["max_drop"] = (
            f"{lost:.2f} points lost{end}, {lost - goal.max_drop:.2f} more than {goal.max_drop:g}"
        )
    if worse := _class_misses(goal, one):
        missed["max_class_drop"] = "; ".join(worse)
    ratio = one.speedup
    if goal.speedup is not None and ratio is not None and (ratio.stated or 0.0) < goal.speedup:
        trust = f" ({UNSTABLE_PHRASE})" if ratio.unstable else ""
        measured = "no speed-up" if ratio.is_inconclusive else ratio.phrase(digits=2)
        missed["speedup"] = f"{measured}{trust}, not {goal.speedup:g}"
    if goal.max_latency_ms is not None and one.ms > goal.max_latency_ms:
        over = f"{one.ms - goal.max_latency_ms:.2f} above {goal.max_latency_ms:g}"
        trust = f" ({UNSTABLE_PHRASE})" if one.unstable else ""
        missed["max_latency_ms"] = f"{one.ms:.2f} ms{trust}, {over}"
    if goal.max_mb is not None and one.mb > goal.max_mb:
        over = f"{megabytes(one.mb - goal.max_mb)} above {goal.max_mb:g}"
        missed["max_mb"] = f"{megabytes(one.mb)} MB, {over}"
    return missed


def verified_misses(
    goal: GoalSettings, missed: Mapping[str, str], verified: Verification
) -> dict[str, str]:
    """Return how the chosen model misses the goal, with its drops on the verification rows.

    Args:
        goal: the limits.
        missed: the limits that it misses on the selection rows.
        verified: its scores on the verification rows.
    """
    drops = misses(goal, verified.teacher, verified.chosen)
    result = {limit: why for limit, why in missed.items() if limit not in QUALITY}
    result |= {limit: why for limit, why in drops.items() if limit == "max_drop"}
    if goal.max_class_drop is not None:
        worse = [
            miss
            for decision in verified.report.decisions
            for miss in class_drop_misses(decision, goal.max_class_drop)
        ]
        result |= {"max_class_drop": "; ".join(worse)} if worse else {}
    return result


def failures(goal: GoalSettings, scores: CandidateScores) -> set[str]:
    """Return the candidates that were verified for an earlier goal and miss this goal's limits of
    quality."""
    return {name for name, one in scores.verified.items() if verified_misses(goal, {}, one)}


def all_misses(goal: GoalSettings, scores: CandidateScores) -> dict[str, dict[str, str]]:
    """Return how each candidate misses the goal, by name and limit.

    If a candidate was verified for an earlier goal, its quality is that on the verification rows.
    """
    return {one.name: _misses_of(goal, scores, one) for one in scores.candidates}


def _misses_of(goal: GoalSettings, scores: CandidateScores, one: ScoredModel) -> dict[str, str]:
    """Return how a candidate misses the goal; see `all_misses`."""
    missed = misses(goal, scores.teacher, one)
    verified = scores.verified.get(one.name)
    if verified is None:
        return missed
    return {
        limit: f"{why}, on the verification rows" if limit in QUALITY else why
        for limit, why in verified_misses(goal, missed, verified).items()
    }


def _class_misses(goal: GoalSettings, one: ScoredModel) -> list[str]:
    """Describe the classes that lose too much on the selection rows.

    Sets without a class that has enough rows are checked on the verification rows alone.
    """
    if goal.max_class_drop is None:
        return []
    needed = min_count(goal.max_class_drop)
    return [
        miss
        for decision in one.decisions
        if any(each.count >= needed for each in decision.classes)
        for miss in class_drop_misses(decision, goal.max_class_drop)
    ]


def conflict(missed: Collection[Mapping[str, str]]) -> str:
    """Name two limits that some candidates meet, but none meets together; empty if there are none.

    `missed` has the result of `misses` for each candidate.
    """
    for pair in map(set, combinations((*QUALITY, *LIMITS), 2)):
        met = [pair - one.keys() for one in missed]
        if pair not in met and set().union(*met) == pair:
            names = " and ".join(f"--{name.replace('_', '-')}" for name in sorted(pair))
            return f"{names} contradict each other here: each can be met, but not both"
    return ""


def is_bounded(goal: GoalSettings) -> bool:
    """Whether the goal limits speed or size. `max_drop` alone asks for the fastest model."""
    return any(getattr(goal, limit) is not None for limit in LIMITS)


def choose(goal: GoalSettings, scores: CandidateScores) -> tuple[ScoredModel, dict[str, str]]:
    """Return the best candidate, and the limits that it misses.

    If candidates meet the goal, the fastest of them is the best, and the smallest among equally
    fast ones. Without `max_drop`, it is the candidate with the best score. If no candidate meets
    the goal, the one that misses the least is chosen, with quality before speed and size.
    Candidates that another one dominates are not considered.

    If a candidate met this goal on the selection rows but failed on the verification rows, the fast
    candidates may look too good on the selection rows. The best score then comes first, of a model
    with another training if there is one.
    """
    missed, failed = all_misses(goal, scores), failures(goal, scores)
    others = [one for one in scores.candidates if not missed[one.name]]
    too_good = [
        one
        for one in scores.candidates
        if one.name in failed and not misses(goal, scores.teacher, one)
    ]
    if too_good and others:
        trained = {one.parent for one in too_good} - {None}
        return max(others, key=lambda one: (one.parent not in trained, one.score, -one.ms)), {}
    worse = dominated(goal, scores)
    candidates = [one for one in scores.candidates if one.name not in worse]
    if meeting := [one for one in candidates if not missed[one.name]]:
        if goal.max_drop is None:
            return max(meeting, key=lambda one: (one.score, -one.ms)), {}
        fastest = min(one.ms for one in meeting)
        return min(
            (one for one in meeting if one.ms <= SAME_LATENCY * fastest), key=lambda one: one.mb
        ), {}
    kept = [one for one in candidates if missed[one.name].keys().isdisjoint(QUALITY)]
    if not kept:
        best = max(candidates, key=lambda one: one.score)
    else:
        best = min(kept, key=lambda one: (len(missed[one.name]), one.ms, one.mb))
    return best, missed[best.name]


def dominated(goal: GoalSettings, scores: CandidateScores) -> dict[str, str]:
    """Return the candidates that are not considered, each with the name of a better one.

    The better one is at least as good in score, size and latency, and meets every limit that the
    other one meets. A trimmed model, for example, is larger than the untrimmed one if int8 keeps
    its embeddings in float32.
    """
    points = {one.name: Point(one.score, one.ms, one.mb) for one in scores.candidates}
    missed = {name: limits.keys() for name, limits in all_misses(goal, scores).items()}
    return dominated_by(points, lambda better, worse: missed[better] <= missed[worse])


def is_sure(goal: GoalSettings, scores: CandidateScores, one: ScoredModel) -> bool:
    """Whether a candidate keeps `max_drop` at the lower end of its interval too."""
    return goal.max_drop is None or not misses(
        GoalSettings(max_drop=goal.max_drop, strict=True), scores.teacher, one
    )
