"""Metrics of generated texts: BLEU-4 by sacrebleu, ROUGE by rouge-score, both offline."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from rouge_score.rouge_scorer import RougeScorer  # type: ignore[import-untyped]
from sacrebleu.metrics.bleu import BLEU

from kdcli.metrics.bootstrap import Scorer
from kdcli.types import Task

ROUGE = ("rouge1", "rouge2", "rougeL", "rougeLsum")


def scorer(task: Task, predictions: Sequence[str], references: Sequence[str]) -> Scorer:
    """Score by `bleu` (corpus BLEU-4, case ignored, tokens and smoothing as sacrebleu's defaults), `rouge1`, `rouge2`,
    `rougeL`, `rougeLsum` (means of F1 over stems of English words; `rougeLsum` takes lines for sentences) and `exact`
    (share of texts that are the reference), each 0 to 1."""
    bleu = BLEU(lowercase=True, effective_order=True)
    of_pair = [bleu.sentence_score(p, [r]) for p, r in zip(predictions, references, strict=True)]
    # Counts of n-grams found and there, and lengths: BLEU of any examples follows from their sums.
    counts = np.array(
        [[*s.counts, *s.totals, s.sys_len, s.ref_len] for s in of_pair], dtype=np.int64
    )
    overlap = np.array([rouge(p, r) for p, r in zip(predictions, references, strict=True)])
    exact = np.array(
        [p.split() == r.split() for p, r in zip(predictions, references, strict=True)],
        dtype=np.float64,
    )

    def score(indices: Any) -> dict[str, float]:
        *grams, sys_len, ref_len = counts[indices].sum(0).tolist()
        whole = BLEU.compute_bleu(grams[:4], grams[4:], sys_len, ref_len, smooth_method="exp")
        means = dict(zip(ROUGE, overlap[indices].mean(0).tolist(), strict=True))
        return {"bleu": whole.score / 100, **means, "exact": float(exact[indices].mean())}

    return score


def rouge(prediction: str, reference: str) -> list[float]:
    """F1 of each of `ROUGE` for one text."""
    scores = _rouge().score(reference, prediction)
    return [float(scores[name].fmeasure) for name in ROUGE]


@cache
def _rouge() -> RougeScorer:
    return RougeScorer(list(ROUGE), use_stemmer=True)
