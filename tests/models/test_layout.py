"""Rows: which types are known, what the others get, and that the six matrices of a layer are what they say."""

from __future__ import annotations

import pytest
import torch
from encoders import tiny_config, tiny_encoder
from transformers import GPT2Config, T5Config, ViTConfig

from kdcli.errors import UsageError
from kdcli.models.layout import LAYOUTS, MATRICES, layout_for, linears

TYPES = sorted(LAYOUTS)


@pytest.mark.parametrize("config", [GPT2Config(), T5Config(), tiny_config("bert", is_decoder=True)])
def test_a_decoder_is_told_so(config):
    with pytest.raises(UsageError, match="is a decoder or an encoder-decoder") as caught:
        layout_for(config)
    assert "albert, bert" in caught.value.hint


def test_an_encoder_without_a_row_is_told_how_to_add_one():
    with pytest.raises(UsageError, match="unknown model type 'vit'") as caught:
        layout_for(ViTConfig())
    assert "docs/add-a-model-type.md" in caught.value.hint


def test_albert_with_several_groups_is_refused():
    with pytest.raises(UsageError, match="several layer groups"):
        layout_for(tiny_config("albert", num_hidden_groups=2))


@pytest.mark.parametrize("kind", TYPES)
def test_the_six_matrices_of_a_layer_share_no_row(kind):
    model = tiny_encoder(kind)
    row = layout_for(model.config)
    for layer in row.modules(model):
        named = linears(row, layer)
        assert tuple(named) == MATRICES
        taken: dict[torch.nn.Linear, list[int]] = {}
        for pairs in named.values():
            for linear, rows in pairs:
                every = torch.arange(linear.out_features)
                taken.setdefault(linear, []).extend((every if rows is None else every[rows]).tolist())
        for linear, rows in taken.items():
            assert sorted(rows) == list(range(linear.out_features))


@pytest.mark.parametrize("kind", TYPES)
def test_every_prefix_of_the_embeddings_is_told_apart_from_the_layers(kind):
    model = tiny_encoder(kind)
    row = layout_for(model.config)
    names = [name for name, _ in model.named_parameters()]
    embeddings = [name for name in names if name.startswith(row.embeddings)]
    assert any(model.get_parameter(name) is model.get_input_embeddings().weight for name in embeddings)
    assert not [name for name in embeddings if name.startswith(f"{row.layers}.")]
