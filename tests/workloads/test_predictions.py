"""From outputs to evaluations: predictions in the order of the examples, metrics per set, the worst
examples."""

import math

import numpy as np
import pytest
from encoders import tiny_tokenizer
from questions import asking, one_hot, tokenizer_of

from kdcli.report.schema import Evaluation
from kdcli.types import IGNORED, Answer, Example, Task
from kdcli.workloads.predictions import (
    Evaluator,
    Prediction,
    RowFormat,
    as_label,
    trivial_predictions,
)

CLASS = Task("nli", "class", ("text",), ("accuracy", "macro_f1"), ("yes", "no", "maybe"))
MULTI = Task("topics", "multi", ("text",), ("micro_f1", "exact"), ("sport", "art", "war"))
SCORE = Task("likeness", "score", ("text",), ("mse", "pearson"))
TAGS = Task("tags", "tokens", ("tokens",), ("f1", "accuracy"), ("O", "B-X", "I-X"))
SQUAD = Task("squad", "span", ("question", "context"), ("f1", "exact"), label="answers")
SQUAD2 = Task(
    "squad_v2", "span", ("question", "context"), ("f1", "exact"), label="answers", impossible=True
)


def texts(labels):
    """Examples with texts of all lengths, the longest early."""
    made = (
        " ".join(f"w{(i + j) % 50}" for j in range(9 - (4 * i) % 9)) for i in range(len(labels))
    )
    return [
        Example(f"f:{i}", f"e{i}", (text,), n)
        for i, (text, n) in enumerate(zip(made, labels, strict=True))
    ]


def evaluator_of(task, sets, choose_on=None, max_length=64, tokenizer=None, stride=8):
    sets = sets if isinstance(sets, dict) else {"": sets}
    form = RowFormat(max_length, stride, token_types=False)
    return Evaluator.of(task, sets, tokenizer or tiny_tokenizer(), form, choose_on=choose_on)


def in_rows(evaluator, outputs):
    return [np.asarray(outputs[i], dtype=np.float32) for i in evaluator.features.rows.example]


def predicted(evaluator, outputs):
    return evaluator.features.predictions(in_rows(evaluator, outputs))


def evaluations(evaluator, outputs, worst=5):
    found = evaluator.evaluations("student", "validation", predicted(evaluator, outputs), worst)
    return [Evaluation.model_validate(one) for one in found]


def logits_of(*likely):
    return np.log(np.asarray(likely))


def test_rows_are_sorted_by_length_and_predictions_follow_the_examples():
    labels = [0, 1, 2, 0, 1, 2, 0]
    evaluator = evaluator_of(CLASS, texts(labels))
    assert evaluator.features.rows.lengths.tolist() == sorted(evaluator.features.rows.lengths)
    assert evaluator.features.rows.example.tolist() != list(range(7))
    found = predicted(evaluator, [np.eye(3)[label] * 9 for label in labels])
    assert [p.value for p in found] == labels
    assert [p.shown for p in found] == [CLASS.labels[label] for label in labels]
    right = in_rows(evaluator, [np.eye(3)[label] for label in labels])
    assert evaluator.metrics(right) == {"accuracy": 1.0, "macro_f1": 1.0}


def test_a_class_has_probabilities_and_a_loss():
    evaluator = evaluator_of(CLASS, texts([2, 0]))
    one, two = predicted(evaluator, [logits_of(0.5, 0.3, 0.2) + 7.0, logits_of(0.5, 0.3, 0.2)])
    assert (one.value, one.shown) == (0, "yes")
    assert one.scores == pytest.approx([0.5, 0.3, 0.2], abs=1e-6)
    assert [one.error, two.error] == pytest.approx([-math.log(0.2), -math.log(0.5)], abs=1e-5)


def test_several_labels_are_those_above_one_half():
    evaluator = evaluator_of(MULTI, texts([(0, 2), (), (1,)]))
    one, two, three = predicted(
        evaluator, [[2.0, -1.0, 0.1], [-1.0, -0.1, -3.0], [-1.0, 0.0, -3.0]]
    )
    assert (one.value, one.shown) == ([1, 0, 1], ["sport", "war"])
    assert (two.value, two.shown) == ([0, 0, 0], [])
    # A probability of exactly one half is not chosen.
    assert three.value == [0, 0, 0]
    likely = [1 / (1 + math.exp(-x)) for x in (2.0, -1.0, 0.1)]
    assert one.scores == pytest.approx(likely, abs=1e-6)
    expected = -(math.log(likely[0]) + math.log(1 - likely[1]) + math.log(likely[2])) / 3
    assert one.error == pytest.approx(expected, abs=1e-5)
    # A confident mistake has a finite error.
    (found,) = predicted(evaluator_of(MULTI, texts([(0,)])), [[-1000.0, 0.0, 1000.0]])
    assert 5 < found.error < math.inf


