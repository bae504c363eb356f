"""Choosing the feed-forward units that a student keeps, next to numpy in float64."""

import numpy as np
import torch

from kdcli.models.units import RIDGE, kept_units


def errors_without(covariance, down, kept):
    """Return the squared errors of ridge regression, each without one of the kept units."""
    ridge = np.sqrt(RIDGE * np.trace(covariance) / len(covariance))
    root = np.linalg.cholesky(covariance).T  # Its rows have this covariance.
    system = np.vstack([root, ridge * np.eye(len(root))])
    targets = np.vstack([root @ down.T, np.zeros_like(down.T)])
    errors = []
    for unit in kept:
        rest = [k for k in kept if k != unit]
        solution = np.linalg.lstsq(system[:, rest], targets, rcond=None)[0]
        errors.append(np.square(system[:, rest] @ solution - targets).sum())
    return errors


def test_the_units_that_raise_the_error_least_are_removed_one_by_one():
    rng = np.random.default_rng(0)
    mixed = rng.normal(size=(40, 5)) @ rng.normal(size=(5, 8)) + 0.3 * rng.normal(size=(40, 8))
    covariance, down = np.cov(mixed.T), rng.normal(size=(3, 8))
    kept = list(range(8))
    while len(kept) > 3:
        kept.pop(int(np.argmin(errors_without(covariance, down, kept))))
        given = torch.from_numpy(covariance), torch.from_numpy(down)
        assert kept_units(*given, len(kept), rounds=8 - len(kept)).tolist() == kept


def test_of_two_units_that_do_the_same_one_is_kept():
    torch.manual_seed(0)
    x_RF = torch.randn(200, 6).double()
    x_RF[:, 4] = x_RF[:, 1]
    down_DF = torch.tensor([1.0, 5.0, 1.0, 1.0, 5.0, 1.0]).expand(2, 6)
    kept = set(kept_units(x_RF.T.cov(), down_DF, 5).tolist())
    assert len(kept & {1, 4}) == 1


def test_units_without_variance_can_be_removed():
    kept = kept_units(torch.zeros(6, 6, dtype=torch.float64), torch.ones(2, 6), 3)
    assert len(set(kept.tolist())) == 3
    assert set(kept.tolist()) <= set(range(6))
