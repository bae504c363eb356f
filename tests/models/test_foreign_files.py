"""Files of a model that others made: whatever they hold, they are refused by name or loaded, within
bounds."""

import json
import struct
from pathlib import Path

import pytest

from kdcli.errors import UsageError
from kdcli.models.files import check_index
from kdcli.models.load import load_encoder

pytestmark = pytest.mark.slow

CONFIGS = {
    "unknown activation": ({"hidden_act": "gelu_nope"}, "gelu_nope"),
    "no heads": ({"num_attention_heads": 0}, "'num_attention_heads' must be at least 1"),
    "negative heads": ({"num_attention_heads": -1}, "'num_attention_heads' must be at least 1"),
    "no width": ({"hidden_size": 0}, "'hidden_size' must be at least 1"),
    "heads that do not divide": (
        {"num_attention_heads": 5},
        "not a multiple of the number of attention heads",
    ),
    "padding outside the vocabulary": ({"pad_token_id": 10**9}, "adding_idx"),
    "a word for the classes": (
        {"architectures": "x"},
        "'architectures' must be a list of names, got 'x'",
    ),
    "a number for UniLM": ({"unilm": 3}, "'unilm' must be a JSON object, got 3"),
    "labels in a list": ({"id2label": ["a", "b"]}, "'id2label' must be a JSON object, got"),
    "a number for code": ({"auto_map": 5}, "'auto_map' must be a JSON object, got 5"),
    "a number for the class": ({"architectures": [5]}, "'architectures' must be a list of names"),
    "quantised": ({"quantization_config": {"quant_method": "bnb"}}, "quantised weights"),
    "weights of another name": ({"transformers_weights": "x.bin"}, "transformers_weights"),
    "a billion layers": (
        {"num_hidden_layers": 10**9},
        "'num_hidden_layers' must be at least 1 and at most 1,000",
    ),
    "a vast vocabulary": ({"vocab_size": 10**12}, "'vocab_size' must be"),
    "wider than its weights": (
        {"hidden_size": 10**6, "num_attention_heads": 1},
        "declares .* parameters, but its weights",
    ),
    "more words than its weights": (
        {"vocab_size": 10**7},
        "declares .* parameters, but its weights",
    ),
    "a kernel of the hub": (
        {"attn_implementation": "owner/kernel"},
        "'attn_implementation' must be absent",
    ),
    "a kernel, older key": (
        {"_attn_implementation": "owner/kernel"},
        "'_attn_implementation' must be absent",
    ),
    "attention that is downloaded": (
        {"attn_implementation": "flash_attention_2"},
        "must be absent",
    ),
    "a key that replaces a method": ({"to_dict": 5}, "'to_dict' is not a setting"),
    "a key that renames others": (
        {"attribute_map": {"hidden_size": "x"}},
        "'attribute_map' is not a setting",
    ),
    "not a number": ({"hidden_dropout_prob": float("nan")}, "must be a finite number"),
    "dropout above one": ({"hidden_dropout_prob": 7.5}, "dropout"),
    "chunks": ({"chunk_size_feed_forward": 7}, "'chunk_size_feed_forward' must be 0"),
    "attention over blocks": ({"model_type": "big_bird"}, "switches itself off after a short text"),
    "a flag that is a list": ({"output_hidden_states": ["a"]}, "must be true or false"),
    "label words without ids": ({"label_words": {}}, "'label_words.ids' is missing"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_configuration_that_cannot_be_built_is_refused_by_name(case, model_dir):
    changes, message = CONFIGS[case]
    file = model_dir / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | changes), "utf-8")
    with pytest.raises(UsageError, match=message) as caught:
        load_encoder(str(model_dir))
    assert str(model_dir) in caught.value.message
    assert "\n" not in caught.value.message


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", DEEP, "is nested deeper"),
        ("tokenizer.json", DEEP, "is nested deeper"),
        ("tokenizer_config.json", DEEP, "is nested deeper"),
        ("special_tokens_map.json", DEEP, "is nested deeper"),
        ("config.json", '{"a": ' + "[" * 40 + "]" * 40 + "}", "is nested deeper"),
        ("tokenizer.json", f'{{"a": {"1" * 5000}}}', "is not valid JSON"),
        ("config.json", '{"a": "\\ud800"}', "is not valid JSON"),
    ],
)
def test_json_that_is_deep_or_no_text_is_refused_by_name(name, content, message, model_dir):
    (model_dir / name).write_text(content, "utf-8")
    with pytest.raises(UsageError, match=rf"{name} {message}"):
        load_encoder(str(model_dir))


