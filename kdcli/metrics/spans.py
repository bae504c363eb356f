"""Metrics of extractive question answering.

They agree with the official scripts of SQuAD 1.1, SQuAD 2.0 and MLQA.
"""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import TypedDict

import numpy as np

from kdcli.errors import UsageError
from kdcli.metrics.bootstrap import Scorer, WeightedScorer
from kdcli.types import Array, Task

# Maps a language to a regular expression for its articles, which are ignored. The expressions come
# from mlqa_evaluation_v1.py, including their oddities.
ARTICLES = {
    "en": r"\b(a|an|the)\b",
    "es": r"\b(un|una|unos|unas|el|la|los|las)\b",
    "hi": None,
    "vi": r"\b(của|là|cái|chiếc|những)\b",
    "de": r"\b(ein|eine|einen|einem|eines|einer|der|die|das|den|dem|des)\b",
    "ar": r"\sال^|ال",
    "zh": None,
}
# Characters that count as words in Chinese.
CHINESE = re.compile("([\u4e00-\u9fa5])")


class SpanPrediction(TypedDict):
    """A predicted answer.

    `no_answer` is the margin by which "no answer" scores higher than the text.
    """

    id: str
    text: str
    no_answer: float


class SpanReference(TypedDict):
    """The gold answers to a question; empty if it has none."""

    id: str
    answers: Sequence[str]


def score_answer(
    prediction: str, answers: Sequence[str], language: str = ""
) -> tuple[float, float]:
    """Compare an answer with the best of the gold answers.

    Returns (exact match, F1 over words), each between 0 and 1. Case, punctuation, articles and
    spaces are ignored.

    Args:
        prediction: The predicted answer.
        answers: The gold answers. Empty for a question without an answer, for which only an empty
            prediction is correct.
        language: Selects MLQA's rules, which ignore the punctuation of every script. Without a
            language, SQuAD's rules ignore ASCII punctuation only.

    Raises UsageError if the language has no rules.
    """
    predicted = _words(prediction, language)
    if not answers:
        return (0.0, 0.0) if predicted else (1.0, 1.0)
    golds = [_words(answer, language) for answer in answers]
    return float(predicted in golds), max(_f1(predicted, gold) for gold in golds)


def scorer(
    task: Task,
    predictions: Sequence[SpanPrediction],
    references: Sequence[SpanReference],
    language: str = "",
) -> Scorer:
    """Score by `exact` and `f1`, and by SQuAD 2.0's metrics if questions may be unanswerable.

    In SQuAD 2.0, a `no_answer` above 0 turns a prediction into no answer. The additional metrics
    are:

    * `answer_f1`: F1 over the answerable questions.
    * `no_answer_accuracy`: accuracy over the other questions, or 0 if there are none.
    * `best_exact` and `best_f1`: the results with the best thresholds instead of 0.
    * `best_exact_threshold` and `best_f1_threshold`: the best thresholds.

    Args:
        task: The task.
        predictions: `{"id", "text", "no_answer"}` each.
        references: `{"id", "answers"}` each.
        language: See `score_answer`.

    Raises ValueError if the ids or their order differ. Raises UsageError if the language has no
    rules, or a `no_answer` is not a number.
    """
    for p, r in zip(predictions, references, strict=True):
        if p["id"] != r["id"]:
            raise ValueError(f"prediction {p['id']!r} is paired with reference {r['id']!r}")
    golds = [r["answers"] for r in references]
    if task.impossible:
        # SQuAD 2.0 drops gold answers that consist of articles and punctuation. SQuAD 1.1 and MLQA
        # keep them.
        golds = [[a for a in answers if _words(a, language)] for answers in golds]
    pairs = zip(predictions, golds, strict=True)
    raw = np.array([score_answer(p["text"], gold, language) for p, gold in pairs])
    if not task.impossible:
        return lambda indices: dict(zip(("exact", "f1"), raw[indices].mean(axis=0), strict=True))
    no_answer = np.array([p["no_answer"] for p in predictions], dtype=np.float64)
    if bad := int(np.isnan(no_answer).sum()):
        message = f"{bad} of {len(no_answer)} predictions of {task.title} are not a number"
        raise UsageError(message, "the weights are broken or overflow in this dtype: try float32")
    answerable = np.array([bool(r["answers"]) for r in references])
    has_text = np.array([p["text"] != "" for p in predictions])
    return _with_unanswerable(raw, no_answer, answerable, has_text)


