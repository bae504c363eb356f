"""The files of sentence-transformers: each side computes what the other wrote; other modules are
refused."""

import json
import shlex
import shutil
import string

import numpy as np
import pytest
import torch
from encoders import tiny_encoder, tiny_tokenizer
from hub_server import hub  # noqa: F401
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import (
    Dense,
    Dropout,
    LayerNorm,
    Normalize,
    Pooling,
    StaticEmbedding,
    Transformer,
)
from transformers import BertTokenizer

from kdcli.deploy.predict import Predictor
from kdcli.engine.session import Session, start
from kdcli.errors import UsageError
from kdcli.models.embedding_format import (
    EmbeddingFormat,
    Pool,
    dense_layer,
    load_embedder,
    read_format,
    save_embedder,
)
from kdcli.models.load import load_encoder, save_model
from kdcli.models.static import as_static
from kdcli.workloads.embedder import Embedder

pytestmark = pytest.mark.slow

TEXTS = ["w1 w2 w3", "w4", "w5 w6 w7 w8 w9 w10 w11", "w12 w1"]
DENSE = dense_layer(
    torch.randn(8, 32, generator=torch.Generator().manual_seed(1)), torch.ones(8) / 7, "Tanh"
)
WIDE = dense_layer(torch.randn(48, 32, generator=torch.Generator().manual_seed(2)))
NARROW = dense_layer(torch.randn(8, 48, generator=torch.Generator().manual_seed(3)), None, "GELU")
FORMATS = [
    EmbeddingFormat(),
    EmbeddingFormat("cls", normalize=False, max_length=5),
    EmbeddingFormat(
        "last", prompts={"query": "w20 w21 ", "document": "w22 "}, default_prompt="query"
    ),
    EmbeddingFormat("max", layers=(DENSE,), similarity="dot", normalize=False),
    EmbeddingFormat("weightedmean", layers=(WIDE, Normalize(), LayerNorm(48), NARROW)),
    EmbeddingFormat("cls+mean", layers=(dense_layer(torch.ones(5, 64) / 8),)),
    EmbeddingFormat("last+max+weightedmean", normalize=False),
    EmbeddingFormat("mean_sqrt_len_tokens", layers=(dense_layer(DENSE.linear.weight),)),
]


@pytest.fixture(scope="module")
def session():
    return Session(start(torch.device("cpu"), torch.float32), torch.device("cpu"))


@pytest.fixture(scope="module")
def encoder():
    torch.manual_seed(0)
    return tiny_encoder("bert")


@pytest.fixture
def saved(encoder, tmp_path):
    def save(fmt):
        save_embedder(encoder, tiny_tokenizer(), fmt, tmp_path)
        return tmp_path

    return save


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.pooling)
def test_sentence_transformers_and_kdcli_give_the_same_vectors(fmt, encoder, saved, session):
    folder = saved(fmt)
    theirs, ours = SentenceTransformer(str(folder), device="cpu"), Embedder.open(str(folder))
    for role, how in (("", {}), ("query", {"prompt_name": "query"})):
        if role and role not in fmt.prompts:
            continue
        np.testing.assert_allclose(
            ours.vectors(TEXTS, role, session), theirs.encode(TEXTS, **how), atol=1e-6
        )
    assert theirs.similarity_fn_name == fmt.similarity
    assert ours.format.width(32) == theirs.encode(TEXTS).shape[1]
    read = read_format(str(folder))
    assert (read.pooling, read.normalize, read.prompts, read.max_length) == (
        fmt.pooling,
        fmt.normalize,
        fmt.prompts,
        fmt.max_length or encoder.config.max_position_embeddings,
    )


def test_a_long_text_does_not_change_the_vectors_of_its_batch(tmp_path, session):
    """The longest row of a batch would decide the rotary frequencies of all rows."""
    torch.manual_seed(0)
    dims = 4
    rope = {"rope_type": "longrope", "rope_theta": 100.0, "original_max_position_embeddings": 16}
    rope |= {"short_factor": [1.0] * dims, "long_factor": [8.0] * dims}
    decoder = tiny_encoder("phi3", max_position_embeddings=64, rope_parameters=rope)
    save_embedder(decoder, tiny_tokenizer(), EmbeddingFormat("last", max_length=64), tmp_path)
    model, text = Embedder.open(str(tmp_path)), "w1 w2 w3"
    alone, together = (model.vectors([text, *o], "", session)[0] for o in ([], ["w4 " * 40]))
    np.testing.assert_allclose(alone, together, atol=1e-5)


