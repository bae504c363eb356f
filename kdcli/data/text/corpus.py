"""Unlabelled text as full blocks of tokens.

The text is tokenised once and cached on disk. The documents of a split form one stream of tokens
with a separator after each document. A block consists of `[CLS]`, the next L - 2 tokens of the
stream, and `[SEP]`. There is no padding, and only the end of the stream is unused. The stream does
not depend on L, so one cache serves all lengths.
"""

import functools
import itertools
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from kdcli.data.hub import entry_at_commit
from kdcli.data.sources import HubSource, describe_unread, open_source
from kdcli.data.text.shards import (
    META,
    SHARD_FORMAT,
    Frame,
    TokenShards,
    is_complete,
    tokenizer_hash,
)
from kdcli.data.text.tokenise import tokenise
from kdcli.disk import cache_dir, cache_key, use_entry, user_path
from kdcli.errors import UsageError
from kdcli.messages import log
from kdcli.types import Array, Batch

# Maximum number of open maps. Each needs a file descriptor, and a process may have a few thousand.
MAX_MAPS = 512
# Streams up to this size are read with read-ahead. Blocks are read in random order, so for a stream
# that does not fit in memory, the system reads 128 KB for each 250 bytes (docs/evidence/speed.md).
MAX_BYTES_READ_AHEAD = 1 << 32
WHOLE = "--set data.share=1.0"


class TokenStream:
    """Files of tokens, each of a known length, as one array. A file is mapped when it is read."""

    def __init__(self, files: Sequence[tuple[Path, int]], dtype: str) -> None:
        """Take files with their numbers of tokens."""
        self.files = [(path, tokens) for path, tokens in files if tokens]
        self.dtype = np.dtype(dtype)
        self.ends = np.cumsum([tokens for _, tokens in self.files], dtype=np.int64)
        self._map = functools.lru_cache(maxsize=MAX_MAPS)(self._open_map)

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def read(self, begin: int, count: int) -> Array:
        """Read `count` tokens from position `begin`, [count]. A view if one file has them all."""
        number = int(np.searchsorted(self.ends, begin, side="right"))
        offset = begin - (int(self.ends[number - 1]) if number else 0)
        part = self._map(number)[offset : offset + count]
        if len(part) == count:
            return part
        rest = self.read(begin + len(part), count - len(part))
        return np.concatenate([part, rest])

    def _open_map(self, number: int) -> Array:
        path, tokens = self.files[number]
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        is_large = len(self) * self.dtype.itemsize > MAX_BYTES_READ_AHEAD
        if is_large and hasattr(mmap, "MADV_RANDOM"):
            mapped.madvise(mmap.MADV_RANDOM)
        return np.frombuffer(mapped, self.dtype, tokens)


