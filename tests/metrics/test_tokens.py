"""Entities against counts by hand, a reader of well-formed tags written out here, and seqeval itself."""

import warnings

import numpy as np
import pytest
import seqeval.metrics
from hypothesis import given
from hypothesis import strategies as st

from kdcli.metrics import scorer
from kdcli.metrics.library import TaskMetric
from kdcli.types import Task

NAMES = ("f1", "precision", "recall", "accuracy")
TAGS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
TASK = Task("t", "tokens", ("words",), NAMES, labels=TAGS)


def compute(predictions, references):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return TaskMetric(TASK).compute(predictions=predictions, references=references)


def of_pieces(pieces):
    """Tags of a sentence out of (type or O, words), well-formed, and its entities."""
    tags, entities = [], set()
    for kind, length in pieces:
        if kind != "O":
            entities.add((kind, len(tags), len(tags) + length))
        tags += ["O"] * length if kind == "O" else [f"B-{kind}"] + [f"I-{kind}"] * (length - 1)
    return tags, entities


@st.composite
def well_formed(draw):
    """Sentences of the same lengths, predicted and true, as pieces."""
    pieces = st.lists(
        st.tuples(st.sampled_from(["O", "PER", "LOC"]), st.integers(1, 3)), max_size=5
    )
    sentences = []
    for _ in range(draw(st.integers(1, 5))):
        predicted, true = draw(pieces), draw(pieces)
        lengths = [sum(length for _, length in side) for side in (predicted, true)]
        predicted += [("O", 1)] * max(0, lengths[1] - lengths[0])
        true += [("O", 1)] * max(0, lengths[0] - lengths[1])
        sentences.append((predicted, true))
    return sentences


@given(well_formed())
def test_metrics_are_the_formulas(sentences):
    read = [(of_pieces(p), of_pieces(t)) for p, t in sentences]
    found = compute([p[0] for p, _ in read], [t[0] for _, t in read])
    both = float(sum(len(p[1] & t[1]) for p, t in read))
    predicted, true = (sum(len(pair[side][1]) for pair in read) for side in (0, 1))
    words = sum(len(t[0]) for _, t in read)
    right = sum(a == b for p, t in read for a, b in zip(p[0], t[0], strict=True))
    precision, recall = (both / n if n else 0.0 for n in (predicted, true))
    assert list(found) == list(NAMES)
    assert all(type(value) is float for value in found.values())
    assert found == pytest.approx(
        {
            "f1": 2 * precision * recall / (precision + recall) if both else 0.0,
            "precision": precision,
            "recall": recall,
            "accuracy": right / words if words else 0.0,
        },
        abs=1e-12,
    )


PAIRS = st.tuples(st.sampled_from(TAGS), st.sampled_from(TAGS))
SENTENCES = st.lists(st.lists(PAIRS, min_size=1, max_size=8), min_size=1, max_size=6)


@given(SENTENCES)
def test_any_tags_are_read_as_by_seqeval(sentences):
    predicted, true = ([[pair[side] for pair in s] for s in sentences] for side in (0, 1))
    assert compute(predicted, true) == pytest.approx(
        {
            "f1": seqeval.metrics.f1_score(true, predicted, zero_division=0),
            "precision": seqeval.metrics.precision_score(true, predicted, zero_division=0),
            "recall": seqeval.metrics.recall_score(true, predicted, zero_division=0),
            "accuracy": seqeval.metrics.accuracy_score(true, predicted),
        },
        abs=1e-12,
    )


@pytest.mark.parametrize(
    ("predicted", "true", "counts"),
    [
        # found, predicted, true
        (["B-PER", "I-LOC", "O"], ["B-PER", "O", "B-LOC"], (1, 2, 2)),
        # Tags without a prefix: a run of one is an entity, and one that begins with O or with E is as good as any.
        (["PER", "PER", "ORG"], ["PER", "PER", "ORG"], (2, 2, 2)),
        (["PER", "PER", "O"], ["PER", "PER", "ORG"], (1, 1, 2)),
        (["NN", "IN", "EX"], ["NN", "NN", "EX"], (1, 3, 2)),
    ],
)
def test_entities_by_hand(predicted, true, counts):
    found, of_prediction, of_truth = counts
    scores = compute([predicted], [true])
    assert scores["precision"] == (found / of_prediction if of_prediction else 0.0)
    assert scores["recall"] == (found / of_truth if of_truth else 0.0)
    assert scores["f1"] == pytest.approx(2 * found / (of_prediction + of_truth) if found else 0.0)
    assert scores["accuracy"] == np.mean(np.array(predicted) == np.array(true))


def test_an_entity_ends_with_its_sentence():
    assert compute([["B-PER"], ["I-PER"]], [["B-PER"], ["B-PER"]])["f1"] == 1.0


def test_a_sentence_with_too_few_predictions_is_refused():
    with pytest.raises(ValueError, match="1 predictions for 2 words"):
        scorer(TASK, [["O"]], [["O", "O"]])
