"""Choose integers on calibration texts, and prove that their sums fit."""

import itertools

import numpy as np
import onnx
import pytest
import torch
from onnx_graphs import graph, node
from torch import nn

from kdcli.deploy.calibrate import KERNELS, Rounding, by_key, calibrate, key_of
from kdcli.deploy.export import largest_sums
from kdcli.deploy.quantise import quantise_onnx
from kdcli.deploy.rounding import INT4_BLOCKS, INT8, InputStatistics, round_weight
from kdcli.deploy.sessions import onnx_caller
from kdcli.models.least_squares import CHANNELS_AT_ONCE


class Layers(nn.Module):
    """Two products that share an input with a large channel, and one after them."""

    def __init__(self, outlier=40.0):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(100, 64)
        self.one, self.other = (nn.Linear(64, 48, bias=False) for _ in range(2))
        self.last = nn.Linear(48, 16, bias=False)
        with torch.no_grad():
            self.table.weight[:, 5] *= outlier
            for linear in (self.one, self.other):
                linear.weight[:, 5] /= outlier

    def forward(self, ids):
        x = self.table(ids)
        return self.last(self.one(x) + self.other(x))


def texts(count=24):
    """Batches of two padded rows; the padding, token 0, has the largest activations."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(count):
        ids = torch.randint(1, 100, (2, 12), generator=generator)
        mask = torch.ones_like(ids)
        mask[1, 7:] = 0
        batches.append({"input_ids": ids * mask, "attention_mask": mask})
    return batches


def graph_of(model, folder):
    """The model's graph, from ids to outputs."""
    names = {"table": model.table.weight} | {
        name: getattr(model, name).weight.T for name in ("one", "other", "last")
    }
    nodes = [
        node("Gather", "table ids", "x"),
        node("MatMul", "x one", "a"),
        node("MatMul", "x other", "b"),
        node("Add", "a b", "c"),
        node("MatMul", "c last", "y"),
    ]
    ids, arrays = (onnx.TensorProto.INT64, ["B", "L"]), {n: x.detach() for n, x in names.items()}
    made = graph(nodes, {"ids": ids}, {"y": ["B", "L", 16]}, arrays)
    onnx.save(made, folder / "plain.onnx")
    return folder / "plain.onnx"


def relative_error(model, file, batches):
    """The relative error of a file over real tokens."""
    call = onnx_caller(file, threads=1)
    pairs = []
    for batch in batches:
        real = batch["attention_mask"].bool().numpy()
        (of_file,) = call({"ids": batch["input_ids"].numpy()})
        pairs.append((np.array(of_file)[real], model(batch["input_ids"]).detach().numpy()[real]))
    ours, exact = (np.concatenate(side) for side in zip(*pairs, strict=True))
    return np.linalg.norm(ours - exact) / np.linalg.norm(exact)


def calibrated(model, format="onnx", precision="int8"):
    run = lambda batch: model(batch["input_ids"])  # noqa: E731
    return calibrate(model, run, texts(), KERNELS[format, precision])


