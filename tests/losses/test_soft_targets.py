"""Soft targets: each kind against its formula in float64; zero when the student is the teacher; padding is nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.special import expit, log_softmax

from kdcli.losses.soft_targets import soft_loss
from kdcli.types import IGNORED

B, L, C, T = 5, 7, 4, 2.0
REAL = np.array([7, 3, 1, 5, 6])
MASK = (np.arange(L)[None] < REAL[:, None]).astype(np.int64)
SHAPES = {"class": (B, C), "multi": (B, C), "score": (B, 1), "tokens": (B, L, C), "span": (B, L, 2)}
KINDS = sorted(SHAPES)


def drawn(kind):
    rng = np.random.Generator(np.random.PCG64(0))
    teacher, student = (3 * rng.normal(size=SHAPES[kind]) for _ in range(2))
    labels = rng.integers(0, C, (B, L))
    labels[(rng.random((B, L)) < 0.3) | (MASK == 0)] = IGNORED
    return teacher, student, labels


def divergence(p_logits, q_logits):
    """Mean over rows of KL(softmax p ‖ softmax q) at temperature T, times T²."""
    p, q = log_softmax(p_logits / T, -1), log_softmax(q_logits / T, -1)
    return T**2 * (np.exp(p) * (p - q)).sum(-1).mean()


def reference(kind, teacher, student, labels):
    if kind == "score":
        return ((teacher - student) ** 2).mean()
    if kind == "multi":
        p, q = expit(teacher / T), expit(student / T)
        return T**2 * (p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))).mean()
    if kind == "tokens":
        return divergence(teacher[labels != IGNORED], student[labels != IGNORED])
    if kind == "span":
        return np.mean([divergence(teacher[b, :n, i], student[b, :n, i]) for b, n in enumerate(REAL) for i in (0, 1)])
    return divergence(teacher, student)


def loss(kind, teacher, student, labels, mask=MASK):
    as_tensors = (torch.tensor(x, dtype=torch.float32) for x in (teacher, student))
    return soft_loss(kind, *as_tensors, torch.tensor(labels), torch.tensor(mask), T)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_formula(kind):
    given = drawn(kind)
    assert float(loss(kind, *given)) == pytest.approx(reference(kind, *given), rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_zero_for_the_teacher_itself_and_sends_it_no_gradient(kind):
    given, _, labels = drawn(kind)
    assert float(loss(kind, given, given, labels)) == pytest.approx(0, abs=1e-6)
    teacher = torch.tensor(given, dtype=torch.float32, requires_grad=True)
    student = (teacher.detach() + 1).requires_grad_()
    soft_loss(kind, 1.5 * teacher, student, torch.tensor(labels), torch.tensor(MASK), T).backward()
    assert teacher.grad is None
    assert float(student.grad.abs().sum()) > 0


@pytest.mark.parametrize("kind", ["tokens", "span"])
def test_padding_changes_nothing(kind):
    teacher, student, labels = drawn(kind)
    wide = [np.concatenate([x, np.full((B, 3, x.shape[2]), 9.0)], 1) for x in (teacher, student)]
    more = np.full((B, 3), IGNORED), np.zeros((B, 3), dtype=np.int64)
    widened = loss(kind, *wide, np.concatenate([labels, more[0]], 1), np.concatenate([MASK, more[1]], 1))
    assert float(widened) == pytest.approx(float(loss(kind, teacher, student, labels)), rel=1e-6)


def test_no_labelled_word_is_no_loss():
    teacher, student, labels = drawn("tokens")
    assert float(loss("tokens", teacher, student, np.full_like(labels, IGNORED))) == 0.0
