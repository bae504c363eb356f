"""Heads of label words: logits are dot products of states with embeddings, in every type, and stay
so when saved."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import encoders
import pytest
import torch
import transformers as hf
from encoders import (
    NAMES,
    TASKS,
    TYPES,
    WORDS,
    assert_same_state,
    logits_of,
    on_disk,
    tiny_config,
    tiny_tokenizer,
)
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

import kdcli
from kdcli.data.tasks import named_tasks
from kdcli.errors import UsageError
from kdcli.models.heads import AUTO_CLASS, load_for_task
from kdcli.models.label_words import SMOOTH_ACTIVATIONS, label_word_ids, load_with_label_words
from kdcli.models.layout import WRITTEN
from kdcli.models.load import location, save_model
from kdcli.types import Kind

pytestmark = pytest.mark.slow

WIDE = {name: {"embedding_size": 32} for name in ("electra", "albert", "mobilebert")}
WIDE["rembert"] = {"input_embedding_size": 32}
"""Embeddings as wide as the states."""
OF_TEXTS = sorted(name for name, row in WRITTEN.items() if row.head or row.head_norm)
OF_SPANS = sorted({*OF_TEXTS, "mobilebert"} - {"esm", "eurobert", "nomic_bert"})
WITH_MLM = [
    kind for kind in TYPES if type(tiny_config(kind)) in hf.AutoModelForMaskedLM._model_mapping
]
CLOSE = {"rtol": 1e-3, "atol": 1e-3}
"""Of logits whose size is some units (asserted)."""
RECOMPUTED = {"rtol": 1e-5, "atol": 1e-6}
"""Logits of the same weights at another place in memory: the sums of a matrix product depend on
alignment."""


@pytest.fixture(scope="module")
def model_dir_of(tmp_path_factory) -> Callable[..., Path]:
    """Auto class, model type and changes -> a directory with a tiny model, whose logits are some
    units large."""
    made: dict[str, Path] = {}

    def of(auto, model_type: str, **changes: object) -> Path:
        key = repr((auto, model_type, changes))
        if key not in made:
            torch.manual_seed(0)
            folder = tmp_path_factory.mktemp(model_type)
            wide = {} if auto is hf.AutoModelForMaskedLM else WIDE.get(model_type, {})
            model = auto.from_config(
                tiny_config(model_type, **{"initializer_range": 0.2} | wide | changes)
            )
            with torch.no_grad():
                if auto is hf.AutoModel:
                    model.get_input_embeddings().weight.mul_(2)
                # Biases of 0 and norms of 1 would be equal wherever they come from.
                for name, parameter in model.named_parameters():
                    of_head = auto is not hf.AutoModel and not name.startswith(
                        f"{model.base_model_prefix}."
                    )
                    if parameter.dim() == 1 and (
                        of_head or (auto is hf.AutoModel and "norm" in name.lower())
                    ):
                        parameter.add_(torch.randn_like(parameter) * 0.2)
            save_model(model, tiny_tokenizer(), folder)
            made[key] = folder
        return made[key]

    return of


@pytest.fixture
def encoder_dir(model_dir_of):
    return lambda model_type, **changes: model_dir_of(hf.AutoModel, model_type, **changes)


@pytest.fixture
def masked_dir(model_dir_of):
    return lambda model_type: model_dir_of(hf.AutoModelForMaskedLM, model_type)


def load(source, kind: Kind = "class", head="embedding", **how):
    return load_with_label_words(str(source), TASKS[kind], kind=head, seed=5, **how)


def batch_of(model) -> dict[str, torch.Tensor]:
    return encoders.padded_batch(model, rows=6)


def saved(headed, folder) -> str:
    save_model(headed.model, headed.tokenizer, folder)
    return str(folder)


def assert_same_model(one, other, batch):
    """Equal state, and logits as close as recomputing leaves them."""
    assert_same_state(one, other)
    torch.testing.assert_close(logits_of(one, batch), logits_of(other, batch), **RECOMPUTED)


def dot_products(model, words, batch) -> torch.Tensor:
    """[B, L, C]: each token's last state times the embeddings of the words, which are constant."""
    ids = tiny_tokenizer().convert_tokens_to_ids(list(words))
    words_CD = model.get_input_embeddings().weight[ids].detach()
    return model.base_model(**batch).last_hidden_state @ words_CD.T


