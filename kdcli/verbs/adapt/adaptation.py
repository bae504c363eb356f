"""Choose a map from a new model's vectors to an index, and verify it by searches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from kdcli.data.labelled.partition import VERIFICATION, PartSize, choose_partition, text_hashes
from kdcli.data.text.sentences import Texts, read_texts
from kdcli.engine.session import Session
from kdcli.errors import UsageError
from kdcli.messages import warn
from kdcli.metrics.bootstrap import paired_bootstrap
from kdcli.metrics.retrieval import CUT, similarities
from kdcli.report.schema import Mistake
from kdcli.report.sections.summary import NEIGHBOURS
from kdcli.targets.vector_shards import read_vectors
from kdcli.types import Array
from kdcli.verbs.adapt.maps import VectorMap, fit_maps
from kdcli.verbs.adapt.settings import AdaptRecipe
from kdcli.workloads.beir import (
    QUERIES_AT_ONCE,
    RETRIEVAL,
    Index,
    Retrieval,
    corpus_address,
    is_retrieval,
    read_retrieval,
    retrieval_scores,
)
from kdcli.workloads.embedder import Embedder, cosines
from kdcli.workloads.rankings import ranking_scores
from kdcli.workloads.scores import EvaluationResult, compare

REEMBEDDED, ADAPTED, OLD = "re-embedding", "adapted", "old model"
SHARED, RECALL = f"{NEIGHBOURS}@{CUT}", f"recall@{CUT}"
"""The metrics of the tasks `neighbours` and `retrieval`."""
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
        """Fit every kind of map, and return the best one on the selection texts.

        Returns:
            The map, and a sentence on all maps.

        Raises:
            UsageError: The map brings a text hardly nearer to its own row than to other rows.
        """
        fitted, selection, _ = self.indexed.parts
        maps = list(fit_maps(self.new_NE[fitted], self.indexed.old_NE[fitted]))
        searches = self.searching(selection)
        shares = [float(searches.share_found(searches.by_map(each)).mean()) for each in maps]
        chosen = maps[int(np.argmax(shares))]
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
            warn(f"about {wrong:.0%} of the rows of {source} fit other texts")
        shown = ", ".join(
            f"{each.name}{each.details} {share:.3f}"
            for each, share in zip(maps, shares, strict=True)
        )
        return chosen, (
            f"the {chosen.name} map has the best {SHARED} on {len(selection):,} selection texts, "
            f"after a fit to {len(fitted):,} other texts: {shown}"
        )

    def verify(self, chosen: VectorMap) -> tuple[EvaluationResult, str]:
        """Compare a map with re-embedding on the verification texts, and write a sentence."""
        numbers, indexed = self.indexed.parts[2], self.indexed
        searches = self.searching(numbers)
        adapted = searches.by_map(chosen)
        found_QK, wanted_QK = adapted.nearest(), searches.wanted_QK
        shares = {
            REEMBEDDED: np.ones(len(numbers)),
            ADAPTED: overlap(found_QK, wanted_QK),
            OLD: searches.share_found(searches.by_old_model()),
        }
        scores = {
            name: ranking_scores(NEIGHBOURS, VERIFICATION, {SHARED: shared_Q})
            for name, shared_Q in shares.items()
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
            1 - shares[ADAPTED],
            LISTED,
        )
        own = (adapted.share_nearer() == 0).mean()
        sentence = (
            f"{len(numbers):,} verification texts find "
            f"{_percent(kept_share(shares[ADAPTED], shares[REEMBEDDED]))} of the {CUT} nearest "
            f"of {len(searches.documents):,} texts that they find with re-embedding. The old model "
            f"finds {shares[OLD].mean():.1%} of them. {own:.1%} of the texts find their own row "
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

    def share_found(self, search: Search) -> Array:
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


MAX_TEXTS = 20_000
"""Maximum number of texts, unless the recipe gives one."""
SELECTION, VERIFIED = PartSize(1000, 0.1), PartSize(2000, 0.2)
"""Maximum numbers of texts that choose the map and that verify it."""
CHECKED_TEXTS, SAME_MODEL = 64, 0.9
"""Number of texts on which `--index-model` is checked, and their least median cosine."""


@dataclass(frozen=True)
class IndexedTexts:
    """The texts of an index, and their division into parts.

    Attributes:
        texts: The texts.
        old_NE: Their vectors by the old model.
        retrieval: Queries with relevant documents, if there are any.
        source: The vectors, as the user named them.
    """

    texts: Texts
    old_NE: Array
    retrieval: Retrieval | None
    source: str

    @cached_property
    def parts(self) -> tuple[Array, Array, Array]:
        """The numbers of the texts that fit the maps, choose one, and verify it."""
        hashes = text_hashes(self.texts.texts)
        partition = choose_partition(
            self.texts.pools(hashes[:0]),
            selection=SELECTION,
            verification=VERIFIED,
            seed=0,
        )
        parts = (
            partition.is_training(hashes),
            partition.is_evaluated(hashes, "validation"),
            partition.is_evaluated(hashes, VERIFICATION),
        )
        fitted, selection, verification = map(np.flatnonzero, parts)
        return fitted, selection, verification

    def texts_at(self, numbers: Array) -> list[str]:
        """Return some of the texts."""
        return [self.texts.texts[n] for n in numbers]


def read_index(recipe: AdaptRecipe) -> IndexedTexts:
    """Read the texts and their vectors.

    Raises:
        UsageError: They cannot be read or do not match.
    """
    source, vectors, data = str(recipe.data.source), str(recipe.vectors), recipe.data
    numbers: dict[object, int] | None = None
    if not is_retrieval(source):
        rows = data.rows or MAX_TEXTS
        texts = read_texts(source, column=data.column, unit="document", rows=rows)
        retrieval = None
    elif data.rows is not None or data.column is not None:
        raise UsageError(
            f"data.rows and data.column are for texts, and {source} holds queries and documents",
            f"omit them, or give the documents alone: --data {corpus_address(source)}",
        )
    else:
        retrieval = read_retrieval(source)
        numbers = {key: number for number, key in enumerate(retrieval.documents)}
        documents = list(retrieval.documents.values())
        count, none_N = len(documents), np.full(len(documents), -1)
        roles = ["document"] * count
        texts = Texts(documents, roles, none_N, none_N[:, None], np.arange(count), count)
    old_NE = read_vectors(vectors, texts, source, data.column, numbers)
    if old_NE.shape[1] < 2:
        raise UsageError(
            f"{vectors} holds vectors of one number, which cannot be searched",
            "give an array with a row of several numbers for each text",
        )
    return IndexedTexts(texts, old_NE, retrieval, vectors)


def check_size(indexed: IndexedTexts, new: Embedder, recipe: AdaptRecipe) -> None:
    """Check that there are enough texts to learn a map from.

    Raises:
        UsageError: There are fewer texts than dimensions.
    """
    width, (fitted, *_) = new.format.width(new.shape.hidden), indexed.parts
    if len(fitted) <= width:
        count = len(indexed.texts)
        raise UsageError(
            f"{count:,} texts are too few: {len(fitted):,} of them would fit the map, and a linear "
            f"map fits up to {width:,} texts exactly, whatever their vectors are, because the "
            f"vectors of {new.source} have {width:,} numbers",
            f"give at least {2 * width:,} texts of the index; they need no labels"
            if (recipe.data.rows or MAX_TEXTS) > count
            else f"raise data.rows to at least {2 * width:,}",
        )


def check_index_model(old: Embedder, indexed: IndexedTexts, session: Session) -> None:
    """Check on some texts that the old model made the index.

    Raises:
        UsageError: Its vectors differ from the rows of the index.
    """
    numbers = np.sort(indexed.parts[1][:CHECKED_TEXTS])
    made_NE = old.vectors(indexed.texts_at(numbers), "document", session)
    rows_NE = indexed.old_NE[numbers]
    if made_NE.shape[1] != rows_NE.shape[1]:
        found = f"its vectors have {made_NE.shape[1]} numbers, and the rows {rows_NE.shape[1]}"
    else:
        median = float(np.median(cosines(made_NE, rows_NE)))
        if median >= SAME_MODEL:
            return
        found = f"the median cosine of its vectors and {len(numbers)} rows is {median:.2f}"
    raise UsageError(
        f"{old.source} did not make {indexed.source}: {found}",
        "give the model of the index as --index-model, or omit it: the map needs only the vectors; "
        "check that the rows are in the order of the texts",
    )
