"""Readers: every format gives the same documents; errors name file and line."""

import gzip
import json
import os
import tempfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from texts import DOCUMENTS, corpus, write

from kdcli.data.files import open_source
from kdcli.errors import UsageError

BOM = b"\xef\xbb\xbf"


def documents(source, split="train", column=None):
    return list(open_source(str(source)).documents(split, column))


def put(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    return tmp_path / name


@pytest.mark.parametrize(
    "name", [f"c.{kind}{gz}" for kind in ("txt", "jsonl", "csv", "parquet") for gz in ("", ".gz")]
)
def test_every_format_gives_the_same_documents(tmp_path, name):
    write(tmp_path / name, DOCUMENTS)
    assert documents(tmp_path / name) == DOCUMENTS


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", BOM + b"w1 w2\r\n\r\n  \nw3\n"),
        ("a.jsonl", BOM + b'{"text": "w1 w2"}\n\n{"text": null}\n{"text": " "}\n{"text": "w3"}'),
        (
            "a.jsonl",
            b'{"text": null, "id": "a"}\n{"text": "w1 w2", "id": "b"}\n{"text": "w3", "id": "c"}\n',
        ),
        ("a.csv", BOM + b"text,label\r\nw1 w2,1\r\n\r\n,2\r\nw3,1\r\n"),
    ],
)
def test_byte_order_marks_and_what_is_blank_are_no_text(tmp_path, name, content):
    assert documents(put(tmp_path, name, content)) == ["w1 w2", "w3"]


def test_null_rows_of_parquet_are_skipped(tmp_path):
    pq.write_table(pa.table({"text": pa.array([None, "w1", None, "w2"])}), tmp_path / "a.parquet")
    assert documents(tmp_path / "a.parquet") == ["w1", "w2"]


def test_a_gzipped_parquet_is_not_held_in_memory(tmp_path, monkeypatch):
    """pyarrow reads it from a file on disk, which is gone afterwards."""
    write(tmp_path / "a.parquet.gz", DOCUMENTS)
    read_from = []
    whole = pq.ParquetFile
    monkeypatch.setattr(pq, "ParquetFile", lambda file: read_from.append(file) or whole(file))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ((_, table),) = open_source(str(tmp_path / "a.parquet.gz")).tables("train")
    assert next(table)[0] == f"{tmp_path / 'a.parquet.gz'}:1"
    (file,) = read_from
    assert os.fstat(file.fileno()).st_size == len(
        gzip.decompress((tmp_path / "a.parquet.gz").read_bytes())
    )
    assert sum(1 for _ in table) == len(DOCUMENTS) - 1
    assert file.closed
    assert [p.name for p in tmp_path.iterdir()] == ["a.parquet.gz"]


def test_a_field_of_csv_may_hold_lines(tmp_path):
    assert documents(put(tmp_path, "a.csv", b'text,label\n"w1\nw2",1\nw3,2\n')) == ["w1\nw2", "w3"]


def test_the_column_asked_for_is_the_one_read(tmp_path):
    path = put(tmp_path, "a.jsonl", b'{"text": "w1", "body": "w2"}\n')
    assert documents(path, column="body") == ["w2"]
    with pytest.raises(
        UsageError, match=r"a\.jsonl:1: column 'title' is not there; there are text, body"
    ):
        documents(path, column="title")


def test_shards_belong_to_the_split_they_name(tmp_path):
    """Validation shards beside training shards must not be trained on."""
    write(tmp_path / "train-00000-of-00002.parquet", ["w1"])
    write(tmp_path / "train-00001-of-00002.parquet", ["w2"])
    write(tmp_path / "validation-00000-of-00001.parquet", ["w3"])
    write(tmp_path / ".train.parquet.crc.txt", ["w4"])
    assert (documents(tmp_path), documents(tmp_path, "validation")) == (["w1", "w2"], ["w3"])


def test_a_directory_of_other_names_is_all_training_text(tmp_path):
    write(tmp_path / "b.jsonl", ["w2"])
    write(tmp_path / "a.txt.gz", ["w1"])
    (tmp_path / "notes.md").write_text("w3", "utf-8")
    assert documents(tmp_path) == ["w1", "w2"]
    assert not open_source(str(tmp_path)).has("validation")


