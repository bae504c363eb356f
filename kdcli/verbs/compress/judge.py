"""Scores of the candidates and the teacher on held-out rows, and the choice among candidates."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from statistics import fmean

from kdcli.data.labelled.partition import VERIFICATION
from kdcli.deploy.measurements import MEASURE_AGAIN, UNSTABLE_PHRASE, LatencyRow, Speedup
from kdcli.disk import cache_key
from kdcli.metrics.resolution import exceeds
from kdcli.models.files import file_beside
from kdcli.models.load import location
from kdcli.report.finish import RunResult
from kdcli.report.pareto import SAME_LATENCY, Point, dominated_by
from kdcli.report.schema import Report, Throughput
from kdcli.report.schema_decisions import Decision
from kdcli.report.sections.latency import milliseconds
from kdcli.report.text import loses, megabytes, number, points_interval
from kdcli.verbs.compress.runner import StepRunner, step_of
from kdcli.verbs.compress.settings import GoalSettings
from kdcli.verbs.compress.steps import latency_rows, select, verification
from kdcli.workloads.decisions import class_drop_misses, min_count

TEACHER = "teacher"
"""The name of the teacher, which no candidate has."""
POINT = 0.01
QUALITY = ("max_drop", "max_class_drop")
"""The limits of quality."""
LIMITS = ("speedup", "max_latency_ms", "max_mb")
"""The limits of speed and size."""
DEPLOYED = (
    "config.json",
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.txt", "vocab.json", "merges.txt", "spiece.model", "sentencepiece.bpe.model"),
)
"""Files that a deployment needs next to the weights."""
ERROR = 0.05
"""Probability that the interval of the first look misses the true difference."""


def confidence_of(look: int) -> float:
    """Return the level of the interval of the `look`-th look at the verification rows.

    It is 95 % for the first look. Each further look halves the probability of an error, so the
    intervals of all looks together miss the truth with a probability of at most 10 %.
    """
    return 1 - ERROR * 0.5 ** (look - 1)


@dataclass(frozen=True)
class ScoredModel:
    """The teacher or a candidate, with its score, latency and size.

    Attributes:
        name: The name in the report.
        folder: The directory of the model.
        score: The task's first metric.
        low, high: The ends of the score's 95 % interval, paired with the teacher.
        ms: The latency of one sequence of 128 tokens, the 90th percentile if it is `unstable`.
        speedup: The speed-up over the teacher; None for the teacher.
        mb: The size of the model's files.
        unstable: Whether the measurement of `ms` is unstable.
        throughput: Texts per second in the largest batch that was measured of all models.
        decisions: The comparisons with the teacher class by class, on the selection rows.
        parent: The step that trained the model; None for the teacher on a backend.
    """

    name: str
    folder: Path
    score: float
    low: float
    high: float
    ms: float
    speedup: Speedup | None
    mb: float
    unstable: bool = False
    throughput: Throughput | None = None
    decisions: tuple[Decision, ...] = ()
    parent: str | None = None


@dataclass(frozen=True)
class CandidateScores:
    """The scores of the teacher and its candidates, from one run on `rows` selection rows.

    `verified` has the candidates that answered an earlier question to this run, by name.
    """

    report: Report
    metric: str
    rows: int
    teacher: ScoredModel
    candidates: list[ScoredModel]
    verified: Mapping[str, "Verification"] = field(default_factory=dict)

    @property
    def report_names(self) -> dict[str, str]:
        """The name of each model in the report, by the name of the candidate."""
        names = [self.teacher.name, *(one.name for one in self.candidates)]
        return dict(zip(names, self.report.cards, strict=True))


@dataclass(frozen=True)
class Verification:
    """The scores of the teacher and the chosen model on the verification rows.

    Attributes:
        report: the report of the evaluation.
        rows: number of verification rows.
        teacher, chosen: both models, with these scores and with the speed and size of the
            selection.
        look: how many times verification rows were looked at, this time included.
        confidence: the level of the chosen model's interval, see `confidence_of`.
    """

    report: Report
    rows: int
    teacher: ScoredModel
    chosen: ScoredModel
    look: int
    confidence: float


def judge(runner: StepRunner, teacher: str, candidates: Mapping[str, Path]) -> CandidateScores:
    """Score the candidates and the teacher on the selection rows, and measure their latency.

    Latencies are measured in turns.

    Raises KdcliError: the models cannot be scored or measured.
    """
    models = {TEACHER: teacher} | {name: str(folder) for name, folder in candidates.items()}
    steps = sorted(map(step_of, candidates.values()))
    name = f"selection-{cache_key(steps, runner.place)[:8]}"
    folder = runner.require(name, select(runner.recipe, models))
    price = runner.recipe.price_per_hour
    report = RunResult.read(folder).report
    # Another goal may have scored the same candidates in another order.
    candidates = {name: candidates[name] for name in report.cards if name != TEACHER}
    scores = read(report, teacher, candidates, price)
    known = [one for one in scores.candidates if look_of(one.folder) in runner.verified_before]
    return replace(scores, verified={one.name: verify(runner, scores, one) for one in known})


def look_of(model: Path) -> str:
    """Return the name of the step that scores a model on the verification rows."""
    return f"{VERIFICATION}-{step_of(model)}"


def verify(runner: StepRunner, scores: CandidateScores, chosen: ScoredModel) -> Verification:
    """Score the teacher and the chosen candidate on the verification rows.

    Each other model that was verified before counts as a look at the rows. Later looks have wider
    intervals, because the best of several looks is optimistic.

    Raises UsageError: the models cannot be scored.
    """
    name = look_of(chosen.folder)
    earlier = runner.journal.known(f"run {VERIFICATION}-")
    look = 1 + (earlier.index(f"run {name}") if f"run {name}" in earlier else len(earlier))
    confidence = confidence_of(look)
    models = {TEACHER: str(scores.teacher.folder), chosen.name: str(chosen.folder)}
    folder = runner.require(name, verification(runner.recipe, models, confidence))
    report = RunResult.read(folder).report
    teacher, model = _scored(report, scores.metric)
    low, high = _interval(report, model[0], scores.metric)
    return Verification(
        report,
        sum(e.n for e in report.evaluations if e.model == teacher[0]),
        replace(scores.teacher, score=teacher[1], low=teacher[1], high=teacher[1]),
        replace(chosen, score=model[1], low=teacher[1] + low, high=teacher[1] + high),
        look,
        confidence,
    )


def read(
    report: Report,
    teacher: str,
    candidates: Mapping[str, Path],
    price_per_hour: float | None = None,
) -> CandidateScores:
    """Read the scores from a report of `evaluate`, which lists the models in the given order.

    Raises MachineError: the latency of a model is missing.
    """
    metric = next(iter(report.evaluations[0].metrics))
    rows = latency_rows(report)
    largest = _largest_batch(report)
    measured = []
    scored = _scored(report, metric)
    base = scored[0][1]
    of_teacher = [e.n for e in report.evaluations if e.model == scored[0][0]]
    for (label, score), (name, folder) in zip(
        scored, {TEACHER: Path(teacher), **candidates}.items(), strict=True
    ):
        low, high = _interval(report, label, metric)
        row = rows[label]
        mb = deployed_bytes(str(folder), report.cards[label].bytes) / 1e6
        ends = base + low, base + high
        measured.append(
            ScoredModel(
                name,
                folder,
                score,
                *ends,
                row.stated_ms,
                row.speedup,
                mb,
                row.unstable,
                Throughput.of(largest[label], price_per_hour) if label in largest else None,
                _decisions(report, label, name),
            )
        )
    return CandidateScores(report, metric, sum(of_teacher), measured[0], measured[1:])


def _largest_batch(report: Report) -> dict[str, LatencyRow]:
    """Return the measurements in the largest cell that was measured of every model, by model."""
    by_cell: dict[tuple[int, int], dict[str, LatencyRow]] = {}
    for row in report.latency:
        by_cell.setdefault((row.batch_size, row.seq_len), {})[row.model] = row
    complete = [cell for cell, rows in by_cell.items() if rows.keys() >= report.cards.keys()]
    return by_cell[max(complete)] if complete else {}


def _scored(report: Report, metric: str) -> list[tuple[str, float]]:
    """Return the name and the score of each model, the mean over all sets."""
    return [
        (name, fmean(e.metrics[metric] for e in report.evaluations if e.model == name))
        for name in report.cards
    ]


def _interval(report: Report, model: str, metric: str) -> tuple[float, float]:
    """Return the ends of the interval of a model's difference, the mean over all sets."""
    rows = [c for c in report.comparisons if c.model == model and c.metric == metric]
    if not rows:
        return 0.0, 0.0
    return fmean(c.low for c in rows), fmean(c.high for c in rows)


def _decisions(report: Report, model: str, name: str) -> tuple[Decision, ...]:
    """Return a model's comparisons class by class, under the name of its candidate."""
    found = (decision for decision in report.decisions if decision.model == model)
    return tuple(decision.model_copy(update={"model": name}) for decision in found)


def deployed_bytes(source: str, weights: int) -> int:
    """Return the size of what one deployment needs: weights, tokenizer and configuration.

    Args:
        source: the directory or hub id of a model.
        weights: the size of its weights, or of its file for one backend.
    """
    files = (file_beside(location(source), name) for name in DEPLOYED)
    return weights + sum(file.stat().st_size for file in files if file is not None)


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
