"""Labels are known by their names, wherever a source keeps them, and fit a model by name."""

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, Dataset, Features, List, Value
from hub_server import hub  # noqa: F401
from reading import read_task

from kdcli.data.objects import write_object
from kdcli.errors import UsageError
from kdcli.types import Head

# Neither alphabetical nor in the order of the rows.
NAMES = ["mild", "bad", "good"]
TAGS = ["O", "B-PLACE", "I-PLACE"]
CLASSES = Features({"text": Value("string"), "label": ClassLabel(names=NAMES)})
ROWS = [{"text": f"w{n}", "label": NAMES[(n + 2) % 3]} for n in range(60)]
HEAD = Head("class", ("good", "mild", "bad"))


def in_schema():
    return Dataset.from_list(ROWS, features=CLASSES)


def parquet(folder):
    in_schema().to_parquet(folder / "a.parquet")
    return folder / "a.parquet"


def in_memory(folder):
    return write_object(in_schema())


def categorical(folder):
    table = pd.DataFrame(ROWS).astype({"label": "category"})
    table.to_parquet(folder / "a.parquet")
    return folder / "a.parquet"


def categorical_in_memory(folder):
    return write_object(pd.DataFrame(ROWS).astype({"label": "category"}))


SOURCES = [parquet, in_memory, categorical, categorical_in_memory]


@pytest.mark.parametrize("source", SOURCES)
def test_rows_have_the_names_of_their_classes(tmp_path, cache, source):
    data = read_task("own", source(tmp_path), training=False, head=HEAD)
    assert data.task.labels == HEAD.labels
    assert [HEAD.labels[e.label] for e in data.sets[""]] == [row["label"] for row in ROWS]


@pytest.mark.parametrize("source", [parquet, in_memory])
def test_classes_without_a_model_are_in_the_order_of_the_schema(tmp_path, cache, source):
    assert read_task("own", source(tmp_path)).task.labels == tuple(NAMES)


def test_classes_of_the_hub_have_names(hub, tmp_path):  # noqa: F811
    hub.repositories["someone/rows"] = {"train.parquet": parquet(tmp_path).read_bytes()}
    with hub.known(tmp_path / "hf"):
        assert read_task("own", "someone/rows").task.labels == tuple(NAMES)


def test_words_have_the_names_of_their_tags(tmp_path):
    features = Features({"tokens": List(Value("string")), "ner_tags": List(ClassLabel(names=TAGS))})
    rows = [{"tokens": ["in", "New", f"w{n}"], "ner_tags": [0, 1, 2]} for n in range(30)]
    Dataset.from_list(rows, features=features).to_parquet(tmp_path / "a.parquet")
    data = read_task("own", tmp_path / "a.parquet")
    assert (data.task.kind, data.task.labels) == ("tokens", tuple(TAGS))
    assert data.train[0].label == (0, 1, 2)
    with pytest.raises(UsageError, match="the model reads texts, but 'tokens' holds lists"):
        read_task("own", tmp_path / "a.parquet", training=False, head=HEAD)


def test_minus_one_of_a_schema_is_no_label(tmp_path):
    rows = [*ROWS, {"text": "w60", "label": -1}]
    Dataset.from_list(rows, features=CLASSES).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(UsageError, match=r"a\.parquet:61: there is no label in 'label'"):
        read_task("own", tmp_path / "a.parquet")


def test_a_benchmark_takes_names_for_its_numbers(tmp_path):
    names = ClassLabel(names=["positive", "negative"])
    features = Features({"sentence": Value("string"), "label": names})
    rows = [{"sentence": f"w{n}", "label": n % 2} for n in range(60)]
    Dataset.from_list(rows, features=features).to_parquet(tmp_path / "validation.parquet")
    data = read_task("sst2", tmp_path, training=False)
    assert [e.label for e in data.sets[""]] == [1, 0] * 30


def test_numbers_without_names_are_matched_by_number_and_logged(tmp_path):
    table = pa.table({"text": [f"w{n}" for n in range(60)], "label": [n % 3 for n in range(60)]})
    pq.write_table(table, tmp_path / "a.parquet")
    log: list[str] = []
    data = read_task("own", tmp_path / "a.parquet", log, training=False, head=HEAD)
    assert data.task.labels == HEAD.labels
    (line,) = [line for line in log if "numbers decide" in line]
    assert "0 is good, 1 is mild, 2 is bad" in line
    assert "head.label_map" in line


def test_names_fit_a_model_that_was_trained_on_their_numbers(tmp_path):
    log: list[str] = []
    file = parquet(tmp_path)
    data = read_task("own", file, log, training=False, head=Head("class", ("0", "1", "2")))
    assert data.task.labels == ("0", "1", "2")
    assert [e.label for e in data.sets[""]] == [NAMES.index(row["label"]) for row in ROWS]
    assert any("mild is 0, bad is 1, good is 2" in line for line in log)


def test_other_names_than_the_models_are_not_its_classes(tmp_path):
    head = Head("class", ("red", "green", "blue"))
    data = read_task("own", parquet(tmp_path), training=False, head=head)
    assert data.task.labels == tuple(NAMES)
