"""What the readers and the tokenised corpora promise, whatever library does the work.

The order of blocks has its own file, test_batches.py; only values that old runs depend on are fixed
here.
"""

import csv
import gzip
import hashlib
import io
import itertools
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from encoders import tiny_tokenizer
from forked import killed
from reading import logged_to, read_task
from texts import DOCUMENTS, PACK, corpus, encoded, tokens, write

from kdcli.data.batches import BatchOrder
from kdcli.data.labelled.lists import read_lists
from kdcli.data.readers import read_rows
from kdcli.data.rows import BadRow, LineBreaks, Piece
from kdcli.data.sources import open_source
from kdcli.data.text import shards
from kdcli.data.text.own_tokenizer import own_tokenizer
from kdcli.data.text.sentences import read_texts
from kdcli.data.text.tokenise import tokenise
from kdcli.errors import UsageError

pytestmark = pytest.mark.slow

KINDS = ("txt", "jsonl", "ndjson", "json", "csv", "tsv", "parquet", "arrow")
ENDINGS = [kind + gz for kind in KINDS for gz in ("", ".gz")]
ENDINGS += ["txt.bz2", "jsonl.xz", "json.zst", "csv.zst", "parquet.bz2", "arrow.xz"]
# Each kind, and one that is packed.
EACH = [*KINDS, "txt.gz"]
BOM = b"\xef\xbb\xbf"


def documents(source, split="train", column=None):
    return list(open_source(str(source)).documents(split, column))


def rows(source, split):
    tables = open_source(str(source)).tables(split)
    return [row for _, table in tables for row in table]


def tokenised(source, folder):
    return tokenise(open_source(str(source)), tiny_tokenizer(), None, folder)


# Every format gives the same rows.


@pytest.mark.parametrize("ending", ENDINGS)
def test_every_format_gives_the_same_rows(tmp_path, ending):
    expected = {"train": DOCUMENTS, "validation": DOCUMENTS[50:90], "test": DOCUMENTS[:10]}
    for split, texts in expected.items():
        write(tmp_path / f"{split}.{ending}", texts)
    # A line of text has no second column, and the cells of csv and tsv have no type.
    kind = ending.split(".")[0]
    others = {} if kind == "txt" else {"label": "1" if kind in ("csv", "tsv") else 1}
    # The first line of csv and tsv names the columns.
    first = 2 if kind in ("csv", "tsv") else 1
    for split, texts in expected.items():
        assert documents(tmp_path, split) == texts
        assert rows(tmp_path, split) == [
            (f"{tmp_path / split}.{ending}:{number}", {"text": text} | others)
            for number, text in enumerate(texts, first)
        ]
        assert documents(tmp_path / f"{split}.{ending}") == texts


@pytest.mark.parametrize("ending", EACH)
def test_every_format_gives_the_same_tokens(tmp_path, small_shards, ending):
    write(tmp_path / "text" / f"train.{ending}", DOCUMENTS)
    tokenizer = tiny_tokenizer()
    expected = []
    for document in DOCUMENTS:
        expected += tokenizer(document, add_special_tokens=False)["input_ids"]
        expected.append(tokenizer.sep_token_id)
    tokenised(tmp_path / "text", tmp_path / "out")
    assert tokens(corpus(tmp_path / "out")).tolist() == expected
    assert tokens(corpus(tmp_path / "text")).tolist() == expected


def test_a_tab_separates_columns_of_tsv_and_a_comma_does_not(tmp_path):
    content = 'text\tlabel\nw1, w2\t1\n"w3\tw4"\t2\n'
    (tmp_path / "a.tsv").write_text(content, "utf-8")
    assert documents(tmp_path / "a.tsv") == ["w1, w2", "w3\tw4"]


