"""GLUE (Wang et al. 2018, https://arxiv.org/abs/1804.07461).

Columns, label numbers and metrics follow `nyu-mll/glue`, and the file names follow the GLUE server.
The label words come from static model pruning (https://arxiv.org/abs/2210.06210).
"""

from collections.abc import Mapping

from kdcli.types import Kind, Task

_ONE, _PAIR, _ACCURACY = ("sentence",), ("sentence1", "sentence2"), ("accuracy",)
_ENTAILMENT = ("entailment", "not_entailment")


def _task(
    name: str,
    texts: tuple[str, ...],
    labels: tuple[str, ...],
    metrics: tuple[str, ...],
    files: str | Mapping[str, str],
    words: tuple[str, ...],
    kind: Kind = "class",
    *,
    sets: tuple[str, ...] = (),
    split: str = "validation",
    glue_words: bool = False,
) -> Task:
    glue = {"": files} if isinstance(files, str) else files
    return Task(
        name,
        kind,
        texts,
        metrics,
        labels,
        hub=("nyu-mll/glue", name),
        glue=glue,
        sets=sets,
        split=split,
        glue_words=glue_words,
        words=words,
    )


TASKS = (
    _task(
        "cola",
        _ONE,
        ("unacceptable", "acceptable"),
        ("matthews", "accuracy"),
        "CoLA",
        ("incorrect", "correct"),
    ),
    _task("sst2", _ONE, ("negative", "positive"), _ACCURACY, "SST-2", ("terrible", "great")),
    _task(
        "mrpc", _PAIR, ("not_equivalent", "equivalent"), ("f1", "accuracy"), "MRPC", ("No", "Yes")
    ),
    _task("stsb", _PAIR, (), ("pearson", "spearman"), "STS-B", ("Yes",), kind="score"),
    _task(
        "qqp",
        ("question1", "question2"),
        ("not_duplicate", "duplicate"),
        ("accuracy", "f1"),
        "QQP",
        ("No", "Yes"),
    ),
    _task(
        "mnli",
        ("premise", "hypothesis"),
        ("entailment", "neutral", "contradiction"),
        _ACCURACY,
        {"matched": "MNLI-m", "mismatched": "MNLI-mm"},
        ("Yes", "Maybe", "No"),
        sets=("matched", "mismatched"),
        split="validation_{set}",
        glue_words=True,
    ),
    _task(
        "qnli",
        ("question", "sentence"),
        _ENTAILMENT,
        _ACCURACY,
        "QNLI",
        ("Yes", "No"),
        glue_words=True,
    ),
    _task("rte", _PAIR, _ENTAILMENT, _ACCURACY, "RTE", ("Yes", "No"), glue_words=True),
    _task("wnli", _PAIR, _ENTAILMENT[::-1], _ACCURACY, "WNLI", ("No", "Yes")),
)
