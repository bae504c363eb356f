"""Heads of every type: a saved encoder under a new head; heads that a checkpoint brings, their
labels checked."""

from collections.abc import Callable
from pathlib import Path

import encoders
import pytest
import torch
import transformers as hf
from encoders import (
    NAMES,
    TASKS,
    TYPES,
    assert_same_state,
    logits_of,
    on_disk,
    tiny_config,
    tiny_encoder,
    tiny_tokenizer,
)
from safetensors.torch import load_file, save_file
from tokenizers import normalizers

from kdcli.errors import UsageError
from kdcli.models.capture import capture
from kdcli.models.heads import AUTO_CLASS, PROBLEM, load_for_task, misfit_of
from kdcli.models.load import save_model
from kdcli.types import Kind, Needs, Task

pytestmark = pytest.mark.slow

OUTPUTS = {"class": 3, "multi": 3, "score": 1, "tokens": 3, "span": 2}
WITHOUT = {("esm", "span"), ("eurobert", "span"), ("nomic_bert", "span")}
WITHOUT |= {("splinter", kind) for kind in TASKS if kind != "span"}
"""Types for which transformers has no class of that kind."""
CASES = [(t, "span" if t == "splinter" else "class") for t in TYPES]
CASES += [("roberta", kind) for kind in TASKS if kind != "class"]
KEPT = "weights.kept"


@pytest.fixture(scope="module")
def encoder_dir(tmp_path_factory) -> Callable[[str], Path]:
    """Model type -> a directory with a tiny encoder of it, saved once."""
    made: dict[str, Path] = {}

    def of(model_type: str) -> Path:
        if model_type not in made:
            torch.manual_seed(0)
            folder = tmp_path_factory.mktemp(model_type)
            # Wide weights, so that outputs differ by more than rounding.
            encoder = tiny_encoder(model_type, initializer_range=0.2)
            # The model's own names: saved files of some types have others.
            save_file(
                {name: tensor.clone() for name, tensor in encoder.state_dict().items()},
                folder / KEPT,
            )
            made[model_type] = on_disk(encoder, folder)
        return made[model_type]

    return of


@pytest.fixture
def headed_dir(tmp_path) -> Callable[..., Path]:
    """Names of labels -> a directory with a tiny model that classifies by them."""

    def of(names, auto=hf.AutoModelForSequenceClassification, model_type="bert", **changes) -> Path:
        torch.manual_seed(3)
        config = tiny_config(model_type, initializer_range=0.5, num_labels=len(names), **changes)
        if names[0] is not None:
            config.id2label = dict(enumerate(names))
            config.label2id = {name: i for i, name in enumerate(names)}
        return on_disk(auto.from_config(config), tmp_path / "model")

    return of


def load(source, kind: Kind, **how):
    return load_for_task(str(source), TASKS[kind], **{"new_head": True, "seed": 5} | how)


def saved(headed, folder) -> str:
    save_model(headed.model, headed.tokenizer, folder)
    return str(folder)


def outputs(model) -> torch.Tensor:
    return logits_of(model, encoders.padded_batch(model))


def stock(folder, auto=hf.AutoModelForSequenceClassification):
    return auto.from_pretrained(folder).eval()


@pytest.mark.parametrize(("model_type", "kind"), sorted(WITHOUT))
def test_a_kind_for_which_transformers_has_no_head_is_refused(encoder_dir, model_type, kind):
    with pytest.raises(UsageError, match=f"{model_type} has no head for .* in transformers"):
        load(encoder_dir(model_type), kind)


