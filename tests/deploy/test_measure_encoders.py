"""The file for old machines: it needs nothing newer, computes what BERT computes, and measures
interleaved."""

import ast
import functools
import gc
import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from encoders import tiny_encoder

from kdcli.deploy.old_machines import measure_encoders as there

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
SOURCE = Path(there.__file__).read_text("utf-8")

# Newer than Python 3.7 or torch 1.8; `inference_mode` is taken where it is there.
LATER_NAMES = {
    *(
        "removeprefix",
        "removesuffix",
        "cache",
        "cached_property",
        "fmean",
        "quantiles",
        "prod",
        "isqrt",
        "comb",
    ),
    *(
        "pairwise",
        "is_relative_to",
        "readlink",
        "with_stem",
        "UTC",
        "BooleanOptionalAction",
        "batched",
        "to_thread",
    ),
    *(
        "Literal",
        "Final",
        "Protocol",
        "TypedDict",
        "Annotated",
        "Self",
        "ParamSpec",
        "aiter",
        "anext",
    ),
    *(
        "inference_mode",
        "OutOfMemoryError",
        "mem_get_info",
        "scaled_dot_product_attention",
        "compile",
        "accelerator",
    ),
    *("set_default_device", "asarray", "concat", "vmap", "testing", "is_bf16_supported"),
}
LATER_KEYWORDS = {
    "missing_ok",
    "strict",
    "exit_on_error",
    "dirs_exist_ok",
    "process_group",
    "assign",
    "mmap",
}
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
            modules = (
                [a.name for a in node.names] if isinstance(node, ast.Import) else [str(node.module)]
            )
            found += [m for m in modules if m in LATER_MODULES]
            found += [
                m for m in modules if m.split(".")[0] not in {*sys.stdlib_module_names, "torch"}
            ]
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
        elif (
            isinstance(node, ast.Subscript)
            and isinstance(node.value, ast.Name)
            and node.value.id in GENERIC
        ):
            found.append(f"{node.value.id}[]")
    return found


def test_the_file_needs_nothing_newer_than_python_3_7_and_torch_1_8():
    assert later_than_it_may_be(SOURCE) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (
            "if (x := 1): pass",
            "Assignment expressions are only supported in Python 3.8 and greater",
        ),
        ("x: list[int] = []", "list[]"),
        ("from kdcli.errors import UsageError", "kdcli.errors"),
        ("from __future__ import annotations\ndef f(a: list[int]) -> int | None: pass", None),
    ],
)
def test_the_search_for_what_is_newer(source, found):
    assert later_than_it_may_be(source) == ([found] if found else [])


# BERT's name of a part -> its name in the file; longer names first.
PARTS = {
    **{"embeddings.word_embeddings": "words", "embeddings.position_embeddings": "positions"},
    **{
        "embeddings.token_type_embeddings": "types",
        "embeddings.LayerNorm": "norm",
        "encoder.layer": "layers",
    },
    **{
        "attention.self.": "",
        "attention.output.dense": "mixed",
        "attention.output.LayerNorm": "mixed_norm",
    },
    **{"intermediate.dense": "up", "output.dense": "down", "output.LayerNorm": "down_norm"},
}


@pytest.fixture
def bert_and_ours():
    torch.manual_seed(0)
    bert = tiny_encoder("bert", attn_implementation="eager")
    with torch.no_grad():
        for (
            tensor
        ) in bert.parameters():  # zero biases and unit scales would hide what is not copied
            tensor.copy_(torch.randn_like(tensor) * 0.3 + (tensor == 1))
    ours = there.Encoder(there.Shape(2, 32, 128, 4), vocab_size=64, positions=160).eval()
    renamed = {}
    for name, tensor in bert.state_dict().items():
        for theirs, own in PARTS.items():
            name = name.replace(theirs, own)
        renamed[name] = tensor
    ours.load_state_dict(
        {n: x for n, x in renamed.items() if not n.startswith(("pooler.", "embeddings."))}
    )
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


def test_random_padding_is_real_padding_and_the_same_each_time():
    ids_BL, mask_BL = there.inputs((16, 32), 1000, "random", CPU)
    lengths_B = mask_BL.sum(1)
    assert (lengths_B[0], len(set(lengths_B.tolist())) > 4, lengths_B.min() >= 1) == (
        32,
        True,
        True,
    )
    assert 250 <= ids_BL.min() <= ids_BL.max() < 750
    assert all(map(torch.equal, (ids_BL, mask_BL), there.inputs((16, 32), 1000, "random", CPU)))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 10, 51, 100, 357])