def test_tsv_without_quoting_keeps_every_row(tmp_path):
    """As in GLUE: a quote at the beginning of a text opens nothing."""
    texts = ['"foo said', 'she left"', '"Yes" and "no"', '"', '"" x', '"a""', 'it is 5" long']
    content = "".join(f"{text}\t{n}\n" for n, text in enumerate(texts))
    (tmp_path / "a.tsv").write_text(f"text\tlabel\n{content}", "utf-8")
    assert rows(tmp_path / "a.tsv", "train") == [
        (f"{tmp_path / 'a.tsv'}:{n + 2}", {"text": text, "label": str(n)})
        for n, text in enumerate(texts)
    ]
    # The quotes of a pair belong to two cells.
    (tmp_path / "b.tsv").write_text('one\ttwo\tlabel\n"w1\tw2"\t1\n', "utf-8")
    assert [row for _, row in rows(tmp_path / "b.tsv", "train")] == [
        {"one": '"w1', "two": 'w2"', "label": "1"}
    ]


def test_a_bad_line_of_tsv_takes_no_row_after_it(tmp_path):
    file = tmp_path / "a.tsv"
    file.write_text('text\tlabel\n"foo said\nshe left\t1\n"bar" baz\t0\n"w1\n', "utf-8")
    bad: list[BadRow] = []
    good = [tuple(row.values.values()) for row in read_rows(Piece(str(file)), bad.append)]
    assert good == [("she left", "1"), ('"bar" baz', "0")]
    assert [(row.where, row.problem) for row in bad] == [
        (f"{file}:2", "not TSV"),
        (f"{file}:5", "not TSV"),
    ]
    # All lines of a row with line breaks are skipped, and counted.
    file.write_text('text\tlabel\n"w1\nw2\tw3\nw4"\t1\t2\nw5\t1\n', "utf-8")
    bad.clear()
    good = [tuple(row.values.values()) for row in read_rows(Piece(str(file)), bad.append)]
    assert good == [("w5", "1")]
    assert [row.where for row in bad] == [f"{file}:{n}" for n in (2, 3, 4)]
    file.write_text('"text\tlabel\nw1\t1\n', "utf-8")
    with pytest.raises(UsageError, match=r"a\.tsv:1: not TSV: "):
        list(read_rows(Piece(str(file)), bad.append))


QUOTED = ['"foo said', 'she "left"', '"all"', '"', '""', "a\tb", '"a\tb', "", "w1"]


@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
def test_tsv_with_quoting_is_read_as_it_was_written(tmp_path, quoting):
    given = pd.DataFrame({"text": [*QUOTED, "w1\nw2", '"w1"\n\n\tw2'], "label": "1"})
    given.to_csv(tmp_path / "a.tsv", sep="\t", index=False, quoting=quoting)
    assert [row for _, row in rows(tmp_path / "a.tsv", "train")] == given.to_dict("records")
    given = pd.DataFrame({"label": "1", "text": [*QUOTED, "w1\nw2", '"w1"\n\nw2']})
    given.to_csv(tmp_path / "b.tsv", sep="\t", index=False, quoting=quoting)
    assert [row for _, row in rows(tmp_path / "b.tsv", "train")] == given.to_dict("records")