@pytest.mark.parametrize(("model_type", "kind"), CASES)
def test_a_new_head_on_a_saved_encoder(encoder_dir, tmp_path, model_type, kind):
    source, task = encoder_dir(model_type), TASKS[kind]
    headed = load(source, kind)
    model, config = headed.model, headed.model.config
    assert not model.training
    assert headed.note.startswith("a new head: ")
    assert headed.token_types == (
        getattr(tiny_config(model_type), "type_vocab_size", 0) in range(2, 99)
    )
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    # The encoder is kept.
    kept, own = load_file(source / KEPT), model.base_model.state_dict()
    assert {name for name in set(kept) ^ set(own) if not name.startswith("pooler.")} == set()
    assert all(torch.equal(kept[name], own[name]) for name in set(kept) & set(own))
    # The configuration describes the task.
    if kind != "span":
        names = ("score",) if kind == "score" else task.labels
        assert config.id2label == dict(enumerate(names))
        assert config.label2id == {name: i for i, name in enumerate(names)}
        assert config.problem_type == PROBLEM.get(kind)
    assert (config.kdcli_task, config.num_labels) == (task.name, OUTPUTS[kind])
    # A stock class loads what is saved, and so does kdcli: a model that can do the task.
    batch = encoders.padded_batch(model)
    logits = logits_of(model, batch)
    assert logits.shape == (
        (2, 10, OUTPUTS[kind]) if kind in ("tokens", "span") else (2, OUTPUTS[kind])
    )
    again = stock(saved(headed, tmp_path), AUTO_CLASS[kind])
    assert type(again) is type(model)
    assert_same_state(again, model)
    torch.testing.assert_close(logits_of(again, batch), logits)
    for name in ("id2label", "label2id", "problem_type", "kdcli_task", "num_labels"):
        assert getattr(again.config, name) == getattr(config, name)
    back = load(tmp_path, kind, new_head=False)
    assert back.note.startswith("its own head")
    assert_same_state(back.model, model)
    # `capture` gives the logits of the stock forward, next to other signals too.
    with torch.no_grad():
        captured = capture(model, Needs(q=frozenset({1}), logits=True))(batch).logits
    torch.testing.assert_close(captured, logits, atol=1e-5, rtol=1e-4)
    assert not torch.equal(captured[0], captured[1])


@pytest.mark.parametrize("model_type", ["bert", "nomic_bert", "splinter", "modernbert"])
def test_a_new_head_is_drawn_from_its_seed(encoder_dir, model_type):
    kind: Kind = "span" if model_type == "splinter" else "class"
    source = encoder_dir(model_type)
    torch.manual_seed(1)
    one = load(source, kind).model
    torch.manual_seed(2)
    two, other = load(source, kind).model, load(source, kind, seed=6).model
    assert_same_state(one, two)
    differing = [
        n for n, t in one.state_dict().items() if not torch.equal(t, other.state_dict()[n])
    ]
    assert differing
    # Nomic's encoders have no pooler, but its head reads one.
    inside = {n.split(".")[1] for n in differing if n.startswith(f"{one.base_model_prefix}.")}
    assert inside == ({"pooler"} if model_type == "nomic_bert" else set())


@pytest.mark.parametrize("lost", ["classifier.weight", "bert.pooler.dense.weight"])
def test_a_checkpoint_that_lacks_a_part_of_its_head_is_refused(headed_dir, lost):
    folder = headed_dir(NAMES)
    weights = load_file(folder / "model.safetensors")
    del weights[lost]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UsageError, match=f"incomplete: 1 tensors are missing, for example {lost}"):
        load(folder, "class", new_head=False)


@pytest.mark.parametrize(
    ("kind", "names", "changes", "note"),
    [
        # Another spelling of the names does not matter; the data's is written down.
        ("class", ("ENTAILMENT", "Neutral", "contra-diction"), {}, "its own head"),
        (
            "class",
            [None] * 3,
            {},
            "its own head; its labels have no names, so their order is taken to be the data's",
        ),
        ("score", [None], {"problem_type": "regression"}, "its own head"),
    ],
)
def test_a_fitting_head_is_used_as_it_is(headed_dir, kind, names, changes, note):
    folder = headed_dir(names, **changes)
    for new_head in (True, False):
        headed = load(folder, kind, new_head=new_head)
        assert headed.note == note
        assert headed.model.config.id2label == dict(
            enumerate(NAMES if kind == "class" else ["score"])
        )
        torch.testing.assert_close(outputs(headed.model), outputs(stock(folder)))


