"""The named tasks: what they read and how their labels are numbered, as the data sets on the hub have it."""

import pytest

from kdcli.data.demo import TASKS as DEMO_TASKS
from kdcli.data.demo import demo_task
from kdcli.data.tasks import task_of, tasks
from kdcli.errors import UsageError

# Task → columns, names of the labels in the order of their numbers: the `ClassLabel` features of nyu-mll/glue.
GLUE = {
    "cola": (("sentence",), ("unacceptable", "acceptable")),
    "sst2": (("sentence",), ("negative", "positive")),
    "mrpc": (("sentence1", "sentence2"), ("not_equivalent", "equivalent")),
    "stsb": (("sentence1", "sentence2"), ()),
    "qqp": (("question1", "question2"), ("not_duplicate", "duplicate")),
    "mnli": (("premise", "hypothesis"), ("entailment", "neutral", "contradiction")),
    "qnli": (("question", "sentence"), ("entailment", "not_entailment")),
    "rte": (("sentence1", "sentence2"), ("entailment", "not_entailment")),
    "wnli": (("sentence1", "sentence2"), ("not_entailment", "entailment")),
}
METRICS = dict.fromkeys(GLUE, "accuracy") | {"cola": "matthews", "mrpc": "f1", "stsb": "pearson"}
FILES = {"CoLA", "SST-2", "MRPC", "STS-B", "QQP", "MNLI-m", "MNLI-mm", "QNLI", "RTE", "WNLI"}
XNLI = ["en", "fr", "es", "de", "el", "bg", "ru", "tr", "ar", "vi", "th", "zh", "hi", "sw", "ur"]
MLQA = ["en", "es", "de", "ar", "hi", "vi", "zh"]


@pytest.mark.parametrize("name", GLUE)
def test_glue_is_read_and_numbered_as_on_the_hub(name):
    task = task_of(name)
    assert (task.texts, task.labels) == GLUE[name]
    assert task.label == "label"
    assert task.kind == ("score" if name == "stsb" else "class")
    assert task.hub == ("nyu-mll/glue", name)
    assert task.metrics[0] == METRICS[name]


def test_mnli_is_judged_in_two_parts_and_its_splits_are_named_after_them():
    task = task_of("mnli")
    assert task.sets == ("matched", "mismatched")
    assert [task.split.replace("{set}", s) for s in task.sets] == ["validation_matched", "validation_mismatched"]


def test_every_file_of_the_glue_server_but_the_diagnostic_one_belongs_to_one_task():
    named = [file for name in GLUE for file in task_of(name).glue.values()]
    assert len(named) == len(set(named))
    assert set(named) == FILES
    for name in GLUE:
        assert set(task_of(name).glue) == set(task_of(name).sets or ("",))
    # The server takes words from these, numbers from the others.
    assert {name for name in GLUE if task_of(name).glue_words} == {"mnli", "qnli", "rte"}


@pytest.mark.parametrize(
    ("name", "hub", "train", "impossible", "sets"),
    [
        ("squad", ("rajpurkar/squad", None), None, False, []),
        ("squad_v2", ("rajpurkar/squad_v2", None), None, True, []),
        ("mlqa", ("facebook/mlqa", "mlqa.{set}.{set}"), ("rajpurkar/squad", None), False, MLQA),
    ],
)
def test_questions_and_answers_are_squads(name, hub, train, impossible, sets):
    task = task_of(name)
    assert (task.kind, task.texts, task.label) == ("span", ("question", "context"), "answers")
    assert (task.hub, task.hub_train, task.impossible, list(task.sets)) == (hub, train, impossible, sets)
    assert task.metrics[:2] == ("f1", "exact")
    assert task.labels == ()
    assert task.max_length >= 384


def test_xnli_is_trained_on_english_and_judged_in_fifteen_languages():
    task = task_of("xnli")
    assert list(task.sets) == XNLI
    assert task.texts == ("premise", "hypothesis")
    assert task.labels == ("entailment", "neutral", "contradiction")
    assert (task.hub, task.hub_train) == (("facebook/xnli", "{set}"), ("facebook/xnli", "en"))


@pytest.mark.parametrize("name", DEMO_TASKS)
def test_demo_tasks_need_no_hub_and_name_every_label_of_theirs(name):
    task = task_of(name)
    assert task.hub is None
    assert {e.label for e in demo_task(name, "train")} == set(range(len(task.labels)))


def test_every_row_is_filed_under_its_own_name_and_is_whole():
    known = tasks()
    assert set(known) == {*GLUE, "squad", "squad_v2", "mlqa", "xnli", *DEMO_TASKS}
    for name, task in known.items():
        assert task.name == name
        assert task.metrics
        assert len(set(task.labels)) == len(task.labels)
        assert bool(task.labels) == (task.kind in ("class", "multi", "tokens"))


@pytest.mark.parametrize(
    ("given", "meant"),
    [("sst-2", "sst2"), ("mnil", "mnli"), ("squad_v1", "squad_v2"), ("demo-topics", "demo-topic"), ("onw", "own")],
)
def test_an_unknown_task_gets_the_nearest_name(given, meant):
    with pytest.raises(UsageError) as error:
        task_of(given)
    assert f"unknown task '{given}'" in error.value.message
    assert f"did you mean '{meant}'?" in error.value.message
    assert all(name in error.value.hint for name in (*GLUE, "xnli", "own"))