def test_a_line_break_in_the_only_column_of_tsv_is_refused(tmp_path):
    (tmp_path / "a.tsv").write_text('text\n"w1\nw2"\n', "utf-8")
    with pytest.raises(UsageError, match=r"a\.tsv:2: ") as caught:
        rows(tmp_path / "a.tsv", "train")
    assert "save the rows as .csv or .jsonl" in caught.value.hint


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
        ("a.tsv", BOM + b"text\tlabel\r\nw1 w2\t1\r\n\r\n\t2\r\nw3\t1\r\n"),
    ],
)
def test_a_byte_order_mark_and_blank_rows_are_no_text(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert documents(tmp_path / name) == ["w1 w2", "w3"]


LINES_OF_CSV = [f"film {n} was dull,{('bad', 'good')[n % 2]}" for n in range(40)]
JOINED = "the quote that opens here joins lines that look like rows"


def csv_file(folder, lines):
    (folder / "a.csv").write_text("\n".join(["text,label", *lines, ""]), "utf-8")
    return Piece(str(folder / "a.csv"))


@pytest.mark.parametrize(
    ("changes", "line", "problem"),
    [
        # The quote is closed at the end of a text, in a text, by a quoted text, or not at all.
        ({20: '"film 20 was dull,bad', 25: 'film 25 was dull",good'}, 22, JOINED),
        ({20: '"film 20 was dull,bad', 21: 'film 21 was dull",good'}, 22, JOINED),
        ({0: '"film 0 was dull,bad', 9: 'film 9 was dull",good'}, 2, JOINED),
        # A label that no row before has.
        ({20: '"film 20 was dull,bad', 21: "a,new", 22: 'film 25 was dull",good'}, 22, JOINED),
        ({0: '"film 0 was dull,bad', 1: 'film 1 was dull",good'}, 2, JOINED),
        ({20: '"film 20 was dull,bad', 25: 'film 25 was "dull",good'}, 22, "not CSV"),
        ({20: '"film 20 was dull,bad', 25: '"film 25, was dull",good'}, 22, "not CSV"),
        ({20: '"film 20 was dull,bad'}, 22, "not CSV: a quote in this row does not close"),
        ({39: '"film 39 was dull,good'}, 41, "not CSV"),
    ],
)
def test_a_quote_of_csv_that_never_closes_takes_no_row_after_it(tmp_path, changes, line, problem):
    lines = [changes.get(n, text) for n, text in enumerate(LINES_OF_CSV)]
    bad: list[BadRow] = []
    good = list(read_rows(csv_file(tmp_path, lines), bad.append))
    assert [row.where for row in bad] == [f"{tmp_path}/a.csv:{line}"]
    assert problem in bad[0].message
    assert len(good) == 39
    assert {row.values["label"] for row in good} <= {"bad", "good", "new"}


STRAY = {
    "pairs": 'sentence1,sentence2\nno film,no cinema\n"so good,very good\nbad film",poor film\n',
    "scores": 'text,score\nno film,0.11\n"so good,0.12\nbad film",0.13\n',
    "numbers": 'id,text\n1,no film\n2,"so good\n3,fine"\n4,the end\n',
    "one column": 'text\nno film\n"so good\nfine"\n',
    "one column, bare": 'text\nhe said "no" to it\n"so good\nfine"\n',
}


@pytest.mark.parametrize("ending", ["csv", "tsv"])
@pytest.mark.parametrize("form", STRAY)
def test_two_stray_quotes_are_no_cell(form, ending, tmp_path):
    file, bad = tmp_path / f"a.{ending}", []
    file.write_text(STRAY[form].replace(",", "\t" if ending == "tsv" else ","), "utf-8")
    rows = list(read_rows(Piece(str(file)), bad.append))
    assert not any("\n" in cell for row in rows for cell in row.values.values())
    assert len(rows) + len(bad) == STRAY[form].count("\n") - 1
    assert ending == "tsv" or JOINED in bad[0].message


@pytest.mark.parametrize("form", ["pairs", "one column"])
@pytest.mark.parametrize("more", ['"a, b"{}\n', '"so ""good"""{}\n'])
def test_a_file_that_needs_its_quotes_has_line_breaks_in_cells(form, more, tmp_path):
    text = STRAY[form] + more.format(",x" * STRAY[form].splitlines()[0].count(","))
    (tmp_path / "a.csv").write_text(text, "utf-8")
    bad: list[BadRow] = []
    rows = list(read_rows(Piece(str(tmp_path / "a.csv")), bad.append))
    assert [type(each) for each in bad] == [LineBreaks]
    assert (len(rows), sum("\n" in cell for row in rows for cell in row.values.values())) == (3, 1)


def test_a_bad_line_does_not_hide_that_a_quote_never_closes(tmp_path):
    lines = LINES_OF_CSV.copy()
    lines[20], lines[22] = '"film 20 was dull,bad', "film 22 was, was dull,bad"
    lines[26] = 'film 26 was dull",good'
    bad: list[BadRow] = []
    good = list(read_rows(csv_file(tmp_path, lines), bad.append))
    assert [row.where for row in bad] == [f"{tmp_path}/a.csv:{line}" for line in (22, 24)]
    assert len(good) == 38


@pytest.mark.parametrize(
    "text",
    [
        "Hello, world\nbye",
        "Roses are red, indeed\nviolets are blue, too\nand so, so sweet\nare you, my dear",
        'she said, "no"\nhe said, "yes"',
        "\n\n,\n",
    ],
)
@pytest.mark.parametrize("at", [0, 20])
def test_lines_in_a_cell_of_csv_are_kept(tmp_path, text, at):
    given = pd.DataFrame([line.rsplit(",", 1) for line in LINES_OF_CSV], columns=["text", "label"])
    given.loc[at, "text"] = text
    given.to_csv(tmp_path / "a.csv", index=False)
    assert [row for _, row in rows(tmp_path / "a.csv", "train")] == given.to_dict("records")


# Words that libraries take for missing values, numbers or dates.
WORDS = ("NA", "null", "None", "nan", "007", "1e5", "2024-01-01", "2024-01-01T00:00:00", "true")


@pytest.mark.parametrize("ending", EACH)
def test_text_stays_text(tmp_path, ending):
    write(tmp_path / f"train.{ending}", WORDS)
    assert documents(tmp_path) == list(WORDS)


def test_a_json_file_may_hold_json_lines(tmp_path):
    write(tmp_path / "a.jsonl", DOCUMENTS)
    (tmp_path / "a.jsonl").rename(tmp_path / "a.json")
    assert documents(tmp_path / "a.json") == DOCUMENTS


@pytest.mark.parametrize("form", ["stream", "file"])
def test_an_arrow_file_has_either_form(tmp_path, form):
    table = pa.table({"text": DOCUMENTS})
    writers = {"stream": pa.ipc.new_stream, "file": pa.ipc.new_file}
    with writers[form](tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    assert documents(tmp_path / "a.arrow") == DOCUMENTS


def test_values_of_json_keep_their_types_and_their_columns(tmp_path):
    """Labels and ids may differ in type from row to row, and a column may be missing."""
    given = [
        {"text": "w1", "label": 1},
        {"text": "w2", "label": "1"},
        {"text": "w3", "label": 1.0, "more": {"a": [1, "b", None]}},
        {"text": "w4"},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, given)), "utf-8")
    found = [row for _, row in rows(tmp_path / "a.jsonl", "train")]
    assert [json.dumps(row) for row in found] == [json.dumps(row) for row in given]


