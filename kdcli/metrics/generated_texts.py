"""Metrics of generated texts: BLEU-4 from sacrebleu and ROUGE from rouge-score. Both work offline.

Both libraries belong to the extra `kdcli[generation]` and are imported on first use.
"""

import importlib
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

from kdcli.errors import MachineError
from kdcli.metrics.bootstrap import Scorer
from kdcli.types import Array, Task
from kdcli.version import install_command

ROUGE = ("rouge1", "rouge2", "rougeL", "rougeLsum")


def require_libraries() -> None:
    """Check that sacrebleu and rouge-score are installed.

    Raises MachineError if one of them is missing.
    """
    _library("sacrebleu.metrics.bleu")
    _library("rouge_score.rouge_scorer")


def scorer(task: Task, predictions: Sequence[str], references: Sequence[str]) -> Scorer:
    """Score by BLEU, ROUGE and exact matches, each between 0 and 1.

    * `bleu`: corpus BLEU-4, ignoring case, with sacrebleu's default tokens and smoothing.
    * `rouge1`, `rouge2`, `rougeL`, `rougeLsum`: the mean F1 over stems of English words.
      `rougeLsum` treats lines as sentences.
    * `exact`: the share of texts that equal their reference.

    Raises MachineError if sacrebleu or rouge-score is not installed.
    """
    bleu_class = _library("sacrebleu.metrics.bleu").BLEU
    bleu = bleu_class(lowercase=True, effective_order=True)
    pairs = list(zip(predictions, references, strict=True))
    by_pair = [bleu.sentence_score(p, [r]) for p, r in pairs]
    # The numbers of matching and of all n-grams, and the lengths. The BLEU of any selection of
    # examples follows from their sums.
    counts = np.array(
        [[*s.counts, *s.totals, s.sys_len, s.ref_len] for s in by_pair], dtype=np.int64
    )
    overlap = np.array([rouge(p, r) for p, r in pairs])
    exact = np.array([p.split() == r.split() for p, r in pairs], dtype=np.float64)

    def score(indices: Array) -> dict[str, float]:
        *grams, sys_len, ref_len = counts[indices].sum(0).tolist()
        corpus = bleu_class.compute_bleu(
            grams[:4], grams[4:], sys_len, ref_len, smooth_method="exp"
        )
        means = dict(zip(ROUGE, overlap[indices].mean(0).tolist(), strict=True))
        return {"bleu": corpus.score / 100, **means, "exact": float(exact[indices].mean())}

    return score


def rouge(prediction: str, reference: str) -> list[float]:
    """Return the F1 of each metric in `ROUGE` for one text."""
    scores = _rouge_scorer().score(reference, prediction)
    return [float(scores[name].fmeasure) for name in ROUGE]


@cache
def _rouge_scorer() -> Any:
    # Its own default logs through absl, which adds a handler that repeats the messages of kdcli.
    tokenizer = _library("rouge_score.tokenizers").DefaultTokenizer(use_stemmer=True)
    return _library("rouge_score.rouge_scorer").RougeScorer(list(ROUGE), tokenizer=tokenizer)


def _library(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MachineError(
            f"BLEU and ROUGE need sacrebleu and rouge-score, but {error}",
            install_command("generation"),
        ) from None
