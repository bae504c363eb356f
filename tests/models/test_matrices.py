"""The matrices that pruning masks: each weight of a layer's linears once, fused linears taken apart."""

from __future__ import annotations

import pytest
import torch
from encoders import tiny_encoder
from torch import nn
from transformers import BertConfig, BertModel

from kdcli.models.layout import LAYOUTS, layout_for
from kdcli.models.matrices import matrices

FURTHER = {"mobilebert": ("bottleneck", "ffn."), "convbert": ("conv_",)}
"""Linears of a layer that are none of the papers' six."""


@pytest.mark.parametrize("kind", sorted(LAYOUTS))
def test_each_weight_of_the_layers_linears_is_in_one_matrix(kind):
    torch.manual_seed(0)
    model = tiny_encoder(kind)
    counts = {}
    for matrix in matrices(model):
        of = counts.setdefault(matrix.path, torch.zeros_like(model.get_submodule(matrix.path).weight))
        part = torch.ones(matrix.shape)
        if matrix.rows is None:
            of += part
        else:
            of[matrix.rows] += part
        assert matrix.numel == matrix.of(of).numel() == part.numel()
    assert all(bool((of == 1).all()) for of in counts.values())
    layers = layout_for(model.config).modules(model)
    inside = {id(m): n for layer in layers for n, m in layer.named_modules() if isinstance(m, nn.Linear)}
    missed = {inside[i] for i in inside} - {inside[id(model.get_submodule(path))] for path in counts}
    assert all(any(word in name for word in FURTHER.get(kind, ())) for name in missed), missed
    names = [m.name for m in matrices(model)]
    assert len(names) == len(set(names))


def test_bert_base_has_84_9_million_masked_weights_in_72_matrices():
    with torch.device("meta"):
        found = matrices(BertModel(BertConfig()))
    assert len(found) == 72
    assert sum(m.numel for m in found) == 84_934_656
    assert [m.name for m in found[:7]] == ["1.Q", "1.K", "1.V", "1.O", "1.U", "1.D", "2.Q"]


def test_the_parts_of_fused_linears_are_what_the_model_splits_them_into():
    torch.manual_seed(0)
    model = tiny_encoder("modernbert")
    by_name = {m.name: m for m in matrices(model)}
    wi, hidden = by_name["1.U"].linear, torch.randn(3, model.config.hidden_size)
    through_activation, other = wi(hidden).chunk(2, dim=-1)
    assert torch.allclose(hidden @ by_name["1.G"].of(wi.weight).T, through_activation, atol=1e-6)
    assert torch.allclose(hidden @ by_name["1.U"].of(wi.weight).T, other, atol=1e-6)
    assert by_name["1.Q"].shape == by_name["1.K"].shape == by_name["1.V"].shape
