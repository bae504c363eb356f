"""Token streams: the shards of a split as one array, read through memory maps.

Nothing is copied, and the time to open a stream depends only on the number of its files.
"""

import functools
import itertools
import mmap
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kdcli.data.text.shards import TokenShards
from kdcli.types import Array

# Maximum number of open maps. Each needs a file descriptor, and a process may have a few thousand.
MAX_MAPS = 512
# Streams up to this size are read with read-ahead. Blocks are read in random order, so for a stream
# that does not fit in memory, the system reads 128 KB for each 250 bytes (docs/evidence/speed.md).
MAX_BYTES_READ_AHEAD = 1 << 32


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
