"""A report as a table of numbers, for notebooks."""

from collections import defaultdict
from typing import Any

import pandas as pd

from kdcli.report.schema import Report

PLAIN = ("torch", "fp32")


def frame(report: Report) -> pd.DataFrame:
    """A row a model, of another backend than torch in float32 named `MODEL on onnx int8`: sizes, every metric, the p50
    in milliseconds of every cell (`ms BATCHxTOKENS`) and the median speed-up there."""
    rows: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, card in report.models.items():
        rows[name] |= {"layers": card.layers, "hidden": card.hidden}
        rows[name] |= {"parameters": card.params_total, "bytes": card.bytes}
    for task, models in report.quality.items():
        for name, metrics in models.items():
            rows[name] |= {f"{task} {metric}": value for metric, value in metrics.items()}
    measured = {}
    for row in report.latency:
        name = (
            row.model
            if (row.backend, row.dtype) == PLAIN
            else f"{row.model} on {row.backend} {row.dtype}"
        )
        measured[f"{row.model}/{row.backend}-{row.dtype}"] = name
        rows[name][f"ms {row.batch_size}x{row.seq_len}"] = row.p50_ms
    for pair, ratio in report.speedup.items():
        name = pair.rsplit("_vs_", 1)[0]
        rows[measured.get(name, name)][f"speed-up {ratio.batch_size}x{ratio.seq_len}"] = (
            ratio.median
        )
    return pd.DataFrame.from_dict(rows, orient="index")
