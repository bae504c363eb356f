"""Losses over a vocabulary: equal to float64 references in any chunking, and nothing as large as
the logits kept."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kdcli.losses import vocabulary
from kdcli.losses.vocabulary import labels_of, masked_ce, soft_kl
from kdcli.types import IGNORED, Signals, labelled_places


def logits(rows, words, seed=0, scale=3.0):
    return scale * torch.randn(rows, words, generator=torch.Generator().manual_seed(seed))


def labels(rows, words, seed=5):
    return torch.randint(0, words, (rows,), generator=torch.Generator().manual_seed(seed))


def ce_reference(x, y):
    return torch.stack(
        [-row.double().softmax(-1)[label].log() for row, label in zip(x, y, strict=True)]
    ).mean()


def smoothed_reference(x, y, smoothing):
    p = torch.full(x.shape, smoothing / x.shape[1], dtype=torch.float64)
    p[torch.arange(len(y)), y] += 1 - smoothing
    return -(p * x.double().log_softmax(-1)).sum(-1).mean()


def kl_reference(t, s, temperature):
    p, q = (t.double() / temperature).softmax(-1), (s.double() / temperature).softmax(-1)
    return temperature**2 * (p * (p.log() - q.log())).sum() / len(t)


@settings(max_examples=40)
@given(
    st.integers(1, 9),
    st.integers(2, 30),
    st.sampled_from([1, 20, 64, 1 << 19]),
    st.sampled_from([0.5, 1.0, 2.0, 5.0]),
    st.integers(0, 99),
)
def test_values_and_gradients_equal_the_float64_references(rows, words, chunk, temperature, seed):
    y, t = labels(rows, words, seed), logits(rows, words, seed + 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(vocabulary.CHUNK_LOGITS, "cpu", chunk)
        for loss, reference in (
            (lambda x: masked_ce(x, y), lambda x: ce_reference(x, y)),
            (lambda x: masked_ce(x, y, 0.1), lambda x: smoothed_reference(x, y, 0.1)),
            (lambda x: soft_kl(t, x, temperature), lambda x: kl_reference(t, x, temperature)),
        ):
            x = logits(rows, words, seed).requires_grad_()
            exact = x.detach().double().requires_grad_()
            got, expected = loss(x), reference(exact)
            (3 * got).backward()
            (3 * expected).backward()
            assert got.dtype == torch.float32
            torch.testing.assert_close(
                got.double(), expected, rtol=1e-5, atol=1e-6 * max(1, temperature**2)
            )
            torch.testing.assert_close(
                x.grad.double(), exact.grad, rtol=1e-5, atol=1e-6 * temperature
            )


def test_extreme_logits_stay_finite_and_exact():
    t, s, y = (
        logits(5, 40, 1, scale=200),
        logits(5, 40, 2, scale=200).requires_grad_(),
        labels(5, 40),
    )
    # What is added to all logits of a row changes nothing.
    far = torch.tensor([0.0, 1e3, -1e3, 5e3, 0.0])[:, None]
    soft, hard = soft_kl(t + far, s - far, 1.0), masked_ce(s + far, y)
    (soft + hard).backward()
    assert s.grad.isfinite().all()
    log_p, log_q = t.double().log_softmax(-1), s.detach().double().log_softmax(-1)
    torch.testing.assert_close(
        soft.double(), (log_p.exp() * (log_p - log_q)).sum() / 5, rtol=1e-3, atol=0
    )
    torch.testing.assert_close(
        hard.double(), -log_q.gather(1, y[:, None]).mean(), rtol=1e-3, atol=0
    )


def test_nothing_labelled_is_zero_with_an_empty_gradient():
    x = torch.zeros(0, 9, requires_grad=True)
    loss = masked_ce(x, torch.zeros(0, dtype=torch.long)) + soft_kl(torch.zeros(0, 9), x, 2.0)
    loss.backward()
    assert (loss.item(), x.grad.shape) == (0, (0, 9))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_computed_in_float32_and_their_gradient_has_their_type(dtype):
    t, s = logits(6, 30, 1).to(dtype), logits(6, 30, 2).to(dtype).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = soft_kl(t, s, 2.0)
    loss.backward()
    exact = s.detach().double().requires_grad_()
    expected = kl_reference(t, exact, 2.0)
    expected.backward()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)
    assert s.grad.dtype == dtype
    torch.testing.assert_close(s.grad.double(), exact.grad, rtol=2e-2, atol=1e-5)


def test_a_loss_scale_lifts_gradients_that_float16_could_not_hold():
    s = torch.tensor([[0.0, 20.0]] * 600, dtype=torch.float16, requires_grad=True)
    (masked_ce(s, torch.ones(600, dtype=torch.long)) * 2.0**16).backward()
    # The probability of the other word is e⁻²⁰ = 2e-9, and its gradient a 600th of it: far below
    # float16.
    expected = torch.tensor(20.0).neg().exp() / 600 * 2.0**16
    assert s.grad[0, 0].float() == pytest.approx(float(expected), rel=0.3)


def test_a_second_backward_pass_is_an_error_and_not_a_wrong_gradient():
    s = logits(3, 5, 2).requires_grad_()
    loss = soft_kl(logits(3, 5, 1), s, 2.0)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


def test_logits_and_labels_of_other_shapes_are_refused():
    with pytest.raises(ValueError, match="cannot compare logits of different shapes"):
        soft_kl(logits(3, 5), logits(3, 6), 1.0)
    with pytest.raises(ValueError, match="do not match"):
        masked_ce(logits(3, 5), labels(2, 5))


def test_labels_come_in_the_order_of_the_tokens():
    labels_BL = torch.tensor([[IGNORED, 4, IGNORED], [7, IGNORED, 2]])
    places_P = labelled_places({"labels": labels_BL})
    assert labels_of(Signals(labels=labels_BL, labelled=places_P)).tolist() == [4, 7, 2]
    with pytest.raises(ValueError, match="has no labels"):
        labels_of(Signals())
