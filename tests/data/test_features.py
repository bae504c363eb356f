"""Examples as rows of tokens: what the tokenizer says of each alone, padded on the right, labels
where they belong."""

import copy

import numpy as np
import pytest
import torch
from encoders import tiny_tokenizer
from questions import KINDS, tokenizer_of
from transformers import EsmTokenizer

from kdcli.data.labelled.features import encode_examples, unknown_share
from kdcli.errors import UsageError
from kdcli.types import IGNORED, Example, Task

SINGLE = Task("t", "class", ("text",), ("accuracy",), ("a", "b", "c"))
PAIR = Task("t", "class", ("text", "pair"), ("accuracy",), ("a", "b", "c"))
TAGS = Task("t", "tokens", ("tokens",), ("f1",), ("O", "B-X", "I-X"))
TEXTS = [
    "the cat sat",
    "rivers",
    "Zürich, naïve café in 1872",
    "who ran? who ran? who ran? who ran?",
    "東京 नमस्ते a",
]
WORDS = [
    ("the", "rivers", "ran"),
    ("Zürich",),
    ("winters", "cat", "1872", "東京", "on", "the", "naïve"),
    ("a", "in"),
]


def examples(texts, labels=None):
    return [
        Example(
            f"f:{i}",
            str(i),
            t if isinstance(t, tuple) else (t,),
            None if labels is None else labels[i],
        )
        for i, t in enumerate(texts)
    ]


def encoded(task, texts, labels=None, kind="word pieces", max_length=64, token_types=True):
    return encode_examples(
        task,
        examples(texts, labels),
        tokenizer_of(kind),
        max_length=max_length,
        token_types=token_types,
    )


def row(rows, i, of="ids_T"):
    return getattr(rows, of)[rows.ends[i] - rows.lengths[i] : rows.ends[i]].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_the_share_of_unknown_tokens_is_among_the_tokens_of_the_texts(kind):
    tokenizer = tokenizer_of(kind)
    ids = [i for text in TEXTS for i in tokenizer(text, add_special_tokens=False)["input_ids"]]
    share = ids.count(tokenizer.unk_token_id) / len(ids)
    assert (share == 0) == (kind == "bytes")
    assert unknown_share(encoded(SINGLE, TEXTS, kind=kind), tokenizer) == pytest.approx(share)


def test_an_unknown_token_that_also_ends_texts_is_not_counted():
    tokenizer, rows = copy.deepcopy(tokenizer_of("word pieces")), encoded(SINGLE, TEXTS)
    assert unknown_share(rows, tokenizer) > 0
    tokenizer.unk_token = tokenizer.sep_token
    assert unknown_share(rows, tokenizer) == 0


@pytest.mark.parametrize("max_length", [64, 6])
@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_what_the_tokenizer_says_of_each_text_alone(kind, pair, max_length):
    texts = [(a, b) for a in TEXTS for b in TEXTS] if pair else TEXTS
    rows = encoded(PAIR if pair else SINGLE, texts, kind=kind, max_length=max_length)
    tokenizer = tokenizer_of(kind)
    for i, text in enumerate(texts):
        given = text if pair else (text,)
        alone = tokenizer(
            *given, truncation=True, max_length=max_length, return_token_type_ids=True
        )
        assert (row(rows, i), row(rows, i, "types_T")) == (
            alone["input_ids"],
            alone["token_type_ids"],
        )
    whole = [len(tokenizer(*(t if pair else (t,)))["input_ids"]) for t in texts]
    assert (rows.truncated, rows.truncated > 0) == (
        sum(n > max_length for n in whole),
        max_length == 6,
    )
    assert rows.lengths.max() <= max_length
    assert rows.example.tolist() == list(range(len(texts)))


def test_a_pair_loses_from_its_longer_text():
    tokenizer = tokenizer_of("word pieces")
    short, long = "cat", " ".join(["rivers"] * 40)
    rows = encoded(PAIR, [(short, long), (long, short)], max_length=20)
    assert rows.truncated == 2
    for i in (0, 1):
        assert tokenizer("cat", add_special_tokens=False)["input_ids"][0] in row(rows, i)
        assert len(row(rows, i)) == 20


@pytest.mark.parametrize("token_types", [True, False])
def test_batches_are_padded_on_the_right_only(token_types):
    rows = encoded(PAIR, [(a, b) for a in TEXTS for b in TEXTS], token_types=token_types)
    chosen = np.array([7, 0, 24, 7, 3])
    batch = rows.batch(chosen)
    assert set(batch) == {
        "input_ids",
        "attention_mask",
        *(["token_type_ids"] if token_types else []),
    }
    longest = int(rows.lengths[chosen].max())
    for place, i in enumerate(chosen):
        n = int(rows.lengths[i])
        assert batch["input_ids"][place].tolist() == row(rows, i) + [rows.pad_id] * (longest - n)
        assert batch["attention_mask"][place].tolist() == [1] * n + [0] * (longest - n)
        if token_types:
            assert batch["token_type_ids"][place].tolist() == row(rows, i, "types_T") + [0] * (
                longest - n
            )
            assert {0, 1} <= set(row(rows, i, "types_T"))
    assert all(tensor.dtype == torch.int64 for tensor in batch.values())


def test_the_padding_token_is_the_tokenizers_own():
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = "[MASK]"
    rows = encode_examples(
        SINGLE, examples(["w1 w2 w3", "w4"]), tokenizer, max_length=9, token_types=False
    )
    assert rows.batch(np.array([0, 1]))["input_ids"].tolist() == [[6, 7, 8], [9, 4, 4]]


