"""Exported files compute what torch does, at any size; a wrong file is refused."""

import logging

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import transformers
from encoders import TYPES, tiny_config, tiny_encoder
from onnxruntime.quantization import quantize_dynamic

from kdcli.deploy.calibrate import keys_of, products
from kdcli.deploy.export import EXACT, FILE_LIMITS, FILES, difference, export_model, recorded
from kdcli.deploy.sessions import onnx_caller, openvino_caller
from kdcli.errors import MachineError, UsageError
from kdcli.version import install_command

pytestmark = pytest.mark.slow

CALLERS = {"onnx": onnx_caller, "openvino": openvino_caller}
MAIN = ("bert", "modernbert", "deberta-v2")
HEADS = {
    "sequence": (transformers.AutoModelForSequenceClassification, ("logits",)),
    "tokens": (transformers.AutoModelForTokenClassification, ("logits",)),
    "questions": (transformers.AutoModelForQuestionAnswering, ("start_logits", "end_logits")),
}


def small(model_type: str):
    """One layer; ModernBERT needs two, because its second is its first local one."""
    layers = {"distilbert": {"n_layers": 1}, "modernbert": {"num_hidden_layers": 2}}
    return layers.get(model_type, {"num_hidden_layers": 1}) | {"initializer_range": 0.3}


def files_in(folder):
    return sorted(f.relative_to(folder).as_posix() for f in folder.rglob("*") if f.is_file())


def parts(engine, precision):
    """The files of an export; OpenVINO's weights lie next to the graph."""
    file = FILES[engine, precision]
    return [file] if engine == "onnx" else [file.replace(".xml", ".bin"), file]


def padded(rows: int, length: int, types: bool = False) -> dict[str, torch.Tensor]:
    """Row i lacks i tokens."""
    ids_BL = torch.randint(5, 64, (rows, length), generator=torch.Generator().manual_seed(rows))
    mask_BL = (torch.arange(length) < length - torch.arange(rows)[:, None]).long()
    batch = {"input_ids": ids_BL * mask_BL, "attention_mask": mask_BL}
    return batch | (
        {"token_type_ids": (torch.arange(length) > 3).long() * mask_BL} if types else {}
    )


def gap(model, file, batch, engine: str) -> float:
    """Largest difference from torch over real tokens, relative to the largest output where that
    exceeds 1."""
    call = CALLERS[engine](file.path, threads=1)
    with torch.no_grad():
        expected = model(**batch)
    real = batch["attention_mask"].bool().numpy()
    gaps = []
    for name, x in zip(file.outputs, call(call.feed(batch)), strict=True):
        y = expected[name].numpy()
        assert x.shape == y.shape
        by_token = name != "logits" or x.ndim == 3
        gaps.append(np.abs(x - y)[real if by_token else ...].max() / max(1.0, np.abs(y).max()))
    return float(max(gaps))


def record_for_real(monkeypatch):
    """Record the model itself, whose biases of zero the exporter merges; see tests/graphs.py."""
    monkeypatch.setattr(torch.onnx, "export", torch.onnx.export.__self__.record)


LATER = [pytest.param("onnx", t, marks=pytest.mark.long) for t in sorted(set(TYPES) - set(MAIN))]


@pytest.mark.parametrize(
    ("engine", "kind"),
    [*(("onnx", kind) for kind in MAIN), *LATER, ("openvino", "bert"), ("openvino", "modernbert")],
)
def test_every_type_can_be_exported_at_any_size(engine, kind, tmp_path, monkeypatch):
    if engine == "onnx":
        record_for_real(monkeypatch)
    torch.manual_seed(0)
    model = tiny_encoder(kind, **small(kind))
    file = export_model(model, tmp_path / "new", engine)
    assert file.outputs == ("last_hidden_state",)
    assert files_in(tmp_path / "new") == parts(engine, "fp32")
    assert file.relative <= FILE_LIMITS["fp32"]
    if engine == "onnx":
        graph = onnx.load(file.path).graph
        ops = [node.op_type for node in graph.node]
        assert "Softmax" in ops
        assert "IsNaN" not in ops
        for tensor in (*graph.input, *graph.output):
            rows, tokens, *_ = tensor.type.tensor_type.shape.dim
            assert (rows.dim_param, tokens.dim_param) == ("batch_size", "sequence_length")
    for rows, length in ((1, 1), (1, 7), (5, 33), (2, 131)):
        assert gap(model, file, padded(rows, length), engine) <= 10 * EXACT


@pytest.mark.parametrize(
    ("head", "engine"),
    [*((head, "onnx") for head in HEADS), ("sequence", "openvino"), ("questions", "openvino")],
)
def test_heads(head, engine, tmp_path, monkeypatch):
    if engine == "onnx":
        record_for_real(monkeypatch)
    auto, outputs = HEADS[head]
    torch.manual_seed(0)
    model = auto.from_config(
        tiny_config("bert", num_labels=2 if head == "questions" else 3, **small("bert"))
    ).eval()
    file = export_model(model, tmp_path / "export", engine)
    assert (file.outputs, file.inputs) == (
        outputs,
        ("input_ids", "attention_mask", "token_type_ids"),
    )
    # As many tokens as classes: a shape alone does not say which axis is which.
    for rows, length in ((2, 3), (4, 20)):
        assert gap(model, file, padded(rows, length, types=True), engine) <= EXACT
    untyped, typed = padded(4, 20), padded(4, 20, types=True)
    assert gap(model, file, untyped, engine) <= EXACT
    with torch.no_grad():
        assert not torch.allclose(
            model(**untyped)[outputs[0]], model(**typed)[outputs[0]], atol=1e-3
        )