def words(*sentences):
    return [
        Example(f"f:{i}", f"e{i}", tuple(w), tuple(label)) for i, (w, label) in enumerate(sentences)
    ]


def of_words(tags, length):
    """Outputs of a row: a tag per token; tokens beyond `length` are padding."""
    found = np.full((length + 3, 3), 0.0)
    found[length:, 1] = 99.0
    for place, tag in enumerate(tags):
        found[place, tag] = 5.0
    return found


def test_words_get_the_label_of_their_token_and_padding_none():
    sentences = words((["w1", "w2", "w3"], (0, 1, 2)), (["w4"], (1,)))
    evaluator = evaluator_of(TAGS, sentences)
    found = predicted(evaluator, [of_words([0, 1, 1], 3), of_words([1], 1)])
    assert [p.value for p in found] == [["O", "B-X", "B-X"], ["B-X"]]
    assert [p.error for p in found] == [pytest.approx(1 / 3), 0.0]
    (report,) = evaluations(evaluator, [of_words([0, 1, 1], 3), of_words([1], 1)])
    assert report.metrics["accuracy"] == 0.75
    assert report.per_class["I-X"].support == 1
    assert set(report.per_class) == {"B-X", "I-X"}
    # Only the differing words are shown.
    (mistake,) = report.worst
    assert (mistake.label, mistake.predicted, mistake.texts) == ("w3 I-X", "w3 B-X", ["w1 w2 w3"])


@pytest.mark.parametrize(
    ("labels", "nothing"),
    [(("O", "B-X", "I-X"), "O"), (("B-X", "O", "I-X"), "O"), (("N", "V", "A"), "N")],
)
def test_truncated_words_get_the_neutral_label(labels, nothing):
    task = Task("tags", "tokens", ("tokens",), ("accuracy",), labels)
    evaluator = evaluator_of(task, words(([f"w{i}" for i in range(9)], [2] * 9)), max_length=4)
    assert evaluator.features.rows.truncated == 1
    (found,) = predicted(evaluator, [of_words([2, 2, 2, 2], 4)])
    assert found.value == [labels[2]] * 4 + [nothing] * 5
    assert found.error == pytest.approx(5 / 9)


def test_only_the_first_piece_of_a_word_counts():
    tokenizer = tokenizer_of("word pieces")
    sentence = ("the", "winters", "ran")
    of = tokenizer(list(sentence), is_split_into_words=True).word_ids()
    assert of.count(1) > 1, "no word of several pieces"
    outputs = np.zeros((len(of), 3))
    outputs[:, 2] = 1.0
    for place, word in enumerate(of):
        if word is not None and of.index(word) == place:
            outputs[place] = np.eye(3)[word % 2] * 5
    evaluator = evaluator_of(TAGS, words((sentence, (0, 1, 0))), tokenizer=tokenizer)
    (found,) = predicted(evaluator, [outputs])
    assert found.value == ["O", "B-X", "O"]


TWO = {"matched": [0, 1, 2, 0], "mismatched": [1, 1]}
PREDICTED = [0, 1, 2, 1, 1, 0]


def two_sets(choose_on=None):
    return evaluator_of(CLASS, {name: texts(labels) for name, labels in TWO.items()}, choose_on)


def outputs_of(numbers):
    return [np.eye(3)[n] * 3 for n in numbers]


@pytest.mark.parametrize(
    ("choose_on", "accuracy"), [("matched", 0.75), ("mismatched", 0.5), (None, 0.625)]
)
def test_several_sets_give_a_mean_or_one_of_them_decides(choose_on, accuracy):
    evaluator = two_sets(choose_on)
    found = evaluator.metrics(in_rows(evaluator, outputs_of(PREDICTED)))
    # The mean is over sets, not examples.
    assert found["accuracy"] == accuracy
    assert (found["matched/accuracy"], found["mismatched/accuracy"]) == (0.75, 0.5)
    assert len(found) == 6


def test_each_set_has_a_confusion_matrix():
    matched, mismatched = evaluations(two_sets(), outputs_of(PREDICTED))
    assert (matched.set, matched.n, mismatched.set, mismatched.n) == ("matched", 4, "mismatched", 2)
    assert (matched.model, matched.task, matched.split) == ("student", "nli", "validation")
    assert matched.confusion.labels == ["yes", "no", "maybe"]
    # Rows are the true classes: one yes was predicted as no.
    assert matched.confusion.counts == [[1, 1, 0], [0, 1, 0], [0, 0, 1]]
    assert mismatched.confusion.counts == [[0, 0, 0], [1, 1, 0], [0, 0, 0]]
    of_yes = matched.per_class["yes"]
    assert (of_yes.precision, of_yes.recall, of_yes.support) == (1.0, 0.5, 2)
    assert mismatched.per_class["maybe"].support == 0
    assert [one.id for one in (*matched.worst, *mismatched.worst)] == ["e3", "e1"]


