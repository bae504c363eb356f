"""The teacher's vectors from a file: of any model, whatever made them."""

from pathlib import Path
from typing import Any

import numpy as np

from kdcli.data.text.sentences import Texts
from kdcli.errors import UsageError

Array = np.ndarray[Any, Any]


def read_vectors(file: Path, texts: Texts) -> Array:
    """The vector of each text, [N, E]. A `.npy` array [rows, E] has one for each text of the source, in its order; a
    `.parquet` file has the columns `text` and `vector`. Raises UsageError: another format, number or kind of values; a
    text without a vector; a vector that is zero or not finite."""
    if not file.is_file():
        raise UsageError(f"no vectors at {file}", "give a .npy or .parquet file")
    if file.suffix not in (".npy", ".parquet"):
        raise UsageError(f"{file} is neither .npy nor .parquet")
    found = _of_npy(file, texts) if file.suffix == ".npy" else _of_parquet(file, texts)
    norms_N = np.linalg.norm(np.asarray(found, dtype=np.float32), axis=1)
    if len(wrong := np.flatnonzero(~np.isfinite(norms_N) | (norms_N == 0))):
        shown = f"{texts.texts[int(wrong[0])]!r:.60}"
        raise UsageError(f"{file}: {len(wrong):,} vectors are zero or not finite, the first of the text {shown}")
    return found


def _of_npy(file: Path, texts: Texts) -> Array:
    try:
        # Maps the file; refuses arrays of objects, which are pickled.
        rows_RE = np.lib.format.open_memmap(file, mode="r")
    except (ValueError, EOFError, OSError) as error:
        raise UsageError(f"{file} is not a .npy array that can be read: {' '.join(str(error).split())}") from None
    if rows_RE.ndim != 2 or rows_RE.dtype.kind != "f":
        raise UsageError(
            f"{file} holds {rows_RE.dtype} {list(rows_RE.shape)}; it must hold floats, a row for each text"
        )
    if len(rows_RE) != texts.read or (texts.rows < 0).any():
        pairs = "; pairs need a .parquet file with the columns text and vector" if texts.paired else ""
        raise UsageError(f"{file} has {len(rows_RE):,} vectors for {texts.read:,} texts{pairs}")
    return np.asarray(rows_RE[texts.rows])


def _of_parquet(file: Path, texts: Texts) -> Array:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(file)
        if missing := {"text", "vector"}.difference(table.schema_arrow.names):
            there = ", ".join(table.schema_arrow.names)
            raise UsageError(f"{file} has no column {' and '.join(sorted(missing))}; there are {there}")
        number = {text: n for n, text in enumerate(texts.texts)}
        found: Array | None = None
        seen = np.zeros(len(texts), dtype=bool)
        for batch in table.iter_batches(columns=["text", "vector"], batch_size=4096):
            at = [number.get(text, -1) for text in batch.column("text").to_pylist()]
            vectors = np.array(batch.column("vector").to_pylist(), dtype=np.float32)
            if vectors.ndim != 2 or (found is not None and vectors.shape[1] != found.shape[1]):
                raise UsageError(f"{file}: the vectors differ in length")
            found = np.zeros((len(texts), vectors.shape[1]), np.float32) if found is None else found
            known = np.array(at) >= 0
            found[np.array(at)[known]], seen[np.array(at)[known]] = vectors[known], True
    except (pa.ArrowException, ValueError, TypeError, OSError) as error:
        raise UsageError(f"{file} is not a parquet file of texts and vectors: {' '.join(str(error).split())}") from None
    if found is None or not seen.all():
        first = texts.texts[int(np.flatnonzero(~seen)[0])]
        raise UsageError(
            f"{file} has no vector for {int((~seen).sum()):,} of {len(texts):,} texts, the first {first!r:.60}"
        )
    return found