# Files with little or no text.


def table(rows, delimiter):
    text = io.StringIO()
    csv.writer(text, delimiter=delimiter).writerows(rows)
    return text.getvalue().encode()


def parquet(rows):
    sink = io.BytesIO()
    texts, labels = pa.array(rows, pa.string()), pa.array([1] * len(rows), pa.int64())
    pq.write_table(pa.table({"text": texts, "label": labels}), sink)
    return sink.getvalue()


LINES = [b"", b"\n", b"  \n\t\n", BOM]
NO_TEXT = {
    "txt": LINES,
    "jsonl": [*LINES, b"{}", b'{"text": " "}', b'{"text": null}', b"null"],
    "csv": [*LINES, b"text,label", table([["text", "label"], [" ", 1]], ","), b",\n,\n"],
    "tsv": [*LINES, b"text\tlabel", table([["text", "label"], [" ", 1]], "\t"), b"\t\n\t\n"],
    "parquet": [b"", parquet([]), parquet([" "]), parquet([None])],
    "json": [*LINES, b"{}", b"[]", b'{"data": []}', b'[{"text": " "}]', b"null"],
    "arrow": [b"", encoded("arrow", []), encoded("arrow", [" "])],
}
NO_TEXT["ndjson"] = NO_TEXT["jsonl"]
READERS = {
    "documents": documents,
    "corpus": corpus,
    "sentences": lambda source: read_texts(source, column=None, unit="sentence", rows=None),
    "tokenizer": lambda source: own_tokenizer(source, None, 1.0, 64, 64),
    "own task": lambda source: read_task("own", source),
    "benchmark task": lambda source: read_task("sst2", source),
    "lists": lambda source: read_lists(source, seed=0),
}


