"""The CARD of a model: parameters, multiply-adds, bytes, hash."""

import hashlib

import pytest
import torch
from encoders import TYPES, tiny_encoder, tiny_tokenizer

from kdcli.deploy.sparse.compact import compact_model
from kdcli.models.card import describe, multiply_adds
from kdcli.models.load import save_model

LENGTH, WIDTH, FFN, WORDS = 128, 32, 128, 64


def test_parameters_of_a_bert_by_hand():
    card = describe(tiny_encoder("bert"), "tiny", None)
    layer = 4 * (WIDTH * WIDTH + WIDTH) + 2 * WIDTH * FFN + FFN + WIDTH + 2 * 2 * WIDTH
    embedding = (WORDS + 160 + 2) * WIDTH + 2 * WIDTH
    pooler = WIDTH * WIDTH + WIDTH
    assert (card.params_embedding, card.params_transformer) == (embedding, 2 * layer + pooler)
    assert (card.params_total, card.bytes) == (
        embedding + 2 * layer + pooler,
        4 * card.params_total,
    )
    assert card.sha256 is None
    assert (card.layers, card.hidden, card.ffn, card.heads) == (2, WIDTH, FFN, 4)


@pytest.mark.parametrize(("positions", "length"), [(160, LENGTH), (24, 24)])
def test_multiply_adds_of_a_bert_by_hand(positions, length):
    linears = length * (4 * WIDTH * WIDTH + 2 * WIDTH * FFN)
    attention = 2 * length * length * WIDTH
    pooler = WIDTH * WIDTH
    model = tiny_encoder("bert", max_position_embeddings=positions)
    # Compacting takes nothing out of a model without empty rows.
    assert (
        multiply_adds(model)
        == multiply_adds(compact_model(model))
        == 2 * (linears + attention) + pooler
    )


@pytest.mark.parametrize("kind", TYPES)
def test_every_type_is_described_and_left_as_it_was(kind):
    model = tiny_encoder(kind).train()
    attention = model.config._attn_implementation
    card = describe(model, kind, None)
    assert card.model_type == kind
    assert 0 < card.params_embedding < card.params_total
    assert card.multiply_adds > 2 * LENGTH * 3 * WIDTH * WIDTH
    assert model.training
    assert model.config._attn_implementation == attention


def test_zeros_are_not_counted():
    model = tiny_encoder("bert")
    before = describe(model, "tiny", None).params_nonzero
    with torch.no_grad():
        weight = model.encoder.layer[0].output.dense.weight
        gone = int(weight[:8].count_nonzero())
        weight[:8] = 0
    assert gone
    assert describe(model, "tiny", None).params_nonzero == before - gone


def test_bytes_and_hash_are_those_of_the_file(tmp_path):
    model = tiny_encoder("bert")
    save_model(model, tiny_tokenizer(), tmp_path)
    content = (tmp_path / "model.safetensors").read_bytes()
    card = describe(model, "tiny", tmp_path)
    assert (card.bytes, card.sha256) == (len(content), hashlib.sha256(content).hexdigest())


@pytest.mark.parametrize(
    ("dtype", "name"), [("float32", "fp32"), ("float16", "fp16"), ("bfloat16", "bf16")]
)
def test_the_dtype_of_the_file_is_recorded(tmp_path, dtype, name):
    tiny_encoder("bert").to(getattr(torch, dtype)).save_pretrained(tmp_path)
    card = describe(tiny_encoder("bert"), "tiny", tmp_path)
    assert card.held_in == name
    assert card.bytes == pytest.approx(getattr(torch, dtype).itemsize * card.params_total, rel=0.1)
