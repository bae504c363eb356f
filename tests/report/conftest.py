"""A fixture for each kind of report."""

import pytest
import reports as r

KINDS = {  # name of a fixture -> values of its report
    **{"report": r.report_values, "hostile": r.hostile_values, "finetuned": r.finetune_values},
    "grid": lambda: r.finetune_values() | {"selection": r.selection_values()},
    "labels": lambda: (
        r.finetune_values()
        | {"evaluations": [r.evaluation("finetuned", "banking77", **r.many_labels())]}
    ),
    "languages": lambda: r.evaluate_values(("ar", "de", "en", "sw", "zh"), "xnli"),
    **{
        "compared": r.evaluate_values,
        "benchmark": r.benchmark_values,
        "runs": r.compared_benchmark_values,
    },
    "compressed": r.compress_values,
    **{"pruned": r.prune_values, "sparsities": r.sparsities_values, "odd": r.odd_values},
    **{"hostile_latency": r.hostile_benchmark_values, "hostile_pruning": r.hostile_prune_values},
}
for kind, make in KINDS.items():
    globals()[kind] = pytest.fixture(name=kind)(lambda make=make: r.made(make()))


@pytest.fixture
def values() -> dict[str, object]:
    """The values of the plain report, to be changed."""
    return r.report_values()
