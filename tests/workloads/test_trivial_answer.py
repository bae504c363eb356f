"""Whether a fine-tuned model clearly beats the same answer to every text."""

from types import SimpleNamespace

import pytest
from encoders import tiny_tokenizer

from kdcli.types import Example, Task
from kdcli.workloads.finetuning import with_trivial_answer
from kdcli.workloads.labelled import scores_of
from kdcli.workloads.predictions import (
    Evaluator,
    Prediction,
    RowFormat,
    reference,
    trivial_predictions,
)

CLASS = Task("nli", "class", ("text",), ("accuracy", "macro_f1"), ("yes", "no", "maybe"))
MULTI = Task("topics", "multi", ("text",), ("micro_f1", "exact"), ("sport", "art", "war"))


def texts(labels):
    """Examples with different texts, so that every row counts."""
    return [Example(f"f:{n}", f"e{n}", (f"w{n}",), label) for n, label in enumerate(labels)]


def beaten(task, train, sets, answers):
    """Whether the answers clearly beat the trivial one on each set."""
    examples = {name: texts(labels) for name, labels in sets.items()}
    form = RowFormat(16, 8, token_types=False)
    evaluator = Evaluator.of(task, examples, tiny_tokenizer(), form)
    rows = evaluator.features.examples

    def scored(predictions):
        return scores_of(evaluator, "validation", predictions)

    def trivial():
        return scored(trivial_predictions(task, texts(train), rows))

    given = [
        Prediction(reference(task, answer), "", [])
        for name in sets
        for answer in texts(answers[name])
    ]
    workload = SimpleNamespace(metric=task.metrics[0], trivial=trivial)
    found = with_trivial_answer(workload, scored(given)).evaluations
    return {row.set: row.trivial.is_beaten for row in found}


@pytest.mark.parametrize(
    ("task", "truth", "often"),
    [(CLASS, [2, 1, 2, 0] * 20, 2), (MULTI, [(0,), (0,), (1,), (0, 2)] * 20, (0,))],
)
def test_a_good_model_beats_the_trivial_answer_and_a_constant_one_does_not(task, truth, often):
    wrong_in_the_end = [*truth[:-8], *reversed(truth[-8:])]
    constant = [often] * len(truth)
    sets = {"a": truth, "b": truth}
    assert beaten(task, truth, sets, {"a": wrong_in_the_end, "b": constant}) == {
        "a": True,
        "b": False,
    }


def test_a_few_rows_more_do_not_beat_the_trivial_answer():
    truth = [2, 1, 2, 0] * 20
    # Two of 80 rows differ, and the model is right on both.
    answers = [1 if n in (1, 5) else 2 for n in range(80)]
    assert beaten(CLASS, truth, {"": truth}, {"": answers}) == {"": False}


def test_a_workload_without_a_trivial_answer_has_the_same_scores():
    scores = SimpleNamespace(evaluations=[])
    assert with_trivial_answer(SimpleNamespace(trivial=lambda: None), scores) is scores
