"""Selection and verification rows: which rows they are, and that the parts never overlap."""

import json
import warnings
from functools import partial

import numpy as np
import pytest
from reading import logged_to, read_task

from kdcli.data.labelled.lists import read_lists
from kdcli.data.labelled.partition import (
    SELECTION_SIZE,
    VERIFICATION_SIZE,
    Partition,
    PartSize,
    Pools,
    choose_partition,
    text_hashes,
)
from kdcli.errors import UsageError
from kdcli.types import Head
from kdcli.verbs.compress.settings import CompressData


def hashes(name, count):
    return text_hashes([f"{name} {n}" for n in range(count)])


def chosen(pools, selection=100, verification=200, seed=0):
    sizes = PartSize(selection, 0.1), PartSize(verification, 0.2)
    return choose_partition(pools, selection=sizes[0], verification=sizes[1], seed=seed)


def shares(partition, pools):
    """The number of selection and verification rows in each split."""
    splits = {"train": pools.train, "validation": pools.validation, "test": pools.test}
    parts = {"selection": partition.selection, "verification": partition.verification}
    return {
        f"{part} {split}": count
        for part, rows in parts.items()
        for split, all_rows in splits.items()
        if (count := int(np.isin(all_rows, rows).sum()))
    }


TRAIN, VALIDATION, TEST = hashes("train", 4000), hashes("validation", 150), hashes("test", 60)


@pytest.mark.parametrize(
    ("pools", "expected"),
    [
        (Pools(TRAIN), {"selection train": 100, "verification train": 200}),
        # A tenth and a fifth of few rows.
        (Pools(TRAIN[:300]), {"selection train": 30, "verification train": 60}),
        (
            Pools(TRAIN, VALIDATION),
            {
                "selection train": 100,
                "verification train": 50,
                "verification validation": 150,
            },
        ),
        (
            Pools(TRAIN, VALIDATION, TEST),
            {"selection validation": 150, "verification test": 60},
        ),
        (Pools(TRAIN, test=TEST), {"selection train": 100, "verification test": 60}),
        # A validation split with enough rows for both.
        (
            Pools(TRAIN, hashes("validation", 900)),
            {"selection validation": 100, "verification validation": 200},
        ),
        # A few training rows hold too few for the selection.
        (
            Pools(TRAIN[:40], VALIDATION),
            {"selection validation": 75, "verification validation": 75},
        ),
        # The model knows the training rows.
        (
            Pools(TRAIN, VALIDATION, known=TRAIN),
            {"selection validation": 75, "verification validation": 75},
        ),
        (
            Pools(validation=VALIDATION),
            {"selection validation": 75, "verification validation": 75},
        ),
    ],
)
def test_the_rows_come_from_the_splits_that_there_are(pools, expected):
    partition = chosen(pools)
    assert shares(partition, pools) == expected
    assert not np.isin(partition.selection, partition.verification).any()
    assert not np.isin(pools.known, [*partition.selection, *partition.verification]).any()


@pytest.mark.parametrize(
    ("pools", "expected"),
    [
        (Pools(TRAIN), {"selection train": 900, "verification train": 1333}),
        (Pools(TRAIN, VALIDATION, TEST), {"selection validation": 150, "verification test": 60}),
        (
            Pools(TRAIN, hashes("validation", 1600)),
            {"selection train": 900, "verification validation": 1500},
        ),
        (
            Pools(TRAIN, hashes("validation", 950), hashes("test", 2000)),
            {"selection validation": 900, "verification test": 1500},
        ),
    ],
)
def test_a_number_of_rows_that_the_user_chose_is_taken_up_to_a_third(pools, expected):
    sizes = PartSize(100, 0.1).given(900), PartSize(200, 0.2).given(1500)
    partition = choose_partition(pools, selection=sizes[0], verification=sizes[1], seed=0)
    assert shares(partition, pools) == expected


def test_the_defaults_of_a_recipe_are_not_the_user_s_choice():
    data = CompressData()
    assert SELECTION_SIZE.given(data.selection_rows) is SELECTION_SIZE
    assert VERIFICATION_SIZE.given(data.verification_rows) is VERIFICATION_SIZE


def test_no_row_is_in_two_parts_however_the_splits_overlap():
    overlapping = Pools(TRAIN, np.concatenate([VALIDATION, TRAIN[:100]]), TRAIN[50:120])
    partition = chosen(overlapping)
    assert not np.isin(partition.selection, partition.verification).any()
    training = TRAIN[partition.is_training(TRAIN)]
    assert not np.isin(training, overlapping.validation).any()
    assert not np.isin(training, overlapping.test).any()


def test_the_rows_of_a_part_are_counted_as_they_are_evaluated():
    """Each copy counts, but only in the last split that has it."""
    train, test = np.array([1, 1, 2, 3, 4], np.uint64), np.array([2, 2, 5], np.uint64)
    pools = Pools(train, test=test)
    assert pools.count_in(np.array([1, 2], np.uint64)) == 4
    assert pools.count_in(np.array([3, 9], np.uint64)) == 1


