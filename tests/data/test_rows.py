"""No evaluated row trained a model: split by content, subsets, and rows that are left out of the
judgement."""

import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reading import read_task

from kdcli.data.labelled.partition import choose_subset, hashes_of, held_back
from kdcli.errors import UsageError
from kdcli.types import Answer, Example, Task

OWN = Task("own", "class", ("text",), ("accuracy",), ("bad", "good"))
SPAN = Task("own", "span", ("question", "context"), ("f1",))
TEXTS = st.text(min_size=1, max_size=12)


def examples(texts, label=0):
    return [Example(f"f:{i}", str(i), (text,), label) for i, text in enumerate(texts)]


def texts_of(found):
    return {e.texts for e in found}


def feedback(count, begin=0):
    return [
        {"text": f"row number {i}", "label": ("bad", "good")[i % 2]}
        for i in range(begin, begin + count)
    ]


def put(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def opened(source, log=None, **how):
    return read_task("own", source, log, **how)


def judged(found):
    return [e for rows in found.sets.values() for e in rows]


@settings(deadline=None, max_examples=50)
@given(
    st.lists(TEXTS, min_size=1, max_size=60),
    st.integers(0, 2**63 - 1),
    st.randoms(use_true_random=False),
)
def test_the_split_is_a_pure_function_of_texts_and_seed(texts, seed, rng):
    sides = dict(zip(texts, held_back(OWN, examples(texts), seed).tolist(), strict=True))
    # Order, number of rows, duplicates and labels change nothing.
    others = [rng.choice(texts) for _ in range(2 * len(texts))]
    again = held_back(OWN, examples(others, label=1), seed)
    assert [sides[text] for text in others] == again.tolist()


@settings(deadline=None, max_examples=100)
@given(
    st.text(alphabet="aBçÇßΣς İ\u0301é", min_size=1, max_size=12),
    st.sampled_from([" ", "\t", "\u00a0", "  \n"]),
)
def test_twins_by_case_space_or_composition_are_one_row(text, space):
    import unicodedata

    twins = [text, text.swapcase().swapcase(), text.replace(" ", space), f"{space}{text}{space}"]
    twins += [unicodedata.normalize(form, text) for form in ("NFC", "NFD")]
    assert len(set(hashes_of(examples([text, *twins[2:]])).tolist())) == 1
    if text.isascii():
        assert len(set(hashes_of(examples([text.lower(), text.casefold()])).tolist())) == 1


def test_texts_of_a_pair_do_not_run_together():
    pairs = [
        Example("f:1", "1", texts, 0)
        for texts in (("a b", "c"), ("a", "b c"), ("a b c",), ("c", "a b"))
    ]
    assert len(set(hashes_of(pairs).tolist())) == 4


def test_another_seed_holds_other_rows_back_and_each_about_a_tenth():
    rows = examples([f"row {i}" for i in range(20_000)])
    one, two = held_back(OWN, rows, 0), held_back(OWN, rows, 1)
    # 0.1 +- 6 standard deviations; independent of each other.
    for share, expected in ((one.mean(), 0.1), (two.mean(), 0.1), ((one & two).mean(), 0.01)):
        assert abs(share - expected) < 6 * np.sqrt(expected / 20_000)


def test_a_passage_with_several_questions_is_on_one_side():
    rows = [
        Example("f:1", str(i), (f"question {i}", f"passage {i // 5}"), (Answer("x", 0),))
        for i in range(500)
    ]
    sides = held_back(SPAN, rows, 0).reshape(100, 5)
    assert (sides.all(1) | ~sides.any(1)).all()
    assert 0 < sides.any(1).sum() < 30


@settings(deadline=None, max_examples=50)
@given(
    st.lists(TEXTS, min_size=2, max_size=40, unique=True),
    st.integers(1, 20),
    st.randoms(use_true_random=False),
)
def test_fewer_rows_are_contained_in_more_whatever_the_order(texts, count, rng):
    shuffled = rng.sample(texts, len(texts))
    few, more = choose_subset(examples(texts), count), choose_subset(examples(texts), count + 3)
    assert texts_of(few) <= texts_of(more)
    assert texts_of(few) == texts_of(choose_subset(examples(shuffled), count))
    assert len(few) == min(count, len(texts))


@pytest.mark.parametrize("train_rows", [None, 10, 1000])
def test_the_rows_held_back_depend_neither_on_number_nor_order_nor_verb(tmp_path, train_rows):
    rows = feedback(600)
    file, mixed = (
        put(tmp_path / "a.jsonl", rows),
        put(tmp_path / "b.jsonl", random.Random(0).sample(rows, 600) * 2),
    )
    first, again = opened(file), opened(mixed, train_rows=train_rows)
    assert texts_of(judged(first)) == texts_of(judged(again))
    assert not texts_of(judged(again)) & texts_of(again.train)
    # `evaluate` of a model that was trained on these rows takes the same.
    log: list[str] = []
    alone = opened(file, log, training=False, trained={"runs/x": again.rows})
    assert (texts_of(judged(alone)), alone.split) == (
        texts_of(judged(first)),
        "held-out rows",
    )
    assert "training examples are held out for evaluation" in alone.notes[-1]
    assert not any("held out" in line for line in log)


def test_only_all_rows_are_called_so(tmp_path):
    file = put(tmp_path / "a.jsonl", feedback(300))
    known = hashes_of(examples([row["text"] for row in feedback(50, 100)]))
    found = opened(file, training=False, trained={"runs/x": known})
    assert (len(judged(found)), found.split) == (250, "all but 50 rows that trained a model")
    found = opened(file, training=False, judged_rows=40)
    assert (len(judged(found)), found.split) == (40, "40 of 300 rows")
    assert opened(file, training=False, judged_rows=300).split == "all rows"
    found = opened(file, training=False, judged_rows=40, trained={"runs/x": known})
    assert found.split == "40 of 300 rows, without 50 that trained a model"
    found = opened(
        *(file,), training=False, judged_rows=40, trained={"runs/x": known}, judge_trained_rows=True
    )
    count = int(np.isin(hashes_of(judged(found)), known).sum())
    assert 0 < count < 40
    assert found.split == f"40 of 300 rows, {count} of 40 rows trained a model"


def test_rows_in_train_and_validation_are_left_out_and_counted(tmp_path):
    put(tmp_path / "train.jsonl", feedback(2000))
    # The shared ones are twins, not copies.
    shared = [row | {"text": row["text"].upper() + " "} for row in feedback(500)]
    put(tmp_path / "validation.jsonl", [*shared, *feedback(500, 5000)])
    log: list[str] = []
    found = opened(tmp_path, log, judged_rows=400)
    line = (
        "skipped 500 of 1,000 rows of validation: this run trains on them, so their scores would "
        "be too high; 500 rows remain"
    )
    assert (found.notes, len(judged(found))) == ([line], 400)
    # 100 of the other rows are not chosen.
    first = next(e for e in log if "over the number" in e).rpartition(":")[2].rstrip(")")
    places = f"(first: {tmp_path}/validation.jsonl:{{}})".format
    account = (
        f"rows of {tmp_path.name}: 3,000 read, 2,400 kept; left out: 500 trained a model "
        f"{places(1)}, 100 over the number of rows asked for {places(first)}"
    )
    assert log[-2:] == [line, account]
    assert not set(hashes_of(judged(found)).tolist()) & set(found.rows.tolist())


def test_a_student_of_fewer_rows_is_not_judged_by_rows_of_its_teacher(tmp_path):
    file = put(tmp_path / "a.jsonl", feedback(4000))
    teacher = opened(file)
    student = opened(file, train_rows=1000, trained={"runs/teacher": teacher.rows})
    assert (len(student.train), student.notes) == (1000, [])
    assert judged(student) == judged(teacher)
    # Held back by another seed, most of the rows are the teacher's own.
    other = opened(file, split_seed=1, trained={"runs/teacher": teacher.rows})
    known = int(np.isin(hashes_of(judged(opened(file, split_seed=1))), teacher.rows).sum())
    total = len(judged(opened(file, split_seed=1)))
    assert other.notes == [
        f"skipped {known} of {total} rows held out: runs/teacher was trained on them, "
        f"so their scores would be too high; {total - known} rows remain"
    ]
    assert len(judged(other)) == total - known


@pytest.mark.parametrize(("fresh", "refused"), [(0, True), (19, True), (20, False)])
def test_where_too_few_rows_are_left_the_judgement_is_refused(tmp_path, fresh, refused):
    known = hashes_of(examples([row["text"] for row in feedback(100)]))
    file = put(tmp_path / "validation.jsonl", [*feedback(100), *feedback(fresh, 5000)]).parent
    if not refused:
        assert len(judged(opened(file, training=False, trained={"runs/x": known}))) == fresh
        return
    with pytest.raises(UsageError) as error:
        opened(file, training=False, trained={"runs/x": known})
    assert (
        error.value.message
        == f"cannot evaluate on 100 of {100 + fresh} rows of validation: runs/x was trained on them"
    )
    assert "data.judge_trained_rows=true" in str(error.value.hint)
    kept = opened(file, training=False, trained={"runs/x": known}, judge_trained_rows=True)
    assert kept.split == f"validation, 100 of {100 + fresh} rows trained a model"
    assert len(judged(kept)) == 100 + fresh


@pytest.mark.parametrize(("copies", "left"), [(5, 100), (6, 94)])
def test_a_benchmarks_own_split_keeps_its_few_natural_duplicates(tmp_path, copies, left):
    put(tmp_path / "train.jsonl", [{"sentence": f"row {i}", "label": i % 2} for i in range(200)])
    rows = [*range(copies), *range(1000, 1100 - copies)]
    put(tmp_path / "validation.jsonl", [{"sentence": f"row {i}", "label": i % 2} for i in rows])
    found = read_task("sst2", tmp_path)
    assert (len(judged(found)), found.split, len(found.notes)) == (left, "validation", 1)
    assert ("as published results do" in found.notes[0]) == (left == 100)


def test_each_model_that_knows_rows_is_counted(tmp_path):
    put(tmp_path / "validation.jsonl", feedback(100))
    known = {f"runs/{n}": hashes_of(examples([r["text"] for r in feedback(n)])) for n in (10, 30)}
    found = opened(tmp_path, training=False, trained=known)
    assert found.notes == [
        "skipped 30 of 100 rows of validation: runs/10 was trained on 10 of them and runs/30 was "
        "trained on 30 of them, so their scores would be too high; 70 rows remain"
    ]
