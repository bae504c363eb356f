"""Corpora: what reaches the model is the text, all of it, in full blocks, nothing across a border that should not."""

from __future__ import annotations

import csv
import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from encoders import tiny_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from kdcli.data.batches import BatchPlan
from kdcli.data.corpus import Blocks, open_corpus
from kdcli.data.files import open_source
from kdcli.errors import UsageError

DOCUMENTS = [f"w{i % 50} w{i % 7} w{i % 11}" for i in range(400)]


def corpus(source, **changes):
    given = {"max_length": 16, "column": None, "isolated": False, "held_out_blocks": 4, "log": lambda _: None}
    return open_corpus(str(source), tiny_tokenizer(), **given | changes)


def write(path, documents):
    rows = [{"text": d, "label": 1} for d in documents]
    opened = gzip.open if path.suffix == ".gz" else open
    kind = path.name.removesuffix(".gz").rsplit(".")[-1]
    if kind == "parquet":
        table = pa.Table.from_pylist(rows)
        with opened(path, "wb") as file:
            pq.write_table(table, file)
        return
    with opened(path, "wt", encoding="utf-8", newline="") as file:
        if kind == "txt":
            file.write("\n".join(documents))
        elif kind == "jsonl":
            file.write("\n".join(map(json.dumps, rows)))
        else:
            writer = csv.DictWriter(file, ["text", "label"])
            writer.writeheader()
            writer.writerows(rows)


@pytest.mark.parametrize("name", [f"c.{kind}{gz}" for kind in ("txt", "jsonl", "csv", "parquet") for gz in ("", ".gz")])
def test_every_format_gives_the_same_documents(tmp_path, name):
    write(tmp_path / name, DOCUMENTS)
    assert list(open_source(str(tmp_path / name)).documents("train", None)) == DOCUMENTS


def test_blocks_hold_the_whole_stream_between_their_frames(tmp_path):
    write(tmp_path / "c.txt", DOCUMENTS)
    found = corpus(tmp_path / "c.txt")
    ids = np.concatenate(
        [
            found.train.batch(np.arange(len(found.train)))["input_ids"].numpy(),
            found.held_out.batch(np.arange(len(found.held_out)))["input_ids"].numpy(),
        ]
    )
    tokenizer = tiny_tokenizer()
    assert (ids[:, 0] == tokenizer.cls_token_id).all()
    assert (ids[:, -1] == tokenizer.sep_token_id).all()
    expected = []
    for document in DOCUMENTS:
        expected += [*tokenizer(document, add_special_tokens=False)["input_ids"], tokenizer.sep_token_id]
    stream = ids[:, 1:-1].reshape(-1)
    assert stream.tolist() == expected[: len(stream)]
    assert len(expected) - len(stream) < 14
    assert "attention_mask" not in found.train.batch(np.arange(2))


def test_held_out_blocks_are_never_trained_on(tmp_path):
    write(tmp_path / "c.txt", DOCUMENTS)
    found = corpus(tmp_path / "c.txt")
    assert len(found.held_out) == 4
    assert found.held_out.first == len(found.train)


def test_a_validation_split_is_what_is_held_out(tmp_path):
    write(tmp_path / "train.jsonl", DOCUMENTS)
    write(tmp_path / "validation.jsonl.gz", ["w50 w51 w52"] * 40)
    found = corpus(tmp_path)
    ids = found.held_out.batch(np.arange(len(found.held_out)))["input_ids"]
    assert set(ids[:, 1:-1].unique().tolist()) == {3, *tiny_tokenizer().convert_tokens_to_ids(["w50", "w51", "w52"])}


def test_isolated_documents_see_only_themselves_and_count_their_own_positions(tmp_path):
    write(tmp_path / "c.txt", DOCUMENTS)
    batch = corpus(tmp_path / "c.txt", isolated=True).train.batch(np.arange(3))
    ids, mask, positions = batch["input_ids"], batch["attention_mask"], batch["position_ids"]
    for row in range(3):
        document, place = 0, 0
        documents = []
        for column, token in enumerate(ids[row].tolist()):
            documents.append(document)
            assert positions[row, column] == place
            place += 1
            if token == 3:
                document, place = document + 1, 0
        same = np.equal.outer(documents, documents)
        assert (mask[row, 0].numpy() == same).all()


