"""Vectors of texts from anywhere: a file, a directory of shards, a pattern, a URL, or a data set.

Shards are read one after another, some rows at a time. The vectors of the texts that are used are
kept, in a temporary file if they are large, so memory depends on neither.
"""

import glob
import itertools
import re
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import fsspec
import numpy as np
import torch
from fsspec.implementations.local import LocalFileSystem
from safetensors import SafetensorError, safe_open

from kdcli.data.readers import placed_texts, read_rows
from kdcli.data.rows import Piece, Row, columns_in, names_in, take_first
from kdcli.data.sources import SAVED_DICT, SAVED_STATE, FileSource, open_source
from kdcli.data.storage import NotFound, base_name, list_names, open_binary, remote_errors
from kdcli.data.text.sentences import Texts
from kdcli.disk import disk_errors, user_path
from kdcli.errors import MachineError, UsageError, one_line
from kdcli.targets.precomputed import check_floats, open_npy
from kdcli.types import Array

ROWS_AT_ONCE = 1024
MAX_IN_MEMORY = 1 << 26  # Bytes of the chosen vectors. More are in a temporary file.
ARRAYS = ("npy", "safetensors")
TABLES = ("parquet", "arrow", "jsonl", "ndjson")
TEXT, VECTOR, IDS = "text", "vector", ("id", "_id")
PART = re.compile(r"(\d+)-of-(\d+)|(\d+)(?!.*\d)")  # The number of a shard in its name.
SAME = 0.01  # Two vectors of one text may differ by this share of their length.
HINT = (
    "give .npy, .safetensors, .parquet, .arrow or .jsonl files: one file, a directory, a pattern, "
    "a URL, a directory of save_to_disk, or a data set of the hub"
)


class VectorRows(NamedTuple):
    """Some rows of a shard.

    Attributes:
        vectors_BE: The vectors.
        keys: The text or the id of each vector; None if vectors are matched by their order.
        key: The column of the keys; None if there is none.
        place: Returns the place of a row, `shard:number`.
    """

    vectors_BE: Array
    keys: Sequence[object] | None
    key: str | None
    place: Callable[[int], str]


def read_vectors(
    source: str,
    texts: Texts,
    data: str,
    column: str | None = None,
    numbers: Mapping[object, int] | None = None,
) -> Array:
    """Read the vectors of texts, [N, E].

    Rows with a column `text`, or the column of the texts, are matched by the text. Rows with a
    column `id` or `_id` are matched by that column of the texts. All others are matched by their
    order, with one vector for each text of the source.

    Args:
        source: A file, directory, pattern, URL or data set of the hub.
        texts: The texts.
        data: The source of the texts, for their ids.
        column: The column of the texts; None if it was chosen by its name.
        numbers: The number of each text by its id; None reads the ids of the source.

    Raises:
        UsageError: There are no vectors, a shard is missing or there twice, vectors differ in width
            or type, a text has no vector or two different ones, or a vector is zero or not finite.
    """
    chosen = _ChosenVectors(source, texts)
    shards = _shards(source)
    for shard in shards:
        chosen.begin(shard.name)
        for rows in shard.read(TEXT if column is None else column):
            chosen.add(rows, lambda: _ids(data, texts, column) if numbers is None else numbers)
    return chosen.close()


class _Shard(NamedTuple):
    """A shard: its name, and a function that reads its rows, given the column of texts."""

    name: str
    read: Callable[[str], Iterator[VectorRows]]


