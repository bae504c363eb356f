"""Report scores of rankings, computed from the metrics of each query."""

from collections.abc import Mapping, Sequence

from kdcli.metrics.bootstrap import Scorer
from kdcli.report.schema import Evaluation
from kdcli.types import Array
from kdcli.workloads.workload import ModelScores


def ranking_scores(
    task: str, split: str, values: Mapping[str, Array], notes: Sequence[str] = ()
) -> ModelScores:
    """Compute the scores of a model from the metrics of its rankings.

    Args:
        task: the task's name in the report.
        split: the evaluation split.
        values: metric -> its value for each query, [Q].
        notes: notes for the report.
    """
    count = len(next(iter(values.values())))
    evaluation = Evaluation(
        model="", task=task, set="", split=split, n=count, metrics=_means(values)
    )
    return ModelScores([evaluation], {"": _scorer(values)}, {"": count}, notes=notes)


def _means(values: Mapping[str, Array]) -> dict[str, float]:
    return {name: float(of_query.mean()) for name, of_query in values.items()}


def _scorer(values: Mapping[str, Array]) -> Scorer:
    return lambda at: _means({name: of_query[at] for name, of_query in values.items()})