def test_labels_in_another_order_are_refused_with_the_mapping_that_they_need(headed_dir):
    folder = headed_dir(("contradiction", "entailment", "neutral"))
    with pytest.raises(UsageError) as error:
        load(folder, "class")
    assert "0 contradiction, 1 entailment, 2 neutral" in error.value.message
    assert "0 entailment, 1 neutral, 2 contradiction" in error.value.message
    assert "--set head.label_map='[2, 0, 1]'" in error.value.hint


@pytest.mark.parametrize(
    ("model_type", "named"), [*((t, True) for t in TYPES if t != "splinter"), ("bert", False)]
)
def test_the_mapping_puts_the_outputs_in_the_datas_order(headed_dir, model_type, named):
    # A cycle: a permutation that is not its own inverse.
    order = ("contradiction", "entailment", "neutral")
    folder = headed_dir(order if named else [None] * 3, model_type=model_type)
    headed = load(folder, "class", label_map=[2, 0, 1], new_head=False)
    assert headed.note.startswith("its own head, in the data's order of labels")
    assert headed.model.config.id2label == dict(enumerate(NAMES))
    torch.testing.assert_close(outputs(headed.model)[:, [2, 0, 1]], outputs(stock(folder)))


@pytest.mark.parametrize(
    "labels", [("+", "-"), ("<=50K", ">50K"), ("C", "C++"), ("1", "-1"), (":)", ":(")]
)
def test_punctuation_that_tells_labels_apart_is_compared(labels):
    task = Task("own", "class", ("text",), ("accuracy",), labels)
    architecture = {"architectures": ["BertForSequenceClassification"]}
    for names in (labels, labels[::-1]):
        config = hf.BertConfig(id2label=dict(enumerate(names)), **architecture)
        if names == labels:
            assert misfit_of("model", config, task, None) is None
            continue
        with pytest.raises(UsageError, match="in another order") as error:
            misfit_of("model", config, task, None)
        assert "head.label_map='[1, 0]'" in error.value.hint


def test_case_never_tells_a_label_of_the_data_from_one_of_the_head():
    config = hf.BertConfig(
        id2label={0: "<=50K", 1: ">50K"}, architectures=["BertForSequenceClassification"]
    )
    task = Task("own", "class", ("text",), ("accuracy",), ("<=50k", ">50k"))
    assert misfit_of("model", config, task, None) is None


@pytest.mark.parametrize("label_map", [[0, 1], [0, 1, 1], [1, 2, 3]])
def test_a_mapping_that_is_no_permutation_is_refused(headed_dir, label_map):
    with pytest.raises(UsageError, match=r"must hold each of 0 ... 2 once") as error:
        load(headed_dir(NAMES), "class", label_map=label_map)
    assert str(label_map) in error.value.message


def test_a_mapping_without_a_head_to_reorder_is_refused(encoder_dir):
    with pytest.raises(UsageError, match=r"head\.label_map has no head to reorder"):
        load(encoder_dir("bert"), "class", label_map=[2, 0, 1])


