"""An index of document vectors: whose vectors they are, and how they are stored."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from kdcli.disk import user_path
from kdcli.engine.session import Session
from kdcli.errors import UsageError
from kdcli.metrics.retrieval import similarities
from kdcli.targets.precomputed import read_npy
from kdcli.types import Array
from kdcli.workloads.embedder import Embedder
from kdcli.workloads.settings import VectorFormat

LEVELS = 255
"""Number of steps between the smallest and the largest value of a component in int8."""
RESCORED = 400
"""Number of documents whose binary vectors are compared with the query's own vector."""


class Index:
    """The vectors of documents that another model makes, or that a file holds.

    Attributes:
        source: The model or file.
        width: The number of components of a vector.
    """

    def __init__(self, source: str, width: int, compute: Callable[[], Array]) -> None:
        self.source, self.width = source, width
        self._compute = functools.cache(compute)

    def for_queries_of(self, model: Embedder) -> Array:
        """Return the vectors [N, E] that a model's queries search, cut as the model cuts its own.

        Raises:
            UsageError: The model's vectors have another width than the documents'.
        """
        own = model.format.width(model.model.config.hidden_size)
        if self.width != own:
            raise UsageError(
                f"the documents' vectors of {self.source} have {self.width} numbers, and those of "
                f"{model.source} have {own}",
                "give the documents of a model with the same width, or distil a student with it",
            )
        return model.cut(self._compute())


def open_index(
    source: str,
    documents: Sequence[str],
    pooling: str | None,
    session: Session,
    max_length: int | None = None,
) -> Index:
    """Open a model that encodes documents when they are needed, or a `.npy` file of their vectors.

    Raises:
        UsageError: The model cannot be loaded, or the file does not fit the documents.
    """
    if Path(source).suffix == ".npy":
        vectors_NE = read_npy(user_path(source), len(documents), "document")
        return Index(source, vectors_NE.shape[1], lambda: vectors_NE)
    model = Embedder.open_scored(source, pooling=pooling)
    width = model.format.width(model.model.config.hidden_size)
    return Index(source, width, lambda: model.vectors(documents, "document", session, max_length))


def document_scorer(d_NE: Array, similarity: str, stored: VectorFormat) -> Callable[[Array], Array]:
    """Store documents, and return a function from queries [Q, E] to scores [Q, N].

    * `int8`: each component of the documents has 256 levels between its smallest and its largest
      value. Queries stay in float32.
    * `binary`: the documents keep the signs of their components. The documents with the most signs
      in common with a query come first, and the best `RESCORED` of them are ranked by the product
      of the query's float32 vector and the document's signs.

    A larger score is better.
    """
    if stored == "float32":
        return lambda q_QE: similarities(q_QE, d_NE, similarity)
    if stored == "int8":
        stored_NE = _in_int8(d_NE)
        return lambda q_QE: similarities(q_QE, stored_NE, similarity)
    signs_NE = np.where(d_NE > 0, 1, -1).astype(np.float32)

    def by_signs(q_QE: Array) -> Array:
        common_QN = np.where(q_QE > 0, 1, -1).astype(np.float32) @ signs_NE.T
        scores_QN = similarities(q_QE, signs_NE, similarity)
        order_QN = np.argsort(-common_QN, axis=1, kind="stable")
        place_QN = np.argsort(order_QN, axis=1, kind="stable")
        # Documents that are not rescored stay behind the others, in the order of their signs.
        behind_QN = scores_QN.min() - 1 - place_QN
        return np.asarray(np.where(place_QN < RESCORED, scores_QN, behind_QN))

    return by_signs


def _in_int8(d_NE: Array) -> Array:
    """Round vectors to the levels of their components, and return them in float32."""
    low_E, high_E = d_NE.min(0), d_NE.max(0)
    step_E = np.maximum((high_E - low_E) / LEVELS, 1e-12)
    codes_NE = np.round((d_NE - low_E) / step_E) - 128
    stored_NE = codes_NE.clip(-128, 127).astype(np.int8)
    return np.asarray((stored_NE.astype(np.float32) + 128) * step_E + low_E, dtype=np.float32)
