"""The loss against labels: each kind against its formula in float64; padding and micro-batches change nothing."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kdcli.losses.hard import hard_loss, labelled
from kdcli.types import IGNORED

B, L, C = 5, 7, 4
REAL = [7, 3, 1, 5, 6]
"""Tokens of each row."""


def mask_of(real=REAL, length=L) -> torch.Tensor:
    return (torch.arange(length)[None] < torch.tensor(real)[:, None]).long()


def drawn(kind, seed=0, scale=3.0):
    """Logits, labels and mask of a batch."""
    rng = np.random.Generator(np.random.PCG64(seed))
    shape = {"class": (B, C), "multi": (B, C), "score": (B, 1), "tokens": (B, L, C), "span": (B, L, 2)}[kind]
    logits = torch.from_numpy(rng.normal(size=shape) * scale).float()
    if kind == "class":
        labels = torch.from_numpy(rng.integers(0, C, B))
    elif kind == "multi":
        labels = torch.from_numpy(rng.integers(0, 2, (B, C))).float()
    elif kind == "score":
        labels = torch.from_numpy(rng.normal(size=B) * 5).float()
    elif kind == "tokens":
        labels = torch.from_numpy(rng.integers(0, C, (B, L)))
        # Special tokens, and pieces of a word but its first.
        labels[torch.from_numpy(rng.random((B, L)) < 0.3) | (mask_of() == 0)] = IGNORED
    else:
        labels = torch.tensor([sorted(rng.integers(0, n, 2).tolist()) for n in REAL])
    return logits, labels, mask_of()


def minus_log_of(logits, chosen) -> float:
    """Cross-entropy of one choice, term by term."""
    total = math.fsum(math.exp(float(x)) for x in logits)
    return math.log(total) - float(logits[chosen])


def expected(kind, logits, labels) -> float:
    """The loss by its formula, example by example, in float64."""
    x, y = logits.double().numpy(), labels.numpy()
    if kind == "class":
        return float(np.mean([minus_log_of(x[i], y[i]) for i in range(B)]))
    if kind == "score":
        return float(np.mean([(x[i, 0] - float(y[i])) ** 2 for i in range(B)]))
    if kind == "multi":
        likely = 1 / (1 + np.exp(-x))
        return float(np.mean(-(y * np.log(likely) + (1 - y) * np.log(1 - likely))))
    if kind == "tokens":
        places = [(i, j) for i in range(B) for j in range(L) if y[i, j] != IGNORED]
        return float(np.mean([minus_log_of(x[i, j], y[i, j]) for i, j in places]))
    ends = [(i, end) for i in range(B) for end in (0, 1)]
    return float(np.mean([minus_log_of(x[i, : REAL[i], end], y[i, end]) for i, end in ends]))


KINDS = ["class", "multi", "score", "tokens", "span"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_the_loss_is_its_formula(kind, seed):
    logits, labels, mask = drawn(kind, seed)
    loss = hard_loss(kind, logits, labels, mask)
    assert loss.shape == ()
    assert loss.item() == pytest.approx(expected(kind, logits, labels), rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_of_half_precision_is_taken_in_float32(kind):
    logits, labels, mask = drawn(kind)
    half = logits.bfloat16()
    loss = hard_loss(kind, half, labels, mask)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, hard_loss(kind, half.float(), labels, mask))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_that_are_huge_give_a_finite_loss_and_gradient(kind):
    logits, labels, mask = drawn(kind, scale=1e4)
    logits.requires_grad_()
    loss = hard_loss(kind, logits, labels, mask)
    loss.backward()
    assert loss.isfinite()
    assert logits.grad.isfinite().all()


@settings(max_examples=30)
@given(st.integers(0, 99), st.integers(0, 6), st.floats(-50, 50))
def test_logits_of_padding_do_not_matter_to_answers(seed, more, value):
    logits, labels, mask = drawn("span", seed)
    other = torch.where(mask[:, :, None] == 0, value, logits)
    wide = torch.nn.functional.pad(other, (0, 0, 0, more), value=value)
    wide_mask = torch.nn.functional.pad(mask, (0, more))
    torch.testing.assert_close(hard_loss("span", wide, labels, wide_mask), hard_loss("span", logits, labels, mask))


def test_padding_gets_no_gradient_from_answers():
    logits, labels, mask = drawn("span")
    logits.requires_grad_()
    hard_loss("span", logits, labels, mask).backward()
    moved = logits.grad.abs().sum(-1) > 0
    # A row of one token has nothing to choose from.
    assert torch.equal(moved, (mask == 1) & (mask.sum(1, keepdim=True) > 1))


def test_without_a_mask_all_tokens_are_real():
    logits, labels, mask = drawn("span")
    torch.testing.assert_close(
        hard_loss("span", logits, labels, None), hard_loss("span", logits, labels, torch.ones_like(mask))
    )
    assert hard_loss("span", logits, labels, None) > hard_loss("span", logits, labels, mask)


@settings(max_examples=30)
@given(st.integers(0, 99), st.integers(0, 6), st.floats(-50, 50))
def test_what_is_ignored_does_not_matter_to_words(seed, more, value):
    logits, labels, mask = drawn("tokens", seed)
    other = torch.where(labels[:, :, None] == IGNORED, value, logits)
    wide = torch.nn.functional.pad(other, (0, 0, 0, more), value=value)
    wide_labels = torch.nn.functional.pad(labels, (0, more), value=IGNORED)
    torch.testing.assert_close(
        hard_loss("tokens", wide, wide_labels, torch.nn.functional.pad(mask, (0, more))),
        hard_loss("tokens", logits, labels, mask),
    )
    assert labelled("tokens", wide_labels) == labelled("tokens", labels)


def test_without_a_labelled_word_the_loss_is_0_and_so_is_its_gradient():
    logits, _, mask = drawn("tokens")
    logits.requires_grad_()
    none = torch.full((B, L), IGNORED)
    loss = hard_loss("tokens", logits, none, mask)
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(logits.grad, torch.zeros_like(logits))
    assert labelled("tokens", none) == 0.0


@settings(max_examples=40)
@given(st.sampled_from(KINDS), st.integers(0, 99), st.lists(st.integers(1, B - 1), max_size=3))
def test_micro_batches_weighed_by_what_they_hold_add_up_to_the_whole(kind, seed, cuts):
    logits, labels, mask = drawn(kind, seed)
    if kind == "tokens":
        # One of the rows, and perhaps a whole micro-batch, without any labelled word.
        labels[0] = IGNORED
    bounds = [0, *sorted(set(cuts)), B]
    total = weight = 0.0
    for begin, end in itertools.pairwise(bounds):
        share = labelled(kind, labels[begin:end])
        total += share * hard_loss(kind, logits[begin:end], labels[begin:end], mask[begin:end]).item()
        weight += share
    assert weight == labelled(kind, labels)
    assert total / weight == pytest.approx(hard_loss(kind, logits, labels, mask).item(), rel=1e-5)


def test_rows_count_as_rows_and_words_as_words():
    assert labelled("class", torch.tensor([0, 1, 2])) == 3.0
    assert labelled("multi", torch.zeros(3, 9)) == 3.0
    assert labelled("score", torch.zeros(3)) == 3.0
    assert labelled("span", torch.zeros(3, 2)) == 3.0
    assert labelled("tokens", torch.tensor([[IGNORED, 0, 1], [2, IGNORED, IGNORED]])) == 3.0


def test_of_many_labels_the_loss_is_a_mean_over_classes_not_a_sum():
    assert hard_loss("multi", torch.zeros(2, 8), torch.zeros(2, 8), None).item() == pytest.approx(math.log(2))
