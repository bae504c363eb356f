"""Corpora: blocks hold all of the text and isolate documents; the cache survives kills, damage and
a second process."""

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
import pytest
from encoders import tiny_tokenizer
from filelock import FileLock
from hub_server import hub  # noqa: F401
from texts import DOCUMENTS, corpus, tokens, write

from kdcli.data.sources import open_source
from kdcli.disk import USED
from kdcli.errors import UsageError


@pytest.fixture
def text(tmp_path):
    write(tmp_path / "c.txt", DOCUMENTS)
    return tmp_path / "c.txt"


def test_blocks_hold_the_whole_stream_read_from_a_map(text):
    found = corpus(text)
    ids = np.concatenate(
        [b.batch(np.arange(len(b)))["input_ids"].numpy() for b in (found.train, found.held_out)]
    )
    tokenizer = tiny_tokenizer()
    assert (ids[:, 0] == tokenizer.cls_token_id).all()
    assert (ids[:, -1] == tokenizer.sep_token_id).all()
    expected = []
    for document in DOCUMENTS:
        expected += [
            *tokenizer(document, add_special_tokens=False)["input_ids"],
            tokenizer.sep_token_id,
        ]
    stream = ids[:, 1:-1].reshape(-1)
    assert stream.tolist() == expected[: len(stream)]
    assert len(expected) - len(stream) < 14
    assert "attention_mask" not in found.train.batch(np.arange(2))
    # Held-out blocks are the last ones, never trained on.
    assert (len(found.held_out), found.held_out.first) == (4, len(found.train))
    part = found.train.stream.read(0, 9)
    assert np.shares_memory(part, found.train.stream.read(3, 9))
    assert not part.flags.writeable


def test_a_validation_split_is_held_out(tmp_path):
    write(tmp_path / "train.jsonl", DOCUMENTS)
    write(tmp_path / "validation.jsonl.gz", ["w50 w51 w52"] * 40)
    found = corpus(tmp_path)
    ids = found.held_out.batch(np.arange(len(found.held_out)))["input_ids"]
    assert set(ids[:, 1:-1].unique().tolist()) == {
        3,
        *tiny_tokenizer().convert_tokens_to_ids(["w50", "w51", "w52"]),
    }


def test_isolated_documents_attend_to_themselves_and_count_their_own_positions(text):
    batch = corpus(text, isolated=True).train.batch(np.arange(3))
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


def test_tokenised_once(text):
    log = []
    corpus(text, log=log)
    assert log
    log.clear()
    # Another block length reads the same cache.
    corpus(text, log=log, max_length=12)
    assert not log
    (text).write_text("\n".join(["w1 w2 w3 w4"] * 300), "utf-8")
    corpus(text, log=log)
    assert log


def test_too_little_text_for_a_block(tmp_path):
    write(tmp_path / "c.txt", ["w1 w2"])
    with pytest.raises(UsageError, match="less than one block of 16") as caught:
        corpus(tmp_path / "c.txt", share=0.999)
    assert "or all of it with --set data.share=1.0" in caught.value.hint
    write(tmp_path / "d.txt", ["w1 w2 w3"] * 20)
    with pytest.raises(UsageError, match="too few to hold some out"):
        corpus(tmp_path / "d.txt")


def left_in(cache):
    """What the cache holds but for locks and notes."""
    return [p for p in (cache / "corpora").iterdir() if p.suffix not in (".lock", USED)]


@pytest.mark.parametrize("damage", ["emptied", "cut", "no meta", "torn meta"])
def test_a_damaged_cache_is_made_again(text, cache, damage):
    expected = tokens(corpus(text))
    (stream,), (meta,) = cache.rglob("train-*.bin"), cache.rglob("meta.json")
    if damage == "no meta":
        meta.unlink()
    elif damage == "torn meta":
        meta.write_text(meta.read_text("utf-8")[:-4], "utf-8")
    else:
        os.truncate(stream, 0 if damage == "emptied" else stream.stat().st_size - 2)
    assert tokens(corpus(text)).tolist() == expected.tolist()