def test_every_layer_that_sentence_transformers_saves_is_read(saved, tmp_path_factory, session):
    torch.manual_seed(0)
    encoder = Transformer(str(saved(EmbeddingFormat())))
    residual = Dense(64, 12, activation_function=torch.nn.Softsign(), use_residual=True)
    modules = [encoder, Pooling(32, ("mean", "cls")), Dropout(0.5), residual, LayerNorm(12)]
    folder = tmp_path_factory.mktemp("theirs")
    theirs = SentenceTransformer(modules=[*modules, Normalize(), Dropout()], device="cpu")
    theirs.save(str(folder))
    ours = Embedder.open(str(folder))
    np.testing.assert_allclose(ours.vectors(TEXTS, "", session), theirs.encode(TEXTS), atol=1e-6)
    assert ours.format.normalize


SETTINGS = {
    "truncate_dim": ("config_sentence_transformers.json", {"truncate_dim": 7}),
    "length": (
        "sentence_bert_config.json",
        {"processing_kwargs": {"text": {"max_length": 4}, "common": {}}},
    ),
    "an empty prompt under a default": (
        "config_sentence_transformers.json",
        {"prompts": {"query": "", "document": "w5 w6 "}, "default_prompt_name": "document"},
    ),
    "a prompt of passages": (
        "config_sentence_transformers.json",
        {"prompts": {"passage": "w5 "}, "default_prompt_name": "passage"},
    ),
}


def same_vectors(folder, session):
    """Compare the vectors of queries, documents and other texts with sentence-transformers'."""
    theirs, ours = SentenceTransformer(str(folder), device="cpu"), Embedder.open_scored(str(folder))
    for role, encode in (
        ("", theirs.encode),
        ("query", theirs.encode_query),
        ("document", theirs.encode_document),
    ):
        np.testing.assert_allclose(ours.vectors(TEXTS, role, session), encode(TEXTS), atol=1e-6)


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_the_files_are_obeyed(name, saved, session, tmp_path_factory):
    folder = saved(EmbeddingFormat(layers=(DENSE,)))
    change(folder, *SETTINGS[name])
    same_vectors(folder, session)
    # The settings are saved again.
    again, opened = tmp_path_factory.mktemp("again"), Embedder.open(str(folder))
    save_embedder(opened.model, opened.tokenizer, opened.format, again)
    np.testing.assert_allclose(
        SentenceTransformer(str(again), device="cpu").encode(TEXTS),
        opened.vectors(TEXTS, "", session),
        atol=1e-6,
    )


def test_a_note_says_whether_prompts_are_read(saved):
    folder = saved(EmbeddingFormat())
    change(folder, *SETTINGS["a prompt of passages"])
    assert Embedder.open(str(folder)).note.endswith("texts without a role begin with 'w5 '")
    (folder / "modules.json").unlink()
    for pooling in ("mean", None):
        note = Embedder.open_scored(str(folder), pooling=pooling).note
        assert note.endswith("config_sentence_transformers.json is not read without modules.json")


@pytest.mark.parametrize(
    ("name", "inside"),
    [
        ("sentence_bert_config.json", "0_Transformer"),
        ("sentence_roberta_config.json", "parts/encoder"),
    ],
)
def test_an_encoder_in_a_directory_of_its_own_is_read(name, inside, saved, session):
    folder = saved(EmbeddingFormat("cls", max_length=5))
    (folder / inside).mkdir(parents=True)
    for file in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        shutil.move(folder / file, folder / inside / file)
    shutil.move(folder / "sentence_bert_config.json", folder / inside / name)
    change(folder, "modules.json", [module("Transformer", inside, 0), FIRST[1]])
    same_vectors(folder, session)
    shutil.rmtree(folder / inside)
    message = f"modules.json says that the encoder is in '{inside}', which is no directory"
    with pytest.raises(UsageError, match=message):
        Embedder.open(str(folder))