def bad_parquet(damage):
    """A parquet file with bytes changed: the length stays, so that only the damage counts."""
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"text": [f"w{i}" for i in range(300)]}), sink)
    whole = bytearray(sink.getvalue().to_pybytes())
    whole[damage] = b"\xff" * (damage.stop - damage.start)
    return bytes(whole)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", r"a\.txt holds no text"),
        ("a.txt.gz", b"", r"a\.txt\.gz holds no text"),
        ("a.csv", b"text,label\n", r"a\.csv holds no text"),
        ("a.txt", b"w1\nw2 \xff\n", r"a\.txt:2 is not UTF-8"),
        ("a.csv", b"text,label\nw1,1\nw2 \xff,1\n", r"a\.csv:3 is not UTF-8"),
        ("a.jsonl", b'{"text": "w1"}\n{"text": "w2\n', r"a\.jsonl:2 is not JSON"),
        ("a.jsonl", b"[" * 100_000, r"a\.jsonl:1 is not JSON"),
        (
            "a.jsonl",
            b'{"text": "w1"}\n{"text": "\\ud83d w2"}\n',
            r"a\.jsonl:2: half a surrogate pair",
        ),
        ("a.jsonl", b'{"text": 3}\n', r"a\.jsonl:1: column 'text' holds int"),
        ("a.jsonl", b"[1]\n", r"a\.jsonl:1 must be a JSON object, got list"),
        (
            "a.jsonl",
            b'{"a": "x", "b": "y"}\n',
            r"a\.jsonl:1: which column is the text\? there are a, b",
        ),
        ("a.csv", b"text,label\nw1,1\nw2\n", r"a\.csv:3 does not have the 2 columns"),
        ("a.csv", b"text,label\nw1,1,2\n", r"a\.csv:2 does not have the 2 columns"),
        ("a.csv", b'text,label\n"x,1\n', "columns|not CSV"),
        ("a.txt.gz", b"no gzip at all", r"a\.txt\.gz is not a whole gzip file"),
        (
            "a.txt.gz",
            gzip.compress(b"w1 w2\n" * 5000)[:-20],
            r"a\.txt\.gz is not a whole gzip file",
        ),
        ("a.parquet", b"PAR1 but not really", r"a\.parquet is not a whole parquet file"),
        ("a.parquet", b"", r"a\.parquet is not a whole parquet file"),
        (
            "a.parquet",
            bad_parquet(slice(8, 40)),
            r"a\.parquet (cannot be read|is not a whole parquet file)",
        ),
        (
            "a.parquet.gz",
            gzip.compress(bad_parquet(slice(0, 0)))[:-9],
            r"a\.parquet\.gz is not a whole gzip file",
        ),
        ("a.xlsx", b"x", "no known format"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_malformed_data_is_named_with_file_and_line(tmp_path, name, content, message):
    with pytest.raises(UsageError, match=message) as caught:
        documents(put(tmp_path, name, content))
    assert "\n" not in caught.value.message


def test_parquet_that_is_not_utf8_is_named_with_its_rows(tmp_path):
    ends = pa.py_buffer(np.array([0, 2, 4], "int32").tobytes())
    text = pa.Array.from_buffers(pa.string(), 2, [None, ends, pa.py_buffer(b"w1\xff\xfe")])
    pq.write_table(pa.table({"text": text}), tmp_path / "a.parquet")
    with pytest.raises(UsageError, match=r"a\.parquet: one of the rows 1 to 128 is not UTF-8"):
        documents(tmp_path / "a.parquet")


@pytest.mark.parametrize("source", ["/nowhere/at/all.txt", "./missing", "a/b/c"])
def test_missing_data_says_what_is_allowed(source):
    with pytest.raises(UsageError, match="no data at") as caught:
        open_source(source)
    assert "demo" in caught.value.hint


def test_a_directory_without_training_text(tmp_path):
    (tmp_path / "notes.md").write_text("x", "utf-8")
    with pytest.raises(UsageError, match="no file of a known format"):
        open_source(str(tmp_path))
    write(tmp_path / "validation.txt", ["w1"])
    with pytest.raises(UsageError, match="no train split; it has validation"):
        list(open_source(str(tmp_path)).documents("train", None))


def test_splits_are_found_by_the_names_of_files(tmp_path):
    for name in (
        "train-00000-of-00002.jsonl",
        "train-00001-of-00002.jsonl",
        "validation_matched.csv",
        "test.txt",
    ):
        write(tmp_path / name, ["w1"])
    write(tmp_path / "train_of_others.txt", ["w1"])
    found = {
        split: [f.name[:11] for f in files]
        for split, files in open_source(str(tmp_path)).files.items()
    }
    train = ["train-00000", "train-00001"]
    assert found == {"test": ["test.txt"], "train": train, "validation_matched": ["validation_"]}


def test_a_hub_id_offline_says_what_would_work():
    with pytest.raises(UsageError, match="neither a file nor a directory") as caught:
        corpus("someone/some-text")
    assert "--data demo" in caught.value.hint


def test_identity_follows_the_files(tmp_path):
    write(tmp_path / "train.jsonl", ["w1"])
    before = open_source(str(tmp_path)).identity
    assert open_source(str(tmp_path)).identity == before
    write(tmp_path / "validation.jsonl", ["w1"])
    with_validation = open_source(str(tmp_path)).identity
    (tmp_path / "train.jsonl").write_text(json.dumps({"text": "w2"}), "utf-8")
    assert (
        len({json.dumps(i) for i in (before, with_validation, open_source(str(tmp_path)).identity)})
        == 3
    )


@pytest.mark.parametrize("ending", ["txt", "jsonl", "csv", "txt.gz", "jsonl.gz"])
def test_a_line_without_an_end_is_refused_with_its_number(ending, tmp_path, monkeypatch):
    monkeypatch.setattr("kdcli.data.formats.MOST_LINE", 1000)
    path = tmp_path / f"train.{ending}"
    with gzip.open(path, "wb") if ending.endswith("gz") else path.open("wb") as file:
        file.write(b'{"text": "a"}\n' + b"a" * 2000)
    with pytest.raises(UsageError, match=rf"train\.{ending}:2 is longer than 1,000 bytes"):
        list(open_source(str(path)).documents("train", None))


def test_an_open_quote_does_not_read_a_whole_file_as_one_cell(tmp_path, monkeypatch):
    monkeypatch.setattr("kdcli.data.formats.MOST_LINE", 1000)
    (tmp_path / "train.csv").write_text('text,label\n"a\n' + "b\n" * 2000, "utf-8")
    with pytest.raises(
        UsageError, match=r"train\.csv:\d+ is not CSV: field larger than field limit"
    ):
        list(open_source(str(tmp_path)).documents("train", "text"))


@pytest.mark.parametrize("source", ["~nosuchuser/text.txt", f"./{'n' * 300}.txt", "a\udcff.txt"])
def test_a_path_that_cannot_be_is_refused(source):
    with pytest.raises(UsageError):
        open_source(source)
