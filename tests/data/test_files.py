"""Sources: which files they read, by which names; test_contract.py has what is read."""

import gzip
import json
import os
import zipfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict
from texts import write

from kdcli.data.readers import MAX_LINE_BYTES
from kdcli.data.sources import open_source
from kdcli.errors import UsageError


def documents(source, split="train", column=None):
    return list(open_source(str(source)).documents(split, column))


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ({"queue": "billing", "Body": "w1 w2"}, ["w1 w2"]),
        ({"queue": "billing", "sentence": "w1 w2", "comment": "w3"}, ["w1 w2"]),
        ({"text": "w1", "article": "w2 w3 w4 w5"}, ["w1"]),
    ],
)
def test_the_column_of_the_text_has_a_usual_name(tmp_path, row, wanted):
    (tmp_path / "a.jsonl").write_text(json.dumps(row), "utf-8")
    assert documents(tmp_path / "a.jsonl") == wanted


@pytest.mark.parametrize(
    "row", [{"comment": "w1", "article": "w2 w3 w4 w5"}, {"body": "w1", "content": "w2"}]
)
def test_a_usual_name_is_not_enough_if_another_column_may_be_meant(tmp_path, row):
    (tmp_path / "a.jsonl").write_text(json.dumps(row), "utf-8")
    with pytest.raises(UsageError, match="which column holds the text"):
        documents(tmp_path / "a.jsonl")


def put(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    return tmp_path / name


def test_null_rows_of_parquet_are_skipped(tmp_path):
    pq.write_table(pa.table({"text": pa.array([None, "w1", None, "w2"])}), tmp_path / "a.parquet")
    assert documents(tmp_path / "a.parquet") == ["w1", "w2"]


def test_the_column_asked_for_is_the_one_read(tmp_path):
    path = put(tmp_path, "a.jsonl", b'{"text": "w1", "body": "w2"}\n')
    assert documents(path, column="body") == ["w2"]
    with pytest.raises(
        UsageError, match=r"a\.jsonl:1: there is no column 'title'; the columns are text, body"
    ):
        documents(path, column="title")


def test_a_directory_of_other_names_is_all_training_text(tmp_path):
    write(tmp_path / "b.jsonl", ["w2"])
    write(tmp_path / "a.txt.gz", ["w1"])
    (tmp_path / "notes.md").write_text("w3", "utf-8")
    assert documents(tmp_path) == ["w1", "w2"]
    assert not open_source(str(tmp_path)).has("validation")


def saved(name, **splits):
    """A data set as `save_to_disk` writes it."""
    parts = {split: Dataset.from_dict({"text": texts}) for split, texts in splits.items()}
    DatasetDict(parts).save_to_disk(str(name))
    return name


def test_a_directory_of_save_to_disk_is_read(tmp_path):
    folder = saved(tmp_path / "all", train=["w1", "w2"], validation=["w3"], extra=["w4"])
    assert (documents(folder), documents(folder, "validation")) == (["w1", "w2"], ["w3"])
    assert open_source(str(folder)).splits() == ["train", "validation"]
    # One data set is training text. Other files in its directory belong to caches.
    (folder / "train" / "cache-1.arrow").write_bytes(b"no table")
    assert documents(folder / "train") == ["w1", "w2"]
    with pytest.raises(UsageError, match="has the splits one, two") as caught:
        open_source(str(saved(tmp_path / "others", one=["w1"], two=["w2"])))
    assert "train, validation or test" in str(caught.value.hint)


def test_a_zip_file_is_read_as_a_directory(tmp_path):
    file = tmp_path / "all.zip"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("__MACOSX/._train.csv", "no rows")
        archive.writestr("train.csv", "text,label\nw1,1\nw2,\n")
        archive.writestr("validation.jsonl.gz", gzip.compress(b'{"text": "w3"}\n'))
    assert (documents(file), documents(file, "validation")) == (["w1", "w2"], ["w3"])
    before = open_source(str(file)).identity
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("train.csv", "text,label\nw1,1\nw3,\n")
    assert open_source(str(file)).identity != before


@pytest.mark.parametrize("source", ["/nowhere/at/all.txt", "./missing", "a/b/c"])
def test_missing_data_says_what_is_allowed(source):
    with pytest.raises(UsageError, match="no data at") as caught:
        open_source(source)
    assert "demo" in caught.value.hint


def test_splits_are_found_by_the_names_of_files(tmp_path):
    for name in (
        "train-00000-of-00002.jsonl",
        "train-00001-of-00002.jsonl",
        "validation_matched.csv",
        "test.txt",
    ):
        write(tmp_path / name, ["w1"])
    write(tmp_path / "train_of_others.txt", ["w1"])
    write(tmp_path / ".train.parquet.crc.txt", ["w1"])
    found = {
        split: [f.name[:11] for f in files]
        for split, files in open_source(str(tmp_path)).files.items()
    }
    train = ["train-00000", "train-00001"]
    assert found == {"test": ["test.txt"], "train": train, "validation_matched": ["validation_"]}


def test_two_names_of_the_validation_split_are_refused(tmp_path):
    for file in ("train.txt", "dev.txt", "validation-0.txt"):
        write(tmp_path / file, ["w1"])
    with pytest.raises(UsageError, match=r"two names for the validation split: dev\.txt and valid"):
        open_source(str(tmp_path))


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


@pytest.mark.parametrize("ending", ["txt", "csv", "jsonl.gz"])
def test_a_line_without_an_end_is_refused_with_its_number(ending, tmp_path):
    path = tmp_path / f"train.{ending}"
    with gzip.open(path, "wb", 1) if ending.endswith("gz") else path.open("wb") as file:
        # Random digits pack to half their size.
        file.write(b'{"text": "a"}\n' + os.urandom(MAX_LINE_BYTES // 2 + 1).hex().encode())
    with pytest.raises(
        UsageError, match=rf"train\.{ending}:2 is longer than {MAX_LINE_BYTES:,} bytes"
    ):
        list(open_source(str(path)).documents("train", None))


def test_an_open_quote_does_not_read_a_whole_file_as_one_cell(tmp_path):
    line = "b" * (MAX_LINE_BYTES // 8) + "\n"
    (tmp_path / "train.csv").write_text('text,label\n"a\n' + 9 * line, "utf-8")
    with pytest.raises(UsageError, match=r"train\.csv:2: not CSV: field larger than field limit"):
        list(open_source(str(tmp_path)).documents("train", "text"))


@pytest.mark.parametrize("source", ["~nosuchuser/text.txt", f"./{'n' * 300}.txt", "a\udcff.txt"])
def test_a_path_that_cannot_be_is_refused(source):
    with pytest.raises(UsageError):
        open_source(source)