def _with_unanswerable(raw: Array, no_answer: Array, answerable: Array, has_text: Array) -> Scorer:
    """Score with SQuAD 2.0's additional metrics.

    All arrays have shape [n], except `raw` [n, 2], which holds exact match and F1 of the texts.
    """
    at_zero = np.where((no_answer > 0)[:, None], ~answerable[:, None], raw)
    # The gain of the text over no answer. For an unanswerable question, the official script counts
    # any text as wrong, even "the", which `exact` treats as empty.
    gains = np.where(answerable[:, None], raw, -has_text[:, None].astype(np.float64))
    order = np.argsort(no_answer, kind="stable")
    ordered = no_answer[order]
    # A threshold cannot separate equal scores. The official script separates them by their order in
    # the data.
    ends = np.flatnonzero(np.append(ordered[1:] != ordered[:-1], True))

    def best(gain: Array, times: Array) -> tuple[float, float]:
        """Return the maximum number of correct examples, and the lowest threshold that reaches
        it."""
        never_answering = float(times @ ~answerable)
        correct = never_answering + np.cumsum((gain * times)[order])[ends]
        # Round, because the same numbers summed in another order must tie.
        best_end = int(np.argmax(np.round(correct, 9)))
        if correct[best_end] > never_answering + 1e-9:
            return float(correct[best_end]), float(ordered[ends[best_end]])
        # Never answering is best. Use threshold 0, as the official script does, or a threshold just
        # below all scores.
        return never_answering, min(0.0, float(np.nextafter(no_answer[times > 0].min(), -np.inf)))

    def score(indices: Array) -> dict[str, float]:
        times = np.bincount(indices, minlength=len(raw)).astype(np.float64)
        n, with_answer = float(times.sum()), float(times @ answerable)
        exact, exact_threshold = best(gains[:, 0], times)
        f1, f1_threshold = best(gains[:, 1], times)
        return {
            "exact": float(times @ at_zero[:, 0] / n),
            "f1": float(times @ at_zero[:, 1] / n),
            "best_exact": exact / n,
            "best_exact_threshold": exact_threshold,
            "best_f1": f1 / n,
            "best_f1_threshold": f1_threshold,
            "answer_f1": float((times * answerable) @ at_zero[:, 1] / max(with_answer, 1.0)),
            "no_answer_accuracy": float(
                (times * ~answerable) @ at_zero[:, 0] / max(n - with_answer, 1.0)
            ),
        }

    weights = {"answer_f1": answerable, "no_answer_accuracy": ~answerable}
    return WeightedScorer(score, weights.get)


def _words(text: str, language: str) -> list[str]:
    """Return an answer's words after normalisation, as the official `normalize_answer` does."""
    if language and language not in ARTICLES:
        raise UsageError(
            f"there are no rules for comparing answers in language {language!r}",
            f"known languages: {', '.join(ARTICLES)}",
        )
    kept = "".join(c for c in text.lower() if not _is_punctuation(c, language))
    if articles := ARTICLES[language or "en"]:
        kept = re.sub(articles, " ", kept)
    if language == "zh":
        kept = CHINESE.sub(r" \1 ", kept)
    return kept.split()


def _is_punctuation(char: str, language: str) -> bool:
    if char in string.punctuation:
        return True
    return language != "" and unicodedata.category(char).startswith("P")


def _f1(predicted: Sequence[str], gold: Sequence[str]) -> float:
    same = (Counter(predicted) & Counter(gold)).total()
    precision, recall = same / max(len(predicted), 1), same / max(len(gold), 1)
    return 2 * precision * recall / (precision + recall) if same else 0.0
