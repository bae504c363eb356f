"""Exports are judged and timed by their own runtime, from what lies in their directory."""

import json
import shlex
import shutil

import numpy as np
import own_files
import pytest
from own_files import report_of, said_by, succeeds
from transformers import AutoConfig, AutoTokenizer

from kdcli.deploy.exported import is_export, open_export, trained_on
from kdcli.errors import UsageError

FEW = shlex.split(
    "--set measure.min_runs=3 --set measure.min_seconds=0.0 --seq-len 16 --batch-size 1"
)
ON_TASK = ["--task", "own", "--set", "data.max_length=24", "--set", "data.stride=8"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["multi", "score", "tokens", "span"])
def test_an_export_has_the_scores_of_its_model(exported, tmp_path, kind):
    model, data, folder = exported(kind)
    succeeds("evaluate", model, folder, *ON_TASK, "--data", data, "-o", tmp_path / "out")
    of_torch, of_export = report_of(tmp_path / "out").evaluations
    assert of_export.metrics == pytest.approx(of_torch.metrics, abs=1e-4)
    assert of_torch.n == 32


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file_format", "runtime"), [("onnx", "onnxruntime"), ("openvino", "openvino")]
)
def test_int8_is_judged_alike_by_both_verbs_and_by_its_runtime_alone(
    exported, tmp_path, file_format, runtime
):
    _, data, folder = exported("class", file_format, "--int8")
    succeeds(
        "evaluate",
        folder,
        *ON_TASK,
        *shlex.split(f"--data {data} --predictions {tmp_path}/all.jsonl -o {tmp_path}/a"),
    )
    succeeds("benchmark", folder, *ON_TASK, "--data", data, *FEW, "-o", tmp_path / "b")
    one, other = report_of(tmp_path / "a"), report_of(tmp_path / "b")
    assert one.evaluations[0].metrics == other.evaluations[0].metrics
    assert [(r.model, r.backend, r.dtype) for r in other.latency] == [
        (folder.name, file_format, "int8")
    ]
    assert (one.cards[folder.name].held_in, one.cards[folder.name].bytes) == (
        "int8",
        bytes_in(folder),
    )
    # What the lines of its README would print, text by text.
    tokenizer, names = (
        AutoTokenizer.from_pretrained(folder),
        AutoConfig.from_pretrained(folder).id2label,
    )
    session = session_of(runtime, folder)
    rows = own_files.lines_of(data / "validation.jsonl")
    predicted = []
    for row in rows:
        inputs = tokenizer(
            row["text"],
            truncation=True,
            max_length=24,
            return_token_type_ids=True,
            return_tensors="np",
        )
        predicted.append(names[int(np.asarray(session(inputs)).argmax())])
    found = [row["predicted"] for row in own_files.lines_of(tmp_path / "all.jsonl")]
    # Activations of a batch share a scale, so rows alone may differ at the edge of two classes.
    assert np.mean([a == b for a, b in zip(found, predicted, strict=True)]) > 0.9


def bytes_in(folder):
    # Two names of one file count once.
    return sum({f.stat().st_ino: f.stat().st_size for f in folder.glob("o*/*")}.values())


def session_of(runtime, folder):
    module = pytest.importorskip(runtime)
    if runtime == "openvino":
        model = module.Core().compile_model(
            open_export(str(folder)).file, "CPU", {"INFERENCE_PRECISION_HINT": "f32"}
        )
        return lambda inputs: next(
            iter(model({i.any_name: inputs[i.any_name] for i in model.inputs}).values())
        )
    made = module.InferenceSession(
        open_export(str(folder)).file, providers=["CPUExecutionProvider"]
    )
    return lambda inputs: made.run(None, {i.name: inputs[i.name] for i in made.get_inputs()})[0]


