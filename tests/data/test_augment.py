"""Copies: only words are replaced and only by their candidates; the same copies however the work
was divided."""

import json
from dataclasses import dataclass, field

import pytest
from encoders import tiny_encoder
from hypothesis import given, settings
from hypothesis import strategies as st
from questions import CONTEXTS, WORDS, tokenizer_of
from reading import logged_to

from kdcli.data.augment.copies import TEXTS_PER_FILE, Augmented, augment, rows, words_of
from kdcli.data.augment.neighbours import Neighbours
from kdcli.data.augment.words import words_in
from kdcli.data.labelled.answer_windows import misplaced
from kdcli.data.labelled.splits import example_of
from kdcli.data.tasks import task_of
from kdcli.errors import MachineError
from kdcli.types import Answer, Example, Task

SINGLE = Task("t", "class", ("text",), ("accuracy",), ("a", "b"))
PAIR = Task("t", "class", ("text", "pair"), ("accuracy",), ("a", "b"))
TAGS = Task("t", "tokens", ("tokens",), ("f1",), ("O", "B-X", "I-X"))
SPAN = Task("t", "span", ("question", "context"), ("exact",), label="answers")
TEXTS = ["The cat sat on a mat.", "  rivers:\trunning, who?", "Zürich 1872", "नमस्ते 東京 in Wien!"]
NEW = ["eins", "zwei", "drei"]


@dataclass
class FakeWords:
    """A masked language model and word vectors in one: the same candidates for each word, and a
    list of the texts."""

    texts: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    stop_after: int | None = None

    def candidates(self, texts, count):
        if self.stop_after is not None and len(self.texts) + len(texts) > self.stop_after:
            raise KeyboardInterrupt
        self.texts += texts
        return [
            [(s, NEW[:count] if i % 3 else None) for i, s in enumerate(words_in(text))]
            for text in texts
        ]

    def nearest(self, words, count):
        return [["viele", "wenige"][:count] for _ in words]

    note = "fake"


def examples(texts, labels=None):
    texts = [t if isinstance(t, tuple) else (t,) for t in texts]
    return [
        Example(f"f:{i}", str(i), t, 1 if labels is None else labels[i])
        for i, t in enumerate(texts)
    ]


def augmented(path, task, given, source=None, **changes):
    source = source or FakeWords()
    words = {"masked_words": source, "neighbours": source, "tokenizer": tokenizer_of("word pieces")}
    numbers = {"copies": 6, "probability": 0.4, "candidates": 3, "seed": 0, "fingerprint": "f"}
    with logged_to(source.log):
        return augment(task, given, folder=path / "candidates", **words | numbers | changes)


def copies_of(found: Augmented, given):
    return found.examples[len(given) :]


def undone(text: str, copy: str, choices) -> int | None:
    """How many words of a text were replaced to make the copy, each by one of its candidates; None
    if none did."""
    if not choices:
        return 0 if text == copy else None
    (begin, end, options), *rest = choices
    if copy[:begin] != text[:begin]:
        return None
    for word in [text[begin:end], *options]:
        if copy[begin:].startswith(word):
            shifted = [(b - end, e - end, o) for b, e, o in rest]
            found = undone(text[end:], copy[begin + len(word) :], shifted)
            if found is not None:
                return found + (word != text[begin:end])
    return None


@settings(max_examples=60)
@given(
    st.lists(
        st.one_of(
            WORDS,
            st.sampled_from(["don't", "l'homme", "a-b", "x2", ",", "\u00a0", "ไทย", "e\u0301"]),
        )
    ),
    st.sampled_from([" ", "", "  ", "\n", ", "]),
    st.floats(0, 1),
)
def test_all_but_replaced_words_stays_as_it_was(tmp_path_factory, words, between, probability):
    text = between.join(words)
    given = examples([text])
    found = augmented(
        tmp_path_factory.mktemp("a"), SINGLE, given, probability=probability, candidates=2
    )
    choices = [
        (s.begin, s.end, NEW[:2] if i % 3 else ["viele", "wenige"])
        for i, s in enumerate(words_in(text))
    ]
    changed = [undone(text, copy.texts[0], choices) for copy in copies_of(found, given)]
    assert None not in changed
    assert found.examples[0] is given[0]
    share = sum(changed) / (6 * len(choices)) if choices else 0.0
    assert f" {share:.1%} of their words replaced" in found.notes[0]
    if not choices:
        assert {copy.texts for copy in copies_of(found, given)} == {(text,)}


def test_a_copy_of_a_pair_changes_one_text_in_turn(tmp_path):
    given = examples([("the cat sat on a mat", "who ran where?"), ("1872", "a cat"), ("1872", "?")])
    found = augmented(tmp_path, PAIR, given, probability=1.0)
    of_first, of_second, of_third = (copies_of(found, given)[i : i + 6] for i in (0, 6, 12))
    changed = [
        tuple(a != b for a, b in zip(c.texts, given[0].texts, strict=True)) for c in of_first
    ]
    assert (set(changed), changed[::2]) == ({(True, False), (False, True)}, changed[:1] * 3)
    assert changed[1::2] == changed[1:2] * 3
    assert all(c.texts[0] == "1872" and c.texts[1] != "a cat" for c in of_second), (
        "the one that has words"
    )
    assert all(c.texts == ("1872", "?") for c in of_third)