@pytest.mark.parametrize("spelling", [str, Path.as_uri, lambda path: str(path.parent)])
def test_a_text_of_the_same_size_and_time_stamp_is_another_text(spelling, tmp_path):
    """Tools that copy files keep their time stamps."""
    text = tmp_path / "text" / "train.txt"
    for lines in (DOCUMENTS, DOCUMENTS[::-1]):
        write(text, lines)
        os.utime(text, (1e9, 1e9))
        expected = tiny_tokenizer()(lines[0], add_special_tokens=False)["input_ids"][:3]
        assert tokens(corpus(spelling(text)))[:3].tolist() == expected
    # The same text with another time stamp is not tokenised again.
    log = []
    os.utime(text, (2e9, 2e9))
    corpus(spelling(text), log=log)
    assert log == []


def test_of_two_processes_the_second_waits_and_reads(text, tmp_path, cache):
    log = []
    expected = len(corpus(text).train)
    (whole,) = left_in(cache)
    whole.rename(tmp_path / "aside")
    with ThreadPoolExecutor(1) as pool:
        with FileLock(whole.with_name(f".{whole.name}.lock")):
            second = pool.submit(lambda: len(corpus(text, log=log).train))
            assert not wait([second], timeout=0.2).done
            (tmp_path / "aside").rename(whole)
        assert second.result(timeout=60) == expected
        assert not [line for line in log if "waiting" not in line]


def test_a_document_cut_for_calls_gives_the_tokens_of_the_whole(tmp_path, monkeypatch):
    write(tmp_path / "c.txt", [" ".join(DOCUMENTS)])
    whole = tokens(corpus(tmp_path / "c.txt")).tolist()
    monkeypatch.setattr("kdcli.data.text.tokenise.CHARS_PER_CALL", 50)
    monkeypatch.setenv("KDCLI_CACHE", str(tmp_path / "cache"))
    assert tokens(corpus(tmp_path / "c.txt")).tolist() == whole


NAME = "someone/some-text"
CARD = """---
configs:
- config_name: plain
  data_files:
  - {split: train, path: plain/train.jsonl}
  - {split: validation, path: plain/validation.jsonl}
- config_name: no-training
  data_files:
  - {split: validation, path: plain/validation.jsonl}
---
"""
FILES = {
    "README.md": CARD.encode(),
    "plain/train.jsonl": "".join(json.dumps({"text": d}) + "\n" for d in DOCUMENTS).encode(),
    "plain/validation.jsonl": b'{"text": "w50 w51 w52"}\n' * 40,
}


def test_a_hub_id_is_streamed_and_once_tokenised_needs_no_network(hub, tmp_path, cache):  # noqa: F811
    hub.repositories[NAME] = FILES
    with hub.known(tmp_path / "hf"):
        assert list(open_source(f"{NAME}:plain").documents("train", None)) == DOCUMENTS
        with pytest.raises(UsageError, match="no-training has no train split; it has validation"):
            corpus(f"{NAME}:no-training")
        with pytest.raises(UsageError, match="no configuration unknown; it has plain, no-train"):
            corpus(f"{NAME}:unknown")
        pieces = open_source(f"{NAME}:plain", 0.5).pieces("train", 1)
        assert {piece.share for piece in pieces} == {0.5}
        blocks = len(corpus(f"{NAME}:plain").train)
    # This process is offline again.
    again = corpus(f"{NAME}:plain")
    assert len(again.train) == blocks
    assert (
        len(again.held_out.batch(np.arange(len(again.held_out)))["input_ids"][:, 1:-1].unique())
        == 4
    )


def test_a_data_set_of_the_hub_that_changed_is_tokenised_anew(hub, tmp_path, cache):  # noqa: F811
    log = []

    def first():
        """The first word of the text, and whether it was read again."""
        log.clear()
        blocks = corpus(f"{NAME}:plain", log=log).train
        return tiny_tokenizer().decode(blocks.batch(np.arange(1))["input_ids"][0, 1:2]), bool(log)

    for word in ("w1", "w2"):
        line = json.dumps({"text": f"{word} " * 400}).encode()
        hub.commit(NAME, FILES | {"plain/train.jsonl": line})
        with hub.known(tmp_path / "hf"):
            assert first() == (word, True)
            assert first() == (word, False)
    # Offline, the newest is read. A later write in the directory of an older one makes it no newer.
    (older,) = (cache / "corpora").glob("[!.]*-aaaa*")
    later = time.time() + 10
    os.utime(older, (later, later))
    assert first() == ("w2", False)
