"""Loading and saving: what cannot be used is refused with a reason, nothing that comes with a model
is run."""

import json
import shlex
from pathlib import Path

import pytest
import torch
from encoders import (
    assert_same_state,
    on_disk,
    padded_batch,
    tiny_config,
    tiny_encoder,
    tiny_tokenizer,
    write_own_code,
)
from hub_server import COMMIT, hub  # noqa: F401
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
)

from kdcli.custom_code import custom_code
from kdcli.errors import UsageError
from kdcli.models.load import load_encoder, save_model

pytestmark = pytest.mark.slow


def change(folder: Path, name: str, **keys: object) -> None:
    """Set keys of a JSON file."""
    file = folder / name
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | keys), "utf-8")


def pickled(folder: Path) -> None:
    torch.save(load_encoder(str(folder)).model.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def without_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


def one_shard_missing(folder: Path) -> None:
    names = load_encoder(str(folder)).model.state_dict()
    shards = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": shards}), "utf-8"
    )


def unfinished_run(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "recipe.yaml").touch()
    (folder / "log.jsonl").touch()


def finished_run(folder: Path) -> None:
    unfinished_run(folder)
    (folder / "report.json").touch()


def spoil_weight(folder):
    weights = load_file(folder / "model.safetensors")
    next(w for name, w in weights.items() if "word_embeddings" in name)[0, 0] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def add_distances(folder):
    """transformers 5 has no relative positions in BERT."""
    weights = load_file(folder / "model.safetensors")
    weights["encoder.layer.0.attention.self.distance_embedding.weight"] = torch.ones(9, 8)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def adapter_alone(folder):
    (folder / "config.json").rename(folder / "adapter_config.json")