def test_an_export_reads_the_columns_of_its_models_run(teacher_of, tmp_path):
    source = shutil.copytree(teacher_of("class"), tmp_path / "run")
    recipe = (source / "recipe.yaml").read_text("utf-8")
    columns = {"text": "wording", "label": "mood"}
    named = recipe.replace("columns: {}", f"columns: {json.dumps(columns)}")
    (source / "recipe.yaml").write_text(named, "utf-8")
    folder = tmp_path / "export"
    succeeds("export", source, "--data", "demo", "-o", folder)
    facts = (folder / "export.json").read_text("utf-8")
    assert json.loads(facts)["trained_on"] == {"task": "own", "columns": columns}
    rows = own_files.lines_of(teacher_of("class").parent / "data" / "validation.jsonl")
    named = [{"note": "x y", "wording": row["text"], "mood": row["label"]} for row in rows]
    data = own_files.write(tmp_path / "rows.jsonl", named)
    succeeds("evaluate", folder, "--data", data, "-o", tmp_path / "scores")
    succeeds("evaluate", source, "--data", data, "-o", tmp_path / "of_run")
    of_export, of_run = (report_of(tmp_path / name) for name in ("scores", "of_run"))
    assert of_export.evaluations[0].metrics == of_run.evaluations[0].metrics
    # Plain text has no columns.
    texts = tmp_path / "texts.txt"
    texts.write_text("".join(f"{row['text']}\n" for row in rows), "utf-8")
    succeeds("evaluate", source, folder, "--data", texts, "-o", tmp_path / "of_texts")


@pytest.mark.parametrize(
    ("told", "message"),
    [
        (
            {"task": "own", "columns": {"text": 3}},
            "'trained_on.columns.text' must be a string, got",
        ),
        ({"task": "own"}, "'trained_on.columns' is missing"),
        (3, "'trained_on' must be a JSON object, got 3"),
    ],
)
def test_a_damaged_key_of_an_export_is_named(tmp_path, told, message):
    (tmp_path / "export.json").write_text(json.dumps({"trained_on": told}), "utf-8")
    with pytest.raises(UsageError, match=message):
        trained_on(tmp_path)


@pytest.mark.slow
def test_an_export_may_be_the_baseline_of_its_model(exported, tmp_path):
    model, _, folder = exported("class", "onnx", "--int8")
    shown = succeeds("benchmark", folder, model, *FEW, "-o", tmp_path / "out").stdout
    assert "baseline" in shown
    first, second = report_of(tmp_path / "out").latency
    assert (first.model, first.backend, first.dtype) == (folder.name, "onnx", "int8")
    assert (second.model, second.backend, second.dtype) == (model.name, "torch", "fp32")
    assert (first.speedup, second.speedup.baseline) == (None, folder.name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "onnx" / "model.onnx").write_bytes(b"cut"), "model.onnx has 3 bytes, not"),
        (lambda f: (f / "onnx" / "model.onnx").unlink(), "model.onnx is missing"),
        (lambda f: (f / "export.json").write_text("{"), "export.json is not valid JSON"),
        (lambda f: edit(f, card=None), "from an earlier kdcli"),
        (lambda f: edit(f, format="pickle"), "it does not name a format that kdcli reads"),
        (lambda f: edit(f, files={"../onnx/model.onnx": 3, "onnx/model.onnx": 3}), "bytes, not 3"),
        (lambda f: edit(f, files={"onnx/other.onnx": 3}), "it does not name onnx/model.onnx"),
        (lambda f: spoil(f / "onnx" / "model.onnx"), "onnxruntime cannot load"),
    ],
)
def test_a_damaged_export_is_refused(exported, tmp_path, change, message):
    _, data, folder = exported()
    copied = shutil.copytree(folder, tmp_path / "copied")
    change(copied)
    result = own_files.kdcli("evaluate", copied, *ON_TASK, "--data", data, "-o", tmp_path / "out")
    assert result.exit_code == 2, result.output
    assert message in said_by(result)
    assert "export the model again" in said_by(result)
    assert not (tmp_path / "out").exists()


def edit(folder, **changes):
    facts = json.loads((folder / "export.json").read_text()) | changes
    (folder / "export.json").write_text(json.dumps(facts))


def spoil(file):
    file.write_bytes(b"x" * file.stat().st_size)


def test_an_export_is_not_for_a_gpu_nor_for_other_labels(exported, tmp_path):
    import torch

    _, data, folder = exported()
    with pytest.raises(UsageError, match="runs on the CPU only, not on cuda"):
        open_export(str(folder), torch.device("cuda"))
    result = own_files.kdcli(
        "evaluate",
        folder,
        *ON_TASK,
        *shlex.split(f"--data {data} --set 'head.label_map=[1, 0]' -o {tmp_path}/out"),
    )
    assert (result.exit_code, "cannot be reordered" in said_by(result)) == (2, True)


def test_an_export_in_the_home_directory_is_one(exported, monkeypatch):
    _, _, folder = exported()
    monkeypatch.setenv("HOME", str(folder.parent))
    assert is_export(f"~/{folder.name}")
    assert open_export(f"~/{folder.name}").card == open_export(str(folder)).card
