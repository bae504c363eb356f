"""Vectors from a file: each text gets its own, anything else is refused."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kdcli.data.text.sentences import Texts, read_texts
from kdcli.errors import UsageError
from kdcli.targets.precomputed import read_vectors

ROWS = [f"document {n}" for n in range(6)]
VECTORS = np.arange(1, 19, dtype=np.float32).reshape(6, 3)


@pytest.fixture
def texts(tmp_path) -> Texts:
    file = tmp_path / "texts.txt"
    file.write_text("\n".join(ROWS))
    return read_texts(str(file), column=None, unit="document", rows=None, log=lambda line: None)


def parquet(path, **columns):
    pq.write_table(pa.table(columns), path)
    return path


def test_each_text_gets_its_vector(tmp_path, texts):
    np.save(tmp_path / "v.npy", VECTORS)
    mixed = [3, 1, 0, 5, 4, 2]
    table = {
        "text": [*(ROWS[n] for n in mixed), "another"],
        "vector": [*(VECTORS[n].tolist() for n in mixed), [0.5] * 3],
    }
    for file in (tmp_path / "v.npy", parquet(tmp_path / "v.parquet", **table)):
        found = read_vectors(file, texts)
        assert found.tolist() == [VECTORS[ROWS.index(text)].tolist() for text in texts.texts]


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (VECTORS[:4], "4 vectors for 6 texts"),
        (VECTORS[:, 0], "one row for each text"),
        (np.array([["a"] * 3] * 6), "must hold floats"),
        (np.array([[{}] * 3] * 6, dtype=object), "cannot|object|allow_pickle|must hold|Array"),
        (np.where(np.arange(6)[:, None] == 2, np.nan, VECTORS), "1 vectors are zero or not finite"),
        (np.where(np.arange(6)[:, None] < 2, 0, VECTORS), "2 vectors are zero or not finite"),
    ],
)
def test_unusable_arrays_are_refused(tmp_path, texts, array, message):
    np.save(tmp_path / "v.npy", array, allow_pickle=True)
    with pytest.raises(UsageError, match=message):
        read_vectors(tmp_path / "v.npy", texts)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"text": ROWS, "embedding": VECTORS.tolist()}, "no column vector"),
        ({"text": ROWS[:5], "vector": VECTORS[:5].tolist()}, "no vector for 1 of 6"),
        (
            {"text": ROWS, "vector": [[1.0], *VECTORS[1:].tolist()]},
            "cannot be read as a parquet file of texts and vectors|length",
        ),
    ],
)
def test_unusable_tables_are_refused(tmp_path, texts, columns, message):
    with pytest.raises(UsageError, match=message):
        read_vectors(parquet(tmp_path / "v.parquet", **columns), texts)


def test_other_files_are_refused(tmp_path, texts):
    for name, content in (("v.npy", b"\x93NUMPY"), ("v.parquet", b"PAR1"), ("v.pkl", b"")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UsageError):
            read_vectors(tmp_path / name, texts)
    with pytest.raises(UsageError, match="no vectors at"):
        read_vectors(tmp_path / "none.npy", texts)
