"""The scores of the candidates and the teacher on held-out rows, and the choice among them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean

from kdcli.deploy.measurements import LatencyRow
from kdcli.errors import MachineError
from kdcli.models.files import file_beside
from kdcli.models.load import location
from kdcli.report.pareto import SAME_LATENCY, Point, dominated_by
from kdcli.report.schema import Report, Throughput
from kdcli.report.sections.timings import first_cell
from kdcli.types import Array
from kdcli.verbs.compress.limits import LIMITS, QUALITY, GoalSettings, ScoredModel

TEACHER = "teacher"
"""The name of the teacher, which no candidate has."""
DEPLOYED = (
    "config.json",
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.txt", "vocab.json", "merges.txt", "spiece.model", "sentencepiece.bpe.model"),
)
"""Files that a deployment needs next to the weights."""
P95 = "95th percentile, ms"
"""A cost that is shown next to a cascade's mean latency, because it reads some texts twice."""
ERROR = 0.05
"""Probability that the interval of the first look misses the true difference."""


def confidence_of(look: int) -> float:
    """Return the level of the interval of the `look`-th look at the verification rows.

    It is 95 % for the first look. Each further look halves the probability of an error, so the
    intervals of all looks together miss the truth with a probability of at most 10 %.
    """
    return 1 - ERROR * 0.5 ** (look - 1)


@dataclass(frozen=True)
class Verification:
    """The scores of the teacher and the chosen model on the verification rows.

    Attributes:
        report: The report of the evaluation.
        rows: Number of verification rows.
        teacher, chosen: Both models, with these scores and with the speed and size of the
            selection.
        look: How many times verification rows were looked at, this time included.
        confidence: The level of the chosen model's interval, see `confidence_of`.
        losses_N: Of a cascade, the loss on each row, between 0 and 1.
    """

    report: Report
    rows: int
    teacher: ScoredModel
    chosen: ScoredModel
    look: int
    confidence: float
    losses_N: Array | None = None

    def misses(self, goal: GoalSettings, selected: Mapping[str, str]) -> dict[str, str]:
        """Return how the chosen model misses a goal, with its quality on the verification rows.

        `selected` says how it misses the goal on the selection rows.
        """
        costs = {limit: why for limit, why in selected.items() if limit not in QUALITY}
        return costs | goal.verified_misses(self.chosen, self.teacher)


