"""Heads of label words: logits are dot products of states with embeddings, in every type, and stay so when saved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from encoders import tiny_config, tiny_encoder, tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    dynamic_module_utils,
    pipeline,
)

import kdcli
from kdcli.data.tasks import tasks
from kdcli.errors import UsageError
from kdcli.models.heads import load_for_task
from kdcli.models.label_words import SMALL, label_word_ids, load_with_label_words
from kdcli.models.layout import LAYOUTS
from kdcli.models.load import location, save_model
from kdcli.types import Kind, Task

NAMES = ("entailment", "neutral", "contradiction")
WORDS = ("w7", "w3", "w11")
TASKS: dict[Kind, Task] = {
    "class": Task("nli", "class", ("text",), ("accuracy",), NAMES, words=WORDS),
    "multi": Task("topics", "multi", ("text",), ("micro_f1",), ("sport", "art", "war"), words=WORDS),
    "score": Task("likeness", "score", ("text",), ("pearson",), words=("w9",)),
    "tokens": Task("tags", "tokens", ("tokens",), ("f1",), ("O", "B-PER", "I-PER"), words=WORDS),
    "span": Task("answers", "span", ("question", "context"), ("f1",), words=("w4", "w6")),
}
WIDE = {"electra": {"embedding_size": 32}, "albert": {"embedding_size": 32}, "rembert": {"input_embedding_size": 32}}
"""Embeddings as wide as the states."""
OF_TEXTS = sorted(name for name, row in LAYOUTS.items() if row.head or row.head_norm)
OF_SPANS = sorted({*OF_TEXTS, "mobilebert"} - {"esm", "eurobert", "nomic_bert"})
CLOSE = {"rtol": 1e-3, "atol": 1e-3}
"""Of logits whose size is some units (asserted)."""


@pytest.fixture(scope="module")
def encoder_dir(tmp_path_factory) -> Callable[..., Path]:
    """Model type and changes → a directory with a tiny encoder whose logits are some units large."""
    made: dict[str, Path] = {}

    def of(model_type: str, **changes: object) -> Path:
        key = repr((model_type, changes))
        if key not in made:
            torch.manual_seed(0)
            folder = tmp_path_factory.mktemp(model_type)
            encoder = tiny_encoder(model_type, **{"initializer_range": 0.2} | WIDE.get(model_type, {}) | changes)
            with torch.no_grad():
                encoder.get_input_embeddings().weight.mul_(2)
                for name, parameter in encoder.named_parameters():
                    if "norm" in name.lower() and parameter.dim() == 1:
                        parameter.add_(torch.randn_like(parameter) * 0.2)
            encoder.save_pretrained(folder)
            tiny_tokenizer().save_pretrained(folder)
            made[key] = folder
        return made[key]

    return of


def load(source, kind: Kind = "class", **how):
    return load_with_label_words(str(source), TASKS[kind], kind="embedding", seed=5, **how)


def batch_of(model) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(5, 60, (6, 10))
    mask = torch.ones_like(ids)
    mask[1:3, 6:] = 0
    ids[mask == 0] = model.config.pad_token_id
    return {"input_ids": ids, "attention_mask": mask}


RECOMPUTED = {"rtol": 1e-5, "atol": 1e-6}
"""Logits of the same weights at another place in memory: the sums of a matrix product depend on alignment."""


@torch.no_grad()
def assert_same_model(one, other, batch):
    """The same state to the bit, and logits as close as recomputing leaves them."""
    state, wanted = one.state_dict(), other.state_dict()
    assert state.keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in state.items())
    torch.testing.assert_close(logits_of(one, batch), logits_of(other, batch), **RECOMPUTED)


@torch.no_grad()
def logits_of(model, batch) -> torch.Tensor:
    output = model(**batch)
    return torch.stack([output.start_logits, output.end_logits], -1) if "start_logits" in output else output.logits


@torch.no_grad()
def dot_products(model, words, batch) -> torch.Tensor:
    """[B, L, C]: each token's last state times the embeddings of the words."""
    ids = tiny_tokenizer().convert_tokens_to_ids(list(words))
    states_BLD = model.base_model(**batch).last_hidden_state
    return states_BLD @ model.get_input_embeddings().weight[ids].T


