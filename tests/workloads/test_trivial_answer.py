"""Whether a trained model is better than the same answer to every text."""

from types import SimpleNamespace

import numpy as np
import pytest

from kdcli.metrics import scorer
from kdcli.report.schema import Evaluation
from kdcli.types import Example, Task
from kdcli.workloads.finetuning import with_trivial_answer
from kdcli.workloads.predictions import (
    Prediction,
)
from kdcli.workloads.scores import ModelScores

TASK = Task("own", "class", ("text",), ("accuracy",), labels=("a", "b"))
# 200 rows. Ten texts that are repeated 20 times, or 200 texts; 60 % of the rows have class 0.
TRUE = np.repeat([0] * 6 + [1] * 4, 20)


def scores_of(right, texts, sets=("",)):
    """The scores of a model that is right on some rows, with the same rows in each set."""
    predicted = np.where(right, TRUE, 1 - TRUE)
    score = scorer(TASK, predicted, TRUE)
    examples = [
        Example(f"f:{n}", f"e{n}", (f"text {n * texts // 200}",), int(TRUE[n])) for n in range(200)
    ]
    evaluations = [
        Evaluation(
            model="", task="own", set=name, split="test", n=200, metrics=score(np.arange(200))
        )
        for name in sets
    ]
    return ModelScores(
        evaluations,
        dict.fromkeys(sets, score),
        dict.fromkeys(sets, 200),
        [Prediction(0, "a", [])],
        task=TASK,
        examples=dict.fromkeys(sets, examples),
    )


@pytest.mark.parametrize(
    ("known", "texts", "is_beaten"),
    [(6, 200, False), (7, 200, True), (8, 200, True), (10, 200, True), (8, 10, False)],
)
def test_a_model_must_be_clearly_better_than_the_same_answer_to_every_text(known, texts, is_beaten):
    # With 6, the model is right on the same rows as the trivial answer.
    right = np.arange(200) // 20 < known
    trivial = scores_of(TRUE == 0, texts, ("x", "y"))
    workload = SimpleNamespace(trivial=lambda model: trivial, metric="accuracy")
    scores = scores_of(right, texts, ("x", "y"))
    rows = with_trivial_answer(workload, None, scores).evaluations
    assert [row.set for row in rows] == ["x", "y"]
    for row in rows:
        assert (row.trivial.answer, row.trivial.metrics) == ("a", {"accuracy": 0.6})
        assert row.trivial.is_beaten is is_beaten


def test_a_workload_without_a_trivial_answer_changes_nothing():
    scores = scores_of(TRUE == 0, 200)
    workload = SimpleNamespace(trivial=lambda model: None, metric="accuracy")
    assert with_trivial_answer(workload, None, scores) is scores


def texts(labels):
    """Examples with different texts, so that every row counts."""
    return [Example(f"f:{n}", f"e{n}", (f"w{n}",), label) for n, label in enumerate(labels)]