TOKENIZERS = {
    "an id that is no number": ("tokenizer.json", ["model", "vocab", "w4"], 1.5),
    "no model": ("tokenizer.json", ["model"], {}),
    "another decoder": ("tokenizer.json", ["decoder"], 10**20),
    "a length that is text": ("tokenizer_config.json", ["model_max_length"], "512"),
    "a class that is a number": ("tokenizer_config.json", ["tokenizer_class"], 5),
}


@pytest.mark.parametrize("case", TOKENIZERS)
def test_a_tokenizer_that_does_not_work_is_refused(case, model_dir):
    name, path, value = TOKENIZERS[case]
    inside = tree = json.loads((model_dir / name).read_text("utf-8"))
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    (model_dir / name).write_text(json.dumps(tree), "utf-8")
    with pytest.raises(
        UsageError, match=f"the tokenizer of {model_dir} (cannot be|has the model_max)"
    ):
        load_encoder(str(model_dir))


def replaces(pattern, content):
    return {"type": "Replace", "pattern": pattern, "content": content}


def splits(pattern):
    step = {"type": "Split", "pattern": {"Regex": pattern}}
    return step | {"behavior": "Isolated", "invert": False}


def sequence(key, *steps):
    return {"type": "Sequence", key: list(steps)}


def template(pieces, ids=(2,)):
    token = {"id": "[CLS]", "ids": list(ids), "tokens": ["[CLS]"] * len(ids)}
    tokens = {"type": "TemplateProcessing", "special_tokens": {"[CLS]": token}}
    return tokens | {
        "single": list(pieces),
        "pair": [TEXT, {"Sequence": {"id": "B", "type_id": 0}}],
    }


CLS, TEXT = (
    {"SpecialToken": {"id": "[CLS]", "type_id": 0}},
    {"Sequence": {"id": "A", "type_id": 0}},
)
WORDS = {"type": "WordPiece", "unk_token": "[UNK]", "vocab": {"[UNK]": 1}}
WORDS |= {"continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
GROWS = "makes some texts more than 100 times as long"
STEPS = {
    "a letter doubled": (
        "normalizer",
        sequence("normalizers", *[replaces({"String": "w"}, "ww")] * 40),
        GROWS,
    ),
    "any character doubled": (
        "normalizer",
        sequence("normalizers", *[replaces({"Regex": "."}, "xx")] * 40),
        GROWS,
    ),
    "an empty pattern": ("normalizer", replaces({"String": ""}, "x" * 999), GROWS),
    "bytes of bytes": (
        "pre_tokenizer",
        sequence(
            "pretokenizers",
            *[
                {
                    "type": "ByteLevel",
                    "add_prefix_space": True,
                    "trim_offsets": True,
                    "use_regex": True,
                }
            ]
            * 40,
        ),
        GROWS,
    ),
    "a long prefix": (
        "normalizer",
        {"type": "Prepend", "prepend": "w" * 1001},
        "prepend has 1,001 characters, at most 1,000 are allowed",
    ),
    "many steps": (
        "normalizer",
        sequence("normalizers", *[{"type": "NFC"}] * 1001),
        "has 1,001 steps in a row, at most 1,000 are allowed",
    ),
    "a long prefix of pieces": (
        "model",
        WORDS | {"continuing_subword_prefix": "#" * 5000},
        "continuing_subword_prefix has 5,000 characters",
    ),
    "words of any length": (
        "model",
        WORDS | {"max_input_chars_per_word": 10**12},
        "max_input_chars_per_word must be at most 10,000, got 1,000,000,000,000",
    ),
    "random pieces": (
        "model",
        {"type": "BPE", "vocab": {"[UNK]": 1}, "merges": [], "dropout": 0.5},
        r"tokenises at random \(dropout=0.5\)",
    ),
    "a template of many tokens": (
        "post_processor",
        template([*[CLS] * 50, TEXT], ids=[2] * 100),
        "'single' of its post_processor adds 5,000 tokens, at most 1,000 are allowed",
    ),
    "a template that repeats the text": (
        "post_processor",
        sequence("processors", *[template([TEXT, TEXT])] * 40),
        "may contain the texts A once each, got A, A",
    ),
    "a template without a second text": (
        "post_processor",
        template([{"Sequence": {"id": "B", "type_id": 0}}]),
        "may contain the texts A once each, got B",
    ),
    "a pattern that takes forever": ("pre_tokenizer", splits("(w+)+$"), "cannot be loaded"),
    "pieces of no length": (
        "pre_tokenizer",
        {"type": "FixedLength", "length": 0},
        "cannot be loaded",
    ),
    "a damaged table": (
        "normalizer",
        {"type": "Precompiled", "precompiled_charsmap": "AAAA////AAAA"},
        "cannot be loaded: its precompiled_charsmap is damaged",
    ),
}


@pytest.mark.parametrize("case", STEPS)
def test_a_tokenizer_that_would_take_all_time_or_memory_is_refused(case, model_dir):
    key, value, message = STEPS[case]
    file = model_dir / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | {key: value}), "utf-8")
    with pytest.raises(UsageError, match=message):
        load_encoder(str(model_dir))


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("added_tokens.json", None),
        ("tokenizer_config.json", "extra_special_tokens"),
        ("tokenizer.json", "added_tokens"),
    ],
)
def test_more_added_tokens_than_any_tokenizer_has_are_refused(name, key, model_dir):
    tokens = [f"x{n}" for n in range(20_001)]
    file = model_dir / name
    tree = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    file.write_text(json.dumps(tree | ({key: tokens} if key else dict.fromkeys(tokens, 70))))
    with pytest.raises(UsageError, match=rf"{name} has 20,001 added tokens, at most 20,000"):
        load_encoder(str(model_dir))