@pytest.mark.parametrize("model_type", OF_TEXTS)
def test_logits_of_texts_are_dot_products_and_stay_so_when_saved(encoder_dir, tmp_path, model_type):
    headed = load(encoder_dir(model_type))
    model, batch = headed.model, batch_of(headed.model)
    expected = dot_products(model, WORDS, batch)[:, 0]
    assert expected.abs().max() > 1
    logits = logits_of(model, batch)
    torch.testing.assert_close(logits, expected, **CLOSE)
    stock = hf.AutoModelForSequenceClassification.from_pretrained(saved(headed, tmp_path)).eval()
    assert_same_model(stock, model, batch)
    assert stock.config.id2label == dict(enumerate(NAMES))
    again = load_for_task(str(tmp_path), TASKS["class"], new_head=False)
    note, _, of_padding = again.note.partition("; ")
    assert note == "its own head"
    assert ("depend on padding" in of_padding) == (model_type == "convbert")
    assert_same_model(again.model, model, batch)
    # The head is frozen; of the encoder only its own pooler and what never trains (RoFormer's table
    # of positions) are.
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    head = {
        name
        for name, _ in model.named_parameters()
        if not name.startswith(model.base_model_prefix + ".")
    }
    assert head <= frozen
    assert all("pooler" in name or "embed_positions" in name for name in frozen - head)
    # It has no dropout.
    model.train()
    model.base_model.eval()
    torch.testing.assert_close(logits_of(model, batch), logits, **RECOMPUTED)
    rates = {
        v
        for k, v in model.config.to_dict().items()
        if k in ("classifier_dropout", "pooler_dropout")
    }
    assert not rates - {0.0}


@pytest.mark.parametrize("model_type", OF_TEXTS)
def test_gradients_reach_the_encoder_as_those_of_dot_products(encoder_dir, model_type):
    model = load(encoder_dir(model_type)).model
    batch = batch_of(model)
    place = next(p for n, p in model.named_parameters() if "layer" in n and p.dim() == 2)
    (gradient,) = torch.autograd.grad(model(**batch).logits[:, 1].sum(), place)
    (expected,) = torch.autograd.grad(dot_products(model, WORDS, batch)[:, 0, 1].sum(), place)
    assert expected.abs().max() > 0
    assert (gradient - expected).norm() < 2e-3 * expected.norm()


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        *(("deberta-v2", {"pooler_hidden_act": name}) for name in (*SMOOTH_ACTIVATIONS, "relu")),
        ("modernbert", {"norm_bias": True}),
    ],
)
def test_every_transform_is_made_the_identity(encoder_dir, model_type, changes):
    model = load(encoder_dir(model_type, **changes)).model
    batch = batch_of(model)
    expected = dot_products(model, WORDS, batch)[:, 0]
    torch.testing.assert_close(logits_of(model, batch), expected, **CLOSE)


@pytest.mark.parametrize(
    ("model_type", "kind"),
    [*((t, "span") for t in OF_SPANS), *(("bert", kind) for kind in ("multi", "score", "tokens"))],
)
def test_logits_of_other_tasks_are_dot_products_too(encoder_dir, tmp_path, model_type, kind):
    headed = load(encoder_dir(model_type), kind)
    batch = batch_of(headed.model)
    expected = dot_products(headed.model, TASKS[kind].words, batch)
    real = batch["attention_mask"].bool() if kind in ("span", "tokens") else ...
    logits = logits_of(headed.model, batch)
    torch.testing.assert_close(
        logits[real], expected[real] if logits.dim() == 3 else expected[:, 0], **CLOSE
    )
    assert_same_model(
        AUTO_CLASS[kind].from_pretrained(saved(headed, tmp_path)).eval(), headed.model, batch
    )


def test_a_norm_with_a_weight_of_zero_is_refused(tmp_path):
    encoder = encoders.tiny_encoder("modernbert")
    with torch.no_grad():
        encoder.final_norm.weight[3] = 0
    on_disk(encoder, tmp_path)
    with pytest.raises(UsageError, match=r"the last norm of .* has weights of 0"):
        load(tmp_path)


# What gives no such head.


@pytest.mark.parametrize(
    ("model_type", "changes", "kind", "message"),
    [
        *(
            (t, {"embedding_size": 16}, "class", "have width 16, but its states have width 32")
            for t in ("electra", "albert")
        ),
        (
            "mobilebert",
            {},
            "class",
            "MobileBertForSequenceClassification cannot be made of label words",
        ),
        ("splinter", {}, "span", "SplinterForQuestionAnswering cannot be made of label words"),
        (
            "deberta-v2",
            {"pooler_hidden_act": "mish"},
            "class",
            "activation mish, which cannot be made the identity",
        ),
    ],
)
def test_a_head_that_cannot_be_made_of_label_words_is_refused(
    encoder_dir, model_type, changes, kind, message
):
    with pytest.raises(UsageError, match=message) as error:
        load(encoder_dir(model_type, **changes), kind)
    assert "head.kind=scratch" in error.value.hint


