"""A fixture for each kind of report."""

import pytest
from reports import (
    benchmark_values,
    compared_benchmark_values,
    evaluate_values,
    evaluation,
    finetune_values,
    hostile_benchmark_values,
    hostile_prune_values,
    hostile_values,
    many_labels,
    odd_values,
    prune_values,
    report_values,
    selection_values,
    sparsities_values,
)

from kdcli.report.schema import Report

KINDS = {
    "report": report_values,
    "hostile": hostile_values,
    "finetuned": finetune_values,
    "grid": lambda: finetune_values() | {"selection": selection_values()},
    "labels": lambda: finetune_values() | {"evaluations": [evaluation("finetuned", "banking77", **many_labels(77))]},
    "compared": evaluate_values,
    "languages": lambda: evaluate_values(("ar", "de", "en", "sw", "zh"), "xnli"),
    "benchmark": benchmark_values,
    "runs": compared_benchmark_values,
    "hostile_latency": hostile_benchmark_values,
    "pruned": prune_values,
    "sparsities": sparsities_values,
    "odd": odd_values,
    "hostile_pruning": hostile_prune_values,
}
"""Name of a fixture -> values of its report."""

for kind, make in KINDS.items():
    globals()[kind] = pytest.fixture(name=kind)(lambda make=make: Report.model_validate(make()))


@pytest.fixture
def values() -> dict[str, object]:
    """The values of the plain report, to be changed."""
    return report_values()
