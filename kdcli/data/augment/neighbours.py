"""Words of similar meaning: the nearest by cosine among word vectors, of a GloVe file or of a
model's embeddings."""

from __future__ import annotations

import gzip
import itertools
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kdcli.data.augment.words import IDS_ONLY, whole_words, words_in
from kdcli.errors import UsageError

# Lines of a GloVe file whose words may be neighbours: the rest are names and misspellings, and
# would cost a gigabyte.
MOST_FREQUENT = 100_000
WORDS_PER_PRODUCT = 64  # Searched in one matrix product: 25 MB of similarities.
SPARE = 4  # Extra neighbours: the word itself and its other spellings are among the nearest.
_FORM = (
    "a GloVe file has lines of a word and its numbers with single spaces between, as many in each"
)

Vectors = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True)
class Neighbours:
    """Word vectors and the words that may be neighbours."""

    words: list[str]  # that may be neighbours, in the order of the file
    vectors_WD: Vectors  # theirs, of length 1
    vector_of: Callable[
        [Sequence[str]], Vectors
    ]  # [B, D], zero for an unknown word; not of length 1
    note: str  # where they come from, for the log

    def nearest(self, words: Sequence[str], count: int) -> list[list[str]]:
        """The `count` nearest neighbours of each word, or fewer, nearest first; never the word
        itself in any case."""
        most = min(count + SPARE, len(self.words))
        if not most:
            return [[] for _ in words]
        nearest: list[list[str]] = []
        for begin in range(0, len(words), WORDS_PER_PRODUCT):
            portion = words[begin : begin + WORDS_PER_PRODUCT]
            vectors_BD = unit(self.vector_of(portion))
            near_BW = vectors_BD @ self.vectors_WD.T
            top_BK = np.argpartition(-near_BW, most - 1, axis=1)[:, :most]
            order_BK = np.argsort(
                -np.take_along_axis(near_BW, top_BK, axis=1), axis=1, kind="stable"
            )
            for word, vector_D, top_K in zip(
                portion, vectors_BD, np.take_along_axis(top_BK, order_BK, 1), strict=True
            ):
                others = (
                    self.words[i] for i in top_K if self.words[i].casefold() != word.casefold()
                )
                nearest.append(list(dict.fromkeys(others))[:count] if vector_D.any() else [])
        return nearest

    @classmethod
    def of_embeddings(
        cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
    ) -> Neighbours:
        """Neighbours by a model's input embeddings, among words that are one token; a word of
        several has their mean. Raises UsageError: the tokenizer is a slow one, or has no whole
        words."""
        known = {number: word for number, (word, _) in whole_words(tokenizer).items()}
        if not known:
            raise UsageError(
                "the tokenizer has no token that is a word, so that there are no neighbours to "
                "choose"
            )
        embedding: Any = model.get_input_embeddings()
        table_VD = embedding.weight.detach().float().cpu().numpy()
        special = set(tokenizer.all_special_ids)

        def vector_of(words: Sequence[str]) -> Vectors:
            # A space before, as within a text: byte-level tokenizers hold it in the first piece.
            ids = tokenizer([f" {word}" for word in words], **IDS_ONLY)["input_ids"]
            pieces = [[i for i in row if i not in special] for row in ids]
            zero_D = np.zeros(table_VD.shape[1], dtype=np.float32)
            return np.stack([table_VD[row].mean(0) if row else zero_D for row in pieces])

        note = (
            f"neighbours by the input embeddings of the model, among its {len(known):,} whole words"
        )
        return cls(list(known.values()), unit(table_VD[list(known)]), vector_of, note)

    @classmethod
    def of_glove(cls, path: Path, words: Collection[str]) -> Neighbours:
        """Neighbours by a GloVe file: lines `word v1 ... vd`, UTF-8, perhaps gzipped. A first line
        of two numbers, as word2vec and fastText write it, is skipped. The first `MOST_FREQUENT`
        words may be neighbours. `words`: of the data, whose vectors are kept wherever they stand;
        in lower case where the file has only that. Raises UsageError: no such file, a broken line
        (named), or no vector of any of the words."""
        lowered = {word.lower() for word in words}
        vectors: dict[str, Vectors] = {}
        frequent = 0
        for number, (where, word, values) in enumerate(_lines(path)):
            if word in vectors or not (number < MOST_FREQUENT or word in words or word in lowered):
                continue
            try:
                vector_D = np.array([float(value) for value in values], dtype=np.float32)
            except ValueError as error:
                raise UsageError(f"{where}: {error}", _FORM) from None
            if not np.isfinite(vector_D).all():
                raise UsageError(f"{where}: a number of the vector is not finite", _FORM)
            vectors[word] = vector_D
            frequent += number < MOST_FREQUENT
        known = sum(word in vectors or word.lower() in vectors for word in words)
        if not known:
            message = (
                f"{path} has vectors of {len(vectors):,} words and none of the {len(words):,} "
                "words of the data"
            )
            hint = (
                "is it of another language? without the file, neighbours are those of the model's "
                "own embeddings"
            )
            raise UsageError(message, hint)
        zero_D = np.zeros_like(next(iter(vectors.values())))

        def vector_of(portion: Sequence[str]) -> Vectors:
            return np.stack(
                [vectors.get(word, vectors.get(word.lower(), zero_D)) for word in portion]
            )

        proper = {
            word: vectors[word] for word in itertools.islice(vectors, frequent) if _is_word(word)
        }
        vectors_WD = np.reshape(list(proper.values()), (-1, len(zero_D)))
        share = f"{known:,} of the {len(words):,} words of the data ({known / len(words):.1%})"
        note = f"neighbours by {path.name}, which has {share}"
        return cls(list(proper), unit(vectors_WD), vector_of, note)


def unit(vectors_BD: Vectors) -> Vectors:
    """Vectors of length 1, float32; a vector of length 0 stays."""
    length_B1 = np.linalg.norm(vectors_BD, axis=1, keepdims=True)
    scaled: Vectors = (vectors_BD / np.where(length_B1 > 0, length_B1, 1)).astype(np.float32)
    return scaled


def _is_word(text: str) -> bool:
    return [(word.begin, word.end) for word in words_in(text)] == [(0, len(text))]


def _lines(path: Path) -> Iterator[tuple[str, str, list[str]]]:
    """`file:line`, the word and its numbers as strings: most are not needed. Broken lines are
    UsageErrors."""
    width = 0
    try:
        with gzip.open(path, "rb") if path.name.endswith(".gz") else path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                where = f"{path}:{number}"
                try:
                    fields = raw.decode("utf-8").rstrip("\r\n ").split(" ")
                except UnicodeDecodeError as error:
                    raise UsageError(f"{where}: not UTF-8: {error}") from None
                if number == 1 and len(fields) == 2 and all(f.isdecimal() for f in fields):
                    continue
                width = width or len(fields) - 1
                # Some words hold spaces; the numbers are counted from the end.
                if len(fields) <= width or width == 0 or not fields[0]:
                    count = f"{len(fields) - 1} numbers where the lines before have {width}"
                    raise UsageError(
                        f"{where}: {count}" if width else f"{where}: no word with its vector", _FORM
                    )
                yield where, " ".join(fields[:-width]), fields[-width:]
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    if not width:
        raise UsageError(f"{path} holds no word vectors", _FORM)
