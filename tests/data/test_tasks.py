"""The named tasks as the data sets on the hub have them, and the files of the GLUE server to the
byte."""

import pytest

from kdcli.data.demo import TASKS as DEMO_TASKS
from kdcli.data.demo import demo_task
from kdcli.data.tasks import named_tasks, task_of
from kdcli.errors import UsageError
from kdcli.verbs.evaluate.submission import check_submission, write_submission

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


# As the server's FAQ names them; words where its sample submissions hold words.
NUMBERED = {
    "cola": "CoLA.tsv",
    "sst2": "SST-2.tsv",
    "mrpc": "MRPC.tsv",
    "qqp": "QQP.tsv",
    "wnli": "WNLI.tsv",
}
OF_TWO_CLASSES = {name: (file, "0", "1") for name, file in NUMBERED.items()}
OF_TWO_CLASSES |= {
    name: (f"{name.upper()}.tsv", "entailment", "not_entailment") for name in ("qnli", "rte")
}


@pytest.mark.parametrize("name", OF_TWO_CLASSES)
def test_two_classes_to_the_byte(tmp_path, name):
    file, first, second = OF_TWO_CLASSES[name]
    path = write_submission(tmp_path / "deep" / "glue", task_of(name), "", [1, 0, 1])
    assert path == tmp_path / "deep" / "glue" / file
    assert (
        path.read_bytes() == f"index\tprediction\n0\t{second}\n1\t{first}\n2\t{second}\n".encode()
    )


@pytest.mark.parametrize(
    ("of_set", "file"), [("matched", "MNLI-m.tsv"), ("mismatched", "MNLI-mm.tsv")]
)
def test_mnli_has_a_file_for_each_set_and_words(tmp_path, of_set, file):
    path = write_submission(tmp_path, task_of("mnli"), of_set, [2, 0, 1])
    assert path.name == file
    assert path.read_bytes() == b"index\tprediction\n0\tcontradiction\n1\tentailment\n2\tneutral\n"


def test_scores_are_clipped_to_what_the_server_takes(tmp_path):
    path = write_submission(
        tmp_path, task_of("stsb"), "", [-0.2, 0.0, 2.34567, 5.0, 5.01, 1e-9, -0.0001]
    )
    assert path.name == "STS-B.tsv"
    assert path.read_bytes() == (
        b"index\tprediction\n0\t0.000\n1\t0.000\n2\t2.346\n3\t5.000\n4\t5.000\n5\t0.000\n6\t0.000\n"
    )


def test_the_nine_are_taken_and_no_other():
    nine = {*OF_TWO_CLASSES, "mnli", "stsb"}
    for name in nine:
        check_submission(task_of(name))
    for name in set(named_tasks()) - nine:
        with pytest.raises(UsageError, match=f"task {name} is not a GLUE task") as caught:
            check_submission(task_of(name))
        assert "cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte and wnli" in caught.value.hint
