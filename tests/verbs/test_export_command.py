"""`kdcli export`: a directory whose README code runs, or none."""

import contextlib
import io
import json
import re
import subprocess
import sys

import numpy as np
import onnx
import pytest
import safetensors.torch
import torch
import transformers
from encoders import on_disk, tiny_config, tiny_tokenizer
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from kdcli.deploy import export as files
from kdcli.deploy.backends import PACKED
from kdcli.deploy.exported import open_export
from kdcli.deploy.sparse.compact import compact_model
from kdcli.errors import MachineError, UsageError
from kdcli.models.load import save_model
from kdcli.models.matrices import matrices
from kdcli.models.model import training_rows, write_training_rows
from kdcli.verbs.export import run as export
from kdcli.workloads.settings import LabelledSettings

NAMES = {0: "no", 1: "maybe", 2: "yes"}
HEADS = {
    "class": (
        AutoModelForSequenceClassification,
        {"id2label": NAMES, "label2id": {v: k for k, v in NAMES.items()}},
    ),
    "multi": (
        AutoModelForSequenceClassification,
        {"id2label": NAMES, "problem_type": "multi_label_classification"},
    ),
    "score": (AutoModelForSequenceClassification, {"num_labels": 1, "problem_type": "regression"}),
    "tokens": (transformers.AutoModelForTokenClassification, {"id2label": NAMES}),
    "span": (transformers.AutoModelForQuestionAnswering, {}),
    "none": (AutoModel, {}),
}
QUANTISED = "onnx/model_quantized.onnx"
ONE = "A first text.", "A second and somewhat longer one."


@pytest.fixture
def saved(tmp_path):
    def save(head, **changes):
        auto, settings = HEADS.get(head, (head, {}))
        torch.manual_seed(0)
        config = tiny_config(
            "bert", num_hidden_layers=1, initializer_range=0.3, **settings | changes
        )
        return on_disk(auto.from_config(config), tmp_path / "source")

    return save


def exported(source, folder, **changes):
    return export.export(str(source), output_dir=folder, **{"format": "onnx"} | changes)


def code_of(folder):
    (code,) = re.findall(
        r"```python\n(.*?)```", (folder / "README.md").read_text("utf-8"), re.DOTALL
    )
    return code


def snippet(folder):
    """What the README's lines print, run as they stand."""
    text = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(text):
        exec(code_of(folder), {"__name__": "__main__"})
    return text.getvalue().strip()


