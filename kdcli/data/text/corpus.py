"""Unlabelled text as full blocks of tokens: tokenised once, cached on disk, read through a memory map.

The documents of a split become one stream with a separator after each. A block is `[CLS]`, the next L - 2 tokens,
`[SEP]`: no padding, and only the end of the stream is left out. The stream does not depend on L: one cache serves all.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from kdcli.data.hub import HubId
from kdcli.data.sources import HubSource, Log, open_source
from kdcli.data.text.shards import FORMAT, META, Frame, tokenise, tokenizer_hash, whole_there
from kdcli.data.text.stream import Stream, open_streams, streams_of
from kdcli.disk import cache_dir, cache_key, user_path
from kdcli.errors import UsageError
from kdcli.types import Batch


@dataclass(frozen=True)
class Blocks:
    """Blocks `first` to `first + count - 1` of a token stream."""

    stream: Stream
    first: int
    count: int
    length: int
    cls_id: int
    sep_id: int
    isolated: bool

    def __len__(self) -> int:
        return self.count

    def batch(self, indices: np.ndarray[Any, Any]) -> Batch:
        """Collate blocks: `input_ids` [B, L]; isolated also `attention_mask` [B, 1, L, L] bool and `position_ids`."""
        inner = self.length - 2
        ids_BL = np.empty((len(indices), self.length), dtype=np.int64)
        ids_BL[:, 0], ids_BL[:, -1] = self.cls_id, self.sep_id
        for ids_L, block in zip(ids_BL, np.asarray(indices).tolist(), strict=True):
            ids_L[1:-1] = self.stream.read((self.first + block) * inner, inner)
        batch = {"input_ids": torch.from_numpy(ids_BL)}
        # Other blocks have no mask: every token is real.
        if self.isolated:
            ends_BL = batch["input_ids"] == self.sep_id
            document_BL = ends_BL.long().cumsum(1) - ends_BL.long()
            batch["attention_mask"] = (document_BL[:, :, None] == document_BL[:, None, :])[:, None]
            place_L = torch.arange(self.length)
            begins_BL = torch.nn.functional.pad(document_BL.diff(dim=1) > 0, (1, 0))
            batch["position_ids"] = place_L - (place_L * begins_BL).cummax(1).values
        return batch


@dataclass(frozen=True)
class Corpus:
    """Blocks to train on and blocks never trained on."""

    train: Blocks
    held_out: Blocks


def open_corpus(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    column: str | None,
    isolated: bool,
    held_out_blocks: int,
    log: Log,
) -> Corpus:
    """Read the tokens of a source: tokenised and cached here, or written before by `kdcli tokenize` or datatrove; cut
    into blocks. `source`: what `--data` takes. `max_length`: tokens of a block, special ones included. `column`: of the
    text; None to find it. `isolated`: documents in one block do not attend to each other. `held_out_blocks`: at most so
    many; from the validation split where there is one, else the last blocks (at most a tenth) of the training text.
    Raises UsageError: see `kdcli.data.sources` and `kdcli.data.text.stream`; or less text than one block; MachineError:
    the cache cannot be written."""
    frame = Frame.of(tokenizer)
    elsewhere = source == "demo" or "://" in source
    given = None if elsewhere else open_streams(user_path(source), tokenizer, frame, log)
    streams = given or _cached(source, tokenizer, frame, column, log)

    def blocks(split: str) -> Blocks:
        stream = streams.get(split) or Stream([], "<u2")
        count = len(stream) // (max_length - 2)
        if count == 0:
            message = f"the {split} text of {source} has {len(stream)} tokens, less than one block of {max_length}"
            raise UsageError(message, "give more text, or lower data.max_length")
        return Blocks(stream, 0, count, max_length, frame.cls_id, frame.sep_id, isolated)

    train = blocks("train")
    if "validation" in streams:
        validation = blocks("validation")
        return Corpus(train, replace(validation, count=min(held_out_blocks, len(validation))))
    if not (held := min(held_out_blocks, len(train) // 10)):
        message = f"{source} makes only {len(train)} blocks of {max_length} tokens: too few to hold some out"
        raise UsageError(message, "give more text or a validation split, or lower data.max_length")
    return Corpus(
        replace(train, count=len(train) - held), replace(train, first=len(train) - held, count=held)
    )


def _cached(
    source: str, tokenizer: PreTrainedTokenizerBase, frame: Frame, column: str | None, log: Log
) -> dict[str, Stream]:
    """The streams of a source, tokenised unless they are in the cache; another process that writes it is waited for."""
    opened = open_source(source)
    of = cache_key(FORMAT, opened.identity, tokenizer_hash(tokenizer), column, frame.sep_id)
    folder = cache_dir() / "corpora" / of
    if isinstance(opened, HubSource):
        folder = _at_revision(folder, opened.hub)
    return streams_of(folder, tokenise(opened, tokenizer, column, folder, log=log, cached=True))


def _at_revision(folder: Path, hub: HubId) -> Path:
    """The cache directory for the present revision of a hub data set; the newest one without a network."""
    if (commit := hub.commit()) is None:
        whole = [made for made in folder.parent.glob(f"{folder.name}*") if whole_there(made)]
        return max(whole, key=lambda made: (made / META).stat().st_mtime_ns, default=folder)
    return folder.with_name(f"{folder.name}-{commit[:12]}")
