"""The named tasks as the data sets on the hub have them."""

import pytest

from kdcli.data.demo import TASKS as DEMO_TASKS
from kdcli.data.demo import demo_task
from kdcli.data.tasks import named_tasks, task_of
from kdcli.errors import UsageError
from kdcli.verbs.evaluate.run import check_submission

# Task → columns, names of the labels in the order of their numbers: the `ClassLabel` features of
# nyu-mll/glue.
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


@pytest.mark.parametrize("name", GLUE)
def test_glue_is_read_and_numbered_as_on_the_hub(name):
    task = task_of(name)
    assert (task.texts, task.labels, task.label) == (*GLUE[name], "label")
    assert (task.kind, task.hub) == ("score" if name == "stsb" else "class", ("nyu-mll/glue", name))
    assert task.metrics[0] == METRICS[name]


GENERATION = ("squad-qg", "xsum", "cnn_dailymail")


@pytest.mark.parametrize("name", DEMO_TASKS)
def test_demo_tasks_need_no_hub_and_name_every_label_of_theirs(name):
    task = task_of(name)
    assert task.hub is None
    assert {e.label for e in demo_task(name, "train")} == set(range(len(task.labels)))


def test_every_row_is_filed_under_its_own_name_and_is_whole():
    known = named_tasks()
    assert set(known) == {*GLUE, "squad", "squad_v2", "mlqa", "xnli", *GENERATION, *DEMO_TASKS}
    for name, task in known.items():
        assert task.name == name
        assert task.metrics
        assert len(set(task.labels)) == len(task.labels)
        assert bool(task.labels) == (task.kind in ("class", "multi", "tokens"))


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("sst-2", "sst2"),
        ("mnil", "mnli"),
        ("squad_v1", "squad_v2"),
        ("demo-topics", "demo-topic"),
        ("onw", "own"),
    ],
)
def test_an_unknown_task_gets_the_nearest_name(given, meant):
    with pytest.raises(UsageError) as error:
        task_of(given)
    assert f"unknown task '{given}'" in error.value.message
    assert f"did you mean '{meant}'?" in error.value.message
    assert all(name in error.value.hint for name in (*GLUE, "xnli", "own"))


def test_the_nine_are_taken_and_no_other():
    nine = set(GLUE)
    for name in nine:
        check_submission(task_of(name))
    for name in set(named_tasks()) - nine:
        with pytest.raises(UsageError, match=f"task {name} is not a GLUE task") as caught:
            check_submission(task_of(name))
        assert "cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte and wnli" in caught.value.hint