BAD = {
    "no config": (lambda d: (d / "config.json").unlink(), "has no config.json"),
    "unfinished run": (unfinished_run, "is an unfinished run and has no model yet"),
    "finished run without a model": (finished_run, "has no config.json"),
    "config is no JSON": (
        lambda d: (d / "config.json").write_text("{nope"),
        "is not valid JSON: .* line 1 column 2",
    ),
    "config is a list": (
        lambda d: (d / "config.json").write_text("[]"),
        "must hold a JSON object, not a list",
    ),
    "config is empty": (lambda d: (d / "config.json").write_text("{}"), "has no model_type"),
    "wrong type of value": (
        lambda d: change(d, "config.json", hidden_size="wide"),
        "'hidden_size' expected int",
    ),
    "unknown type": (
        lambda d: change(d, "config.json", model_type="brt"),
        "unknown model type 'brt': transformers",
    ),
    "causal decoder": (
        lambda d: change(d, "config.json", model_type="gpt2"),
        "weights of .* are incomplete",
    ),
    "sequence to sequence": (
        lambda d: change(d, "config.json", model_type="t5"),
        "cannot be used: Validation error for field 'classifier_dropout'",
    ),
    "bert as decoder": (lambda d: change(d, "config.json", is_decoder=True), "'bert' is a decoder"),
    "other width": (
        lambda d: change(d, "config.json", hidden_size=16),
        "do not fit its config.json: 67 tensors have other sizes, for example",
    ),
    "more layers": (
        lambda d: change(d, "config.json", num_hidden_layers=5),
        "incomplete: 16 tensors are missing",
    ),
    "fewer layers": (
        lambda d: change(d, "config.json", num_hidden_layers=3),
        "of another network than transformers' BertModel, which would ignore 16 tensors",
    ),
    "positions of another network": (add_distances, "would ignore 1 tensors of its encoder"),
    "adapter alone": (adapter_alone, "holds an adapter"),
    "weights with NaN": (spoil_weight, "hold NaN or infinity, for example .*embeddings.*weight"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "has no model.safetensors"),
    "pickled weights": (pickled, r"weights as a pickle \(pytorch_model.bin\)"),
    "missing shard": (
        one_shard_missing,
        "cannot be read: No such file .*model-00002-of-00002.safetensors",
    ),
    "no tokenizer": (without_tokenizer, "has no tokenizer"),
    "half a tokenizer": (
        lambda d: (d / "tokenizer.json").unlink(),
        "tokenizer of .* cannot be loaded",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_directory_that_cannot_be_used_says_why(case, model_dir):
    spoil, message = BAD[case]
    spoil(model_dir)
    with pytest.raises(UsageError, match=message) as caught:
        load_encoder(str(model_dir))
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("source", ["/no/such/directory", "./nowhere", "a/b/c", "a-model/"])
def test_a_directory_that_is_not_there(source):
    with pytest.raises(UsageError, match=f"no model directory {source}") as caught:
        load_encoder(source)
    assert "demo" in caught.value.hint


def test_a_file_is_no_model(model_dir):
    for name in ("config.json", "sub/model.onnx"):
        file = model_dir / name
        file.parent.mkdir(exist_ok=True)
        file.touch()
        with pytest.raises(UsageError, match="is a file, and a model is a directory") as caught:
            load_encoder(str(file))
        assert caught.value.hint == f"give its directory: {model_dir}"


def test_a_gliner_directory_is_named(model_dir):
    (model_dir / "config.json").rename(model_dir / "gliner_config.json")
    with pytest.raises(UsageError, match="is a GLiNER model") as caught:
        load_encoder(str(model_dir))
    assert "model_name" in (caught.value.hint or "")


def test_the_command_in_the_hint_converts_a_pickle(model_dir):
    before = load_encoder(str(model_dir)).model
    pickled(model_dir)
    with pytest.raises(UsageError) as caught:
        load_encoder(str(model_dir))
    python, option, code = shlex.split(caught.value.hint.split("code: ")[1])
    assert (python, option) == ("python", "-c")
    exec(code, {})
    assert_same_state(load_encoder(str(model_dir)).model, before)


def with_code(folder: Path, marker: Path, model_type: str) -> None:
    """Give a model code of its own, which would leave a file behind when it runs."""
    auto = {"AutoConfig": "modeling_mine.MineConfig", "AutoModel": "modeling_mine.MineModel"}
    change(folder, "config.json", model_type=model_type, auto_map=auto)
    (folder / "modeling_mine.py").write_text(
        f"open({str(marker)!r}, 'w').close()\n"
        "from transformers import BertConfig, BertModel\n"
        f"class MineConfig(BertConfig):\n    model_type = {model_type!r}\n"
        "class MineModel(BertModel):\n    config_class = MineConfig\n"
    )


def test_code_that_comes_with_a_model_is_not_run_by_default(model_dir, tmp_path):
    marker = tmp_path / "it-ran"
    with_code(model_dir, marker, "mine")
    with pytest.raises(UsageError, match="brings code of its own") as caught:
        load_encoder(str(model_dir))
    assert "--trust-remote-code" in caught.value.hint
    assert not marker.exists()
    with custom_code(True):
        assert type(load_encoder(str(model_dir)).model).__name__ == "MineModel"
    assert marker.exists()


def test_code_beside_a_known_type_is_not_ignored(model_dir, tmp_path):
    """Decoders of known types are made bidirectional by such code."""
    with_code(model_dir, tmp_path / "it-ran", "bert")
    with pytest.raises(UsageError, match="brings code of its own") as caught:
        load_encoder(str(model_dir))
    assert "--trust-remote-code" in caught.value.hint
    assert not (tmp_path / "it-ran").exists()


def test_code_of_a_tokenizer_is_not_ignored(model_dir, tmp_path):
    """Such code adds end tokens, for example."""
    marker = tmp_path / "it-ran"
    auto_map = {"AutoTokenizer": [None, "tokenization_mine.MineTokenizerFast"]}
    change(model_dir, "tokenizer_config.json", auto_map=auto_map)
    (model_dir / "tokenization_mine.py").write_text(
        f"open({str(marker)!r}, 'w').close()\n"
        "from transformers import PreTrainedTokenizerFast\n"
        "class MineTokenizerFast(PreTrainedTokenizerFast):\n    pass\n"
    )
    with pytest.raises(UsageError, match=r"the tokenizer of .* brings code of its own") as caught:
        load_encoder(str(model_dir))
    assert "--trust-remote-code" in caught.value.hint
    assert not marker.exists()
    with custom_code(True):
        loaded = load_encoder(str(model_dir))
    assert type(loaded.tokenizer).__name__ == "MineTokenizerFast"
    save_model(loaded.model, loaded.tokenizer, tmp_path / "saved")
    assert (tmp_path / "saved" / "tokenization_mine.py").exists()
    with custom_code(True):
        assert type(load_encoder(str(tmp_path / "saved")).tokenizer).__name__ == "MineTokenizerFast"


@pytest.mark.slow
@pytest.mark.parametrize("scaling", [None, {"type": "ntk", "factor": 8.0}])
def test_own_code_of_a_known_network_needs_no_trust(scaling, tmp_path):
    folder = write_own_code("blocks", tmp_path / "model", rope_theta=500.0, rope_scaling=scaling)
    change(folder, "config.json", hidden_act="gelu", type_vocab_size=1)
    with custom_code(True):
        own = load_encoder(str(folder)).model
    # The same directory, as it is on the hub.
    change(folder, "config.json", model_type="new")
    twin = load_encoder(str(folder)).model
    assert type(twin).__module__ == "transformers.models.gte.modeling_gte"
    batch = padded_batch(own, length=60)
    with torch.no_grad():
        one, two = (model(**batch).last_hidden_state for model in (own, twin))
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(one[real], two[real], atol=1e-5, rtol=1e-4)
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"classifier.weight": torch.ones(2, 32)}, folder / "model.safetensors")
    assert type(load_encoder(str(folder)).model) is type(twin)
    lacking = {n: t for n, t in weights.items() if "layer.1.mlp.down" not in n}
    save_file(lacking, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UsageError, match="2 tensors are missing"):
        load_encoder(str(folder))
    # Another version of the code.
    more = weights | {"encoder.extra": torch.ones(2)}
    save_file(more, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UsageError, match="brings code of its own") as caught:
        load_encoder(str(folder))
    assert "add --trust-remote-code" in (caught.value.hint or "")
    with custom_code(True):
        assert type(load_encoder(str(folder)).model) is type(own)


