"""Texts for embedding models: cut, distinct, in an order of their own, linked in pairs."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdcli.data.text.sentences import held_out_count, read_texts, sentences
from kdcli.errors import UsageError


def texts_of(tmp_path, table, **how):
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in table))
    return read_texts(
        str(file),
        **{"column": None, "unit": "sentence", "rows": None, "log": lambda line: None} | how,
    )


@pytest.mark.parametrize(
    ("document", "cut"),
    [
        (
            "One is here. Two is there! Is three?  Yes.",
            ["One is here.", "Two is there!", "Is three?"],
        ),
        ('He said "go now." Then he left.', ['He said "go now."', "Then he left."]),
        ("第一句话。他说“好的！”第二句话！尾", ["第一句话。", "他说“好的！”", "第二句话！"]),
        ("a line\nanother line\r\n\n", ["a line", "another line"]),
        ("3.14 is a number. Yes", ["3.14 is a number."]),
        ("...", []),
        ("12.50", []),
        ("iPhone 12", ["iPhone 12"]),
    ],
)
def test_sentences(document, cut):
    assert list(sentences(document)) == cut


def test_documents_are_cut_and_each_text_comes_once(tmp_path):
    rows = [{"text": "Here is one. Here is two."}, {"text": "Here is two. Here is three."}]
    texts = texts_of(tmp_path, rows)
    assert sorted(texts.texts) == ["Here is one.", "Here is three.", "Here is two."]
    assert texts.read == 4
    assert not texts.paired
    assert len(texts_of(tmp_path, rows, unit="document")) == 2
    assert texts_of(tmp_path, rows, rows=2).texts == texts.texts[:2]


@given(st.permutations(list(range(12))), st.integers(2, 12))
def test_neither_order_nor_number_of_documents_moves_a_text_between_the_parts(
    tmp_path_factory, order, wanted
):
    folder = tmp_path_factory.mktemp("texts", numbered=True)
    rows = [{"text": f"sentence number {n}"} for n in range(12)]
    first, second = texts_of(folder, rows), texts_of(folder, [rows[n] for n in order])
    assert first.texts == second.texts
    assert texts_of(folder, rows, rows=wanted).texts == first.texts[:wanted]


def test_pairs_and_triples_are_linked(tmp_path):
    rows = [
        {"query": "what is it", "positive": "it is this", "negative": "it is that"},
        {"query": "who is it", "positive": "it is me", "negative": ["it is that", "it is none"]},
        {"query": "where is it", "positive": "it is here"},
    ]
    texts = texts_of(tmp_path, rows)
    at = {text: n for n, text in enumerate(texts.texts)}
    assert len(texts) == 8
    assert texts.positive[at["what is it"]] == at["it is this"]
    assert texts.positive[at["it is this"]] == at["what is it"]
    assert texts.negatives[at["who is it"]].tolist() == [at["it is that"], at["it is none"]]
    assert texts.negatives[at["where is it"]].tolist() == [-1, -1]
    assert texts.positive[at["it is that"]] == -1
    assert (texts.roles[at["who is it"]], texts.roles[at["it is me"]]) == ("query", "document")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"query": "a b", "positive": None}], "'positive' must be a text"),
        ([{"query": "a b", "positive": "  "}], "'positive' must be a text"),
        ([{"positive": "a b"}], "'query' must be a text"),
        ([{"query": "a b", "positive": "c", "negative": 3}], "'negative' must be a text"),
        ([{"text": "only one."}], "too few"),
    ],
)
def test_unusable_texts_are_refused(tmp_path, rows, message):
    with pytest.raises(UsageError, match=message):
        texts_of(tmp_path, rows)


def test_too_few_texts_are_told_with_the_columns(tmp_path):
    with pytest.raises(UsageError, match="only one text, too few to learn from") as caught:
        texts_of(tmp_path, [{"text": "only one."}])
    assert "at least two different texts" in str(caught.value.hint)
    file = tmp_path / "numbers.csv"
    file.write_text("price\n3\n4\n", "utf-8")
    with pytest.raises(UsageError) as caught:
        read_texts(str(file), column=None, unit="sentence", rows=None, log=print)
    assert f"no row of {file} holds a sentence of at least 2 words" in caught.value.message
    assert "--set workload.unit=document" in caught.value.hint
    assert caught.value.message.endswith("the only column is price")


def test_a_tenth_at_most_is_held_out():
    assert [held_out_count(["x"] * n, 256) for n in (5, 50, 10_000)] == [1, 5, 256]
