"""Choose when a cascade asks its larger model, and bound how many answers it changes.

A cascade has a small model, which answers, and a larger one, which answers where the small one is
unsure. Of a list of candidates, the small model ranks all and the larger one the best of them.

For each pair of models, the settings are tested in a fixed order, from asking nearly always to
asking never, and the walk ends at the first setting whose upper limit is above the allowed risk.
The order does not depend on the rows, so the chosen setting of one pair exceeds the risk with at
most the given probability. The choice among pairs needs other rows to be confirmed.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import BaseModel
from scipy.special import bdtrin, betaincinv, expit, softmax

from kdcli.metrics.bootstrap import is_binary
from kdcli.metrics.retrieval import ranking_metrics
from kdcli.types import Array, Kind

THRESHOLDS = np.append(1 - 10 ** -np.arange(5, 2, -0.05), np.arange(198, -1, -1) / 200)
"""The thresholds that are tried, from the highest to 0. Trained models are sure of most texts, so
the steps above 0.99 become smaller."""
RANKING_METRIC = "ndcg@10"
MAX_LOST = 1 << 30
"""More lost rows than anybody has."""
SHORTER = 0.9
"""Each length to which lists are cut is at most this share of the length before."""


def sureness(kind: Kind, output: Array, words: Array | None = None) -> float:
    """Return the probability of the least sure part of a model's answer to a text.

    Args:
        kind: The kind of the answer: `class`, `multi` or `tokens`.
        output: The logits of a text: [C], or [L, C] for `tokens`.
        words: For `tokens`, the positions that label the words.
    """
    if kind == "class":
        return float(softmax(output).max())
    if kind == "multi":
        return float(expit(np.abs(output)).min())
    return float(softmax(output[words], axis=-1).max(-1).min(initial=1.0))


def upper_limit(losses_N: Array, error: float) -> float:
    """Return a limit that the mean loss of all texts exceeds with at most the probability `error`.

    It is Clopper and Pearson's limit for losses of 0 or 1, and that of Bentkus (2004), which is a
    little wider, for other losses between 0 and 1.
    """
    if not is_binary(losses_N):
        error /= math.e
    n, lost = len(losses_N), math.ceil(losses_N.sum() - 1e-9)
    return 1.0 if lost >= n else float(betaincinv(lost + 1, n - lost, 1 - error))


@dataclass(frozen=True)
class Trial:
    """A setting of a cascade on some rows.

    Attributes:
        setting: The threshold, or the number of candidates that the larger model ranks.
        asked: The share of the texts, or candidates, that the larger model reads.
        losses_N: The loss of each row, between 0 and 1.
    """

    setting: float
    asked: float
    losses_N: Array


class Answers(BaseModel):
    """A model's answers to rows.

    Attributes:
        shown: The class, classes or labels of words.
        sure: The `sureness` of each answer.
    """

    shown: list[Any]
    sure: list[float]

    def losses(self, teacher: "Answers") -> Array:
        """Return 1 for each answer that is not the teacher's, [N]."""
        pairs = zip(self.shown, teacher.shown, strict=True)
        return np.array([float(one != other) for one, other in pairs])

    def trials(self, second: "Answers", teacher: "Answers") -> Iterator[Trial]:
        """Try a cascade of this model and a larger one, with fewer and fewer questions."""
        sure_N, own_N, other_N = np.array(self.sure), self.losses(teacher), second.losses(teacher)
        for threshold in THRESHOLDS.tolist():
            asks_N = sure_N < threshold
            yield Trial(threshold, float(asks_N.mean()), np.where(asks_N, other_N, own_N))


class Rankings(BaseModel):
    """A model's scores for the candidates of each list, and the relevance of the candidates."""

    scores: list[list[float]]
    gains: list[list[float]]

    def _values(self) -> Array:
        values = []
        for scores, gains in zip(self.scores, self.gains, strict=True):
            # Of equal scores, the less relevant candidate comes first.
            order = np.lexsort((np.array(gains), -np.array(scores)))
            relevance = {str(n): gain for n, gain in enumerate(gains)}
            ranking = ranking_metrics([str(n) for n in order], relevance)
            values.append(ranking[RANKING_METRIC])
        return np.array(values)

    def losses(self, teacher: "Rankings") -> Array:
        """Return how much lower each ranking scores than the teacher's, at least 0, [Q]."""
        losses_Q: Array = np.clip(teacher._values() - self._values(), 0.0, 1.0)
        return losses_Q

    def trials(self, second: "Rankings", teacher: "Rankings") -> Iterator[Trial]:
        """Try a cascade of this model and a larger one, with shorter and shorter lists."""
        sizes_Q = np.array([len(scores) for scores in self.scores])
        keep = int(sizes_Q.max())
        while keep:
            both = zip(self.scores, second.scores, strict=True)
            scores = [ranked_twice(np.array(a), np.array(b), keep).tolist() for a, b in both]
            losses_Q = Rankings(scores=scores, gains=self.gains).losses(teacher)
            yield Trial(keep, float(np.minimum(sizes_Q, keep).sum() / sizes_Q.sum()), losses_Q)
            keep = min(keep - 1, int(SHORTER * keep))


def ranked_twice(first_M: Array, second_M: Array, keep: int) -> Array:
    """Return scores that rank the `keep` candidates which a small model likes best by the larger
    model's scores, and the other candidates below them in the small model's order, [M].

    The larger model's scores for these others are not read.
    """
    order = np.argsort(-first_M, kind="stable")
    scores_M = second_M.astype(np.float64)
    if keep < len(order):
        kept, rest = order[:keep], order[keep:]
        # The best of the others is one below the last of the kept candidates.
        scores_M[rest] = first_M[rest] - first_M[rest[0]] + scores_M[kept].min() - 1
    return scores_M


def choose(
    trials: Iterator[Trial], max_risk: float, error: float
) -> tuple[Trial | None, Trial | None]:
    """Return the last trial before the first whose upper limit exceeds a risk, and this first one.

    Either is None if there is none.
    """
    chosen = None
    for trial in trials:
        if upper_limit(trial.losses_N, error) > max_risk:
            return chosen, trial
        chosen = trial
    return chosen, None


def rows_needed(losses_N: Array, max_risk: float, error: float) -> int | None:
    """Return the smallest number of rows that shows a risk if their mean loss is the given rows'.

    With this number, `upper_limit` is at most the risk. The result is None if no number of rows
    shows it, because the mean loss is not below the risk.
    """
    mean = float(losses_N.mean())
    if mean >= max_risk:
        return None
    if not is_binary(losses_N):
        error /= math.e

    def rows(lost: int) -> int:
        """Return the smallest number of rows that shows the risk although some are lost."""
        return int(np.ceil(bdtrin(lost, error, max_risk)))

    counts = range(MAX_LOST)
    return rows(bisect_left(counts, True, key=lambda lost: mean * rows(lost) - 1e-9 <= lost))
