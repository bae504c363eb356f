"""Sparse linears compute what dense ones do, and are chosen where they are faster."""

from unittest.mock import Mock

import pytest
import torch
from encoders import tiny_encoder
from pruned import random_masks, with_biases
from torch import nn

from kdcli.deploy.sparse import csr
from kdcli.deploy.sparse.compact import compact_model
from kdcli.deploy.sparse.csr import (
    SparseAttention,
    SparseFeedForward,
    SparseLinear,
    faster_sparse,
    sparsify,
)
from kdcli.deploy.sparse.mask_file import apply_masks
from kdcli.errors import UsageError

IDS = torch.randint(5, 64, (3, 50), generator=torch.Generator().manual_seed(0))
MASK = (torch.arange(50) < torch.tensor([50, 31, 4])[:, None]).long()


def linear_of(density, rows=24, columns=40, bias=True):
    torch.manual_seed(0)
    linear = nn.Linear(columns, rows, bias=bias)
    with torch.no_grad():
        linear.weight.mul_(torch.rand(rows, columns) < density)
    return linear


@pytest.mark.parametrize("density", [0.0, 0.03, 0.5, 1.0])
@pytest.mark.parametrize("shape", [(40,), (1, 40), (3, 50, 40), (2, 64, 40), (1, 65, 40), (0, 40)])
@pytest.mark.parametrize("bias", [True, False])
def test_one_linear(density, shape, bias):
    linear, x = linear_of(density, bias=bias), torch.randn(shape)
    found = SparseLinear(linear)(x)
    assert found.shape == (*shape[:-1], 24)
    torch.testing.assert_close(found, linear(x), atol=1e-5, rtol=1e-5)


KINDS = [
    "bert",
    "distilbert",
    "roberta",
    "electra",
    "deberta-v2",
    "convbert",
    "esm",
    "albert",
    "modernbert",
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_sparse_model_computes_the_same(kind):
    torch.manual_seed(0)
    model = with_biases(tiny_encoder(kind, initializer_range=0.3))
    apply_masks(model, random_masks(model, 0.2))
    with torch.no_grad():
        expected = model(IDS, attention_mask=MASK)[0][MASK.bool()]
        for choose in (lambda _: True, lambda linear: linear.in_features == 32, lambda _: False):
            small = sparsify(model, choose)
            found = small(IDS, attention_mask=MASK)[0][MASK.bool()]
            assert (found - expected).abs().max() < 1e-4
            wanted = sum(choose(m) for m in model.modules() if isinstance(m, nn.Linear))
            assert bool(wanted) == any(isinstance(m, SparseLinear) for m in small.modules())


JOINED = dict.fromkeys(KINDS[:4], (2, 2)) | {"esm": (0, 0), "albert": (1, 0)}


@pytest.mark.parametrize(("kind", "blocks"), JOINED.items())
def test_linears_are_joined_where_all_between_them_is_known(kind, blocks):
    model = tiny_encoder(kind)

    def joined(choose):
        modules = list(sparsify(model, choose).modules())
        return tuple(
            sum(isinstance(m, of) for m in modules) for of in (SparseFeedForward, SparseAttention)
        )

    assert joined(lambda _: True) == blocks
    # One dense linear keeps its block apart.
    assert joined(lambda linear: linear.out_features == 128) == (0, 0)
    assert joined(lambda linear: linear.in_features == 128) == (0, 0)


@pytest.mark.parametrize("kind", ["bert", "distilbert"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize(("rows", "length"), [(1, 1), (9, 13), (2, 100)])
def test_joined_attention_at_any_size_and_under_any_mask(kind, implementation, rows, length):
    drawn = torch.Generator().manual_seed(rows)
    changes = {
        "attn_implementation": implementation,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
    }
    model = with_biases(tiny_encoder(kind, **changes))
    apply_masks(model, random_masks(model, 0.2))
    small = sparsify(model, lambda _: True)
    assert any(isinstance(m, SparseAttention) for m in small.modules())
    ids = torch.randint(5, 64, (rows, length), generator=drawn)
    right = (torch.arange(length) < torch.randint(1, length + 1, (rows, 1), generator=drawn)).long()
    for mask in (None, torch.ones_like(ids), right, right.flip(1)):
        real = slice(None) if mask is None else mask.bool()
        with torch.no_grad():
            expected, found = (m(ids, attention_mask=mask)[0][real] for m in (model, small))
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_the_model_itself_stays_dense_and_its_tensors_are_shared():
    model = tiny_encoder("bert")
    small = sparsify(model, lambda linear: linear.out_features == 128)
    assert not any(isinstance(m, SparseLinear) for m in model.modules())
    assert small.embeddings.word_embeddings.weight is model.embeddings.word_embeddings.weight


@pytest.mark.parametrize(
    ("dense", "sparse", "wins"), [(1.2, 1.0, True), (1.05, 1.0, False), (1.0, 2.0, False)]
)
def test_sparse_runs_what_is_timed_clearly_faster_by_the_best_round(
    monkeypatch, dense, sparse, wins
):
    clock, rounds = [0.0], {"dense": 0, "sparse": 0}

    def taking(name, seconds):
        def forward(self, x):
            rounds[name] += 1
            # One disturbed round of each must not decide.
            clock[0] += 100.0 if rounds[name] == 3 else seconds
            return x

        return forward

    monkeypatch.setattr(csr.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(nn.Linear, "forward", taking("dense", dense))
    monkeypatch.setattr(SparseLinear, "forward", taking("sparse", sparse))
    linear = linear_of(0.3, 16, 16)
    assert faster_sparse((linear,), linear, lambda: SparseLinear(linear)) is wins
    assert rounds["dense"] == rounds["sparse"] > 3


def test_torch_without_such_a_product_stays_dense(monkeypatch):
    lacking = RuntimeError("Calling addmm on a sparse CPU tensor requires MKL")
    monkeypatch.setattr(torch, "addmm", Mock(side_effect=lacking))
    linear = linear_of(0.002, 1024, 1024)
    assert not faster_sparse((linear,), linear, lambda: SparseLinear(linear))


def test_what_is_refused():
    with pytest.raises(UsageError, match=r"float32 on the CPU, got torch\.bfloat16"):
        sparsify(tiny_encoder("bert").bfloat16())
    with pytest.raises(UsageError, match="compacted model cannot run sparse"):
        sparsify(compact_model(tiny_encoder("bert")))
