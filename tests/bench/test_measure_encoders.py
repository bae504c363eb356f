"""The file for old machines: it must run there, be BERT and measure as kdcli does."""

from __future__ import annotations

import ast
import gc
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from encoders import tiny_encoder
from transformers import BertModel

from kdcli.bench import worker
from kdcli.bench.old_machines import measure_encoders as there
from kdcli.bench.shapes import config_of, shape

CPU = torch.device("cpu")
SOURCE = Path(there.__file__).read_text("utf-8")

# Newer than Python 3.7 or torch 1.8; `inference_mode` is taken where it is there.
LATER_NAMES = {
    *("removeprefix", "removesuffix", "cache", "cached_property", "fmean", "quantiles", "prod", "isqrt", "comb"),
    *("pairwise", "is_relative_to", "readlink", "with_stem", "UTC", "BooleanOptionalAction", "batched", "to_thread"),
    *("Literal", "Final", "Protocol", "TypedDict", "Annotated", "Self", "ParamSpec", "aiter", "anext"),
    *("inference_mode", "OutOfMemoryError", "mem_get_info", "scaled_dot_product_attention", "compile", "accelerator"),
    *("set_default_device", "asarray", "concat", "vmap", "testing", "is_bf16_supported"),
}
LATER_KEYWORDS = {"missing_ok", "strict", "exit_on_error", "dirs_exist_ok", "process_group", "assign", "mmap"}
LATER_MODULES = {"tomllib", "zoneinfo", "graphlib", "importlib.metadata"}
GENERIC = {"list", "dict", "tuple", "set", "frozenset", "type", "Callable", "Mapping", "Sequence"}


class WithoutAnnotations(ast.NodeTransformer):
    """Drops what `from __future__ import annotations` keeps from being evaluated."""

    def visit_FunctionDef(self, node):
        node.returns = None
        for argument in ast.walk(node.args):
            if isinstance(argument, ast.arg):
                argument.annotation = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node):
        return ast.Assign([node.target], node.value, lineno=node.lineno) if node.value else None


def later_than_it_may_be(source: str) -> list[str]:
    """What of a file needs more than Python 3.7, the standard library and torch 1.8."""
    try:
        tree = ast.parse(source, feature_version=(3, 7))
    except SyntaxError as error:
        return [error.msg]
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else [str(node.module)]
            found += [m for m in modules if m in LATER_MODULES]
            found += [m for m in modules if m.split(".")[0] not in {*sys.stdlib_module_names, "torch"}]
            found += [a.name for a in node.names if a.name in LATER_NAMES]
    if any(isinstance(n, ast.ImportFrom) and n.module == "__future__" for n in tree.body):
        tree = WithoutAnnotations().visit(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            name = node.attr if isinstance(node, ast.Attribute) else node.id
            found += [name] if name in LATER_NAMES else []
        elif isinstance(node, ast.keyword) and node.arg in LATER_KEYWORDS:
            found.append(node.arg)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            found.append("|")
        elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in GENERIC:
            found.append(f"{node.value.id}[]")
    return found


def test_the_file_needs_nothing_newer_than_python_3_7_and_torch_1_8():
    assert later_than_it_may_be(SOURCE) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("if (x := 1): pass", "Assignment expressions are only supported in Python 3.8 and greater"),
        ("f'{x=}'", "f-string: self documenting expressions are only supported in Python 3.8 and greater"),
        ("def f(a, /): pass", "Positional-only parameters are only supported in Python 3.8 and greater"),
        ("x: list[int] = []", "list[]"),
        ("def f() -> int | None: pass", "|"),
        ("from __future__ import annotations\nMaybe = int | None", "|"),
        ("a = {} | {}", "|"),
        ("'x'.removeprefix('y')", "removeprefix"),
        ("p.unlink(missing_ok=True)", "missing_ok"),
        ("zip(a, b, strict=True)", "strict"),
        ("from typing import Literal", "Literal"),
        ("import numpy as np", "numpy"),
        ("from kdcli.errors import UsageError", "kdcli.errors"),
        ("with torch.inference_mode(): pass", "inference_mode"),
    ],
)
def test_the_search_for_what_is_newer_finds_it(source, found):
    assert found in later_than_it_may_be(source)


def test_annotations_that_are_not_evaluated_may_be_new():
    source = "from __future__ import annotations\ndef f(a: list[int]) -> int | None:\n    b: dict[str, int] = {}"
    assert later_than_it_may_be(source) == []


# The encoder


@pytest.fixture
def bert_and_ours():
    torch.manual_seed(0)
    bert = tiny_encoder("bert", attn_implementation="eager")
    with torch.no_grad():
        for tensor in bert.parameters():  # zero biases and unit scales would hide what is not copied
            tensor.copy_(torch.randn_like(tensor) * 0.3 + (tensor == 1))
    ours = there.Encoder(there.Shape(2, 32, 128, 4), vocab_size=64, positions=160).eval()
    there.load_bert(ours, bert.state_dict())
    return bert, ours


@pytest.mark.parametrize("padding", ["full", "random"])
def test_it_computes_what_bert_computes(bert_and_ours, padding):
    bert, ours = bert_and_ours
    ids_BL, mask_BL = there.inputs((5, 40), 64, padding, CPU)
    assert (mask_BL is None) == (padding == "full")
    with torch.no_grad():
        wanted_BLD = bert(input_ids=ids_BL, attention_mask=mask_BL).last_hidden_state
        ours_BLD = ours(ids_BL, mask_BL)
    assert wanted_BLD.std() > 0.1
    assert (ours_BLD - wanted_BLD).abs().max() <= 1e-5
    if mask_BL is not None:
        with torch.no_grad():
            assert (ours(ids_BL) - ours_BLD).abs().max() > 1e-3, "the mask does something"


