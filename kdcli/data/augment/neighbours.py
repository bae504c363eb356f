"""Find words of similar meaning: the nearest word vectors by cosine similarity.

The vectors come from a GloVe file or from a model's embeddings.
"""

from __future__ import annotations

import gzip
import itertools
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kdcli.data.augment.words import IDS_ONLY, whole_words, words_in
from kdcli.errors import UsageError

# Lines of a GloVe file whose words may be neighbours. The rest are names and misspellings, and
# would need a gigabyte of memory.
FREQUENT_WORDS = 100_000
WORDS_PER_PRODUCT = 64  # Words per matrix product, which needs 25 MB for the similarities.
# Extra neighbours per word, because the word itself and its other spellings are removed.
SPARE_NEIGHBOURS = 4
_FORM_HINT = (
    "each line of a GloVe file has a word and the same number of values, separated by single spaces"
)

WordVectors = NDArray[np.float32]


@dataclass(frozen=True)
class Neighbours:
    """Word vectors and the words that may be neighbours.

    Attributes:
        words: The words that may be neighbours, in the order of the file.
        vectors_WD: Their vectors, normalised to length 1.
        vector_of: Returns the vectors of any words, [B, D]. They are not normalised, and zero for
            unknown words.
        note: The origin of the vectors, for the log.
    """

    words: list[str]
    vectors_WD: WordVectors
    vector_of: Callable[[Sequence[str]], WordVectors]
    note: str

    def nearest(self, words: Sequence[str], count: int) -> list[list[str]]:
        """Return at most `count` neighbours of each word, nearest first.

        The word itself is never among them, in any case.
        """
        size = min(count + SPARE_NEIGHBOURS, len(self.words))
        if not size:
            return [[] for _ in words]
        nearest: list[list[str]] = []
        for begin in range(0, len(words), WORDS_PER_PRODUCT):
            portion = words[begin : begin + WORDS_PER_PRODUCT]
            vectors_BD = unit(self.vector_of(portion))
            near_BW = vectors_BD @ self.vectors_WD.T
            top_BK = np.argpartition(-near_BW, size - 1, axis=1)[:, :size]
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
        """Use a model's input embeddings as word vectors.

        The neighbours are words that are a single token. The vector of a word of several tokens is
        their mean.

        Raises:
            UsageError: The tokenizer is slow, or has no token that is a whole word.
        """
        known = {number: word for number, (word, _) in whole_words(tokenizer).items()}
        if not known:
            raise UsageError(
                "the tokenizer has no token that is a word, so there are no neighbours to choose "
                "from"
            )
        embedding = model.get_input_embeddings()
        table_VD = embedding.weight.detach().float().cpu().numpy()
        special = set(tokenizer.all_special_ids)

        def vector_of(words: Sequence[str]) -> WordVectors:
            # Put a space before each word, as within a text. Byte-level tokenizers include it in
            # the first piece.
            ids = tokenizer([f" {word}" for word in words], **IDS_ONLY)["input_ids"]
            pieces = [[i for i in row if i not in special] for row in ids]
            zero_D = np.zeros(table_VD.shape[1], dtype=np.float32)
            return np.stack([table_VD[row].mean(0) if row else zero_D for row in pieces])

        note = f"neighbours by the model's input embeddings, among its {len(known):,} whole words"
        return cls(list(known.values()), unit(table_VD[list(known)]), vector_of, note)

    @classmethod
    def of_glove(cls, path: Path, words: Collection[str]) -> Neighbours:
        """Read word vectors from a GloVe file.

        The file has lines `word v1 ... vd` in UTF-8 and may be gzipped. A first line of two
        numbers, as word2vec and fastText write it, is skipped. The first `FREQUENT_WORDS` words
        may be neighbours.

        Args:
            path: The file.
            words: The words of the data. Their vectors are kept even if they come later in the
                file. A word that is not in the file takes the vector of its lower-case form.

        Raises:
            UsageError: The file cannot be read, a line is malformed, or no word of the data has a
                vector.
        """
        lowered = {word.lower() for word in words}
        vectors: dict[str, WordVectors] = {}
        frequent = 0
        for number, (where, word, values) in enumerate(_lines(path)):
            if word in vectors or not (number < FREQUENT_WORDS or word in words or word in lowered):
                continue
            try:
                vector_D = np.array([float(value) for value in values], dtype=np.float32)
            except ValueError as error:
                raise UsageError(f"{where}: {error}", _FORM_HINT) from None
            if not np.isfinite(vector_D).all():
                raise UsageError(f"{where}: a number of the vector is not finite", _FORM_HINT)
            vectors[word] = vector_D
            frequent += number < FREQUENT_WORDS
        known = sum(word in vectors or word.lower() in vectors for word in words)
        if not known:
            raise UsageError(
                f"{path} has vectors of {len(vectors):,} words and none of the {len(words):,} "
                "words of the data",
                "is the file for another language? without a file, the model's embeddings are used",
            )
        zero_D = np.zeros_like(next(iter(vectors.values())))

        def vector_of(portion: Sequence[str]) -> WordVectors:
            return np.stack(
                [vectors.get(word, vectors.get(word.lower(), zero_D)) for word in portion]
            )

        neighbours = {
            word: vectors[word] for word in itertools.islice(vectors, frequent) if _is_word(word)
        }
        vectors_WD = np.reshape(list(neighbours.values()), (-1, len(zero_D)))
        share = f"{known:,} of the {len(words):,} words of the data ({known / len(words):.1%})"
        note = f"neighbours by {path.name}, which has {share}"
        return cls(list(neighbours), unit(vectors_WD), vector_of, note)


def unit(vectors_BD: WordVectors) -> WordVectors:
    """Scale vectors to length 1, float32. Zero vectors stay zero."""
    length_B1 = np.linalg.norm(vectors_BD, axis=1, keepdims=True)
    scaled: WordVectors = (vectors_BD / np.where(length_B1 > 0, length_B1, 1)).astype(np.float32)
    return scaled


def _is_word(text: str) -> bool:
    return [(word.begin, word.end) for word in words_in(text)] == [(0, len(text))]


def _lines(path: Path) -> Iterator[tuple[str, str, list[str]]]:
    """Yield the place (`file:line`) of each line, its word, and its numbers as strings.

    Most numbers are not needed, so they are not parsed here.

    Raises:
        UsageError: A line is malformed.
    """
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
                # Some words contain spaces, so the numbers are counted from the end.
                if len(fields) <= width or width == 0 or not fields[0]:
                    problem = f"{len(fields) - 1} numbers, but {width} in the lines before"
                    raise UsageError(
                        f"{where}: {problem}" if width else f"{where}: no word with its vector",
                        _FORM_HINT,
                    )
                yield where, " ".join(fields[:-width]), fields[-width:]
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    if not width:
        raise UsageError(f"{path} holds no word vectors", _FORM_HINT)
