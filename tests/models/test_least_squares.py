"""Ridge regression of linears and normalisations, next to numpy in float64."""

import numpy as np
import pytest
import torch
from torch import nn

from kdcli.models.least_squares import (
    BIAS_RIDGE,
    CHANNELS_AT_ONCE,
    RIDGE,
    Inputs,
    fit_linear,
    fit_norm,
    second_moments,
    sum_of_products,
)


@pytest.mark.parametrize("rows", [4, 40])
@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_a_linear_is_fitted_by_ridge_regression_about_its_weights(bias, rows):
    torch.manual_seed(0)
    linear, x_RI, y_RO = (
        nn.Linear(6, 3, bias=bias),
        torch.randn(rows, 6).double(),
        torch.randn(rows, 3).double(),
    )
    before = [p.double().numpy() for p in linear.parameters()]
    fit_linear(linear, Inputs(x_RI, has_bias=bias), y_RO)
    x, start = x_RI.numpy(), before[0].T
    if bias:
        x, start = np.hstack([x, np.ones((rows, 1))]), np.vstack([start, before[1]])
    root = np.sqrt(RIDGE * np.square(x).sum(0))
    if bias:
        root[-1] = np.sqrt(BIAS_RIDGE * rows)
    system = np.vstack([x, np.diag(root)])
    targets = np.vstack([y_RO.numpy(), root[:, None] * start])
    expected = np.linalg.lstsq(system, targets, rcond=None)[0]
    np.testing.assert_allclose(linear.weight.numpy(), expected[:6].T, atol=1e-6)
    if bias:
        np.testing.assert_allclose(linear.bias.numpy(), expected[6], atol=1e-6)


@torch.no_grad()
def test_a_normalisation_is_fitted_by_least_squares():
    torch.manual_seed(0)
    norm, x, target = nn.LayerNorm(4), torch.randn(30, 4), torch.randn(30, 4).double()
    nn.init.normal_(norm.weight)
    plain = nn.functional.layer_norm(x, (4,)).double().numpy()
    fit_norm(norm, norm(x).double(), target)
    for n in range(4):
        gain, bias = np.polyfit(plain[:, n], target[:, n].numpy(), 1)
        np.testing.assert_allclose([norm.weight[n], norm.bias[n]], [gain, bias], atol=1e-5)
    only = nn.RMSNorm(4)
    fit_norm(only, x.double(), target)
    expected = (x.double() * target).sum(0) / x.double().square().sum(0)
    torch.testing.assert_close(only.weight.double(), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("rows", [2, 40])
def test_a_linear_without_inputs_keeps_its_weights(rows):
    linear = nn.Linear(4, 3, bias=False)
    before = linear.weight.clone()
    with torch.no_grad():
        fit_linear(
            linear,
            Inputs(torch.zeros(rows, 4).double(), has_bias=False),
            torch.ones(rows, 3).double(),
        )
    torch.testing.assert_close(linear.weight, before)


@torch.no_grad()
def test_the_scale_of_an_input_does_not_matter():
    torch.manual_seed(0)
    x_RI, y_RO = torch.randn(40, 5).double(), torch.randn(40, 3).double()
    scale_I = torch.tensor([1.0, 4.0, 0.5, 2.0, 1.0]).double()
    plain, scaled = nn.Linear(5, 3).double(), nn.Linear(5, 3).double()
    scaled.weight.copy_(plain.weight / scale_I)
    scaled.bias.copy_(plain.bias)
    fit_linear(plain, Inputs(x_RI, has_bias=True), y_RO)
    fit_linear(scaled, Inputs(x_RI * scale_I, has_bias=True), y_RO)
    torch.testing.assert_close(scaled.weight * scale_I, plain.weight, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(scaled.bias, plain.bias, rtol=1e-5, atol=1e-6)


def test_an_input_that_is_always_zero_has_a_ridge():
    x_RI = torch.randn(40, 5).double()
    x_RI[:, 2] = 0
    others = RIDGE * x_RI.square().sum(0)
    found = Inputs(x_RI, has_bias=False).ridge_I
    torch.testing.assert_close(found[[0, 1, 3, 4]], others[[0, 1, 3, 4]])
    assert 0 < found[2] < 0.01 * others.max()


@pytest.mark.parametrize("in_bfloat16", [False, True])
def test_products_are_summed_in_float32_also_while_models_run_in_bfloat16(in_bfloat16):
    x_RI = torch.randn(9000, CHANNELS_AT_ONCE + 9)
    wanted = x_RI.double().numpy().T @ x_RI.double().numpy()
    with torch.autocast("cpu", torch.bfloat16, in_bfloat16):
        half, whole = second_moments(x_RI), sum_of_products(x_RI, x_RI)
    np.testing.assert_allclose(half.numpy(), wanted, atol=2e-2)
    np.testing.assert_allclose(whole.numpy(), wanted, atol=2e-2)