def _shards(source: str) -> list[_Shard]:
    """Find the shards of a source, in order.

    Raises:
        UsageError: There are none, they are of several formats, or a shard is missing or double.
    """
    names = _files(source)
    if names is None:
        if base_name(source).rpartition(".")[2].lower() in (*ARRAYS, *TABLES):
            raise UsageError(f"no vectors at {source}: there is no such file", HINT)
        try:
            opened = open_source(source)
        except NotFound:
            raise UsageError(f"no vectors at {source}", HINT) from None
        except (UsageError, MachineError) as error:
            # Its hint is about --data.
            raise type(error)(f"no vectors at {source}: {error.message}", HINT) from None
        if isinstance(opened, FileSource):
            # `save_to_disk` lists its files in their order.
            return [_table(str(file)) for file in opened.files["train"]]
        return [
            _Shard(table.name, partial(_read_table, table.rows, table.name))
            for table in opened.tables("train")
        ]
    endings = {name: base_name(name).rpartition(".")[2].lower() for name in names}
    shards = [name for name in names if endings[name] in (*ARRAYS, *TABLES)]
    if not shards:
        held = list_names(sorted(map(base_name, names)))
        raise UsageError(f"{source} has no vectors of a known format; there is {held}", HINT)
    formats = sorted({endings[name] for name in shards})
    if len(formats) > 1:
        raise UsageError(
            f"{source} has vectors in several formats: .{', .'.join(formats)}",
            f"give a pattern, such as '*.{formats[0]}'",
        )
    if base_name(source) != base_name(shards[0]):
        shards = _in_order(shards, source)
    if formats[0] in ARRAYS:
        return [_Shard(name, partial(_read_array, name)) for name in shards]
    return list(map(_table, shards))


def _table(name: str) -> _Shard:
    return _Shard(name, partial(_read_table, read_rows(Piece(name)), name))


def _files(source: str) -> list[str] | None:
    """List the files of a source; None for a directory of `save_to_disk`, or if there are none."""
    where = source if "://" in source else str(user_path(source))
    with remote_errors(source):
        system, path = fsspec.core.url_to_fs(where)
        if system.isfile(path):
            paths = [path]
        elif system.isdir(path):
            entries = system.ls(path, detail=True)
            paths = [entry["name"] for entry in entries if entry["type"] == "file"]
            if "://" not in source and {SAVED_DICT, SAVED_STATE} & set(map(base_name, paths)):
                return None
        else:
            paths = system.glob(path) if glob.has_magic(path) else []
        if not paths:
            return None
        local = isinstance(system, LocalFileSystem)
        return sorted(p if local else system.unstrip_protocol(p) for p in paths)


def _in_order(names: Sequence[str], source: str) -> list[str]:
    """Sort shards by the numbers in their names, or by their names if these differ otherwise.

    Raises:
        UsageError: A shard is missing, or two have the same number.
    """
    parts = [(name, PART.search(base_name(name))) for name in names]
    numbered = [(name, part) for name, part in parts if part is not None]
    prefixes = {base_name(name)[: part.start()] for name, part in numbered}
    if len(numbered) < len(names) or len(prefixes) > 1:
        return sorted(names)
    by_number: dict[int, str] = {}
    for name, part in numbered:
        number = int(part[1] or part[3])
        if by_number.setdefault(number, name) != name:
            twins = f"{base_name(by_number[number])} and {base_name(name)}"
            raise UsageError(f"{source} has shard {number} twice: {twins}", "move one of them away")
    first, last = min(by_number), max(by_number)
    if count := max(int(part[2] or 0) for _, part in numbered):
        first = 1 if count in by_number else 0
        last = max(last, first + count - 1)
    missing = [number for number in range(first, last + 1) if number not in by_number]
    if missing:
        held = list_names([base_name(by_number[number]) for number in sorted(by_number)])
        raise UsageError(
            f"{source} lacks shard {missing[0]} of {first} to {last}; there is {held}",
            "give all shards, numbered without gaps",
        )
    return [by_number[number] for number in sorted(by_number)]


@contextmanager
def _local_copy(name: str) -> Iterator[Path]:
    """Give a file's path on this machine. A file at a URL is copied for as long as it is read."""
    if "://" not in name:
        yield Path(name)
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / base_name(name)
        with disk_errors(copy), open_binary(name) as remote, copy.open("wb") as file:
            shutil.copyfileobj(remote, file, 1 << 20)
        yield copy


