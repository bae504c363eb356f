"""Answers against the rules of the SQuAD and MLQA scripts by hand, and thresholds against trying
every one."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdcli.errors import UsageError
from kdcli.metrics import scorer
from kdcli.metrics.library import TaskMetric
from kdcli.metrics.spans import score_answer
from kdcli.types import Task

PLAIN = Task("t", "span", ("question", "context"), ("f1", "exact"))
OF_THRESHOLDS = ("best_exact", "best_exact_threshold", "best_f1", "best_f1_threshold")
NAMES = ("exact", "f1", *OF_THRESHOLDS, "answer_f1", "no_answer_accuracy")
WITH_NONE = Task("t", "span", ("question", "context"), NAMES, impossible=True)


def given_as(rows):
    """(text, no_answer, gold answers) each → predictions, references."""
    predictions = [
        {"id": str(i), "text": text, "no_answer": none} for i, (text, none, _) in enumerate(rows)
    ]
    return predictions, [
        {"id": str(i), "answers": list(golds)} for i, (_, _, golds) in enumerate(rows)
    ]


def compute(task, rows, language=""):
    predictions, references = given_as(rows)
    return TaskMetric(task, language).compute(predictions=predictions, references=references)


@pytest.mark.parametrize(
    ("prediction", "answers", "language", "exact", "f1"),
    [
        # SQuAD: case, articles, ASCII punctuation and spaces do not count.
        ("The  Cat's!", ["cats"], "", 1, 1),
        ("a theatre", ["theatre"], "", 1, 1),
        ("theatre", ["atre"], "", 0, 0),
        ("U.S.", ["US"], "", 1, 1),
        ("New York", ["New York City"], "", 0, 0.8),
        ("York York New", ["New York"], "", 0, 0.8),
        ("dog", ["cat"], "", 0, 0),
        ("“cats”", ["cats"], "", 0, 0),
        ("the cats’ owner", ["cats owner"], "", 0, 0.5),
        ("10–12", ["1012"], "", 0, 0),
        # The best of several gold answers, each of the two numbers by itself.
        ("red house", ["house", "the red house", "blue"], "", 1, 1),
        ("red house", ["house", "blue house on a hill"], "", 0, 2 / 3),
        # No answer, and answers of nothing but what does not count.
        ("", [], "", 1, 1),
        ("the", [], "", 1, 1),
        ("cat", [], "", 0, 0),
        ("", ["cat"], "", 0, 0),
        ("the", ["a"], "", 1, 0),
        # Letters are compared by code point, as in the scripts: accents as one character or two are
        # different.
        ("caf\u00e9", ["cafe\u0301"], "", 0, 0),
        ("caf\u00e9", ["CAF\u00c9"], "", 1, 1),
        ("ＡＢＣ", ["ａｂｃ"], "", 1, 1),
        ("ABC", ["ＡＢＣ"], "zh", 0, 0),
        # MLQA: punctuation of any script.
        ("“cats”", ["cats"], "en", 1, 1),
        ("the cats’ owner", ["cats owner"], "en", 1, 1),
        ("10–12", ["1012"], "en", 1, 1),
        ("«the cat»…", ["a cat"], "en", 1, 1),
        ("der Hund", ["Hund"], "en", 0, 2 / 3),
        ("5 € + 1", ["5 €"], "en", 0, 0.8),
        ("„Katzen“", ["Katzen"], "de", 1, 1),
        ("der Hund eines Mannes", ["Hund Mannes"], "de", 1, 1),
        ("derer Hund", ["Hund"], "de", 0, 2 / 3),
        ("the Hund", ["Hund"], "de", 0, 2 / 3),
        ("los gatos de una casa", ["gatos de casa"], "es", 1, 1),
        ("¿Qué?", ["qué"], "es", 1, 1),
        ("những con mèo của tôi", ["con mèo tôi"], "vi", 1, 1),
        ("चाँद।", ["चाँद"], "hi", 1, 1),
        # The expression cuts every "ال", and between words it leaves one space.
        ("الكتاب", ["كتاب"], "ar", 1, 1),
        ("بيت الكتاب", ["بيت كتاب"], "ar", 1, 1),
        ("مالك", ["م ك"], "ar", 1, 1),
        # Chinese characters are words, other scripts have words between spaces.
        ("北京大学", ["北京"], "zh", 0, 2 / 3),
        ("北京，大学", ["北 京大学。"], "zh", 1, 1),
        ("在Windows 10上", ["Windows 10"], "zh", 0, 2 / 3),
        ("（the）北", ["北"], "zh", 0, 2 / 3),
        ("アメリカ", ["アメリカ人"], "zh", 0, 2 / 3),
    ],
)
def test_answers_by_hand(prediction, answers, language, exact, f1):
    assert score_answer(prediction, answers, language) == (exact, pytest.approx(f1))


def test_a_language_without_rules_is_refused():
    with pytest.raises(UsageError, match="language 'fr'") as caught:
        score_answer("le chat", ["chat"], "fr")
    assert "en, es, hi, vi, de, ar, zh" in str(caught.value.hint)


def test_the_language_reaches_the_rules():
    rows = [("der Hund", 0.0, ["Hund"])]
    assert (compute(PLAIN, rows)["exact"], compute(PLAIN, rows, "de")) == (
        0.0,
        {"f1": 1.0, "exact": 1.0},
    )


def test_without_unanswerable_questions_the_best_span_counts():
    rows = [
        ("cat", 5.0, ["cat"]),
        ("red dog", -5.0, ["dog"]),
        ("", 0.0, ["owl"]),
        ("the", 1.0, ["a"]),
    ]
    assert compute(PLAIN, rows) == {"f1": pytest.approx((1 + 2 / 3) / 4), "exact": 0.5}


@pytest.mark.parametrize(
    ("scores", "threshold"), [((1.0, 2.0), 0.0), ((-1.0, 2.0), math.nextafter(-1.0, -math.inf))]
)
def test_where_silence_is_best_the_threshold_is_below_all_scores(scores, threshold):
    found = compute(WITH_NONE, [("cat", scores[0], []), ("dog", scores[1], [])])
    assert (found["best_exact"], found["best_exact_threshold"]) == (1.0, threshold)
    assert (found["best_f1"], found["best_f1_threshold"]) == (1.0, threshold)


def test_the_sweep_counts_any_text_as_wrong_where_there_is_no_answer():
    # As the official script, although without a threshold it lets "the" pass for none.
    found = compute(WITH_NONE, [("the", -1.0, []), ("cat", 1.0, ["cat"])])
    assert (found["exact"], found["best_exact"]) == (0.5, 0.5)


def test_gold_answers_of_articles_only_do_not_count_beside_unanswerable_questions():
    # The official script of 2.0 drops them, and then judges as if there were none; that of 1.1
    # keeps them.
    assert compute(WITH_NONE, [("the", -1.0, ["the", "cat"])])["exact"] == 0.0
    assert compute(PLAIN, [("the", -1.0, ["the", "cat"])])["exact"] == 1.0


def test_a_prediction_without_any_span():
    found = compute(WITH_NONE, [("", math.inf, ["cat"]), ("", math.inf, [])])
    assert found == {
        **dict.fromkeys(NAMES, 0.5),
        **EDGES,
        "answer_f1": 0.0,
        "no_answer_accuracy": 1.0,
    }


EDGES = {"best_exact_threshold": 0.0, "best_f1_threshold": 0.0}
WORDS = st.lists(st.sampled_from(["red", "cat", "dog"]), max_size=3).map(" ".join)
ROW = st.tuples(WORDS, st.integers(-3, 3).map(float), st.lists(WORDS.filter(bool), max_size=2))
ROWS = st.lists(ROW, min_size=1, max_size=12)


def overlap(text, gold):
    """F1 of two bags of words, word by word."""
    rest, same = gold.split(), 0
    for word in text.split():
        if word in rest:
            rest.remove(word)
            same += 1
    return 2.0 * same / max(len(text.split()) + len(gold.split()), 1)


def at(rows, threshold):
    """Exact and F1 of each row when an answer with a score above the threshold is taken for none,
    [n, 2]."""
    result = []
    for text, none, golds in rows:
        said = "" if none > threshold else text
        if golds:
            result.append((float(said in golds), max(overlap(said, gold) for gold in golds)))
        else:
            result.append((float(said == ""), float(said == "")))
    return np.array(result, dtype=np.float64)


@given(ROWS)
def test_metrics_are_the_formulas(rows):
    found = compute(WITH_NONE, rows)
    assert list(found) == list(NAMES)
    assert all(type(value) is float for value in found.values())
    at_zero = at(rows, 0.0)
    answerable = np.array([bool(golds) for _, _, golds in rows])
    assert [found["exact"], found["f1"]] == pytest.approx(at_zero.mean(axis=0).tolist())
    assert found["answer_f1"] == pytest.approx(
        at_zero[answerable, 1].mean() if answerable.any() else 0.0
    )
    assert found["no_answer_accuracy"] == pytest.approx(
        at_zero[~answerable, 0].mean() if not answerable.all() else 0.0
    )
    tried = np.array(
        [at(rows, t).mean(axis=0) for t in (-math.inf, *(none for _, none, _ in rows))]
    )
    for column, name in enumerate(("exact", "f1")):
        assert found[f"best_{name}"] == pytest.approx(tried[:, column].max())
        # The threshold reaches what it is said to reach.
        assert at(rows, found[f"best_{name}_threshold"]).mean(axis=0)[column] == pytest.approx(
            found[f"best_{name}"]
        )


def test_ids_that_do_not_match_are_refused():
    predictions, references = given_as([("cat", 0.0, ["cat"]), ("dog", 0.0, ["dog"])])
    with pytest.raises(ValueError, match="prediction '1' is paired with reference '0'"):
        scorer(PLAIN, predictions[::-1], references)


def test_scores_that_are_no_numbers_are_told():
    predictions, references = given_as([("cat", math.nan, ["cat"]), ("dog", 0.0, ["dog"])])
    with pytest.raises(UsageError, match="1 of 2 predictions of task t are not a number"):
        scorer(WITH_NONE, predictions, references)
