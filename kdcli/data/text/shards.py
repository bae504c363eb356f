"""Shards of tokens: the files of a tokenised text, its source and its tokenizer.

A directory of shards holds `meta.json` and a file of uint16 or uint32 numbers for each shard. The
documents of a split form one stream of tokens, with a separator after each document. The stream
does not depend on the number of shards.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from kdcli.data.accounts import ACCOUNTS, RowAccount
from kdcli.data.rows import Piece
from kdcli.data.sources import Source
from kdcli.disk import (
    MAX_REPORT_BYTES,
    cache_key,
    disk_errors,
    read_json,
    user_path,
    write_atomic,
)
from kdcli.errors import UsageError
from kdcli.messages import log

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

META = "meta.json"
MAX_KEYS_BYTES = 10_000
"""The bytes of the file that hold its keys other than the shards."""
SHARD_FORMAT: Literal[2] = 2  # Raise it when the meaning of the files changes.
# Bytes of text per shard. A killed worker loses at most the half minute that it takes for a shard.
SHARD_BYTES = 1 << 26
SPLITS = ("train", "validation")
# Keys of `meta.json` that this version does not know may change what the numbers mean.
NO_OTHER_KEYS = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class Frame:
    """The tokens that frame a block: `cls_id` begins it, and `sep_id` ends it and each document.

    `sep` is the separator as a string.
    """

    cls_id: int
    sep_id: int
    sep: str

    @classmethod
    def of(cls, tokenizer: "PreTrainedTokenizerBase") -> "Frame":
        """Return the frame of a transformers tokenizer. Raises UsageError if it has none."""
        first, last = tokenizer.cls_token_id, tokenizer.sep_token_id
        first = tokenizer.bos_token_id if first is None else first
        last = tokenizer.eos_token_id if last is None else last
        if first is None or last is None:
            raise UsageError(
                "the tokenizer has neither [CLS] and [SEP] nor begin and end tokens, which frame "
                "a block",
                "use the tokenizer of an encoder such as BERT or RoBERTa",
            )
        return cls(int(first), int(last), str(tokenizer.convert_ids_to_tokens(last)))


@dataclass(frozen=True)
class Shard:
    """A file of tokens, and the pieces of text that it is made from.

    `tokens` and `account` are None until the shard is written.
    """

    # A foreign name could point outside the directory.
    file: Annotated[str, Field(pattern=r"^(train|validation)-\d{5,}\.bin$")]
    split: str
    pieces: tuple[Piece, ...]
    tokens: int | None = None
    account: RowAccount | None = None

    @property
    def size(self) -> int:
        """The approximate size of the text in bytes."""
        return sum(piece.size for piece in self.pieces)


def is_tokens(source: str) -> bool:
    """Whether a source is a directory of tokens that `kdcli tokenize` wrote."""
    file = user_path(source) / META
    if not file.is_file():
        return False
    with disk_errors(file), file.open("rb") as opened:
        return b'"sep_id"' in opened.read(MAX_KEYS_BYTES)


@dataclass(frozen=True)
class TokenShards:
    """The shards of a text, in order: the content of `meta.json`.

    Attributes:
        source: The name of the text.
        column: The column of the text; None if it was chosen by its name.
        tokenizer: A hash of the tokenizer.
        name: The name of the tokenizer.
        sep_id: The token after each document.
        dtype: The type of the numbers, `<u2` or `<u4`.
    """

    __pydantic_config__ = NO_OTHER_KEYS

    source: str
    column: str | None
    tokenizer: str
    name: str
    sep_id: int
    dtype: Literal["<u2", "<u4"]
    shards: tuple[Shard, ...] = ()
    format: Literal[2] = SHARD_FORMAT

    @classmethod
    def plan(
        cls, source: Source, tokenizer: "PreTrainedTokenizerBase", frame: Frame, column: str | None
    ) -> "TokenShards":
        """Divide a text into shards. Raises UsageError if the source has no training text."""
        shards: list[Shard] = []
        for split in SPLITS:
            if split == "train" or source.has(split):
                groups = _group(source.pieces(split, SHARD_BYTES))
                shards += (
                    Shard(f"{split}-{number:05}.bin", split, tuple(group))
                    for number, group in enumerate(groups)
                )
        return cls(
            source=source.name,
            column=column,
            tokenizer=tokenizer_hash(tokenizer),
            name=str(tokenizer.name_or_path),
            sep_id=frame.sep_id,
            dtype="<u2" if max(tokenizer.get_vocab().values()) < 1 << 16 else "<u4",
            shards=tuple(shards),
        )

    @classmethod
    def read(cls, folder: Path) -> "TokenShards":
        """Read `meta.json`. Raises UsageError if kdcli did not write it."""
        values = read_json(folder / META, max_bytes=MAX_REPORT_BYTES)
        try:
            return TypeAdapter(cls).validate_python(values)
        except ValidationError:
            message = f"{folder / META} was not written by this kdcli's `tokenize`"
            raise UsageError(message, "tokenise again") from None

    def write(self, folder: Path) -> None:
        """Write `meta.json`."""
        write_atomic(folder / META, json.dumps(asdict(self), indent=1))

    def finish(self, written: Iterable[Shard]) -> "TokenShards":
        """Return the plan with the counts of the written shards."""
        known = {shard.file: shard for shard in written}
        return replace(self, shards=tuple(known.get(shard.file, shard) for shard in self.shards))

    @property
    def splits(self) -> list[str]:
        """The splits that have shards."""
        return list(dict.fromkeys(shard.split for shard in self.shards))

    @property
    def complete(self) -> bool:
        """Whether every shard was written."""
        return all(shard.tokens is not None for shard in self.shards)

    def tokens_of(self, split: str) -> int:
        """Count the tokens of a split."""
        return sum(shard.tokens or 0 for shard in self.shards if shard.split == split)

    def close_account(self) -> None:
        """Close the account of the text's rows, unless an older version did not count them."""
        account = RowAccount(self.source)
        for shard in self.shards:
            if shard.account is None:
                log(f"the rows of {self.source} are not counted: an older version wrote the tokens")
                return
            account.add(shard.account)
        ACCOUNTS.close(account, account.used)

    def bytes_of(self, shard: Shard) -> int:
        """Return the length of a shard's file."""
        return (shard.tokens or 0) * np.dtype(self.dtype).itemsize

    def has_origin_of(self, other: "TokenShards") -> bool:
        """Whether both have the same text and the same tokenizer, so that shards fit together."""
        return replace(self, name=other.name, shards=other.shards) == other

    def missing(self, folder: Path, previous: "TokenShards | None") -> list[Shard]:
        """List the shards that an earlier run did not write, cut short, or made from other text."""
        known = {shard.file: shard for shard in previous.shards} if previous else {}

        def is_done(shard: Shard) -> bool:
            before, path = known.get(shard.file), folder / shard.file
            if before is None or before.pieces != shard.pieces or not path.is_file():
                return False
            return before.tokens is not None and path.stat().st_size == self.bytes_of(before)

        return [shard for shard in self.shards if not is_done(shard)]

    def check(self, folder: Path, tokenizer: "PreTrainedTokenizerBase", frame: Frame) -> None:
        """Raise a UsageError unless all shards exist and have this tokenizer's tokens."""
        again = f"run the same `kdcli tokenize ... -o {folder}` again to write what is missing"
        if not self.complete:
            raise UsageError(f"the shards in {folder} are not finished", again)
        if self.tokenizer != tokenizer_hash(tokenizer) or self.sep_id != frame.sep_id:
            raise UsageError(
                f"{folder} holds tokens of {self.name}, not of the tokenizer of "
                f"{tokenizer.name_or_path}",
                "tokenise the text with the tokenizer of this model",
            )
        for shard in self.shards:
            path, expected = folder / shard.file, self.bytes_of(shard)
            if not path.is_file():
                raise UsageError(f"{path} is missing, one of {len(self.shards)} shards", again)
            size = path.stat().st_size
            if size != expected:
                raise UsageError(f"{path} is cut: it has {size:,} bytes, not {expected:,}", again)


def is_complete(folder: Path) -> bool:
    """Whether a directory holds all of its shards at full length."""
    try:
        meta = TokenShards.read(folder)
    except UsageError:
        return False
    return meta.complete and not meta.missing(folder, meta)


def tokenizer_hash(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Hash the parts of a tokenizer that determine the tokens of a text, without special tokens."""
    if not tokenizer.is_fast:
        return cache_key(tokenizer.get_vocab())
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    # Truncation and padding remain from the last call. Saving a model may change the other two.
    for part in ("truncation", "padding", "post_processor", "decoder"):
        parts.pop(part, None)
    return cache_key(parts)


def _group(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Group neighbouring pieces to about `SHARD_BYTES`. A piece of unknown size stays alone."""
    group: list[Piece] = []
    size = 0
    for piece in pieces:
        if group and (not piece.size or size + piece.size > SHARD_BYTES):
            yield group
            group, size = [], 0
        group.append(piece)
        size += piece.size
    yield group
