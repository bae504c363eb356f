"""Scores of the candidates and the teacher on held-out rows."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean

from kdcli.data.labelled.partition import VERIFICATION
from kdcli.deploy.measurements import LatencyRow, Speedup
from kdcli.disk import cache_key
from kdcli.models.files import file_beside
from kdcli.models.load import location
from kdcli.report.finish import RunResult
from kdcli.report.schema import Report, Throughput
from kdcli.report.schema_decisions import Decision
from kdcli.verbs.compress.runner import StepRunner, step_of
from kdcli.verbs.compress.steps import latency_rows, select, verification

TEACHER = "teacher"
"""The name of the teacher, which no candidate has."""
POINT = 0.01
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
    folder = runner.require(name, select(runner.verbs, runner.recipe, models))
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
    folder = runner.require(name, verification(runner.verbs, runner.recipe, models, confidence))
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
