"""Texts for embedding models: cut, distinct, in an order of their own, linked in pairs."""

import json
import tracemalloc
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reading import logged_to

from kdcli.data.accounts import ACCOUNTS
from kdcli.data.labelled.kept import keep_rows
from kdcli.data.text.sentences import DistinctHashes, held_out_count, read_texts, sentences
from kdcli.errors import UsageError


def texts_of(tmp_path, table, **how):
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in table))
    return read_texts(str(file), **{"column": None, "unit": "sentence", "rows": None} | how)


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


def test_a_few_of_many_pairs_are_those_that_begin_all_of_them(tmp_path):
    """Queries, positives and negatives are repeated, also those that were dropped long before."""
    numbers = np.random.default_rng(0).integers(0, 3000, (9000, 3))
    rows = [
        {"query": f"what is {q}", "positive": f"it is {p}", "negative": f"it is {n}"}
        for q, p, n in numbers.tolist()
    ]
    lines = {None: [], 1000: []}
    read = []
    for count, said in lines.items():
        with logged_to(said):
            read.append(texts_of(tmp_path, rows, rows=count))
    whole, few = read
    assert few.texts == whole.texts[:1000]
    assert few.roles == whole.roles[:1000]
    assert few.rows.tolist() == whole.rows[:1000].tolist()
    assert few.read == whole.read == 9000
    for links, all_links in ((few.positive, whole.positive), (few.negatives, whole.negatives)):
        assert links.tolist() == np.where(all_links[:1000] < 1000, all_links[:1000], -1).tolist()
    assert sum(few.positive >= 0) > 0
    distinct = len(set(numbers[:, 0].tolist()))
    assert lines[None][0] == f"9,000 pairs, {len(whole):,} distinct texts"
    assert lines[1000][0] == f"9,000 pairs, {len(whole):,} distinct texts; using 1,000"
    [account] = [one for one in ACCOUNTS.by_key.values() if one.read == 9000]
    repeated, cut = account.left_out
    kept = sum(few.rows >= 0)
    assert (account.kept, repeated.count, cut.count) == (kept, 9000 - distinct, distinct - kept)
    first = next(n for n in range(9000) if numbers[n, 0] in numbers[:n, 0])
    assert repeated.first == f"{tmp_path / 'train.jsonl'}:{first + 1}"


def test_memory_is_needed_for_the_chosen_texts_only(tmp_path):
    file = tmp_path / "many.txt"
    with file.open("w") as opened:
        opened.writelines(f"{n} is a text of {'many ' * 40}words\n" for n in range(60_000))
    assert file.stat().st_size > 13_000_000
    tracemalloc.start()
    texts = read_texts(str(file), column=None, unit="document", rows=100)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(texts) == 100
    assert peak < 9_000_000  # 60,000 hashes take half of it


def test_a_run_reads_its_texts_once_and_each_step_has_their_account(tmp_path):
    read = partial(texts_of, tmp_path, unit="document")
    with keep_rows():
        first = read([{"text": "one"}, {"text": "two"}, {"text": "two"}])
        ACCOUNTS.clear(strict=False)
        assert read([{"text": "others"}, {"text": "and more"}]) is first
        (account,) = ACCOUNTS.by_key.values()
    assert (account.read, account.kept) == (3, 2)
    assert sorted(read([{"text": "others"}, {"text": "and more"}]).texts) == ["and more", "others"]


def test_distinct_hashes_on_disk_are_counted():
    values = np.random.default_rng(0).integers(0, 1 << 64, 1_100_000, np.uint64)
    values[600_000:] = values[:500_000]
    hashes = DistinctHashes()
    for value in (*values.tolist(), 0, (1 << 64) - 1, 0):
        hashes.add(value)
    assert hashes.spilled
    assert hashes.count() == 600_002


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
        read_texts(str(file), column=None, unit="sentence", rows=None)
    assert f"no row of {file} holds a sentence of at least 2 words" in caught.value.message
    assert "--set workload.unit=document" in caught.value.hint
    assert caught.value.message.endswith("the only column is price")


def test_a_tenth_at_most_is_held_out():
    assert [held_out_count(["x"] * n, 256) for n in (5, 50, 10_000)] == [1, 5, 256]


def test_columns_that_are_not_used_are_logged(tmp_path):
    names = ("query", "positive", "hard_negative", "negative_1")
    rows = [{name: f"{name} {n}" for name in names} for n in range(4)]
    lines = []
    with logged_to(lines):
        for column in (None, "positive"):
            texts_of(tmp_path, rows, column=column, unit="document")
    unused = "; unused columns: query, hard_negative, negative_1"
    assert "4 pairs, 12 distinct texts; unused columns: hard_negative" in lines
    assert f"4 documents, 4 distinct texts{unused}" in lines
