"""report.json: exactly the keys that were promised, and the same after reading as before
writing."""

import functools
import json
import operator
import tomllib
from pathlib import Path

import pytest
from pydantic import ValidationError
from reports import made, models_of

from kdcli.data.tasks import named_tasks, task_of
from kdcli.errors import UsageError
from kdcli.report import published
from kdcli.report.finish import checked_report
from kdcli.report.published import published_for
from kdcli.report.schema import Mistake, Report
from kdcli.verbs.distill.recipes import ablations

ROOT = Path(__file__).parents[2]


def test_round_trip(report):
    raw = json.loads(report.to_json())
    assert (Report.model_validate_json(report.to_json()), raw["schema"]) == (report, 2)
    assert Report.model_validate(raw) == report


def test_a_mistake_of_an_earlier_report_is_read():
    given = {"id": "1", "texts": ["w1"], "label": "a", "predicted": "b"}
    assert Mistake.model_validate(given | {"badness": 0.5}).error == 0.5
    assert Mistake(**given, error=0.5).model_dump()["error"] == 0.5


def test_the_published_json_schema_is_that_of_the_model():
    schema = json.dumps(Report.model_json_schema(), indent=2) + "\n"
    assert (ROOT / "docs" / "report.schema.json").read_text("utf-8") == schema, (
        "write it again: python -m kdcli.report.schema > docs/report.schema.json"
    )


def test_a_report_of_schema_1_is_refused_in_a_line():
    with pytest.raises(UsageError, match=r"^report.json is a report of schema 1; this") as caught:
        checked_report({"schema": 1, "command": "distill", "models": {}}, Path("report.json"))
    assert "run its recipe.yaml again" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        *[
            (("schema",), 1),
            (("status",), "running"),
            (("surprise",), 1),
            (("latency", 0, "status"), "fine"),
        ],
        *[
            (("models", "teacher", "role"), "tutor"),
            (("models", "teacher", "card", "layers"), "12"),
            (("models", "teacher", "card", "surprise"), 1),
            (("models", "3x384", "baseline"), "nobody"),
            (("latency", 1, "speedup", "baseline"), "nobody"),
            (("latency", 1, "model"), "nobody"),
            (("quality", "sst2", "nobody"), {"accuracy": 0.5}),
        ],
        *[(("training", "steps"), 1.5), (("quality", "sst2", "teacher", "accuracy"), "0.93")],
    ],
)
def test_what_does_not_belong_is_refused(values, path, value):
    made(values)
    *parents, last = path
    functools.reduce(operator.getitem, parents, values)[last] = value
    with pytest.raises(ValidationError):
        made(values)


def test_a_report_is_frozen(report):
    with pytest.raises(ValidationError, match="frozen"):
        report.command = "prune"


def test_published_rows_belong_to_the_shape():
    rows = {shape: published_for(models_of("student", shape)) for shape in ("3x384", "4x312")}
    minilm = {"SQuAD 2.0 F1": 66.9, "MNLI-m": 79.1, "SST-2": 89.7, "speed-up": 10.1}
    assert minilm.items() <= rows["3x384"][-1].values.items()
    assert rows["3x384"][-1].shape == "3x384"
    assert any("TinyBERT" in row.row for row in rows["4x312"])
    assert published_for(models_of("student", "5x123")) == []
    assert published_for(models_of("student", "3x384:1472")) == [], "fewer units than the paper's"
    assert published_for(models_of("student", "4x312:1200")) == rows["4x312"], "TinyBERT's own"
    assert published_for(models_of("teacher", "3x384")) == []
    trimming = [*models_of("baseline", "3x384"), *models_of("trimmed", "3x384")]
    assert published_for(models_of("student", "3x384"), embeds=True) == []
    assert published_for(trimming, {"task": "sst2"}) == published_for(trimming) == []
    both = published_for(models_of("student", "6x384", "3x384"))
    assert len({r.row for r in both}) == len(both), "a row for two shapes comes once"


def rows_for(shape, role, **recipe):
    return {row.row: row.values for row in published_for(models_of(role, shape), recipe)}


