"""Heads of every type: a saved encoder under a new head; heads that a checkpoint brings, their labels checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from encoders import tiny_config, tiny_encoder, tiny_tokenizer
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    RobertaTokenizerFast,
    pipeline,
)

from kdcli.errors import UsageError
from kdcli.models.capture import capture
from kdcli.models.heads import AUTO_CLASS, PROBLEM, TaskModel, load_for_task
from kdcli.models.layout import LAYOUTS
from kdcli.models.load import save_model
from kdcli.types import Kind, Needs, Task

TYPES = sorted(LAYOUTS)
NAMES = ("entailment", "neutral", "contradiction")
TASKS: dict[Kind, Task] = {
    "class": Task("nli", "class", ("premise", "hypothesis"), ("accuracy",), NAMES),
    "multi": Task("topics", "multi", ("text",), ("micro_f1",), ("sport", "art", "war", "law")),
    "score": Task("likeness", "score", ("text",), ("pearson",)),
    "tokens": Task("tags", "tokens", ("tokens",), ("f1",), ("O", "B-PER", "I-PER")),
    "span": Task("answers", "span", ("question", "context"), ("f1",)),
}
OUTPUTS = {"class": 3, "multi": 4, "score": 1, "tokens": 3, "span": 2}
WITHOUT = {
    *(("esm", "span"), ("eurobert", "span"), ("nomic_bert", "span")),
    *(("splinter", kind) for kind in TASKS if kind != "span"),
}
"""Types for which transformers has no class of that kind."""
KEPT = "weights.kept"
CONVOLVING = {"convbert": "its convolution runs over neighbouring tokens, padding or not, whatever the mask says"}
GIVES_TYPES = {name for name in TYPES if getattr(tiny_config(name), "type_vocab_size", 0) in range(2, 99)}


@pytest.fixture(scope="module")
def encoder_dir(tmp_path_factory) -> Callable[[str], Path]:
    """Model type → a directory with a tiny encoder of it, saved once."""
    made: dict[str, Path] = {}

    def of(model_type: str) -> Path:
        if model_type not in made:
            torch.manual_seed(0)
            folder = tmp_path_factory.mktemp(model_type)
            # Wide weights, that outputs differ by more than rounding.
            encoder = tiny_encoder(model_type, initializer_range=0.2)
            encoder.save_pretrained(folder)
            # As the model names them: files of some types have names of their own.
            save_file({name: tensor.clone() for name, tensor in encoder.state_dict().items()}, folder / KEPT)
            tiny_tokenizer().save_pretrained(folder)
            made[model_type] = folder
        return made[model_type]

    return of


def load(source, kind: Kind, **how):
    return load_for_task(str(source), TASKS[kind], **{"new_head": True, "seed": 5} | how)


def batch_of(model, length: int = 10, real: int = 6) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(5, 60, (2, length))
    mask = torch.ones_like(ids)
    mask[1, real:] = 0
    ids[mask == 0] = model.config.pad_token_id
    return {"input_ids": ids, "attention_mask": mask}


def logits_of(output) -> torch.Tensor:
    return torch.stack([output.start_logits, output.end_logits], -1) if "start_logits" in output else output.logits


def same(one, two) -> None:
    assert set(one) == set(two)
    for name, tensor in one.items():
        assert torch.equal(tensor, two[name]), name


@dataclass
class Case:
    """A new head for a kind of task on a saved encoder, and what transformers loads of it once it is saved."""

    model_type: str
    kind: Kind
    source: Path
    headed: TaskModel
    saved: Path
    stock: PreTrainedModel


CASES = [(t, k) for t in TYPES for k in TASKS if (t, k) not in WITHOUT]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request, encoder_dir, tmp_path_factory) -> Case:
    model_type, kind = request.param
    source, saved = encoder_dir(model_type), tmp_path_factory.mktemp("saved")
    headed = load(source, kind)
    assert not headed.model.training
    save_model(headed.model, headed.tokenizer, saved)
    return Case(model_type, kind, source, headed, saved, AUTO_CLASS[kind].from_pretrained(saved).eval())


@pytest.mark.parametrize(("model_type", "kind"), sorted(WITHOUT))
def test_a_kind_for_which_transformers_has_no_head_is_refused(encoder_dir, model_type, kind):
    with pytest.raises(UsageError, match=f"{model_type} has no head for .* in transformers"):
        load(encoder_dir(model_type), kind)


@torch.no_grad()
def test_a_new_head_stands_on_the_saved_encoder(case):
    kind, task, model, again = case.kind, TASKS[case.kind], case.headed.model, case.stock
    assert case.headed.note.startswith("a new head: ")
    assert case.headed.token_types == (case.model_type in GIVES_TYPES)
    assert {p.dtype for p in model.parameters()} == {torch.float32}

    kept, own = load_file(case.source / KEPT), model.base_model.state_dict()
    assert {name for name in set(kept) ^ set(own) if not name.startswith("pooler.")} == set()
    for name in set(kept) & set(own):
        assert torch.equal(kept[name], own[name]), name

    config = model.config
    if kind != "span":
        names = ("score",) if kind == "score" else task.labels
        assert config.id2label == dict(enumerate(names))
        assert config.label2id == {name: i for i, name in enumerate(names)}
        assert config.problem_type == PROBLEM.get(kind)
    assert config.finetuning_task == task.name
    assert config.num_labels == OUTPUTS[kind]

    batch = batch_of(model)
    logits = logits_of(model(**batch))
    assert logits.shape == ((2, 10, OUTPUTS[kind]) if kind in ("tokens", "span") else (2, OUTPUTS[kind]))

    assert type(again) is type(model)
    same(again.state_dict(), model.state_dict())
    torch.testing.assert_close(logits_of(again(**batch)), logits)
    for name in ("id2label", "label2id", "problem_type", "finetuning_task", "num_labels"):
        assert getattr(again.config, name) == getattr(config, name)
    # And it is a model that can do the task: not a word of a new head.
    back = load(case.saved, kind, new_head=False)
    assert back.note == "its own head"
    same(back.model.state_dict(), model.state_dict())


@torch.no_grad()
def test_capture_gives_the_logits_of_the_stock_forward(case):
    listen = capture(case.headed.model, Needs(logits=True))
    batch = batch_of(case.stock)
    own, heard = logits_of(case.stock(**batch)), listen(batch).logits
    # Splinter moves padding to the smallest number there is.
    torch.testing.assert_close(heard, own, atol=1e-5, rtol=1e-4)
    assert not torch.equal(own[0], own[1])
    if case.model_type in CONVOLVING:
        return
    # Without its padding the second row says the same.
    alone = listen({name: tensor[1:, :6] for name, tensor in batch.items()}).logits
    padded = heard[1:, :6] if case.kind in ("tokens", "span") else heard[1:]
    torch.testing.assert_close(alone, padded, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("model_type", TYPES)
def test_a_new_head_is_drawn_from_its_seed(encoder_dir, model_type):
    kind: Kind = "span" if model_type == "splinter" else "class"
    source = encoder_dir(model_type)
    torch.manual_seed(1)
    one = load(source, kind).model
    torch.manual_seed(2)
    two, other = load(source, kind).model, load(source, kind, seed=6).model
    same(one.state_dict(), two.state_dict())
    differing = [n for n, t in one.state_dict().items() if not torch.equal(t, other.state_dict()[n])]
    assert differing
    # Nomic's encoders have no pooler, but its head reads one.
    inside = {n.split(".")[1] for n in differing if n.startswith(f"{one.base_model_prefix}.")}
    assert inside == ({"pooler"} if model_type == "nomic_bert" else set())


def test_a_pooler_that_the_checkpoint_lacks_is_drawn_from_the_seed_too(encoder_dir, tmp_path):
    """Encoders saved from masked language models have no pooler, but the head of BERT reads one."""
    tiny = tiny_encoder("bert")
    tiny_tokenizer().save_pretrained(tmp_path)
    tiny.config.save_pretrained(tmp_path)
    bare = {name: tensor for name, tensor in tiny.state_dict().items() if not name.startswith("pooler.")}
    save_file(bare, tmp_path / "model.safetensors", {"format": "pt"})
    torch.manual_seed(1)
    one = load(tmp_path, "class").model
    torch.manual_seed(2)
    two = load(tmp_path, "class").model
    same(one.state_dict(), two.state_dict())
    assert not torch.equal(one.bert.pooler.dense.weight, load(tmp_path, "class", seed=6).model.bert.pooler.dense.weight)


@pytest.mark.parametrize("lost", ["classifier.weight", "bert.pooler.dense.weight"])
def test_a_checkpoint_that_lacks_a_part_of_its_head_is_not_used_with_a_random_one(headed_dir, lost):
    folder = headed_dir(NAMES)
    weights = load_file(folder / "model.safetensors")
    del weights[lost]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UsageError, match=f"incomplete: 1 tensors are missing, for example {lost}"):
        load(folder, "class", new_head=False)


@pytest.fixture
def headed_dir(tmp_path) -> Callable[..., Path]:
    """Names of labels → a directory with a tiny BERT that classifies texts by them."""

    def of(names, place="model", auto=AutoModelForSequenceClassification, model_type="bert", **changes) -> Path:
        torch.manual_seed(3)
        config = tiny_config(model_type, initializer_range=0.5, num_labels=len(names), **changes)
        if names[0] is not None:
            config.id2label = dict(enumerate(names))
            config.label2id = {name: i for i, name in enumerate(names)}
        auto.from_config(config).save_pretrained(tmp_path / place)
        tiny_tokenizer().save_pretrained(tmp_path / place)
        return tmp_path / place

    return of


@torch.no_grad()
def outputs(model) -> torch.Tensor:
    return logits_of(model(**batch_of(model)))


def test_a_checkpoint_with_the_labels_of_the_task_is_used_as_it_is(headed_dir):
    # A spelling of its own does not matter; the data's is written down.
    folder = headed_dir(("ENTAILMENT", "Neutral", "contra-diction"))
    for new_head in (True, False):
        headed = load(folder, "class", new_head=new_head)
        assert headed.note == "its own head"
        assert headed.model.config.id2label == dict(enumerate(NAMES))
        stock = AutoModelForSequenceClassification.from_pretrained(folder).eval()
        torch.testing.assert_close(outputs(headed.model), outputs(stock))


@pytest.mark.parametrize("new_head", [True, False])
@pytest.mark.parametrize(
    "order", [("contradiction", "entailment", "neutral"), ("contradiction", "neutral", "entailment")]
)
def test_labels_in_another_order_are_refused_with_the_mapping_that_they_need(headed_dir, order, new_head):
    folder = headed_dir(order)
    with pytest.raises(UsageError) as error:
        load(folder, "class", new_head=new_head)
    needed = [NAMES.index(name) for name in order]
    assert f"0 {order[0]}, 1 {order[1]}, 2 {order[2]}" in error.value.message
    assert "0 entailment, 1 neutral, 2 contradiction" in error.value.message
    assert f"--set head.label_map='{needed}'" in error.value.hint


@pytest.mark.parametrize("model_type", [t for t in TYPES if t != "splinter"])
def test_with_the_mapping_a_permuted_model_says_what_the_unpermuted_one_says(headed_dir, model_type):
    # A cycle: a permutation that is not its own inverse.
    order = ("contradiction", "entailment", "neutral")
    folder = headed_dir(order, model_type=model_type)
    stock = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    headed = load(folder, "class", label_map=[2, 0, 1], new_head=False)
    assert headed.note == "its own head, in the data's order of labels"
    assert headed.model.config.id2label == dict(enumerate(NAMES))
    own, found = outputs(stock), outputs(headed.model)
    for number, name in enumerate(NAMES):
        torch.testing.assert_close(found[:, number], own[:, order.index(name)])
    said = [order[i] for i in own.argmax(-1)]
    assert [NAMES[i] for i in found.argmax(-1)] == said


def test_a_permuted_model_of_words_is_put_in_order_too_and_saved_so(headed_dir, tmp_path):
    order = ("I-PER", "O", "B-PER")
    folder = headed_dir(order, auto=AutoModelForTokenClassification)
    with pytest.raises(UsageError, match="in another order") as error:
        load(folder, "tokens")
    assert "head.label_map='[2, 0, 1]'" in error.value.hint
    headed = load(folder, "tokens", label_map=[2, 0, 1])
    stock = AutoModelForTokenClassification.from_pretrained(folder).eval()
    torch.testing.assert_close(outputs(headed.model), outputs(stock)[..., [1, 2, 0]])
    save_model(headed.model, headed.tokenizer, tmp_path / "saved")
    again = load(tmp_path / "saved", "tokens", new_head=False)
    torch.testing.assert_close(outputs(again.model), outputs(headed.model))


def test_the_mapping_of_a_model_without_names(headed_dir):
    folder = headed_dir([None] * 3)
    stock = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    headed = load(folder, "class", label_map=[1, 2, 0], new_head=False)
    torch.testing.assert_close(outputs(headed.model)[:, [1, 2, 0]], outputs(stock))


@pytest.mark.parametrize("label_map", [[0, 1], [0, 1, 1], [1, 2, 3], [0, 1, 2, 3], []])
def test_a_mapping_that_is_none_is_refused(headed_dir, label_map):
    with pytest.raises(UsageError, match=r"head\.label_map must hold each of 0 ... 2 once") as error:
        load(headed_dir(NAMES), "class", label_map=label_map)
    assert str(label_map) in error.value.message


def test_labels_without_names_are_taken_in_the_datas_order_and_that_is_said(headed_dir):
    headed = load(headed_dir([None] * 3), "class", new_head=False)
    assert headed.note.startswith("its own head; its labels have no names")
    assert headed.model.config.id2label == dict(enumerate(NAMES))


MISFITS = [
    (("a", "b"), {}, "its head has 2 outputs, nli needs 3"),
    (("a", "b", "c"), {}, "its labels are 0 a, 1 b, 2 c, those of nli 0 entailment, 1 neutral, 2 contradiction"),
    ((None,), {"problem_type": "regression"}, "its head is for regression, not single_label_classification"),
    ((None,), {}, "its head has 1 outputs, nli needs 3"),
    (NAMES, {"problem_type": "multi_label_classification"}, "its head is for multi_label_classification"),
    (NAMES, {"auto": AutoModelForTokenClassification}, "BertForTokenClassification has no head for sequence class"),
]


@pytest.mark.parametrize(("names", "changes", "said"), MISFITS)
def test_a_head_that_does_not_fit_is_refused_or_replaced_where_that_is_allowed(headed_dir, names, changes, said):
    folder = headed_dir(names, **changes)
    with pytest.raises(UsageError) as error:
        load(folder, "class", new_head=False)
    assert f"{folder} cannot do task nli: " in error.value.message
    assert said in error.value.message
    assert "kdcli finetune" in error.value.hint
    headed = load(folder, "class")
    assert headed.note.startswith("a new head: ")
    assert said in headed.note
    assert outputs(headed.model).shape == (2, 3)
    assert headed.model.config.problem_type == "single_label_classification"
    # The encoder under the old head is kept.
    weights = load_file(folder / "model.safetensors")
    own = headed.model.bert.encoder.layer[1].output.dense.weight
    assert torch.equal(own, weights["bert.encoder.layer.1.output.dense.weight"])


@pytest.mark.parametrize(("kind", "names"), [("score", NAMES), ("multi", NAMES), ("span", NAMES), ("tokens", NAMES)])
def test_a_classifier_of_texts_does_no_other_task(headed_dir, kind, names):
    folder = headed_dir(names, problem_type="single_label_classification")
    with pytest.raises(UsageError, match=f"cannot do task {TASKS[kind].name}"):
        load(folder, kind, new_head=False)
    assert outputs(load(folder, kind).model).shape[-1] == OUTPUTS[kind]


def test_a_regression_head_is_kept_for_a_score(headed_dir):
    folder = headed_dir([None], problem_type="regression")
    headed = load(folder, "score", new_head=False)
    assert headed.note == "its own head"
    stock = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    torch.testing.assert_close(outputs(headed.model), outputs(stock))


def test_a_bare_encoder_can_do_no_task_without_a_new_head(encoder_dir):
    with pytest.raises(UsageError, match="BertModel has no head for sequence classification"):
        load(encoder_dir("bert"), "class", new_head=False)


def test_the_demo_takes_a_head():
    headed = load("demo", "class")
    assert headed.source == "demo"
    assert headed.model.config.num_labels == 3


# What a pipeline of transformers says of a saved model.


def saved(headed, folder) -> str:
    save_model(headed.model, headed.tokenizer, folder)
    return str(folder)


@torch.no_grad()
def logits_of_words(headed) -> torch.Tensor:
    return headed.model(input_ids=headed.tokenizer("w1 w2 w3", return_tensors="pt")["input_ids"]).logits[0]


@pytest.mark.parametrize("model_type", ["bert", "modernbert", "roberta"])
def test_a_pipeline_says_the_names_of_classes(encoder_dir, tmp_path, model_type):
    headed = load(encoder_dir(model_type), "class")
    (said,) = pipeline("text-classification", model=saved(headed, tmp_path), top_k=None)("w1 w2 w3")
    assert {one["label"] for one in said} == set(NAMES)
    likely = logits_of_words(headed).softmax(-1)
    assert {one["label"]: pytest.approx(one["score"], abs=1e-5) for one in said} == dict(
        zip(NAMES, likely.tolist(), strict=True)
    )


def test_a_pipeline_gives_several_labels_their_own_probabilities(encoder_dir, tmp_path):
    headed = load(encoder_dir("distilbert"), "multi")
    (said,) = pipeline("text-classification", model=saved(headed, tmp_path), top_k=None)("w1 w2 w3")
    likely = logits_of_words(headed).sigmoid()
    assert {one["label"]: pytest.approx(one["score"], abs=1e-5) for one in said} == dict(
        zip(TASKS["multi"].labels, likely.tolist(), strict=True)
    )


def test_a_pipeline_gives_a_score_as_it_is(encoder_dir, tmp_path):
    headed = load(encoder_dir("electra"), "score")
    (said,) = pipeline("text-classification", model=saved(headed, tmp_path))("w1 w2 w3")
    score = logits_of_words(headed).item()
    assert (said["label"], said["score"]) == ("score", pytest.approx(score, abs=1e-5))


def test_a_pipeline_says_the_tags_of_words(encoder_dir, tmp_path):
    headed = load(encoder_dir("xlm-roberta"), "tokens")
    said = pipeline("token-classification", model=saved(headed, tmp_path), ignore_labels=[])("w1 w2 w3")
    chosen = logits_of_words(headed).argmax(-1)
    assert [(one["word"], one["entity"]) for one in said] == [
        (word, TASKS["tokens"].labels[i]) for word, i in zip(["w1", "w2", "w3"], chosen.tolist(), strict=True)
    ]


# Byte-level tokenizers: words come one by one, and one in the middle of a text begins with a space.


def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<unk>", "<s>", "</s>", "<mask>", *alphabet])}
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("a", "t"), ("c", "at"), ("Ġ", "cat")]
    vocabulary |= {"".join(pair): len(vocabulary) + i for i, pair in enumerate(merges)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def of_its_own_class(tokenizer: Tokenizer):
    model = {"vocab": tokenizer.get_vocab(), "merges": [("t", "h"), ("th", "e"), ("Ġ", "the"), ("a", "t"), ("c", "at")]}
    model["merges"].append(("Ġ", "cat"))
    return RobertaTokenizerFast(**model)


def of_no_class(tokenizer: Tokenizer):
    """As ModernBERT's."""
    special = {
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "cls_token": "<s>",
        "sep_token": "</s>",
        "mask_token": "<mask>",
    }
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def normalised(tokenizer: Tokenizer):
    tokenizer.normalizer = normalizers.NFC()
    return of_no_class(tokenizer)