@pytest.mark.parametrize("model_type", OF_TEXTS)
def test_logits_of_texts_are_dot_products_and_stay_so_when_saved(encoder_dir, tmp_path, model_type):
    headed = load(encoder_dir(model_type))
    model, batch = headed.model, batch_of(headed.model)
    wanted = dot_products(model, WORDS, batch)[:, 0]
    assert wanted.abs().max() > 1
    found = logits_of(model, batch)
    torch.testing.assert_close(found, wanted, **CLOSE)
    save_model(model, headed.tokenizer, tmp_path)
    stock = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(logits_of(stock, batch), found, **RECOMPUTED)
    assert stock.config.id2label == dict(enumerate(NAMES))
    again = load_for_task(str(tmp_path), TASKS["class"], new_head=False)
    assert again.note == "its own head"
    torch.testing.assert_close(logits_of(again.model, batch), found, **RECOMPUTED)


@pytest.mark.parametrize("model_type", OF_TEXTS)
def test_the_head_is_frozen_and_drops_nothing(encoder_dir, model_type):
    model = load(encoder_dir(model_type)).model
    encoder, batch = model.base_model, batch_of(model)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    head = {name for name, _ in model.named_parameters() if not name.startswith(model.base_model_prefix + ".")}
    assert head <= frozen
    # Of the encoder only a pooler that belongs to the head, and what never trains (RoFormer's table of positions).
    assert all("pooler" in name or "embed_positions" in name for name in frozen - head)
    model.train()
    encoder.eval()
    assert torch.equal(logits_of(model, batch), logits_of(model.eval(), batch))
    assert not {v for k, v in model.config.to_dict().items() if k in ("classifier_dropout", "pooler_dropout")} - {0.0}


@pytest.mark.parametrize("model_type", OF_TEXTS)
def test_gradients_reach_the_encoder_as_those_of_dot_products(encoder_dir, model_type):
    model = load(encoder_dir(model_type)).model
    batch, place = batch_of(model), next(p for n, p in model.named_parameters() if "layer" in n and p.dim() == 2)
    (found,) = torch.autograd.grad(model(**batch).logits[:, 1].sum(), place)
    ids = tiny_tokenizer().convert_tokens_to_ids(list(WORDS))
    row = model.get_input_embeddings().weight[ids[1]].detach()
    (wanted,) = torch.autograd.grad((model.base_model(**batch).last_hidden_state[:, 0] @ row).sum(), place)
    assert wanted.abs().max() > 0
    assert (found - wanted).norm() < 2e-3 * wanted.norm()


@pytest.mark.parametrize("model_type", OF_SPANS)
def test_logits_of_answers_are_dot_products_at_every_token(encoder_dir, tmp_path, model_type):
    changes = {"embedding_size": 32} if model_type == "mobilebert" else {}
    headed = load(encoder_dir(model_type, **changes), "span")
    batch = batch_of(headed.model)
    real = batch["attention_mask"].bool()
    found = logits_of(headed.model, batch)
    torch.testing.assert_close(found[real], dot_products(headed.model, ("w4", "w6"), batch)[real], **CLOSE)
    save_model(headed.model, headed.tokenizer, tmp_path)
    reloaded = AutoModelForQuestionAnswering.from_pretrained(tmp_path).eval()
    assert_same_model(reloaded, headed.model, batch)