def test_a_tokenizer_without_padding_is_refused():
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    with pytest.raises(UsageError, match="no padding token") as error:
        encode_examples(SINGLE, examples(["w1"]), tokenizer, max_length=9, token_types=False)
    assert "pad_token" in error.value.hint


@pytest.mark.parametrize(
    ("kind", "names", "labels", "dtype", "held"),
    [
        ("class", ("a", "b", "c"), [2, 0, 1], torch.int64, [2, 0, 1]),
        ("score", (), [2.5, -1.0, 0.0], torch.float32, [2.5, -1.0, 0.0]),
        (
            "multi",
            ("a", "b", "c"),
            [(0, 2), (), (1,)],
            torch.float32,
            [[1, 0, 1], [0, 0, 0], [0, 1, 0]],
        ),
    ],
)
def test_labels_of_texts_as_the_loss_takes_them(kind, names, labels, dtype, held):
    rows = encoded(Task("t", kind, ("text",), ("f1",), names), TEXTS[:3], labels)
    found = rows.batch(np.array([0, 1, 2]))["labels"]
    assert (found.dtype, found.tolist()) == (dtype, held)
    assert torch.equal(rows.batch(np.array([2, 0]))["labels"], found[[2, 0]])


@pytest.mark.parametrize("kind", KINDS)
def test_the_label_of_a_word_stands_at_its_first_piece_only(kind):
    labels = [tuple((i + j) % 3 for j in range(len(words))) for i, words in enumerate(WORDS)]
    rows = encoded(TAGS, WORDS, labels, kind=kind)
    tokenizer = tokenizer_of(kind)
    for i, words in enumerate(WORDS):
        of_words = tokenizer(list(words), is_split_into_words=True).word_ids()
        found, expected, seen = row(rows, i, "labels"), [], set()
        for word in of_words:
            expected.append(labels[i][word] if word is not None and word not in seen else IGNORED)
            seen.add(word)
        assert found == expected
        assert [labels[i][w] for w in row(rows, i, "words_T") if w >= 0] == [
            x for x in found if x != IGNORED
        ]
        # Every word, in its order, and special tokens never.
        assert [w for w in row(rows, i, "words_T") if w >= 0] == list(range(len(words)))
        assert found[0] == found[-1] == IGNORED
    assert any(len(row(rows, i)) > len(words) + 2 for i, words in enumerate(WORDS)), (
        "no word of several pieces"
    )
    assert set(rows.batch(np.array([1, 2]))["labels"][0, int(rows.lengths[1]) :].tolist()) == {
        IGNORED
    }


def test_two_equal_words_side_by_side_are_two_words():
    rows = encoded(TAGS, [("cat", "cat", "cat")], [(1, 2, 2)])
    assert [x for x in row(rows, 0, "labels") if x != IGNORED] == [1, 2, 2]


def test_words_that_were_cut_off_have_no_label():
    words, label = tuple(["rivers"] * 30), tuple([1] + [2] * 29)
    whole, cut = (encoded(TAGS, [words, ("a",)], [label, (0,)], max_length=n) for n in (200, 12))
    assert (whole.truncated, cut.truncated, cut.lengths[0]) == (0, 1, 12)
    kept = [w for w in row(cut, 0, "words_T") if w >= 0]
    assert kept == list(range(len(kept)))
    assert 0 < len(kept) <= 10
    assert [x for x in row(cut, 0, "labels") if x != IGNORED] == list(label[: len(kept)])


@pytest.mark.parametrize("blank", ["", " ", "\t"])
def test_words_without_any_token_are_not_judged_and_some_must_be(blank):
    rows = encoded(TAGS, [(blank, blank), ("cat",)], [(1, 2), (1,)])
    assert [x for x in rows.labels if x != IGNORED] == [1]
    with pytest.raises(
        UsageError, match=r"^f:0: from here on the tokenizer makes no token of any word"
    ) as error:
        encoded(TAGS, [(blank, blank), (blank,)], [(1, 2), (1,)])
    assert f"the first are {blank!r}, {blank!r}" in error.value.hint
    # Where labels are withheld, nothing is judged.
    assert encoded(TAGS, [(blank,)]).labels is None


def test_a_tokenizer_that_does_not_tell_words_apart_cannot_label_them(tmp_path):
    file = tmp_path / "vocab.txt"
    file.write_text("\n".join(["<cls>", "<pad>", "<eos>", "<unk>", *"LAGV", "<mask>"]), "utf-8")
    tokenizer = EsmTokenizer(str(file))
    with pytest.raises(
        UsageError, match="EsmTokenizer does not tell which word a token belongs to"
    ):
        encode_examples(
            TAGS, examples([("L", "A")], [(0, 1)]), tokenizer, max_length=9, token_types=False
        )
    # Whole texts it can read; what it cuts it does not tell, so full rows count.
    rows = encode_examples(
        SINGLE, examples(["L A G V L A", "L"], [0, 1]), tokenizer, max_length=5, token_types=False
    )
    assert (rows.lengths.tolist(), rows.truncated) == ([5, 3], 1)


@pytest.mark.parametrize("task", [SINGLE, TAGS])
@pytest.mark.parametrize("all_of_them", [True, False])
def test_withheld_labels_are_not_in_the_batch(task, all_of_them):
    texts = WORDS[:3] if task is TAGS else TEXTS[:3]
    labels = [
        None if all_of_them or i == 1 else ((0,) * len(t) if task is TAGS else 0)
        for i, t in enumerate(texts)
    ]
    rows = encoded(task, texts, labels)
    assert rows.labels is None
    assert "labels" not in rows.batch(np.array([0, 2]))
    assert rows.by_length().labels is None
    # Where the words are is known all the same.
    assert (rows.words_T is not None) == (task is TAGS)
