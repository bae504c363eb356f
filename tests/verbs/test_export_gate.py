"""A bound on what a file may lose: kept by the fewest products in float32, or nothing is
written."""

import json

import own_files
import pytest
from own_files import kdcli, refused, said_by, succeeds

TASK = ["--task", "own"]


def facts_of(folder):
    return json.loads((folder / "export.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def model(teacher_of):
    """A fine-tuned model and its data."""
    teacher = teacher_of("class")
    return teacher, teacher.parent / "data"


def test_the_task_judges_a_head_and_the_bound_decides(model, tmp_path, monkeypatch):
    teacher, data = model
    given = ["export", teacher, "--format", "onnx", "--int8", *TASK, "--data", data]
    done = succeeds(
        *given, "--max-drop", "100", "-o", tmp_path / "loose", "--set", "data.judged_rows=16"
    )
    facts = facts_of(tmp_path / "loose")
    (row,) = facts["scores"]
    assert (row["n"], set(row["torch"])) == (16, set(row["file"]))
    # Only the score decides.
    assert facts["limits"] == {"max_abs": None, "relative": None}
    assert [a["in_float"] for a in facts["attempts"]] == [0]
    assert "products" not in facts
    printed = " ".join(done.stdout.split())
    assert "95 % between" in printed
    assert "your data: accuracy differs from torch" in printed
    # What each attempt loses is fixed here, so that exactly three products must stay.
    lost = iter([90.0, 80.0, 70.0, 1.0, 20.0, 1.0])
    monkeypatch.setattr("kdcli.verbs.export.agreement.dropped", lambda *_: ("", next(lost)))
    succeeds(*given, "--max-drop", "1.0", "-o", tmp_path / "tight")
    facts = facts_of(tmp_path / "tight")
    assert [a["in_float"] for a in facts["attempts"]] == [0, 1, 2, 4, 3]
    assert [p["float"] for p in facts["products"]].count(True) == 4
    errors = [p["error"] for p in facts["products"]]
    assert errors == sorted(errors, reverse=True)
    assert facts["products"][0]["name"] in (tmp_path / "tight" / "README.md").read_text("utf-8")
    # A difference of less than one row does not count.
    one_row = 100 / facts["scores"][0]["n"]
    nearly = ("", 1.0 + 0.99 * one_row)
    monkeypatch.setattr("kdcli.verbs.export.agreement.dropped", lambda *_: nearly)
    succeeds(*given, "--max-drop", "1.0", "-o", tmp_path / "nearly")
    assert [a["in_float"] for a in facts_of(tmp_path / "nearly")["attempts"]] == [0]
    monkeypatch.setattr("kdcli.verbs.export.agreement.dropped", lambda *_: ("", 50.0))
    result = kdcli(*given, "--max-drop", "1.0", "-o", tmp_path / "never")
    assert (result.exit_code, "50.00 points lost, allowed 1" in said_by(result)) == (5, True)
    assert not (tmp_path / "never").exists()


def test_a_tokenizer_that_cannot_pad_is_one_message(tmp_path):
    plain = own_files.encoder(tmp_path / "plain")
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (plain / name).exists():
            settings = json.loads((plain / name).read_text("utf-8"))
            settings.pop("pad_token", None)
            (plain / name).write_text(json.dumps(settings), "utf-8")
    export = ("export", plain, "--format", "onnx")
    assert "the tokenizer has no padding token" in refused(tmp_path, *export)


def test_what_contradicts_is_one_message(model, tmp_path):
    teacher, data = model
    onnx = ["export", teacher, "--format", "onnx"]
    assert "--max-drop needs a task" in refused(tmp_path, *onnx, "--int8", "--max-drop", "1")
    assert "at least 0 points" in refused(
        tmp_path, *onnx, *TASK, "--data", data, "--max-drop", "-1"
    )
    assert "openvino is not written in q4" in refused(
        tmp_path, "export", teacher, "--format", "openvino", "--q4"
    )
    plain = own_files.encoder(tmp_path / "plain")
    assert "has no head for your data" in refused(
        tmp_path, "export", plain, "--format", "onnx", *TASK, "--data", data
    )
