"""Candidates beside the teacher on held-out rows, by `kdcli evaluate`, and which of them meets the goal."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean

from kdcli.deploy.latency import CELLS
from kdcli.report.finish import RunResult
from kdcli.report.schema import Report
from kdcli.report.sections.latency import milliseconds
from kdcli.verbs.compress.runner import StepRunner
from kdcli.verbs.compress.settings import CompressRecipe, GoalSettings
from kdcli.verbs.compress.steps import evaluate

POINT = 0.01
LIMITS = ("speedup", "max_latency_ms", "max_mb")  # Of speed and size
FEW_ROWS = 100  # Held-out rows below which an interval is said to be wide
ALIKE = 1.05  # Latencies within this factor count as one, so that the smaller of two is chosen


@dataclass(frozen=True)
class ScoredModel:
    """One model: `score` of the task's first metric, `low` and `high` the ends of its paired interval beside the
    teacher, `ms` and `speedup` of one sequence of 128 tokens, the latter with its `quartiles`, `mb` of its files.
    `folder` has the model."""

    name: str
    folder: Path
    score: float
    low: float
    high: float
    ms: float
    speedup: float
    mb: float
    quartiles: tuple[float, float]


@dataclass(frozen=True)
class CandidateScores:
    """The teacher and its candidates, measured in one run; `rows` were held out."""

    report: Report
    metric: str
    rows: int
    teacher: ScoredModel
    candidates: list[ScoredModel]


def judge(
    runner: StepRunner, name: str, teacher: str, candidates: Mapping[str, Path]
) -> CandidateScores:
    """Score the candidates and the teacher on the same rows, and measure their latency in turns.

    Raises UsageError: they could not be scored.
    """
    models = [teacher, *map(str, candidates.values())]
    folder = runner.require(name, evaluate(runner.recipe, models))
    return read(RunResult.read(folder).report, teacher, candidates)


def read(report: Report, teacher: str, candidates: Mapping[str, Path]) -> CandidateScores:
    """A report of `evaluate` as what it says of each candidate; the models are in the order that they were given."""
    names = list(report.cards)
    first = next(iter(report.evaluations[0].metrics))
    rows = {row.model: row for row in report.latency if (row.batch_size, row.seq_len) == CELLS[0]}
    scores = {n: fmean(e.metrics[first] for e in report.evaluations if e.model == n) for n in names}
    measured = []
    for shown, (name, folder) in zip(
        names, {"teacher": Path(teacher), **candidates}.items(), strict=True
    ):
        of_model = [c for c in report.comparisons if c.model == shown and c.metric == first]
        low, high = (
            fmean(getattr(c, end) for c in of_model) if of_model else 0.0 for end in ("low", "high")
        )
        base, ratio = scores[names[0]], rows[shown].speedup
        ends = (base + low, base + high) if shown != names[0] else (base, base)
        speed = ratio.median if ratio else 1.0
        quartiles = (ratio.low, ratio.high) if ratio else (1.0, 1.0)
        mb = report.cards[shown].bytes / 1e6
        measured.append(
            ScoredModel(
                name, folder, scores[shown], *ends, rows[shown].p50_ms, speed, mb, quartiles
            )
        )
    held_out = sum(e.n for e in report.evaluations if e.model == names[0])
    return CandidateScores(report, first, held_out, measured[0], measured[1:])


def misses(goal: GoalSettings, teacher: ScoredModel, one: ScoredModel) -> dict[str, str]:
    """Limit -> how a candidate misses it; empty where it meets the goal."""
    found = {}
    worst = one.low if goal.strict else one.score
    if (
        goal.max_drop is not None
        and (lost := (teacher.score - worst) / POINT) > goal.max_drop + 1e-9
    ):
        end = " at the interval's lower end" if goal.strict else ""
        found["max_drop"] = (
            f"{lost:.2f} points lost{end}, {lost - goal.max_drop:.2f} more than {goal.max_drop:g}"
        )
    if goal.speedup is not None and one.speedup < goal.speedup:
        found["speedup"] = f"{one.speedup:.2f} times as fast, not {goal.speedup:g}"
    if goal.max_latency_ms is not None and one.ms > goal.max_latency_ms:
        found["max_latency_ms"] = (
            f"{one.ms:.2f} ms, {one.ms - goal.max_latency_ms:.2f} above {goal.max_latency_ms:g}"
        )
    if goal.max_mb is not None and one.mb > goal.max_mb:
        found["max_mb"] = f"{one.mb:.1f} MB, {one.mb - goal.max_mb:.1f} above {goal.max_mb:g}"
    return found


def conflict(missed: Collection[Mapping[str, str]]) -> str:
    """Two limits that some candidates meet each, but none both; an empty string if there are no such two. `missed`: of
    each candidate, as `misses` gives it."""
    for pair in map(set, combinations(("max_drop", *LIMITS), 2)):
        met = [pair - one.keys() for one in missed]
        if pair not in met and set().union(*met) == pair:
            names = " and ".join(f"--{name.replace('_', '-')}" for name in sorted(pair))
            return f"{names} contradict each other here: each can be met, but not both"
    return ""


def is_bounded(goal: GoalSettings) -> bool:
    """Whether a speed or a size is asked for; `max_drop` alone asks for as fast as can be."""
    return any(getattr(goal, limit) is not None for limit in LIMITS)


def choose(goal: GoalSettings, judged: CandidateScores) -> tuple[ScoredModel, dict[str, str]]:
    """The best candidate and what it misses. Of those that meet the goal the fastest, or without `max_drop` the one
    with the best score; of those alike in that the smallest. If none does, the one that misses least: quality first."""
    candidates = judged.candidates
    missed = {one.name: misses(goal, judged.teacher, one) for one in candidates}
    if meeting := [one for one in candidates if not missed[one.name]]:
        if goal.max_drop is None:
            return max(meeting, key=lambda one: (one.score, -one.ms)), {}
        fastest = min(one.ms for one in meeting)
        return min(
            (one for one in meeting if one.ms <= ALIKE * fastest), key=lambda one: one.mb
        ), {}
    kept = [one for one in candidates if "max_drop" not in missed[one.name]]
    if goal.max_drop is not None and not kept:
        best = max(candidates, key=lambda one: one.score)
    else:
        best = min(kept or candidates, key=lambda one: (len(missed[one.name]), one.ms, one.mb))
    return best, missed[best.name]


def is_sure(goal: GoalSettings, judged: CandidateScores, one: ScoredModel) -> bool:
    """Whether the lower end of a candidate's interval keeps `max_drop` too."""
    return goal.max_drop is None or not misses(
        GoalSettings(max_drop=goal.max_drop, strict=True), judged.teacher, one
    )