def files_of(contents, ending):
    kind, _, packing = ending.partition(".")
    for content in contents[kind]:
        yield PACK[packing](content) if packing else content


@pytest.mark.parametrize("ending", EACH)
def test_a_file_without_text_is_refused_by_name(tmp_path, ending):
    for number, content in enumerate(files_of(NO_TEXT, ending)):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        (folder / f"train.{ending}").write_bytes(content)
        for reader in READERS.values():
            with pytest.raises(UsageError, match=rf"{tmp_path}/{number}") as caught:
                reader(str(folder))
            assert "\n" not in caught.value.message


def test_an_empty_file_among_others_is_named(tmp_path):
    write(tmp_path / "train-00000.txt", DOCUMENTS)
    (tmp_path / "train-00001.txt").touch()
    for reader in (documents, corpus):
        with pytest.raises(UsageError, match=r"train-00001\.txt holds no text"):
            reader(tmp_path)


@pytest.mark.parametrize("form", ["t.txt", "t.jsonl.gz", "t.parquet", "folder"])
def test_a_share_has_the_same_rows_in_every_order_and_file(tmp_path, form):
    texts = [f"w{i % 50} w{i % 7} w{i % 11} w{i}" for i in range(100)]
    if form == "folder":
        # Most files have no row of the share.
        for number, text in enumerate(texts):
            write(tmp_path / form / f"{number:02}.txt", [text])
    else:
        write(tmp_path / form, texts[::-1])
    hashes = [hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts]
    source, log = str(tmp_path / form), list[str]()
    for share in (0.25, 0.5):
        below = int(share * 256)
        expected = {text for text, value in zip(texts, hashes, strict=True) if value[0] < below}
        with logged_to(log):
            read = read_texts(source, column=None, unit="document", rows=None, share=share)
        assert set(read.texts) == expected
        assert f"{100 - len(expected)} outside the share asked for" in log[-1]
        # Each document ends with the separator.
        ids = tokens(corpus(source, share=share, held_out_blocks=1, max_length=10))
        assert (ids == tiny_tokenizer().sep_token_id).sum() == len(expected)


def test_half_a_surrogate_pair_in_a_share_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "w1 \\ud83d"}\n')
    with pytest.raises(UsageError, match=r"a\.jsonl:1: half a surrogate pair"):
        corpus(tmp_path / "a.jsonl", share=0.999)


def test_a_share_of_tokens_is_refused(tmp_path):
    write(tmp_path / "t.txt", DOCUMENTS)
    tokenised(tmp_path / "t.txt", tmp_path / "tokens")
    with pytest.raises(UsageError, match=r"data\.share=0\.25: .*tokens holds tokens"):
        corpus(tmp_path / "tokens", share=0.25)


# Errors name the file and the row.