@pytest.mark.parametrize("make", [of_its_own_class, of_no_class, normalised])
def test_a_byte_level_tokenizer_puts_a_space_before_each_word(tmp_path, make):
    tiny_encoder("roberta", vocab_size=300).save_pretrained(tmp_path)
    make(byte_level()).save_pretrained(tmp_path)
    headed = load(tmp_path, "tokens")
    save_model(headed.model, headed.tokenizer, tmp_path / "saved")
    again = load(tmp_path / "saved", "tokens", new_head=False).tokenizer
    for tokenizer in (headed.tokenizer, AutoTokenizer.from_pretrained(tmp_path / "saved"), again):
        found = tokenizer(["the", "cat", "the"], is_split_into_words=True, add_special_tokens=False)
        assert tokenizer.convert_ids_to_tokens(found["input_ids"]) == ["Ġthe", "Ġcat", "Ġthe"]
        assert found.word_ids() == [0, 1, 2]
    # Texts keep the tokenizer they came with.
    plain = load(tmp_path, "class").tokenizer
    assert plain.convert_ids_to_tokens(plain("the cat", add_special_tokens=False)["input_ids"]) == ["the", "Ġcat"]


def test_other_tokenizers_stay_as_they_are(encoder_dir):
    headed = load(encoder_dir("bert"), "tokens")
    assert headed.tokenizer.backend_tokenizer.to_str() == tiny_tokenizer().backend_tokenizer.to_str()


def test_a_mapping_without_a_head_to_reorder_is_refused(encoder_dir):
    with pytest.raises(UsageError, match=r"head\.label_map has no head to reorder"):
        load(encoder_dir("bert"), "class", label_map=[2, 0, 1])
