"""Rows that cannot be used, all at once, and labels that look like mistakes."""

import json

import pytest
from reading import read_task

from kdcli.data.labelled.row_checks import describe_empty, describe_repeats, describe_rows
from kdcli.errors import UsageError
from kdcli.messages import facts_once, log_fact
from kdcli.types import Example, Task


def put(path, lines):
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    path.write_text(text, "utf-8")
    return path


def rows(count):
    return [{"text": f"w{i}", "label": "ab"[i % 2]} for i in range(count)]


def opened(file, log=None, **how):
    return read_task("own", file, log, **how)


def test_every_kind_of_fault_is_counted_with_its_first_lines_at_once(tmp_path):
    lines = [
        *rows(100),
        *[{"text": "w1", "label": ""}] * 12,
        {"text": 7, "label": "a"},
        "{",
        [],
        {"text": "w1"},
    ]
    lines[50] = '{"text": "w1", "label": "\\ud800"}'
    file = put(tmp_path / "train.jsonl", lines)
    with pytest.raises(UsageError) as error:
        opened(file)
    first, *others = error.value.message.splitlines()
    assert first == "17 of 116 rows cannot be used:"
    assert set(others) == {
        f"  12 rows: {file}:101: there is no label in 'label'; also 102, 103, 104, 105, 106, 107, "
        "108, 109, 110, ...",
        f"  {file}:113: column 'text' must hold text, got int",
        f"  {file}:114: not JSON: Expecting property name enclosed in double quotes: line 2 column "
        "1 (char 2)",
        f"  {file}:115: a row must be a JSON object, got list",
        f"  {file}:116: there is no column 'label'; the only column is text",
        f"  {file}:51: half a surrogate pair at character 0 of 'label'",
    }
    assert "to skip these rows, give --set data.skip_bad=true" in error.value.hint
    log: list[str] = []
    found = opened(file, log, skip_bad=True)
    assert len(found.train) + len(found.sets[""]) == 99
    assert found.notes[0] == "skipped 17 of 116 rows that cannot be used:"
    assert sorted(found.notes[1:]) == sorted(line.strip() for line in others)
    assert [line for line in log if line in found.notes] == found.notes


def test_a_label_that_would_be_a_class_in_another_type_is_skipped(tmp_path):
    labels = ["0", "1"] * 20 + [0, 1] * 5
    file = put(
        tmp_path / "train.jsonl", [{"text": f"w{i}", "label": x} for i, x in enumerate(labels)]
    )
    found = opened(file, skip_bad=True)
    assert found.notes[0] == "skipped 10 of 50 rows that cannot be used:"
    assert len(found.train) + len(found.sets[""]) == 40
    assert [(each.reason, each.count) for each in found.account.left_out] == [("bad", 10)]


def test_faults_of_both_splits_come_together(tmp_path):
    put(tmp_path / "train.jsonl", [*rows(30), {"text": "w1", "label": None}])
    put(tmp_path / "validation.jsonl", [{"text": "v1", "label": "a"}, {"text": "v2", "label": "z"}])
    with pytest.raises(UsageError) as error:
        opened(tmp_path)
    assert error.value.message.startswith("2 of 33 rows cannot be used:")
    assert "train.jsonl:31: there is no label" in error.value.message
    assert (
        "validation.jsonl:2: 'label' of your data must be one of a, b, got 'z'"
        in error.value.message
    )


@pytest.mark.parametrize("skip", [False, True])
def test_where_every_row_is_bad_the_first_is_the_error(tmp_path, skip):
    put(tmp_path / "validation.jsonl", [{"sentence": 1, "label": 0}] * 5)
    put(tmp_path / "train.jsonl", [{"sentence": 1, "label": 0}] * 5)
    with pytest.raises(UsageError) as error:
        read_task("sst2", tmp_path, skip_bad=skip)
    assert (
        error.value.message
        == f"{tmp_path / 'train.jsonl'}:1: column 'sentence' must hold text, got int"
    )
    assert "skip_bad" not in str(error.value.hint)


def example(number, text, label):
    return Example(f"f.csv:{number}", str(number), (text,), label)


def test_a_small_class_that_may_be_misspelt_is_said():
    frequent = ("hardware", "topic-1", "class A", "stage II", "sports", "typical", "woman")
    others = ("hadware", "hardwear", "topic-2", "class B", "stage III", "sport", "atypical")
    labels = (*frequent, *others, "women", "hard", "software", "softwar")
    task = Task("own", "class", ("text",), ("accuracy",), labels)
    rows = {name: 40 if name in frequent else 1 for name in labels} | {"software": 11, "softwar": 3}
    numbers = [number for number, name in enumerate(labels) for _ in range(rows[name])]
    found = describe_rows(task, [example(i, f"w{i}", label) for i, label in enumerate(numbers)])
    doubts = [line for line in found if "misspelt" in line]
    assert doubts == ["class 'hadware' may be a misspelt 'hardware': f.csv:280"]