@pytest.mark.parametrize("kind", ["multi", "score", "tokens"])
def test_the_other_kinds_of_task(encoder_dir, tmp_path, kind):
    headed = load(encoder_dir("bert"), kind)
    batch = batch_of(headed.model)
    wanted = dot_products(headed.model, TASKS[kind].words, batch)
    torch.testing.assert_close(logits_of(headed.model, batch), wanted if kind == "tokens" else wanted[:, 0], **CLOSE)
    auto = AutoModelForTokenClassification if kind == "tokens" else AutoModelForSequenceClassification
    save_model(headed.model, headed.tokenizer, tmp_path)
    assert_same_model(auto.from_pretrained(tmp_path).eval(), headed.model, batch)


@pytest.mark.parametrize("activation", [*SMALL, "relu"])
def test_every_activation_that_is_listed_is_made_the_identity(encoder_dir, activation):
    model = load(encoder_dir("deberta-v2", pooler_hidden_act=activation)).model
    batch = batch_of(model)
    torch.testing.assert_close(logits_of(model, batch), dot_products(model, WORDS, batch)[:, 0], **CLOSE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model_type", ["bert", "roberta", "electra"])
@torch.no_grad()
def test_half_precision_costs_what_it_costs_a_plain_linear(encoder_dir, model_type, dtype):
    model = load(encoder_dir(model_type)).model
    states_BLD = torch.randn(64, 1, 32) * 2
    ids = tiny_tokenizer().convert_tokens_to_ids(list(WORDS))
    rows_CD = model.get_input_embeddings().weight[ids]
    exact = states_BLD[:, 0] @ rows_CD.T
    plain = (states_BLD[:, 0].to(dtype) @ rows_CD.to(dtype).T).float()
    model.to(dtype)
    if model_type == "bert":
        found = model.classifier(model.bert.pooler(states_BLD.to(dtype)))
    else:
        found = model.classifier(states_BLD.to(dtype))
    assert (found.float() - exact).abs().mean() < 3 * (plain - exact).abs().mean()


def test_modernberts_second_norm_is_made_the_identity_with_a_bias_too(encoder_dir):
    model = load(encoder_dir("modernbert", norm_bias=True)).model
    batch = batch_of(model)
    assert model.model.final_norm.bias.abs().max() > 0.1
    torch.testing.assert_close(logits_of(model, batch), dot_products(model, WORDS, batch)[:, 0], **CLOSE)


def test_a_norm_with_a_weight_of_zero_is_refused(tmp_path):
    encoder = tiny_encoder("modernbert")
    with torch.no_grad():
        encoder.final_norm.weight[3] = 0
    encoder.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"the last norm of .* has weights of 0"):
        load(tmp_path)


def test_another_head_of_the_checkpoint_is_replaced(encoder_dir, tmp_path):
    first = load(encoder_dir("bert"), words=("w1", "w2", "w5"))
    save_model(first.model, first.tokenizer, tmp_path)
    batch = batch_of(first.model)
    model = load(tmp_path).model
    torch.testing.assert_close(logits_of(model, batch), dot_products(model, WORDS, batch)[:, 0], **CLOSE)


def test_a_pipeline_says_the_names_of_classes(encoder_dir, tmp_path):
    headed = load(encoder_dir("roberta"))
    save_model(headed.model, headed.tokenizer, tmp_path)
    (said,) = pipeline("text-classification", model=str(tmp_path), top_k=None)("w1 w2 w3")
    batch = {"input_ids": headed.tokenizer("w1 w2 w3", return_tensors="pt")["input_ids"]}
    likely = dot_products(headed.model, WORDS, batch)[0, 0].softmax(-1)
    assert {one["label"]: pytest.approx(one["score"], abs=1e-3) for one in said} == dict(
        zip(NAMES, likely.tolist(), strict=True)
    )


# What gives no such head.


@pytest.mark.parametrize("model_type", ["electra", "albert", "mobilebert"])
def test_embeddings_of_another_width_are_refused(encoder_dir, model_type):
    with pytest.raises(UsageError, match=r"embeddings of .* are 16 wide and its states 32") as error:
        load(encoder_dir(model_type, embedding_size=16))
    assert "head.kind=scratch" in error.value.hint