def test_rows_that_trained_a_model_are_told_from_the_others():
    pools = Pools(TRAIN[:40], validation=TRAIN[30:50], test=VALIDATION[:5], known=TRAIN)
    assert (pools.count, pools.untrained) == (65, 5)
    assert Pools(TRAIN[:40]).untrained == 40


@pytest.mark.parametrize("seed", range(10))
def test_a_frequent_text_does_not_empty_a_part(seed):
    # 15 % of the rows are one text, which does not fit into the selection rows.
    pools = Pools(np.concatenate([hashes("row", 850), np.repeat(hashes("frequent", 1), 150)]))
    partition = chosen(pools, seed=seed)
    counts = shares(partition, pools)
    assert counts == {"selection train": 100, "verification train": 200}
    assert len(partition.selection) == 100


def test_a_part_has_a_group_even_if_none_fits():
    # Questions about ten passages. None has as few as the tenth that may be selection rows.
    counts = [70, 66, 68, 64, 62, 72, 74, 76, 78, 30]
    pools = Pools(np.repeat(hashes("passage", 10), counts))
    partition = chosen(pools, selection=25, verification=29)
    assert shares(partition, pools) == {"selection train": 62, "verification train": 30}
    # The last group is left to train on.
    two = Pools(np.repeat(hashes("passage", 2), 50))
    assert [len(part) for part in vars(chosen(two)).values()] == [0, 1]


@pytest.mark.parametrize("copies", [1, 3])
def test_groups_that_fit_are_drawn_in_the_order_of_their_mixed_hashes(copies):
    def mixed(number):
        number = (number + 0x9E3779B97F4A7C15) % 2**64
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            number = (number ^ number >> shift) * factor % 2**64
        return number ^ number >> 31

    order = sorted(TRAIN.tolist(), key=mixed)
    partition = chosen(Pools(np.repeat(TRAIN, copies)))
    verification, selection = 200 // copies, 100 // copies
    assert partition.verification.tolist() == sorted(order[:verification])
    end = verification + selection
    assert partition.selection.tolist() == sorted(order[verification:end])


def test_the_seed_alone_decides_and_another_seed_gives_other_rows(tmp_path):
    first, again = chosen(Pools(TRAIN)), chosen(Pools(TRAIN[::-1]))
    assert (first.selection == again.selection).all()
    other = chosen(Pools(TRAIN), seed=1)
    # By chance, two choices of 200 in 4,000 rows have 10 rows in common.
    assert np.isin(first.verification, other.verification).sum() < 30
    first.write(tmp_path / "partition.safetensors")
    read = Partition.read(str(tmp_path / "partition.safetensors"))
    assert (read.selection == first.selection).all()
    assert (read.verification == first.verification).all()


def test_a_file_without_a_partition_is_refused(tmp_path):
    (tmp_path / "bad.safetensors").write_bytes(b"no")
    for name in ("bad.safetensors", "missing.safetensors"):
        with pytest.raises(UsageError, match=r"data\.partition=.* cannot be read"):
            Partition.read(str(tmp_path / name))


def test_a_partition_has_no_test_split():
    parts = Partition(np.array([1, 2], np.uint64), np.array([3], np.uint64))
    hashes = np.arange(5, dtype=np.uint64)
    assert parts.is_evaluated(hashes, "validation").tolist() == [False, True, True, False, False]
    assert parts.is_evaluated(hashes, "verification").tolist() == [False, False, False, True, False]
    with pytest.raises(UsageError, match=r"data\.partition has no test split"):
        parts.is_evaluated(hashes, "test")


def test_the_parts_of_a_file_are_read_as_its_splits(tmp_path):
    texts = [f"w{n} w{n % 7}" for n in range(300)]
    data = tmp_path / "texts.txt"
    data.write_text("\n".join(texts), "utf-8")
    partition = chosen(Pools(text_hashes(texts)))
    file = tmp_path / "partition.safetensors"
    partition.write(file)
    head = Head("class", ("a", "b"))

    def read(split, *, training=False):
        return read_task(
            "own", data, partition=str(file), split=split, training=training, head=head
        )

    training = read("validation", training=True)
    parts = {
        "train": training.train,
        "selection": training.sets[""],
        "verification": read("verification").sets[""],
    }
    sizes = {name: len(examples) for name, examples in parts.items()}
    assert sizes == {"train": 210, "selection": 30, "verification": 60}
    every = [example.texts[0] for examples in parts.values() for example in examples]
    assert sorted(every) == sorted(texts)
    with pytest.raises(UsageError, match="names no verification row of this data"):
        read_task(
            "own",
            data,
            partition=str(_other_partition(tmp_path)),
            split="verification",
            training=False,
            head=head,
        )
    with pytest.raises(UsageError, match=r"needs data\.partition"):
        read_task("own", data, split="verification")


def _evaluated_rows(source, file):
    head = Head("class", ("a", "b"))
    data = read_task("own", source, partition=file, training=False, head=head)
    return [example.texts[0] for example in data.sets[""]]


def _evaluated_lists(source, file):
    data = read_lists(source, seed=0, partition=file)
    return data.evaluated.queries


