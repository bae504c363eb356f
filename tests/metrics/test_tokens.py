"""Entities against recorded values, an independent reader of well-formed tags, and properties."""

import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdcli.data.labelled.label_values import describe_unknown_scheme
from kdcli.metrics import scorer
from kdcli.metrics.library import TaskMetric
from kdcli.metrics.tokens import entities, entity_types
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


def test_any_tags_score_as_by_seqeval():
    # Recorded from seqeval 1.2.2 without a scheme; tags without a prefix were given to it as
    # I-NOUN.
    true = [
        ["B-PER", "I-PER", "O", "B-LOC", "E-LOC", "S-ORG"],
        ["I-PER", "I-LOC", "B-LOC", "B-LOC", "O"],
        ["NOUN", "NOUN", "VERB"],
    ]
    predicted = [
        ["B-PER", "I-PER", "I-PER", "B-LOC", "I-LOC", "S-ORG"],
        ["B-PER", "I-LOC", "B-LOC", "I-LOC", "E-LOC"],
        ["NOUN", "VERB", "VERB"],
    ]
    assert compute(predicted, true) == pytest.approx(
        {
            "f1": 0.47058823529411764,
            "precision": 0.5,
            "recall": 0.4444444444444444,
            "accuracy": 0.5714285714285714,
        },
        abs=1e-12,
    )


@pytest.mark.parametrize(
    ("tags", "spans"),
    [
        ("", set()),
        ("O O", set()),
        # IOB2, IOB1 and IOBES.
        ("B-A I-A O B-A", {("A", 0, 2), ("A", 3, 4)}),
        ("I-A I-A B-A I-A O", {("A", 0, 2), ("A", 2, 4)}),
        ("B-A I-A E-A S-A S-B", {("A", 0, 3), ("A", 3, 4), ("B", 4, 5)}),
        # IOE2 and IOE1, BILOU, BMES and BMEWO.
        ("I-A E-A E-A O I-A E-A", {("A", 0, 2), ("A", 2, 3), ("A", 4, 6)}),
        ("I-A E-A I-A I-A O", {("A", 0, 2), ("A", 2, 4)}),
        ("B-A I-A L-A U-A L-B", {("A", 0, 3), ("A", 3, 4), ("B", 4, 5)}),
        ("B-A M-A M-A E-A S-B S-B", {("A", 0, 4), ("B", 4, 5), ("B", 5, 6)}),
        ("B-A M-A E-A W-A W-A", {("A", 0, 3), ("A", 3, 4), ("A", 4, 5)}),
        # Prefixes without types, as seqeval reads them.
        ("B I O B B", {("_", 0, 2), ("_", 3, 4), ("_", 4, 5)}),
        ("B M E S", {("_", 0, 3), ("_", 3, 4)}),
        # A change of type ends an entity, and so does a tag that begins one.
        ("B-A I-B I-B", {("A", 0, 1), ("B", 1, 3)}),
        ("B-A B-A", {("A", 0, 1), ("A", 1, 2)}),
        # After an end, I- and E- begin an entity.
        ("E-A I-A", {("A", 0, 1), ("A", 1, 2)}),
        ("S-A E-A", {("A", 0, 1), ("A", 1, 2)}),
        # A type may hold a hyphen, and a tag without a prefix is its own type.
        ("B-a-b I-a-b", {("a-b", 0, 2)}),
        ("NOUN NOUN I-NOUN", {("NOUN", 0, 3)}),
    ],
)
def test_entities_of_one_sentence(tags, spans):
    assert entities(tags.split()) == spans


def test_the_labels_tell_a_prefix_without_a_type():
    labels = ("O", "B", "I")
    assert entities(["B", "B"], labels) == {("_", 0, 1), ("_", 1, 2)}
    assert entities(["B", "B"], ("B", "O", "X")) == {("B", 0, 2)}
    assert entity_types(labels) == ("_",)
    assert entity_types(["O", "B-PER", "L-PER", "U-LOC", "NOUN"]) == ("PER", "LOC", "NOUN")


@pytest.mark.parametrize(
    ("labels", "named"),
    [
        ("O B_PER I_PER", "B_PER and I_PER"),
        ("O PER-B PER-I", "PER-B and PER-I"),
        ("o b-per i-per", "b-per and i-per"),
        ("O B-PER I-PER X-PER", "I-PER and X-PER"),
        ("OTHER B-PER I-PER", "no label is O"),
        ("0 1 2", "numbers without names"),
        ("O B-LOC I-loc", "B-LOC and I-loc are tags of two types"),
        ("O B-PER I-PER B-LOC", None),
        ("O B-PER I-PER L-PER U-PER", None),
        ("O B M E S", None),
        ("NOUN VERB V-S V-P", None),
        ("O PERSON PLACE", None),
    ],
)
def test_labels_like_a_scheme_that_is_not_known_are_named(labels, named):
    warning = describe_unknown_scheme(labels.split())
    assert (warning is None) == (named is None)
    assert named is None or named in str(warning)


ANY_TAG = st.sampled_from(["O", *(f"{p}-{t}" for p in "BIES" for t in ("A", "B")), "A", "X"])


@given(st.lists(ANY_TAG, max_size=12))
def test_entities_do_not_overlap_and_cover_every_tag_but_o(tags):
    covered = [i for _, begin, end in entities(tags) for i in range(begin, end)]
    assert sorted(covered) == [i for i, tag in enumerate(tags) if tag != "O"]
    for name, begin, end in entities(tags):
        assert {tag.split("-", 1)[-1] for tag in tags[begin:end]} == {name}
        assert not {tag[:2] for tag in tags[begin + 1 : end]} & {"B-", "S-"}
        assert not {tag[:2] for tag in tags[begin : end - 1]} & {"E-", "S-"}


def test_an_entity_ends_with_its_sentence():
    assert compute([["B-PER"], ["I-PER"]], [["B-PER"], ["B-PER"]])["f1"] == 1.0


def test_a_sentence_with_too_few_predictions_is_refused():
    with pytest.raises(ValueError, match="1 predictions for 2 words"):
        scorer(TASK, [["O"]], [["O", "O"]])