def bad_parquet(damage):
    """A parquet file with bytes changed: the length stays, so that only the damage counts."""
    whole = bytearray(parquet([f"w{i}" for i in range(300)]))
    whole[damage] = b"\xff" * (damage.stop - damage.start)
    return bytes(whole)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"w1\nw2 \xff\n", r"a\.txt:2: not UTF-8"),
        ("a.csv", b"text,label\nw1,1\nw2 \xff,1\n", r"a\.csv:3: not UTF-8"),
        ("a.tsv", b"text\tlabel\nw1\t1\nw2 \xff\t1\n", r"a\.tsv:3: not UTF-8"),
        ("a.jsonl", b'{"text": "w1"}\n{"text": "w2\n', r"a\.jsonl:2: not JSON"),
        ("a.jsonl", b"[" * 100_000, r"a\.jsonl:1: not JSON"),
        (
            "a.jsonl",
            b'{"text": "w1"}\n{"text": "\\ud83d w2"}\n',
            r"a\.jsonl:2: half a surrogate pair",
        ),
        ("a.jsonl", b'{"text": 3}\n', r"a\.jsonl:1: column 'text' holds int"),
        ("a.jsonl", b"[1]\n", r"a\.jsonl:1: a row must be a JSON object, got list"),
        (
            "a.jsonl",
            b'{"a": "x", "b": "y"}\n',
            r"a\.jsonl:1: which column holds the text\? the columns are a, b",
        ),
        ("a.csv", b"text,label\nw1,1\nw2\n", r"a\.csv:3: the row does not have 2 columns"),
        ("a.csv", b"text,label\nw1,1,2\n", r"a\.csv:2: the row does not have 2 columns"),
        ("a.tsv", b"text\tlabel\nw1\t1\nw2,1\n", r"a\.tsv:3: the row does not have 2 columns"),
        ("a.csv", b'text,label\n"x,1\n', "columns|not CSV"),
        ("a.txt.gz", b"no gzip at all", r"a\.txt\.gz is not a whole gzip file"),
        (
            "a.txt.gz",
            gzip.compress(b"w1 w2\n" * 5000)[:-20],
            r"a\.txt\.gz is not a whole gzip file",
        ),
        ("a.parquet", b"PAR1 but not really", r"a\.parquet is not a whole parquet file"),
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
        ("a.txt.bz2", PACK["bz2"](b"w1 w2\n" * 500)[:-9], r"a\.txt\.bz2 is not a whole bzip2 file"),
        ("a.txt.xz", PACK["xz"](b"w1 w2\n" * 500)[:-9], r"a\.txt\.xz is not a whole xz file"),
        ("a.txt.zst", PACK["zst"](b"w1 w2\n" * 500)[:-3], r"a\.txt\.zst is not a whole zstd file"),
        ("a.txt.zst", b"no zstd at all", r"a\.txt\.zst is not a whole zstd file"),
        ("a.zip", b"no zip at all", r"a\.zip cannot be read: File is not a zip file"),
        ("a.arrow", b"ARROW1 but not really", r"a\.arrow is not a whole arrow file"),
        ("a.json", b'[{"text": "w1"},\n{"text": "w2"', r"a\.json:2: not JSON"),
        ("a.json", b'{"text": "w1"}\n{"text": "w2"\n', r"a\.json:2: not JSON"),
        ("a.json", b'["w1"]', r"a\.json:1: a row must be a JSON object, got str"),
        ("a.json", b"3", r"a\.json holds int, not a list of rows"),
        ("a.xlsx", b"x", "no known format"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_malformed_data_is_named_with_file_and_row(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message) as caught:
        documents(tmp_path / name)
    assert "\n" not in caught.value.message


def test_parquet_that_is_not_utf8_is_named_with_its_rows(tmp_path):
    ends = pa.py_buffer(np.array([0, 2, 4], "int32").tobytes())
    text = pa.Array.from_buffers(pa.string(), 2, [None, ends, pa.py_buffer(b"w1\xff\xfe")])
    pq.write_table(pa.table({"text": text}), tmp_path / "a.parquet")
    with pytest.raises(UsageError, match=r"a\.parquet: one of the rows 1 to 128 is not UTF-8"):
        documents(tmp_path / "a.parquet")


@pytest.mark.parametrize("days", [10**7, -(10**7)])
def test_a_date_that_python_lacks_is_named(tmp_path, days):
    on = pa.array([days], pa.int32()).cast(pa.date32())
    pq.write_table(pa.table({"text": ["w1"], "on": on}), tmp_path / "a.parquet")
    with pytest.raises(UsageError, match=r"rows 1 to 128 holds a date or time outside the years"):
        documents(tmp_path / "a.parquet")


def test_a_wrong_row_deep_in_a_large_file_is_named(tmp_path, small_shards):
    """The tokenised text is read in pieces that do not know how many lines came before them."""
    lines = [json.dumps({"text": document}) for document in DOCUMENTS]
    lines[300] = json.dumps({"text": 3})
    (tmp_path / "train.jsonl").write_text("\n".join(lines), "utf-8")
    for reader in (documents, corpus):
        with pytest.raises(UsageError, match=r"train\.jsonl:301: column 'text' holds int"):
            reader(tmp_path)


# Tokenising survives a kill and holds little in memory.


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def finished(folder):
    """The files of the shards whose counts are written, with their times."""
    meta = json.loads((folder / "meta.json").read_text("utf-8"))
    files = [folder / shard["file"] for shard in meta["shards"] if shard["tokens"] is not None]
    return {file: file.stat().st_mtime_ns for file in files}


def test_tokenising_that_is_killed_anywhere_resumes_to_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "SHARD_BYTES", 2000)
    write(tmp_path / "text" / "train.jsonl", DOCUMENTS)
    write(tmp_path / "text" / "validation.txt", ["w50 w51 w52"] * 40)
    out, whole = tmp_path / "out", tmp_path / "whole"
    tokenised(tmp_path / "text", whole)
    assert len(contents(whole)) > 6
    for kill_at in itertools.count(1):
        shutil.rmtree(out, ignore_errors=True)
        if not killed(kill_at, lambda: tokenised(tmp_path / "text", out)):
            break
        begun = list(out.glob("*.bin"))
        done = finished(out) if (out / "meta.json").exists() else {}
        # A process writes one shard at a time.
        assert len(begun) - len(done) in (0, 1)
        if done and len(done) < len(contents(whole)) - 1:
            with pytest.raises(UsageError, match="not finished"):
                corpus(out)
        tokenised(tmp_path / "text", out)
        assert contents(out) == contents(whole)
        # A finished shard is not written again.
        assert {path: path.stat().st_mtime_ns for path in done} == done
    assert kill_at > len(contents(whole))