def test_a_classifier_of_the_known_network_is_read_without_its_head(tmp_path):
    torch.manual_seed(0)
    whole = AutoModelForSequenceClassification.from_config(tiny_config("gte")).eval()
    encoder = load_encoder(str(on_disk(whole, tmp_path))).model
    batch = padded_batch(encoder)
    with torch.no_grad():
        own, wanted = (m(**batch).last_hidden_state for m in (encoder, whole.base_model))
    torch.testing.assert_close(own, wanted)


def test_a_network_that_transformers_lacks_is_no_twin(tmp_path):
    folder = write_own_code("blocks", tmp_path / "model")
    for setting in (
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {"logn_attention_scale": True},
    ):
        change(folder, "config.json", model_type="new", **setting)
        with pytest.raises(UsageError, match="brings code of its own"):
            load_encoder(str(folder))


def test_code_that_transformers_has_had_since_is_not_needed(tmp_path):
    folder = on_disk(tiny_encoder("nomic_bert"), tmp_path / "model")
    change(folder, "config.json", auto_map={"AutoModel": "modeling_hf_nomic_bert.NomicBertModel"})
    assert type(load_encoder(str(folder)).model).__module__.startswith("transformers.")


def test_weights_are_float32_and_eval_whatever_the_checkpoint_holds(tmp_path):
    save_model(tiny_encoder("bert").to(torch.bfloat16), tiny_tokenizer(), tmp_path)
    model = load_encoder(str(tmp_path)).model
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not model.training


def test_a_pooler_that_a_checkpoint_lacks_is_drawn_alike_each_time(model_dir):
    weights = load_file(model_dir / "model.safetensors")
    kept = {k: t for k, t in weights.items() if "pooler" not in k}
    save_file(kept, model_dir / "model.safetensors", {"format": "pt"})
    state = torch.get_rng_state()
    first = load_encoder(str(model_dir)).model.state_dict()
    torch.manual_seed(5)
    second = load_encoder(str(model_dir)).model.state_dict()
    assert any("pooler" in k for k in first)
    assert all(torch.equal(first[k], second[k]) for k in first)
    torch.set_rng_state(state)
    load_encoder(str(model_dir))
    assert torch.equal(torch.get_rng_state(), state), "what is drawn here moves nothing else"


def test_what_is_saved_is_a_stock_directory(tmp_path):
    model, folder = tiny_encoder("bert"), tmp_path / "new" / "place"
    save_model(model, tiny_tokenizer(), folder)
    files = {p.name for p in folder.iterdir()}
    assert files == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert len({p.stat().st_mode for p in folder.iterdir()}) == 1
    assert_same_state(AutoModel.from_pretrained(folder), model)
    assert "kd_capture" not in (folder / "config.json").read_text("utf-8")