def test_tokenised_once(tmp_path, monkeypatch):
    write(tmp_path / "c.txt", DOCUMENTS)
    said = []
    corpus(tmp_path / "c.txt", log=said.append)
    assert said
    said.clear()
    # Another block length reads the same cache.
    corpus(tmp_path / "c.txt", log=said.append, max_length=12)
    assert not said
    (tmp_path / "c.txt").write_text("\n".join(["w1 w2 w3 w4"] * 300), "utf-8")
    corpus(tmp_path / "c.txt", log=said.append)
    assert said


def test_an_interrupted_tokenisation_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("KDCLI_CACHE", str(tmp_path / "cache"))
    (tmp_path / "c.jsonl").write_text('{"text": "w1 w2"}\n' * 600 + "{broken\n", "utf-8")
    with pytest.raises(UsageError, match=r"c\.jsonl:601 is not JSON"):
        corpus(tmp_path / "c.jsonl")
    assert not [p for p in (tmp_path / "cache").rglob("*") if p.is_file()]


def bad(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    return tmp_path / name


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", b"", "holds no text"),
        ("a.txt", b"w1\nw2 \xff\n", r"a\.txt:2 is not UTF-8"),
        ("a.jsonl", b'{"text": 3}\n', r"a\.jsonl:1: .*column"),
        ("a.jsonl", b"[1]\n", r"a\.jsonl:1 must be a JSON object"),
        ("a.jsonl", b'{"a": "x", "b": "y"}\n', "which column is the text"),
        ("a.csv", b'text,label\n"x,1\n', "columns|not CSV"),
        ("a.txt.gz", b"no gzip at all", "not a whole gzip file"),
        ("a.txt.gz", gzip.compress(b"w1 w2\n" * 5000)[:-20], "not a whole gzip file"),
        ("a.parquet", b"PAR1 but not really", "not a whole parquet file"),
        ("a.xlsx", b"x", "no known format"),
        ("a.txt", b"w1 w2\n", "less than one block"),
    ],
)
def test_malformed_data_is_named_with_file_and_line(tmp_path, name, content, said):
    with pytest.raises(UsageError, match=said):
        corpus(bad(tmp_path, name, content))


@pytest.mark.parametrize("source", ["/nowhere/at/all.txt", "./missing", "just-a-word"])
def test_missing_data_says_what_is_allowed(source):
    with pytest.raises(UsageError, match="no data at") as caught:
        corpus(source)
    assert "demo" in caught.value.hint


def test_a_hub_id_offline_says_what_would_work():
    with pytest.raises(UsageError, match="neither a file nor a directory") as caught:
        corpus("someone/some-text")
    assert "--data demo" in caught.value.hint


def test_a_directory_without_training_text(tmp_path):
    (tmp_path / "notes.md").write_text("x", "utf-8")
    with pytest.raises(UsageError, match="has no training text"):
        corpus(tmp_path)


@settings(max_examples=60)
@given(st.integers(1, 60), st.integers(1, 25), st.integers(0, 5))
def test_every_example_comes_once_a_pass(n, batch_size, seed):
    plan = BatchPlan(n, batch_size, seed)
    seen = np.concatenate([plan.indices(step) for step in range(1, 3 * n + 2)])
    assert all(len(plan.indices(step)) == batch_size for step in (1, 2, 3))
    for epoch in range(len(seen) // n):
        assert sorted(seen[epoch * n : (epoch + 1) * n].tolist()) == list(range(n))


def test_the_order_of_a_step_does_not_depend_on_the_steps_before():
    plan = BatchPlan(1000, 7, 3)
    later = plan.indices(123).tolist()
    [plan.indices(step) for step in range(1, 50)]
    assert BatchPlan(1000, 7, 3).indices(123).tolist() == later
    assert BatchPlan(1000, 7, 4).indices(123).tolist() != later


def test_a_batch_larger_than_the_data_takes_several_passes():
    assert sorted(BatchPlan(3, 7, 0).indices(1).tolist())[:2] == [0, 0]


def test_memory_stays_flat_while_tokenising(tmp_path):
    """A corpus is streamed: what is held at once does not grow with it."""
    import tracemalloc

    write(tmp_path / "small.txt", DOCUMENTS * 10)
    write(tmp_path / "large.txt", DOCUMENTS * 100)
    peaks = []
    for name in ("small.txt", "large.txt"):
        tracemalloc.start()
        corpus(tmp_path / name)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]


def test_blocks_are_read_from_the_map_and_not_held(tmp_path):
    write(tmp_path / "c.txt", DOCUMENTS)
    blocks = corpus(tmp_path / "c.txt").train
    assert isinstance(blocks, Blocks)
    assert isinstance(blocks.stream_T, np.memmap)
