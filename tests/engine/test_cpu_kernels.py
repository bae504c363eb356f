"""Training on a CPU: the rate, scale and gradients of dropout, attention in bfloat16, and that
nothing else changes."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import BertConfig, BertModel

from kdcli.engine.cpu_kernels import fast_cpu_kernels, keep_mask

CPU = torch.device("cpu")
DROPS = [nn.Dropout(0.1)]


@pytest.mark.parametrize("rate", [0.0001, 0.1, 0.5, 0.9, 0.9999])
def test_the_share_dropped_is_the_rate(rate: float) -> None:
    torch.manual_seed(0)
    elements = 2_000_003
    mask = keep_mask((elements,), rate, torch.float32)
    dropped = (mask == 0).double().mean().item()
    assert abs(dropped - rate) < 5 * math.sqrt(rate * (1 - rate) / elements) + 2**-17
    # Neighbours share a word, and must not know of each other.
    zero = mask == 0
    both = (zero[1:] & zero[:-1]).double().mean().item()
    assert abs(both - rate**2) < 6 * rate / math.sqrt(elements) + 2**-16


def test_a_seed_decides_whatever_the_number_of_threads() -> None:
    def drawn(threads: int) -> torch.Tensor:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            torch.manual_seed(7)
            return keep_mask((300, 1001), 0.3, torch.float32)
        finally:
            torch.set_num_threads(before)

    assert torch.equal(drawn(1), drawn(2))
    assert not torch.equal(keep_mask((300, 1001), 0.3, torch.float32), drawn(1))


def test_the_gradient_is_the_mask() -> None:
    x = torch.randn(50, 60, dtype=torch.float64, requires_grad=True)
    with fast_cpu_kernels(CPU, DROPS):
        y = F.dropout(x, 0.25, True)
    y.sum().backward()
    assert x.grad is not None
    assert set(x.grad.unique().tolist()) == {0.0, 1 / 0.75}
    assert torch.equal(y, x * x.grad)


def test_what_does_not_drop_is_left_alone() -> None:
    x = torch.randn(4, 5)
    state = torch.get_rng_state()
    with fast_cpu_kernels(CPU, DROPS):
        assert F.dropout(x, 0.5, False) is x
        assert torch.equal(F.dropout(x, 0.0, True), x)
        assert torch.equal(nn.Dropout(0.5).eval()(x), x)
        q = torch.randn(1, 2, 3, 8, generator=torch.Generator().manual_seed(0))
        inside = F.scaled_dot_product_attention(q, q, q)
    assert torch.equal(torch.get_rng_state(), state), "nothing was drawn"
    assert torch.equal(inside, F.scaled_dot_product_attention(q, q, q))
    assert not F.dropout(x, 1.0, True).any()
    with fast_cpu_kernels(CPU, DROPS):
        assert not F.dropout(x, 1.0, True).any()


@pytest.mark.parametrize("kind", ["none", "bool", "additive"])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_attention_drops_probabilities_and_nothing_else(kind: str, scale: float | None) -> None:
    B, A, L, K = 2, 3, 7, 4
    torch.manual_seed(1)
    q_BALK, k_BALK = torch.randn(2, B, A, L, K, dtype=torch.float64).unbind()
    seen_B1LL = torch.ones(B, 1, L, L, dtype=torch.bool)
    seen_B1LL[1, ..., -2:] = False
    mask = {
        "none": None,
        "bool": seen_B1LL,
        "additive": torch.zeros(B, 1, L, L, dtype=torch.float64).masked_fill(~seen_B1LL, -1e9),
    }[kind]
    # Against the identity as values, attention gives its own probabilities.
    identity = torch.eye(L, dtype=torch.float64).expand(B, A, L, L)
    with fast_cpu_kernels(CPU, DROPS):
        dropped = F.scaled_dot_product_attention(q_BALK, k_BALK, identity, mask, 0.4, scale=scale)
    scores = torch.einsum("balk,bamk->balm", q_BALK, k_BALK) * (K**-0.5 if scale is None else scale)
    expected = (scores.masked_fill(~seen_B1LL, -torch.inf) if kind != "none" else scores).softmax(
        -1
    )
    kept = dropped != 0
    realised = 1 - round(0.4 * 65536) / 65536
    assert torch.allclose(dropped[kept], (expected / realised)[kept], rtol=1e-9)
    assert 0.2 < 1 - kept[expected > 0].double().mean() < 0.6


def test_a_model_trains_with_it_and_evaluates_without() -> None:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
    )
    model = BertModel(config)
    ids, mask = torch.randint(0, 50, (3, 6)), torch.tensor([[1] * 6, [1] * 4 + [0] * 2, [1] * 6])
    with fast_cpu_kernels(CPU, [model.train()]):
        torch.manual_seed(3)
        first = model(ids, mask).last_hidden_state
        torch.manual_seed(3)
        again = model(ids, mask).last_hidden_state
        other = model(ids, mask).last_hidden_state
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.isfinite(first).all()
    model.eval()
    with fast_cpu_kernels(CPU, [model]):
        evaluated = model(ids, mask).last_hidden_state
    assert torch.equal(evaluated, model(ids, mask).last_hidden_state)


def test_attention_in_bfloat16_is_the_one_of_float64() -> None:
    B, A, L, K = 2, 3, 33, 16
    torch.manual_seed(2)
    exact = [torch.randn(B, A, L, K, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    rounded = [x.detach().bfloat16().requires_grad_() for x in exact]
    seen_B1LL = torch.ones(B, 1, L, L, dtype=torch.bool)
    seen_B1LL[0, ..., 20:] = False
    gradient = torch.randn(B, A, L, K, dtype=torch.float64)
    expected = F.scaled_dot_product_attention(*exact, seen_B1LL)
    expected.backward(gradient)
    with torch.autocast("cpu", torch.bfloat16), fast_cpu_kernels(CPU, []):
        found = F.scaled_dot_product_attention(*rounded, seen_B1LL)
    found.backward(gradient.bfloat16())
    assert found.grad_fn is not None
    assert "ScaledDotProduct" not in found.grad_fn.name(), "PyTorch's own ran"
    assert torch.allclose(found.double(), expected, atol=0.02)
    for there, here in zip(exact, rounded, strict=True):
        assert there.grad is not None
        assert here.grad is not None
        error = (here.grad.double() - there.grad).norm() / there.grad.norm()
        assert error < 0.01