def test_a_table_in_a_directory_of_its_own_on_the_hub_is_read(hub, session, tmp_path):  # noqa: F811
    torch.manual_seed(0)
    folder = tmp_path / "table"
    inside = folder / "0_StaticEmbedding"
    inside.mkdir(parents=True)
    tiny_tokenizer().backend_tokenizer.save(str(inside / "tokenizer.json"))
    save_file({"embedding.weight": torch.randn(64, 12)}, inside / "model.safetensors")
    change(folder, "modules.json", [module("StaticEmbedding", "0_StaticEmbedding", 0)])
    same_vectors(folder, session)
    hub.add("someone/table", folder)
    with hub.known(tmp_path):
        of_hub = Embedder.open_scored("someone/table").vectors(TEXTS, "", session)
    of_folder = Embedder.open_scored(str(folder)).vectors(TEXTS, "", session)
    np.testing.assert_array_equal(of_hub, of_folder)


def test_a_table_keeps_the_length_of_its_texts(session, tmp_path):
    torch.manual_seed(0)
    backend = tiny_tokenizer().backend_tokenizer
    backend.enable_truncation(4)
    table = StaticEmbedding(backend, embedding_dim=12)
    SentenceTransformer(modules=[table], device="cpu").save(str(tmp_path / "theirs"))
    same_vectors(tmp_path / "theirs", session)
    opened = Embedder.open_scored(str(tmp_path / "theirs"))
    save_embedder(opened.model, opened.tokenizer, opened.format, tmp_path / "ours")
    same_vectors(tmp_path / "ours", session)
    long = opened.vectors([" ".join(f"w{n}" for n in range(9)), "w0 w1 w2 w3"], "", session)
    np.testing.assert_array_equal(long[0], long[1])


def test_a_table_of_model2vec_with_shared_rows_is_read(session, tmp_path):
    torch.manual_seed(0)
    tiny_tokenizer().backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    tensors = {
        "embeddings": torch.randn(10, 12),
        "mapping": torch.arange(64) % 10,
        "weights": torch.rand(64, dtype=torch.float64),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    change(tmp_path, "modules.json", [module("StaticEmbedding", "", 0)])
    change(tmp_path, "config.json", {"model_type": "model2vec", "hidden_dim": 12})
    same_vectors(tmp_path, session)


def test_texts_without_tokens_have_vectors(session, tmp_path, encoder):
    """The tokenizer adds no special tokens."""
    save_embedder(encoder, tiny_tokenizer(), EmbeddingFormat(), tmp_path)
    vectors = Embedder.open(str(tmp_path)).vectors(["", ""], "", session)
    np.testing.assert_array_equal(vectors, np.zeros((2, 32)))


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_on_either_side_changes_no_vector(side):
    states_BLD, real = torch.randn(2, 5, 4), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    if side == "left":
        real = real.flip(1)
    alone_BLD = states_BLD[1:, real[1].bool()]
    for fmt in (
        EmbeddingFormat(name) for name in ("mean", "cls", "last", "max", "mean_sqrt_len_tokens")
    ):
        pool = Pool(fmt)
        torch.testing.assert_close(pool(states_BLD, real)[1], pool(alone_BLD, None)[0])


def test_a_plain_encoder_has_no_format_and_says_what_is_assumed(model_dir):
    assert read_format(str(model_dir)) is None
    assert "mean pooling, normalised, is assumed" in Embedder.open(str(model_dir)).note
    assert Embedder.open(str(model_dir), pooling="cls").format.pooling == "cls"


def change(folder, name, content):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


def module(kind, path, place):
    return {
        "idx": place,
        "name": str(place),
        "path": path,
        "type": f"sentence_transformers.models.{kind}",
    }


FIRST = [module("Transformer", "", 0), module("Pooling", "1_Pooling", 1)]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("modules.json", "{", "not valid JSON"),
        ("modules.json", "[" * 100_000, "nested deeper|not valid JSON"),
        ("modules.json", {}, "must hold a JSON list"),
        ("modules.json", [module("CLIPModel", "", 0)], "its first module is CLIPModel"),
        ("modules.json", [*FIRST, module("LSTM", "2_LSTM", 2)], "it has a module LSTM"),
        ("modules.json", [*FIRST, module("Dense", "2_Dense", 2)], "2_Dense/config.json"),
        ("1_Pooling/config.json", {"pooling_mode": ["cls", "top"]}, "pools by cls and top"),
        ("1_Pooling/config.json", [], "must hold a JSON object"),
        (
            "sentence_bert_config.json",
            {"max_seq_length": "many"},
            "must be a whole number of at least 3 tokens",
        ),
        (
            "modules.json",
            [FIRST[0], {**FIRST[1], "type": "their_code.Pooling"}],
            "its Transformer is not followed by a Pooling",
        ),
    ],
)
def test_other_modules_are_refused(saved, name, content, message):
    folder = saved(EmbeddingFormat())
    change(folder, name, content)
    with pytest.raises(UsageError, match=message):
        read_format(str(folder))