@pytest.mark.parametrize("evaluated", [_evaluated_rows, _evaluated_lists])
def test_a_row_in_two_splits_is_evaluated_in_the_last_one(evaluated, tmp_path):
    # Case does not affect the hash of a text, and tells where a row comes from.
    splits = {"train": ("ROW", 0, 100), "validation": ("row", 80, 120), "test": ("Row", 110, 130)}
    for split, (word, begin, end) in splits.items():
        lists = evaluated is _evaluated_lists
        rows = [{"query" if lists else "text": f"{word} {n}"} for n in range(begin, end)]
        more = {"passages": ["yes", "no"], "labels": [1, 0]} if lists else {}
        lines = "".join(json.dumps(row | more) + "\n" for row in rows)
        (tmp_path / f"{split}.jsonl").write_text(lines, "utf-8")
    file = tmp_path / "partition.safetensors"
    Partition(hashes("row", 120)[70:], hashes("row", 70)[10:]).write(file)
    expected = [f"ROW {n}" for n in range(70, 80)] + [f"row {n}" for n in range(80, 110)]
    expected += [f"Row {n}" for n in range(110, 120)]
    assert evaluated(str(tmp_path), str(file)) == expected


def _other_partition(folder):
    file = folder / "other.safetensors"
    chosen(Pools(TRAIN)).write(file)
    return file


def test_lists_of_which_none_is_held_out_are_refused(tmp_path):
    rows = [{"query": f"q{n}", "passages": ["a", "b"], "labels": [1, 0]} for n in range(2)]
    file = tmp_path / "lists.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    with pytest.raises(UsageError, match="has 2 queries, and none of them is held out") as caught:
        read_lists(str(file), seed=0)
    assert "a validation split" in str(caught.value.hint)
    # Without training, all of them are evaluated, and there is no mean of nothing.
    log: list[str] = []
    with warnings.catch_warnings(action="error"), logged_to(log):
        read_lists(str(file), seed=0, trains=False)
    assert log[-1] == "2 evaluation queries"


def test_lists_of_the_named_split_are_evaluated(tmp_path):
    for split in ("train", "test"):
        row = {"query": split, "passages": ["a", "b"], "labels": [1, 0]}
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(row) + "\n", "utf-8")
    read = partial(read_lists, str(tmp_path), seed=0, split="test")
    for trains in (True, False):
        assert (read(trains=trains).evaluated.queries, read().split) == (["test"], "test")
    (tmp_path / "train.jsonl").unlink()
    assert read(trains=False).evaluated.queries == ["test"]
    (tmp_path / "test.jsonl").rename(tmp_path / "train.jsonl")
    with pytest.raises(UsageError, match="no test split"):
        read(trains=False)


def test_a_spreadsheet_holds_lists_in_its_cells(tmp_path):
    (tmp_path / "lists.csv").write_text(
        "Query,Passages,Labels\nq,\"['a', 'b']\",\"[1, 0]\"\n", "utf-8"
    )
    data = read_lists(str(tmp_path / "lists.csv"), seed=0, trains=False)
    assert (data.evaluated.passages, [*data.evaluated.labels]) == (["a", "b"], [1.0, 0.0])
    (tmp_path / "lists.csv").write_text('Query,Positive,Negatives\nq,a,"[""b"", ""c""]"\n', "utf-8")
    data = read_lists(str(tmp_path / "lists.csv"), seed=0, trains=False)
    assert data.evaluated.passages == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("pairs.jsonl", '{"query": "q", "passage": "%s", "label": %s}\n'),
        ("pairs.csv", "q,%s,%s\n"),
    ],
)
def test_labels_that_are_true_or_false_are_1_and_0(tmp_path, name, content):
    file, lines = tmp_path / name, []
    header = "" if name.endswith("jsonl") else "query,passage,label\n"
    rows = [("a", "true"), ("b", "false"), ("c", "1")]
    file.write_text(header + "".join(content % row for row in rows), "utf-8")
    with logged_to(lines):
        found = read_lists(str(file), seed=0, trains=False).evaluated
    assert [*found.labels] == [1.0, 0.0, 1.0]
    first = 2 if header else 1
    assert f"labels true and false are read as 1 and 0 (first: {file}:{first})" in lines


def test_columns_that_lists_do_not_use_are_logged(tmp_path):
    rows = [{"query": "a", "passage": f"b {n}", "relevance": n % 2} for n in range(4)]
    file, lines = tmp_path / "lists.jsonl", []
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    with logged_to(lines):
        assert not read_lists(str(file), seed=0, trains=False).has_labels
    assert "1 queries; unused columns: relevance" in lines


@pytest.mark.parametrize("label", ["1_0", "0,5", "١"])
def test_labels_of_lists_are_numbers(tmp_path, label):
    file = tmp_path / "lists.jsonl"
    file.write_text(json.dumps({"query": "a", "passage": "b", "label": label}) + "\n", "utf-8")
    with pytest.raises(UsageError, match="must hold a finite number"):
        read_lists(str(file), seed=0, trains=False)