@dataclass(frozen=True)
class CandidateScores:
    """The scores of the teacher and its candidates, from one run on `rows` selection rows.

    `verified` has the candidates that answered an earlier question to this run, by name. Before
    `with_latencies`, all models take infinitely long.
    """

    goal: GoalSettings
    report: Report
    metric: str
    rows: int
    teacher: ScoredModel
    candidates: list[ScoredModel]
    verified: Mapping[str, Verification] = field(default_factory=dict)

    @property
    def is_measured(self) -> bool:
        """Whether the latencies are known."""
        return self.teacher.ms < math.inf

    @property
    def keep_quality(self) -> bool:
        """Whether a candidate keeps the limits of quality on the selection rows."""
        return any(self.selected_misses(one).keys().isdisjoint(QUALITY) for one in self.candidates)

    def with_latencies(
        self, report: Report, price_per_hour: float | None = None
    ) -> "CandidateScores":
        """Add the latencies of a report.

        Args:
            report: The report of the scores, with latencies.
            price_per_hour: The price of the machine.

        Raises:
            MachineError: The latency of a model is missing.
        """
        latency = with_smallest_bounds(report.latency)
        report = report.model_copy(update={"latency": latency})
        rows, largest = latency_rows(report), _largest_batch(report)

        def timed(one: ScoredModel) -> ScoredModel:
            row = rows[one.name]
            costs = {limit.cost: limit.measure(row) for limit in LIMITS if limit.cost}
            costs |= {P95: row.p95_ms} if self.goal.cascade else {}
            return replace(
                one,
                ms=row.stated_ms,
                speedup=row.speedup,
                unstable=row.unstable,
                throughput=Throughput.of(largest[one.name], price_per_hour) if largest else None,
                costs={name: value for name, value in costs.items() if value is not None},
            )

        models = [timed(one) for one in self.candidates]
        return replace(self, report=report, teacher=timed(self.teacher), candidates=models)

    def named(self, name: str) -> ScoredModel:
        """Return a candidate."""
        return next(one for one in self.candidates if one.name == name)

    def selected_misses(self, one: ScoredModel) -> dict[str, str]:
        """Return how a candidate misses the goal on the selection rows, by limit."""
        return self.goal.misses(one, self.teacher)

    def all_misses(self) -> dict[str, dict[str, str]]:
        """Return how each candidate misses the goal, by name and limit.

        If a candidate was verified for an earlier goal, its quality is that on the verification
        rows.
        """
        missed = {one.name: self.selected_misses(one) for one in self.candidates}
        for name, verified in self.verified.items():
            missed[name] = {
                limit: f"{why}, on the verification rows" if limit in QUALITY else why
                for limit, why in verified.misses(self.goal, missed[name]).items()
            }
        return missed

    def choose(self) -> tuple[ScoredModel, dict[str, str]]:
        """Return the best candidate, and the limits that it misses.

        If candidates meet the goal, the fastest of them is the best, and the smallest among equally
        fast ones. Without `max_drop`, it is the candidate with the best score. If no candidate
        meets the goal, the one that misses the least is chosen, with quality before speed and size.
        Candidates that another one dominates are not considered.

        If a candidate met this goal on the selection rows but failed on the verification rows, the
        fast candidates may look too good on the selection rows. The best score then comes first, of
        a model with another training if there is one.
        """
        missed = self.all_misses()
        others = [one for one in self.candidates if not missed[one.name]]
        too_good = [
            one
            for one in self.candidates
            if one.name in self.verified
            and not missed[one.name].keys().isdisjoint(QUALITY)
            and not self.selected_misses(one)
        ]
        if too_good and others:
            trained = {one.parent for one in too_good} - {None}
            return max(others, key=lambda one: (one.parent not in trained, one.score, -one.ms)), {}
        worse = self.dominated()
        candidates = [one for one in self.candidates if one.name not in worse]
        if meeting := [one for one in candidates if not missed[one.name]]:
            if self.goal.max_drop is None:
                return max(meeting, key=lambda one: (one.score, -one.ms)), {}
            fastest = min(one.ms for one in meeting)
            fast = [one for one in meeting if one.ms <= SAME_LATENCY * fastest]
            return min(fast, key=lambda one: one.mb), {}
        kept = [one for one in candidates if missed[one.name].keys().isdisjoint(QUALITY)]
        if not kept:
            best = max(candidates, key=lambda one: one.score)
        else:
            best = min(kept, key=lambda one: (len(missed[one.name]), one.ms, one.mb))
        return best, missed[best.name]

    def dominated(self) -> dict[str, str]:
        """Return the candidates that are not considered, each with the name of a better one.

        The better one is at least as good in score, size and latency, and meets every limit that
        the other one meets. A trimmed model, for example, is larger than the untrimmed one if int8
        keeps its embeddings in float32.
        """
        points = {one.name: Point(one.score, one.ms, one.mb) for one in self.candidates}
        missed = {name: limits.keys() for name, limits in self.all_misses().items()}
        return dominated_by(points, lambda better, worse: missed[better] <= missed[worse])

    def is_sure(self, one: ScoredModel) -> bool:
        """Whether a candidate keeps `max_drop` at the lower end of its interval too."""
        strict = GoalSettings(max_drop=self.goal.max_drop, strict=True)
        return not strict.misses(one, self.teacher)