def test_percentiles_are_those_of_numpy(count):
    values = np.random.Generator(np.random.PCG64(count)).lognormal(size=count).tolist()
    for share in (0, 25, 50, 75, 90, 95, 99, 100):
        assert there.percentile(values, share) == pytest.approx(
            np.percentile(values, share), rel=1e-12
        )
    others = values[::-1]
    low, median, high = np.percentile(np.asarray(values) / np.asarray(others), [25, 50, 75])
    ratios = there.speedup(values, others)
    if ratios.pop("unstable"):
        low = min(low, min(values) / np.percentile(others, 90))
    assert ratios == pytest.approx({"median": median, "low": low, "high": high})


@pytest.mark.parametrize(
    ("spread", "status"), [(0.0, "ok"), (0.09, "ok"), (0.2, "noisy"), (0.3, "unstable")]
)
def test_status_of_a_row(spread, status):
    row = there.summary([0.002 * (1 + spread * (i - 50) / 50) for i in range(101)])
    assert (row["status"], row["iqr_over_p50"]) == (status, pytest.approx(spread))
    assert (row["n"], row["p50_ms"], row["mean_ms"]) == (101, pytest.approx(2), pytest.approx(2))
    assert row["p75_ms"] == pytest.approx(2 * (1 + spread / 2))
    assert row["p99_ms"] == pytest.approx(2 * (1 + spread * 0.98))
    assert there.summary([0.002] * 99)["p99_ms"] is None


# Ten runs of a small model on a busy machine. Most of them ended before another program ran.
BUSY = [0.95, 0.98, 1.0, 1.04, 1.05, 1.07, 1.1, 1.24, 10.12, 13.81]
SLOW = [24.0, 25.0, 26.0, 27.0, 28.0, 58.0, 60.0, 61.0, 62.0, 63.0]
"""The runs of the teacher in the same rounds, which is really 5.4 times as slow."""


@pytest.mark.parametrize(
    ("seconds", "status"),
    [
        (BUSY, "unstable"),
        # The quartiles are close, but a fifth of the runs takes ten times as long.
        (4 * BUSY, "unstable"),
        (5 * [*[1.0] * 7, 0.1], "unstable"),
        # Other work slowed every run but one.
        ([*[1.0] * 50, 0.4], "unstable"),
        # The user decides how many runs are enough.
        (5 * [1.0], "ok"),
        # One run in twenty says nothing about the median.
        (2 * [*[1.0] * 19, 10.0], "ok"),
    ],
)
def test_two_modes_are_unstable(seconds, status):
    row = there.summary(seconds)
    assert row["iqr_over_p50"] < 0.25
    assert row["status"] == status


@pytest.mark.parametrize("times", [1, 4])
def test_the_lower_bound_of_unstable_times_is_below_the_truth(times):
    ratio = there.speedup(times * SLOW, times * BUSY)
    assert ratio["unstable"]
    assert np.percentile(times * SLOW, 25) / np.percentile(times * BUSY, 75) > 20
    assert 1 < ratio["low"] < 5.4
    assert ratio["low"] == pytest.approx(min(SLOW) / np.percentile(times * BUSY, 90))


def test_the_lower_bound_takes_the_run_of_the_baseline_that_nothing_slowed():
    slowed, quiet = [*[52.0] * 40, 4.1, *[54.0] * 10], [*[0.7] * 45, 0.9, *[2.5] * 5]
    ratio = there.speedup(slowed, quiet)
    assert ratio["unstable"]
    assert ratio["median"] > 50
    assert ratio["low"] < 4.1 / 0.7


def test_rounds_hold_every_model_once_in_changing_order(at_once):
    ran: list[str] = []
    collecting = []

    def run(name: str) -> None:
        ran.append(name)
        collecting.append(gc.isenabled())
        assert torch.is_inference_mode_enabled()

    times = there.interleaved({name: functools.partial(run, name) for name in "abc"}, CPU, 60, 0.0)
    assert "".join(ran[:30]) == "a" * 10 + "b" * 10 + "c" * 10
    rounds = [tuple(ran[i : i + 3]) for i in range(30, len(ran), 3)]
    assert {name: len(taken) for name, taken in times.items()} == dict.fromkeys("abc", 60)
    assert all(sorted(r) == ["a", "b", "c"] for r in rounds)
    assert len(set(rounds)) == 6, "all orders occur"
    assert not any(collecting[30:])
    assert gc.isenabled()


