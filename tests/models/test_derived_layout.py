"""Layouts are derived from networks: the same as those written by hand, verified, or refused with
the step that failed."""

import logging
from dataclasses import asdict, replace

import pytest
import torch
from encoders import DERIVED, TYPES, on_disk, padded_batch, tiny_config, tiny_encoder
from transformers import (
    AutoModel,
    GPT2Config,
    PreTrainedModel,
    T5Config,
    T5Model,
)

from kdcli.cli.libraries import prepare_libraries
from kdcli.errors import UsageError
from kdcli.models.capture import capture
from kdcli.models.derived_layout import NotDerivedError, derive, small_copies
from kdcli.models.layout import Layout, layout_for
from kdcli.models.layout_cache import forget
from kdcli.models.load import load_encoder, save_model
from kdcli.models.shape import build_student, shape_of, shape_of_width
from kdcli.types import ModelShape, Needs

LLAMA = {
    "layers": "layers",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "up": "mlp.up_proj",
    "gate": "mlp.gate_proj",
    "down": "mlp.down_proj",
    "rotary": "halves",
    "embeddings": ("embed_tokens.",),
}
OFFSET = {"position_offset": True}
HOOKED = {"interface": False}
LEAKS = {"leaks": True}
FACTORISED = {"embeddings": ("embeddings.", "encoder.embedding_hidden_mapping_in.")}
DEBERTA = HOOKED | LEAKS | {"other_term": True}
ROWS = {
    "bert": {},
    "electra": {"embeddings": ("embeddings.", "embeddings_project.")},
    "ernie": {},
    "splinter": HOOKED,
    "roberta": OFFSET,
    "xlm-roberta": OFFSET,
    "xlm-roberta-xl": OFFSET,
    "camembert": OFFSET,
    "data2vec-text": OFFSET,
    "roberta-prelayernorm": OFFSET,
    # Rotary embeddings read no position ids, so nothing shows where these begin.
    "esm": LEAKS | {"rotary": "halves"},
    "mobilebert": LEAKS,
    "albert": FACTORISED
    | {
        "layers": "encoder.albert_layer_groups.0.albert_layers",
        "shared": True,
        "q": "attention.query",
        "k": "attention.key",
        "v": "attention.value",
        "o": "attention.dense",
        "up": "ffn",
        "down": "ffn_output",
    },
    "distilbert": {
        "layers": "transformer.layer",
        "ffn": "hidden_dim",
        "q": "attention.q_lin",
        "k": "attention.k_lin",
        "v": "attention.v_lin",
        "o": "attention.out_lin",
        "up": "ffn.lin1",
        "down": "ffn.lin2",
    },
    "modernbert": {
        "layers": "layers",
        "rotary": "halves",
        "local": True,
        "fused": "blocks",
        "q": "attn.Wqkv",
        "k": "attn.Wqkv",
        "v": "attn.Wqkv",
        "o": "attn.Wo",
        "up": "mlp.Wi",
        "gate": "mlp.Wi",
        "down": "mlp.Wo",
    },
    "eurobert": LLAMA,
    "nomic_bert": LLAMA | {"embeddings": ("embeddings.",)},
    "mpnet": HOOKED
    | OFFSET
    | {
        "other_term": True,
        "q": "attention.attn.q",
        "k": "attention.attn.k",
        "v": "attention.attn.v",
        "o": "attention.attn.o",
    },
    "deberta": DEBERTA
    | {
        "autocast": False,
        "fused": "heads",
        "q": "attention.self.in_proj",
        "k": "attention.self.in_proj",
        "v": "attention.self.in_proj",
        "like_q": ("attention.self.pos_proj", "attention.self.pos_q_proj"),
        "bias": ("attention.self.q_bias", "attention.self.v_bias"),
    },
    "deberta-v2": DEBERTA
    | {
        "q": "attention.self.query_proj",
        "k": "attention.self.key_proj",
        "v": "attention.self.value_proj",
        "like_q": ("attention.self.pos_key_proj", "attention.self.pos_query_proj"),
    },
    "roformer": HOOKED | {"rotary": "pairs", "positions": "encoder.embed_positions"},
    "convbert": HOOKED | LEAKS,
    "megatron-bert": HOOKED,
    "rembert": HOOKED | FACTORISED,
    "gte": LLAMA | {"embeddings": ("embeddings.",)},
    "jina_embeddings_v3": LLAMA
    | {"embeddings": ("embeddings.",), "up": "mlp.fc1", "gate": None, "down": "mlp.fc2"},
    "esmc": LLAMA,
    "ultrabert": LLAMA | LEAKS | {"local": True},
    "gemma3_text": LLAMA | LEAKS | {"local": True},
    "qwen3": LLAMA | LEAKS | {"causal": True},
    "roc_bert": {},
    "big_bird": HOOKED,
    "luke": HOOKED | OFFSET,
    "xmod": OFFSET | {"autocast": False},
}
"""Layouts, where they differ from BERT's. Reasons in words are only true or false here."""


