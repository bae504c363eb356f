"""report.json: exactly the keys that were promised, and the same after reading as before
writing."""

import functools
import json
import operator
from pathlib import Path

import pytest
from pydantic import ValidationError
from pydantic_core import to_json
from reports import made, models_of

from kdcli.data.tasks import named_tasks, task_of
from kdcli.errors import UsageError
from kdcli.recipe.resolve import ablations
from kdcli.report.finish import checked_report, published_for
from kdcli.report.schema import Mistake, Report
from kdcli.report.tables import published_tables

ROOT = Path(__file__).parents[2]


def test_round_trip(report):
    raw = json.loads(report.to_json())
    assert (Report.model_validate_json(report.to_json()), raw["schema"]) == (report, 2)
    assert Report.model_validate_json(to_json(raw)) == report


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
        (("schema",), 1),
        (("status",), "running"),
        (("surprise",), 1),
        (("latency", 0, "status"), "fine"),
        (("models", "teacher", "role"), "tutor"),
        (("models", "teacher", "card", "layers"), "12"),
        (("models", "teacher", "card", "surprise"), 1),
        (("models", "3x384", "baseline"), "nobody"),
        (("latency", 1, "speedup", "baseline"), "nobody"),
        (("latency", 1, "model"), "nobody"),
        (("quality", "sst2", "nobody"), {"accuracy": 0.5}),
        (("training", "steps"), 1.5),
        (("quality", "sst2", "teacher", "accuracy"), "0.93"),
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
    (of_shape,) = (row for row in rows["3x384"] if row.shape == "3x384")
    assert minilm.items() <= of_shape.values.items()
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


def test_every_column_of_a_published_row_is_of_a_task_or_of_every_one():
    content = published_tables()
    columns = {name for row in content["row"] if "task" not in row for name in row["values"]}
    assert columns - set(content["tasks"]) == {"params, M", "speed-up"}
    assert set(content["tasks"].values()) - {"glue"} <= set(named_tasks())
    assert set(content["tasks"]) <= columns


def variants_of(shape, *names):
    """Students of one shape, each a variant of the method."""
    models = [models_of("student", shape, variant=name)[0] for name in names]
    return [m.model_copy(update={"name": n}) for m, n in zip(models, names, strict=True)]


def test_variants_stand_next_to_the_papers_of_their_shape_or_its_smallest():
    recipe = {"ablate": "minilm", "method": "minilm", "eval": {"tasks": ["sst2"]}}
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
    other = recipe | {"method": "minilmv2"}
    assert not any(r.model for r in published_for(several, other))
    peers = [
        one.model_copy(update={"role": "peer"})
        for one in variants_of("4x64", "full student", "one-way student")
    ]
    rows = published_for(peers, {"ablate": "ctcd", "eval": {"tasks": ["cola"]}})
    assert {r.model: r.values[""] for r in rows} == {
        "full student": 46.23,
        "one-way student": 41.01,
    }
    task = {"ablate": "tinybert", "method": "tinybert", "task": "mnli"}
    rows = published_for(variants_of("4x312", "full", "without-transformer"), task)
    assert [r.values for r in rows if r.model == "without-transformer"] == [
        {"matched": 71.7, "mismatched": 72.3}
    ]


def test_every_published_variant_is_shipped_and_its_columns_are_sets():
    listed = published_tables()["ablation"]
    assert {one["ablate"] for one in listed} == {"minilm", "tinybert", "smp", "ctcd"}
    for one in listed:
        task = task_of(one["task"])
        assert one["metric"] in task.metrics
        for variant, by_set in one["values"].items():
            assert variant.partition(" ")[0] in ("full", *ablations(one["ablate"]))
            assert set(by_set) <= set(task.sets or [""])