# The masked-language-model head.


def of_whole(folder, words, batch) -> torch.Tensor:
    """[B, L, C]: the whole head's logits of the words."""
    whole = logits_of(hf.AutoModelForMaskedLM.from_pretrained(folder).eval(), batch)
    return whole[..., tiny_tokenizer().convert_tokens_to_ids(list(words))]


@pytest.mark.parametrize("model_type", WITH_MLM)
def test_mlm_gives_the_whole_heads_logits_of_the_words(masked_dir, tmp_path, model_type):
    headed = load(masked_dir(model_type), head="mlm")
    model, batch = headed.model, batch_of(headed.model)
    logits = logits_of(model, batch)
    assert logits.std() > 0.05
    torch.testing.assert_close(
        logits, of_whole(masked_dir(model_type), WORDS, batch)[:, 0], rtol=1e-5, atol=1e-5
    )
    # Nothing of the vocabulary is left in the head, and nothing of the head is trained.
    prefix = f"{model.base_model_prefix}."
    assert not any(
        64 in p.shape or p.requires_grad
        for n, p in model.named_parameters()
        if not n.startswith(prefix)
    )
    again = load_for_task(saved(headed, tmp_path), TASKS["class"], new_head=False)
    note, _, of_padding = again.note.partition("; ")
    assert note == "its own head"
    assert ("depend on padding" in of_padding) == (model_type == "convbert")
    assert_same_model(again.model, model, batch)
    assert_same_model(kdcli.load(tmp_path).model, model, batch)
    stock = hf.AutoModel.from_pretrained(tmp_path).eval()
    assert not type(stock).__name__.startswith("LabelWords")
    kept, own = stock.state_dict(), model.base_model.state_dict()
    assert all(torch.equal(kept[name], own[name]) for name in set(kept) & set(own))


@pytest.mark.parametrize("kind", sorted(TASKS))
def test_mlm_of_every_kind_of_task(masked_dir, tmp_path, kind):
    folder, task = masked_dir("roberta"), TASKS[kind]
    headed = load(folder, kind, head="mlm")
    batch = batch_of(headed.model)
    expected = of_whole(folder, task.words, batch)
    logits = logits_of(headed.model, batch)
    torch.testing.assert_close(logits, expected if kind in ("tokens", "span") else expected[:, 0])
    again = load_for_task(saved(headed, tmp_path), task, new_head=False).model
    assert_same_model(again, headed.model, batch)
    other: Kind = "class" if kind in ("tokens", "span") else "span"
    with pytest.raises(UsageError, match="LabelWordsRobertaForMaskedLM has no head for"):
        load_for_task(str(tmp_path), TASKS[other], new_head=False)


def test_another_head_on_its_encoder_leaves_nothing_of_the_words(masked_dir, tmp_path):
    source = saved(load(masked_dir("bert"), head="mlm"), tmp_path / "first")
    headed = load_for_task(source, TASKS["tokens"], new_head=True, seed=0)
    folder = tmp_path / "second"
    saved(headed, folder)
    written = (folder / "config.json").read_text("utf-8")
    assert "label_words" not in written
    assert "auto_map" not in written
    assert not list(folder.glob("*.py"))
    assert type(kdcli.load(folder).model) is type(headed.model)


def test_mlm_is_read_elsewhere_with_the_code_beside_it(masked_dir, tmp_path):
    headed = load(masked_dir("bert"), head="mlm")
    folder, batch = saved(headed, tmp_path / "saved"), batch_of(headed.model)
    elsewhere = hf.AutoModelForSequenceClassification.from_pretrained(
        folder, trust_remote_code=True
    ).eval()
    assert type(elsewhere).__module__.startswith("transformers_modules")
    torch.testing.assert_close(
        logits_of(elsewhere, batch), logits_of(headed.model, batch), **RECOMPUTED
    )
    (output,) = hf.pipeline(
        "text-classification", model=folder, trust_remote_code=True, top_k=None
    )("w1 w2")
    assert {one["label"] for one in output} == set(NAMES)
    elsewhere.save_pretrained(tmp_path / "again")
    again = hf.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "again", trust_remote_code=True
    ).eval()
    assert_same_model(again, elsewhere, batch)
    with pytest.raises(TypeError, match="LabelWordsBertForMaskedLM cannot compute a loss"):
        again(**batch, labels=torch.zeros(6, dtype=torch.long))


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("modernbert", "is ModernBertModel, without a masked-lan"),
        ("splinter", "splinter has no masked-language-model"),
    ],
)
def test_mlm_of_a_checkpoint_without_such_a_head_is_refused(encoder_dir, model_type, message):
    with pytest.raises(UsageError, match=message) as error:
        load(encoder_dir(model_type), "span", head="mlm")
    assert "head.kind=embedding" in error.value.hint


