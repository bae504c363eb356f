"""Rankings in a report: a metric's value for each query -> means, and paired differences."""

from collections.abc import Mapping, Sequence

from kdcli.metrics.bootstrap import Scorer
from kdcli.report.schema import Evaluation
from kdcli.workloads.workload import Array, ModelScores


def ranking_scores(
    task: str, split: str, values: Mapping[str, Array], notes: Sequence[str] = ()
) -> ModelScores:
    """The scores of a model that ranks.

    Args:
        values: metric -> its value for each query, [Q].
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