def _read_array(name: str, text: str) -> Iterator[VectorRows]:
    """Read the rows of a .npy or .safetensors file, which are in the order of the texts."""
    with _local_copy(name) as path:
        read = _open_npy if path.suffix.lower() == ".npy" else _open_safetensors
        for first, vectors_BE in read(path, name):
            yield VectorRows(vectors_BE, None, None, partial(_place, name, first))


def _place(name: str, first: int, row: int) -> str:
    return f"{name}:{first + row + 1}"


def _open_npy(path: Path, name: str) -> Iterator[tuple[int, Array]]:
    array = open_npy(path, name)
    check_floats(name, str(array.dtype), array.shape, is_float=array.dtype.kind == "f")
    for first in range(0, len(array), ROWS_AT_ONCE):
        rows_BE = array[first : first + ROWS_AT_ONCE]
        if not array.flags.f_contiguous:
            # What was read of a map takes memory until the map is closed, so each part has its own.
            offset = array.offset + first * array.strides[0]
            rows_BE = np.memmap(path, array.dtype, "r", offset, rows_BE.shape)
        yield first, rows_BE


def _open_safetensors(path: Path, name: str) -> Iterator[tuple[int, Array]]:
    try:
        with safe_open(path, framework="pt") as file:
            keys = list(file.keys())
            key = f"{VECTOR}s" if f"{VECTOR}s" in keys else keys[0] if len(keys) == 1 else None
            if key is None:
                raise UsageError(
                    f"{name} holds the tensors {list_names(keys)}", f"call one of them {VECTOR}s"
                )
            tensor = file.get_slice(key)
            shape, dtype = tensor.get_shape(), tensor.get_dtype()
            check_floats(name, dtype, shape, is_float=dtype in ("F16", "BF16", "F32", "F64"))
        for first in range(0, shape[0], ROWS_AT_ONCE):
            with safe_open(path, framework="pt") as file:
                rows_BE = file.get_slice(key)[first : first + ROWS_AT_ONCE]
            # NumPy has no bfloat16.
            rows_BE = rows_BE.float() if rows_BE.dtype == torch.bfloat16 else rows_BE
            yield first, rows_BE.numpy()
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{name} cannot be read as safetensors: {one_line(error)}") from None


def _read_table(rows: Iterable[Row], name: str, text: str) -> Iterator[VectorRows]:
    """Read the rows of a table with a column of vectors, and perhaps one of texts or ids.

    Raises:
        UsageError: A row has no vector.
    """
    first, remaining = take_first(rows)
    names = names_in(first)
    vector = _vector_column(first, names, name)
    key = next((column for column in (text, TEXT, *IDS) if column in names), None)
    width = None
    while part := list(itertools.islice(remaining, ROWS_AT_ONCE)):
        vectors = [values.get(vector) for _, values in part]
        for (where, _), value in zip(part, vectors, strict=True):
            if not isinstance(value, list) or not value:
                found = "no numbers" if value == [] else type(value).__name__
                raise UsageError(f"{where}: column '{vector}' holds {found}, not a vector")
            width = len(value) if width is None else width
            if len(value) != width:
                raise UsageError(
                    f"{where}: the vector has {len(value)} numbers, and those before it {width}"
                )
        try:
            vectors_BE = np.array(vectors, dtype=np.float32)
        except (ValueError, TypeError, OverflowError):
            wrong = next(
                row.where for row, value in zip(part, vectors, strict=True) if not _is_vector(value)
            )
            raise UsageError(
                f"{wrong}: column '{vector}' holds other values than numbers"
            ) from None
        keys = [_key_of(row, key) for row in part] if key else None
        yield VectorRows(vectors_BE, keys, key, [row.where for row in part].__getitem__)


def _key_of(row: Row, column: str) -> Hashable:
    """Return the value by which a row is matched.

    Raises:
        UsageError: It is a list or an object.
    """
    value = row.values.get(column)
    if not isinstance(value, Hashable):
        raise UsageError(
            f"{row.where}: column '{column}' holds {value!r:.60}",
            "give it strings or numbers, by which texts and vectors can be matched",
        )
    return value.strip() if isinstance(value, str) else value