@pytest.mark.parametrize(
    ("kind", "names", "changes", "reason"),
    [
        ("class", ("a", "b"), {}, "it predicts a, b, but task nli has entailment, neutral"),
        (
            "class",
            ("a", "b", "c"),
            {},
            "it predicts a, b, c, but task nli has entailment, neutral, contradiction",
        ),
        (
            "class",
            (None,),
            {"problem_type": "regression"},
            "its head is for regression, not single_label_class",
        ),
        ("class", (None,), {}, "its head has 1 outputs, but task nli needs 3"),
        (
            "class",
            NAMES,
            {"problem_type": "multi_label_classification"},
            "its head is for multi_label_classification",
        ),
        (
            "class",
            NAMES,
            {"auto": hf.AutoModelForTokenClassification},
            "BertForTokenClassification has no head for seque",
        ),
        (
            "multi",
            NAMES,
            {"problem_type": "single_label_classification"},
            "not multi_label_classification",
        ),
        ("score", NAMES, {"problem_type": "single_label_classification"}, "not regression"),
        ("span", NAMES, {}, "has no head for question answering"),
        ("tokens", NAMES, {}, "has no head for token classification"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_or_replaced(headed_dir, kind, names, changes, reason):
    folder = headed_dir(names, **changes)
    with pytest.raises(UsageError) as error:
        load(folder, kind, new_head=False)
    assert f"the head of {folder} does not fit task {TASKS[kind].name}: " in error.value.message
    assert reason in error.value.message
    assert "kdcli finetune" in error.value.hint
    # Lists of words are no texts that this head could read without their labels.
    assert ("ignore the labels" in error.value.hint) == (kind != "tokens")
    headed = load(folder, kind)
    assert headed.note.startswith("a new head: ")
    assert reason in headed.note
    assert outputs(headed.model).shape[-1] == OUTPUTS[kind]
    assert headed.model.config.problem_type == PROBLEM.get(kind, headed.model.config.problem_type)
    # The encoder under the old head is kept.
    own = headed.model.bert.encoder.layer[1].output.dense.weight
    assert torch.equal(
        own, load_file(folder / "model.safetensors")["bert.encoder.layer.1.output.dense.weight"]
    )


def test_a_bare_encoder_needs_a_new_head(encoder_dir):
    with pytest.raises(UsageError, match="BertModel has no head for sequence classification"):
        load(encoder_dir("bert"), "class", new_head=False)
    # A tokenizer that is not byte-level stays as it is.
    tokenizer = load(encoder_dir("bert"), "tokens").tokenizer
    assert tokenizer.backend_tokenizer.to_str() == tiny_tokenizer().backend_tokenizer.to_str()
    assert load("demo", "class").model.config.num_labels == 3


# Byte-level tokenizers: words come one by one, and one in the middle of a text begins with a space.

MERGES = (("t", "h"), ("th", "e"), ("Ġ", "the"), ("a", "t"), ("c", "at"), ("Ġ", "cat"))
SPECIAL = {
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "cls_token": "<s>",
    "sep_token": "</s>",
    "mask_token": "<mask>",
}


def byte_level_tokenizer(how: str):
    tokenizer = encoders.byte_level(*MERGES)
    if how == "a class of its own":
        return hf.RobertaTokenizerFast(vocab=tokenizer.get_vocab(), merges=list(MERGES))
    if how == "normalised":
        tokenizer.normalizer = normalizers.NFC()
    return hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)


@pytest.mark.parametrize(
    "how", ["a class of its own", "the plain class, as ModernBERT's", "normalised"]
)
def test_a_byte_level_tokenizer_puts_a_space_before_each_word(tmp_path, how):
    tiny_encoder("roberta", vocab_size=300).save_pretrained(tmp_path)
    byte_level_tokenizer(how).save_pretrained(tmp_path)
    headed = load(tmp_path, "tokens")
    again = load(saved(headed, tmp_path / "saved"), "tokens", new_head=False).tokenizer
    for tokenizer in (
        headed.tokenizer,
        hf.AutoTokenizer.from_pretrained(tmp_path / "saved"),
        again,
    ):
        encoded = tokenizer(
            ["the", "cat", "the"], is_split_into_words=True, add_special_tokens=False
        )
        assert tokenizer.convert_ids_to_tokens(encoded["input_ids"]) == ["Ġthe", "Ġcat", "Ġthe"]
        assert encoded.word_ids() == [0, 1, 2]
    # Texts keep the tokenizer they came with.
    plain = load(tmp_path, "class").tokenizer
    assert plain.convert_ids_to_tokens(plain("the cat", add_special_tokens=False)["input_ids"]) == [
        "the",
        "Ġcat",
    ]
