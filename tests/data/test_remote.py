"""Sources elsewhere: web servers, file systems of fsspec, the hub. Each reads as the same files
would here."""

import gzip
import itertools
import json
import os
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hub_server import COMMIT, hub  # noqa: F401
from texts import DOCUMENTS, corpus, tokens, write

from kdcli.data.accounts import RowAccount
from kdcli.data.hub import HubId
from kdcli.data.labelled.own import own_task
from kdcli.data.sources import open_source
from kdcli.errors import UsageError

NAME = "someone/some-text"


def documents_in(source, pieces):
    account = RowAccount(source.name)
    return [d for piece in pieces for d in source.documents_in("train", piece, None, account)]


@pytest.fixture
def served(hub, tmp_path):  # noqa: F811
    """The address of files on a web server, by name."""
    for name in ("train.txt", "train.jsonl.gz", "train.parquet"):
        write(tmp_path / name, DOCUMENTS)
    hub.repositories[NAME] = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    return lambda name: f"{hub.url}/datasets/{NAME}/resolve/main/{name}"


@pytest.mark.parametrize("name", ["train.txt", "train.jsonl.gz", "train.parquet"])
def test_a_file_of_a_web_server_reads_as_one_here(served, tmp_path, name):
    assert list(open_source(served(name)).documents("train", None)) == DOCUMENTS
    assert tokens(corpus(served(name))).tolist() == tokens(corpus(tmp_path / name)).tolist()


def test_a_large_file_is_read_in_pieces(served):
    source = open_source(served("train.txt"))
    pieces = source.pieces("train", 700)
    assert len(pieces) > 5
    assert [
        d for piece in pieces for d in source.documents_in("train", piece, None, RowAccount(""))
    ] == DOCUMENTS


def test_another_content_is_another_source(served, hub):  # noqa: F811
    before = open_source(served("train.txt")).identity
    assert open_source(served("train.txt")).identity == before
    hub.repositories[NAME]["train.txt"] = b"w1 w2\n" * 500
    assert open_source(served("train.txt")).identity != before


def test_a_web_server_without_etags_tells_when_a_file_changed(tmp_path):
    (tmp_path / "train.txt").write_text("w1\n")
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        source = open_source(f"http://127.0.0.1:{server.server_port}/train.txt")
        before = source.identity
        assert source.identity == before
        # The size stays the same.
        (tmp_path / "train.txt").write_text("w2\n")
        os.utime(tmp_path / "train.txt", (1e9, 1e9))
        assert source.identity != before
        server.shutdown()


def test_a_web_server_that_refuses_is_named(served, hub):  # noqa: F811
    for name, gated, message in (
        ("none.txt", False, "no data at"),
        ("train.txt", True, "cannot be read: 401"),
    ):
        hub.gated = {NAME} if gated else set()
        with pytest.raises(UsageError, match=message) as caught:
            corpus(served(name))
        assert "hf auth login" in caught.value.hint
        assert "\n" not in caught.value.message
    with pytest.raises(UsageError, match="has no known format"):
        corpus(served("README.md"))
    with pytest.raises(UsageError, match="cannot be read"):
        corpus("http://127.0.0.1:9/train.txt")


def test_a_missing_library_is_named(without):
    without("s3fs")
    with pytest.raises(UsageError, match="s3fs is not installed") as caught:
        open_source("s3://bucket/train.jsonl")
    assert caught.value.hint == "pip install s3fs"
    with pytest.raises(UsageError, match="cannot be read: Protocol not known: nowhere"):
        open_source("nowhere://bucket/train.jsonl")