def test_weights_with_a_prefix_and_a_head_are_taken_and_others_refused(bert_and_ours):
    bert, ours = bert_and_ours
    given = {f"bert.{name}": tensor for name, tensor in bert.state_dict().items()}
    given["cls.predictions.bias"] = torch.ones(9)
    again = there.Encoder(there.Shape(2, 32, 128, 4), 64, 160)
    there.load_bert(again, given)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), ours.parameters(), strict=True))
    del given["bert.encoder.layer.1.output.dense.bias"]
    with pytest.raises(RuntimeError, match=r"layers\.1\.down\.bias"):
        there.load_bert(again, given)


@pytest.mark.parametrize("text", ["6x384", "12x768", "4x312:1200@12", "2x128"])
def test_it_has_as_many_parameters_as_bert_without_pooler(text):
    of = shape(text)
    with torch.device("meta"):
        bert = BertModel(config_of(text), add_pooling_layer=False)
        ours = there.Encoder(there.Shape(of.layers, of.hidden, of.ffn, of.heads), 30522, 512)
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in bert.parameters())


def test_random_padding_is_real_padding_and_the_same_each_time():
    ids_BL, mask_BL = there.inputs((16, 32), 1000, "random", CPU)
    lengths_B = mask_BL.sum(1)
    assert lengths_B[0] == 32
    assert lengths_B.min() >= 1
    assert len(set(lengths_B.tolist())) > 4
    assert ids_BL.min() >= 250
    assert ids_BL.max() < 750
    again = there.inputs((16, 32), 1000, "random", CPU)
    assert torch.equal(ids_BL, again[0])
    assert torch.equal(mask_BL, again[1])


# The protocol


def test_its_limits_are_those_of_the_worker():
    for name in ("OK", "NOISY", "WARM_RUNS", "WARM_SECONDS"):
        assert getattr(there, name) == getattr(worker, name)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 10, 51, 100, 357])
def test_percentiles_are_those_of_numpy(count):
    values = np.random.Generator(np.random.PCG64(count)).lognormal(size=count).tolist()
    for share in (0, 25, 50, 75, 90, 95, 99, 100):
        assert there.percentile(values, share) == pytest.approx(np.percentile(values, share), rel=1e-12)
    others = values[::-1]
    low, median, high = np.percentile(np.asarray(values) / np.asarray(others), [25, 50, 75])
    assert there.speedup(values, others) == pytest.approx({"median": median, "low": low, "high": high})


@pytest.mark.parametrize(("spread", "status"), [(0.0, "ok"), (0.09, "ok"), (0.2, "noisy"), (0.3, "unstable")])
def test_a_row_says_how_steady_it_was(spread, status):
    row = there.summary([0.002 * (1 + spread * (i - 50) / 50) for i in range(101)])
    assert row["status"] == status
    assert row["iqr_over_p50"] == pytest.approx(spread)
    assert (row["n"], row["p50_ms"], row["mean_ms"]) == (101, pytest.approx(2), pytest.approx(2))
    assert row["p99_ms"] == pytest.approx(2 * (1 + spread * 0.98))
    assert there.summary([0.002] * 99)["p99_ms"] is None


def test_rounds_hold_every_model_once_in_changing_order(monkeypatch):
    monkeypatch.setattr(there, "WARM_SECONDS", 0.0)
    ran: list[str] = []
    collecting = []

    def call(name: str):
        def run() -> None:
            ran.append(name)
            collecting.append(gc.isenabled())
            assert torch.is_inference_mode_enabled()

        return run

    times = there.interleaved({name: call(name) for name in "abc"}, CPU, 30, 0.0)
    assert ran[:30] == ["a"] * 10 + ["b"] * 10 + ["c"] * 10
    rounds = [tuple(ran[i : i + 3]) for i in range(30, len(ran), 3)]
    assert {name: len(taken) for name, taken in times.items()} == dict.fromkeys("abc", 30)
    assert all(sorted(r) == ["a", "b", "c"] for r in rounds)
    assert len(Counter(rounds)) > 3
    assert not any(collecting[30:])
    assert gc.isenabled()


def test_rounds_go_on_until_the_time_is_up(monkeypatch):
    monkeypatch.setattr(there, "WARM_SECONDS", 0.0)
    times = there.interleaved({"a": lambda: None}, CPU, 2, 0.2)
    assert len(times["a"]) > 50


@pytest.mark.parametrize("fails_at", [1, 14])
def test_what_does_not_fit_is_left_out_and_the_rest_goes_on(monkeypatch, fails_at):
    monkeypatch.setattr(there, "WARM_SECONDS", 0.0)
    count = 0

    def large() -> None:
        nonlocal count
        count += 1
        if count >= fails_at:
            raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB")

    times = there.interleaved({"large": large, "small": lambda: None}, CPU, 20, 0.0)
    assert {name: len(taken) for name, taken in times.items()} == {"small": 20}


def test_any_other_failure_is_not_hidden():
    def broken() -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1"):
        there.attempt(broken, CPU)
