"""Masked text: the tokens that a masked language model has to predict, drawn anew in every pass or once for all.

The mask of a row is a function of (seed, row, pass) alone, so neither resuming nor the number of processes changes it.
As in BERT's own code a fixed number of a row's ordinary tokens is chosen, `share` of them, and not each with a
probability; of those 80 % become the mask token, 10 % a random one, 10 % stay.
"""

import re
import unicodedata
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from kdcli.data.augment.words import SPACELESS
from kdcli.data.batches import BatchOrder, BucketOrder, Indices
from kdcli.errors import UsageError
from kdcli.types import IGNORED, Batch, Examples

# Shares of the chosen tokens that become the mask token, and a random one (Devlin et al. 2018, §3.1).
AS_MASK, AS_RANDOM = 0.8, 0.1
# Prefix of tokens in a kind of vocabulary -> True if it begins a word, False if it goes on with one (WordPiece).
MARKS = {"##": False, "Ġ": True, "▁": True}
# Pieces that are masked together at most. Words have fewer; web addresses and scripts that `begins_V` does not know
# would otherwise be masked in one piece, however long.
LONGEST_WORD = 10

_BYTE = {letter: byte for byte, letter in bytes_to_unicode().items()}
_FALLBACK = re.compile("<0x([0-9A-F]{2})>")  # a byte in a SentencePiece vocabulary

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class MaskVocabulary:
    """What masking needs of a tokenizer."""

    mask_id: int
    special_V: Array  # True for ids that are never masked
    plain_ids: Array  # the other ones, from which random tokens are drawn
    begins_V: Array  # True for ids that begin a word, in scripts without spaces every piece; all ids without pieces


@dataclass(frozen=True)
class Masked:
    """Examples with some tokens masked, and `labels` [B, L]: the token that was there, or IGNORED. Indices beyond the
    last row are rows of later passes: `pass * len + row`, as `PassOrder` gives them. A pass over held-out rows counts
    from 0 to `len` and thus sees the same masks every time."""

    examples: Examples
    vocabulary: MaskVocabulary
    share: float  # of a row's tokens that are chosen, at least one
    whole_words: bool  # pieces of a word, `LONGEST_WORD` at most, are chosen together; as near to the share as they get
    static: bool  # all passes have the same masks
    seed: int

    def __post_init__(self) -> None:
        check_share(self.share)

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def lengths(self) -> Array | None:
        """Tokens of each row, if the rows know them."""
        return getattr(self.examples, "lengths", None)

    def batch(self, indices: Array) -> Batch:
        """The rows of these indices, `input_ids` masked, `labels` and `labelled`."""
        passes, rows = np.divmod(np.asarray(indices), len(self))
        batch = self.examples.batch(rows)
        ids_BL = batch["input_ids"].numpy()
        draws_3BL = self._draws(
            rows, np.zeros_like(passes) if self.static else passes, ids_BL.shape[1]
        )
        maskable_BL = ~self.vocabulary.special_V[ids_BL]
        if "sources" in batch:
            # Of a generated text the end is predicted too, of its source nothing.
            maskable_BL = np.arange(ids_BL.shape[1]) >= batch["sources"].numpy()[:, None]
        mask = batch.get("attention_mask")
        if mask is not None and mask.dim() == 2:
            maskable_BL &= mask.numpy() != 0
        begins_BL = np.ones_like(maskable_BL)
        if self.whole_words:
            # A token after a special one always begins a word.
            begins_BL = self.vocabulary.begins_V[ids_BL] | ~maskable_BL
            begins_BL[:, 0] = True
            begins_BL[:, 1:] |= ~maskable_BL[:, :-1]
            at_L = np.arange(ids_BL.shape[1])
            begins_BL |= (
                at_L - np.maximum.accumulate(np.where(begins_BL, at_L, 0), 1)
            ) % LONGEST_WORD == 0
        chosen_BL = _choose(draws_3BL[0], maskable_BL, begins_BL, self.share)
        plain_ids = self.vocabulary.plain_ids
        random_BL = plain_ids[(draws_3BL[2] * len(plain_ids)).astype(np.int64)]
        masked_BL = np.where(draws_3BL[1] < AS_MASK + AS_RANDOM, random_BL, ids_BL)
        masked_BL = np.where(draws_3BL[1] < AS_MASK, self.vocabulary.mask_id, masked_BL)
        return {
            **batch,
            "input_ids": torch.from_numpy(np.where(chosen_BL, masked_BL, ids_BL)),
            "labels": torch.from_numpy(np.where(chosen_BL, ids_BL, IGNORED)),
            "labelled": torch.from_numpy(np.flatnonzero(chosen_BL)),
        }

    def _draws(self, rows: Array, passes: Array, length: int) -> Array:
        """Three uniform numbers in [0, 1) for each token: rank for being chosen, what becomes of it, random token."""
        draws = np.empty((3, len(rows), length))
        for place, (row, number) in enumerate(zip(rows.tolist(), passes.tolist(), strict=True)):
            # A counter-based generator: every (row, pass) is a stream of its own.
            stream = np.random.Philox(key=[self.seed, 0], counter=[0, 0, row, number])
            draws[:, place] = np.random.Generator(stream).random((3, length))
        return draws


