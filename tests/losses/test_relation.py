"""The relation loss: equal to a float64 reference, blind to padding, zero for a perfect student, and it learns."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kdcli.losses import relation
from kdcli.losses.relation import regroup, relation_kl


def reference(tx, ty, sx, sy, mask):
    """Definition in float64, one row at a time over the real tokens only: no mask arithmetic at all."""
    batch, heads, length, _ = tx.shape
    total, rows = torch.zeros((), dtype=torch.float64), 0
    for b in range(batch):
        for i in range(length):
            if mask is None:
                keys = list(range(length))
            elif mask.dim() == 2:
                keys = [j for j in range(length) if mask[b, j]] if mask[b, i] else []
            else:
                keys = [j for j in range(length) if mask[b, 0, i, j]]
            if not keys:
                continue
            rows += 1
            for a in range(heads):
                p = torch.softmax(ty[b, a, keys].double() @ tx[b, a, i].double() / tx.shape[-1] ** 0.5, -1)
                q = torch.softmax(sy[b, a, keys].double() @ sx[b, a, i].double() / sx.shape[-1] ** 0.5, -1)
                total = total + (p * (p.log() - q.log())).sum()
    return total / (heads * max(rows, 1))


def vectors(batch, heads, length, k, j, seed=0):
    g = torch.Generator().manual_seed(seed)
    make = lambda width: torch.randn(batch, heads, length, width, generator=g)  # noqa: E731
    return make(k), make(k), make(j), make(j)


def masks(batch, length, seed=0):
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, length + 1, (batch,), generator=g)
    padded = (torch.arange(length)[None] < lengths[:, None]).long()
    document = torch.randint(0, 3, (batch, length), generator=g).sort(-1).values
    isolated = (document[:, :, None] == document[:, None, :])[:, None]
    return {"none": None, "padded": padded, "isolated": isolated}


@pytest.mark.parametrize("kind", ["none", "padded", "isolated"])
@pytest.mark.parametrize("block", [1, 40, 1 << 19])
def test_value_and_gradients_equal_the_float64_reference(kind, block, monkeypatch):
    monkeypatch.setitem(relation.BLOCK_SCORES, "cpu", block)
    tx, ty, sx, sy = vectors(3, 4, 6, 8, 5)
    mask = masks(3, 6)[kind]
    sx, sy = sx.requires_grad_(), sy.requires_grad_()
    sx64, sy64 = sx.detach().double().requires_grad_(), sy.detach().double().requires_grad_()
    expected = reference(tx, ty, sx64, sy64, mask)
    (3 * expected).backward()
    got = relation_kl(tx, ty, sx, sy, mask)
    (3 * got).backward()
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(sx.grad.double(), sx64.grad, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(sy.grad.double(), sy64.grad, rtol=1e-5, atol=1e-7)


def test_value_relation_sums_the_gradient_of_both_sides():
    tx, _, sx, _ = vectors(2, 2, 5, 8, 4)
    v = sx.requires_grad_()
    v64 = v.detach().double().requires_grad_()
    reference(tx, tx, v64, v64, None).backward()
    relation_kl(tx, tx, v, v, None).backward()
    torch.testing.assert_close(v.grad.double(), v64.grad, rtol=1e-5, atol=1e-7)


def test_what_stands_at_padded_positions_changes_neither_value_nor_gradient():
    tx, ty, sx, sy = vectors(3, 2, 7, 8, 8)
    mask = masks(3, 7, seed=3)["padded"]
    assert 0 < mask.sum() < mask.numel()
    results = []
    for noise in (0.0, 50.0):
        x, y = ((t + noise * (1 - mask)[:, None, :, None]).requires_grad_() for t in (sx, sy))
        loss = relation_kl(tx + noise * (1 - mask)[:, None, :, None], ty, x, y, mask)
        loss.backward()
        results.append((loss.detach(), x.grad, y.grad))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert not results[0][1][mask[:, None, :, None].expand_as(results[0][1]) == 0].any()


def test_zero_when_the_student_is_the_teacher_and_no_gradient_reaches_the_teacher():
    tx, ty, _, _ = vectors(2, 3, 6, 8, 8)
    tx.requires_grad_()
    loss = relation_kl(tx, ty, tx.detach().clone().requires_grad_(), ty.clone(), None)
    loss.backward()
    assert loss.item() == pytest.approx(0, abs=1e-6)
    assert tx.grad is None


def test_extreme_scores_stay_finite_and_exact():
    tx, ty, sx, sy = (40 * t for t in vectors(1, 2, 6, 8, 8))
    sx.requires_grad_()
    loss = relation_kl(tx, ty, sx, sy, None)
    loss.backward()
    assert torch.isfinite(sx.grad).all()
    expected = relation_in_log_space(tx, ty, sx.detach(), sy)
    torch.testing.assert_close(loss.double().detach(), expected, rtol=1e-5, atol=1e-6)


def relation_in_log_space(tx, ty, sx, sy):
    t = (tx.double() @ ty.double().mT / tx.shape[-1] ** 0.5).log_softmax(-1)
    s = (sx.double() @ sy.double().mT / sx.shape[-1] ** 0.5).log_softmax(-1)
    return (t.exp() * (t - s)).sum() / t[..., 0].numel()


def test_a_batch_without_a_real_token_is_zero():
    tx, ty, sx, sy = vectors(1, 2, 4, 4, 4)
    assert relation_kl(tx, ty, sx, sy, torch.zeros(1, 4)).item() == 0


def test_bf16_signals_are_compared_in_float32():
    tx, ty, sx, sy = (t.bfloat16() for t in vectors(2, 2, 9, 16, 8))
    sx.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = relation_kl(tx, ty, sx, sy, None)
    got.backward()
    assert got.dtype == torch.float32
    assert sx.grad.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), reference(tx, ty, sx.detach(), sy, None), rtol=1e-5, atol=1e-6)


def test_different_heads_are_refused_not_broadcast():
    tx, ty, sx, sy = vectors(2, 4, 5, 8, 8)
    with pytest.raises(ValueError, match="regroup"):
        relation_kl(tx, ty, sx[:, :1], sy[:, :1], None)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 3), st.sampled_from([1, 2, 4, 6]), st.integers(1, 6), st.sampled_from([2, 4, 6]), st.integers(0, 99)
)
def test_regrouping_keeps_every_token_vector_and_comes_back(batch, heads, length, width, seed):
    x = torch.randn(batch, heads, length, width, generator=torch.Generator().manual_seed(seed))
    flat = x.transpose(1, 2).reshape(batch, length, -1)
    for other in (h for h in range(1, heads * width + 1) if heads * width % h == 0):
        y = regroup(x, other)
        assert y.shape == (batch, other, length, heads * width // other)
        assert torch.equal(y.transpose(1, 2).reshape(batch, length, -1), flat)
        assert torch.equal(regroup(y, heads), x)


def test_regrouping_into_heads_that_do_not_divide_is_an_error():
    with pytest.raises(ValueError, match="do not divide"):
        regroup(torch.zeros(1, 2, 3, 5), 4)