PEAK = """
import resource, sys
from texts import corpus
def peak(source):
    corpus(source)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
small = peak(sys.argv[1])
print(peak(sys.argv[2]) - small)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in other units elsewhere")
def test_memory_stays_flat_while_tokenising(tmp_path):
    """However much text there is and however long its documents are."""
    line = 300_000
    for name, size in (("small", 1_500_000), ("large", 5_000_000)):
        text = ("w1 w22 w3 w4 " * (line // 13 + 1) + "\n") * (size // line)
        (tmp_path / f"{name}.txt").write_text(text, "utf-8")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "KDCLI_CACHE": str(tmp_path / "cache"),
    }
    command = [sys.executable, "-c", PEAK, tmp_path / "small.txt", tmp_path / "large.txt"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert float(done.stdout) < 60, done.stderr


def test_blocks_and_their_order_are_those_of_earlier_versions(tmp_path):
    """A run that is resumed by a later version reads the same tokens in the same order."""
    write(tmp_path / "train.jsonl", DOCUMENTS)
    found = corpus(tmp_path)
    order = BatchOrder(len(found.train), 4, 3)
    assert order.indices(1).tolist() == [104, 29, 17, 34]
    ids = np.concatenate([found.train.batch(order.indices(step))["input_ids"] for step in (1, 60)])
    assert hashlib.sha256(ids.tobytes()).hexdigest()[:16] == "c76987e4c77e11b4"
