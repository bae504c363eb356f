"""Searches among the vectors of texts, and what they find."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kdcli.metrics.bootstrap import paired_bootstrap
from kdcli.metrics.retrieval import CUT, similarities
from kdcli.report.schema import Mistake
from kdcli.types import Array
from kdcli.workloads.beir import QUERIES_AT_ONCE


@dataclass(frozen=True)
class Search:
    """Texts that search other texts.

    Attributes:
        queries_QE: The vectors of the texts that search.
        documents_NE: The vectors of the texts that are searched.
        own_Q: The number of each query's own text among the documents.
        similarity: The similarity of two vectors; see `similarities`.
    """

    queries_QE: Array
    documents_NE: Array
    own_Q: Array
    similarity: str

    def _scores(self) -> Iterator[tuple[Array, Array]]:
        """Yield the scores of all documents, and the number of the own one, for some queries."""
        for begin in range(0, len(self.own_Q), QUERIES_AT_ONCE):
            part = slice(begin, begin + QUERIES_AT_ONCE)
            scores_QN = similarities(self.queries_QE[part], self.documents_NE, self.similarity)
            yield scores_QN, self.own_Q[part]

    def nearest(self) -> Array:
        """Return the nearest texts of each query, best first, without its own text, [Q, CUT]."""
        parts = []
        for scores_QN, own_Q in self._scores():
            scores_QN[np.arange(len(own_Q)), own_Q] = -np.inf
            parts.append(np.argsort(-scores_QN, axis=1, kind="stable")[:, :CUT])
        return np.concatenate(parts)

    def share_nearer(self) -> Array:
        """Return the share of the other texts that are nearer than the own one, [Q].

        It is 0 if each query finds its own text first, and 0.5 on average by chance. A text that is
        as near as the own one counts half.
        """
        parts = []
        for scores_QN, own_Q in self._scores():
            own_Q1 = scores_QN[np.arange(len(own_Q)), own_Q][:, None]
            nearer_Q = (scores_QN > own_Q1).sum(1) + ((scores_QN == own_Q1).sum(1) - 1) / 2
            parts.append(nearer_Q / max(1, scores_QN.shape[1] - 1))
        return np.concatenate(parts)


def overlap(found_QK: Array, wanted_QK: Array) -> Array:
    """Return the share of the wanted texts that each query found, [Q]."""
    return np.asarray((found_QK[:, :, None] == wanted_QK[:, None, :]).any(1).mean(1))


def kept_share(values_Q: Array, reference_Q: Array) -> tuple[float, float, float]:
    """Return the mean as a share of the reference's, and the ends of its 95 % interval."""

    def share(rows: Array) -> dict[str, float]:
        return {"share": float(values_Q[rows].mean() / max(reference_Q[rows].mean(), 1e-12))}

    intervals = paired_bootstrap(share, lambda rows: {"share": 1.0}, len(values_Q))
    difference, low, high = intervals["share"]
    return 1 + difference, 1 + low, 1 + high


def failures(
    names: Sequence[str],
    texts: Sequence[str],
    wanted: Sequence[str],
    found: Sequence[str],
    errors_Q: Array,
    most: int,
) -> list[Mistake]:
    """List the texts that lose most.

    Args:
        names: The name of each text.
        texts: The texts.
        wanted: What each text should find.
        found: What it finds.
        errors_Q: How much each text loses; texts that lose nothing are not listed.
        most: Maximum number of texts.
    """
    worst = [n for n in np.argsort(-errors_Q, kind="stable")[:most].tolist() if errors_Q[n] > 0]
    return [
        Mistake(
            id=names[n],
            texts=[texts[n]],
            label=wanted[n],
            predicted=found[n],
            error=float(errors_Q[n]),
        )
        for n in worst
    ]