def test_published_rows_of_pruning_are_those_of_task_and_density():
    rows = rows_for("12x768", "pruned", task="mnli", sparsity=[0.9])
    assert rows["BERT-base at 10 %, SMP-S"] == {"MNLI-m": 82.5, "MNLI-mm": 82.3}
    assert rows["BERT-base at 10 %, SMP-S with a teacher"] == {"MNLI-m": 83.7, "MNLI-mm": 83.6}
    assert rows["BERT-base, fine-tuned"] == {"MNLI-m": 84.5, "MNLI-mm": 84.9}
    assert not any("3 %" in row or "50 %" in row for row in rows)
    both = rows_for("12x768", "pruned", task="squad", sparsity=[0.97, 0.5])
    assert both["BERT-base at 3 %, SMP-L"] == {"SQuAD 1.1 EM": 70.7, "SQuAD 1.1 F1": 81.0}
    assert both["BERT-base at 50 %, CAP with a teacher"] == {
        "SQuAD 1.1 EM": 80.9,
        "SQuAD 1.1 F1": 88.2,
    }
    assert rows_for("12x768", "pruned", task="sst2", sparsity=[0.2])[
        "RoBERTa-base at 80 %, SMP"
    ] == {"SST-2": 94.9}
    assert not any("SMP" in row for row in rows_for("12x768", "finetuned", task="mnli"))


@pytest.mark.parametrize(
    ("shape", "role", "recipe"),
    [
        ("12x768", "pruned", {"task": "own", "sparsity": [0.9]}),
        ("12x768", "pruned", {"task": "demo-topic", "sparsity": [0.9]}),
        ("12x768", "finetuned", {"task": "own"}),
        ("6x768", "student", {"task": "own"}),
        ("4x768", "peer", {"task": "own"}),
        ("4x768", "peer", {"task": "sst2"}),
        ("4x768", "student", {}),
    ],
)
def test_no_published_rows_where_the_task_is_none_of_the_papers(shape, role, recipe):
    assert published_for(models_of(role, shape), recipe) == []


def test_published_rows_of_co_training_and_of_a_tasks_distillation():
    assert rows_for("4x768", "peer", task=None)["4x768 CTCD, 20 epochs"] == {"GLUE average": 79.12}
    rows = rows_for("6x768", "student", task="mrpc")
    assert rows["TinyBERT 6x768, task-specific"] == {
        "params, M": 67.0,
        "MRPC F1": 90.6,
        "MRPC accuracy": 86.3,
    }
    assert rows["MiniLM 6x768 from BERT-base"] == {"params, M": 66.0, "MRPC": 88.4, "speed-up": 2.0}
    assert "MiniLMv2 6x768 from BERT-base" not in rows, "its paper has no MRPC"
    text = rows_for("6x768", "student")
    assert text["MiniLMv2 6x768 from RoBERTa-large"]["SQuAD 2.0 F1"] == 81.6
    assert "TinyBERT 6x768, task-specific" not in text
    assert text["MiniLM 6x768 from BERT-base"]["average"] == 80.4


def test_every_column_of_a_published_row_is_of_a_task_or_of_every_one():
    content = tomllib.loads((Path(published.__file__).parent / "published.toml").read_text("utf-8"))
    columns = {name for row in content["row"] for name in row["values"]}
    assert columns - set(content["tasks"]) == {"params, M", "speed-up"}
    assert set(content["tasks"].values()) - {"glue"} <= set(named_tasks())
    assert set(content["tasks"]) <= columns


def variants_of(shape, *names):
    """Students of one shape, each a variant of the method."""
    models = [models_of("student", shape, variant=name)[0] for name in names]
    return [m.model_copy(update={"name": n}) for m, n in zip(models, names, strict=True)]


def test_variants_stand_next_to_the_papers_of_their_shape_or_its_smallest():
    recipe = {"method": "minilm", "eval": {"tasks": ["sst2"]}}
    for shape, scores in (("6x384", (0.910, 0.899)), ("4x192", (0.893, 0.883))):
        rows = published_for(variants_of(shape, "full", "without-value", "own-idea"), recipe)
        ours = {r.model: r.values[""] / 100 for r in rows if r.model}
        assert ours == pytest.approx(dict(zip(("full", "without-value"), scores, strict=True)))
    several = [
        model.model_copy(update={"name": f"full {shape}"})
        for shape in ("4x384", "3x384")
        for model in variants_of(shape, "full")
    ]
    rows = [r for r in published_for(several, recipe) if r.model]
    assert [(r.model, r.row, r.values) for r in rows] == [
        ("full 4x384", "4x384, full", {"": 90.2}),
        ("full 3x384", "3x384, full", {"": 89.3}),
    ]
    assert not any(r.model for r in published_for(variants_of("3x384", "full"), recipe))
    task = {"method": "tinybert", "task": "mnli"}
    rows = published_for(variants_of("4x312", "full", "without-transformer"), task)
    assert [r.values for r in rows if r.model == "without-transformer"] == [
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
