"""Vocabularies cut to what texts need: the same tokens, the same outputs."""

import json

import numpy as np
import pytest
import torch
import transformers
from encoders import TYPES, byte_level, tiny_encoder, tiny_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForMaskedLM, PreTrainedTokenizerFast

from kdcli.errors import UsageError
from kdcli.models.load import load_tokenizer
from kdcli.models.trim import (
    check_trimmable,
    count_tokens,
    cut_model,
    cut_tokenizer,
    named_in,
    needed_by,
)

pytestmark = pytest.mark.slow

TEXTS = [
    "the quick brown fox jumps over the lazy dogs",
    "internationalization of tokenizers is a tokenized internal matter",
    "the foxes jumped lazily over brownish internal dogs, quickly: 12 + 345!",
    "Ünïcode façades déjà vu 漢字 こんにちは quick-brown",
]
WORDS = sorted({word for text in TEXTS for word in text.split()})
QUIET = {"show_progress": False}


def trained(kind, name):
    """The vocabulary of a small tokenizer, as a class of transformers takes it."""
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    if kind == "Unigram":
        special = SPECIAL.get(name, special)
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=120, special_tokens=special, unk_token=special[-1], **QUIET
        )
        tokenizer.train_from_iterator(TEXTS * 5, trainer)
        return {"vocab": [tuple(row) for row in json.loads(tokenizer.to_str())["model"]["vocab"]]}
    if kind == "BPE":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        special = [*special, "<mask>"]
        trainer = trainers.BpeTrainer(
            vocab_size=400, special_tokens=special, initial_alphabet=alphabet, **QUIET
        )
        tokenizer.train_from_iterator(TEXTS * 5, trainer)
        model = json.loads(tokenizer.to_str())["model"]
        return {"vocab": model["vocab"], "merges": [tuple(merge) for merge in model["merges"]]}
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(
        TEXTS * 5, trainers.WordPieceTrainer(vocab_size=160, special_tokens=special, **QUIET)
    )
    return {"vocab": json.loads(tokenizer.to_str())["model"]["vocab"]}


CLASSES = {
    "WordPiece": ("BertTokenizer", "DistilBertTokenizer", "MPNetTokenizer"),
    "BPE": ("RobertaTokenizer", "DebertaTokenizer"),
    "Unigram": (
        "XLMRobertaTokenizer",
        "CamembertTokenizer",
        "DebertaV2Tokenizer",
        "RemBertTokenizer",
    ),
}
SPECIAL = {"DebertaV2Tokenizer": ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]}
SPECIAL["RemBertTokenizer"] = ["<pad>", "[CLS]", "[SEP]", "<unk>"]


@pytest.fixture(
    params=[*((kind, name) for kind, names in CLASSES.items() for name in names), ("WordLevel", "")]
)
def tokenizer(request, tmp_path):
    """As it is loaded: some classes frame texts only then."""
    kind, name = request.param
    made = getattr(transformers, name)(**trained(kind, name)) if name else tiny_tokenizer()
    made.save_pretrained(tmp_path)
    return load_tokenizer(str(tmp_path))


some_words = st.lists(
    st.sampled_from([*WORDS, "w3", "w58"]) | st.text(max_size=6), min_size=1, max_size=6
)


@given(
    corpus=st.lists(some_words.map(" ".join), min_size=1, max_size=4),
    others=st.lists(some_words.map(" ".join)),
)
@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_texts_of_kept_tokens_are_segmented_as_before(tokenizer, corpus, others):
    corpus = [*corpus, "w3 quick"]
    counts_V = count_tokens(tokenizer, corpus)
    kept = needed_by(tokenizer, counts_V)(np.flatnonzero(counts_V))
    cut = cut_tokenizer(tokenizer, kept)
    assert len(cut) == len(kept)
    assert cut.get_vocab() == {
        tokenizer.convert_ids_to_tokens(int(old)): new for new, old in enumerate(kept)
    }
    assert cut.special_tokens_map == tokenizer.special_tokens_map
    for text in [*corpus, *others, " ".join(corpus)]:
        ids = tokenizer(text)["input_ids"]
        if set(ids) <= set(kept.tolist()):
            assert kept[np.array(cut(text)["input_ids"], dtype=np.int64)].tolist() == ids
            # Framed and padded in the same way, too.
            pair = {"text": [text, text], "text_pair": ["", text], "padding": True}
            assert (
                kept[np.array(cut(**pair)["input_ids"], dtype=np.int64)].tolist()
                == tokenizer(**pair)["input_ids"]
            )
        else:
            assert cut.tokenize(text) != tokenizer.tokenize(text)


