"""The losses of rerankers against sums over each list in float64."""

import numpy as np
import pytest
import torch
from scipy.special import expit, log_softmax, softmax

from kdcli.losses.ranking import label_loss, pad_lists, score_loss

RNG = np.random.default_rng(0)
SIZES = (3, 1, 4, 2)
PLACES = torch.tensor([[0, 1, 2, -1], [3, -1, -1, -1], [4, 5, 6, 7], [8, 9, -1, -1]])
S, T = RNG.normal(size=10) * 3, RNG.normal(size=10) * 3
LABELS = np.array([0, 2, 0, 1, 0, 1, 1, 0, np.nan, np.nan])


def by_list(x):
    return np.split(x, np.cumsum(SIZES)[:-1])


def margin(s, t, labels, temperature):
    pairs = [(i, j) for i in range(len(s)) for j in range(len(s)) if labels[i] > labels[j]]
    pairs = pairs or [(i, j) for i in range(len(s)) for j in range(i + 1, len(s))]
    return np.mean([((s[i] - s[j]) - (t[i] - t[j])) ** 2 for i, j in pairs] or [0.0])


def listwise(s, t, labels, temperature):
    p = softmax(t / temperature)
    return temperature**2 * (p * (np.log(p) - log_softmax(s / temperature))).sum()


def pointwise(s, t, labels, temperature):
    return np.mean((s - t) ** 2)


def laid_out(dtype=torch.float64):
    given = [torch.tensor(x, dtype=dtype) for x in (S, T, LABELS)]
    return *(pad_lists(x, PLACES) for x in given), PLACES >= 0


@pytest.mark.parametrize(
    ("kind", "reference"),
    [("margin-mse", margin), ("listwise", listwise), ("pointwise", pointwise)],
)
def test_against_scores(kind, reference):
    s_QM, t_QM, labels_QM, real_QM = laid_out()
    wanted = np.mean(
        [reference(*lists, 0.7) for lists in zip(*map(by_list, (S, T, LABELS)), strict=True)]
    )
    assert float(score_loss(kind, s_QM, t_QM, labels_QM, real_QM, 0.7)) == pytest.approx(
        wanted, rel=1e-5
    )


def test_against_labels():
    s_QM, _, labels_QM, real_QM = laid_out()
    known = [(s, y) for s, y in zip(by_list(S), by_list(LABELS), strict=True)]
    point = [
        0.0 if np.isnan(y).any() else -np.mean(np.log(expit(np.where(y > 0, s, -s))))
        for s, y in known
    ]
    assert float(label_loss("pointwise", s_QM, labels_QM, real_QM)) == pytest.approx(
        np.mean(point), rel=1e-5
    )
    shares = [np.nan_to_num(y) / max(np.nansum(y), 1e-9) for _, y in known]
    whole = [-(share * log_softmax(s)).sum() for share, (s, _) in zip(shares, known, strict=True)]
    assert float(label_loss("listwise", s_QM, labels_QM, real_QM)) == pytest.approx(
        np.mean(whole), rel=1e-5
    )


@pytest.mark.parametrize("kind", ["margin-mse", "listwise", "pointwise"])
def test_what_stands_behind_a_list_counts_nothing(kind):
    s_QM, t_QM, labels_QM, real_QM = laid_out()
    s_QM = s_QM.masked_fill(~real_QM, 1e4).requires_grad_()
    loss = score_loss(kind, s_QM, t_QM, labels_QM, real_QM, 1.0) + label_loss(
        kind, s_QM, labels_QM, real_QM
    )
    (gradient,) = torch.autograd.grad(loss, s_QM)
    assert gradient.isfinite().all()
    assert not gradient[~real_QM].any()
    assert gradient[real_QM].any()