def test_rounds_go_on_until_the_time_is_up(monkeypatch, at_once):
    clock = map(float, itertools.count())
    monkeypatch.setattr(there.time, "perf_counter", lambda: next(clock))
    times = there.interleaved(
        {"a": lambda: None, "b": lambda: None}, CPU, min_runs=2, min_seconds=50.0
    )
    # A fake second passes at every look: two at each run, so four a round, and one before each
    # round after the second.
    assert len(times["a"]) == len(times["b"]) == 11


def test_speedup_is_the_median_of_paired_ratios():
    # The machine slows down threefold half-way: the ratio of each pair stays.
    slow = 6 * [2.0, 2.0, 6.0, 6.0, 6.0]
    # The bound of unstable times does not trust the pairs: 2.0 against 3.0.
    assert there.speedup(slow, 6 * [1.0, 1.0, 3.0, 3.0, 3.0]) == {
        "median": 2.0,
        "low": pytest.approx(2 / 3),
        "high": 2.0,
        "unstable": True,
    }


STEADY, NOISY, WILD = (
    8 * [second / 8 for second in five]
    for five in ([1.0] * 5, [1.0, 1.0, 1.1, 1.2, 1.2], [1.0, 1.0, 2.0, 3.0, 3.0])
)
"""Forty runs each, which take 5, 5.5 and 10 seconds."""


@pytest.fixture
def scripted(times):
    """A function that measures `a` and `b` with given results, and records what was asked for."""

    def measure(*results, min_runs=5, min_seconds=1.0):
        asked = times(*results)
        calls = dict.fromkeys("ab", lambda: None)
        return there.measure(calls, CPU, min_runs, min_seconds), asked

    return measure


def test_a_stable_cell_is_measured_once(scripted):
    stable = {"a": STEADY, "b": NOISY}
    assert scripted(stable) == (stable, [(["a", "b"], 5, 1.0, False)])


def test_an_unstable_cell_is_measured_again_for_twice_as_long(scripted):
    unstable, stable = {"a": STEADY, "b": WILD}, {"a": NOISY, "b": STEADY}
    times, asked = scripted(unstable, stable)
    assert times == stable
    assert asked == [(["a", "b"], 5, 1.0, False), (["a", "b"], 5, 2 * (5.0 + 10.0), True)]


def test_a_cell_is_measured_three_times_at_most(scripted):
    worse, better, last = ({"a": WILD, "b": WILD}, {"a": STEADY, "b": WILD}, {"a": WILD, "b": WILD})
    times, asked = scripted(worse, better, last)
    assert len(asked) == 3
    assert times is better, "it has the fewest unstable models"
    first, second, third = ({"a": STEADY, "b": WILD} for _ in range(3))
    assert scripted(first, second, third)[0] is third, "of equal measurements the longest"


@pytest.mark.parametrize(
    ("factor", "seconds"),
    # The first measurement takes 15 seconds times the factor.
    [(1, [1.0, 30.0, 30.0]), (3, [1.0, 60.0, 60.0]), (4, [1.0]), (100, [1.0])],
)
def test_a_repeated_measurement_is_no_longer_than_its_limit(scripted, factor, seconds):
    unstable = {"a": [factor * s for s in STEADY], "b": [factor * s for s in WILD]}
    asked = scripted(unstable, unstable, unstable)[1]
    assert [of for _, _, of, _ in asked] == seconds


def test_a_model_that_does_not_fit_any_more_keeps_its_measurement(scripted):
    first, without = {"a": STEADY, "b": WILD}, {"a": STEADY}
    times, asked = scripted(first, without)
    assert times is first
    assert len(asked) == 2, "what is left is stable"


@pytest.mark.parametrize("fails_at", [1, 14])
def test_out_of_memory_leaves_out_one_model(at_once, fails_at):
    calls = itertools.count(1)

    def large() -> None:
        if next(calls) >= fails_at:
            raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB")

    times = there.interleaved({"large": large, "small": lambda: None}, CPU, 20, 0.0)
    assert {name: len(taken) for name, taken in times.items()} == {"small": 20}


def test_other_errors_are_raised():
    def broken() -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1"):
        there.attempt(broken, CPU)