@pytest.mark.parametrize(("engine", "precision"), [each for each in FILES if each[1] != "fp32"])
def test_fewer_bits_are_smaller_and_near(engine, precision, tmp_path):
    torch.manual_seed(0)
    config = tiny_config(
        "bert", vocab_size=2000, hidden_size=64, intermediate_size=512, **small("bert")
    )
    model = HEADS["sequence"][0].from_config(config).eval()
    with recorded(model, tmp_path, engine, precision) as graph:
        little = graph.write()
        large = graph.plain.stat().st_size
    assert files_in(tmp_path) == parts(engine, precision)
    assert sum(f.stat().st_size for f in little.path.parent.iterdir()) < 0.6 * large
    assert 1e-5 < little.relative <= FILE_LIMITS[precision]


@pytest.mark.parametrize(
    ("engine", "precision"), [("onnx", "int8"), ("onnx", "q4"), ("openvino", "int8")]
)
def test_products_stay_in_float_by_name(engine, precision, tmp_path):
    torch.manual_seed(0)
    config = tiny_config(
        "bert", hidden_size=64, intermediate_size=512, num_labels=3, **small("bert")
    )
    model = HEADS["sequence"][0].from_config(config).eval()
    with torch.no_grad():
        for embedding in (m for m in model.modules() if isinstance(m, torch.nn.Embedding)):
            embedding.weight.copy_(
                embedding.weight.sign()
            )  # Embeddings that every precision holds exactly
    with recorded(model, tmp_path, engine, precision) as graph:
        rounded = graph.write().relative
        one = graph.write(keys_of(model, ["bert.encoder.layer.0.output.dense"])).relative
        none = graph.write(keys_of(model, list(products(model)))).relative
    assert none < 1e-5 < rounded
    assert none < one != rounded


def test_other_programs_can_quantise_a_classifier(tmp_path):
    torch.manual_seed(0)
    config = tiny_config("bert", hidden_size=64, num_labels=3, **small("bert"))
    model = HEADS["sequence"][0].from_config(config).eval()
    file = export_model(model, tmp_path, "onnx")
    # ONNX Runtime transposes the classifier's weights.
    quantize_dynamic(file.path, tmp_path / "low.onnx")
    batch = padded(4, 20, types=True)
    with torch.no_grad():
        exact = model(**batch).logits.numpy()
    call = onnx_caller(tmp_path / "low.onnx", threads=1)
    (found,) = call(call.feed(batch))
    assert 0 < difference(exact, np.array(found))[1] < FILE_LIMITS["int8"]


def test_a_single_token_type_is_no_input_and_few_positions_are_not_exceeded(tmp_path):
    model = tiny_encoder(
        "roberta", type_vocab_size=1, max_position_embeddings=26, **small("roberta")
    )
    file = export_model(model, tmp_path / "export", "onnx")
    assert file.inputs == ("input_ids", "attention_mask")
    assert file.relative <= FILE_LIMITS["fp32"]


@pytest.mark.parametrize(("engine", "lacking"), [("onnx", "onnxruntime"), ("openvino", "onnx")])
def test_missing_library_names_the_line_that_installs_it(engine, lacking, tmp_path, without):
    without(lacking)
    with pytest.raises(MachineError, match=lacking) as caught:
        export_model(tiny_encoder("bert", **small("bert")), tmp_path / "export", engine)
    assert caught.value.hint == install_command(engine)


@pytest.mark.parametrize(
    ("spoil", "precision", "name"),
    [
        (lambda x: x + 0.01, "fp32", "model.onnx"),
        (lambda x: x * np.nan, "fp32", "model.onnx"),
        # Only the second file is wrong, after the one in float32.
        (lambda x: x[..., ::-1], "int8", "model_quantized.onnx"),
    ],
    ids=["shifted", "nan", "mirrored"],
)
def test_a_file_that_computes_something_else_is_refused(
    spoil, precision, name, tmp_path, monkeypatch
):
    loaded = []

    class Session(onnxruntime.InferenceSession):
        def __init__(self, path, *settings, **options):
            loaded.append(path.name)
            super().__init__(path, *settings, **options)

        def run(self, names, inputs):
            outputs = super().run(names, inputs)
            return [spoil(x) for x in outputs] if loaded[-1] == name else outputs

    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    with pytest.raises(MachineError, match="does not compute what torch does"):
        export_model(tiny_encoder("bert", **small("bert")), tmp_path, "onnx", precision)
    assert loaded[-1] == name


def test_an_export_adds_no_handler_to_the_root_logger(tmp_path, monkeypatch):
    # pytest has handlers of its own there.
    monkeypatch.setattr(logging.root, "handlers", [])
    export_model(tiny_encoder("bert", **small("bert")), tmp_path / "out", "onnx", "int8")
    assert logging.root.handlers == []


class Undecided(transformers.BertModel):
    """A model whose graph depends on its input."""

    def forward(self, input_ids, attention_mask=None, **others):
        if input_ids.sum() > 100:
            input_ids = input_ids.flip(0)
        return super().forward(input_ids, attention_mask, **others)


def test_what_torch_cannot_export_is_refused(tmp_path):
    model = Undecided(tiny_config("bert", **small("bert"))).eval()
    with pytest.raises(UsageError, match=r"torch cannot export Undecided \(bert\) to ONNX: \S"):
        export_model(model, tmp_path / "export", "onnx")