def test_unigram_keeps_the_least_likely_token_which_prices_unknown_characters():
    vocab = [("<unk>", 0.0), ("a", -15.0), ("b", -15.0), ("za", -15.0), ("ab", -1.0)]
    # The score of the unknown "z" is 10 below this one.
    vocab.append(("seldom", -100.0))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.Unigram(vocab, unk_id=0)), unk_token="<unk>"
    )
    assert tokenizer.tokenize("zab") == ["za", "b"]
    kept = needed_by(tokenizer, np.array([0, 0, 0, 1, 1, 0]))([3, 4])
    assert kept.tolist() == [0, 1, 2, 3, 4, 5]
    # Without it, an unknown "z" before "ab" would be likelier than "za" and "b".
    assert cut_tokenizer(tokenizer, kept).tokenize("zab") == ["za", "b"]


@pytest.mark.parametrize(("foreign", "stays"), [(0, False), (1, False), (20, True)])
@pytest.mark.parametrize("kind", ["WordPiece", "Unigram"])
def test_letters_of_writing_systems_that_are_not_used_go(kind, foreign, stays):
    """The text has 9,990 Latin letters, and `foreign` Chinese ones of a single kind."""
    special, letters = ["<unk>"], [*"aé漢字д1!", "the"]
    if kind == "Unigram":
        vocab = [(token, -1.0 - n) for n, token in enumerate([*special, *letters])]
        made = Tokenizer(models.Unigram(vocab, unk_id=0))
    else:
        numbers = {token: n for n, token in enumerate([*special, *letters])}
        made = Tokenizer(models.WordPiece(numbers, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")
    counts_V = np.zeros(len(tokenizer))
    counts_V[tokenizer.convert_tokens_to_ids(["the", "漢"])] = 3330, foreign
    kept = needed_by(tokenizer, counts_V)(np.flatnonzero(counts_V))
    tokens = set(tokenizer.convert_ids_to_tokens(kept.tolist()))
    # The least likely token of Unigram stays, and here it is one that occurs.
    expected = {"<unk>", "the", *"aé1!"} | ({"漢"} if foreign else set())
    assert tokens == expected | ({"字"} if stays else set())


def test_bpe_keeps_the_way_to_a_token_but_no_other_merge():
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level(("a", "b"), ("ab", "c"), ("b", "c"), ("bc", "d")),
        pad_token="<pad>",
    )
    kept = needed_by(tokenizer, np.ones(len(tokenizer)))([tokenizer.convert_tokens_to_ids("abc")])
    cut = cut_tokenizer(tokenizer, kept)
    assert {"ab", "abc"} <= cut.get_vocab().keys()
    assert not {"bc", "bcd"} & cut.get_vocab().keys()
    assert (cut.tokenize("abcd"), cut.tokenize("bcd")) == (["abc", "d"], ["b", "c", "d"])


@pytest.mark.parametrize("model_type", TYPES)
def test_a_model_gives_the_same_bits_for_kept_tokens(model_type):
    model = tiny_encoder(model_type)
    kept = np.array(sorted({0, 1, 2, 3, 4, 7, 11, 30, 58} | named_in(model.config)))
    cut = cut_model(model, kept)
    assert cut.config.vocab_size == len(cut.get_input_embeddings().weight) == len(kept) < 20
    assert model.config.vocab_size == 64
    ids = torch.tensor([[2, 5, 6, 8, 3, 0], [2, 7, 3, 0, 0, 0]])
    mask = (ids != 0).long()
    with torch.no_grad():
        now = cut(input_ids=ids, attention_mask=mask).last_hidden_state
        before = model(input_ids=torch.from_numpy(kept)[ids], attention_mask=mask).last_hidden_state
    assert torch.equal(now, before)


# A part of MobileBERT's head has one column per token.
@pytest.mark.parametrize(
    "model_type",
    [
        "bert",
        "roberta",
        "distilbert",
        "electra",
        "albert",
        "deberta-v2",
        "modernbert",
        "mobilebert",
    ],
)
def test_a_head_over_the_vocabulary_is_cut_and_stays_tied(model_type):
    torch.manual_seed(0)
    model = AutoModelForMaskedLM.from_config(tiny_encoder(model_type).config).eval()
    kept = np.array(sorted({0, 1, 2, 3, 4, 20, 40} | named_in(model.config)))
    cut, ids = cut_model(model, kept), torch.tensor([[2, 5, 6, 4, 3]])
    assert (
        cut.get_output_embeddings().weight is cut.get_input_embeddings().weight
        or model_type == "albert"
    )
    with torch.no_grad():
        now, before = cut(input_ids=ids).logits, model(input_ids=torch.from_numpy(kept)[ids]).logits
    torch.testing.assert_close(now, before[..., kept], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (
            PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(dropout=0.1))),
            "dropout=0.1",
        ),
        (
            PreTrainedTokenizerFast(
                tokenizer_object=Tokenizer(models.BPE(end_of_word_suffix="</w>"))
            ),
            "suffix='</w>'",
        ),
        (
            transformers.PreTrainedTokenizer.__new__(transformers.CanineTokenizer),
            "CanineTokenizer, which has no",
        ),
    ],
)
def test_tokenizers_that_cannot_be_cut(tokenizer, message):
    with pytest.raises(UsageError, match=message):
        check_trimmable(tokenizer, "it")