@pytest.mark.parametrize(
    ("head", "format"), [*((h, "onnx") for h in HEADS), ("class", "openvino"), ("none", "openvino")]
)
def test_readme_prints_what_torch_computes(head, format, saved, tmp_path):
    source = saved(head)
    done = exported(source, tmp_path / "out", format=format)
    printed = snippet(done.folder)
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = HEADS[head][0].from_pretrained(source).eval()
    texts = (["Where is it?"], ["It is in the house."]) if head == "span" else (list(ONE),)
    inputs = tokenizer(*texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        found = model(**inputs)
    if head == "none":
        assert printed.startswith(str(tuple(found.last_hidden_state.shape)))
    elif head == "class":
        assert printed == str([NAMES[i] for i in found.logits.argmax(-1).tolist()])
    elif head == "multi":
        assert printed == str(
            [[NAMES[i] for i in (row > 0).nonzero().ravel().tolist()] for row in found.logits]
        )
    elif head == "score":
        assert json.loads(printed) == pytest.approx(found.logits[:, 0].tolist(), abs=1e-4)
    elif head == "tokens":
        assert printed == str([[NAMES[i] for i in row] for row in found.logits.argmax(-1).tolist()])
    else:
        span = inputs["input_ids"][0][found.start_logits.argmax() : found.end_logits.argmax() + 1]
        assert printed == tokenizer.decode(span).strip()


def test_what_a_directory_holds(saved, tmp_path):
    source, rows = saved("class"), np.arange(5, dtype=np.uint64)
    write_training_rows(source, rows)
    done = exported(source, tmp_path / "out", precisions=["int8"])
    assert (training_rows(str(done.folder)) == rows).all()
    code = [sys.executable, "-c", code_of(done.folder)]
    alone = subprocess.run(code, cwd=done.folder, capture_output=True, text=True)
    assert (alone.returncode, alone.stdout.strip()) == (0, snippet(done.folder)), alone.stderr
    names = {f.name for f in done.folder.iterdir()} - {".manifest.jsonl"}
    assert names >= {
        "onnx",
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "README.md",
        "export.json",
    }
    assert not any(name.startswith(".") or name.endswith(".part") for name in names)
    facts = json.loads((done.folder / "export.json").read_text("utf-8"))
    assert facts == json.loads(done.to_json())
    assert facts["precision"] == "int8"
    assert facts["files"] == {QUANTISED: (done.folder / QUANTISED).stat().st_size}
    assert 0 < facts["relative"] <= facts["limits"]["relative"]
    assert AutoConfig.from_pretrained(done.folder).id2label == NAMES
    readme = (done.folder / "README.md").read_text("utf-8")
    alike = facts["agreement"]
    assert (alike["texts"], 0.5 < alike["same"] <= 1.0) == (64, True)
    assert f"{alike['same']:.1%} of the predictions are the same on 64 texts" in readme
    assert "relative error" not in readme
    assert (facts["card"]["held_in"], facts["card"]["bytes"]) == ("int8", facts["files"][QUANTISED])
    assert str(tmp_path) not in readme + done.to_json()
    table, note, where = list(done.renderables())
    assert "README.md" in where
    assert "64 texts of random words that the tokenizer knows; the integers were chosen on" in note
    assert table.row_count == 7
    assert facts["also"] == []
    sums = facts["sums"]
    assert (sums["limit"], sums["can_saturate"]) == (2**15 - 1, False)
    assert all(0 < each["any_input"] <= 255 * 128 for each in sums["products"])


@pytest.mark.parametrize(("length", "expected"), [(16, 16), (1000, 160), (None, 160)])
def test_card_and_tokenizer_state_one_length(length, expected, saved, tmp_path):
    """The tokenizer's length, if the model has as many positions."""
    model = saved("class", max_position_embeddings=160)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.model_max_length = length or VERY_LARGE_INTEGER
    tokenizer.save_pretrained(model)
    exported(model, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text("utf-8")
    assert f"* length: at most {expected} tokens" in card
    assert re.findall(r"max_length=(\d+)", card) == [str(expected)]
    assert AutoTokenizer.from_pretrained(tmp_path / "out").model_max_length == expected


def test_a_packed_file_is_the_int8_file_in_half_the_size(saved, tmp_path):
    source = saved("class")
    packed, plain = (
        exported(source, tmp_path / precision, precisions=[precision])
        for precision in (PACKED, "int8")
    )
    assert list(packed.facts.files) == list(plain.facts.files) == [QUANTISED]
    assert (packed.facts.precision, packed.facts.card.held_in) == (PACKED, PACKED)
    assert open_export(str(packed.folder)).precision == PACKED
    graphs = [onnx.load(done.folder / QUANTISED) for done in (packed, plain)]
    stored = [{each.name: each for each in graph.graph.initializer} for graph in graphs]
    matrices = [n for n, each in stored[1].items() if n.endswith("_quantized")]
    assert len(matrices) >= 6
    for name in matrices:
        words, factors = (stored[0][f"{name}_{part}"] for part in ("words", "factors"))
        assert len(words.raw_data) == 16 * len(factors.raw_data)
        assert 2 * len(words.raw_data) == len(stored[1][name].raw_data)
    assert [each.name for each in packed.facts.sums.products] == [
        each.name for each in plain.facts.sums.products
    ]
    assert all(0 < each.any_input <= 255 * 128 for each in packed.facts.sums.products)
    assert snippet(packed.folder)
    assert 'dtype: "q8"' in (packed.folder / "README.md").read_text("utf-8")


def test_training_brings_a_packed_file_closer_to_the_model(saved, tmp_path):
    source, texts = saved("none"), tmp_path / "texts.txt"
    rng = np.random.default_rng(0)
    rows = [" ".join(f"w{n}" for n in rng.integers(0, 40, 8)) for _ in range(1400)]
    texts.write_text("\n".join(rows), "utf-8")
    given = {"precisions": [PACKED], "pooling": "mean", "data": LabelledSettings(source=str(texts))}
    plain, trained = (
        exported(source, tmp_path / str(steps), **given, steps=steps).facts for steps in (0, 60)
    )
    assert 1 - trained.agreement["cosine"] < 0.8 * (1 - plain.agreement["cosine"])
    assert trained.bytes == plain.bytes
    assert "and trained for 60 steps on 960" in trained.calibrated_on
    stored = {each.name for each in onnx.load(tmp_path / "60" / QUANTISED).graph.initializer}
    assert not {name for name in stored if name.endswith("_quantized")}
    few = texts.with_name("few.txt")
    few.write_text("\n".join(rows[:300]), "utf-8")
    given["data"] = LabelledSettings(source=str(few))
    with pytest.raises(UsageError, match="at least 960 texts, and there are 150: texts of"):
        exported(source, tmp_path / "few", **given, steps=60)
    assert not (tmp_path / "few").exists()


def test_products_and_tables_that_are_not_packed_are_counted(saved, tmp_path, caplog):
    exported(saved("class", intermediate_size=80), tmp_path / "out", precisions=[PACKED])
    assert "1 of 8 products stay in plain int8, because their widths (80) are" in caplog.text
    assert "tables stay in plain int8, because they have fewer than 4,096 rows" in caplog.text


def test_a_model_without_whole_blocks_is_not_packed(saved, tmp_path):
    narrow = saved("class", hidden_size=40, intermediate_size=80)
    with pytest.raises(UsageError, match="multiple of 32 inputs, only 40, 80"):
        exported(narrow, tmp_path / "out", precisions=[PACKED])
    assert not (tmp_path / "out").exists()


def test_several_precisions_lie_side_by_side(saved, tmp_path):
    source, places = (
        saved("class"),
        {p: place for (f, p), place in files.FILES.items() if f == "onnx" and p != PACKED},
    )
    done = exported(source, tmp_path / "out", precisions=list(places))
    assert set(done.facts.files) == set(places.values())
    rows = done.to_frame().set_index("precision")
    assert list(rows.index) == list(places) == ["fp32", "fp16", "int8", "q4"]
    assert [done.facts.files[place] for place in places.values()] == list(rows["bytes"])
    assert rows["relative"]["fp32"] < rows["relative"]["fp16"] < rows["relative"]["int8"]
    graphs = [onnx.load(tmp_path / "out" / place) for place in places.values()]
    # ONNX Runtime's tables in 4 bits need version 10.
    assert [graph.ir_version for graph in graphs] == [9, 9, 9, 10]
    # Other verbs take the float32 file.
    opened = open_export(str(tmp_path / "out"))
    assert (opened.precision, opened.card.bytes) == ("fp32", rows["bytes"]["fp32"])
    readme = (tmp_path / "out" / "README.md").read_text("utf-8")
    assert all(place in readme for place in places.values())
    assert snippet(tmp_path / "out")


def test_a_head_that_is_left_out_is_noted(saved, tmp_path):
    done = exported(saved(AutoModelForMaskedLM), tmp_path / "out")
    assert done.facts.outputs == ["last_hidden_state"]
    note, sources = done.facts.notes
    assert "BertForMaskedLM" in note
    assert sources == "compared with torch on 64 texts of random words that the tokenizer knows"
    assert note in (done.folder / "README.md").read_text("utf-8")


def test_a_compacted_directory_keeps_its_head(saved, tmp_path):
    model = AutoModelForSequenceClassification.from_pretrained(saved("class")).eval()
    with torch.no_grad():
        for matrix in matrices(model):
            matrix.linear.weight[: matrix.linear.out_features // 2] = 0
            matrix.linear.bias[: matrix.linear.out_features // 2] = 0
    small = compact_model(model)
    assert small.num_parameters() < model.num_parameters()
    save_model(small, tiny_tokenizer(), tmp_path / "small")
    done = exported(tmp_path / "small", tmp_path / "out", weights=True)
    assert (done.facts.kind, done.facts.outputs) == ("class", ["logits"])
    assert len(done.facts.notes) == 1
    texts = AutoTokenizer.from_pretrained(tmp_path / "small")(
        list(ONE), padding=True, return_tensors="pt"
    )
    # The weights need the code of their class.
    loaded = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "out", trust_remote_code=True
    )
    with torch.no_grad():
        logits = model(**texts).logits
        torch.testing.assert_close(loaded(**texts).logits, logits)
    assert snippet(tmp_path / "out") == str([NAMES[i] for i in logits.argmax(-1).tolist()])


def test_into_the_current_directory(saved, tmp_path, monkeypatch):
    source, out = saved("none"), tmp_path / "here"
    out.mkdir()
    monkeypatch.chdir(out)
    exported(source, export.Path())
    assert (out / "onnx" / "model.onnx").is_file()
    assert sorted(f.name for f in tmp_path.iterdir()) == ["here", "source"]


def test_a_model_that_computes_nan_is_refused(saved, tmp_path):
    source, out = saved("class"), tmp_path / "out" / "export"
    weights = safetensors.torch.load_file(source / "model.safetensors")
    # Finite weights, whose products are not.
    weights["bert.encoder.layer.0.output.dense.weight"][:] = 3e38
    safetensors.torch.save_file(weights, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(UsageError, match="computes NaN or infinity in torch"):
        exported(source, out, precisions=("int8",))
    assert not out.exists()


def test_a_tokenizer_without_a_mask_is_refused(saved, tmp_path):
    model = saved("class")
    tokenizer = AutoTokenizer.from_pretrained(model, model_input_names=["input_ids"])
    tokenizer.save_pretrained(model)
    with pytest.raises(UsageError, match="returns no attention_mask"):
        exported(model, tmp_path / "out")


def test_texts_without_words_are_refused(saved, tmp_path):
    (tmp_path / "texts.txt").write_text("\u200b\n" * 9)
    data = LabelledSettings(source=str(tmp_path / "texts.txt"))
    with pytest.raises(UsageError, match="no text to compare"):
        exported(saved("none"), tmp_path / "out", data=data, pooling="mean")


def test_missing_library_is_reported_before_anything_is_loaded(tmp_path, without):
    without("onnxruntime")
    with pytest.raises(MachineError, match="onnxruntime") as caught:
        exported("nowhere", tmp_path / "out")
    assert caught.value.hint == "pip install onnx onnxruntime onnxscript"
    assert list(tmp_path.iterdir()) == []