@pytest.mark.parametrize("kind", ROWS)
def test_the_layout_is_what_its_authors_wrote(kind):
    assert {*TYPES, *DERIVED} < set(ROWS)
    row = asdict(derive(small_copies(tiny_config(kind))[0]))
    row |= {name: bool(row[name]) for name in ("leaks", "other_term")}
    expected = asdict(Layout(embeddings=("embeddings.",)))
    assert row == expected | {"leaks": False, "other_term": False} | ROWS[kind]


@pytest.mark.parametrize(
    ("kind", "key"), [("bert", "hidden_act"), ("gte", "hidden_act"), ("distilbert", "activation")]
)
def test_a_block_without_an_activation_has_the_same_parts(kind, key):
    assert layout_for(tiny_config(kind, **{key: "linear"})) == layout_for(tiny_config(kind))


@pytest.mark.parametrize("kind", ["bert", "albert", "modernbert", "mobilebert", "gte"])
def test_a_layout_does_not_depend_on_sizes(kind):
    narrow, own_widths = small_copies(tiny_config(kind))
    assert narrow.hidden_size != own_widths.hidden_size
    assert derive(narrow) == derive(own_widths)


def test_a_setting_without_a_name_changes_no_layout():
    assert layout_for(tiny_config("bert", **{"": 1})) == layout_for(tiny_config("bert"))


def test_a_derived_layout_is_logged_once(caplog):
    prepare_libraries(quiet=False, verbose=False)
    caplog.set_level(logging.INFO, "kdcli")
    forget()
    # The entries of very small models depend on their sizes.
    for width in (128, 128, 24):
        layout_for(tiny_config("gte", intermediate_size=width))
    assert [record.getMessage() for record in caplog.records] == [
        "gte: its layout was derived from the network and verified (layers layers, "
        "q self_attn.q_proj, k self_attn.k_proj, v self_attn.v_proj, o self_attn.o_proj, "
        "up mlp.up_proj, down mlp.down_proj)"
    ]


STATES = [
    (GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64), "q is made by a Conv1D"),
    (tiny_config("xlnet"), "its last hidden state is neither"),
    (tiny_config("fnet"), "no softmax over all tokens"),
    (tiny_config("longformer", attention_window=[8, 8]), "no softmax over all tokens"),
    (tiny_config("flaubert", emb_dim=32, n_layers=2, n_heads=4), "no feed-forward block"),
    (tiny_config("embedding_gemma2_text"), "its layers have different sizes"),
]
"""Models with states that can be used, and why their layers cannot."""


@pytest.mark.parametrize(("config", "step"), STATES, ids=[c.model_type for c, _ in STATES])
def test_the_states_of_a_model_with_unknown_layers_can_be_used(config, step):
    torch.manual_seed(0)
    model = AutoModel.from_config(config).eval()
    last = config.num_hidden_layers
    batch = padded_batch(model) if config.pad_token_id is not None else ids_of(model)
    run = capture(model, Needs(hidden=frozenset({last})))
    with torch.no_grad():
        torch.testing.assert_close(run(batch).hidden[last], model(**batch).last_hidden_state)
    with pytest.raises(UsageError, match=step) as caught:
        capture(model, Needs(hidden=frozenset({1})))
    assert f"cannot prune a '{config.model_type}' or make smaller ones" in str(caught.value)
    assert "--to static:256" in (caught.value.hint or "")
    shape = shape_of(config)
    assert (shape.layers, shape.hidden, shape.heads) == (2, 32, 4)
    with pytest.raises(UsageError, match=step):
        build_student(model, replace(shape, layers=1))


