"""Predict replacements for each word of a text with a masked language model.

A query masks a single word, so a text of n words costs n forward passes of its length. Batches hold
queries of the same length from any texts, so there is no padding and no text influences another.
Equal queries are computed once, and the head computes only the masked positions.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import BaseModelOutput

from kdcli.data.augment.words import TokenizedWords, Word, tokenize_words, whole_words
from kdcli.errors import UsageError

# Tokens per query. Longer texts are divided into pieces of this size.
WINDOW = 256
BATCH_TOKENS = {"cpu": 2048, "cuda": 65_536}  # Larger batches are not faster.
# Extra predictions per query, because the masked word and its other spellings are removed.
SPARE_PREDICTIONS = 6


class _Query(NamedTuple):
    """A row with one masked token.

    Attributes:
        ids: The token ids as the bytes of an int32 array.
        place: The position of the masked token.
        spaceless: Whether to predict words of scripts without spaces.
    """

    ids: bytes
    place: int
    spaceless: bool


class MaskedWords:
    """Predict words with a masked language model.

    Args:
        model: A model with a masked language modelling head. It is moved to `device` and set to
            evaluation mode.
        tokenizer: Its tokenizer. The model to be trained may have another one.
        device: The device of the computation.
        dtype: The number format of the computation.

    Raises:
        UsageError: The tokenizer is slow, or has no mask token or no token that is a whole word.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        known = whole_words(tokenizer)
        name = type(tokenizer).__name__
        if tokenizer.mask_token_id is None:
            hint = (
                "give a masked language model, such as the checkpoint that the teacher was "
                "fine-tuned from"
            )
            raise UsageError(f"{name} has no mask token, so its model cannot predict words", hint)
        if not known:
            raise UsageError(
                f"{name} has no token that is a word, so its model cannot predict words"
            )
        self.model = model.to(device).eval()
        self.tokenizer = tokenizer
        self.device = device
        self._words = {number: word for number, (word, _) in known.items()}
        self._ids_of = {
            kind: torch.tensor(
                [n for n, (_, s) in known.items() if s == kind], dtype=torch.int64, device=device
            )
            for kind in (False, True)
        }
        frame = tokenizer("a", return_special_tokens_mask=True)
        special = frame["special_tokens_mask"]
        self._before = frame["input_ids"][: special.index(0)]
        self._after = frame["input_ids"][len(special) - special[::-1].index(0) :]
        positions = getattr(model.config, "max_position_embeddings", None)
        # RoBERTa and related models number positions from the padding id + 1.
        window = (
            min(WINDOW, positions - 2) if isinstance(positions, int) and positions > 2 else WINDOW
        )
        self._room = window - len(self._before) - len(self._after)

    def candidates(
        self, texts: Sequence[str], count: int
    ) -> list[list[tuple[Word, list[str] | None]]]:
        """Predict the `count` most likely replacements of each word of each text.

        The most likely word comes first. Predictions never include the word itself in any case,
        pieces of words, or special tokens. There may be fewer than `count`. The result is None for
        a word of several tokens.
        """
        tokenized = tokenize_words(texts, self.tokenizer)
        queries = [[self._query(text, word) for word in text.words] for text in tokenized]
        likely = self._predict(
            [q for text_queries in queries for q in text_queries if q is not None],
            count + SPARE_PREDICTIONS,
        )

        def others(text: str, word: Word, query: _Query | None) -> list[str] | None:
            if query is None:
                return None
            spelling = text[word.begin : word.end].casefold()
            return [w for w in likely[query] if w.casefold() != spelling][:count]

        return [
            [
                (word, others(text, word, query))
                for word, query in zip(tokens.words, text_queries, strict=True)
            ]
            for text, tokens, text_queries in zip(texts, tokenized, queries, strict=True)
        ]

    def _query(self, text: TokenizedWords, word: Word) -> _Query | None:
        """Mask a word; None if it is not a single token."""
        if word.token is None:
            return None
        first = word.token // self._room * self._room
        row = [*self._before, *text.ids[first : first + self._room], *self._after]
        place = len(self._before) + word.token - first
        row[place] = self.tokenizer.mask_token_id
        return _Query(np.array(row, dtype=np.int32).tobytes(), place, word.spaceless)

    def _predict(self, queries: Sequence[_Query], count: int) -> dict[_Query, list[str]]:
        """Predict the likely words of each query, in batches of the same length and vocabulary."""

        def group(query: _Query) -> tuple[int, bool]:
            return len(query.ids) // 4, query.spaceless

        likely: dict[_Query, list[str]] = {}
        for (length, spaceless), grouped in itertools.groupby(
            sorted(dict.fromkeys(queries), key=group), key=group
        ):
            members = list(grouped)
            ids_W = self._ids_of[spaceless]
            size = max(1, BATCH_TOKENS.get(self.device.type, BATCH_TOKENS["cpu"]) // length)
            for begin in range(0, len(members), size):
                batch = members[begin : begin + size]
                rows_BL = np.frombuffer(b"".join(q.ids for q in batch), dtype=np.int32).reshape(
                    len(batch), length
                )
                places_B = torch.tensor([q.place for q in batch])
                logits_BV = self.logits(torch.from_numpy(rows_BL.astype(np.int64)), places_B)
                top_BK = ids_W[logits_BV[:, ids_W].topk(min(count, len(ids_W))).indices].tolist()
                likely |= {
                    query: [self._words[i] for i in top_K]
                    for query, top_K in zip(batch, top_BK, strict=True)
                }
        return likely

    @torch.inference_mode()
    def logits(self, rows_BL: Tensor, places_B: Tensor) -> Tensor:
        """Compute the logits at one position of each unpadded row, [B, V] float32.

        The head computes only these positions.
        """
        rows_BL, places_B = rows_BL.to(self.device), places_B.to(self.device)

        def gather(
            module: torch.nn.Module, arguments: object, out: BaseModelOutput
        ) -> BaseModelOutput:
            # Pass [B, 1, D] to the head instead of [B, L, D].
            out.last_hidden_state = out.last_hidden_state[torch.arange(len(places_B)), places_B][
                :, None
            ]
            return out

        handle = self.model.base_model.register_forward_hook(gather)
        try:
            out = self.model(
                input_ids=rows_BL, attention_mask=torch.ones_like(rows_BL), return_dict=True
            )
        finally:
            handle.remove()
        logits_BV: Tensor = out.logits[:, 0].float()
        return logits_BV
