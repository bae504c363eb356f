"""Unlabelled text as full blocks of tokens: tokenised once, cached on disk, read through a memory map.

The documents of a split become one stream, a separator after each. A block is `[CLS]`, the next L - 2 tokens of the
stream, `[SEP]`: no padding, nothing left out but the end. The stream does not depend on L, and one cache serves all.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from kdcli.data.files import Source, open_source
from kdcli.disk import cache_dir, disk_errors
from kdcli.errors import UsageError
from kdcli.types import Batch

DOCUMENTS_AT_ONCE = 512
FORMAT = 1
"""Raised when the cached files change their meaning."""


@dataclass(frozen=True)
class Blocks:
    """Blocks `first` … `first + count - 1` of a token stream."""

    stream_T: np.ndarray[Any, Any]
    first: int
    count: int
    length: int
    cls_id: int
    sep_id: int
    isolated: bool

    def __len__(self) -> int:
        return self.count

    def batch(self, indices: np.ndarray[Any, Any]) -> Batch:
        """Collate blocks: `input_ids` [B, L]; isolated also `attention_mask` [B, 1, L, L] bool and `position_ids`.

        Otherwise there is no mask, since every token is real.
        """
        inner = self.length - 2
        at_BI = (self.first + np.asarray(indices))[:, None] * inner + np.arange(inner)
        ids_BL = np.empty((len(at_BI), self.length), dtype=np.int64)
        ids_BL[:, 0], ids_BL[:, -1] = self.cls_id, self.sep_id
        ids_BL[:, 1:-1] = self.stream_T[at_BI]
        batch = {"input_ids": torch.from_numpy(ids_BL)}
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
    log: Callable[[str], None],
) -> Corpus:
    """Tokenise a source, or find it tokenised, and cut it into blocks.

    Args:
        source: what `--data` takes.
        max_length: tokens of a block, special ones included.
        column: of the text; None to find it.
        isolated: documents in one block do not attend to each other.
        held_out_blocks: at most so many; from the validation split where there is one, else the last blocks (at most
            a tenth) of the training text.
        log: told what takes long.

    Raises:
        UsageError: see `kdcli.data.files`; or less text than one block.
        MachineError: the cache cannot be written.
    """
    opened = open_source(source)
    cls_id = tokenizer.cls_token_id if tokenizer.cls_token_id is not None else tokenizer.bos_token_id
    sep_id = tokenizer.sep_token_id if tokenizer.sep_token_id is not None else tokenizer.eos_token_id
    if cls_id is None or sep_id is None:
        raise UsageError("the tokenizer has neither [CLS]/[SEP] nor begin and end tokens to frame a block with")
    folder = _tokenised(opened, tokenizer, int(sep_id), column, log)
    dtype = np.dtype(json.loads((folder / "meta.json").read_text("utf-8"))["dtype"])

    def blocks(split: str) -> Blocks:
        stream_T = np.memmap(folder / f"{split}.bin", dtype=dtype, mode="r")
        count = len(stream_T) // (max_length - 2)
        if count == 0:
            raise UsageError(
                f"the {split} text of {source} has {len(stream_T)} tokens, less than one block of {max_length}",
                "give more text, or lower data.max_length",
            )
        return Blocks(stream_T, 0, count, max_length, int(cls_id), int(sep_id), isolated)

    train = blocks("train")
    if (folder / "validation.bin").is_file():
        validation = blocks("validation")
        return Corpus(train, _cut(validation, 0, min(held_out_blocks, len(validation))))
    held = min(held_out_blocks, len(train) // 10)
    if held == 0:
        raise UsageError(
            f"{source} makes only {len(train)} blocks of {max_length} tokens: too few to hold some out",
            "give more text or a validation split, or lower data.max_length",
        )
    return Corpus(_cut(train, 0, len(train) - held), _cut(train, len(train) - held, held))


def _cut(blocks: Blocks, first: int, count: int) -> Blocks:
    return Blocks(
        blocks.stream_T, blocks.first + first, count, blocks.length, blocks.cls_id, blocks.sep_id, blocks.isolated
    )


def _tokenised(
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    sep_id: int,
    column: str | None,
    log: Callable[[str], None],
) -> Path:
    """The cache directory of a source under a tokenizer; made aside and renamed when it is whole."""
    words = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else json.dumps(tokenizer.get_vocab())
    key = json.dumps([FORMAT, source.identity, hashlib.sha256(words.encode()).hexdigest(), column, sep_id])
    folder = cache_dir() / "corpora" / hashlib.sha256(key.encode()).hexdigest()[:24]
    if (folder / "meta.json").is_file():
        return folder
    dtype = np.dtype(np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32)
    aside = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    with disk_errors(folder):
        try:
            aside.mkdir(parents=True)
            counts = {}
            for split in ("train", "validation"):
                if source.has(split):
                    log(f"tokenising the {split} text of {source.name}")
                    counts[split] = _write(
                        aside / f"{split}.bin", source.documents(split, column), tokenizer, sep_id, dtype
                    )
                    log(f"{counts[split]:,} tokens of {split} text")
            (aside / "meta.json").write_text(json.dumps({"dtype": dtype.name, "tokens": counts}), "utf-8")
            if not folder.exists():
                aside.rename(folder)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return folder


def _write(
    path: Path, documents: Iterator[str], tokenizer: PreTrainedTokenizerBase, sep_id: int, dtype: np.dtype[Any]
) -> int:
    total = 0
    with path.open("wb") as file:
        while texts := list(itertools.islice(documents, DOCUMENTS_AT_ONCE)):
            encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
            for ids in encoded["input_ids"]:
                np.asarray([*ids, sep_id], dtype=dtype).tofile(file)
                total += len(ids) + 1
    return total
