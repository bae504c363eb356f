"""report.json: exactly the keys that were promised, and the same after reading as before writing."""

import functools
import json
import operator
import tomllib
from pathlib import Path

import pytest
from pydantic import ValidationError

from kdcli.data.tasks import task_of, tasks
from kdcli.report import published
from kdcli.report.published import published_for
from kdcli.report.schema import Card, LatencyRow, PublishedRow, Report
from kdcli.verbs.distill.recipes import ablations

CARD = (
    *("id", "model_type", "layers", "hidden", "ffn", "heads"),
    *(
        "params_total",
        "params_embedding",
        "params_transformer",
        "params_nonzero",
        "multiply_adds",
        "bytes",
        "sha256",
        "revision",
        "held_in",
    ),
    *("paper_params_embedding", "paper_params_transformer"),
)
LATENCY = (
    *(
        "model",
        "backend",
        "device",
        "dtype",
        "batch_size",
        "seq_len",
        "padding",
        "n",
        "p50_ms",
        "p90_ms",
        "p95_ms",
    ),
    *(
        "mean_ms",
        "iqr_over_p50",
        "status",
        "p99_ms",
        "tokens_per_second",
        "load_seconds",
        "first_call_ms",
    ),
    "peak_memory_bytes",
)


def test_round_trip(report):
    raw = json.loads(report.to_json())
    assert (Report.model_validate_json(report.to_json()), raw["schema"]) == (report, 1)
    assert set(raw) == {
        *(
            "schema",
            "command",
            "status",
            "created",
            "versions",
            "environment",
            "recipe",
            "models",
            "training",
        ),
        *(
            "curve",
            "quality",
            "latency",
            "speedup",
            "published",
            "notes",
            "evaluations",
            "comparisons",
            "selection",
        ),
        *("beside", "pruning", "failures", "agreements", "compression", "runs"),
    }


def test_rows_have_the_promised_keys():
    assert (tuple(Card.__dataclass_fields__), tuple(LatencyRow.model_fields)) == (CARD, LATENCY)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        *[
            (("schema",), 2),
            (("status",), "running"),
            (("surprise",), 1),
            (("latency", 0, "status"), "fine"),
        ],
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
    rows = {
        shape: [PublishedRow.model_validate(r) for r in published_for([shape])]
        for shape in ("3x384", "4x312")
    }
    minilm = {"SQuAD 2.0 F1": 66.9, "MNLI-m": 79.1, "SST-2": 89.7, "speed-up": 10.1}
    assert minilm.items() <= rows["3x384"][-1].values.items()
    assert any("TinyBERT" in row.row for row in rows["4x312"])
    assert published_for(["5x123"]) == []
    both = published_for(["6x384", "3x384"])
    assert len({r["row"] for r in both}) == len(both), "a row for two shapes comes once"


def rows_for(shape, command, **recipe):
    return {row["row"]: row["values"] for row in published_for([shape], command, recipe)}


def test_published_rows_of_pruning_are_those_of_task_and_density():
    rows = rows_for("12x768", "prune", task="mnli", sparsity=[0.9])
    assert rows["BERT-base at 10 %, SMP-S"] == {"MNLI-m": 82.5, "MNLI-mm": 82.3}
    assert rows["BERT-base at 10 %, SMP-S with a teacher"] == {"MNLI-m": 83.7, "MNLI-mm": 83.6}
    assert rows["BERT-base, fine-tuned"] == {"MNLI-m": 84.5, "MNLI-mm": 84.9}
    assert not any("3 %" in row or "50 %" in row for row in rows)
    both = rows_for("12x768", "prune", task="squad", sparsity=[0.97, 0.5])
    assert both["BERT-base at 3 %, SMP-L"] == {"SQuAD 1.1 EM": 70.7, "SQuAD 1.1 F1": 81.0}
    assert both["BERT-base at 50 %, CAP with a teacher"] == {
        "SQuAD 1.1 EM": 80.9,
        "SQuAD 1.1 F1": 88.2,
    }
    assert rows_for("12x768", "prune", task="sst2", sparsity=[0.2])[
        "RoBERTa-base at 80 %, SMP"
    ] == {"SST-2": 94.9}
    assert not any("SMP" in row for row in rows_for("12x768", "finetune", task="mnli"))


