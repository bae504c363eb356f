"""Turn a report into a table of numbers, for notebooks."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from kdcli.report.schema import Report
from kdcli.report.sections.latency import PLAIN, form_of

if TYPE_CHECKING:
    import pandas as pd


def frame(report: Report) -> pd.DataFrame:
    """Return a table with a row for each model, and for each backend that it ran on.

    If a model ran on several backends, its rows on other ones than torch in float32 are named
    `MODEL on onnx int8`. The columns are sizes, every metric and, for every cell, the median in
    milliseconds (`ms BATCHxTOKENS`), the median speed-up, and whether one of the two is `unstable`.
    Unstable medians are replaced by the 90th percentile, unstable speed-ups by their lower bound
    or, if it is below 1, by NaN.
    """
    # Import here: training and the other forms of a report do not need pandas.
    import pandas as pd

    rows: dict[str, dict[str, object]] = defaultdict(dict)
    backends: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for row in report.latency:
        backends[row.model].add((row.backend, row.dtype))
    for name, card in report.cards.items():
        rows[name] |= {"layers": card.layers, "hidden": card.hidden}
        rows[name] |= {"parameters": card.params_total, "bytes": card.bytes}
    for task, models in report.quality.items():
        for name, metrics in models.items():
            rows[name] |= {f"{task} {metric}": value for metric, value in metrics.items()}
    for row in report.latency:
        name, cell = form_of(report, row).name, f"{row.batch_size}x{row.seq_len}"
        is_plain = (row.backend, row.dtype) in PLAIN or len(backends[row.model]) == 1
        if name == row.model and not is_plain:
            name = f"{row.model} on {row.backend} {row.dtype}"
        rows[name][f"ms {cell}"] = row.stated_ms
        unstable = row.unstable
        if row.speedup is not None:
            rows[name][f"speed-up {cell}"] = row.speedup.stated
            unstable = unstable or row.speedup.unstable
        rows[name][f"unstable {cell}"] = unstable
    return pd.DataFrame.from_dict(rows, orient="index")