def test_calibration_removes_most_of_the_error_and_changes_no_model(tmp_path):
    model = Layers().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    roundings = calibrated(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert set(roundings) == {"one", "other", "last"}
    # Products with a common input share its divisors, so the file divides it once.
    assert torch.equal(roundings["one"].smoothing_I, roundings["other"].smoothing_I)
    assert roundings["one"].smoothing_I.argmax() == 5
    plain = graph_of(model, tmp_path)
    fresh = texts(30)[24:]
    # The rows of the table have the large channel too, which is not the concern of this test.
    table = {key_of(model.table.weight.detach().numpy())}
    errors = []
    for name, chosen in (("nearest.onnx", {}), ("chosen.onnx", by_key(model, roundings))):
        quantise_onnx(plain, tmp_path / name, "int8", table, chosen)
        errors.append(relative_error(model, tmp_path / name, fresh))
    assert errors[1] < 0.25 * errors[0]
    nodes = onnx.load(tmp_path / "chosen.onnx").graph.node
    assert sum(node.name.endswith("_product") and "smoothed" in node.name for node in nodes) == (
        1 + (roundings["last"].smoothing_I is not None)
    )


@pytest.mark.parametrize("times", [1, 2])
def test_products_of_single_vectors_are_smoothed_too(tmp_path, times):
    """A linear with one row per sequence is a Gemm in the graph. Two may share their weights."""
    torch.manual_seed(0)
    linear = nn.Linear(64, 64)
    model = nn.Sequential(*[linear] * times).eval()
    x_RI = torch.randn(64, 64)
    x_RI[:, 5] *= 40
    batches = [{"input_ids": x, "attention_mask": torch.ones(4, 1)} for x in x_RI.split(4)]
    run = lambda batch: model(batch["input_ids"])  # noqa: E731
    roundings = calibrate(model, run, batches, KERNELS["onnx", "int8"])
    assert roundings["0"].smoothing_I is not None
    places = ["x", *(f"h{n}" for n in range(1, times)), "y"]
    nodes = [
        node("Gemm", f"{before} weight bias", after, transB=1)
        for before, after in itertools.pairwise(places)
    ]
    weights = {"weight": linear.weight.detach(), "bias": linear.bias.detach()}
    plain, low = tmp_path / "plain.onnx", tmp_path / "low.onnx"
    onnx.save(graph(nodes, {"x": ["B", 64]}, {"y": ["B", 64]}, weights), plain)
    quantise_onnx(plain, low, "int8", roundings=by_key(model, roundings))
    (found,) = onnx_caller(low, threads=1)({"x": x_RI.numpy()})
    exact = model(x_RI).detach().numpy()
    assert np.linalg.norm(found - exact) < 0.03 * np.linalg.norm(exact)


def test_smoothing_that_does_not_help_is_left_out():
    model = Layers(outlier=1.0).eval()
    with torch.no_grad():
        # All channels have about the same range.
        model.table.weight.uniform_(-1, 1)
        for linear in (model.one, model.other):
            linear.weight.copy_(linear.weight.sign())
    roundings = calibrated(model)
    assert roundings["one"].smoothing_I is None
    assert roundings["other"].smoothing_I is None


@pytest.mark.parametrize(("format", "precision"), [("onnx", "q4"), ("openvino", "int8")])
def test_other_runtimes_need_no_smoothing(format, precision):
    model = Layers().eval()
    roundings = calibrated(model, format, precision)
    assert all(rounding.smoothing_I is None for rounding in roundings.values())
    limit = 8 if precision == "q4" else 127
    values = roundings["one"].integers.values_OI.int().abs()
    assert limit - 1 <= values.max() <= limit


def test_statistics_are_those_of_all_real_tokens():
    """The Gram matrix is measured in several parts, and both products share it."""
    torch.manual_seed(0)
    width = CHANNELS_AT_ONCE + 64
    table = nn.Embedding(200, width)
    linears = nn.ModuleDict({name: nn.Linear(width, 24, bias=False) for name in ("one", "other")})
    with torch.no_grad():
        # Neighbouring channels are correlated, so errors are spread.
        table.weight[:, 1:] += 2 * table.weight[:, :-1].clone()
    model = nn.ModuleDict({"table": table, "linears": linears}).eval()

    def run(batch):
        x = table(batch["input_ids"])
        return linears["one"](x), linears["other"](x)

    batches = texts()
    roundings = calibrate(model, run, batches, KERNELS["onnx", "q4"])
    counted = batches[len(batches) // 4 :]
    real = torch.cat([b["input_ids"][b["attention_mask"].bool()] for b in counted])
    x_RI = table.weight.detach().double()[real]
    statistics = InputStatistics.of(x_RI.T @ x_RI)
    for name, linear in linears.items():
        wanted = round_weight(linear.weight, INT4_BLOCKS, statistics).values_OI
        found = roundings[f"linears.{name}"].integers.values_OI
        nearest = round_weight(linear.weight, INT4_BLOCKS).values_OI
        assert (nearest != wanted).float().mean() > 0.1
        # In float32, a few weights fall on the other side of a rounding boundary.
        assert (found != wanted).float().mean() < 0.01


def test_sums_of_a_file_fit_for_any_input(tmp_path):
    model = Layers().eval()
    roundings = by_key(model, calibrated(model))
    plain = graph_of(model, tmp_path)
    quantise_onnx(plain, tmp_path / "low.onnx", "int8", roundings=roundings)
    sums = largest_sums(plain, tmp_path / "low.onnx", model, roundings)
    assert {each.name for each in sums} == {"one", "other", "last"}
    for each in sums:
        assert 0 < each.texts <= each.any_input <= 255 * 128
        assert not each.can_saturate
    # Integers of another program may overflow.
    wide = round_weight(torch.ones(16, 48), INT8)
    unsafe = roundings | {key_of(model.last.weight.detach().numpy()): Rounding(wide)}
    quantise_onnx(plain, tmp_path / "wide.onnx", "int8", roundings=unsafe)
    (last,) = (
        each
        for each in largest_sums(plain, tmp_path / "wide.onnx", model, unsafe)
        if each.name == "last"
    )
    assert (last.any_input, last.texts, last.can_saturate) == (255 * 2 * 127, None, True)
    # A product that stays in float32 has no sums of integers.
    kept = {key for key, value in roundings.items() if len(value.integers.values_OI) == 16}
    quantise_onnx(plain, tmp_path / "kept.onnx", "int8", kept, roundings)
    sums = largest_sums(plain, tmp_path / "kept.onnx", model, roundings)
    assert {each.name for each in sums} == {"one", "other"}
