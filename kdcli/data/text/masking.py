"""Mask text for masked language models, with new masks in every pass or the same in all.

The mask of a row depends only on (seed, row, pass), so neither resuming nor the number of processes
changes it. As in BERT's code, a fixed number of a row's ordinary tokens is chosen, rather than each
token with some probability. Of the chosen tokens, 80 % become the mask token, 10 % become a random
token, and 10 % stay the same.
"""

import re
import unicodedata
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from kdcli.data.augment.words import SPACELESS
from kdcli.data.batches import BatchOrder, BucketOrder, Indices
from kdcli.errors import UsageError
from kdcli.types import IGNORED, Array, Batch, Examples

# Shares of the chosen tokens that become the mask token and a random token (Devlin et al. 2018,
# section 3.1).
AS_MASK, AS_RANDOM = 0.8, 0.1
# The prefix that marks pieces in a kind of vocabulary. True: the marked piece begins a word; False:
# it continues a word (WordPiece).
MARKS = {"##": False, "Ġ": True, "▁": True}
# Maximum number of pieces that are masked together. Words have fewer pieces, but without a limit, a
# long web address or text in a script that `begins_V` does not know would be masked as a whole.
MAX_WORD_PIECES = 10

_BYTE = {letter: byte for byte, letter in bytes_to_unicode().items()}
_FALLBACK = re.compile("<0x([0-9A-F]{2})>")  # A byte in a SentencePiece vocabulary.


@dataclass(frozen=True)
class MaskVocabulary:
    """The tokens of a tokenizer, sorted for masking.

    Attributes:
        mask_id: The mask token.
        special_V: True for tokens that are never masked.
        plain_ids: All other tokens. Random tokens are drawn from them.
        begins_V: True for tokens that begin a word. In scripts without spaces every piece begins
            a word, and so does every token of a vocabulary without pieces.
    """

    mask_id: int
    special_V: Array
    plain_ids: Array
    begins_V: Array


@dataclass(frozen=True)
class Masked:
    """Examples with some tokens masked, and `labels` [B, L]: the original token, or IGNORED.

    Indices beyond the last row are rows of later passes, `pass * len + row`, as `PassOrder` returns
    them. A pass over held-out rows has the indices 0 to `len - 1`, so it always has the same masks.

    Attributes:
        examples: The rows without masks.
        vocabulary: The tokens of the tokenizer.
        share: The share of a row's tokens to choose. At least one token is chosen.
        whole_words: Whether to choose the pieces of a word together, at most `MAX_WORD_PIECES`.
        static: Whether to use the same masks in all passes.
        seed: The seed of the masks.
    """

    examples: Examples
    vocabulary: MaskVocabulary
    share: float
    whole_words: bool
    static: bool
    seed: int

    def __post_init__(self) -> None:
        check_share(self.share)

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def lengths(self) -> Array | None:
        """The number of tokens of each row, if the examples know it."""
        return getattr(self.examples, "lengths", None)

    def batch(self, indices: Array) -> Batch:
        """Collate rows: `input_ids` is masked, and `labels` and `labelled` are added."""
        passes, rows = np.divmod(np.asarray(indices), len(self))
        if self.static:
            passes = np.zeros_like(passes)
        batch = self.examples.batch(rows)
        ids_BL = batch["input_ids"].numpy()
        draws_3BL = self._draw(rows, passes, ids_BL.shape[1])
        maskable_BL = ~self.vocabulary.special_V[ids_BL]
        if "sources" in batch:
            # Only target tokens are predicted, including the end token. The source is given.
            maskable_BL = np.arange(ids_BL.shape[1]) >= batch["sources"].numpy()[:, None]
        mask = batch.get("attention_mask")
        if mask is not None and mask.dim() == 2:
            maskable_BL &= mask.numpy() != 0
        begins_BL = np.ones_like(maskable_BL)
        if self.whole_words:
            begins_BL = self._begin_words(ids_BL, maskable_BL)
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

    def _begin_words(self, ids_BL: Array, maskable_BL: Array) -> Array:
        """Mark the tokens that begin a word, [B, L] bool. Long words are divided."""
        begins_BL = self.vocabulary.begins_V[ids_BL] | ~maskable_BL
        begins_BL[:, 0] = True
        # A token after a special token always begins a word.
        begins_BL[:, 1:] |= ~maskable_BL[:, :-1]
        position_L = np.arange(ids_BL.shape[1])
        first_BL = np.maximum.accumulate(np.where(begins_BL, position_L, 0), 1)
        return np.asarray(begins_BL | ((position_L - first_BL) % MAX_WORD_PIECES == 0))

    def _draw(self, rows: Array, passes: Array, length: int) -> Array:
        """Draw three uniform numbers in [0, 1) for each token.

        They decide whether the token is chosen, how it is replaced, and by which random token.
        """
        draws_3BL = np.empty((3, len(rows), length))
        for at, (row, number) in enumerate(zip(rows.tolist(), passes.tolist(), strict=True)):
            # A counter-based generator gives each (row, pass) its own stream.
            stream = np.random.Philox(key=[self.seed, 0], counter=[0, 0, row, number])
            draws_3BL[:, at] = np.random.Generator(stream).random((3, length))
        return draws_3BL


