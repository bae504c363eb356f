"""kdcli.data.labelled.submission: the GLUE server's files to the byte."""

import errno
import os

import pytest

from kdcli.data.labelled.submission import check_submission, write_submission
from kdcli.data.tasks import task_of, tasks
from kdcli.errors import MachineError, UsageError

# As the server's FAQ names them; words where its sample submissions hold words.
FILES = {
    "cola": ("CoLA.tsv", "0", "1"),
    "sst2": ("SST-2.tsv", "0", "1"),
    "mrpc": ("MRPC.tsv", "0", "1"),
    "qqp": ("QQP.tsv", "0", "1"),
    "qnli": ("QNLI.tsv", "entailment", "not_entailment"),
    "rte": ("RTE.tsv", "entailment", "not_entailment"),
    "wnli": ("WNLI.tsv", "0", "1"),
}


@pytest.mark.parametrize("name", FILES)
def test_two_classes_to_the_byte(tmp_path, name):
    file, first, second = FILES[name]
    path = write_submission(tmp_path / "deep" / "glue", task_of(name), "", [1, 0, 1])
    assert path == tmp_path / "deep" / "glue" / file
    assert path.read_bytes() == f"index\tprediction\n0\t{second}\n1\t{first}\n2\t{second}\n".encode()


@pytest.mark.parametrize(("of_set", "file"), [("matched", "MNLI-m.tsv"), ("mismatched", "MNLI-mm.tsv")])
def test_mnli_has_a_file_for_each_set_and_words(tmp_path, of_set, file):
    path = write_submission(tmp_path, task_of("mnli"), of_set, [2, 0, 1])
    assert path.name == file
    assert path.read_bytes() == b"index\tprediction\n0\tcontradiction\n1\tentailment\n2\tneutral\n"


def test_scores_are_clipped_to_what_the_server_takes(tmp_path):
    path = write_submission(tmp_path, task_of("stsb"), "", [-0.2, 0.0, 2.34567, 5.0, 5.01, 1e-9, -0.0001])
    assert path.name == "STS-B.tsv"
    assert path.read_bytes() == (
        b"index\tprediction\n0\t0.000\n1\t0.000\n2\t2.346\n3\t5.000\n4\t5.000\n5\t0.000\n6\t0.000\n"
    )


def test_a_file_of_before_is_replaced_whole(tmp_path):
    write_submission(tmp_path, task_of("sst2"), "", [1] * 9)
    path = write_submission(tmp_path, task_of("sst2"), "", [0])
    assert path.read_bytes() == b"index\tprediction\n0\t0\n"
    assert [p.name for p in tmp_path.iterdir()] == ["SST-2.tsv"]


def test_the_nine_are_taken_and_no_other():
    nine = {*FILES, "mnli", "stsb"}
    for name in nine:
        check_submission(task_of(name))
    for name in set(tasks()) - nine:
        with pytest.raises(UsageError, match=f"task {name} is not one of GLUE's") as caught:
            check_submission(task_of(name))
        assert "cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte and wnli" in caught.value.hint


def test_a_full_disk_is_named_and_keeps_the_old_file(tmp_path, monkeypatch):
    write_submission(tmp_path, task_of("sst2"), "", [1])

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(MachineError, match=r"the disk is full: .*SST-2\.tsv"):
        write_submission(tmp_path, task_of("sst2"), "", [0])
    assert (tmp_path / "SST-2.tsv").read_bytes() == b"index\tprediction\n0\t1\n"