def test_a_directory_of_a_file_system_has_splits(tmp_path):
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.pipe("/corpus/train-00000.txt", b"w1 w2\n")
    memory.pipe("/corpus/train-00001.txt.gz", gzip.compress(b"w3\n"))
    memory.pipe("/corpus/validation.txt", b"w4\n")
    memory.pipe("/corpus/notes.md", b"w5\n")
    source = open_source("memory://corpus")
    assert {split: len(found) for split, found in source.files.items()} == {
        "train": 2,
        "validation": 1,
    }
    assert list(source.documents("train", None)) == ["w1 w2", "w3"]
    memory.pipe("/empty/notes.md", b"w5\n")
    with pytest.raises(UsageError, match=r"no file of a known format; it holds notes\.md"):
        open_source("memory://empty")


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("wikitext", HubId("wikitext")),
        ("owner/name", HubId("owner/name")),
        ("owner/name:config", HubId("owner/name", "config")),
        ("owner/name:config:test", HubId("owner/name", "config", "test")),
        ("owner/name::test", HubId("owner/name", None, "test")),
        ("owner/name@v1.0", HubId("owner/name", None, None, "v1.0")),
        (
            "name:config:train@refs/convert/parquet",
            HubId("name", "config", "train", "refs/convert/parquet"),
        ),
    ],
)
def test_ids_of_the_hub(source, found):
    assert open_source(source).hub == found


@pytest.mark.parametrize(
    "source", ["a/b/c", "owner/name:a:b:c", "corpus.jsonl", "owner/train.txt", "./name", "a b"]
)
def test_what_is_no_id_is_no_data(source):
    with pytest.raises(UsageError, match="no data at"):
        open_source(source)


CARD = """---
configs:
- config_name: plain
  data_files:
  - {split: train, path: [plain/0.jsonl, plain/1.jsonl, plain/2.jsonl, plain/3.jsonl]}
  - {split: test, path: more.jsonl}
---
"""


def test_the_hub_by_id_and_by_address(hub, tmp_path, cache):  # noqa: F811
    lines = [json.dumps({"text": d}).encode() + b"\n" for d in DOCUMENTS]
    parts = {f"plain/{n}.jsonl": b"".join(lines[n * 100 : n * 100 + 100]) for n in range(4)}
    hub.repositories[NAME] = {"README.md": CARD.encode(), "more.jsonl": lines[7], **parts}
    hub.repositories["someone/gated"] = {"a.jsonl": b""}
    hub.gated.add("someone/gated")

    def read(name):
        source = open_source(name)
        pieces = source.pieces("train", 1 << 20)
        return len(pieces), [
            d for p in pieces for d in source.documents_in("train", p, None, RowAccount(""))
        ]

    with hub.known(tmp_path / "hf"):
        # A shard of the data set is a piece.
        assert read(f"{NAME}:plain") == (4, DOCUMENTS)
        assert read(f"{NAME}:plain:test@{COMMIT}") == (1, DOCUMENTS[7:8])
        assert read(f"hf://datasets/{NAME}/more.jsonl") == (1, DOCUMENTS[7:8])
        for gated in ("someone/gated", "hf://datasets/someone/gated/a.jsonl"):
            with pytest.raises(UsageError, match="someone/gated") as caught:
                read(gated)
            assert "hf auth login" in caught.value.hint
            assert "\n" not in caught.value.message
        with pytest.raises(UsageError, match="cannot be loaded from the hub"):
            read("nobody")


def test_a_data_set_of_the_hub_names_its_configurations(hub, tmp_path):  # noqa: F811
    """Their files are patterns in directories, as on the hub."""
    files = ["  data_files: [{split: test, path: 'de/test-*'}]", "  data_files: en/test-0.jsonl"]
    card = ["---", "configs:", "- config_name: de", files[0], "- config_name: en", files[1], "---"]
    pair = {"sentence1": "a b", "sentence2": "c d"}
    rows = "".join(json.dumps(pair | {"similarity_score": n / 8}) + "\n" for n in range(40))
    hub.repositories[NAME] = {
        "README.md": "\n".join(card).encode(),
        "de/test-0.jsonl": rows.encode(),
        "en/test-0.jsonl": rows.encode(),
    }
    with hub.known(tmp_path / "hf"):
        with pytest.raises(UsageError, match="has the configurations de, en, no def") as caught:
            open_source(NAME).splits()
        assert caught.value.hint == f"name one of them: --data {NAME}:de"
        source = open_source(f"{NAME}:de")
        assert source.splits() == ["test"]
        table = itertools.chain.from_iterable(t.rows for t in source.tables("test"))
        task = own_task(table, {})
        assert (task.kind, task.texts, task.label) == (
            "score",
            ("sentence1", "sentence2"),
            "similarity_score",
        )
