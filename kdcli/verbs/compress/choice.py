"""Which candidates meet the goal, and which one is chosen."""

from kdcli.report.pareto import SAME_LATENCY, Point, dominated_by
from kdcli.verbs.compress.limits import LIMITS, GoalSettings
from kdcli.verbs.compress.scores import CandidateScores, ScoredModel, Verification

QUALITY = {limit.key for limit in LIMITS if limit.is_quality}


def all_misses(goal: GoalSettings, scores: CandidateScores) -> dict[str, dict[str, str]]:
    """Return how each candidate misses the goal, by name and limit.

    If a candidate was verified for an earlier goal, its quality is that on the verification rows.
    """
    missed = {one.name: goal.misses(one, scores.teacher) for one in scores.candidates}
    for name, verified in scores.verified.items():
        drops = goal.verified_misses(verified.chosen, verified.teacher)
        costs = {limit: why for limit, why in missed[name].items() if limit not in QUALITY}
        here = {limit: f"{why}, on the verification rows" for limit, why in drops.items()}
        missed[name] = costs | here
    return missed


def verified_misses(
    goal: GoalSettings, missed: dict[str, str], verified: Verification
) -> dict[str, str]:
    """Return how the chosen model misses the goal, with its quality on the verification rows.

    Args:
        goal: the limits.
        missed: how it misses the goal on the selection rows.
        verified: its scores on the verification rows.
    """
    costs = {limit: why for limit, why in missed.items() if limit not in QUALITY}
    return costs | goal.verified_misses(verified.chosen, verified.teacher)


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
    missed = all_misses(goal, scores)
    others = [one for one in scores.candidates if not missed[one.name]]
    too_good = [
        one
        for one in scores.candidates
        if one.name in scores.verified
        and not missed[one.name].keys().isdisjoint(QUALITY)
        and not goal.misses(one, scores.teacher)
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
    strict = GoalSettings(max_drop=goal.max_drop, strict=True)
    return not strict.misses(one, scores.teacher)
