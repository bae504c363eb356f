"""Integers of weights: nearest, with error compensation, and without saturating sums."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kdcli.deploy.rounding import (
    DAMPING,
    INT4_BLOCKS,
    INT8,
    INT8_PAIRS,
    InputStatistics,
    largest_pair,
    round_weight,
)


def correlated_inputs(rows, width, seed=0):
    """Inputs with outliers and strong correlations, [R, I] float64."""
    generator = np.random.default_rng(seed)
    mixing_II = generator.normal(size=(width, width)) + 3 * np.eye(width)
    return (generator.normal(size=(rows, width)) * np.geomspace(0.1, 10, width)) @ mixing_II


def compensated_by_inverse(weight_OI, gram_II, scale_OI, low, high):
    """GPTQ by its definition (optimal brain surgeon): round a weight, move the others to the
    minimum of the error that is left, and remove the weight from the inverse Hessian."""
    width = weight_OI.shape[1]
    hessian_II = gram_II + DAMPING * np.trace(gram_II) / width * np.eye(width)
    order_I = np.argsort(-np.diag(gram_II), kind="stable")
    values_OI = np.zeros_like(weight_OI)
    for output, weight_I in enumerate(weight_OI):
        left_I, inverse_II = weight_I.copy(), np.linalg.inv(hessian_II)
        for column in order_I:
            scale = scale_OI[output, column]
            value = np.clip(np.round(left_I[column] / scale), low, high)
            values_OI[output, column] = value
            error = (left_I[column] - value * scale) / inverse_II[column, column]
            left_I -= error * inverse_II[:, column]
            inverse_II -= (
                np.outer(inverse_II[:, column], inverse_II[column]) / inverse_II[column, column]
            )
            inverse_II[column, :] = inverse_II[:, column] = 0
            inverse_II[column, column] = 1
    return values_OI


@pytest.mark.parametrize(("grid", "low", "high"), [(INT8, -127, 127), (INT4_BLOCKS, -8, 7)])
def test_compensation_is_that_of_the_definition(grid, low, high):
    x_RI = correlated_inputs(300, 150)
    weight_OI = np.random.default_rng(1).normal(size=(5, 150))
    weight = torch.from_numpy(weight_OI)
    gram_II = torch.from_numpy(x_RI.T @ x_RI)
    rounded = round_weight(weight, grid, InputStatistics.of(gram_II))
    scale_OI = grid.scales(weight).repeat_interleave(rounded.block, 1)[:, :150].numpy()
    expected_OI = compensated_by_inverse(weight_OI, gram_II.numpy(), scale_OI, low, high)
    assert (rounded.values_OI.numpy() == expected_OI).all()
    nearest = round_weight(weight, grid)
    errors = [
        np.linalg.norm(x_RI @ (each.weight().double().numpy() - weight_OI).T)
        for each in (rounded, nearest)
    ]
    assert errors[0] < 0.6 * errors[1]


@given(
    st.integers(1, 9),
    st.integers(1, 40),
    st.integers(0, 1000),
    st.sampled_from(["normal", "same", "one", "zero"]),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_no_pair_exceeds_its_limit(outputs, width, seed, kind, compensate):
    generator = np.random.default_rng(seed)
    weight_OI = {
        "normal": generator.normal(size=(outputs, width)),
        "same": np.full((outputs, width), -0.3),
        "one": np.eye(outputs, width),
        "zero": np.zeros((outputs, width)),
    }[kind]
    statistics = None
    if compensate:
        x_RI = torch.from_numpy(correlated_inputs(2 * width, width, seed))
        statistics = InputStatistics.of(x_RI.T @ x_RI)
    rounded = round_weight(torch.from_numpy(weight_OI), INT8_PAIRS, statistics)
    values_OI = rounded.values_OI.numpy().astype(int)
    padded_OI = np.pad(values_OI, ((0, 0), (0, width % 2)))
    positive = np.clip(padded_OI, 0, None).reshape(outputs, -1, 2).sum(-1).max()
    negative = -np.clip(padded_OI, None, 0).reshape(outputs, -1, 2).sum(-1).min()
    assert largest_pair(rounded.values_OI) == max(positive, negative) <= 128
    assert np.abs(values_OI).max() <= 127
    if not compensate:
        error_OI = np.abs(rounded.weight().numpy() - weight_OI)
        # The second weight of a pair may be moved by one step.
        assert (error_OI <= 1.51 * rounded.scale_OG.numpy()).all()


def test_pairs_keep_more_steps_than_seven_bits():
    weight_OI = torch.from_numpy(np.random.default_rng(0).normal(size=(64, 384)))
    steps = (weight_OI.abs().amax(1, keepdim=True) / INT8_PAIRS.scales(weight_OI)).mean()
    assert 95 < steps <= 127
