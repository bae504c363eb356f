"""`kdcli export --fp16` keeps values that half precision cannot hold."""

import json

import numpy as np
import onnx
import torch
from encoders import on_disk, tiny_config
from onnx.reference import ReferenceEvaluator
from own_files import said_by, succeeds
from transformers import AutoModelForSequenceClassification, AutoTokenizer

TEXTS = [f"w{n} w{n + 1} w{n + 2}" for n in range(40)]


def test_values_that_half_precision_cannot_hold_stay_in_float32(tmp_path):
    torch.manual_seed(0)
    config = tiny_config("bert", num_hidden_layers=1, initializer_range=0.3)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    layer = model.bert.encoder.layer[0]
    with torch.no_grad():
        layer.intermediate.dense.bias[0] = 1e5
        layer.output.dense.weight[:, 0] = 1e-5 * torch.randn(len(layer.output.dense.weight))
    source = on_disk(model, tmp_path / "source")
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    given = ("--format", "onnx", "--fp16", "--data", tmp_path / "texts.txt")
    done = succeeds("export", source, *given, "-o", tmp_path / "out")
    assert "nodes with values too large for it in float32" in said_by(done)
    graph = onnx.load(tmp_path / "out" / "onnx" / "model_fp16.onnx")
    onnx.checker.check_model(graph)
    assert graph.ir_version == 9
    batch = AutoTokenizer.from_pretrained(tmp_path / "out")(
        TEXTS[:5], padding=True, return_token_type_ids=True, return_tensors="pt"
    )
    feed = {each.name: batch[each.name].numpy() for each in graph.graph.input}
    # It computes in half precision where the file says so; ONNX Runtime may not on a CPU.
    (logits,) = ReferenceEvaluator(graph).run(None, feed)
    with torch.no_grad():
        expected = model(**batch).logits.numpy()
    np.testing.assert_allclose(logits, expected, atol=0.02)
    facts = json.loads((tmp_path / "out" / "export.json").read_text("utf-8"))
    assert facts["agreement"]["same"] == 1.0