def ids_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(5, 60, (2, 10), generator=torch.Generator().manual_seed(1))}


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("dpr", "its output, a DPRQ.* has no last_hidden_state"),
        ("bros", "a small copy of it fails: ValueError: You have to specify bbox"),
        ("reformer", "its last_hidden_state has 64 values .* the hidden_size of .* is 32"),
    ],
)
def test_a_model_without_states_for_tokens_is_refused(kind, reason):
    with pytest.raises(UsageError, match=f"'{kind}': {reason}"):
        layout_for(tiny_config(kind))


def test_the_encoder_of_t5_is_loaded_and_its_students_too(tmp_path):
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2}
    config = T5Config(**sizes, num_heads=4, pad_token_id=0)
    folder = on_disk(T5Model(config), tmp_path / "whole")
    encoder = load_encoder(str(folder))
    assert type(encoder.model).__name__ == "T5EncoderModel"
    assert str(encoder.shape) == "2x32:64@4"
    student = build_student(encoder.model, replace(encoder.shape, layers=1, hidden=16)).model
    save_model(student, encoder.tokenizer, tmp_path / "student")
    again = load_encoder(str(tmp_path / "student"))
    batch = padded_batch(student)
    with torch.no_grad():
        own, reloaded = (m.eval()(**batch).last_hidden_state for m in (student, again.model))
    torch.testing.assert_close(own, reloaded)


def test_a_student_keeps_the_width_of_heads_that_is_its_own():
    teacher = tiny_encoder("qwen3")
    assert teacher.config.head_dim == 16
    same = build_student(teacher, shape_of(teacher.config)).model.eval()
    assert same.config.head_dim == 16
    batch = padded_batch(teacher)
    with torch.no_grad():
        one, other = (m(**batch).last_hidden_state for m in (teacher, same))
    torch.testing.assert_close(one, other)
    narrow = build_student(teacher, replace(shape_of(teacher.config), hidden=16)).model
    assert narrow.config.head_dim == 16
    assert narrow.layers[0].self_attn.q_proj.weight.shape == (64, 16)


def test_heads_that_are_rotated_in_part_keep_their_width():
    teacher = tiny_encoder("gpt_neox")
    shape = shape_of(teacher.config)
    with pytest.raises(UsageError, match="heads keep their width of 8") as caught:
        build_student(teacher, replace(shape, heads=8))
    assert caught.value.hint == "write 2x32@4"
    student = build_student(teacher, replace(shape, hidden=16, heads=2)).model
    assert student.layers[0].attention.query_key_value.weight.shape == (3 * 16, 16)
    assert shape_of_width(teacher.config, 1, 16) == ModelShape(1, 16, 64, 2)
    assert shape_of_width(tiny_config("bert"), 1, 16) == ModelShape(1, 16, 64, 4)
    assert shape_of_width(tiny_config("eurobert"), 1, 12) is None


@torch.no_grad()
@pytest.mark.parametrize("kind", ["glm", "qwen3"])
def test_a_student_without_the_heads_that_add_nothing_is_its_teacher(kind):
    teacher = tiny_encoder(kind)
    shape, width = shape_of(teacher.config), teacher.config.head_dim
    for layer in teacher.layers:
        # The second of two groups of two heads.
        layer.self_attn.o_proj.weight[:, 2 * width :] = 0
    student = build_student(teacher, replace(shape, heads=2)).model.eval()
    assert (student.config.num_key_value_heads, student.config.head_dim) == (1, width)
    batch = padded_batch(teacher)
    own, expected = (m(**batch).last_hidden_state for m in (student, teacher))
    torch.testing.assert_close(own, expected)


def test_deriving_changes_no_random_numbers():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    derive(small_copies(tiny_config("gte"))[0])
    assert torch.equal(torch.rand(4), expected)


def test_an_encoder_whose_own_code_fails_is_refused():
    config = tiny_config("gte", rope_parameters={"rope_type": "unknown", "rope_theta": 1.0})
    with pytest.raises(NotDerivedError, match="a small copy of it fails: KeyError: 'unknown'"):
        derive(small_copies(config)[0])
