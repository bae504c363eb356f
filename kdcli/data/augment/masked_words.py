"""The words that a masked language model expects in the place of each word of a text.

One word is masked in a query and all others stand as they were, so a text of n words costs n forward passes of its
length. They are asked together: queries of the same length form a batch, of whichever texts they are, so nothing is
padded and what a text gets does not depend on the texts beside it. Equal queries are asked once, and the head sees the
masked positions alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kdcli.data.augment.words import Read, Span, read, whole_words
from kdcli.errors import UsageError

WINDOW = 256
"""Tokens of a query at most; of a longer text each word is asked within the piece of so many that holds it."""

BATCH_TOKENS = {"cpu": 2048, "cuda": 65_536}
"""Tokens of a batch; more does not make it faster."""

SPARE = 6
"""Words beyond those asked for: the masked one and its other spellings are among the likely ones."""


@dataclass(frozen=True)
class Candidates:
    """What may stand in the place of a word; `words` None where the model cannot be asked, for it is several tokens."""

    span: Span
    words: list[str] | None


@dataclass(frozen=True)
class _Query:
    """A row with a token masked: its ids (int32, as bytes), the place, which vocabulary is asked for."""

    ids: bytes
    place: int
    spaceless: bool

    @property
    def length(self) -> int:
        return len(self.ids) // 4


class MaskedWords:
    """A masked language model that is asked for words.

    Args:
        model: with the head of a masked language model; moved to `device` and put in eval mode.
        tokenizer: the model's; it need not be that of the model to be trained on the copies.
        dtype: under which it computes, weights staying what they are; float32 leaves it as it is.

    Raises:
        UsageError: the tokenizer is a slow one, has no mask token, or no token that is a word.
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
            raise UsageError(
                f"{name} has no mask token, so its model cannot be asked for words",
                "name a masked language model, such as the checkpoint that the teacher was fine-tuned from",
            )
        if not known:
            raise UsageError(f"{name} has no token that is a word, so its model cannot be asked for words")
        self.model, self.tokenizer, self.device, self.dtype = model.to(device).eval(), tokenizer, device, dtype
        self._words = {number: word for number, (word, _) in known.items()}
        self._ids_of = {
            spaceless: torch.tensor(
                [n for n, (_, s) in known.items() if s == spaceless], dtype=torch.int64, device=device
            )
            for spaceless in (False, True)
        }
        frame = tokenizer("a", return_special_tokens_mask=True)
        added = frame["special_tokens_mask"]
        begin, end = added.index(0), len(added) - added[::-1].index(0)
        self._before, self._after = frame["input_ids"][:begin], frame["input_ids"][end:]
        self._room = self._window() - len(self._before) - len(self._after)

    def _window(self) -> int:
        positions = getattr(self.model.config, "max_position_embeddings", None)
        # RoBERTa and its kin count positions from the padding id on.
        return min(WINDOW, positions - 2) if isinstance(positions, int) and positions > 2 else WINDOW

    def candidates(self, texts: Sequence[str], count: int) -> list[list[Candidates]]:
        """For each word of each text the `count` most likely words in its place, the likeliest first; never the word
        itself, in whichever case, nor pieces of words or special tokens; fewer where the vocabulary has not so many.
        """
        reads = read(texts, self.tokenizer)
        asked: dict[_Query, list[str]] = {}
        for one in reads:
            asked |= {query: [] for query in self._queries(one) if query is not None}
        self._answer(asked, count + SPARE)
        found = []
        for text, one in zip(texts, reads, strict=True):
            of_text = []
            for word, query in zip(one.words, self._queries(one), strict=True):
                own = text[word.span.begin : word.span.end].casefold()
                likely = None if query is None else [w for w in asked[query] if w.casefold() != own][:count]
                of_text.append(Candidates(word.span, likely))
            found.append(of_text)
        return found

    def _queries(self, one: Read) -> Iterator[_Query | None]:
        """One for each word of a text; None where it is several tokens."""
        for word in one.words:
            if word.token is None:
                yield None
                continue
            first = word.token // self._room * self._room
            row = [*self._before, *one.ids[first : first + self._room], *self._after]
            place = len(self._before) + word.token - first
            row[place] = self.tokenizer.mask_token_id
            yield _Query(np.array(row, dtype=np.int32).tobytes(), place, word.span.spaceless)

    def _answer(self, asked: dict[_Query, list[str]], count: int) -> None:
        """Put the likely words of each query in its place, in batches of queries of one length and vocabulary."""

        def group(query: _Query) -> tuple[int, bool]:
            return query.length, query.spaceless

        for (length, spaceless), of_group in itertools.groupby(sorted(asked, key=group), key=group):
            ids_W = self._ids_of[spaceless]
            size = max(1, BATCH_TOKENS.get(self.device.type, BATCH_TOKENS["cpu"]) // length)
            members = list(of_group)
            for begin in range(0, len(members), size):
                batch = members[begin : begin + size]
                rows_BL = np.frombuffer(b"".join(q.ids for q in batch), dtype=np.int32).reshape(len(batch), length)
                places_B = torch.tensor([q.place for q in batch])
                logits_BV = self.logits(torch.from_numpy(rows_BL.astype(np.int64)), places_B)
                top_BK = ids_W[logits_BV[:, ids_W].topk(min(count, len(ids_W))).indices].tolist()
                for query, top_K in zip(batch, top_BK, strict=True):
                    asked[query] = [self._words[i] for i in top_K]

    @torch.inference_mode()
    def logits(self, rows_BL: Tensor, places_B: Tensor) -> Tensor:
        """The logits at one place of each row, [B, V] float32; the head computes no others.

        Args:
            rows_BL: token ids without padding, int64.
            places_B: int64.
        """
        rows_BL, places_B = rows_BL.to(self.device), places_B.to(self.device)
        autocast = torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)
        with _only_at(self.model, places_B), autocast:
            out = self.model(input_ids=rows_BL, attention_mask=torch.ones_like(rows_BL), return_dict=True)
        logits_BV: Tensor = out.logits[:, 0].float()
        return logits_BV


@contextmanager
def _only_at(model: PreTrainedModel, places_B: Tensor) -> Iterator[None]:
    """The encoder hands its head only the states at these places: [B, 1, D] for [B, L, D]."""

    def gather(module: torch.nn.Module, arguments: Any, out: Any) -> Any:
        out.last_hidden_state = out.last_hidden_state[torch.arange(len(places_B)), places_B][:, None]
        return out

    handle = model.base_model.register_forward_hook(gather)
    try:
        yield
    finally:
        handle.remove()
