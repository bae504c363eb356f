"""Choose a map from a new model's vectors to an index, and verify it by searches."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kdcli.data.labelled.partition import VERIFICATION
from kdcli.engine.progress import Progress
from kdcli.engine.session import Session
from kdcli.errors import UsageError
from kdcli.metrics.retrieval import CUT
from kdcli.report.schema import Mistake
from kdcli.types import Array
from kdcli.verbs.adapt.indexed_texts import IndexedTexts
from kdcli.verbs.adapt.maps import VectorMap, fit_maps
from kdcli.verbs.adapt.searches import Search, failures, kept_share, overlap
from kdcli.workloads.beir import RETRIEVAL, Retrieval, retrieval_scores
from kdcli.workloads.embedder import Embedder
from kdcli.workloads.rankings import ranking_scores
from kdcli.workloads.scores import EvaluationResult, compare
from kdcli.workloads.vector_index import Index

REEMBEDDED, ADAPTED, OLD = "re-embedding", "adapted", "old model"
NEIGHBOURS, RECALL = "neighbours", f"recall@{CUT}"
MAX_NEARER, DOUBTFUL = 0.25, 0.05
"""Maximum mean of `Search.share_nearer` of a usable index, which is 0.5 by chance, and the share of
wrong rows from which it is logged."""
LISTED = 20
"""Maximum number of failures in the report."""


@dataclass(frozen=True)
class Adaptation:
    """A new model and the index of an old one.

    Attributes:
        indexed: The texts of the index.
        new: The new model.
        new_NE: Its vectors of the texts, as documents.
        old: The old model, if it is at hand.
        encodes: What the adapted model encodes, `queries` or `documents`.
        session: The device.
    """

    indexed: IndexedTexts
    new: Embedder
    new_NE: Array
    old: Embedder | None
    encodes: str
    session: Session

    @property
    def similarity(self) -> str:
        """The similarity by which the index is searched."""
        return (self.old or self.new).format.similarity

    def searching(self, numbers: Array) -> Searches:
        """Return the searches of some texts."""
        queries_QD = self.new_NE[numbers]
        if self.new.prompt("query") != self.new.prompt("document"):
            texts = self.indexed.texts_at(numbers)
            queries_QD = self.new.vectors(texts, "query", self.session)
        documents = np.arange(len(self.new_NE)) if self.encodes == "queries" else numbers
        wanted = Search(
            queries_QD,
            self.new_NE[documents],
            np.searchsorted(documents, numbers),
            self.new.format.similarity,
        )
        return Searches(self, wanted, documents, wanted.nearest())

    def choose_map(self) -> tuple[VectorMap, str]:
        """Fit every kind of map, and return the one with the best recall on the selection texts.

        Returns:
            The map, and a sentence on all maps.

        Raises:
            UsageError: The map brings a text hardly nearer to its own row than to other rows.
        """
        fitted, selection, _ = self.indexed.parts
        maps = list(fit_maps(self.new_NE[fitted], self.indexed.old_NE[fitted]))
        searches = self.searching(selection)
        recalls = [float(searches.recall(searches.by_map(each)).mean()) for each in maps]
        chosen = maps[int(np.argmax(recalls))]
        nearer_Q = searches.by_map(chosen).share_nearer()
        source = self.indexed.source
        if (nearer := nearer_Q.mean()) > MAX_NEARER:
            raise UsageError(
                f"the rows of {source} do not belong to the texts: with the best map, {nearer:.0%} "
                "of the other rows are nearer to a text than its own row, and chance is 50%",
                "give the vectors of these texts, one row for each text in the same order, or a "
                "table with a column of the texts or their ids",
            )
        # A row of another text is in the farther half in one of two cases.
        if (wrong := 2 * (nearer_Q > 0.5).mean()) > DOUBTFUL:
            Progress.log(f"warning: about {wrong:.0%} of the rows of {source} fit other texts")
        shown = ", ".join(
            f"{each.name}{each.details} {recall:.3f}"
            for each, recall in zip(maps, recalls, strict=True)
        )
        return chosen, (
            f"the {chosen.name} map has the best {RECALL} on {len(selection):,} selection texts, "
            f"after a fit to {len(fitted):,} other texts: {shown}"
        )

    def verify(self, chosen: VectorMap) -> tuple[EvaluationResult, str]:
        """Compare a map with re-embedding on the verification texts, and write a sentence."""
        numbers, indexed = self.indexed.parts[2], self.indexed
        searches = self.searching(numbers)
        adapted = searches.by_map(chosen)
        found_QK, wanted_QK = adapted.nearest(), searches.wanted_QK
        recalls = {
            REEMBEDDED: np.ones(len(numbers)),
            ADAPTED: overlap(found_QK, wanted_QK),
            OLD: searches.recall(searches.by_old_model()),
        }
        scores = {
            name: ranking_scores(NEIGHBOURS, VERIFICATION, {RECALL: recall_Q})
            for name, recall_Q in recalls.items()
        }
        scores[REEMBEDDED] = replace(scores[REEMBEDDED], is_reference=True)
        wanted, found = (
            indexed.texts_at(searches.documents[of_model[:, 0]])
            for of_model in (wanted_QK, found_QK)
        )
        worst = failures(
            [str(indexed.texts.rows[n] + 1) for n in numbers],
            indexed.texts_at(numbers),
            wanted,
            found,
            1 - recalls[ADAPTED],
            LISTED,
        )
        own = (adapted.share_nearer() == 0).mean()
        sentence = (
            f"{len(numbers):,} verification texts find "
            f"{_percent(kept_share(recalls[ADAPTED], recalls[REEMBEDDED]))} of the {CUT} nearest "
            f"of {len(searches.documents):,} texts that they find with re-embedding. The old model "
            f"finds {recalls[OLD].mean():.1%} of them. {own:.1%} of the texts find their own row "
            "first"
        )
        return _with_worst(compare(NEIGHBOURS, scores), worst), sentence

    def verify_relevance(
        self, data: Retrieval, chosen: VectorMap, adapted: Embedder
    ) -> tuple[EvaluationResult, str]:
        """Compare a map with re-embedding by relevant documents, and write a sentence.

        Args:
            data: Queries, whose corpus is the index.
            chosen: The map.
            adapted: The new model with the map.
        """
        old_NE, new_NE = self.indexed.old_NE, self.new_NE
        of_old = Index(OLD, old_NE.shape[1], lambda: old_NE)
        of_new = Index(REEMBEDDED, new_NE.shape[1], lambda: new_NE)
        runs = {REEMBEDDED: (self.new, of_new), ADAPTED: (adapted, of_old)}
        if self.old is not None:
            runs[OLD] = self.old, of_old
            if self.encodes == "documents":
                runs[ADAPTED] = self.old, Index(ADAPTED, of_old.width, lambda: chosen(new_NE))
        values = {
            name: retrieval_scores(data, model, self.session, index)
            for name, (model, index) in runs.items()
        }
        scores = {name: ranking_scores(RETRIEVAL, "test", own) for name, own in values.items()}
        ours_Q, theirs_Q = values[ADAPTED][RECALL], values[REEMBEDDED][RECALL]
        worst = failures(
            list(data.queries),
            list(data.queries.values()),
            [", ".join(d for d, g in data.relevance[q].items() if g > 0) for q in data.queries],
            [f"{RECALL} {x:.2f} instead of {y:.2f}" for x, y in zip(ours_Q, theirs_Q, strict=True)],
            theirs_Q - ours_Q,
            LISTED,
        )
        sentence = (
            f"{len(data.queries):,} queries keep {_percent(kept_share(ours_Q, theirs_Q))} of the "
            f"{RECALL} of re-embedding by relevance, {ours_Q.mean():.3f} of {theirs_Q.mean():.3f}"
        )
        return _with_worst(compare(RETRIEVAL, scores), worst), sentence


@dataclass(frozen=True)
class Searches:
    """Searches of some texts by the new model, by a map and by the old model.

    Attributes:
        adaptation: The models and the index.
        reembedded: The search if the new model encodes all texts again.
        documents: The numbers of the texts that are searched. Mapped documents are searched among
            texts to which no map was fitted.
        wanted_QK: The texts that re-embedding finds, as positions in `documents`.
    """

    adaptation: Adaptation
    reembedded: Search
    documents: Array
    wanted_QK: Array

    def by_map(self, chosen: VectorMap) -> Search:
        """Return the search with a map."""
        old, new = self.by_old_model(), self.reembedded
        if self.adaptation.encodes == "documents":
            return replace(old, documents_NE=chosen(new.documents_NE))
        return replace(old, queries_QE=chosen(new.queries_QE))

    def by_old_model(self) -> Search:
        """Return the search of the old model in its index."""
        documents_NE = self.adaptation.indexed.old_NE[self.documents]
        own_Q = self.reembedded.own_Q
        return Search(documents_NE[own_Q], documents_NE, own_Q, self.adaptation.similarity)

    def recall(self, search: Search) -> Array:
        """Return the share of re-embedding's texts that a search finds, [Q]."""
        return overlap(search.nearest(), self.wanted_QK)


def _percent(share: tuple[float, float, float]) -> str:
    value, low, high = share
    return f"{value:.1%} (between {low:.1%} and {high:.1%} with 95% confidence)"


def _with_worst(result: EvaluationResult, worst: list[Mistake]) -> EvaluationResult:
    """Return the result with the worst texts of the adapted model."""
    evaluations = [
        row.model_copy(update={"worst": worst}) if row.model == ADAPTED else row
        for row in result.evaluations
    ]
    return replace(result, evaluations=evaluations)
