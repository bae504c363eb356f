"""Fixtures over `reports.py`."""

from __future__ import annotations

import pytest
from benchmark_reports import benchmark_values, compared_benchmark_values, hostile_benchmark
from pruning_reports import hostile_prune_report, odd_values, prune_values, sparsities_values
from reports import (
    evaluate_values,
    evaluation,
    finetune_values,
    hostile_report,
    many_labels,
    plain_report,
    report_values,
    selection_values,
)

from kdcli.report.schema import Report


@pytest.fixture
def values() -> dict[str, object]:
    return report_values()


@pytest.fixture
def report() -> Report:
    return plain_report()


@pytest.fixture
def hostile() -> Report:
    return hostile_report()


@pytest.fixture
def finetuned() -> Report:
    """One task of one set, no grid."""
    return Report.model_validate(finetune_values())


@pytest.fixture
def grid() -> Report:
    """The same, chosen of several runs."""
    return Report.model_validate(finetune_values() | {"selection": selection_values()})


@pytest.fixture
def labels() -> Report:
    """A task of more classes than a matrix shows."""
    found = [evaluation("finetuned", "banking77", **many_labels(77))]
    return Report.model_validate(finetune_values() | {"evaluations": found})


@pytest.fixture
def compared() -> Report:
    """Two models on a task of one set."""
    return Report.model_validate(evaluate_values())


@pytest.fixture
def languages() -> Report:
    """Two models on a task of five sets."""
    return Report.model_validate(evaluate_values(("ar", "de", "en", "sw", "zh"), "xnli"))


@pytest.fixture
def benchmark() -> Report:
    """Three shapes on three backends in four cells."""
    return Report.model_validate(benchmark_values())


@pytest.fixture
def runs() -> Report:
    """Four models in one cell, each judged on a task."""
    return Report.model_validate(compared_benchmark_values())


@pytest.fixture
def hostile_latency() -> Report:
    return hostile_benchmark()


@pytest.fixture
def pruned() -> Report:
    """One sparsity, every form of the model."""
    return Report.model_validate(prune_values())


@pytest.fixture
def sparsities() -> Report:
    """Three sparsities."""
    return Report.model_validate(sparsities_values())


@pytest.fixture
def odd() -> Report:
    """Gates, many heads, layers that are not alike, no scores."""
    return Report.model_validate(odd_values())


@pytest.fixture
def hostile_pruning() -> Report:
    return hostile_prune_report()
