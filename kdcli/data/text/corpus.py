"""Unlabelled text as full blocks of tokens: tokenised once, cached on disk, read through a memory map.

The documents of a split become one stream with a separator after each. A block is `[CLS]`, the next L - 2 tokens,
`[SEP]`: no padding, and only the end of the stream is left out. The stream does not depend on L: one cache serves all.
"""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from huggingface_hub import HfApi
from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # its client, whichever version that is
from transformers import PreTrainedTokenizerBase

from kdcli.data.files import LOG_SECONDS, Log, Source, open_source
from kdcli.disk import atomic_dir, cache_dir, cache_key, disk_errors
from kdcli.errors import UsageError
from kdcli.types import Batch

CHARS_PER_CALL = 1 << 20  # Tokenised at once: some 30 MB of memory, whatever the length of documents.
HUB_SECONDS = 10.0  # Timeout of the question which revision of a data set is the present one.
FORMAT = 1  # Raised when the cached files change their meaning.


@dataclass(frozen=True)
class Blocks:
    """Blocks `first` to `first + count - 1` of a token stream."""

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
        """Collate blocks: `input_ids` [B, L]; isolated also `attention_mask` [B, 1, L, L] bool and `position_ids`."""
        inner = self.length - 2
        at_BI = (self.first + np.asarray(indices))[:, None] * inner + np.arange(inner)
        ids_BL = np.empty((len(at_BI), self.length), dtype=np.int64)
        ids_BL[:, 0], ids_BL[:, -1] = self.cls_id, self.sep_id
        ids_BL[:, 1:-1] = self.stream_T[at_BI]
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
    """Tokenise a source, or take it from the cache, and cut it into blocks. `source`: what `--data` takes.
    `max_length`: tokens of a block, special ones included. `column`: of the text; None to find it. `isolated`:
    documents in one block do not attend to each other. `held_out_blocks`: at most so many; from the validation split
    where there is one, else the last blocks (at most a tenth) of the training text. Raises UsageError: see
    `kdcli.data.files`; or less text than one block; MachineError: the cache cannot be written."""
    opened = open_source(source)
    cls_id = tokenizer.cls_token_id if tokenizer.cls_token_id is not None else tokenizer.bos_token_id
    sep_id = tokenizer.sep_token_id if tokenizer.sep_token_id is not None else tokenizer.eos_token_id
    if cls_id is None or sep_id is None:
        raise UsageError("the tokenizer has neither [CLS]/[SEP] nor begin and end tokens to frame a block with")
    folder = _tokenised(opened, tokenizer, int(sep_id), column, log)
    dtype = np.dtype(json.loads((folder / "meta.json").read_text("utf-8"))["dtype"])

    def blocks(split: str) -> Blocks:
        path = folder / f"{split}.bin"
        tokens = path.stat().st_size // dtype.itemsize
        count = tokens // (max_length - 2)
        if count == 0:
            message = f"the {split} text of {source} has {tokens} tokens, less than one block of {max_length}"
            raise UsageError(message, "give more text, or lower data.max_length")
        return Blocks(np.memmap(path, dtype=dtype, mode="r"), 0, count, max_length, int(cls_id), int(sep_id), isolated)

    train = blocks("train")
    if (folder / "validation.bin").is_file():
        validation = blocks("validation")
        return Corpus(train, replace(validation, count=min(held_out_blocks, len(validation))))
    if not (held := min(held_out_blocks, len(train) // 10)):
        message = f"{source} makes only {len(train)} blocks of {max_length} tokens: too few to hold some out"
        raise UsageError(message, "give more text or a validation split, or lower data.max_length")
    return Corpus(replace(train, count=len(train) - held), replace(train, first=len(train) - held, count=held))


def _tokenised(source: Source, tokenizer: PreTrainedTokenizerBase, sep_id: int, column: str | None, log: Log) -> Path:
    """The cache directory of a source under a tokenizer; another process that writes it is waited for."""
    folder = cache_dir() / "corpora" / cache_key(FORMAT, source.identity, _tokenizer_hash(tokenizer), column, sep_id)
    if source.hub:
        folder = _at_revision(folder, source.hub[0])
    if _is_whole(folder):
        return folder
    dtype = np.dtype(np.uint16 if max(tokenizer.get_vocab().values()) < 1 << 16 else np.uint32)
    with disk_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f".{folder.name}.lock")):
            if _is_whole(folder):
                return folder
            with atomic_dir(folder) as aside:
                counts = {}
                # A source without training text raises when its documents are read.
                for split in ("train", "validation") if source.has("validation") else ("train",):
                    log(f"tokenising the {split} text of {source.name}")
                    documents = source.documents(split, column)
                    counts[split] = _write(aside / f"{split}.bin", documents, tokenizer, sep_id, dtype, log)
                    log(f"{counts[split]:,} tokens of {split} text")
                (aside / "meta.json").write_text(json.dumps({"dtype": dtype.name, "tokens": counts}), "utf-8")
    return folder