def check_rows(recipe: CompressRecipe, rows: int) -> list[str]:
    """A note where the interval is wide for want of rows."""
    if rows >= FEW_ROWS:
        return []
    holds = "must hold" if recipe.goal.strict else "need not hold without --strict"
    bound = (
        f", and --max-drop {holds} for its lower end" if recipe.goal.max_drop is not None else ""
    )
    return [f"only {rows} held-out rows: the interval is wide{bound}"]


def sentence(
    judged: CandidateScores, chosen: ScoredModel, missed: Mapping[str, str], goal: GoalSettings
) -> str:
    """What was won and what was lost, or by how much the goal was missed."""
    teacher, lost = judged.teacher, (judged.teacher.score - chosen.score) / POINT
    low, high = ((teacher.score - end) / POINT for end in (chosen.high, chosen.low))
    cost = "at no loss" if lost <= 0 else f"for {lost:.2f} points of {judged.metric}"
    ms, all_ms = milliseconds(chosen.ms), milliseconds(teacher.ms)
    spread = "-".join(f"{end:.1f}" for end in chosen.quartiles)
    won = f"{chosen.name} is {chosen.speedup:.1f} times as fast as the teacher ({spread}; {ms} ms, not {all_ms}) and "
    won += f"{teacher.mb / chosen.mb:.1f} times smaller ({chosen.mb:.1f} MB) {cost}, between {low:.2f} and {high:.2f}"
    if missed:
        both = conflict([misses(goal, teacher, one) for one in judged.candidates])
        why = "; ".join([*missed.values(), *([both] if both else [])])
        return f"The goal cannot be met with what was tried. Nearest: {won}: {why}."
    sure = "" if is_sure(goal, judged, chosen) else "; the interval reaches beyond the goal"
    return f"{won} with 95 % confidence on {judged.rows:,} held-out rows{sure}."