def test_a_type_without_a_head_that_can_be_made_so_is_refused(encoder_dir):
    with pytest.raises(UsageError, match="MobileBertForSequenceClassification cannot be made of label words"):
        load(encoder_dir("mobilebert", embedding_size=32))
    with pytest.raises(UsageError, match="SplinterForQuestionAnswering cannot be made of label words"):
        load(encoder_dir("splinter"), "span")


def test_an_activation_that_is_straight_nowhere_is_refused(encoder_dir):
    with pytest.raises(UsageError, match="activation mish, which cannot be made the identity"):
        load(encoder_dir("deberta-v2", pooler_hidden_act="mish"))


# The masked-language-model head.

WITH_MLM = [kind for kind in sorted(LAYOUTS) if type(tiny_config(kind)) in AutoModelForMaskedLM._model_mapping]


@pytest.fixture(scope="module")
def masked_dir(tmp_path_factory) -> Callable[[str], Path]:
    """Model type → a directory with a tiny masked language model whose biases and norms are not those of a new one."""
    made: dict[str, Path] = {}

    def of(model_type: str) -> Path:
        if model_type not in made:
            torch.manual_seed(0)
            folder = tmp_path_factory.mktemp(model_type)
            model = AutoModelForMaskedLM.from_config(tiny_config(model_type, initializer_range=0.2))
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if parameter.dim() == 1 and not name.startswith(f"{model.base_model_prefix}."):
                        parameter.add_(torch.randn_like(parameter) * 0.3)
            save_model(model, tiny_tokenizer(), folder)
            made[model_type] = folder
        return made[model_type]

    return of


def load_mlm(source, kind: Kind = "class"):
    return load_with_label_words(str(source), TASKS[kind], kind="mlm", seed=0)


def of_whole(folder, words, batch) -> torch.Tensor:
    """[B, L, C]: what the whole head says of the words."""
    whole = logits_of(AutoModelForMaskedLM.from_pretrained(folder).eval(), batch)
    return whole[..., tiny_tokenizer().convert_tokens_to_ids(list(words))]


@pytest.mark.parametrize("model_type", WITH_MLM)
def test_mlm_gives_what_the_whole_head_says_of_the_words(masked_dir, tmp_path, model_type):
    headed = load_mlm(masked_dir(model_type))
    model, batch = headed.model, batch_of(headed.model)
    found = logits_of(model, batch)
    assert found.std() > 0.05
    torch.testing.assert_close(found, of_whole(masked_dir(model_type), WORDS, batch)[:, 0], rtol=1e-5, atol=1e-5)
    # Nothing of the vocabulary is left in the head, and nothing of the head is trained.
    prefix = f"{model.base_model_prefix}."
    assert not any(64 in p.shape or p.requires_grad for n, p in model.named_parameters() if not n.startswith(prefix))
    save_model(model, headed.tokenizer, tmp_path)
    again = load_for_task(str(tmp_path), TASKS["class"], new_head=False)
    assert again.note == "its own head"
    torch.testing.assert_close(logits_of(again.model, batch), found, **RECOMPUTED)
    torch.testing.assert_close(logits_of(kdcli.load(tmp_path), batch), found, **RECOMPUTED)
    stock = AutoModel.from_pretrained(tmp_path).eval()
    assert not type(stock).__name__.startswith("LabelWords")
    with torch.no_grad():
        state = stock(**batch).last_hidden_state
        assert torch.equal(state, model.base_model(**batch).last_hidden_state)


