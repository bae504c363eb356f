"""Masked text: how much, what of it, whole words, and that masks belong to a row and a pass and to
nothing else."""

import numpy as np
import pytest
import torch
from encoders import tiny_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kdcli.data.text.masking import Masked, mask_vocabulary
from kdcli.errors import UsageError
from kdcli.types import IGNORED

PLAIN = mask_vocabulary(tiny_tokenizer(), "tiny")
CLS, SEP, MASK, PAD = 2, 3, 4, 0


class Rows:
    """Rows of random plain tokens between [CLS] and [SEP]; the given ones where there are some."""

    def __init__(self, count=20, length=42, ids=None, mask=None):
        drawn = np.random.default_rng(0).integers(5, 64, (count, length))
        drawn[:, 0], drawn[:, -1] = CLS, SEP
        self.ids = torch.from_numpy(drawn) if ids is None else torch.tensor(ids)
        self.mask = mask

    def __len__(self):
        return len(self.ids)

    def batch(self, indices):
        found = {"input_ids": self.ids[indices].clone()}
        return found if self.mask is None else found | {"attention_mask": self.mask[indices]}


def masked(rows=None, *, tokens=PLAIN, share=0.15, whole_words=False, static=False, seed=1):
    return Masked(rows or Rows(), tokens, share, whole_words, static, seed)


def chosen(batch):
    return batch["labels"] != IGNORED


def test_every_row_loses_its_share_of_tokens_and_keeps_the_rest():
    rows = Rows()
    batch = masked(rows).batch(np.arange(20))
    assert chosen(batch).sum(1).tolist() == [6] * 20  # 15 % of 40
    assert torch.equal(batch["labels"][chosen(batch)], rows.ids[chosen(batch)])
    assert torch.equal(batch["input_ids"][~chosen(batch)], rows.ids[~chosen(batch)])
    assert not chosen(batch)[:, [0, -1]].any()


def test_of_the_chosen_eight_in_ten_are_masks_and_one_in_ten_is_random():
    rows = Rows(400, 102)
    batch = masked(rows).batch(np.arange(400))
    at, was = chosen(batch), rows.ids
    new = batch["input_ids"][at]
    assert at.sum() == 6000
    # Five standard deviations of 6,000 draws are 0.026 and 0.02.
    assert (new == MASK).float().mean() == pytest.approx(0.8, abs=0.026)
    # One in 59 random tokens is the one that was there.
    assert (new == was[at]).float().mean() == pytest.approx(0.1 + 0.1 / 59, abs=0.02)
    assert set(new[(new != MASK) & (new != was[at])].tolist()) == set(range(5, 64))
    # Every place of a row is chosen as often as any other.
    often = at[:, 1:-1].float().sum(0)
    assert often.mean() == 60
    assert often.min() > 60 - 5 * 7.2
    assert often.max() < 60 + 5 * 7.2


def test_masks_do_not_depend_on_the_batch_a_row_comes_in():
    data = masked()
    together = data.batch(np.arange(20))
    for order in (np.arange(20)[::-1], np.array([7, 3, 7])):
        apart = data.batch(order)
        for name in ("input_ids", "labels"):
            assert torch.equal(apart[name], together[name][order.copy()])


def test_masks_are_drawn_anew_in_every_pass_and_from_every_seed_and_static_ones_are_not():
    data, still = masked(), masked(static=True)
    passes = [data.batch(np.arange(20) + 20 * number) for number in range(3)]
    assert not torch.equal(passes[0]["labels"], passes[1]["labels"])
    assert not torch.equal(passes[1]["labels"], passes[2]["labels"])
    assert torch.equal(passes[1]["labels"], data.batch(np.arange(20) + 20)["labels"])
    assert not torch.equal(passes[0]["labels"], masked(seed=2).batch(np.arange(20))["labels"])
    for name in ("input_ids", "labels"):
        assert torch.equal(still.batch(np.arange(20))[name], still.batch(np.arange(20) + 60)[name])
        assert torch.equal(still.batch(np.arange(20))[name], passes[0][name])


def test_padding_is_never_masked_and_does_not_count():
    ids = [[CLS, *range(5, 15), SEP, *([PAD] * 8)], [CLS, *range(5, 23), SEP]]
    batch = masked(
        Rows(ids=ids, mask=torch.tensor([[1] * 12 + [0] * 8, [1] * 20])), share=0.5
    ).batch(np.arange(2))
    assert chosen(batch).sum(1).tolist() == [5, 9]
    assert not chosen(batch)[0, 11:].any()
    # What a mask hides stays, although its id is that of a word.
    batch = masked(
        Rows(ids=ids, mask=torch.tensor([[1] * 4 + [0] * 16, [1] * 20])), share=0.9
    ).batch(np.arange(2))
    assert chosen(batch)[0, 4:].sum() == 0
    assert batch["attention_mask"] is not None


def test_a_row_of_few_tokens_loses_one_and_a_row_of_none_nothing():
    batch = masked(Rows(ids=[[CLS, 9, 8, SEP], [CLS, SEP, SEP, SEP]])).batch(np.arange(2))
    assert chosen(batch).sum(1).tolist() == [1, 0]


def subword(*words, special=("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"), mask="[MASK]"):
    vocabulary = {word: i for i, word in enumerate([*special, *words])}
    names = dict(
        zip(("pad_token", "unk_token", "cls_token", "sep_token"), special[:4], strict=True)
    )
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=special[1]))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, mask_token=mask, **names)


