"""Choosing a student's layers by measurement."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from encoders import TYPES, tiny_encoder
from reading import logged_to

from kdcli.errors import UsageError
from kdcli.kept import keep_results
from kdcli.models.choose import (
    ROWS,
    Comparison,
    mean_pooling,
    measured_layers,
    rows_to_compare,
)
from kdcli.models.shape import shape_of

pytestmark = pytest.mark.slow


class Texts:
    """Rows of 4 ... 12 random tokens, with labels."""

    def __len__(self):
        return 300

    def batch(self, indices):
        ids_BL, real_BL = np.zeros((len(indices), 12), dtype=np.int64), []
        for row, n in enumerate(indices):
            draw = np.random.default_rng(int(n))
            ids_BL[row] = draw.integers(5, 64, size=12)
            real_BL.append(np.arange(12) < 4 + n % 9)
        mask_BL = torch.from_numpy(np.stack(real_BL)).long()
        return {"input_ids": torch.from_numpy(ids_BL), "attention_mask": mask_BL, "labels": mask_BL}


def comparison_with(teacher):
    return Comparison(teacher, rows_to_compare(Texts(), teacher.config, ROWS), mean_pooling)


@torch.no_grad()
def planted(idle):
    """A teacher of six layers, of which the layers in `idle` return their inputs."""
    torch.manual_seed(0)
    teacher = tiny_encoder("bert", num_hidden_layers=6, initializer_range=0.5)
    for n in idle:
        layer = teacher.encoder.layer[n - 1]
        for output in (layer.attention.output, layer.output):
            output.dense.weight.zero_()
            output.dense.bias.zero_()
    return teacher


@pytest.mark.parametrize("kept", [[1, 3, 5], [1, 2, 6], [3, 4, 5]])
def test_the_layers_that_change_something_are_kept(kept):
    idle = sorted({1, 2, 3, 4, 5, 6} - {*kept})
    lines = []
    with logged_to(lines):
        assert measured_layers(comparison_with(planted(idle)), 3) == kept
    assert f"layers {', '.join(map(str, kept))}: agreement 1.000" in lines[-1]


def test_a_search_changes_neither_the_teacher_nor_random_numbers():
    teacher = planted([2])
    before = {name: x.clone() for name, x in teacher.state_dict().items()}
    torch.manual_seed(3)
    drawn = torch.rand(1)
    torch.manual_seed(3)
    one, two = (measured_layers(comparison_with(teacher), 3) for _ in range(2))
    assert one == two
    assert torch.rand(1) == drawn
    assert all(torch.equal(x, before[name]) for name, x in teacher.state_dict().items())
    assert not teacher.training


def test_the_steps_of_a_run_search_once(tmp_path):
    lines = []
    with keep_results(tmp_path), logged_to(lines):
        one, two = (measured_layers(comparison_with(planted([2])), 3) for _ in range(2))
        assert one == two
        assert sum("choices)" in line for line in lines) == 1
        measured_layers(comparison_with(planted([2])), 2)
        measured_layers(comparison_with(planted([3])), 3)
        assert sum("choices)" in line for line in lines) == 3


@pytest.mark.parametrize("kind", TYPES)
def test_layers_are_chosen_in_every_model_type(kind):
    torch.manual_seed(0)
    teacher = tiny_encoder(kind, **({} if kind == "modernbert" else {"num_hidden_layers": 3}))
    layers = measured_layers(comparison_with(teacher), 2)
    # The first layer of [1, 3] takes its outputs from [1, 2].
    shape, shared = replace(shape_of(teacher.config), layers=2), comparison_with(teacher)
    shared.agreement(shape, [1, 2])
    alone = comparison_with(teacher).agreement(shape, [1, 3])
    assert shared.agreement(shape, [1, 3]) == pytest.approx(alone, abs=1e-5)
    assert layers == sorted(set(layers))
    assert len(layers) == 2
    assert 1 <= layers[0] < layers[1] <= teacher.config.num_hidden_layers


def test_students_are_farther_from_their_teacher_with_fewer_units():
    teacher = planted([])
    full, comparison = shape_of(teacher.config), comparison_with(teacher)
    assert comparison.cosine(full) == pytest.approx(1)
    cosines = [comparison.cosine(replace(full, ffn=full.ffn // part)) for part in (2, 8)]
    assert 1 > cosines[0] > cosines[1]


def test_too_few_texts_are_refused_and_constant_vectors_agree_least():
    teacher = planted([])
    rows = rows_to_compare(Texts(), teacher.config, ROWS)
    few = {name: x[:7] for name, x in rows.items()}
    with pytest.raises(UsageError, match="at least 8 training texts, but there are only 7"):
        Comparison(teacher, few, mean_pooling)
    eight = {name: x[:8] for name, x in rows.items()}
    comparison = Comparison(teacher, eight, lambda states, mask: torch.ones(len(mask), 3))
    assert comparison.agreement(shape_of(teacher.config), [1, 2, 3, 4, 5, 6]) == -1
