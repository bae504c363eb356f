"""The error of each product, and the fewest that must stay in float32."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from kdcli.deploy.quantise import product_errors, smallest_count


@given(st.integers(0, 200), st.integers(0, 300))
def test_the_fewest_that_hold_are_found_in_few_attempts(most, needed):
    tried = []

    def holds(count):
        tried.append(count)
        return count >= needed

    assert smallest_count(most, holds) == (needed if needed <= most else None)
    assert len(tried) == len(set(tried)) <= 2 * (most.bit_length() + 1)


class Two(nn.Module):
    """A product whose inputs have an outlier, before one whose inputs have none; and one that is
    not used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.outlier, self.even, self.unused = (
            nn.Linear(256, 256, dtype=torch.float64) for _ in range(3)
        )

    def forward(self, x):
        spread = x.clone()
        spread[..., 0] *= 1000
        return self.outlier(spread) + self.even(x)


def reference(weight, x, engine):
    """A product in float64 with rounded weights and inputs, written for one engine without groups
    of activations."""
    most = {"onnx": 63, "openvino": 127}[engine]
    scale = np.abs(weight).max(1, keepdims=True) / most
    rounded = np.round(weight / scale) * scale
    if engine == "onnx":
        low, high = min(0, x.min()), max(0, x.max())
        step = (high - low) / 255
        zero = np.round(-low / step)
        return (np.clip(np.round(x / step) + zero, 0, 255) - zero) * step @ rounded.T
    step = np.abs(x.reshape(len(x), -1, 128)).max(-1).repeat(128, -1) / 127
    return np.round(x / step) * step @ rounded.T


@pytest.mark.parametrize("engine", ["onnx", "openvino"])
def test_errors_are_those_of_each_product_alone(engine):
    model, x = Two().eval(), torch.randn(6, 256, dtype=torch.float64)
    errors = product_errors(
        model, lambda batch: model(batch["x"]).numpy().ravel(), [{"x": x}], engine, "int8"
    )
    assert list(errors) == ["outlier", "even", "unused"]
    with torch.no_grad():
        exact = model(x).numpy()
        weight, bias = model.even.weight.numpy(), model.even.bias.numpy()
        changed = exact - model.even(x).numpy() + reference(weight, x.numpy(), engine) + bias
    assert errors["even"] == pytest.approx(
        np.linalg.norm(changed - exact) / np.linalg.norm(exact), rel=1e-9
    )
    assert errors["unused"] == 0
    with torch.no_grad():
        assert (model(x).numpy() == exact).all()