KINDS = {
    "WordPiece": (["a", "##b", "##c", "d", "Ġe", "##f"], [1, 0, 0, 1, 1, 0]),
    "byte-level": (["Ġa", "b", "c", "Ġd", "##", "Ġf"], [1, 0, 0, 1, 0, 1]),
    "SentencePiece": (["▁a", "b", "c", "▁d", "▁", "##"], [1, 0, 0, 1, 1, 0]),
    "words": (["a", "b", "c"], [1, 1, 1]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_begins_a_word_is_read_off_the_vocabulary(kind):
    words, begins = KINDS[kind]
    found = mask_vocabulary(subword(*words), kind)
    assert found.begins_V[5:].tolist() == [bool(b) for b in begins]
    assert found.plain_ids.tolist() == list(range(5, 5 + len(words)))
    assert (found.special_V.nonzero()[0].tolist(), found.mask_id) == (list(range(5)), MASK)


def letters(text):
    """A text as a byte-level vocabulary spells it."""
    return pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)[0][0]


# In the order of a vocabulary: pieces, and whether each begins a word.
SPACELESS = {
    "SentencePiece": {
        "▁我": True,
        "我们": True,
        "ひ": True,
        "ไทย": True,
        "ខ្មែរ": True,
        "ລາວ": True,
        "မြန်": True,
        "𠮷": True,
        "ing": False,
        "，": False,
        "7": False,
        "й": False,
        "▁": True,
        "<0xE6>": True,
        "<0x88>": False,
        # A vowel sign stands on the letter before it.
        "ี": False,
        "<0x41>": False,
    },
    "byte-level": {
        "Ġ" + letters("我"): True,
        letters("我们"): True,
        letters("ไทย"): True,
        letters("𠮷"): True,
        "ing": False,
        # The first byte or two of a character, then bytes within one.
        letters("我")[:1]: True,
        letters("我")[:2]: True,
        letters("我")[1:]: False,
        letters("我")[2:]: False,
        letters("ไ")[:2]: True,
        letters("é")[:1]: False,
        letters("й"): False,
        "Ġthe": True,
        "Ġ": True,
    },
}


@pytest.mark.parametrize("kind", SPACELESS)
def test_in_scripts_without_spaces_a_piece_begins_a_word(kind):
    found = mask_vocabulary(
        subword(
            *SPACELESS[kind], *(f"{'▁' if kind == 'SentencePiece' else 'Ġ'}{n}" for n in range(20))
        ),
        kind,
    )
    assert dict(zip(SPACELESS[kind], found.begins_V[5:].tolist(), strict=False)) == SPACELESS[kind]


def words_of(row, begins):
    """The words of a row as lists of places, special tokens left out, the plain way."""
    found, fresh = [], True
    for place, number in enumerate(row):
        if number < 5:
            fresh = True
            continue
        if fresh or begins[number]:
            found.append([])
        found[-1].append(place)
        fresh = False
    return found


@settings(max_examples=60)
@given(st.integers(0, 99), st.integers(1, 30), st.sampled_from([0.15, 0.4, 0.8]))
def test_whole_words_are_masked_as_near_to_the_share_as_they_get(seed, length, share):
    tokens = mask_vocabulary(subword(*KINDS["WordPiece"][0]), "x")
    drawn = np.random.default_rng(seed).integers(3, 11, (4, length))
    rows = Rows(ids=np.where(drawn == 4, 3, drawn))
    found = chosen(
        masked(rows, tokens=tokens, share=share, whole_words=True, seed=seed).batch(np.arange(4))
    )
    for row, at in zip(rows.ids.tolist(), found.tolist(), strict=True):
        # A word of more pieces is cut.
        words = [
            word[at : at + 10]
            for word in words_of(row, tokens.begins_V)
            for at in range(0, len(word), 10)
        ]
        taken = [word for word in words if at[word[0]]]
        # A word is masked with all of its pieces or with none, and nothing else is.
        assert sorted(p for word in taken for p in word) == [
            place for place, yes in enumerate(at) if yes
        ]
        assert bool(taken) == bool(words)
        count = max(1, round(share * sum(map(len, words))))
        longest = max(map(len, words), default=0)
        assert len(taken) <= 1 or 2 * abs(sum(map(len, taken)) - count) <= longest


def test_a_tokenizer_without_a_mask_token_is_named_with_what_to_choose_instead():
    with pytest.raises(UsageError, match=r"tokenizer of some/model has no mask token") as caught:
        mask_vocabulary(subword("a", mask=None), "some/model")
    assert "a method that reads plain text" in caught.value.hint


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, 15.0, float("nan")])
def test_a_share_outside_0_and_1_is_refused(share):
    with pytest.raises(UsageError, match="must lie between 0 and 1"):
        masked(share=share)


def test_of_a_generated_text_only_the_target_is_masked_its_end_too():
    class Targets(Rows):
        def batch(self, indices):
            mask = torch.ones(len(indices), 42, dtype=torch.int64)
            mask[:, 40:] = 0
            return super().batch(indices) | {
                "attention_mask": mask,
                "sources": torch.full((len(indices),), 20),
            }

    rows = Targets(ids=[[CLS, *range(5, 23), SEP, *range(23, 42), SEP, PAD, PAD]] * 40)
    batch = masked(rows, share=0.7).batch(np.arange(40))
    chosen = batch["labels"] != IGNORED
    assert chosen.sum(1).tolist() == [14] * 40
    assert not chosen[:, :20].any()
    assert not chosen[:, 40:].any()
    assert 0 < chosen[:, 39].sum() < 40
    assert (batch["input_ids"][:, :20] == rows.ids[:, :20]).all()