def test_class_counts_and_doubts_are_said():
    names = ("Good day", "N/A", "bad", "goodday ", "good day.")
    task = Task("own", "class", ("text",), ("accuracy",), names)
    numbers = [0] * 40 + [2] * 30 + [1] * 3 + [3] * 11 + [4] * 10
    found = describe_rows(
        task,
        [example(i, "" if i in (4, 9) else f"w{i}", label) for i, label in enumerate(numbers)],
    )
    assert found == [
        "training rows by class: 'Good day' 40, bad 30, 'goodday ' 11, 'good day.' 10, N/A 3",
        "warning: classes that look alike: 'Good day' 40, 'goodday ' 11, 'good day.' 10 "
        "('good day.' is at f.csv:84, f.csv:85, f.csv:86 and 7 more); if they are one class, write "
        "one name, in pandas with rows['label'] = rows['label'].replace("
        "{'goodday ': 'Good day', 'good day.': 'Good day'})",
        "class 'N/A' looks like a missing label: f.csv:70, f.csv:71, f.csv:72",
        "classes with fewer than 10 training rows: N/A 3",
        "1 of 94 training rows repeat an earlier text (up to case and spaces; first: f.csv:9)",
        "2 training rows without any text: f.csv:4, f.csv:9",
    ]


@pytest.mark.parametrize("kind", ["multi", "tokens"])
def test_cells_with_several_labels_have_no_line_of_pandas(kind):
    task = Task("own", kind, ("text",), ("accuracy",), ("spam", "Spam"))
    rows = [example(n, f"w{n}", (n % 2,)) for n in range(40)]
    (line,) = [line for line in describe_rows(task, rows) if "alike" in line]
    assert line.endswith("; if they are one class, write one name")


@pytest.mark.parametrize(
    ("kind", "labels", "expected"),
    [
        ("class", [0, 1] * 20, ["training rows by class: a 20, b 20"]),
        ("multi", [(0, 1), (0,)] * 20, ["training rows by class: a 40, b 20"]),
        ("tokens", [(0,), (1,)] * 3, ["training words by class: a 3, b 3"]),
        ("score", [1.5, 2.0], []),
    ],
)
def test_clean_labels_give_their_counts_alone(kind, labels, expected):
    names = () if kind == "score" else ("a", "b")
    task = Task("own", kind, ("text",), ("accuracy",), names)
    assert (
        describe_rows(task, [example(i, f"w{i}", label) for i, label in enumerate(labels)])
        == expected
    )


@pytest.mark.parametrize(
    ("kind", "labels", "ending"),
    [
        ("class", [0, 1, 0, 0, 1, 0], ""),
        (
            "class",
            [0, 1, 1, 1, 0, 0],
            "; 2 texts have contradicting labels, for example f.csv:0 and f.csv:2",
        ),
        ("multi", [(0, 1), (1,), (1, 0), (0, 1), (1,), (0,)], ""),
        (
            "multi",
            [(0, 1), (1,), (1,), (0, 1), (1,), (0,)],
            "; 1 text has contradicting labels, for example f.csv:0 and f.csv:2",
        ),
        ("score", [1.0, 2.0, 1.5, 1.0, 2.0, 0.0], ""),
    ],
)
def test_repeated_texts_and_contradicting_labels_are_counted(kind, labels, ending):
    task = Task("own", kind, ("text",), ("accuracy",), () if kind == "score" else ("a", "b"))
    texts = ["A  text", "other", "a text", "a text", "other", "alone"]
    examples = [example(n, *pair) for n, pair in enumerate(zip(texts, labels, strict=True))]
    repeats = "3 of 6 training rows repeat an earlier text (up to case and spaces; first: f.csv:2)"
    line = f"{repeats}{ending}"
    assert line in describe_rows(task, examples)
    assert not [line for line in describe_rows(task, examples[:2]) if "repeat" in line]


def test_problems_of_training_rows_hide_none_of_the_evaluated_rows(caplog):
    caplog.set_level("INFO", "kdcli")
    rows = [example(n, "", 0) for n in range(3)]
    task = Task("own", "class", ("text",), ("accuracy",), ("a", "b"))
    with facts_once():
        for name in ("training", "evaluated", "training"):
            log_fact(describe_empty(rows, f"{name} row"))
            log_fact(describe_repeats(task, rows, f"{name} rows"))
    assert len(caplog.messages) == 4


def test_repeated_evaluated_rows_are_a_note(tmp_path):
    lines = [*rows(30), {"text": "w1", "label": "a"}, {"text": "w1", "label": "b"}]
    file = put(tmp_path / "rows.jsonl", lines)
    log: list[str] = []
    found = opened(file, log, training=False)
    note = (
        f"2 of 32 evaluated rows repeat an earlier text (up to case and spaces; first: {file}:31); "
        f"1 text has contradicting labels, for example {file}:2 and {file}:31"
    )
    assert (found.notes, log[-1]) == ([note], note)


@pytest.mark.parametrize(
    "other",
    ["sp\u0430m", "\uff53pam", "S\u03a1AM", "s pam", "spam\u200b"],
    ids=["Cyrillic", "full width", "Greek", "space", "invisible"],
)
def test_classes_that_look_alike_are_named(other):
    task = Task("own", "class", ("text",), ("accuracy",), ("spam", other, "ham"))
    rows = [example(n, f"w{n}", n % 3) for n in range(60)]
    (line,) = [line for line in describe_rows(task, rows) if "alike" in line]
    shown = repr(other) if other.isascii() else f"{other!r} = {other!a}"
    assert line.startswith(f"warning: classes that look alike: 'spam' 20, {shown} 20 (")
