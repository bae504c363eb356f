"""Probabilities of logits, compared with SciPy's."""

import ast
from pathlib import Path

import numpy as np
import pytest
from scipy import special

import kdcli
from kdcli.metrics import probabilities

ROOT = Path(kdcli.__file__).parent
LOGITS = np.concatenate(
    [
        np.random.default_rng(0).normal(0, 5, 400),
        [-800.0, -40.0, -1e-9, 0.0, 1e-9, 40.0, 800.0, 3.0],
    ]
)
PROBS = np.concatenate(
    [
        [1e-300, 1e-17, 0.3, 0.4999999999, 0.5, 0.5000000001, 0.7, 1 - 2**-53],
        np.random.default_rng(1).uniform(1e-6, 1 - 1e-6, 400),
    ]
)


def test_sigmoid_equals_scipys():
    np.testing.assert_allclose(
        probabilities.sigmoid(LOGITS), special.expit(LOGITS), rtol=1e-14, atol=0
    )


def test_logit_equals_scipys():
    np.testing.assert_allclose(probabilities.logit(PROBS), special.logit(PROBS), rtol=1e-13)


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize("shape", [(-1,), (-1, 8), (-1, 4, 2)])
def test_softmax_equals_scipys(name, shape):
    logits = LOGITS.reshape(shape)
    expected = getattr(special, name)(logits, axis=-1)
    np.testing.assert_allclose(
        getattr(probabilities, name)(logits), expected, rtol=1e-13, atol=1e-300
    )


def test_the_package_imports_neither_scipy_nor_scikit_learn():
    found = {
        path.name
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [str(node.module)]
            if isinstance(node, ast.ImportFrom)
            else []
        )
        if name.split(".")[0] in ("scipy", "sklearn")
    }
    assert found == set()
