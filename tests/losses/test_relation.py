"""`relation_kl` and `score_mse`: equal to float64 references, blind to padding, zero for a perfect
student."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from references import PADDED, kl_of_row, mse_of_row, normal, relation_reference

from kdcli.losses import relation
from kdcli.losses.relation import computed_by, regroup, relation_kl, score_mse

LOSSES = [(relation_kl, kl_of_row), (score_mse, mse_of_row)]
EACH = pytest.mark.parametrize(("loss", "of_row"), LOSSES, ids=["kl", "mse"])
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 0], [0, 1, 2, 3, 4]])
ISOLATED = (DOCUMENTS[:, :, None] == DOCUMENTS[:, None])[:, None].contiguous()
ISOLATED[0, 0, 4] = False  # a query that may attend to nothing
MASKS = {"none": None, "padded": PADDED, "isolated": ISOLATED}


def vectors(batch=3, heads=4, length=5, k=8, j=8):
    return [normal(batch, heads, length, width, seed=i) for i, width in enumerate((k, k, j, j))]


@EACH
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("block", [1, 40, 1 << 19])
def test_value_and_gradients_equal_the_float64_reference(loss, of_row, kind, block, monkeypatch):
    monkeypatch.setitem(relation.BLOCK_SCORES, "cpu", block)
    tx, ty, sx, sy = vectors(j=3)
    sx64, sy64 = (x.double().requires_grad_() for x in (sx, sy))
    expected = relation_reference(of_row, tx, ty, sx64, sy64, MASKS[kind])
    (3 * expected).backward()
    value = loss(tx, ty, sx.requires_grad_(), sy.requires_grad_(), MASKS[kind])
    (3 * value).backward()
    torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-7)
    for x, exact in ((sx, sx64), (sy, sy64)):
        torch.testing.assert_close(x.grad.double(), exact.grad, rtol=1e-5, atol=1e-6)


def test_extreme_scores_stay_finite_and_exact():
    tx, ty, sx, sy = (40 * t for t in vectors())
    value = relation_kl(tx, ty, sx.requires_grad_(), sy, None)
    value.backward()
    assert sx.grad.isfinite().all()
    expected = relation_reference(kl_of_row, tx, ty, sx.detach(), sy, None)
    torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-6)


@EACH
def test_bf16_signals_are_compared_in_float32(loss, of_row):
    tx, ty, sx, sy = (t.bfloat16() for t in vectors())
    sx.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = loss(tx, ty, sx, sy, None)
    value.backward()
    assert (value.dtype, sx.grad.dtype) == (torch.float32, torch.bfloat16)
    expected = relation_reference(of_row, tx, ty, sx.detach(), sy, None)
    torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-6)


@EACH
def test_models_on_the_cpu_are_compared_without_triton(loss, of_row):
    tx, ty, sx, sy = vectors()
    with computed_by("triton"):
        value = loss(tx, ty, sx, sy, None)
    assert value == loss(tx, ty, sx, sy, None)


@EACH
def test_different_heads_are_refused_not_broadcast(loss, of_row):
    tx, ty, sx, sy = vectors()
    with pytest.raises(ValueError, match="regroup"):
        loss(tx, ty, sx[:, :1], sy[:, :1], None)


@EACH
def test_without_a_real_token_there_is_no_loss(loss, of_row):
    assert loss(*vectors(), torch.zeros(3, 5)).item() == 0


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 3),
    st.sampled_from([1, 2, 4, 6]),
    st.integers(1, 6),
    st.sampled_from([2, 4, 6]),
    st.integers(0, 99),
)
def test_regrouping_keeps_every_token_vector_and_comes_back(batch, heads, length, width, seed):
    x = normal(batch, heads, length, width, seed=seed)
    flat = x.transpose(1, 2).reshape(batch, length, -1)
    for other in (h for h in range(1, heads * width + 1) if heads * width % h == 0):
        y = regroup(x, other)
        assert y.shape == (batch, other, length, heads * width // other)
        assert torch.equal(y.transpose(1, 2).reshape(batch, length, -1), flat)
        assert torch.equal(regroup(y, heads), x)


def test_regrouping_into_heads_that_do_not_divide_is_an_error():
    with pytest.raises(ValueError, match="do not divide"):
        regroup(torch.zeros(1, 2, 3, 5), 4)