# Words.


def ids_of(tokenizer, words) -> list[str]:
    task = replace(TASKS["class"], labels=tuple(f"c{i}" for i in range(len(words))))
    return tokenizer.convert_ids_to_tokens(label_word_ids(tokenizer, task, words))


def word_piece() -> hf.PreTrainedTokenizerFast:
    vocabulary = {
        word: i for i, word in enumerate(["[PAD]", "[UNK]", "yes", "no", "ter", "##rible", "great"])
    }
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]"
    )


def bytes_with_yes() -> hf.PreTrainedTokenizerFast:
    """`no` is one token only at the beginning of a text, `yes` only after a space."""
    tokenizer = encoders.byte_level(("n", "o"), ("e", "s"), ("Ġ", "y"), ("Ġy", "es"))
    return hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def sentence_piece() -> hf.PreTrainedTokenizerFast:
    """Without a normaliser that joins spaces: a text that begins with one begins with a piece for
    it."""
    pieces = [
        ("<unk>", 0.0),
        ("▁", -2.0),
        ("▁yes", -3.0),
        ("▁no", -3.0),
        *((c, -9.0) for c in "yesno"),
    ]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    return hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def test_words_are_found_as_they_stand_in_a_text():
    assert (ids_of(word_piece(), ["Yes", "No"]), ids_of(bytes_with_yes(), ["yes"])) == (
        ["yes", "no"],
        ["Ġyes"],
    )
    assert ids_of(sentence_piece(), ["yes", "no"]) == ["▁yes", "▁no"]


@pytest.mark.parametrize(
    ("make", "words", "message"),
    [
        (word_piece, ["terrible", "great"], r"'terrible' of task nli is 2 tokens \(ter ##rible\)"),
        (word_piece, ["great", "bad"], "'bad' of task nli is not in the tokenizer's vocabulary"),
        (word_piece, ["great", ""], "'' of task nli is not in the tokenizer's vocabulary"),
        (word_piece, ["Yes", "yes"], "'Yes' and 'yes' are the same token yes"),
        (
            bytes_with_yes,
            ["yes", "no"],
            r"'no' of task nli is (3 tokens \(Ġ n o\)|2 tokens \(Ġ no\))",
        ),
        (sentence_piece, ["yes", "son"], "'son' of task nli is 4 tokens"),
    ],
)
def test_a_word_that_is_not_one_token_of_its_own_is_refused(make, words, message):
    with pytest.raises(UsageError, match=message) as error:
        ids_of(make(), words)
    assert (
        "choose words of one token, one for each of c0, c1, in this order: --set head.words="
        in error.value.hint
    )


@pytest.mark.parametrize(("kind", "outputs"), [("class", 3), ("score", 1), ("span", 2)])
def test_there_must_be_a_word_for_each_output(kind, outputs):
    assert len(label_word_ids(tiny_tokenizer(), TASKS[kind])) == outputs
    with pytest.raises(UsageError, match=f"4 label words for the {outputs} outputs of task"):
        label_word_ids(tiny_tokenizer(), TASKS[kind], ["w1", "w2", "w3", "w4"])
    with pytest.raises(UsageError, match="has no label words") as error:
        label_word_ids(tiny_tokenizer(), replace(TASKS[kind], words=()))
    assert "head.words" in error.value.hint


@pytest.mark.parametrize("task", named_tasks().values(), ids=lambda task: task.name)
def test_every_named_task_has_words_for_its_outputs(task):
    assert len(set(task.words)) == {"score": 1, "span": 2}.get(task.kind, len(task.labels))
    if task.name.startswith("demo-"):
        tokenizer = hf.AutoTokenizer.from_pretrained(location("demo"))
        assert tuple(tokenizer.convert_ids_to_tokens(label_word_ids(tokenizer, task))) == task.words
