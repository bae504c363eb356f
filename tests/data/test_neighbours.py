"""Neighbours: the nearest by cosine, never the word itself, whatever comes in a GloVe file."""

import gzip

import pytest
import torch
from encoders import tiny_encoder
from questions import KINDS, tokenizer_of
from transformers import PreTrainedTokenizer

from kdcli.data.augment import neighbours
from kdcli.data.augment.neighbours import Neighbours
from kdcli.data.augment.words import whole_words
from kdcli.errors import UsageError

LINES = [
    "the 0 0 1",
    "cat 1 0.1 0",
    "dog 1 0.2 0",
    "river 0 1 0",
    "stream 0.1 1 0",
    "1872 1 0.11 0",
    "sea 0.4 1 0",
]
PLAIN = ("the", "cat", "dog", "river", "stream", "sea")


def glove(tmp_path, lines=LINES, name="glove.txt"):
    path = tmp_path / name
    with gzip.open(path, "wb") if name.endswith(".gz") else path.open("wb") as file:
        file.write("\n".join(lines).encode() if isinstance(lines, list) else lines)
    return path


@pytest.mark.parametrize("name", ["glove.txt", "glove.txt.gz"])
def test_the_nearest_by_cosine_come_first(tmp_path, name):
    found = Neighbours.of_glove(glove(tmp_path, name=name), {"cat", "sea", "absent"})
    assert found.nearest(["cat", "river"], 2) == [["dog", "sea"], ["stream", "sea"]]
    assert "2 of the 3 words of the data (66.7%)" in found.note


def test_a_word_without_a_vector_has_no_neighbours(tmp_path):
    found = Neighbours.of_glove(glove(tmp_path), {"cat"})
    assert found.nearest(["absent", "cat"], 9) == [[], ["dog", "sea", "stream", "river", "the"]]
    assert found.nearest([], 3) == []


def test_case_is_ignored_where_the_file_has_one_only(tmp_path):
    assert Neighbours.of_glove(glove(tmp_path), {"Cat"}).nearest(["Cat", "CAT"], 1) == [
        ["dog"],
        ["dog"],
    ]


def test_a_rare_word_of_the_data_has_a_vector_and_is_nobodys_neighbour(tmp_path, monkeypatch):
    monkeypatch.setattr(neighbours, "FREQUENT_WORDS", 5)
    found = Neighbours.of_glove(glove(tmp_path), {"sea"})
    assert (found.words, found.nearest(["sea"], 1)) == (
        ["the", "cat", "dog", "river", "stream"],
        [["stream"]],
    )
    assert Neighbours.of_glove(glove(tmp_path), {"cat"}).nearest(["sea"], 1) == [[]]


def test_a_header_and_words_with_spaces_are_read(tmp_path):
    assert Neighbours.of_glove(
        glove(tmp_path, ["8 3", *LINES, ". . . 1 1 1"]), {"cat"}
    ).words == list(PLAIN)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([*LINES, "cow 1 2"], ":8: 2 numbers, but 3 in the lines before"),
        ([*LINES, "", "cow 1 2 3"], ":8: 0 numbers"),
        (["cat 1 x 3"], ":1: could not convert"),
        (["cat 1 nan 3"], ":1: a number of the vector is not finite"),
        (["cat"], ":1: no word with its vector"),
        (b"cat 1 2\n\xff 1 2\n", ":2: not UTF-8"),
        (b"", "holds no word vectors"),
    ],
)
def test_a_broken_line_is_named(tmp_path, lines, message):
    path = glove(tmp_path, lines)
    with pytest.raises(UsageError, match=message) as error:
        Neighbours.of_glove(path, {"cat"})
    assert str(path) in error.value.message


def test_a_file_that_is_not_there_or_cut_off_is_refused(tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        Neighbours.of_glove(tmp_path / "none.txt", {"cat"})
    path = glove(tmp_path, name="cut.gz")
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(UsageError, match="cannot be read"):
        Neighbours.of_glove(path, {"cat"})


def test_no_overlap_is_refused(tmp_path):
    with pytest.raises(UsageError, match="7 words and none of the 2 words") as error:
        Neighbours.of_glove(glove(tmp_path), {"Katze", "Hund"})
    assert "embeddings" in error.value.hint


@pytest.mark.parametrize("kind", KINDS)
def test_a_word_of_several_pieces_lies_at_the_mean_of_their_embeddings(kind):
    tokenizer = tokenizer_of(kind)
    torch.manual_seed(0)
    model = tiny_encoder("bert", vocab_size=len(tokenizer))
    found = Neighbours.of_embeddings(model, tokenizer)
    known = {word: number for number, (word, _) in whole_words(tokenizer).items()}
    assert set(found.words) == set(known)
    table = model.get_input_embeddings().weight.detach()
    pieces = tokenizer(" runners", add_special_tokens=False)["input_ids"]
    assert len(pieces) > 1
    near = torch.nn.functional.cosine_similarity(
        table[pieces].mean(0)[None], table[list(known.values())]
    )
    expected = [list(known)[i] for i in near.argsort(descending=True)]
    assert found.nearest(["runners"], 5) == [[w for w in expected if w != "runners"][:5]]
    assert found.nearest(["the"], 3)[0] != []
    assert "the" not in found.nearest(["The"], 30)[0]


def test_a_slow_tokenizer_is_refused():
    class Slow(PreTrainedTokenizer):
        vocab_size = 1

        def get_vocab(self):
            return {}

    with pytest.raises(UsageError, match=r"Slow does not tell .*characters"):
        Neighbours.of_embeddings(tiny_encoder("bert"), Slow())
