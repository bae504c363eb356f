"""report.json: exactly the keys that were promised, and the same after reading as before writing."""

import functools
import json
import operator

import pytest
from pydantic import ValidationError

from kdcli.report.published import published_for
from kdcli.report.schema import Card, LatencyRow, PublishedRow, Report

CARD = (
    *("id", "model_type", "layers", "hidden", "ffn", "heads", "params_total", "params_embedding", "params_transformer"),
    *("params_nonzero", "multiply_adds", "bytes", "held_in", "sha256", "paper_params_embedding"),
    "paper_params_transformer",
)
LATENCY = (
    *("model", "backend", "device", "dtype", "batch_size", "seq_len", "padding", "n", "p50_ms", "p90_ms", "p95_ms"),
    *("mean_ms", "iqr_over_p50", "status", "p99_ms", "tokens_per_second", "load_seconds", "first_call_ms"),
    "peak_memory_bytes",
)


def test_round_trip(report):
    raw = json.loads(report.to_json())
    assert (Report.model_validate_json(report.to_json()), raw["schema"]) == (report, 1)
    assert set(raw) == {
        *("schema", "command", "status", "created", "versions", "environment", "recipe", "models", "training"),
        *("curve", "quality", "latency", "speedup", "published", "notes", "evaluations", "comparisons", "selection"),
        *("beside", "pruning", "failures", "agreements", "projections"),
    }


def test_rows_have_the_promised_keys():
    assert (tuple(Card.model_fields), tuple(LatencyRow.model_fields)) == (CARD, LATENCY)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        *[(("schema",), 2), (("status",), "running"), (("surprise",), 1), (("latency", 0, "status"), "fine")],
        *[(("models", "teacher", "layers"), "12"), (("models", "teacher", "surprise"), 1)],
        *[(("training", "steps"), 1.5), (("quality", "sst2", "teacher", "accuracy"), "0.93")],
    ],
)
def test_what_does_not_belong_is_refused(values, path, value):
    *parents, last = path
    functools.reduce(operator.getitem, parents, values)[last] = value
    with pytest.raises(ValidationError):
        Report.model_validate(values)


def test_a_report_is_frozen(report):
    with pytest.raises(ValidationError, match="frozen"):
        report.command = "prune"


def test_published_rows_belong_to_the_shape():
    rows = {shape: [PublishedRow.model_validate(r) for r in published_for([shape])] for shape in ("3x384", "4x312")}
    minilm = {"SQuAD 2.0 F1": 66.9, "MNLI-m": 79.1, "SST-2": 89.7, "speed-up": 10.1}
    assert minilm.items() <= rows["3x384"][-1].values.items()
    assert any("TinyBERT" in row.row for row in rows["4x312"])
    assert published_for(["5x123"]) == []
    both = published_for(["6x384", "3x384"])
    assert len({r["row"] for r in both}) == len(both), "a row for two shapes comes once"