def _at_revision(folder: Path, name: str) -> Path:
    """The cache directory for the present revision of a hub data set; the newest one without a network."""
    try:
        revision = HfApi().dataset_info(name, timeout=HUB_SECONDS).sha
    except (OSError, httpx.HTTPError):
        whole = [made for made in folder.parent.glob(f"{folder.name}*") if _is_whole(made)]
        return max(whole, key=lambda made: (made / "meta.json").stat().st_mtime_ns, default=folder)
    return folder.with_name(f"{folder.name}-{str(revision)[:12]}")


def _tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    if not tokenizer.is_fast:
        return cache_key(tokenizer.get_vocab())
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    # Left over from the last call of the tokenizer; they do not touch what is written here.
    del parts["truncation"], parts["padding"]
    return cache_key(parts)


def _is_whole(folder: Path) -> bool:
    """True if a cache directory is there and its files are as long as they were written."""
    try:
        meta = json.loads((folder / "meta.json").read_text("utf-8"))
        size = np.dtype(meta["dtype"]).itemsize
        return all((folder / f"{s}.bin").stat().st_size == n * size for s, n in meta["tokens"].items())
    except (ValueError, KeyError, TypeError, AttributeError, FileNotFoundError):
        return False


def _write(
    to: Path, documents: Iterator[str], tokenizer: PreTrainedTokenizerBase, sep_id: int, dtype: np.dtype[Any], log: Log
) -> int:
    """Write the stream of a split; returns the number of its tokens."""
    total, logged = 0, time.monotonic()
    with to.open("wb") as file:
        for texts, ends in _portions(documents):
            encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
            for ids, is_end in zip(encoded["input_ids"], ends, strict=True):
                total += file.write(np.asarray([*ids, sep_id] if is_end else ids, dtype=dtype).tobytes())
            if time.monotonic() - logged > LOG_SECONDS:
                logged = time.monotonic()
                log(f"{total // dtype.itemsize:,} tokens so far")
        file.flush()
        os.fsync(file.fileno())
    return total // dtype.itemsize


def _portions(documents: Iterator[str]) -> Iterator[tuple[list[str], list[bool]]]:
    """Documents in portions of about `CHARS_PER_CALL` characters, and which pieces end a document. A document longer
    than that is cut before a space, where a tokenizer would cut it too."""
    texts: list[str] = []
    ends: list[bool] = []
    room = CHARS_PER_CALL
    for document in documents:
        begin = 0
        while begin < len(document):
            end = len(document)
            if end - begin > CHARS_PER_CALL:
                space = document.rfind(" ", begin + 1, begin + CHARS_PER_CALL)
                end = space if space > 0 else begin + CHARS_PER_CALL
            texts.append(document[begin:end])
            ends.append(end == len(document))
            room -= end - begin
            begin = end
            if room <= 0:
                yield texts, ends
                texts, ends, room = [], [], CHARS_PER_CALL
    if texts:
        yield texts, ends
