"""Outputs of scored models on disk: exact, and computed again for anything that differs."""

import numpy as np
import pytest
import torch
from test_cache import headed, rows_of

from kdcli.models.card import weights_hash
from kdcli.run.context import cpu_session
from kdcli.targets.outputs import keep_outputs, kept_outputs

SHAPES = {"class": (3,), "tokens": (30, 3)}


class Asked:
    """Asks for the outputs of a model, and counts how often they are computed."""

    def __init__(self, shape):
        self.shape, self.computed = shape, 0

    def __call__(self, model, rows):
        def compute():
            self.computed += 1
            drawn = np.random.default_rng(self.computed)
            return [drawn.standard_normal(self.shape, np.float32) for _ in range(len(rows))]

        fingerprint = lambda: weights_hash(model)  # noqa: E731
        return kept_outputs(model, fingerprint, rows, cpu_session(), compute)


@pytest.mark.parametrize("kind", SHAPES)
def test_outputs_are_kept_to_the_bit(kind, tmp_path):
    ask, model, rows = Asked(SHAPES[kind]), headed(), rows_of()
    with keep_outputs(tmp_path / "outputs"):
        first, second = ask(model, rows), ask(model, rows)
    assert ask.computed == 1
    for before, after in zip(first, second, strict=True):
        np.testing.assert_array_equal(before, after, strict=True)
    # Nothing is kept outside the context.
    ask(model, rows)
    assert ask.computed == 2
    assert [file.suffix for file in (tmp_path / "outputs").iterdir()] == [".safetensors"]


def test_what_outputs_depend_on_is_never_mixed_up(tmp_path):
    ask, model, rows = Asked((3,)), headed(), rows_of()
    other = headed()
    with torch.no_grad():
        other.classifier.bias[0] += 1
    # A smaller maximum length leaves other tokens of the same texts.
    shorter = rows_of((7, 2, 18, 3, 3, 18, 11, 5))
    asked = [(model, rows), (other, rows), (headed(dtype=torch.bfloat16), rows), (model, shorter)]
    asked += [(model, rows_of(seed=1)), (model, rows_of(types=False))]
    with keep_outputs(tmp_path):
        for each in asked:
            ask(*each)
        assert ask.computed == len(asked)
        for each in asked:
            ask(*each)
    assert ask.computed == len(asked)


@pytest.mark.parametrize("damage", [lambda b: b[:-5], lambda b: b[:-1] + bytes([b[-1] ^ 1])])
def test_damaged_outputs_are_computed_again(damage, tmp_path, capsys):
    ask, model, rows = Asked((3,)), headed(), rows_of()
    with keep_outputs(tmp_path):
        ask(model, rows)
        (file,) = tmp_path.iterdir()
        file.write_bytes(damage(file.read_bytes()))
        ask(model, rows)
        assert ask.computed == 2
        assert "is damaged" in capsys.readouterr().err
        ask(model, rows)
    assert ask.computed == 2
