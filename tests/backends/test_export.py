"""Exported files compute what torch does, at any size; a wrong file is refused."""

import sys

import numpy as np
import pytest
import torch
import transformers
from encoders import tiny_config, tiny_encoder

from kdcli.backends import export
from kdcli.backends.export import EXACT, LIMITS, export_onnx, export_openvino
from kdcli.backends.sessions import Caller, onnx_caller, openvino_caller
from kdcli.errors import MachineError, UsageError
from kdcli.models.layout import LAYOUTS

EXPORTS = {"onnx": (export_onnx, onnx_caller), "openvino": (export_openvino, openvino_caller)}
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


def padded(rows: int, length: int, types: bool = False) -> dict[str, torch.Tensor]:
    """Row i lacks i tokens."""
    ids_BL = torch.randint(5, 64, (rows, length), generator=torch.Generator().manual_seed(rows))
    mask_BL = (torch.arange(length) < length - torch.arange(rows)[:, None]).long()
    batch = {"input_ids": ids_BL * mask_BL, "attention_mask": mask_BL}
    return batch | ({"token_type_ids": (torch.arange(length) > 3).long() * mask_BL} if types else {})


def gap(model, file, batch, engine: str) -> float:
    """Largest difference from torch over real tokens, relative to the largest output where that exceeds 1."""
    call = EXPORTS[engine][1](file.path, threads=1)
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


LATER = [pytest.param("onnx", t, marks=pytest.mark.long) for t in sorted(set(LAYOUTS) - set(MAIN))]
FILES = {"onnx": ["model.onnx"], "openvino": ["model.bin", "model.xml"]}


@pytest.mark.parametrize(
    ("engine", "kind"), [*(("onnx", kind) for kind in MAIN), *LATER, ("openvino", "bert"), ("openvino", "modernbert")]
)
def test_every_type_can_be_exported_at_any_size(engine, kind, tmp_path):
    torch.manual_seed(0)
    model = tiny_encoder(kind, **small(kind))
    file = EXPORTS[engine][0](model, tmp_path / "new")
    assert (file.outputs, sorted(f.name for f in file.path.parent.iterdir())) == (("last_hidden_state",), FILES[engine])
    assert file.relative <= LIMITS["fp32"]
    for rows, length in ((1, 1), (1, 7), (5, 33), (2, 131)):
        assert gap(model, file, padded(rows, length), engine) <= 10 * EXACT


@pytest.mark.parametrize(
    ("head", "engine"), [*((head, "onnx") for head in HEADS), ("sequence", "openvino"), ("questions", "openvino")]
)
def test_heads(head, engine, tmp_path):
    auto, outputs = HEADS[head]
    torch.manual_seed(0)
    model = auto.from_config(tiny_config("bert", num_labels=2 if head == "questions" else 3, **small("bert"))).eval()
    file = EXPORTS[engine][0](model, tmp_path / "export")
    assert (file.outputs, file.inputs) == (outputs, ("input_ids", "attention_mask", "token_type_ids"))
    # As many tokens as classes: a shape alone does not say which axis is which.
    for rows, length in ((2, 3), (4, 20)):
        assert gap(model, file, padded(rows, length, types=True), engine) <= EXACT
    untyped, typed = padded(4, 20), padded(4, 20, types=True)
    assert gap(model, file, untyped, engine) <= EXACT
    with torch.no_grad():
        assert not torch.allclose(model(**untyped)[outputs[0]], model(**typed)[outputs[0]], atol=1e-3)


