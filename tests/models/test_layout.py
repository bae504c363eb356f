"""Rows: which types are known, what the others get, and that each weight of a layer's linears is in
one matrix."""

import pytest
import torch
from encoders import TYPES, tiny_config, tiny_encoder
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    PreTrainedConfig,
    ViTConfig,
    Wav2Vec2Config,
    WhisperConfig,
)

from kdcli.errors import UsageError
from kdcli.models.layout import COMPACT_PATHS, MATRICES, layout_for, linears
from kdcli.models.matrices import matrices


class Unknown(PreTrainedConfig):
    model_type = "roberto"


DECODERS = [tiny_config("bert", is_decoder=True)]


@pytest.mark.parametrize(
    ("config", "message", "hint"),
    [
        *((config, "is a decoder or an encoder-decoder", "such as bert") for config in DECODERS),
        (ViTConfig(), "'vit' is a model of images; kdcli compresses text encoders only", "bert"),
        (WhisperConfig(), "'whisper' is a decoder or an encoder-decoder", "t5"),
        (Wav2Vec2Config(), "'wav2vec2' is a model of audio; kdcli compresses text", "bert"),
        (
            Unknown(),
            "unknown model type 'roberto': transformers",
            "newer version",
        ),
    ],
)
def test_a_model_that_is_no_encoder_with_a_row_is_refused(config, message, hint):
    with pytest.raises(UsageError, match=message) as caught:
        layout_for(config)
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize("kind", COMPACT_PATHS)
def test_the_saved_code_finds_the_same_parts_as_the_row(kind):
    row, (attention, output, up, down) = layout_for(tiny_config(kind)), COMPACT_PATHS[kind]
    assert (attention, up, down) == (row.q.rpartition(".")[0], row.up, row.down)
    assert output == (None if row.o.startswith(f"{attention}.") else row.o)


FURTHER = {"mobilebert": ("bottleneck", "ffn."), "convbert": ("conv_",)}
"""Linears of a layer that are not among the papers' six."""


@pytest.mark.parametrize("kind", TYPES)
def test_each_weight_of_the_layers_linears_is_in_one_matrix(kind):
    torch.manual_seed(0)
    model = tiny_encoder(kind)
    counts = {}
    for matrix in matrices(model):
        of = counts.setdefault(
            matrix.path, torch.zeros_like(model.get_submodule(matrix.path).weight)
        )
        of[slice(None) if matrix.rows is None else matrix.rows] += torch.ones(matrix.shape)
        assert matrix.numel == matrix.of(of).numel()
    assert all(bool((of == 1).all()) for of in counts.values())
    row = layout_for(model.config)
    layers = row.modules(model)
    assert all(tuple(linears(row, layer)) == MATRICES for layer in layers)
    inside = {
        id(m): n for layer in layers for n, m in layer.named_modules() if isinstance(m, nn.Linear)
    }
    missed = {inside[i] for i in inside} - {
        inside[id(model.get_submodule(path))] for path in counts
    }
    assert all(any(word in name for word in FURTHER.get(kind, ())) for name in missed), missed
    names = [m.name for m in matrices(model)]
    assert len(names) == len(set(names))


def test_bert_base_has_84_9_million_masked_weights_in_72_matrices():
    with torch.device("meta"):
        masked = matrices(BertModel(BertConfig()))
    assert (len(masked), sum(m.numel for m in masked)) == (72, 84_934_656)
    assert [m.name for m in masked[:7]] == ["1.Q", "1.K", "1.V", "1.O", "1.U", "1.D", "2.Q"]