LEFT = {
    "finetuning_task": "topic",
    "transformers.js_config": {"dtype": "q8"},
    "kdcli_task": "topic",
    "problem_type": "single_label_classification",
    "id2label": {0: "topic-0", 1: "topic-1", 2: "topic-2"},
    "label2id": {"topic-0": 0, "topic-1": 1, "topic-2": 2},
}


@pytest.mark.parametrize(
    ("auto", "kept"),
    [
        (AutoModel, set()),
        (AutoModelForMaskedLM, set()),
        (
            AutoModelForSequenceClassification,
            {"kdcli_task", "problem_type", "id2label", "label2id"},
        ),
    ],
)
def test_a_model_keeps_no_settings_of_the_model_that_it_was_made_from(auto, kept, tmp_path):
    config = tiny_config("bert", num_hidden_layers=1)
    for key, value in LEFT.items():
        setattr(config, key, value)
    model = auto.from_config(config)
    save_model(model, tiny_tokenizer(), tmp_path / "model")
    saved = json.loads((tmp_path / "model" / "config.json").read_text("utf-8"))
    assert {key for key in LEFT if key in saved} == kept
    # Saving changes nothing of a model that is still in use.
    assert model.config.id2label == LEFT["id2label"]
    again = auto.from_pretrained(tmp_path / "model")
    assert again.config.num_labels == (3 if kept else 2)
    assert_same_state(model, again)


@pytest.mark.parametrize(
    "cut", [None, {"max_length": 32, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}]
)
def test_a_tokenizer_is_saved_as_it_was_loaded_whatever_it_tokenised(cut, model_dir, tmp_path):
    file = model_dir / "tokenizer.json"
    tree = json.loads(file.read_text("utf-8"))
    padding = (
        None
        if cut is None
        else {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None}
    )
    padding = padding and padding | {"pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]"}
    file.write_text(json.dumps(tree | {"truncation": cut, "padding": padding}), "utf-8")
    loaded = load_encoder(str(model_dir))
    loaded.tokenizer(["a b", "c"], truncation=True, max_length=3, padding=True)
    loaded.tokenizer.model_max_length = 24
    save_model(loaded.model, loaded.tokenizer, tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "tokenizer.json").read_text("utf-8"))
    # Padding of a fixed length would not follow the truncation.
    padding = padding and padding | {"strategy": "BatchLongest"}
    assert (saved["truncation"], saved["padding"]) == (cut and cut | {"max_length": 24}, padding)
    settings = json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text("utf-8"))
    assert {value for key, value in settings.items() if key.endswith("max_length")} == {24}
    # The truncation fits the model, whatever the tokenizer's settings say.
    loaded.tokenizer.model_max_length = 1000
    save_model(loaded.model, loaded.tokenizer, tmp_path / "longer")
    saved = json.loads((tmp_path / "longer" / "tokenizer.json").read_text("utf-8"))
    positions = loaded.model.config.max_position_embeddings
    assert saved["truncation"] == (cut and cut | {"max_length": positions})


def test_a_pickled_model_leads_to_the_pull_request_with_safetensors(hub, model_dir, tmp_path):  # noqa: F811
    hub.add("someone/pickled", model_dir)
    files = hub.repositories["someone/pickled"]
    converted = dict(files)
    files["pytorch_model.bin"] = files.pop("model.safetensors")
    # The last one changes something else.
    hub.pull_requests["someone/pickled"] = {3: dict(files), 10: converted, 11: dict(files)}
    with hub.known(tmp_path):
        with pytest.raises(UsageError, match="as a pickle") as caught:
            load_encoder("someone/pickled")
        assert (
            "see on the hub who made it (someone/pickled/discussions/10), "
            "then give someone/pickled@refs/pr/10"
        ) in (caught.value.hint or "")
        loaded = load_encoder("someone/pickled@refs/pr/10").model
    assert_same_state(loaded, load_encoder(str(model_dir)).model)
    assert not [path for _, path in hub.asked if path.endswith(".bin")]