def _vector_column(rows: Sequence[Row], names: Sequence[str], name: str) -> str:
    """Choose the column of vectors: `vector`, or the only one that holds lists of numbers."""
    if not rows:
        raise UsageError(f"{name} holds no rows")
    if VECTOR in names:
        return VECTOR
    found = [column for column in names if _is_vector(rows[0].values.get(column))]
    if len(found) != 1:
        raise UsageError(
            f"{name} has no column {VECTOR}; {columns_in(names)}",
            f"call the column with the lists of numbers {VECTOR}",
        )
    return found[0]


def _is_vector(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(x, int | float) and not isinstance(x, bool) for x in value)
    )


def _ids(data: str, texts: Texts, column: str | None) -> dict[object, int]:
    """Return the number of each text that is used, by the value of its column `id`.

    Raises:
        UsageError: A row has no id, or two rows have the same one.
    """
    numbers = {int(row): number for number, row in enumerate(texts.rows)}
    found: dict[object, int] = {}
    position = 0
    for table in open_source(data).tables("train"):
        ids: deque[object] = deque()

        def rows_with_ids(rows: Iterable[Row], ids: deque[object] = ids) -> Iterator[Row]:
            for row in rows:
                ids.append(_key_of(row, next((key for key in IDS if key in row.values), IDS[0])))
                yield row

        for where, text in placed_texts(rows_with_ids(table.rows), column):
            own = ids.popleft()
            if not text:
                continue
            number = numbers.get(position)
            position += 1
            if number is None:
                continue
            if own is None:
                raise UsageError(
                    f"{where} has no '{IDS[0]}', and the vectors are matched by it",
                    f"give the texts a column {IDS[0]}, or the vectors a column {TEXT}",
                )
            if own in found:
                raise UsageError(f"{where} has the id {own!r}, which another text has too")
            found[own] = number
    return found


