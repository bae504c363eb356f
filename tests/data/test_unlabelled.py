"""Rows without labels: the head of the model decides how they are read."""

import json

import pytest
from reading import logged_to, read_task

from kdcli.data.labelled.own import own_task
from kdcli.data.rows import Row
from kdcli.errors import UsageError
from kdcli.types import Head

CLASSES = Head("class", ("NEGATIVE", "POSITIVE"))
TAGGER = Head("tokens", ("O", "B-LOC"))
READER, SCORER = Head("span"), Head("score")


def task_of(values, head, **columns):
    messages = []
    rows = [Row(f"mine.jsonl:{n}", values) for n in range(3)]
    with logged_to(messages):
        return own_task(rows, columns, head=head), messages[0]


@pytest.mark.parametrize(
    ("values", "head", "texts"),
    [
        ({"text": "good"}, CLASSES, ("text",)),
        ({"body": "good", "id": "a"}, CLASSES, ("body",)),
        ({"premise": "a b", "hypothesis": "c d"}, CLASSES, ("premise", "hypothesis")),
        ({"text": "good", "url": "x.org/a", "views": 4}, SCORER, ("text",)),
        ({"tokens": ["a", "b"]}, TAGGER, ("tokens",)),
        ({"text": "a b"}, TAGGER, ("text",)),
        ({"question": "who", "context": "she"}, READER, ("question", "context")),
    ],
)
def test_the_texts_are_found_without_a_label(values, head, texts):
    task, message = task_of(values, head)
    assert (task.kind, task.texts, task.label, task.labels) == (head.kind, texts, "", head.labels)
    assert message.startswith("your data: no labels")


def test_a_column_of_labels_is_used_and_named():
    values = {"text": "good", "label": "POSITIVE"}
    rows = [Row("a:1", values), Row("a:2", values | {"label": "NEGATIVE"})]
    messages = []
    with logged_to(messages):
        task = own_task(rows, {}, head=CLASSES)
    assert (task.label, task.labels) == ("label", CLASSES.labels)
    assert "text -> label" in messages[0]
    rows = [Row("a:1", {"text": "good", "verdict": "POSITIVE"})]
    with pytest.raises(UsageError, match="which column holds the label") as caught:
        own_task(rows, {}, head=CLASSES)
    assert "data.columns.label=verdict" in str(caught.value.hint)


def test_numbers_are_the_classes_of_a_head_with_names():
    rows = [Row("a:1", {"text": "good", "label": 1}), Row("a:2", {"text": "bad", "label": 0})]
    assert own_task(rows, {}, head=CLASSES).labels == CLASSES.labels
    unnamed = Head("class", ("LABEL_0", "LABEL_1"), named=False)
    assert own_task(rows, {}, head=unnamed).labels == ("0", "1")


def test_labels_are_ignored_on_request():
    rows = [Row("a:1", {"text": "good", "label": "spam"})]
    task = own_task(rows, {}, head=CLASSES, ignores_labels=True)
    assert (task.label, task.labels) == ("", CLASSES.labels)


def test_the_kind_of_several_labels_may_be_given():
    task, message = task_of({"text": "good"}, CLASSES, kind="multi")
    assert (task.kind, task.label, task.labels) == ("multi", "", CLASSES.labels)
    assert "(kind multi)" in message


@pytest.mark.parametrize(
    ("values", "columns", "head", "message"),
    [
        ({"text": "good"}, {"kind": "score"}, CLASSES, "data.columns.kind=score, but no labels"),
        ({"text": "good"}, {"kind": "class"}, TAGGER, "the model predicts kind tokens"),
        ({"text": "a", "b": "c"}, {"words": "b"}, CLASSES, "gives words, but rows of kind class"),
        ({"a": "b", "c": "d"}, {"text": "a"}, TAGGER, "gives text, but rows of kind tokens"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(values, columns, head, message):
    with pytest.raises(UsageError) as caught:
        task_of(values, head, **columns)
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("values", "head", "message"),
    [
        ({"a": "x y", "b": "z w"}, CLASSES, "which column holds the text?"),
        ({"text": "who"}, READER, "which column holds the question?"),
    ],
)
def test_columns_that_cannot_be_told_apart_are_asked_for(values, head, message):
    with pytest.raises(UsageError) as caught:
        task_of(values, head)
    assert message in caught.value.message
    assert "data.columns." in str(caught.value.hint)


def test_plain_text_is_read_as_words_and_marks_by_a_tagger(tmp_path):
    file = tmp_path / "texts.txt"
    file.write_text("She lives in Rome, Italy.\nHe doesn't.\n", "utf-8")
    data = read_task("own", file, training=False, head=TAGGER)
    assert not data.has_labels
    assert [example.texts for example in data.sets[""]] == [
        ("She", "lives", "in", "Rome", ",", "Italy", "."),
        ("He", "doesn", "'", "t", "."),
    ]
    assert {example.label for example in data.sets[""]} == {None}


def test_without_a_head_plain_text_has_no_task(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"text": "good"}) + "\n", "utf-8")
    with pytest.raises(UsageError, match="which column holds the label"):
        read_task("own", file, training=False)