def read(report: Report, folders: Mapping[str, Path], goal: GoalSettings) -> CandidateScores:
    """Read the scores from a report of `evaluate`, without latencies.

    Args:
        report: The report, which names the teacher first.
        folders: The directories of its models.
        goal: The goal that the candidates should meet.
    """
    metric = next(iter(report.evaluations[0].metrics))
    scores = _scores(report, metric)
    base = next(iter(scores.values()))

    def model(name: str) -> ScoredModel:
        low, high = _interval(report, name, metric)
        return ScoredModel(
            name,
            folders[name],
            scores[name],
            base + low,
            base + high,
            ms=math.inf,
            speedup=None,
            mb=deployed_bytes(str(folders[name]), report.cards[name].bytes) / 1e6,
            decisions=tuple(decision for decision in report.decisions if decision.model == name),
        )

    teacher, *candidates = map(model, report.cards)
    rows_of_teacher = _rows(report, teacher.name)
    return CandidateScores(goal, report, metric, rows_of_teacher, teacher, candidates)


def read_verification(
    report: Report, scores: CandidateScores, one: ScoredModel, look: int
) -> Verification:
    """Read the scores on the verification rows of a candidate and of the teacher."""
    teacher, score = _scores(report, scores.metric).values()
    low, high = (teacher + end for end in _interval(report, one.name, scores.metric))
    decisions = tuple(report.decisions)
    return Verification(
        report,
        _rows(report, scores.teacher.name),
        replace(scores.teacher, score=teacher, low=teacher, high=teacher),
        replace(one, score=score, low=low, high=high, decisions=decisions),
        look,
        confidence_of(look),
    )


def _rows(report: Report, model: str) -> int:
    return sum(one.n for one in report.evaluations if one.model == model)


def _largest_batch(report: Report) -> dict[str, LatencyRow]:
    """Return the measurements in the largest cell that was measured of every model, by model."""
    by_cell: dict[tuple[int, int], dict[str, LatencyRow]] = {}
    for row in report.latency:
        by_cell.setdefault(row.cell, {})[row.model] = row
    complete = [cell for cell, rows in by_cell.items() if rows.keys() >= report.cards.keys()]
    return by_cell[max(complete)] if complete else {}


def _scores(report: Report, metric: str) -> dict[str, float]:
    """Return the score of each model, the mean over all sets."""
    return {
        name: fmean(e.metrics[metric] for e in report.evaluations if e.model == name)
        for name in report.cards
    }


def _interval(report: Report, model: str, metric: str) -> tuple[float, float]:
    """Return the ends of the interval of a model's difference, the mean over all sets."""
    rows = [c for c in report.comparisons if c.model == model and c.metric == metric]
    if not rows:
        return 0.0, 0.0
    return fmean(c.low for c in rows), fmean(c.high for c in rows)


def deployed_bytes(source: str, weights: int) -> int:
    """Return the size of what one deployment needs: weights, tokenizer and configuration.

    Args:
        source: The directory or hub id of a model.
        weights: The size of its weights, or of its file for one backend.
    """
    files = (file_beside(location(source), name) for name in DEPLOYED)
    return weights + sum(file.stat().st_size for file in files if file is not None)


def with_smallest_bounds(rows: Sequence[LatencyRow]) -> list[LatencyRow]:
    """Return rows whose unstable speed-ups have the smallest bound of the model's unstable cells.

    Other work can slow every run of the teacher in one cell, which makes the bound there too large.
    Another cell does not make a speed-up inconclusive.
    """

    def bounded(row: LatencyRow) -> LatencyRow:
        ratio = row.speedup
        if ratio is None or not ratio.unstable:
            return row
        others = [one.speedup for one in rows if one.model == row.model]
        smallest = min(one.low for one in others if one is not None and one.unstable)
        low = max(smallest, min(ratio.low, 1.0))
        return row.model_copy(update={"speedup": ratio.model_copy(update={"low": low})})

    return list(map(bounded, rows))


def latency_rows(report: Report) -> dict[str, LatencyRow]:
    """Return the rows of the first latency cell, by model.

    Raises:
        MachineError: A model was not measured.
    """
    rows = {row.model: row for row in first_cell(report)}
    for name in report.cards:
        if name not in rows:
            failures = [failure.reason for failure in report.failures if failure.model == name]
            why = "; ".join(dict.fromkeys(failures)) or "it gave no result"
            raise MachineError(
                f"the latency of {name} was not measured: {why}",
                "run the same command with --resume, which measures it again",
            )
    return rows