def test_copies_do_not_depend_on_the_order_of_the_rows(tmp_path):
    given = examples(TEXTS, [0, 1, 1, 0])
    first = augmented(tmp_path / "a", SINGLE, given).examples
    turned = augmented(tmp_path / "b", SINGLE, given[::-1]).examples
    copies = {f"{each.id}+{n}" for each in given for n in range(1, 7)}
    assert {each.id for each in first[4:]} == copies
    assert {each.id: each for each in turned} == {each.id: each for each in first}


@given(CONTEXTS, st.integers(0, 99))
@settings(max_examples=20)
def test_of_a_question_answers_stay_where_they_are(tmp_path_factory, words, at):
    context = " ".join(words)
    answer = words[at % len(words)]
    given = [
        Example("f:0", "0", ("who ran where?", context), (Answer(answer, context.index(answer)),))
    ]
    found = augmented(tmp_path_factory.mktemp("a"), SPAN, given, probability=1.0)
    for copy in copies_of(found, given):
        assert copy.texts[1] == context
        assert copy.texts[0] != "who ran where?"
        assert copy.label == given[0].label
        assert misplaced(copy) is None


def test_each_labelled_word_stays_one_word(tmp_path):
    words = ("The", "cat", "don't", "New York", "x2", ".", "naïve-ish", "", "mat")
    given = examples([words], [(0,) * 9])
    found = augmented(tmp_path, TAGS, given, probability=1.0)
    for copy in copies_of(found, given):
        assert (len(copy.texts), [copy.texts[i] for i in (2, 4, 5, 7)]) == (
            9,
            ["don't", "x2", ".", ""],
        )
        assert all(copy.texts[i] != words[i] for i in (0, 1, 3, 6, 8))
        assert "-" in copy.texts[6]
        assert " " in copy.texts[3]
        assert copy.label == (0,) * 9
    assert " 100.0% of their words replaced" in found.notes[0]


def cached(path):
    return sorted((path / "candidates").rglob("*.json"))


@pytest.mark.parametrize("files", [1, 2])
def test_a_killed_run_goes_on_where_it_was(tmp_path, files):
    texts = [f"the cat sat {n}" for n in range(2 * TEXTS_PER_FILE + 1)]
    whole = augmented(tmp_path / "whole", SINGLE, examples(texts))
    source = FakeWords(stop_after=files * TEXTS_PER_FILE)
    with pytest.raises(KeyboardInterrupt):
        augmented(tmp_path, SINGLE, examples(texts), source)
    assert len(cached(tmp_path)) == files
    source.stop_after = None
    assert (augmented(tmp_path, SINGLE, examples(texts), source), source.texts) == (whole, texts)


def test_damaged_candidates_are_computed_again(tmp_path):
    whole = augmented(tmp_path, SINGLE, examples(["the cat sat"]))
    (file,) = cached(tmp_path)
    for damage in ("", "[", "{}", "[]", "\x00"):
        file.write_text(damage, "utf-8")
        assert augmented(tmp_path, SINGLE, examples(["the cat sat"])) == whole


def test_a_cache_of_candidates_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "candidates").touch()
    with pytest.raises(MachineError, match="candidates"):
        augmented(tmp_path, SINGLE, examples(["the cat sat"]))


def test_without_a_masked_language_model_neighbours_serve_for_all(tmp_path):
    tokenizer = tokenizer_of("word pieces")
    near = Neighbours.of_embeddings(tiny_encoder("bert", vocab_size=len(tokenizer)), tokenizer)
    given = examples(TEXTS)
    found = augmented(tmp_path, SINGLE, given, masked_words=None, neighbours=near, probability=1.0)
    assert any(
        "no masked language model, so all replacement words are nearest neighbours" in note
        for note in found.notes
    )
    words = set(near.words)
    for copy in copies_of(found, given)[:6]:
        spans = words_in(copy.texts[0])
        assert [copy.texts[0][s.begin : s.end] in words for s in spans] == [True] * 6


def test_the_words_of_a_data_set():
    given = examples([("The cat, the cat's", "1872 l'homme"), ("naïve", "The 東京")])
    assert words_of(PAIR, given) == {"The", "cat", "the", "homme", "naïve", "東京"} - {"cat's"}
    assert words_of(SPAN, [Example("f", "0", ("who ran", "not this"), ())]) == {"who", "ran"}
    assert words_of(TAGS, [Example("f", "0", ("New York", "x2"), (0, 0))]) == {"New", "York"}


@pytest.mark.parametrize(
    ("task", "texts", "label"),
    [
        (task_of("mrpc"), ("a cat", "the mat"), 1),
        (task_of("stsb"), ("a cat", "the mat"), 2.5),
        (task_of("mnli"), ("a cat", 'the "mat"\n'), 2),
        (task_of("squad"), ("who ran?", "the cat ran"), (Answer("cat", 4), Answer("the cat", 0))),
        (task_of("squad_v2"), ("who ran?", "the cat ran"), ()),
        (TAGS, ("the", "cat"), (0, 1)),
        (Task("t", "multi", ("text",), ("f1",), ("a", "b", "c")), ("the cat",), (0, 2)),
        (Task("t", "class", ("text",), ("f1",), ("1", "2", "3")), ("the cat",), 2),
        (SINGLE, ("the cat",), None),
    ],
)
def test_rows_are_read_back_as_the_same_examples(task, texts, label):
    example = Example("f:1", "7+1", texts, label)
    (row,) = rows(task, [example])
    assert (
        example_of(task, ("f:1", json.loads(json.dumps(row))), 1, withheld=label is None) == example
    )
