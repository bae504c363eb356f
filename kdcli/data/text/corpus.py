"""Unlabelled text as full blocks of tokens.

The text is tokenised once and cached on disk. The documents of a split form one stream of tokens
with a separator after each document. A block consists of `[CLS]`, the next L - 2 tokens of the
stream, and `[SEP]`. There is no padding, and only the end of the stream is unused. The stream does
not depend on L, so one cache serves all lengths.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from kdcli.data.hub import entry_at_commit
from kdcli.data.sources import HubSource, Log, describe_unread, open_source
from kdcli.data.text.datatrove import open_datatrove
from kdcli.data.text.shards import (
    META,
    SHARD_FORMAT,
    Frame,
    TokenShards,
    is_complete,
    tokenizer_hash,
)
from kdcli.data.text.stream import TokenStream, streams_of
from kdcli.data.text.tokenise import tokenise
from kdcli.disk import cache_dir, cache_key, use_entry, user_path
from kdcli.errors import UsageError
from kdcli.types import Array, Batch


@dataclass(frozen=True)
class Blocks:
    """Blocks `first` to `first + count - 1` of a stream, each of `length` tokens.

    If `isolated` is set, the documents in a block do not attend to each other.
    """

    stream: TokenStream
    first: int
    count: int
    length: int
    frame: Frame
    isolated: bool

    def __len__(self) -> int:
        return self.count

    def batch(self, indices: Array) -> Batch:
        """Collate blocks: `input_ids` [B, L].

        Isolated blocks also have `attention_mask` [B, 1, L, L] bool and `position_ids` [B, L].
        Other blocks need no mask, because they have no padding.
        """
        inner = self.length - 2
        ids_BL = np.empty((len(indices), self.length), dtype=np.int64)
        ids_BL[:, 0], ids_BL[:, -1] = self.frame.cls_id, self.frame.sep_id
        for ids_L, block in zip(ids_BL, np.asarray(indices).tolist(), strict=True):
            ids_L[1:-1] = self.stream.read((self.first + block) * inner, inner)
        batch = {"input_ids": torch.from_numpy(ids_BL)}
        if self.isolated:
            ends_BL = batch["input_ids"] == self.frame.sep_id
            document_BL = ends_BL.long().cumsum(1) - ends_BL.long()
            batch["attention_mask"] = (document_BL[:, :, None] == document_BL[:, None, :])[:, None]
            position_L = torch.arange(self.length)
            begins_BL = torch.nn.functional.pad(document_BL.diff(dim=1) > 0, (1, 0))
            batch["position_ids"] = position_L - (position_L * begins_BL).cummax(1).values
        return batch


@dataclass(frozen=True)
class Corpus:
    """Blocks to train on, and blocks that are never trained on."""

    train: Blocks
    held_out: Blocks


def open_corpus(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    column: str | None,
    share: float = 1.0,
    isolated: bool,
    held_out_blocks: int,
    log: Log,
) -> Corpus:
    """Open the blocks of a text, and tokenise it if its tokens are not in the cache.

    Args:
        source: A value of `--data`: a text, or a directory of tokens that `kdcli tokenize` or
            datatrove wrote.
        tokenizer: The tokenizer of the model.
        max_length: The number of tokens per block, including `[CLS]` and `[SEP]`.
        column: The column of the text; None chooses it.
        share: The share of the training rows that is read.
        isolated: Whether the documents in a block must not attend to each other.
        held_out_blocks: The maximum number of blocks to hold out. They come from the validation
            split or, without one, from the end of the training text (at most a tenth of it).
        log: Called with messages about the progress.

    Raises:
        UsageError: The source cannot be read, its tokens are damaged or come from another
            tokenizer, or the text is shorter than a block.
        MachineError: The cache cannot be written.
    """
    frame = Frame.of(tokenizer)
    is_folder = source != "demo" and "://" not in source
    streams = _open_tokens(user_path(source), tokenizer, frame, log) if is_folder else None
    if streams and share < 1:
        raise UsageError(
            f"data.share={share:g}: {source} holds tokens, whose rows are joined",
            "give the text itself, or tokenise a share of it with kdcli tokenize --share",
        )
    streams = streams or _open_cached(source, tokenizer, frame, column, share, log)

    def blocks(split: str) -> Blocks:
        stream = streams.get(split) or TokenStream([], "<u2")
        count = len(stream) // (max_length - 2)
        if count == 0:
            raise UsageError(
                f"the {split} text of {source} has {len(stream)} tokens, less than one block of "
                f"{max_length}",
                "give more text, or lower data.max_length",
            )
        return Blocks(stream, 0, count, max_length, frame, isolated)

    train = blocks("train")
    if "validation" in streams:
        validation = blocks("validation")
        return Corpus(train, replace(validation, count=min(held_out_blocks, len(validation))))
    held_out = min(held_out_blocks, len(train) // 10)
    if not held_out:
        raise UsageError(
            f"{source} makes only {len(train)} blocks of {max_length} tokens: too few to hold "
            "some out",
            "give more text or a validation split, or lower data.max_length",
        )
    first = len(train) - held_out
    return Corpus(replace(train, count=first), replace(train, first=first, count=held_out))


def _open_tokens(
    folder: Path, tokenizer: PreTrainedTokenizerBase, frame: Frame, log: Log
) -> dict[str, TokenStream] | None:
    """Open a directory of tokens; None if it holds no tokens."""
    if not (folder / META).is_file():
        return open_datatrove(folder, tokenizer, frame, log)
    shards = TokenShards.read(folder)
    shards.check(folder, tokenizer, frame)
    shards.close_account(log)
    return streams_of(folder, shards)


def _open_cached(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    frame: Frame,
    column: str | None,
    share: float,
    log: Log,
) -> dict[str, TokenStream]:
    """Open the cached tokens of a text. If there are none, tokenise the text first."""
    opened = open_source(source, share)
    if unread := describe_unread(opened):
        log(unread)
    tokens = tokenizer_hash(tokenizer)
    key = cache_key(SHARD_FORMAT, opened.identity, tokens, column, frame.sep_id)
    folder = cache_dir() / "corpora" / key
    about = f"{opened.name}, {Path(tokenizer.name_or_path).name}"
    if isinstance(opened, HubSource):
        folder = entry_at_commit(folder, opened.hub, about, is_complete, META)
    use_entry(folder, about)
    shards = tokenise(opened, tokenizer, column, folder, log=log, cached=True)
    shards.close_account(log)
    return streams_of(folder, shards)
