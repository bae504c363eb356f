"""`kdcli export --fp16` keeps values that half precision cannot hold."""

import json

import numpy as np
import onnx
import pytest
import torch
from encoders import on_disk, tiny_config
from onnx.reference import ReferenceEvaluator
from own_files import said_by, succeeds
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from kdcli.deploy.export import export_model

TEXTS = [f"w{n} w{n + 1} w{n + 2}" for n in range(40)]
RARE = "w47"


def classifier():
    """Return a small classifier and its layer."""
    torch.manual_seed(0)
    # The evaluator gathers from at most 64 positions.
    sizes = {"num_hidden_layers": 1, "max_position_embeddings": 48}
    config = tiny_config("bert", initializer_range=0.3, **sizes)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    return model, model.bert.encoder.layer[0]


def let_one_unit_be_large(layer, weight_D, bias):
    with torch.no_grad():
        layer.intermediate.dense.weight[0] = weight_D
        layer.intermediate.dense.bias[0] = bias
        layer.output.dense.weight[:, 0] = 1e-5 * torch.randn(len(layer.output.dense.weight))


def large_for_the_rare_word(model, layer, tokenizer):
    """Let a unit exceed half precision for one word, and stay far below for the others."""
    rare = tokenizer.convert_tokens_to_ids(RARE)
    states = []
    with torch.no_grad():
        model.bert.embeddings.word_embeddings.weight[rare] *= 10
        hook = layer.intermediate.register_forward_pre_hook(lambda _, args: states.append(args[0]))
        batch = tokenizer([RARE, *TEXTS], padding=True, return_tensors="pt")
        model(**batch)
        hook.remove()
    of_rare_D, others_BLD = states[0][0, 0], states[0][1:]
    others_ND = others_BLD.flatten(0, 1)
    direction_D = torch.linalg.lstsq(others_ND.T @ others_ND, of_rare_D).solution
    scale = 7e4 / (of_rare_D @ direction_D)
    assert scale * (others_BLD @ direction_D).abs().max() < 3e4
    let_one_unit_be_large(layer, scale * direction_D, 0)


def in_half_as_written(file, batch):
    """Compute a file in half precision where it says so, which ONNX Runtime may not on a CPU."""
    graph = onnx.load(file)
    onnx.checker.check_model(graph)
    assert graph.ir_version == 9
    feed = {each.name: batch[each.name].numpy() for each in graph.graph.input}
    with np.errstate(over="ignore", invalid="ignore"):
        return ReferenceEvaluator(graph).run(None, feed)[-1]


@pytest.mark.parametrize(
    "large_for", ["every text", "a compared text", "a calibration text", "a token of no text"]
)
def test_values_that_half_precision_cannot_hold_stay_in_float32(tmp_path, large_for):
    model, layer = classifier()
    texts, rare_text = list(TEXTS), f"w1 {RARE} w3"
    tokenizer = AutoTokenizer.from_pretrained(on_disk(model, tmp_path / "plain"))
    if large_for == "every text":
        let_one_unit_be_large(layer, 0, 1e5)
    elif large_for == "a token of no text":
        with torch.no_grad():
            rare = tokenizer.convert_tokens_to_ids(RARE)
            model.bert.embeddings.word_embeddings.weight[rare] *= 1e6
    else:
        large_for_the_rare_word(model, layer, tokenizer)
        # The first half of the texts is compared, and the other half is for calibration.
        place = 0 if large_for == "a compared text" else -1
        texts[place] = rare_text
    source = on_disk(model, tmp_path / "source")
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    given = ("--format", "onnx", "--fp16", "--data", tmp_path / "texts.txt")
    done = succeeds("export", source, *given, "-o", tmp_path / "out")
    assert "operations with values too large for it in float32" in said_by(done)
    batch = AutoTokenizer.from_pretrained(tmp_path / "out")(
        [*texts[:5], rare_text], padding=True, return_token_type_ids=True, return_tensors="pt"
    )
    logits = in_half_as_written(tmp_path / "out" / "onnx" / "model_fp16.onnx", batch)
    with torch.no_grad():
        expected = model(**batch).logits.numpy()
    np.testing.assert_allclose(logits, expected, atol=0.02)
    facts = json.loads((tmp_path / "out" / "export.json").read_text("utf-8"))
    assert facts["agreement"]["same"] == 1.0
    assert any("nodes are in float32, because" in note for note in facts["notes"])


def test_a_backend_in_half_precision_keeps_them_too(tmp_path):
    model, layer = classifier()
    let_one_unit_be_large(layer, 0, 1e5)
    file = export_model(model, tmp_path, "onnx", "fp16").path
    ids = torch.tensor([[2, 7, 8, 3]])
    batch = {"input_ids": ids, "attention_mask": ids * 0 + 1, "token_type_ids": ids * 0}
    with torch.no_grad():
        expected = model(**batch).logits.numpy()
    np.testing.assert_allclose(in_half_as_written(file, batch), expected, atol=0.02)
