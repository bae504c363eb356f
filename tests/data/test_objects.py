"""Objects of Python become files of the cache: the same rows as of a file, and one path for the
same content."""

import datetime
import json
from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, Dataset, DatasetDict
from reading import logged_to, read_task

from kdcli.data.objects import write_object
from kdcli.data.sources import open_source
from kdcli.disk import USED
from kdcli.errors import MachineError, UsageError

ROWS = [{"text": f"w{n} w{n % 7}", "label": ("calm", "brisk")[n % 2]} for n in range(60)]
NESTED = [{"tokens": [f"w{n}", "w1"], "ner_tags": ["B-LOC", "O"]} for n in range(60)]
ANSWERS = [
    {"question": "w1", "context": f"w2 w{n}", "answers": {"text": ["w2"], "answer_start": [0]}}
    for n in range(60)
]
TYPES = {
    "rows": lambda rows: rows,
    "tuple": tuple,
    "columns": lambda rows: {name: [row[name] for row in rows] for name in rows[0]},
    "frame": lambda rows: pd.DataFrame(rows, index=range(100, 100 + len(rows))),
    "dataset": Dataset.from_list,
    "formatted": lambda rows: Dataset.from_list(rows).with_format("numpy"),
}


def written(value) -> Path:
    return write_object(value)


def rows_in(path: Path, split: str = "train") -> list[dict]:
    tables = open_source(str(path)).tables(split)
    return [dict(row.values) for table in tables for row in table.rows]


def examples(source: Path):
    data = read_task("own", source)
    sets = [data.train, *data.sets.values()]
    return data.task, [[(e.texts, e.label) for e in each] for each in sets]


@pytest.mark.parametrize("rows", [ROWS, NESTED, ANSWERS], ids=["texts", "tokens", "answers"])
@pytest.mark.parametrize("kind", TYPES)
def test_every_kind_of_object_holds_the_rows_of_the_file(tmp_path, kind, rows):
    file = tmp_path / "train.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
    path = written(TYPES[kind](rows))
    assert rows_in(path) == rows
    assert examples(path) == examples(file)


def test_texts_are_documents_also_with_line_breaks():
    texts = ["long " * 200, "w1 w2", "w3\nw4", "  w5 ", "äöü\u2028 \N{GRINNING FACE}"]
    path = written(texts)
    assert list(open_source(str(path)).documents("train", None)) == texts
    columns = (
        np.array(texts),
        pd.Series(texts, dtype="string"),
        Dataset.from_dict({"t": texts})["t"],
    )
    assert {written(column) for column in columns} == {path}
    frame = pd.DataFrame({"text": texts, "label": "b"})
    assert written({"text": frame["text"], "label": frame["label"]}) == written(frame)


def test_a_dict_of_splits_is_a_directory_of_them():
    splits = DatasetDict(
        train=Dataset.from_list(ROWS[:40]),
        validation=Dataset.from_list(ROWS[40:]),
        unsupervised=Dataset.from_list(ROWS),
    )
    lines: list[str] = []
    with logged_to(lines):
        path = write_object(splits)
    assert sorted(file.name for file in path.iterdir()) == ["train.parquet", "validation.parquet"]
    assert (rows_in(path), rows_in(path, "validation")) == (ROWS[:40], ROWS[40:])
    assert lines == ["splits that are not read: unsupervised"]
    assert write_object(splits) == path
    fewer = DatasetDict(train=splits["train"], validation=Dataset.from_list(ROWS[40:59]))
    assert write_object(fewer) != path


def test_the_splits_of_a_dict_have_the_names_of_files():
    train, dev = Dataset.from_list(ROWS[:40]), Dataset.from_list(ROWS[40:])
    path = write_object(DatasetDict(train=train, dev=dev))
    assert rows_in(path, "validation") == ROWS[40:]
    with pytest.raises(
        UsageError,
        match="the DatasetDict has two names for the validation split: dev and validation",
    ) as caught:
        write_object(DatasetDict(train=train, dev=dev, validation=dev))
    assert caught.value.hint == "rename or remove one of them"


def test_the_path_depends_on_the_content_alone():
    frame = pd.DataFrame(ROWS)
    path = written(frame)
    changed = path.stat().st_mtime_ns
    assert written(frame.copy().set_index(np.arange(60)[::-1])) == path
    assert path.stat().st_mtime_ns == changed, "a file that exists is not written again"
    others = [
        frame[::-1],
        frame[["label", "text"]],
        frame[:59],
        frame.rename(columns={"text": "content"}),
        frame.assign(label=frame["label"].replace("calm", "Calm")),
    ]
    assert len({path, *map(written, others)}) == 6
    dataset = Dataset.from_list(ROWS)
    whole = written(dataset)
    again = dataset.shuffle(seed=1).select(np.argsort(np.random.default_rng(1).permutation(60)))
    assert written(Dataset.from_list(list(again))) == written(again), "however it is stored"
    assert written(Dataset.from_list(ROWS)) == whole
    assert written(dataset.select(range(59))) != whole
    assert written(ROWS) == written([dict(row) for row in ROWS])
    assert written(ROWS) != written(ROWS[::-1])


def test_values_that_json_lacks_are_written_as_labels_are_read():
    rows = [{"text": "w1", "label": Decimal("1.5"), "on": datetime.date(2026, 1, 2), "of": [b"x"]}]
    rows[0]["until"] = pd.NaT
    (row,) = rows_in(written(rows))
    assert row == {"text": "w1", "label": 1.5, "on": "2026-01-02", "of": ["x"], "until": None}