def test_worst_examples_are_wrong_ones_by_error():
    # The first is right, with a larger loss than the second and the third.
    likely = [
        (0.34, 0.33, 0.33),
        (0.45, 0.5, 0.05),
        (0.4, 0.5, 0.1),
        (0.9, 0.05, 0.05),
        (0.01, 0.98, 0.01),
    ]
    evaluator = evaluator_of(CLASS, texts([0] * 5))
    outputs = [logits_of(*row) for row in likely]
    for count, ids in (
        (9, ["e4", "e2", "e1"]),
        (3, ["e4", "e2", "e1"]),
        (2, ["e4", "e2"]),
        (0, []),
    ):
        (report,) = evaluations(evaluator, outputs, count)
        assert [one.id for one in report.worst] == ids
    (report,) = evaluations(evaluator, outputs, 1)
    (worst,) = report.worst
    assert (worst.label, worst.predicted, worst.texts) == (
        "yes",
        "no",
        list(evaluator.features.examples[4].texts),
    )
    assert worst.error == pytest.approx(-math.log(0.01), abs=1e-4)


@pytest.mark.parametrize(
    ("task", "labels", "outputs"),
    [
        (CLASS, [0, 1, 2], outputs_of([0, 1, 2])),
        (MULTI, [(0,), (), (1, 2)], [[1, -1, -1], [-1, -1, -1], [-1, 1, 1]]),
        (SCORE, [1.0, 2.0], [[1.0], [2.0]]),
    ],
)
def test_right_predictions_are_never_worst_examples(task, labels, outputs):
    assert evaluations(evaluator_of(task, texts(labels)), outputs)[0].worst == []


def spans(task, examples):
    return evaluator_of(task, examples, max_length=64, tokenizer=tokenizer_of("word pieces"))


def test_no_answer_is_shown_if_it_is_likelier():
    examples = [asking("the cat ran", "cat", name="a"), asking("the cat ran", name="b")]
    for task, shown in ((SQUAD2, ["cat", ""]), (SQUAD, ["cat", "the cat ran"])):
        evaluator = spans(task, examples)
        windows = evaluator.features.rows
        outputs = [o.copy() for o in one_hot(windows)]
        row = windows.example.tolist().index(1)
        begin = windows.char_begin_T[windows.ends[row] - windows.lengths[row] : windows.ends[row]]
        inside = np.flatnonzero(begin >= 0)
        outputs[row][inside[0], 0] = outputs[row][inside[-1], 1] = 1.0
        found = evaluator.features.predictions(outputs)
        assert [p.shown for p in found] == shown
        # The metric tries every threshold, so it gets the best span in any case.
        assert found[1].value["text"] == "the cat ran"
        assert found[1].value["no_answer"] > 0 > found[0].value["no_answer"]
        assert found[1].scores == [found[1].value["no_answer"]]


@pytest.mark.parametrize(
    ("answer", "label"),
    [("red", (Answer("red", 0),)), ("cat", (Answer("cat", 4),)), ("", ()), ("dog", ())],
)
def test_an_answer_becomes_a_label_where_the_context_has_it(answer, label):
    example = Example("f:0", "e0", ("what?", "red cat"), None)
    prediction = Prediction({"id": "e0", "text": answer, "no_answer": 0.0}, answer, [0.0])
    assert as_label(SQUAD2, example, prediction).label == label


@pytest.mark.parametrize(
    ("task", "labels", "shown", "value"),
    [
        (CLASS, [2, 1, 2], "maybe", 2),
        (MULTI, [(0, 2), (1,), (0, 2)], "sport, war", [1, 0, 1]),
        (CLASS, [2, 1, 1, 2], f"maybe (as frequent as {CLASS.labels[1]})", 2),
        # Most rows have no label, but answering "none" has an F1 of 0.
        (MULTI, [(), (), (1,)], MULTI.labels[1], [0, 1, 0]),
        # No set is frequent, but one label is.
        (MULTI, [(0, 1), (1, 2), (), (), ()], MULTI.labels[1], [0, 1, 0]),
        (TAGS, [(1, IGNORED), (1, 0)], "B-X for each word", ["B-X"]),
        (SCORE, [1.0, 2.0], "1.5", 1.5),
    ],
)
def test_the_trivial_answer_is_a_frequent_label_or_the_best_labels(task, labels, shown, value):
    answers = trivial_predictions(task, texts(labels), texts(labels[:1]) * 2)
    assert [(answer.shown, answer.value) for answer in answers] == [(shown, value)] * 2


def test_the_trivial_answer_to_a_question_is_no_span():
    (answer,) = trivial_predictions(SQUAD, texts([()]), texts([()]))
    assert (answer.shown, answer.value["text"]) == ("nothing", "")
    assert answer.value["no_answer"] > 0