@pytest.mark.parametrize("head", [None, "sequence"])
@pytest.mark.parametrize("engine", EXPORTS)
def test_int8_is_smaller_and_near(engine, head, tmp_path):
    torch.manual_seed(0)
    config = tiny_config("bert", vocab_size=2000, hidden_size=64, intermediate_size=512, **small("bert"))
    model = (transformers.BertModel(config) if head is None else HEADS[head][0].from_config(config)).eval()
    files = {int8: EXPORTS[engine][0](model, tmp_path / f"{int8}", int8=int8) for int8 in (False, True)}
    assert sorted(f.name for f in (tmp_path / "True").iterdir()) == FILES[engine]
    large, little = ((file.path.parent / FILES[engine][0]).stat().st_size for file in files.values())
    assert little < 0.5 * large
    assert files[False].relative < 1e-5 < 1e-3 < files[True].relative <= LIMITS["int8"]


def test_a_single_token_type_is_no_input_and_few_positions_are_not_exceeded(tmp_path):
    model = tiny_encoder("roberta", type_vocab_size=1, max_position_embeddings=26, **small("roberta"))
    file = export_onnx(model, tmp_path / "export")
    assert file.inputs == ("input_ids", "attention_mask")
    assert file.relative <= LIMITS["fp32"]


@pytest.mark.parametrize(("engine", "lacking"), [("onnx", "onnxruntime"), ("openvino", "onnx")])
def test_missing_library_names_the_line_that_installs_it(engine, lacking, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, lacking, None)
    with pytest.raises(MachineError, match=lacking) as caught:
        EXPORTS[engine][0](tiny_encoder("bert", **small("bert")), tmp_path / "export")
    assert caught.value.hint == f"pip install 'kdcli[{engine}]'"


@pytest.fixture(scope="module")
def recorded():
    """A model and its graph, recorded once."""
    torch.manual_seed(0)
    model = tiny_encoder("bert", **small("bert"))
    batch = padded(2, 24, types=True)
    free = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    named = export._Named(export._Whole(model, None), tuple(batch), ("last_hidden_state",)).eval()
    names = {"input_names": tuple(batch), "output_names": ["last_hidden_state"], "dynamic_shapes": (free,) * 3}
    with torch.no_grad():
        return model, torch.onnx.export(named, tuple(batch.values()), dynamo=True, verbose=False, **names)


@pytest.mark.parametrize(
    ("spoil", "int8"),
    [(lambda x: x + 0.01, False), (lambda x: x * np.nan, False), (lambda x: x[..., ::-1], True)],
    ids=["shifted", "nan", "mirrored"],
)
def test_wrong_file_is_refused(spoil, int8, recorded, tmp_path, monkeypatch):
    """The engine's output is changed; for int8 only that of the second file, after the float32 one."""
    loaded = []

    def spoilt(path, *, threads):
        right = onnx_caller(path, threads=threads)
        loaded.append(path.name)
        wrong = not int8 or len(loaded) == 2
        return Caller(right.names, lambda fed: [spoil(x) for x in right(fed)]) if wrong else right

    monkeypatch.setattr(export, "onnx_caller", spoilt)
    monkeypatch.setattr(torch.onnx, "export", lambda *a, **k: recorded[1])
    with pytest.raises(MachineError, match="does not compute what torch does"):
        export_onnx(recorded[0], tmp_path / "new" / "export", int8=int8)
    assert loaded == (["float.onnx", "model.onnx"] if int8 else ["model.onnx"])


def test_file_of_other_weights_is_refused(recorded, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.onnx, "export", lambda *a, **k: recorded[1])
    with pytest.raises(MachineError, match="does not compute"):
        export_onnx(tiny_encoder("bert", **small("bert")), tmp_path)


class Undecided(transformers.BertModel):
    """A model whose graph depends on its input."""

    def forward(self, input_ids, attention_mask=None, **others):
        if input_ids.sum() > 100:
            input_ids = input_ids.flip(0)
        return super().forward(input_ids, attention_mask, **others)


def test_what_torch_cannot_export_is_refused(tmp_path):
    model = Undecided(tiny_config("bert", **small("bert"))).eval()
    with pytest.raises(UsageError, match=r"torch cannot export Undecided \(bert\) to ONNX: \S"):
        export_onnx(model, tmp_path / "export")