@dataclass(frozen=True)
class PassOrder:
    """An order with the pass of each example, `pass * n + example`, as `Masked` wants it."""

    order: BatchOrder | BucketOrder

    def indices(self, step: int) -> Indices:
        """The examples of a step (1-based), [batch_size] int64; modulo n they are those of the order."""
        return self.order.indices(step) + self.order.passes(step) * self.order.n


def check_share(share: float) -> None:
    """Raise a UsageError for a share of masked tokens that is not between 0 and 1."""
    if not 0 < share < 1:
        raise UsageError(
            f"the share of masked tokens must lie between 0 and 1, got {share}", "BERT's is 0.15"
        )


def tokens_of(tokenizer: PreTrainedTokenizerBase, source: str) -> MaskVocabulary:
    """What masking needs of a tokenizer; `source` names it in the message. Raises UsageError: it has no mask token."""
    if tokenizer.mask_token_id is None:
        message = f"the tokenizer of {source} has no mask token, so its text cannot be masked"
        raise UsageError(
            message, "methods that need no masked language model: minilm, minilmv2, tinybert"
        )
    words = tokenizer.get_vocab()
    size = max(words.values()) + 1
    special_V = np.zeros(size, dtype=bool)
    special_V[tokenizer.all_special_ids] = True
    known = np.array(sorted(words.values()))
    # All three marks are words of their own in some vocabulary: the commonest prefix is its mark.
    counts = {mark: sum(word.startswith(mark) for word in words) for mark in MARKS}
    mark = max(counts, key=counts.__getitem__)
    begins_V = np.ones(size, dtype=bool)
    if counts[mark]:
        for word, number in words.items():
            # Where words are marked at their beginning, a sentence without spaces would be one word.
            begins_V[number] = word.startswith(mark) == MARKS[mark] or (
                MARKS[mark] and _spaceless(word, mark == "Ġ")
            )
    return MaskVocabulary(
        int(tokenizer.mask_token_id), special_V, known[~special_V[known]], begins_V
    )


def _spaceless(piece: str, byte_level: bool) -> bool:
    """Whether a piece begins with a character, not a mark on one, of a script without spaces."""
    if byte_level:
        spelled = bytes(_BYTE.get(letter, 0) for letter in piece)
    else:
        fallback = _FALLBACK.fullmatch(piece)
        spelled = bytes.fromhex(fallback[1]) if fallback else piece.encode()
    # A piece may hold the first bytes of a character only: any completion is of the same script.
    size = next(
        (n for n, least in ((4, 0xF0), (3, 0xE0), (2, 0xC2)) if spelled[:1] >= bytes([least])), 1
    )
    first = spelled[:size].ljust(size, b"\x80").decode(errors="ignore")
    return bool(SPACELESS.match(first)) and not unicodedata.category(first[0]).startswith("M")


def _choose(draws_BL: Array, maskable_BL: Array, begins_BL: Array, share: float) -> Array:
    """True for chosen tokens: words in random order until they are nearest to the share, but at least one."""
    rows, length = draws_BL.shape
    count_B1 = np.maximum(np.rint(share * maskable_BL.sum(1, keepdims=True)), 1)
    at_BL = np.broadcast_to(np.arange(length), (rows, length))
    first_BL = np.maximum.accumulate(np.where(begins_BL, at_BL, 0), axis=1)
    word_BL = first_BL + np.arange(rows)[:, None] * length
    size_BL = np.bincount(word_BL.ravel(), minlength=rows * length)[word_BL]
    rank_BL = np.where(maskable_BL, np.take_along_axis(draws_BL, first_BL, 1), np.inf)
    order_BL = np.argsort(rank_BL, axis=1, kind="stable")
    # In that order the pieces of a word stand together, and its first one has as many chosen before it as its place.
    sorted_first_BL = np.take_along_axis(first_BL, order_BL, 1)
    new_BL = np.ones_like(begins_BL)
    new_BL[:, 1:] = sorted_first_BL[:, 1:] != sorted_first_BL[:, :-1]
    before_BL = np.maximum.accumulate(np.where(new_BL, at_BL, 0), axis=1)
    taken_BL = 2 * before_BL + np.take_along_axis(size_BL, order_BL, 1) <= 2 * count_B1
    chosen_BL = np.empty_like(maskable_BL)
    np.put_along_axis(chosen_BL, order_BL, taken_BL | (before_BL == 0), 1)
    return chosen_BL & maskable_BL