@pytest.mark.parametrize(
    ("shape", "command", "recipe"),
    [
        ("12x768", "prune", {"task": "own", "sparsity": [0.9]}),
        ("12x768", "prune", {"task": "demo-topic", "sparsity": [0.9]}),
        ("12x768", "finetune", {"task": "own"}),
        ("6x768", "distill", {"task": "own"}),
        ("4x768", "cotrain", {"task": "own"}),
        ("4x768", "cotrain", {"task": "sst2"}),
        ("4x768", "distill", {}),
    ],
)
def test_no_published_rows_where_the_task_is_none_of_the_papers(shape, command, recipe):
    assert published_for([shape], command, recipe) == []


def test_published_rows_of_co_training_and_of_a_tasks_distillation():
    assert rows_for("4x768", "cotrain", task=None)["4x768 CTCD, 20 epochs"] == {
        "GLUE average": 79.12
    }
    rows = rows_for("6x768", "distill", task="mrpc")
    assert rows["TinyBERT 6x768, task-specific"] == {
        "params, M": 67.0,
        "MRPC F1": 90.6,
        "MRPC accuracy": 86.3,
    }
    assert rows["MiniLM 6x768 from BERT-base"] == {"params, M": 66.0, "MRPC": 88.4, "speed-up": 2.0}
    assert "MiniLMv2 6x768 from BERT-base" not in rows, "its paper has no MRPC"
    text = rows_for("6x768", "distill")
    assert text["MiniLMv2 6x768 from RoBERTa-large"]["SQuAD 2.0 F1"] == 81.6
    assert "TinyBERT 6x768, task-specific" not in text
    assert text["MiniLM 6x768 from BERT-base"]["average"] == 80.4


def test_every_column_of_a_published_row_is_of_a_task_or_of_every_one():
    content = tomllib.loads((Path(published.__file__).parent / "published.toml").read_text("utf-8"))
    columns = {name for row in content["row"] for name in row["values"]}
    assert columns - set(content["tasks"]) == {"params, M", "speed-up"}
    assert set(content["tasks"].values()) - {"glue"} <= set(tasks())
    assert set(content["tasks"]) <= columns


def test_variants_stand_beside_the_papers_of_their_shape_or_its_smallest():
    recipe = {"method": "minilm", "eval": {"tasks": ["sst2"]}}
    for shape, scores in (("6x384", (0.910, 0.899)), ("4x192", (0.893, 0.883))):
        rows = published_for(
            [shape], "distill", recipe, {"full": shape, "without-value": shape, "own-idea": shape}
        )
        beside = {r["beside"]: r["values"][""] / 100 for r in rows if r.get("beside")}
        assert beside == pytest.approx(dict(zip(("full", "without-value"), scores, strict=True)))
    several = {"full 4x384": "4x384", "full 3x384": "3x384"}
    rows = [
        r for r in published_for(several.values(), "distill", recipe, several) if r.get("beside")
    ]
    assert [(r["beside"], r["row"], r["values"]) for r in rows] == [
        ("full 4x384", "4x384, full", {"": 90.2}),
        ("full 3x384", "3x384, full", {"": 89.3}),
    ]
    assert not any(
        r.get("beside") for r in published_for(["3x384"], "distill", recipe, {"full": "3x384"})
    )
    task = {"method": "tinybert", "task": "mnli"}
    rows = published_for(
        ["4x312"], "distill", task, {"full": "4x312", "without-transformer": "4x312"}
    )
    assert [r["values"] for r in rows if r.get("beside") == "without-transformer"] == [
        {"matched": 71.7, "mismatched": 72.3}
    ]


def test_every_published_variant_is_shipped_and_its_columns_are_metrics_and_sets():
    content = tomllib.loads((Path(published.__file__).parent / "published.toml").read_text("utf-8"))
    for row in content["ablation"]:
        assert row["variant"] in ("full", *ablations(row["method"]))
        for column in row["values"]:
            name, metric, *part = column.split(" ")
            assert metric in task_of(name).metrics
            assert part in [[each] for each in task_of(name).sets] or [
                part,
                task_of(name).sets,
            ] == [[], ()]
