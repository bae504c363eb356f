"""Scores of the candidates and the teacher on held-out rows."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean

from kdcli.deploy.measurements import LatencyRow, Speedup
from kdcli.errors import MachineError
from kdcli.models.files import file_beside
from kdcli.models.load import location
from kdcli.report.schema import Report, Throughput
from kdcli.report.schema_decisions import Decision
from kdcli.report.sections.latency import first_cell
from kdcli.verbs.compress.limits import LIMITS

TEACHER = "teacher"
"""The name of the teacher, which no candidate has."""
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
        parent: The directory of the training; None for the teacher on a backend.
        costs: Further costs that a limit measures, by label.
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
    costs: Mapping[str, float] = field(default_factory=dict)


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


def read(
    report: Report, folders: Mapping[str, Path], price_per_hour: float | None = None
) -> CandidateScores:
    """Read the scores from a report of `evaluate`.

    Args:
        report: the report, which names the teacher first.
        folders: the directories of its models.
        price_per_hour: the price of the machine.

    Raises MachineError: the latency of a model is missing.
    """
    metric = next(iter(report.evaluations[0].metrics))
    rows, largest = latency_rows(report), _largest_batch(report)
    scores = _scores(report, metric)
    base = next(iter(scores.values()))

    def model(name: str) -> ScoredModel:
        low, high = _interval(report, name, metric)
        row, folder = rows[name], folders[name]
        return ScoredModel(
            name,
            folder,
            scores[name],
            base + low,
            base + high,
            row.stated_ms,
            row.speedup,
            deployed_bytes(str(folder), report.cards[name].bytes) / 1e6,
            row.unstable,
            Throughput.of(largest[name], price_per_hour) if name in largest else None,
            tuple(decision for decision in report.decisions if decision.model == name),
            costs={
                limit.cost: value
                for limit in LIMITS
                if limit.cost and (value := limit.measure(row)) is not None
            },
        )

    teacher, *candidates = map(model, report.cards)
    return CandidateScores(report, metric, _rows(report, teacher.name), teacher, candidates)


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
        by_cell.setdefault((row.batch_size, row.seq_len), {})[row.model] = row
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
        source: the directory or hub id of a model.
        weights: the size of its weights, or of its file for one backend.
    """
    files = (file_beside(location(source), name) for name in DEPLOYED)
    return weights + sum(file.stat().st_size for file in files if file is not None)


def latency_rows(report: Report) -> dict[str, LatencyRow]:
    """Return the rows of the first latency cell, by model.

    Raises MachineError: a model was not measured.
    """
    rows = {row.model: row for row in first_cell(report)}
    for name in report.cards:
        if name not in rows:
            failures = [failure.reason for failure in report.failures if failure.model == name]
            why = "; ".join(dict.fromkeys(failures)) or "it gave no result"
            raise MachineError(f"the latency of {name} was not measured: {why}")
    return rows