def streams_of(folder: Path, shards: TokenShards) -> dict[str, TokenStream]:
    """Open the streams of a complete directory of shards, by split."""
    by_split = itertools.groupby(shards.shards, key=lambda shard: shard.split)
    return {
        split: TokenStream([(folder / one.file, one.tokens or 0) for one in group], shards.dtype)
        for split, group in by_split
    }


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

    Raises:
        UsageError: The source cannot be read, its tokens are damaged or come from another
            tokenizer, or the text is shorter than a block.
        MachineError: The cache cannot be written.
    """
    frame = Frame.of(tokenizer)
    is_folder = source != "demo" and "://" not in source
    streams = _open_tokens(user_path(source), tokenizer, frame) if is_folder else None
    if streams and share < 1:
        raise UsageError(
            f"data.share={share:g}: {source} holds tokens, whose rows are joined",
            "give the text itself, tokenise a share of it with kdcli tokenize --share, or read all "
            f"of it with {WHOLE}",
        )
    streams = streams or _open_cached(source, tokenizer, frame, column, share)
    more = "give more text" if share == 1 else f"give more text, or all of it with {WHOLE}"

    def blocks(split: str) -> Blocks:
        stream = streams.get(split) or TokenStream([], "<u2")
        count = len(stream) // (max_length - 2)
        if count == 0:
            raise UsageError(
                f"the {split} text of {source} has {len(stream)} tokens, less than one block of "
                f"{max_length}",
                f"{more}, or lower data.max_length",
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
            f"{more}, give a validation split, or lower data.max_length",
        )
    first = len(train) - held_out
    return Corpus(replace(train, count=first), replace(train, first=first, count=held_out))


def _open_tokens(
    folder: Path, tokenizer: PreTrainedTokenizerBase, frame: Frame
) -> dict[str, TokenStream] | None:
    """Open a directory of tokens; None if it holds no tokens."""
    if not (folder / META).is_file():
        return open_datatrove(folder, tokenizer, frame)
    shards = TokenShards.read(folder)
    shards.check(folder, tokenizer, frame)
    shards.close_account()
    return streams_of(folder, shards)


def _open_cached(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    frame: Frame,
    column: str | None,
    share: float,
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
    shards = tokenise(opened, tokenizer, column, folder, cached=True)
    shards.close_account()
    return streams_of(folder, shards)


DS, METADATA, INDEX = ".ds", ".metadata", ".index"
FILE_ENDINGS = (DS, DS + METADATA, DS + INDEX)
MAX_METADATA_BYTES = 10_000
# Number of tokens that are checked at the beginning, in the middle and at the end of a file.
SAMPLED_TOKENS = 4096
OTHER_TOKENIZER_HINT = "run datatrove's DocumentTokenizer with the tokenizer of this model"


@dataclass(frozen=True)
class TokenFile:
    """A `.ds` file, the name of its tokenizer if known, its bytes per token, and its tokens."""

    path: Path
    tokenizer: str | None
    token_bytes: int
    tokens: int


def open_datatrove(
    folder: Path, tokenizer: PreTrainedTokenizerBase, frame: Frame
) -> dict[str, TokenStream] | None:
    """Open the streams of a directory of datatrove by split; None if there are no such files.

    Files named `validation*` are held out.

    Raises:
        UsageError: A file is missing or cut, or the tokens come from another tokenizer.
    """
    if not folder.is_dir():
        return None
    names = sorted(path.name for path in folder.iterdir() if path.name.endswith(FILE_ENDINGS))
    if not names:
        return None
    _check_none_missing(folder, names)
    vocabulary_size = max(tokenizer.get_vocab().values()) + 1
    paths = [folder / name for name in names if name.endswith(DS)]
    files = [_read_metadata(path, vocabulary_size) for path in paths]
    for name in dict.fromkeys(file.tokenizer for file in files):
        _check_tokenizer(folder, name, tokenizer)
    sizes = sorted({file.token_bytes for file in files})
    if len(sizes) > 1:
        message = f"{folder} holds tokens of {' and of '.join(map(str, sizes))} bytes"
        raise UsageError(message, "give a directory whose files all have tokens of one size")
    dtype = f"<u{sizes[0]}"
    for file in files:
        _check_sample(file, dtype, vocabulary_size, frame)

    def stream(is_validation: bool) -> TokenStream:
        chosen = [f for f in files if f.path.name.startswith("validation") == is_validation]
        return TokenStream([(file.path, file.tokens) for file in chosen], dtype)

    validation = stream(True)
    return {"train": stream(False)} | ({"validation": validation} if validation.files else {})


def _check_none_missing(folder: Path, names: list[str]) -> None:
    files = {name for name in names if name.endswith(DS)}
    expected = {
        name.removesuffix(ending)
        for name in names
        for ending in (METADATA, INDEX)
        if name.endswith(DS + ending)
    }
    if missing := sorted(expected - files):
        raise UsageError(
            f"{folder}: {missing[0]} is missing ({len(missing)} of {len(expected)} files); "
            "its index is there",
            "copy it, too, or run datatrove's pipeline again, which writes the missing files",
        )


def _read_metadata(path: Path, vocabulary_size: int) -> TokenFile:
    """Read the metadata of a file.

    Without metadata, the size of the vocabulary determines the bytes per token, as in datatrove.
    """
    size = path.stat().st_size
    name, token_bytes, tokens = None, 2 if vocabulary_size <= 1 << 16 else 4, None
    metadata = path.with_name(f"{path.name}{METADATA}")
    if metadata.is_file():
        with metadata.open("rb") as file:
            lines = file.read(MAX_METADATA_BYTES).decode("utf-8", "replace").splitlines()
        try:
            name, digits = lines[0].rsplit("|", 1)
            token_bytes, tokens = int(digits), int(lines[1])
        except (IndexError, ValueError):
            raise UsageError(
                f"{metadata} is not metadata of datatrove, which begins with the lines "
                "TOKENIZER|BYTES and a number",
                "was it written by another program?",
            ) from None
    if token_bytes not in (2, 4) or size % token_bytes or tokens not in (None, size // token_bytes):
        count = f"{tokens:,} tokens" if tokens is not None else "tokens"
        message = f"{path} is cut: it has {size:,} bytes, not {count} of {token_bytes} bytes"
        raise UsageError(message, "copy it again, or write it again with datatrove")
    return TokenFile(path, name, token_bytes, size // token_bytes)


def _check_tokenizer(folder: Path, name: str | None, tokenizer: PreTrainedTokenizerBase) -> None:
    """Compare the vocabulary with the metadata's tokenizer, if it is on this machine."""
    if name is None or name == tokenizer.name_or_path:
        return
    path = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
    if not path.is_file():
        try:
            path = Path(hf_hub_download(name, "tokenizer.json", local_files_only=True))
        except (LocalEntryNotFoundError, HFValidationError):
            log(
                f"{folder}: its tokenizer {name} is not on this machine; "
                "kdcli checks only a sample of its tokens"
            )
            return
    if Tokenizer.from_file(str(path)).get_vocab() != tokenizer.get_vocab():
        raise UsageError(
            f"{folder} holds tokens of {name}, whose vocabulary differs from the vocabulary of "
            f"{tokenizer.name_or_path}",
            OTHER_TOKENIZER_HINT,
        )


def _check_sample(file: TokenFile, dtype: str, vocabulary_size: int, frame: Frame) -> None:
    """Look for tokens beyond the vocabulary, and for documents with another frame."""
    if not file.tokens:
        return
    stream = TokenStream([(file.path, file.tokens)], dtype)
    last = max(0, file.tokens - SAMPLED_TOKENS)
    middle = max(0, file.tokens // 2 - SAMPLED_TOKENS)
    places = (0, middle, last)
    sample = np.concatenate(
        [stream.read(begin, min(SAMPLED_TOKENS, file.tokens)) for begin in places]
    )
    if (highest := int(sample.max())) >= vocabulary_size:
        raise UsageError(
            f"{file.path} holds token {highest:,}; the vocabulary of the model has "
            f"{vocabulary_size:,}",
            OTHER_TOKENIZER_HINT,
        )
    is_framed = frame.cls_id != frame.sep_id and frame.cls_id in sample
    if is_framed or frame.sep_id not in sample:
        raise UsageError(
            f"{file.path}: documents must end with the token {frame.sep_id} ({frame.sep}) and "
            "have no other frame",
            f"{OTHER_TOKENIZER_HINT} and eos_token={frame.sep!r}",
        )
