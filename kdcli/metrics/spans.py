"""Metrics of extractive question answering, as the official scripts of SQuAD 1.1, SQuAD 2.0 and MLQA."""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kdcli.errors import UsageError
from kdcli.metrics.bootstrap import Array, Scorer
from kdcli.types import Task

ARTICLES = {
    "en": r"\b(a|an|the)\b",
    "es": r"\b(un|una|unos|unas|el|la|los|las)\b",
    "hi": None,
    "vi": r"\b(của|là|cái|chiếc|những)\b",
    "de": r"\b(ein|eine|einen|einem|eines|einer|der|die|das|den|dem|des)\b",
    "ar": r"\sال^|ال",
    "zh": None,
}  # articles to ignore; the expressions of mlqa_evaluation_v1.py, oddities included
CHINESE = re.compile("([\u4e00-\u9fa5])")  # characters that are words of their own in Chinese


def score_answer(
    prediction: str, answers: Sequence[str], language: str = ""
) -> tuple[float, float]:
    """Compare an answer with the best of the gold answers: (exact, F1 over words), each 0 to 1. Case, punctuation,
    articles and spaces do not count. A `language` follows MLQA, which ignores the punctuation of every script; none
    follows SQuAD, which ignores only that of ASCII. `answers`: empty for a question without an answer; then only an
    empty prediction is right. Raises UsageError: a language without rules."""
    predicted = _words(prediction, language)
    if not answers:
        return (0.0, 0.0) if predicted else (1.0, 1.0)
    golds = [_words(answer, language) for answer in answers]
    return float(predicted in golds), max(_f1(predicted, gold) for gold in golds)


def scorer(
    task: Task,
    predictions: Sequence[Mapping[str, Any]],
    references: Sequence[Mapping[str, Any]],
    language: str = "",
) -> Scorer:
    """Score by `exact` and `f1`; a task with unanswerable questions also has the metrics that SQuAD 2.0 adds. There, a
    `no_answer` above 0 turns a prediction into no answer. `answer_f1` is F1 over the answerable questions,
    `no_answer_accuracy` the share right of the others (0 without any). `best_exact` and `best_f1` are the results with
    the best thresholds in place of 0: `best_exact_threshold` and `best_f1_threshold`. `predictions`: `{"id", "text",
    "no_answer"}` each. `references`: `{"id", "answers"}` each. Raises ValueError: other ids, or another order;
    UsageError: a language without rules, or a `no_answer` that is not a number."""
    for p, r in zip(predictions, references, strict=True):
        if p["id"] != r["id"]:
            raise ValueError(f"prediction {p['id']!r} beside reference {r['id']!r}")
    golds = [r["answers"] for r in references]
    if task.impossible:
        # SQuAD 2.0 drops gold answers of articles and punctuation only; 1.1 and MLQA do not.
        golds = [[a for a in answers if _words(a, language)] for answers in golds]
    raw = np.array(
        [
            score_answer(p["text"], gold, language)
            for p, gold in zip(predictions, golds, strict=True)
        ]
    )
    if not task.impossible:
        return lambda indices: dict(zip(("exact", "f1"), raw[indices].mean(axis=0), strict=True))
    no_answer = np.array([p["no_answer"] for p in predictions], dtype=np.float64)
    if wrong := int(np.isnan(no_answer).sum()):
        message = f"{wrong} of {len(no_answer)} predictions of task {task.name} are not a number"
        raise UsageError(message, "the weights are broken or overflow in this dtype: try float32")
    answerable = np.array([bool(r["answers"]) for r in references])
    return _with_unanswerable(
        raw, no_answer, answerable, np.array([p["text"] != "" for p in predictions])
    )


def _with_unanswerable(raw: Array, no_answer: Array, answerable: Array, has_text: Array) -> Scorer:
    """Arrays are [n]; `raw` [n, 2] is exact and F1 of the predicted texts."""
    at_zero = np.where((no_answer > 0)[:, None], ~answerable[:, None], raw)
    # The gain of the text over no answer. The official script counts any text as wrong for an unanswerable question,
    # even "the", which `exact` treats as empty.
    gains = np.where(answerable[:, None], raw, -has_text[:, None].astype(np.float64))
    order = np.argsort(no_answer, kind="stable")
    ordered = no_answer[order]
    # A threshold cannot separate equal scores, though the official script does, in the order of the data.
    ends = np.flatnonzero(np.append(ordered[1:] != ordered[:-1], True))

    def best(gain: Array, times: Array) -> tuple[float, float]:
        """The most examples right with any threshold, and the lowest such threshold."""
        silent = float(times @ ~answerable)
        right = silent + np.cumsum((gain * times)[order])[ends]
        # Rounded: the same numbers summed in another order must tie.
        at = int(np.argmax(np.round(right, 9)))
        if right[at] > silent + 1e-9:
            return float(right[at]), float(ordered[ends[at]])
        # Never answering is best: threshold 0 as in the official script, or just below all scores.
        return silent, min(0.0, float(np.nextafter(no_answer[times > 0].min(), -np.inf)))

    def score(indices: Array) -> dict[str, Any]:
        times = np.bincount(indices, minlength=len(raw)).astype(np.float64)
        n, with_answer = float(times.sum()), float(times @ answerable)
        exact, exact_at = best(gains[:, 0], times)
        f1, f1_at = best(gains[:, 1], times)
        return {
            "exact": times @ at_zero[:, 0] / n,
            "f1": times @ at_zero[:, 1] / n,
            "best_exact": exact / n,
            "best_exact_threshold": exact_at,
            "best_f1": f1 / n,
            "best_f1_threshold": f1_at,
            "answer_f1": (times * answerable) @ at_zero[:, 1] / max(with_answer, 1.0),
            "no_answer_accuracy": (times * ~answerable) @ at_zero[:, 0] / max(n - with_answer, 1.0),
        }

    return score


def _words(text: str, language: str) -> list[str]:
    """The words of an answer that count, as in `normalize_answer` of the official scripts."""
    if language and language not in ARTICLES:
        raise UsageError(
            f"no rules to compare answers in language {language!r}",
            f"allowed: {', '.join(ARTICLES)}",
        )
    kept = "".join(c for c in text.lower() if not _punctuation(c, language))
    if articles := ARTICLES[language or "en"]:
        kept = re.sub(articles, " ", kept)
    if language == "zh":
        kept = CHINESE.sub(r" \1 ", kept)
    return kept.split()


def _punctuation(char: str, language: str) -> bool:
    return char in string.punctuation or (
        language != "" and unicodedata.category(char).startswith("P")
    )


def _f1(predicted: Sequence[str], gold: Sequence[str]) -> float:
    same = (Counter(predicted) & Counter(gold)).total()
    precision, recall = same / max(len(predicted), 1), same / max(len(gold), 1)
    return 2 * precision * recall / (precision + recall) if same else 0.0
