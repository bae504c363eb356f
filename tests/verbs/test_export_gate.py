"""A bound on what a file may lose: kept by the fewest products in float32, or nothing is
written."""

import json
import math
from types import SimpleNamespace

import numpy as np
import onnx
import own_files
import pytest
from own_files import kdcli, refused, said_by, succeeds

from kdcli.report.schema import Comparison, Evaluation
from kdcli.verbs.export import export_check
from kdcli.verbs.export.run import export
from kdcli.workloads.scores import ModelScores, compare
from kdcli.workloads.settings import LabelledSettings

TASK = ["--task", "own"]


def facts_of(folder):
    return json.loads((folder / "export.json").read_text("utf-8"))


def lose(monkeypatch, *points):
    """Let the attempts of an export lose these points, one after another."""
    lost = iter(points)
    monkeypatch.setattr(export_check, "worst_drop", lambda *_: next(lost))


def test_the_worst_set_counts_and_no_score_is_the_worst():
    row = {"model": "file", "baseline": "torch", "task": "own", "low": 0.0, "high": 0.0}
    drops = {"a": -0.5, "b": math.nan, "c": -0.9}
    rows = [
        Comparison(**row, set=name, metric=metric, difference=drop, confidence=0.95)
        for name, drop in drops.items()
        for metric in ("f1", "accuracy")
    ]
    assert math.isnan(export_check.worst_drop(rows, "accuracy"))
    assert export_check.worst_drop([rows[1], rows[5]], "accuracy") == pytest.approx(90)


def test_of_several_sets_the_largest_one_gives_the_worth_of_a_row(monkeypatch):
    def scored(**sets):
        row = {"model": "", "task": "own", "split": "test"}
        evaluations, scorers = [], {}
        for name, right in sets.items():
            values = np.array(right, float)
            scorers[name] = lambda rows, values=values: {"accuracy": float(values[rows].mean())}
            metrics = {"accuracy": float(values.mean())}
            evaluations.append(Evaluation(**row, set=name, n=len(right), metrics=metrics))
        return ModelScores(evaluations, scorers, {each.set: each.n for each in evaluations})

    sides = iter([scored(a=[1] * 10, b=[1] * 40), scored(a=[1] * 9 + [0], b=[1] * 38 + [0, 0])])
    workload = SimpleNamespace(
        name="own",
        score=lambda _: next(sides),
        run_by=lambda *_: None,
        compare=lambda scores, pairs: compare("own", scores, pairs),
    )
    monkeypatch.setattr(export_check, "file_runner", lambda *_, **options: None)
    monkeypatch.setattr(export_check.ExportCheck, "_agreement", lambda *_: {})
    check = export_check.ExportCheck(None, "class", None, workload)
    assert len(check.scores_of_torch.evaluations) == 2
    comparison = check.compare(SimpleNamespace(path=None, outputs=()))
    assert (comparison.drop, comparison.points_per_row) == (pytest.approx(10.0), 2.5)


@pytest.fixture(scope="module")
def model(teacher_of):
    """A fine-tuned model and its data."""
    teacher = teacher_of("class")
    return teacher, teacher.parent / "data"


def test_the_task_judges_a_head_and_the_bound_decides(model, tmp_path, monkeypatch):
    teacher, data = model
    given = ["export", teacher, "--format", "onnx", "--int8", *TASK, "--data", data]
    given += ["--set", "data.judged_rows=16"]
    done = succeeds(*given, "--max-drop", "100", "-o", tmp_path / "loose")
    facts = facts_of(tmp_path / "loose")
    (row,) = facts["scores"]
    assert (row["n"], set(row["torch"])) == (16, set(row["file"]))
    # Only the score decides.
    assert facts["limits"] == {"max_abs": None, "relative": None}
    assert [a["in_float"] for a in facts["attempts"]] == [0]
    assert "products" not in facts
    printed = " ".join(done.stdout.split())
    assert "95 % interval" in printed
    assert "loses no accuracy compared with the same model in torch" in printed
    # One of 16 rows is worth 6.25 points of accuracy.
    assert facts["tolerance"] == 6.25
    # What each attempt loses is fixed here, so that exactly four products must stay.
    lose(monkeypatch, 9.0, 8.0, 7.25, 1.0, 7.25, 1.0)
    succeeds(*given, "--max-drop", "1.0", "-o", tmp_path / "tight")
    facts = facts_of(tmp_path / "tight")
    assert [a["in_float"] for a in facts["attempts"]] == [0, 1, 2, 4, 3]
    assert [p["float"] for p in facts["products"]].count(True) == 4
    errors = [p["error"] for p in facts["products"]]
    assert errors == sorted(errors, reverse=True)
    assert facts["products"][0]["name"] in (tmp_path / "tight" / "README.md").read_text("utf-8")
    # An excess of less than one row is ignored, and said.
    lose(monkeypatch, 7.24)
    done = succeeds(*given, "--max-drop", "1.0", "-o", tmp_path / "nearly")
    assert [a["in_float"] for a in facts_of(tmp_path / "nearly")["attempts"]] == [0]
    excess = "7.24 points lost, allowed 1, and an excess of less than one row (6.25 points)"
    assert excess in said_by(done)
    # Of a packed file, such products stay in int8.
    lose(monkeypatch, 9.0, 7.25, 1.0)
    succeeds(*given, "--pack", "--max-drop", "1.0", "-o", tmp_path / "packed")
    facts = facts_of(tmp_path / "packed")
    assert [a["in_float"] for a in facts["attempts"]] == [0, 1, 2]
    card = (tmp_path / "packed" / "README.md").read_text("utf-8")
    assert f"2 of {len(facts['products'])} products are in int8" in card
    graph = onnx.load(tmp_path / "packed" / "onnx" / "model_quantized.onnx").graph
    kinds = [t.data_type for t in graph.initializer if len(t.dims) == 2]
    # Its two small tables are in int8 too.
    assert kinds.count(onnx.TensorProto.INT8) == 4
    # The goal of compress has no tolerance.
    lose(monkeypatch, 7.24, 1.0)
    options = {"format": "onnx", "precisions": ["int8"], "task": "own", "max_drop": 1.0}
    source = LabelledSettings(source=str(data), judged_rows=16)
    export(str(teacher), **options, data=source, exact=True, output_dir=tmp_path / "exact")
    facts = facts_of(tmp_path / "exact")
    assert facts["tolerance"] == 0.0
    assert [a["in_float"] for a in facts["attempts"]] == [0, 1]
    lose(monkeypatch, *[50.0] * 99)
    result = kdcli(*given, "--max-drop", "1.0", "-o", tmp_path / "never")
    assert (result.exit_code, "50.00 points lost, allowed 1" in said_by(result)) == (5, True)
    assert not (tmp_path / "never").exists()


def test_what_contradicts_is_one_message(model, tmp_path):
    teacher, data = model
    onnx = ["export", teacher, "--format", "onnx"]
    plain = own_files.encoder(tmp_path / "plain")
    # A model with a training run has its task and data.
    assert "--max-drop needs a task" in refused(
        tmp_path, "export", plain, "--format", "onnx", "--int8", "--max-drop", "1"
    )
    assert "at least 0 points" in refused(
        tmp_path, *onnx, *TASK, "--data", data, "--max-drop", "-1"
    )
    assert "openvino is not written in q4" in refused(
        tmp_path, "export", teacher, "--format", "openvino", "--q4"
    )
    assert "has no head for your data" in refused(
        tmp_path, "export", plain, "--format", "onnx", *TASK, "--data", data
    )
