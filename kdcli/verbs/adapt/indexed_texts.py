"""The texts of an index, and the checks that they can be adapted to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kdcli.data.labelled.partition import VERIFICATION, choose_partition, text_hashes
from kdcli.data.text.sentences import Texts, read_texts
from kdcli.engine.progress import Progress
from kdcli.engine.session import Session
from kdcli.errors import UsageError
from kdcli.targets.vector_shards import read_vectors
from kdcli.types import Array
from kdcli.verbs.adapt.settings import AdaptRecipe
from kdcli.workloads.beir import Retrieval, is_retrieval, read_retrieval
from kdcli.workloads.embedder import Embedder, cosines

MAX_TEXTS = 20_000
"""Maximum number of texts, unless the recipe gives one."""
SELECTION_TEXTS, VERIFICATION_TEXTS = 1000, 2000
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
            selection_rows=SELECTION_TEXTS,
            verification_rows=VERIFICATION_TEXTS,
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
    if not is_retrieval(source):
        rows, log = data.rows or MAX_TEXTS, Progress.log_fact
        texts = read_texts(source, column=data.column, unit="document", rows=rows, log=log)
        retrieval = None
    elif data.rows is not None or data.column is not None:
        raise UsageError(
            f"data.rows and data.column are for texts, and {source} holds queries and documents",
            f"omit them, or give the documents alone: --data {source}/corpus.jsonl",
        )
    else:
        retrieval = read_retrieval(source)
        documents = list(retrieval.documents.values())
        count, none_N = len(documents), np.full(len(documents), -1)
        roles = ["document"] * count
        texts = Texts(documents, roles, none_N, none_N[:, None], np.arange(count), count)
    old_NE = read_vectors(vectors, texts, source, data.column)
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
            f"{count:,} texts are too few: {len(fitted):,} of them would fit the map, and the "
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
