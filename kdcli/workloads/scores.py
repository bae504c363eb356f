"""Scores of models on the same rows, and their paired differences."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kdcli.data.labelled.partition import text_groups
from kdcli.messages import log
from kdcli.metrics.bootstrap import CONFIDENCE, Scorer, paired_bootstrap
from kdcli.metrics.cascade import Rankings
from kdcli.report.schema import Comparison, Evaluation
from kdcli.types import Example, Task, task_title
from kdcli.workloads.predictions import Prediction

RESAMPLES = 1000


@dataclass(frozen=True)
class ModelScores:
    """The scores of one model.

    Attributes:
        evaluations: One evaluation per set, in the format of the report. `model` is empty.
        scorers: set -> function that maps row numbers to metrics, for paired bootstrap intervals.
        counts: set -> number of rows.
        predictions: One prediction per row, if the workload makes predictions.
        task: The task of the predictions.
        examples: set -> the examples of the predictions, with the labels they are compared with.
        temperature: The calibration temperature in the model's configuration, if it has one.
        notes: Notes on how the model read the rows, for the report.
        is_reference: Whether the model's own outputs stand in for the labels of these rows.
        rankings: A reranker's scores.
    """

    evaluations: list[Evaluation]
    scorers: Mapping[str, Scorer]
    counts: Mapping[str, int]
    predictions: Sequence[Prediction] = ()
    notes: Sequence[str] = ()
    task: Task | None = None
    examples: Mapping[str, Sequence[Example]] = field(default_factory=dict)
    temperature: float | None = None
    is_reference: bool = False
    rankings: Rankings | None = None

    def rows(self, name: str) -> list[Evaluation]:
        """Return the evaluations with a model's name filled in."""
        return [row.model_copy(update={"model": name}) for row in self.evaluations]

    def against_teacher(self, *, is_own: bool) -> ModelScores:
        """Return the same scores, marked as agreement with the teacher.

        Args:
            is_own: Whether the model's outputs are the teacher's.
        """
        marked = [row.model_copy(update={"reference": "teacher"}) for row in self.evaluations]
        return replace(self, evaluations=marked, is_reference=is_own)


@dataclass(frozen=True)
class EvaluationResult:
    """Scores of several models on the same rows, and their paired differences.

    Attributes:
        evaluations: The scores, as the report shows them.
        comparisons: The paired differences.
        scores: model -> its scores, with its predictions; empty if the results of several tasks
            were merged.
    """

    evaluations: list[Evaluation] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    scores: Mapping[str, ModelScores] = field(default_factory=dict)


def paired_differences(
    model: Scorer,
    baseline: Scorer,
    n: int,
    *,
    examples: Sequence[Example] | None,
    resamples: int = RESAMPLES,
    confidence: float = CONFIDENCE,
    baseline_is_reference: bool = False,
) -> dict[str, tuple[float, float, float]]:
    """Compare two models on the same rows. Rows with the same text are not independent.

    Args:
        model, baseline: Scorers of the same `n` rows.
        n: Number of rows.
        examples: The rows, or None if they are independent.
        resamples: Number of bootstrap resamples.
        confidence: Level of the intervals.
        baseline_is_reference: Whether the rows are scored against the baseline's own outputs.

    Returns:
        Metric -> (difference, low, high), see `paired_bootstrap`.
    """
    return paired_bootstrap(
        model,
        baseline,
        n,
        resamples=resamples,
        confidence=confidence,
        baseline_is_reference=baseline_is_reference,
        groups=None if examples is None else text_groups(examples),
    )


def compare(
    task: str,
    scores: Mapping[str, ModelScores],
    baselines: Mapping[str, str] | None = None,
    *,
    chosen: Collection[str] = (),
    resamples: int = RESAMPLES,
    confidence: float = CONFIDENCE,
) -> EvaluationResult:
    """Gather the scores of several models and compare them on the same rows.

    Args:
        task: The task's name in the report.
        scores: model -> its scores.
        baselines: model -> the model it is compared with; None compares all models with the first.
        chosen: Models whose step or settings were selected on the same rows.
        resamples: Number of bootstrap resamples.
        confidence: Level of the intervals.
    """
    first, *others = scores
    pairs = dict.fromkeys(others, first) if baselines is None else baselines
    evaluations = [row for name, of_model in scores.items() for row in of_model.rows(name)]
    comparisons: list[Comparison] = []
    for model, baseline in pairs.items():
        log(f"{task_title(task)}: comparing {model} with {baseline}, {resamples:,} resamples")
        for set_name, count in scores[model].counts.items():
            scorer, base = (scores[name].scorers[set_name] for name in (model, baseline))
            differences = paired_differences(
                scorer,
                base,
                count,
                resamples=resamples,
                confidence=confidence,
                baseline_is_reference=scores[baseline].is_reference,
                examples=scores[model].examples.get(set_name),
            )
            comparisons += [
                Comparison(
                    model=model,
                    baseline=baseline,
                    task=task,
                    set=set_name,
                    metric=metric,
                    difference=difference,
                    low=low,
                    high=high,
                    confidence=confidence,
                    chosen_on_these_rows=model in chosen,
                )
                for metric, (difference, low, high) in differences.items()
            ]
    return EvaluationResult(evaluations, comparisons, scores)