def test_types_of_pandas_and_numpy_become_plain_values():
    frame = pd.DataFrame(
        {
            "text": ["w1", None, "w3"],
            "label": pd.Categorical(["x", "y", "x"]),
            "number": np.array([1, 2, 3], np.int8),
            "share": [0.5, np.nan, 1.5],
            "words": [np.array(["a", "b"]), np.array([], object), np.array(["c"])],
            "day": [datetime.date(2026, 1, 2)] * 3,
            7: [True, False, True],
        }
    )
    first, second, _ = rows_in(written(frame))
    day = datetime.date(2026, 1, 2)
    assert first == {
        **{"text": "w1", "label": "x", "number": 1, "share": 0.5},
        **{"words": ["a", "b"], "day": day, "7": True},
    }
    assert (second["text"], second["share"], second["words"]) == (None, None, [])
    rows = [{"text": np.str_("w1"), "label": np.int64(3), "words": np.array(["a", "b"])}]
    assert rows_in(written(rows)) == [{"text": "w1", "label": 3, "words": ["a", "b"]}]
    named = Dataset.from_list([{"label": "b"}, {"label": "a"}]).cast_column(
        "label", ClassLabel(names=["a", "b"])
    )
    assert rows_in(written(named)) == [{"label": "b"}, {"label": "a"}]


def test_a_table_longer_than_a_batch_is_written_whole():
    rows = [{"text": f"w{n}"} for n in range(2300)]
    dataset, frame = Dataset.from_list(rows), pd.DataFrame(rows)
    for path in map(written, (dataset, dataset.select(range(2299, -1, -1)), frame)):
        assert pq.ParquetFile(path).metadata.num_rows == 2300
        assert sorted(int(row["text"][1:]) for row in rows_in(path)) == list(range(2300))


class Unknown:
    pass


@pytest.mark.parametrize(
    ("value", "message", "hint"),
    [
        ([], "the list is empty; at least one row", "give texts or rows"),
        ({}, "the table has no columns", "give a table with rows"),
        (pd.DataFrame({"text": []}), "the table has no rows", "give a table with rows"),
        (DatasetDict(train=Dataset.from_list([])), "split train: the table has no columns", ""),
        (DatasetDict(old=Dataset.from_list(ROWS)), "has the splits old; it needs train", "rename"),
        ({"text": "w1"}, "under 'text'; a dict of data holds a list", "give {"),
        ({"train": pd.DataFrame(ROWS)}, "of type DataFrame under 'train'", "DatasetDict"),
        ({"train": {"text": ["w1"]}}, "of type dict under 'train'", "DatasetDict"),
        (
            {"text": pd.Series(["w1", "w2"]), "label": pd.Series([1, 2], index=[1, 0])},
            "the Series 'text' and 'label' have different indexes",
            "pandas.DataFrame",
        ),
        ({"text": ["w1"], "label": [1, 2]}, "text has 1, label has 2", "fill or cut"),
        (pd.Series(["w1", None]), "item 1 of the list is of type", "missing values"),
        (b"w1", "got an object of type bytes", "convert it"),
        (["w1", 3], "item 1 of the list is of type int", "or texts"),
        (["w1", {"text": "w2"}], "item 1 of the list is of type dict", "or texts"),
        ([Path("a.csv")], "item 0 of the list is of type PosixPath", "their directory"),
        ([__file__, __file__], "the list holds the 2 paths", "the directory of several"),
        (pd.DataFrame({"text": ["w1", 2]}), "column 'text' cannot be written", "astype"),
        (pd.DataFrame([[1, 2]], columns=["a", "a"]), "there are 2 columns 'a'", "rename"),
        ({"text": ["\ud800"]}, "column 'text' cannot be written", "remove the column"),
        ([{"text": Unknown()}], "column 'text' of row 0 .* type Unknown", "use text, numbers"),
        (pd.DataFrame({"a": pd.cut([1, 2], 2)}), "the table cannot be written", "astype"),
        ([{1: "w1"}], "row 0 has the column 1; columns are named by text", "rename the keys"),
        (Unknown(), "got an object of type Unknown; allowed is a path, a hub id", "convert"),
        (iter(["w1"]), "got an object of type list_iterator", "convert it"),
        (Dataset.from_list(ROWS).to_iterable_dataset(), "of type IterableDataset", "to_pandas"),
    ],
)
def test_what_is_no_data_is_refused_with_what_to_do(value, message, hint):
    with pytest.raises(UsageError, match=message) as caught:
        written(value)
    assert hint in caught.value.hint
    assert len(caught.value.hint) > 3


@pytest.mark.parametrize(("folder", "used"), [("objects", True), ("run", False)])
def test_only_an_object_gets_a_note(monkeypatch, tmp_path, folder, used):
    monkeypatch.setenv("KDCLI_CACHE", str(tmp_path))
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "rows.jsonl").write_text('{"text": "w1"}\n')
    open_source(str(tmp_path / folder / "rows.jsonl"))
    assert (tmp_path / folder / f".rows{USED}").is_file() == used


@pytest.mark.parametrize("value", [["a text"], [{"text": "a", "label": 1}]])
def test_a_cache_that_cannot_be_written_is_named(value, monkeypatch, tmp_path):
    (tmp_path / "cache").touch()
    monkeypatch.setenv("KDCLI_CACHE", str(tmp_path / "cache"))
    with pytest.raises(MachineError, match="cache") as caught:
        write_object(value)
    assert caught.value.hint == "set KDCLI_CACHE to a directory that can be written"