def test_a_pickled_dense_layer_is_refused_and_the_hint_converts_it(saved):
    layer = saved(EmbeddingFormat(layers=(DENSE,))) / "2_Dense"
    torch.save(load_file(layer / "model.safetensors"), layer / "pytorch_model.bin")
    (layer / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"has no 2_Dense/model\.safetensors") as caught:
        read_format(str(layer.parent))
    exec(shlex.split(caught.value.hint)[-1], {})
    (read,) = read_format(str(layer.parent)).layers
    assert torch.equal(read.linear.weight, DENSE.linear.weight)


def test_a_dense_layer_of_another_width_than_the_encoder_is_refused(saved):
    for narrow in (dense_layer(torch.ones(4, 16)), LayerNorm(16)):
        folder = saved(EmbeddingFormat(layers=(narrow,)))
        with pytest.raises(UsageError, match=r"takes vectors of width 16, .* width 32"):
            Embedder.open(str(folder))


def test_a_layer_or_table_with_infinity_is_refused(saved, tmp_path):
    folder = saved(EmbeddingFormat(layers=(DENSE,)))
    file = folder / "2_Dense" / "model.safetensors"
    weights = load_file(file)
    weights["linear.weight"][0, 0] = float("inf")
    save_file(weights, file)
    with pytest.raises(UsageError, match=r"2_Dense hold NaN .* linear\.weight"):
        Embedder.open(str(folder))
    tokenizer = tiny_tokenizer()
    static = as_static(torch.full((len(tokenizer), 4), float("nan")))
    save_model(static, tokenizer, tmp_path / "static")
    with pytest.raises(UsageError, match="static hold NaN or infinity, for example embeddings"):
        Embedder.open_scored(str(tmp_path / "static"))


def test_a_dense_layer_in_half_precision_is_read_in_float32(saved):
    folder = saved(EmbeddingFormat(layers=(DENSE,)))
    file = folder / "2_Dense" / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file)
    embedder = Embedder.open(str(folder))
    linear = embedder.format.layers[0].linear
    assert (linear.weight.dtype, linear.bias.dtype) == (torch.float32, torch.float32)
    assert torch.equal(linear.bias, DENSE.linear.bias.bfloat16().float())
    assert embedder.fingerprint


@pytest.mark.parametrize("lowercases", [True, False])
def test_lowercasing_that_only_the_library_does_is_refused(saved, session, lowercases):
    folder = saved(EmbeddingFormat())
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *string.ascii_letters]
    numbers = {token: n for n, token in enumerate(vocabulary)}
    BertTokenizer(numbers, do_lower_case=lowercases).save_pretrained(folder)
    change(folder, "sentence_bert_config.json", {"max_seq_length": 64, "do_lower_case": True})
    if not lowercases:
        with pytest.raises(UsageError, match="sentence-transformers lowercases the texts of"):
            Embedder.open(str(folder))
        with pytest.raises(UsageError, match="sentence-transformers lowercases the texts of"):
            Predictor.open(str(folder))
        # Without its vectors, the library plays no part.
        assert load_encoder(str(folder)).tokenizer.tokenize("A b") == ["A", "b"]
        return
    np.testing.assert_allclose(
        Embedder.open(str(folder)).vectors(["A b"], "", session),
        SentenceTransformer(str(folder), device="cpu").encode(["A b"]),
        atol=1e-6,
    )


def test_reading_and_computing_do_not_import_sentence_transformers(saved, without):
    folder = str(saved(EmbeddingFormat()))
    without("sentence_transformers")
    load_embedder(folder)
    Pool(read_format(folder))(torch.ones(1, 2, 32), None)


def test_a_pooling_that_contradicts_and_a_cross_encoder_are_refused(saved, model_dir):
    folder = saved(EmbeddingFormat("cls"))
    with pytest.raises(UsageError, match="pools by cls, not by mean"):
        Embedder.open(str(folder), pooling="mean")
    config = json.loads((model_dir / "config.json").read_text())
    change(model_dir, "config.json", config | {"architectures": ["BertForSequenceClassification"]})
    with pytest.raises(UsageError, match="scores texts"):
        load_embedder(str(model_dir))