@pytest.mark.parametrize("kind", sorted(TASKS))
def test_mlm_of_every_kind_of_task(masked_dir, tmp_path, kind):
    folder, task = masked_dir("roberta"), TASKS[kind]
    headed = load_mlm(folder, kind)
    batch = batch_of(headed.model)
    wanted = of_whole(folder, task.words, batch)
    found = logits_of(headed.model, batch)
    torch.testing.assert_close(found, wanted if kind in ("tokens", "span") else wanted[:, 0])
    save_model(headed.model, headed.tokenizer, tmp_path)
    reloaded = load_for_task(str(tmp_path), task, new_head=False).model
    torch.testing.assert_close(logits_of(reloaded, batch), found, **RECOMPUTED)
    other: Kind = "class" if kind in ("tokens", "span") else "span"
    with pytest.raises(UsageError, match="LabelWordsRobertaForMaskedLM has no head for"):
        load_for_task(str(tmp_path), TASKS[other], new_head=False)


def test_mlm_is_read_elsewhere_with_the_code_beside_it(masked_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    headed = load_mlm(masked_dir("bert"))
    save_model(headed.model, headed.tokenizer, tmp_path / "saved")
    batch = batch_of(headed.model)
    found = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved", trust_remote_code=True).eval()
    assert type(found).__module__.startswith("transformers_modules")
    torch.testing.assert_close(logits_of(found, batch), logits_of(headed.model, batch), **RECOMPUTED)
    (said,) = pipeline("text-classification", model=str(tmp_path / "saved"), trust_remote_code=True, top_k=None)(
        "w1 w2"
    )
    assert {one["label"] for one in said} == set(NAMES)
    found.save_pretrained(tmp_path / "again")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "again", trust_remote_code=True).eval()
    torch.testing.assert_close(logits_of(again, batch), logits_of(found, batch), **RECOMPUTED)


def test_mlm_computes_no_loss(masked_dir):
    model = load_mlm(masked_dir("bert")).model
    with pytest.raises(TypeError, match="LabelWordsBertForMaskedLM computes no loss"):
        model(**batch_of(model), labels=torch.zeros(6, dtype=torch.long))


def test_another_head_on_its_encoder_leaves_nothing_of_the_words(masked_dir, tmp_path):
    first = load_mlm(masked_dir("bert"))
    save_model(first.model, first.tokenizer, tmp_path / "first")
    source = str(tmp_path / "first")
    for headed in (load(source), load_for_task(source, TASKS["tokens"], new_head=True, seed=0)):
        folder = tmp_path / type(headed.model).__name__
        save_model(headed.model, headed.tokenizer, folder)
        written = (folder / "config.json").read_text("utf-8")
        assert "label_words" not in written
        assert "auto_map" not in written
        assert not list(folder.glob("*.py"))
        assert type(kdcli.load(folder)) is type(headed.model)


def test_a_class_that_kdcli_does_not_know_is_refused(masked_dir, tmp_path):
    headed = load_mlm(masked_dir("bert"))
    save_model(headed.model, headed.tokenizer, tmp_path)
    file = tmp_path / "config.json"
    file.write_text(file.read_text("utf-8").replace('"LabelWordsBertForMaskedLM"\n', '"Other"\n'), "utf-8")
    for read in (lambda: kdcli.load(tmp_path), lambda: load_for_task(str(tmp_path), TASKS["class"], new_head=False)):
        with pytest.raises(UsageError, match="names class 'Other', which is not known"):
            read()


@pytest.mark.parametrize(
    ("model_type", "said"),
    [
        ("modernbert", "is ModernBertModel, without a masked-lang"),
        ("splinter", "splinter has no masked-language-model"),
    ],
)
def test_mlm_of_a_checkpoint_without_such_a_head_is_refused(encoder_dir, model_type, said):
    with pytest.raises(UsageError, match=said) as error:
        load_mlm(encoder_dir(model_type), "span")
    assert "head.kind=embedding" in error.value.hint


# Words.


def ids_of(tokenizer, words) -> list[str]:
    task = replace(TASKS["class"], labels=tuple(f"c{i}" for i in range(len(words))))
    return tokenizer.convert_ids_to_tokens(label_word_ids(tokenizer, task, words))


