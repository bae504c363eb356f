"""Compare two models on the same examples by paired bootstrap."""

from kdcli.metrics.bootstrap import Scorer, paired_bootstrap
from kdcli.report.schema import Comparison


def paired_comparisons(
    models: tuple[str, str],
    scorers: tuple[Scorer, Scorer],
    data: tuple[str, str],
    n: int,
    resamples: int,
) -> list[Comparison]:
    """Compare a model with a baseline in every metric.

    `models` are the names of model and baseline, `scorers` score the same `n` examples for each of
    them, and `data` is the task and the set.
    """
    (model, baseline), (task, part) = models, data
    intervals = paired_bootstrap(*scorers, n, resamples=resamples)
    return [
        Comparison(
            model=model,
            baseline=baseline,
            task=task,
            set=part,
            metric=metric,
            difference=difference,
            low=low,
            high=high,
        )
        for metric, (difference, low, high) in intervals.items()
    ]
