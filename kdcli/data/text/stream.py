"""Token streams on disk: the shards of `kdcli tokenize`, or the `.ds` files of datatrove, as one array each.

A directory of kdcli holds `meta.json` and a file of uint16 or uint32 for each shard (`kdcli.data.text.shards`). One of
datatrove holds `NAME.ds` files, beside each `NAME.ds.metadata` (tokenizer, bytes of a token, number of tokens) and
`NAME.ds.index` (where documents end, uint64). Nothing is copied; opening takes time for the number of files only.
"""

import functools
import itertools
import mmap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from kdcli.data.sources import Log
from kdcli.data.text.shards import META, Frame, Meta
from kdcli.errors import UsageError

MOST_MAPS = 512  # Each holds a file descriptor, of which a process may have some thousand.
# Bytes of a stream that the system may read ahead: blocks come in random order, and of a stream that memory cannot hold
# it would read 128 KB for each of 250 bytes (docs/results.md).
MOST_AHEAD = 1 << 32
DS, OF_DS = ".ds", (".metadata", ".index")
MOST_METADATA = 10_000  # Bytes that are read
SAMPLED = 4096  # Tokens at the beginning, the middle and the end of a file of others
DOCUMENTS = 64  # First ones of such a file, of which begin and end are looked at

Array = np.ndarray[Any, Any]


class Stream:
    """Files of tokens, each of a known length, as one array; a file is mapped when it is first read."""

    def __init__(self, files: Sequence[tuple[Path, int]], dtype: str) -> None:
        self.files, self.dtype = [file for file in files if file[1]], np.dtype(dtype)
        self.ends = np.cumsum([tokens for _, tokens in self.files], dtype=np.int64)
        self._map = functools.lru_cache(maxsize=MOST_MAPS)(self._mapped)

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def read(self, begin: int, count: int) -> Array:
        """`count` tokens from place `begin` on, [count]; a view where they lie in one file."""
        number = int(np.searchsorted(self.ends, begin, side="right"))
        at = begin - (int(self.ends[number - 1]) if number else 0)
        part = self._map(number)[at : at + count]
        return (
            part
            if len(part) == count
            else np.concatenate([part, self.read(begin + len(part), count - len(part))])
        )

    def _mapped(self, number: int) -> Array:
        file, tokens = self.files[number]
        with file.open("rb") as opened:
            mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        if len(self) * self.dtype.itemsize > MOST_AHEAD and hasattr(mmap, "MADV_RANDOM"):
            mapped.madvise(mmap.MADV_RANDOM)
        return np.frombuffer(mapped, self.dtype, tokens)


def open_streams(
    folder: Path, tokenizer: PreTrainedTokenizerBase, frame: Frame, log: Log
) -> dict[str, Stream] | None:
    """The streams of a directory of tokens by split; None where it holds no tokens. Raises UsageError: a shard is
    missing or cut, or the tokens are another tokenizer's."""
    if (folder / META).is_file():
        return streams_of(folder, Meta.read(folder).checked(folder, tokenizer, frame))
    ends = (DS, *(DS + ending for ending in OF_DS))
    files = (
        sorted(path.name for path in folder.iterdir() if path.name.endswith(ends))
        if folder.is_dir()
        else []
    )
    return _of_datatrove(folder, files, tokenizer, frame, log) if files else None


def streams_of(folder: Path, meta: Meta) -> dict[str, Stream]:
    """The streams of a whole directory of kdcli."""
    by_split = itertools.groupby(meta.shards, key=lambda shard: shard.split)
    return {
        s: Stream([(folder / one.file, one.tokens or 0) for one in shards], meta.dtype)
        for s, shards in by_split
    }


def _of_datatrove(
    folder: Path, names: list[str], tokenizer: PreTrainedTokenizerBase, frame: Frame, log: Log
) -> dict[str, Stream]:
    shards = [name for name in names if name.endswith(DS)]
    beside = {
        name.removesuffix(ending)
        for name in names
        for ending in OF_DS
        if name.endswith(DS + ending)
    }
    if missing := sorted(beside - set(shards)):
        message = f"{folder}: {missing[0]} is missing ({len(missing)} of {len(beside)} files); its index is there"
        raise UsageError(
            message, "copy it too, or run datatrove's pipeline again, which makes what is missing"
        )
    words = max(tokenizer.get_vocab().values()) + 1
    read = [_read_metadata(folder / name, words) for name in shards]
    for name in dict.fromkeys(name for name, _, _ in read):
        _check_tokenizer(folder, name, tokenizer, log)
    if len(sizes := {size for _, size, _ in read}) > 1:
        raise UsageError(
            f"{folder} holds tokens of {' and of '.join(map(str, sorted(sizes)))} bytes",
            "one kind only",
        )
    dtype = f"<u{sizes.pop()}"
    files = [(folder / name, tokens) for name, (_, _, tokens) in zip(shards, read, strict=True)]
    for file in files:
        _check_sample(Stream([file], dtype), words, frame)
    validation = [file for file in files if file[0].name.startswith("validation")]
    train = Stream([file for file in files if file not in validation], dtype)
    return {"train": train} | ({"validation": Stream(validation, dtype)} if validation else {})