def word_piece() -> PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "yes", "no", "ter", "##rible", "great"])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]")


def byte_level() -> PreTrainedTokenizerFast:
    """`no` is one token only at the beginning of a text, `yes` only after a space."""
    vocabulary = {word: i for i, word in enumerate(["<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    merges = [("n", "o"), ("e", "s"), ("Ġ", "y"), ("Ġy", "es")]
    vocabulary |= {"".join(pair): len(vocabulary) + i for i, pair in enumerate(merges)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def sentence_piece() -> PreTrainedTokenizerFast:
    """Without a normaliser that joins spaces: a text that begins with one begins with a piece for it."""
    pieces = [("<unk>", 0.0), ("▁", -2.0), ("▁yes", -3.0), ("▁no", -3.0), *((c, -9.0) for c in "yesno")]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def test_words_are_found_as_they_stand_in_a_text():
    assert ids_of(word_piece(), ["Yes", "No"]) == ["yes", "no"]
    assert ids_of(byte_level(), ["yes"]) == ["Ġyes"]
    assert ids_of(sentence_piece(), ["yes", "no"]) == ["▁yes", "▁no"]


@pytest.mark.parametrize(
    ("make", "words", "said"),
    [
        (word_piece, ["terrible", "great"], r"'terrible' of task nli is 2 tokens \(ter ##rible\)"),
        (word_piece, ["great", "bad"], "'bad' of task nli is not in its vocabulary"),
        (word_piece, ["great", ""], "'' of task nli is not in its vocabulary"),
        (word_piece, ["Yes", "yes"], "'Yes' and 'yes' are the same token yes"),
        (byte_level, ["yes", "no"], r"'no' of task nli is 3 tokens \(Ġ n o\)|'no' of task nli is 2 tokens \(Ġ no\)"),
        (sentence_piece, ["yes", "son"], "'son' of task nli is 4 tokens"),
    ],
)
def test_a_word_that_is_not_one_token_of_its_own_is_refused(make, words, said):
    with pytest.raises(UsageError, match=said) as error:
        ids_of(make(), words)
    assert "choose one for each of c0, c1, each one token, in this order: --set head.words=" in error.value.hint


@pytest.mark.parametrize(("kind", "outputs"), [("class", 3), ("multi", 3), ("score", 1), ("tokens", 3), ("span", 2)])
def test_there_must_be_a_word_for_each_output(kind, outputs):
    assert len(label_word_ids(tiny_tokenizer(), TASKS[kind])) == outputs
    with pytest.raises(UsageError, match=f"4 label words for the {outputs} outputs of task"):
        label_word_ids(tiny_tokenizer(), TASKS[kind], ["w1", "w2", "w3", "w4"])
    with pytest.raises(UsageError, match="has no label words") as error:
        label_word_ids(tiny_tokenizer(), replace(TASKS[kind], words=()))
    assert "head.words" in error.value.hint


def test_a_word_is_refused_before_a_model_is_given_back(encoder_dir):
    with pytest.raises(UsageError, match="label word 'great' of task nli is not in its vocabulary"):
        load(encoder_dir("bert"), words=("w1", "w2", "great"))


@pytest.mark.parametrize("task", tasks().values(), ids=lambda task: task.name)
def test_every_named_task_has_words_for_its_outputs(task):
    assert len(set(task.words)) == {"score": 1, "span": 2}.get(task.kind, len(task.labels))


@pytest.mark.parametrize("task", [t for t in tasks().values() if t.name.startswith("demo-")], ids=lambda t: t.name)
def test_words_of_the_embedded_tasks_are_tokens_of_the_embedded_tokenizer(task):
    tokenizer = AutoTokenizer.from_pretrained(location("demo"))
    assert tuple(tokenizer.convert_ids_to_tokens(label_word_ids(tokenizer, task))) == task.words