class _ChosenVectors:
    """The vectors of the texts, as far as they were read."""

    def __init__(self, source: str, texts: Texts) -> None:
        self._source, self._texts = source, texts
        self._shards: dict[str, int] = {}  # The number of rows of each shard.
        self._vectors_NE: Array | None = None
        self._dtype: np.dtype[np.generic] | None = None
        self._first = ""
        self._seen_N = np.zeros(len(texts), dtype=bool)
        self._key: str | None = None
        self._numbers: Mapping[object, int] | None = None
        self._order = np.argsort(texts.rows, kind="stable")
        self._sorted_rows = texts.rows[self._order]

    def begin(self, shard: str) -> None:
        """Begin the next shard."""
        self._shards[shard] = 0

    def add(self, rows: VectorRows, ids: Callable[[], Mapping[object, int]]) -> None:
        """Keep the vectors of the texts; `ids` returns the number of each text by its id."""
        (*_, shard) = self._shards
        vectors_BE = rows.vectors_BE
        if self._vectors_NE is None:
            self._first, self._dtype = shard, vectors_BE.dtype
            self._key, self._numbers = rows.key, self._numbers_by(rows.key, ids)
            self._vectors_NE = _new_array((len(self._texts), vectors_BE.shape[1]), vectors_BE.dtype)
        width = self._vectors_NE.shape[1]
        if vectors_BE.shape[1] != width:
            raise UsageError(
                f"{rows.place(0)}: the vector has {vectors_BE.shape[1]} numbers, and those before "
                f"it {width}"
            )
        if vectors_BE.dtype != self._dtype:
            raise UsageError(
                f"{shard} holds {vectors_BE.dtype}, and {self._first} {self._dtype}",
                "write all shards with the same type",
            )
        begin = sum(self._shards.values())
        self._shards[shard] += len(vectors_BE)
        if rows.key != self._key:
            raise UsageError(
                f"{shard} has the column {rows.key}, and {self._first} {self._key}",
                "give the same columns to all shards",
            )
        if rows.keys is None or self._numbers is None:
            # Positives and negatives have no row of their own, see `close`.
            low, high = np.searchsorted(self._sorted_rows, [begin, begin + len(vectors_BE)])
            at, own = self._order[low:high], self._sorted_rows[low:high] - begin
        else:
            numbers = self._numbers
            known = np.array([numbers.get(key, -1) for key in rows.keys])
            own = np.flatnonzero(known >= 0)
            at = known[own]
            at, own = self._without_repeated(at, own, rows)
        norms = np.linalg.norm(vectors_BE[own].astype(np.float32), axis=1)
        if len(wrong := np.flatnonzero(~np.isfinite(norms) | (norms == 0))):
            number = int(wrong[0])
            raise UsageError(
                f"{rows.place(int(own[number]))}: the vector is zero or not finite, for the text "
                f"{self._texts.texts[int(at[number])]!r:.60}",
                "encode the text again, or remove the text and its vector",
            )
        self._vectors_NE[at], self._seen_N[at] = vectors_BE[own], True

    def close(self) -> Array:
        """Return the vectors. Raises UsageError if a text has none."""
        texts, count = self._texts, sum(self._shards.values())
        if self._vectors_NE is None:
            raise UsageError(f"{self._source} holds no vectors", HINT)
        if self._numbers is None and (count != texts.read or (texts.rows < 0).any()):
            pairs = f"; pairs need the columns {TEXT} and {VECTOR}" if texts.paired else ""
            raise UsageError(
                f"{self._source} has {count:,} vectors for {texts.read:,} texts{pairs}"
                f"{self._odd_shard()}",
                f"give one vector for each text of --data, in its order, or tables with a column "
                f"{TEXT} or {IDS[0]}",
            )
        if not self._seen_N.all():
            missing = np.flatnonzero(~self._seen_N)
            raise UsageError(
                f"{self._source} has no vector for {len(missing):,} of {len(texts):,} texts, the "
                f"first being {texts.texts[int(missing[0])]!r:.60}"
            )
        return self._vectors_NE

    def _numbers_by(
        self, key: str | None, ids: Callable[[], Mapping[object, int]]
    ) -> Mapping[object, int] | None:
        """Return the number of each text by its value of a column."""
        if key is None:
            return None
        return ids() if key in IDS else {text: n for n, text in enumerate(self._texts.texts)}

    def _without_repeated(self, at: Array, own: Array, rows: VectorRows) -> tuple[Array, Array]:
        """Drop vectors of texts that have one. Raises UsageError if it is another one."""
        assert self._vectors_NE is not None
        first: dict[int, int] = {}
        kept = []
        for n, (number, row) in enumerate(zip(at.tolist(), own.tolist(), strict=True)):
            before = rows.vectors_BE[first[number]] if number in first else None
            if before is None and self._seen_N[number]:
                before = self._vectors_NE[number]
            if before is None:
                first[number] = row
                kept.append(n)
                continue
            difference = np.linalg.norm(before - rows.vectors_BE[row])
            if not difference <= SAME * np.linalg.norm(before):
                raise UsageError(
                    f"{rows.place(row)}: another vector of the text "
                    f"{self._texts.texts[number]!r:.60} was read before",
                    "remove doubled shards and rows",
                )
        return at[kept], own[kept]

    def _odd_shard(self) -> str:
        """Name the first shard, except the last one, with another number of rows than the first."""
        (first, rows), *others = self._shards.items()
        odd = next((item for item in others[:-1] if item[1] != rows), None)
        return f"; {odd[0]} has {odd[1]:,} rows, and {first} {rows:,}" if odd else ""


def _new_array(shape: tuple[int, int], dtype: np.dtype[np.generic]) -> Array:
    """Return an array of zeros, in a temporary file if it is large."""
    if shape[0] * shape[1] * dtype.itemsize <= MAX_IN_MEMORY:
        return np.zeros(shape, dtype)
    with disk_errors(Path(tempfile.gettempdir())), tempfile.TemporaryFile() as file:
        return np.memmap(file, dtype, "w+", shape=shape)