@dataclass(frozen=True)
class PassOrder:
    """An order whose indices contain the pass, `pass * n + example`, as `Masked` expects them."""

    order: BatchOrder | BucketOrder

    def indices(self, step: int) -> Indices:
        """Return the examples of a step (1-based), [batch_size] int64."""
        return self.order.indices(step) + self.order.passes(step) * self.order.n


def check_share(share: float) -> None:
    """Raise a UsageError for a share of masked tokens that is not between 0 and 1."""
    if not 0 < share < 1:
        message = f"the share of masked tokens must lie between 0 and 1, got {share}"
        raise UsageError(message, "BERT's is 0.15")


def mask_vocabulary(tokenizer: PreTrainedTokenizerBase, source: str) -> MaskVocabulary:
    """Sort the tokens of a tokenizer for masking. `source` names the model in errors.

    Raises:
        UsageError: The tokenizer has no mask token.
    """
    if tokenizer.mask_token_id is None:
        message = f"the tokenizer of {source} has no mask token, so its text cannot be masked"
        raise UsageError(message, "choose a method that reads plain text, such as minilm")
    words = tokenizer.get_vocab()
    size = max(words.values()) + 1
    special_V = np.zeros(size, dtype=bool)
    special_V[tokenizer.all_special_ids] = True
    known = np.array(sorted(words.values()))
    # Each of these marks is itself a token in some vocabulary, so the most common prefix decides.
    counts = {mark: sum(word.startswith(mark) for word in words) for mark in MARKS}
    mark = max(counts, key=counts.__getitem__)
    begins_V = np.ones(size, dtype=bool)
    if counts[mark]:
        for word, number in words.items():
            begins_V[number] = word.startswith(mark) == MARKS[mark]
            # Otherwise, if marks begin words, a sentence without spaces would be one word.
            if MARKS[mark] and _is_spaceless(word, is_byte_level=mark == "Ġ"):
                begins_V[number] = True
    plain_ids = known[~special_V[known]]
    return MaskVocabulary(int(tokenizer.mask_token_id), special_V, plain_ids, begins_V)


def _is_spaceless(piece: str, *, is_byte_level: bool) -> bool:
    """Whether a piece begins with a letter, not a combining mark, of a script without spaces."""
    if is_byte_level:
        spelled = bytes(_BYTE.get(letter, 0) for letter in piece)
    else:
        fallback = _FALLBACK.fullmatch(piece)
        spelled = bytes.fromhex(fallback[1]) if fallback else piece.encode()
    # A piece may hold only the first bytes of a character. All completions have the same script.
    sizes = ((4, b"\xf0"), (3, b"\xe0"), (2, b"\xc2"))
    size = next((size for size, first_byte in sizes if spelled[:1] >= first_byte), 1)
    first = spelled[:size].ljust(size, b"\x80").decode(errors="ignore")
    return bool(SPACELESS.match(first)) and not unicodedata.category(first[0]).startswith("M")


def _choose(draws_BL: Array, maskable_BL: Array, begins_BL: Array, share: float) -> Array:
    """Choose words in random order until their tokens are nearest to the share, [B, L] bool.

    At least one word of each row is chosen.
    """
    rows, length = draws_BL.shape
    count_B1 = np.maximum(np.rint(share * maskable_BL.sum(1, keepdims=True)), 1)
    position_BL = np.broadcast_to(np.arange(length), (rows, length))
    first_BL = np.maximum.accumulate(np.where(begins_BL, position_BL, 0), axis=1)
    word_BL = first_BL + np.arange(rows)[:, None] * length
    size_BL = np.bincount(word_BL.ravel(), minlength=rows * length)[word_BL]
    rank_BL = np.where(maskable_BL, np.take_along_axis(draws_BL, first_BL, 1), np.inf)
    order_BL = np.argsort(rank_BL, axis=1, kind="stable")
    # In this order the pieces of a word are neighbours, and the position of the first piece is the
    # number of tokens that were chosen before it.
    sorted_first_BL = np.take_along_axis(first_BL, order_BL, 1)
    new_BL = np.ones_like(begins_BL)
    new_BL[:, 1:] = sorted_first_BL[:, 1:] != sorted_first_BL[:, :-1]
    before_BL = np.maximum.accumulate(np.where(new_BL, position_BL, 0), axis=1)
    taken_BL = 2 * before_BL + np.take_along_axis(size_BL, order_BL, 1) <= 2 * count_B1
    chosen_BL = np.empty_like(maskable_BL)
    np.put_along_axis(chosen_BL, order_BL, taken_BL | (before_BL == 0), 1)
    return chosen_BL & maskable_BL
