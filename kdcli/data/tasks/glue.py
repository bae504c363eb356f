"""GLUE (Wang et al. 2018, https://arxiv.org/abs/1804.07461): columns, label numbers and metrics as in `nyu-mll/glue`,
file names as its server takes them, label words as in static model pruning (https://arxiv.org/abs/2210.06210)."""

from __future__ import annotations

from kdcli.types import Task

_HUB = "nyu-mll/glue"
_PAIR = ("sentence1", "sentence2")
_ENTAILMENT = ("entailment", "not_entailment")
_ACCURACY = ("accuracy",)

TASKS = (
    Task(
        "cola",
        "class",
        ("sentence",),
        ("matthews", "accuracy"),
        ("unacceptable", "acceptable"),
        hub=(_HUB, "cola"),
        glue={"": "CoLA"},
        words=("incorrect", "correct"),
    ),
    Task(
        "sst2",
        "class",
        ("sentence",),
        _ACCURACY,
        ("negative", "positive"),
        hub=(_HUB, "sst2"),
        glue={"": "SST-2"},
        words=("terrible", "great"),
    ),
    Task(
        "mrpc",
        "class",
        _PAIR,
        ("f1", "accuracy"),
        ("not_equivalent", "equivalent"),
        hub=(_HUB, "mrpc"),
        glue={"": "MRPC"},
        words=("No", "Yes"),
    ),
    Task("stsb", "score", _PAIR, ("pearson", "spearman"), hub=(_HUB, "stsb"), glue={"": "STS-B"}, words=("Yes",)),
    Task(
        "qqp",
        "class",
        ("question1", "question2"),
        ("accuracy", "f1"),
        ("not_duplicate", "duplicate"),
        hub=(_HUB, "qqp"),
        glue={"": "QQP"},
        words=("No", "Yes"),
    ),
    Task(
        "mnli",
        "class",
        ("premise", "hypothesis"),
        _ACCURACY,
        ("entailment", "neutral", "contradiction"),
        hub=(_HUB, "mnli"),
        sets=("matched", "mismatched"),
        split="validation_{set}",
        glue={"matched": "MNLI-m", "mismatched": "MNLI-mm"},
        glue_words=True,
        words=("Yes", "Maybe", "No"),
    ),
    Task(
        "qnli",
        "class",
        ("question", "sentence"),
        _ACCURACY,
        _ENTAILMENT,
        hub=(_HUB, "qnli"),
        glue={"": "QNLI"},
        glue_words=True,
        words=("Yes", "No"),
    ),
    Task(
        "rte",
        "class",
        _PAIR,
        _ACCURACY,
        _ENTAILMENT,
        hub=(_HUB, "rte"),
        glue={"": "RTE"},
        glue_words=True,
        words=("Yes", "No"),
    ),
    Task(
        "wnli",
        "class",
        _PAIR,
        _ACCURACY,
        ("not_entailment", "entailment"),
        hub=(_HUB, "wnli"),
        glue={"": "WNLI"},
        words=("No", "Yes"),
    ),
)