@pytest.mark.parametrize("role", ["pad_token", "cls_token", "sep_token"])
def test_a_special_token_without_an_embedding_is_refused(role, model_dir):
    file = model_dir / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | {role: "other"}), "utf-8")
    with pytest.raises(UsageError, match="the model has only 64: it lacks 'other'"):
        load_encoder(str(model_dir))


def test_a_file_larger_than_a_configuration_is_not_read(model_dir):
    with (model_dir / "config.json").open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(UsageError, match=r"config\.json is larger than 10,000,000 bytes"):
        load_encoder(str(model_dir))


def link(folder: Path) -> str:
    (folder.parent / "outside.safetensors").write_bytes(b"")
    (folder / "link.safetensors").symlink_to(folder.parent / "outside.safetensors")
    return "link.safetensors"


SHARDS = (
    "x.bin",
    "../outside.safetensors",
    "/outside.safetensors",
    "sub/x.safetensors",
    link,
    "\0.safetensors",
    5,
    "",
)


@pytest.mark.parametrize("shard", SHARDS)
def test_an_index_names_only_safetensors_files_of_its_directory(shard, model_dir):
    name = shard(model_dir) if callable(shard) else shard
    (model_dir / "model.safetensors").rename(model_dir / "x.bin")
    index = model_dir / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"embeddings.x": name}}), "utf-8")
    with pytest.raises(UsageError, match=r"index\.json (names|has no weight_map)"):
        load_encoder(str(model_dir))


@pytest.mark.parametrize("shards", [None, {}, 5])
def test_an_index_without_shards_is_refused(shards, model_dir):
    (model_dir / "model.safetensors").unlink()
    (model_dir / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": shards}), "utf-8"
    )
    with pytest.raises(UsageError, match="has no weight_map"):
        load_encoder(str(model_dir))


@pytest.mark.parametrize("of_metadata", [{}, {"metadata": "x"}])
def test_an_index_without_metadata_is_refused(of_metadata, model_dir):
    (model_dir / "model.safetensors").rename(model_dir / "model-1.safetensors")
    index = {"weight_map": {"embeddings.LayerNorm.bias": "model-1.safetensors"}} | of_metadata
    (model_dir / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    with pytest.raises(UsageError, match="has no metadata"):
        load_encoder(str(model_dir))


def test_links_of_the_hubs_cache_stay_within_the_model(tmp_path):
    snapshot, blobs = (
        tmp_path / "models--a--b" / "snapshots" / "c0ffee",
        tmp_path / "models--a--b" / "blobs",
    )
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "1").write_bytes(b"")
    (snapshot / "model-1.safetensors").symlink_to("../../blobs/1")
    index = snapshot / "model.safetensors.index.json"
    index.write_text('{"metadata": {}, "weight_map": {"a": "model-1.safetensors"}}', "utf-8")
    check_index(index)


def test_an_adapter_is_not_taken_for_a_model(model_dir):
    (model_dir / "adapter_config.json").write_text(
        '{"base_model_name_or_path": "elsewhere"}', "utf-8"
    )
    with pytest.raises(UsageError, match="holds an adapter"):
        load_encoder(str(model_dir))


HEADERS = {
    "longer than the file": struct.pack("<Q", 2**40),
    "longer than any": struct.pack("<Q", 2**63),
    "no JSON": struct.pack("<Q", 2) + b"{]",
    "another type": (b'{"a":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}}', b"1234"),
    "offsets beyond the end": (
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,400]}}',
        b"1234",
    ),
    "a shape that overflows": (
        b'{"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]}}',
        b"1234",
    ),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_damaged_header_of_weights_is_refused_by_name(case, model_dir):
    header = HEADERS[case]
    data = (
        header
        if isinstance(header, bytes)
        else struct.pack("<Q", len(header[0])) + b"".join(header)
    )
    (model_dir / "model.safetensors").write_bytes(data)
    with pytest.raises(UsageError, match=r"model\.safetensors is damaged"):
        load_encoder(str(model_dir))