def test_a_hub_gives_a_model_once_or_one_error(hub, model_dir, tmp_path):  # noqa: F811
    cases = {
        "pickled": r"someone/pickled has its weights as a pickle \(pytorch_model.bin\)",
        "gated": "model 'someone/gated' is on the hub, but you have no access to it",
        "speechless": "someone/speechless has no tokenizer",
        "broken": "the weights of someone/broken cannot be read: peer closed connection",
        "tagger": "someone/tagger is a GLiNER model",
        "bare": "someone/bare has no config.json, so it is not a model",
        "absent": "model 'someone/absent' was found neither as a directory, "
        "nor in the Hugging Face cache",
    }
    for name in ("tiny-bert", *cases):
        hub.add(f"someone/{name}", model_dir)
    files = hub.repositories["someone/pickled"]
    files["pytorch_model.bin"] = files.pop("model.safetensors")
    hub.gated.add("someone/gated")
    files = hub.repositories["someone/tagger"]
    del hub.repositories["someone/bare"]["config.json"]
    files["gliner_config.json"] = files.pop("config.json")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        del hub.repositories["someone/speechless"][name]
    hub.broken.add("someone/broken/model.safetensors")
    del hub.repositories["someone/absent"]
    with hub.known(tmp_path):
        first = load_encoder("someone/tiny-bert")
        for name, message in cases.items():
            with pytest.raises(UsageError, match=f"^{message}") as caught:
                load_encoder(f"someone/{name}")
            at_pull_request = f"give someone/{name}@refs/pr/N" in (caught.value.hint or "")
            assert at_pull_request == (name == "pickled")
    assert_same_state(first.model, load_encoder(str(model_dir)).model)
    assert (str(first.shape), len(first.tokenizer)) == ("4x32:128@4", 64)
    assert ("GET", f"/someone/tiny-bert/resolve/{COMMIT}/model.safetensors") in hub.asked
    # A pickle is neither fetched nor handed to the service that transformers would have convert it.
    assert not [path for _, path in hub.asked if path.endswith(".bin") or "commits" in path]
    hub.asked.clear()
    with hub.known(tmp_path, HF_HUB_OFFLINE="1"):
        assert_same_state(first.model, load_encoder("someone/tiny-bert").model)
        with pytest.raises(UsageError, match="neither as a directory nor in") as caught:
            load_encoder("someone/absent")
    assert "a local directory or 'demo'" in caught.value.hint
    assert hub.asked == []


PLACE = r"modeling_blocks\.py, line \d+: "
FAILING = {
    "package": (
        "import torch\n",
        "import torch\nimport a_package_that_nobody_has\n",
        "ImportError",
    ),
    "syntax": ("import torch\n", "import torch\nthis is no code\n", "SyntaxError"),
    "file": ("import torch\n", "import torch\nopen('/no/such/file')\n", "FileNotFoundError"),
    "network": ("self.post_init()\n", "self.no_such_method()\n", PLACE + "Attr.*no_such_method"),
    "exit": ("self.post_init()\n", "raise SystemExit('no')\n", PLACE + "SystemExit: no"),
    "older": ("        self.post_init()\n", "", "AttributeError: .*all_tied_weights_keys"),
    "forward": (
        "self.embeddings(input_ids)",
        "self.embeddings(inputs)",
        PLACE + "NameError: .*inputs",
    ),
}
"""Code that fails -> what it replaces, the code, and what the error names."""


@pytest.mark.slow
@pytest.mark.parametrize("case", FAILING)
def test_code_that_fails_is_named(case, tmp_path):
    sound, failing, named = FAILING[case]
    folder = write_own_code("blocks", tmp_path / case)
    code = folder / "modeling_blocks.py"
    text = code.read_text("utf-8")
    assert sound in text
    code.write_text(text.replace(sound, failing), "utf-8")
    with pytest.raises(UsageError, match=named) as caught, custom_code(True):
        load_encoder(str(folder))
    assert "another version of transformers" in (caught.value.hint or "")


def test_quantised_weights_without_their_settings_are_named(tmp_path):
    on_disk(tiny_encoder("bert"), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "encoder.layer.0.attention.self.query"
    tensors[f"{name}.qweight"] = tensors.pop(f"{name}.weight").int()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match=r"1 tensors are missing, .*query\.weight") as caught:
        load_encoder(str(tmp_path))
    assert "they are quantised" in caught.value.hint