def _read_metadata(file: Path, words: int) -> tuple[str | None, int, int]:
    """Of a `.ds` file: the name of its tokenizer, the bytes of a token, and the number of its tokens. Without metadata
    datatrove's rule gives the second, and the length of the file the third."""
    found, path = file.stat().st_size, file.with_name(f"{file.name}{OF_DS[0]}")
    name, size, tokens = None, 2 if words <= 1 << 16 else 4, None
    if path.is_file():
        with path.open("rb") as opened:
            lines = opened.read(MOST_METADATA).decode("utf-8", "replace").splitlines()
        try:
            name, size, tokens = (
                lines[0].rsplit("|", 1)[0],
                int(lines[0].rsplit("|", 1)[1]),
                int(lines[1]),
            )
        except (IndexError, ValueError):
            message = f"{path} is no metadata of datatrove: its first lines are TOKENIZER|BYTES and a number"
            raise UsageError(message, "is it of another program?") from None
    if size not in (2, 4) or found % size or tokens not in (None, found // size):
        wanted = (
            f"{tokens:,} tokens of {size} bytes"
            if tokens is not None
            else f"tokens of {size} bytes"
        )
        raise UsageError(
            f"{file} is cut: it has {found:,} bytes, not {wanted}",
            "copy it again, or make it again",
        )
    return name, size, found // size


def _check_tokenizer(
    folder: Path, name: str | None, tokenizer: PreTrainedTokenizerBase, log: Log
) -> None:
    """Compare the tokenizer that metadata names, if it is on this machine."""
    if name is None or name == tokenizer.name_or_path:
        return
    path = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
    if not path.is_file():
        try:
            path = Path(hf_hub_download(name, "tokenizer.json", local_files_only=True))
        except (LocalEntryNotFoundError, HFValidationError):
            log(
                f"{folder}: its tokenizer {name} is not on this machine; its tokens are compared on a sample only"
            )
            return
    if Tokenizer.from_file(str(path)).get_vocab() != tokenizer.get_vocab():
        raise UsageError(
            f"{folder} holds tokens of {name}, whose vocabulary is another than that of {tokenizer.name_or_path}",
            "run datatrove's DocumentTokenizer with the tokenizer of this model",
        )


def _check_sample(stream: Stream, words: int, frame: Frame) -> None:
    """Look for tokens beyond the vocabulary, and for documents that are framed in another way, at a few places."""
    if not len(stream):
        return
    ((file, tokens),) = stream.files
    for begin in (0, max(0, tokens // 2 - SAMPLED), max(0, tokens - SAMPLED)):
        highest = int(stream.read(begin, min(SAMPLED, tokens)).max())
        if highest >= words:
            message = f"{file} holds token {highest:,}; the vocabulary of the model has {words:,}"
            raise UsageError(
                message, "run datatrove's DocumentTokenizer with the tokenizer of this model"
            )
    index = file.with_name(f"{file.name}{OF_DS[1]}")
    if not index.is_file():
        return
    ends = np.fromfile(index, dtype="<u8", count=DOCUMENTS).astype(np.int64)
    whole = len(ends) > 0 and index.stat().st_size % 8 == 0
    if not whole or int(np.fromfile(index, "<u8", offset=index.stat().st_size - 8)[0]) != tokens:
        raise UsageError(
            f"{index} does not end where {file.name} does", "copy both again, or make them again"
        )
    first, last = _tokens_at(stream, [0, *ends[:-1]]), _tokens_at(stream, ends - 1)
    # Where datatrove shuffled chunks, some of these are ends of chunks.
    if (last != frame.sep_id).all() or (first == frame.cls_id).mean() > 0.5:
        raise UsageError(
            f"{file}: documents must end with the token {frame.sep_id} ({frame.sep}) and have no other frame",
            f"run datatrove's DocumentTokenizer with the tokenizer of this model and eos_token={frame.sep!r}",
        )


def _tokens_at(stream: Stream, places: Iterable[int]) -> Array:
    return np.array([stream.read(int(place), 1)[0] for place in places], dtype=np.int64)
