"""`hard_loss` and `soft_loss` of every kind against formulas in float64; padding and micro-batches
change nothing."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from references import kl_of_row, normal

from kdcli.losses.hard import hard_loss, mean_over
from kdcli.losses.soft_targets import soft_loss
from kdcli.types import IGNORED, counts_of

B, L, C, T = 5, 7, 4, 2.0
REAL = [7, 3, 1, 5, 6]
MASK = (torch.arange(L)[None] < torch.tensor(REAL)[:, None]).long()
SHAPES = {"class": (B, C), "multi": (B, C), "score": (B, 1), "tokens": (B, L, C), "span": (B, L, 2)}
EACH_KIND = pytest.mark.parametrize("kind", SHAPES)


def drawn(kind, seed=0):
    """The teacher's and the student's logits, and labels."""
    teacher, student = (3 * normal(*SHAPES[kind], seed=2 * seed + i) for i in (0, 1))
    g = torch.Generator().manual_seed(seed)
    if kind == "class":
        labels = torch.randint(C, (B,), generator=g)
    elif kind == "multi":
        labels = torch.randint(2, (B, C), generator=g).float()
    elif kind == "score":
        labels = 5 * torch.randn(B, generator=g)
    elif kind == "tokens":
        labels = torch.randint(C, (B, L), generator=g)
        # Special tokens, padding, and pieces of a word but its first.
        labels[(torch.rand(B, L, generator=g) < 0.3) | (MASK == 0)] = IGNORED
    else:
        labels = torch.stack([torch.randint(n, (2,), generator=g).sort().values for n in REAL])
    return teacher, student, labels


def rows_of(kind, logits, labels):
    """The rows whose losses are averaged, without padding, each with its label where labels are
    numbers of classes."""
    if kind == "tokens":
        return [
            (logits[i, j], labels[i, j])
            for i in range(B)
            for j in range(L)
            if labels[i, j] != IGNORED
        ]
    if kind == "span":
        return [(logits[i, : REAL[i], end], labels[i, end]) for i in range(B) for end in (0, 1)]
    return list(zip(logits, labels, strict=True))


def hard_reference(kind, logits, labels):
    x, y = logits.double(), labels.double()
    if kind == "score":
        return ((x[:, 0] - y) ** 2).mean()
    if kind == "multi":
        return -(y * x.sigmoid().log() + (1 - y) * (1 - x.sigmoid()).log()).mean()
    return torch.stack(
        [-row.log_softmax(-1)[label] for row, label in rows_of(kind, x, labels)]
    ).mean()


def soft_reference(kind, teacher, student, labels):
    t, s = teacher.double(), student.double()
    if kind == "score":
        return ((t - s) ** 2).mean()
    t, s = t / T, s / T
    if kind == "multi":
        p, q = t.sigmoid(), s.sigmoid()
        return T**2 * (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).mean()
    pairs = zip(rows_of(kind, t, labels), rows_of(kind, s, labels), strict=True)
    return T**2 * torch.stack([kl_of_row(one, other) for (one, _), (other, _) in pairs]).mean()


@EACH_KIND
@pytest.mark.parametrize("seed", range(3))
def test_losses_are_their_formulas(kind, seed):
    teacher, student, labels = drawn(kind, seed)
    for loss, expected in (
        (hard_loss(kind, student, labels, MASK), hard_reference(kind, student, labels)),
        (
            soft_loss(kind, teacher, student, labels, MASK, T),
            soft_reference(kind, teacher, student, labels),
        ),
    ):
        assert (loss.shape, loss.dtype) == ((), torch.float32)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


@EACH_KIND
def test_the_teacher_itself_has_no_soft_loss_and_gets_no_gradient(kind):
    teacher, _, labels = drawn(kind)
    assert soft_loss(kind, teacher, teacher, labels, MASK, T).item() == pytest.approx(0, abs=1e-6)
    teacher.requires_grad_()
    student = (teacher.detach() + 1).requires_grad_()
    soft_loss(kind, 1.5 * teacher, student, labels, MASK, T).backward()
    assert teacher.grad is None
    assert student.grad.any()


@EACH_KIND
def test_half_precision_and_huge_logits(kind):
    _, student, labels = drawn(kind)
    half = student.bfloat16()
    assert torch.equal(
        hard_loss(kind, half, labels, MASK), hard_loss(kind, half.float(), labels, MASK)
    )
    huge = (3e3 * student).requires_grad_()
    loss = hard_loss(kind, huge, labels, MASK)
    loss.backward()
    assert loss.isfinite()
    assert huge.grad.isfinite().all()


@settings(max_examples=30)
@given(
    st.sampled_from(["span", "tokens"]), st.integers(0, 99), st.integers(0, 6), st.floats(-50, 50)
)
def test_padding_and_ignored_tokens_do_not_matter(kind, seed, more, value):
    teacher, student, labels = drawn(kind, seed)
    unread = MASK == 0 if kind == "span" else labels == IGNORED
    wide = [
        F.pad(torch.where(unread[:, :, None], value, x), (0, 0, 0, more), value=value)
        for x in (teacher, student)
    ]
    wide_labels = labels if kind == "span" else F.pad(labels, (0, more), value=IGNORED)
    wide_mask = F.pad(MASK, (0, more))
    for one, other in (
        (hard_loss(kind, wide[1], wide_labels, wide_mask), hard_loss(kind, student, labels, MASK)),
        (
            soft_loss(kind, *wide, wide_labels, wide_mask, T),
            soft_loss(kind, teacher, student, labels, MASK, T),
        ),
    ):
        torch.testing.assert_close(one, other)
    assert held(kind, wide_labels) == held(kind, labels)


def held(kind, labels):
    """How much of what its loss is a mean over a batch holds."""
    return counts_of({"input_ids": torch.zeros(len(labels), 4), "labels": labels})[mean_over(kind)]


def test_without_a_mask_all_tokens_are_real():
    _, logits, labels = drawn("span")
    loss = hard_loss("span", logits, labels, None)
    torch.testing.assert_close(loss, hard_loss("span", logits, labels, torch.ones_like(MASK)))
    assert loss > hard_loss("span", logits, labels, MASK)


def test_without_a_labelled_word_the_losses_are_0_and_so_is_the_gradient():
    teacher, logits, labels = drawn("tokens")
    none = torch.full_like(labels, IGNORED)
    loss = hard_loss("tokens", logits.requires_grad_(), none, MASK)
    loss.backward()
    assert (
        loss.item()
        == soft_loss("tokens", teacher, logits, none, MASK, T).item()
        == held("tokens", none)
        == 0.0
    )
    assert not logits.grad.any()


@settings(max_examples=40)
@given(
    st.sampled_from(sorted(SHAPES)), st.integers(0, 99), st.lists(st.integers(1, B - 1), max_size=3)
)
def test_micro_batches_weighed_by_what_they_hold_add_up_to_the_batch(kind, seed, cuts):
    _, logits, labels = drawn(kind, seed)
    if kind == "tokens":
        # One of the rows, and perhaps a whole micro-batch, has no labelled word.
        labels[0] = IGNORED
    total = weight = 0.0
    for begin, end in itertools.pairwise([0, *sorted(set(cuts)), B]):
        share = held(kind, labels[begin:end])
        total += (
            share * hard_loss(kind, logits[begin:end], labels[begin:end], MASK[begin:end]).item()
        )
        weight += share
    assert weight == held(kind, labels)
    assert total / weight == pytest.approx(hard_loss(kind, logits, labels, MASK).item(), rel=1e-5)
