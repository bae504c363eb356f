"""Vectors from anywhere: each text gets its own, and anything else is refused with its place."""

import json

import datasets
import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hub_server import hub  # noqa: F401
from safetensors.torch import save_file

from kdcli.data.text.sentences import Texts, read_texts
from kdcli.errors import UsageError
from kdcli.targets import vector_shards
from kdcli.targets.vector_shards import read_vectors

COUNT = 30
ROWS = [f"document {n}" for n in range(COUNT)]
VECTORS = np.arange(1, 3 * COUNT + 1, dtype=np.float32).reshape(COUNT, 3)
CUTS = [slice(0, 7), slice(7, 12), slice(12, COUNT)]


@pytest.fixture
def data(tmp_path):
    file = tmp_path / "texts.jsonl"
    lines = [json.dumps({"text": text, "id": f"id-{n}"}) for n, text in enumerate(ROWS)]
    # An empty row has no vector, and a repeated one has another row of vectors.
    file.write_text("\n".join([json.dumps({"text": " ", "id": "none"}), *lines]))
    return str(file)


def test_tokens_are_no_texts(tmp_path):
    (tmp_path / "meta.json").write_text('{"source": "x", "sep_id": 2, "shards": []}')
    with pytest.raises(UsageError, match="holds tokens of kdcli tokenize"):
        read_texts(str(tmp_path), column=None, unit="sentence", rows=None)


@pytest.fixture
def texts(data) -> Texts:
    return read_texts(data, column=None, unit="document", rows=20)


def parquet(path, **columns):
    pq.write_table(pa.table(columns), path)


def found(texts, data, source):
    vectors_NE = read_vectors(str(source), texts, data)
    return dict(zip(texts.texts, vectors_NE.tolist(), strict=True))


def expected(texts, vectors=VECTORS):
    return {text: vectors[ROWS.index(text)].tolist() for text in texts.texts}


def npy_shards(folder, names=("v-2.npy", "v-3.npy", "v-10.npy")):
    folder.mkdir(exist_ok=True)
    for name, cut in zip(names, CUTS, strict=True):
        np.save(folder / name, VECTORS[cut])
    return folder


def gapless(folder):
    return npy_shards(folder, ("v-9.npy", "v-10.npy", "v-11.npy"))


def of_hub(folder):
    folder.mkdir()
    for number, cut in enumerate(CUTS):
        name = f"train-{number:05}-of-00003-0123456789abcdef.parquet"
        parquet(folder / name, embedding=VECTORS[cut].tolist(), number=list(range(COUNT))[cut])
    (folder / "README.md").write_text("Vectors.")
    return folder


def saved(folder):
    datasets.Dataset.from_dict({"vector": VECTORS.tolist()}).save_to_disk(folder, num_shards=3)
    return folder


def by_text(folder):
    folder.mkdir()
    mixed = np.random.default_rng(0).permutation(COUNT)
    for number, part in enumerate(np.array_split(mixed, 3)):
        text = [*(ROWS[n] for n in part), f"another {number}"]
        parquet(
            folder / f"{number}.parquet", text=text, vector=[*VECTORS[part].tolist(), [0.0] * 3]
        )
    return folder


def by_id(folder):
    folder.mkdir()
    rows = [{"id": f"id-{n}", "vector": VECTORS[n].tolist()} for n in reversed(range(COUNT))]
    (folder / "v.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder / "v.jsonl"


def safetensors(folder):
    folder.mkdir()
    for number, cut in enumerate(CUTS, 1):
        tensor = torch.from_numpy(VECTORS[cut].copy())
        save_file(
            {"vectors": tensor, "norms": tensor.norm(dim=1)}, folder / f"{number}.safetensors"
        )
    return folder


@pytest.mark.parametrize("write", [gapless, of_hub, saved, by_text, by_id, safetensors])
def test_each_text_gets_its_vector(tmp_path, texts, data, write):
    source = write(tmp_path / "vectors")
    assert found(texts, data, source) == expected(texts)
    if write is not saved and write is not by_id:
        assert found(texts, data, source / "*[0-9f]*.*") == expected(texts)
    assert found(texts, data, f"file://{source}") == expected(texts)


def test_each_text_gets_its_vector_from_a_file_system_that_is_not_this_machine(
    tmp_path, texts, data
):
    memory = fsspec.filesystem("memory")
    for write in (gapless, of_hub, safetensors):
        memory.put(str(write(tmp_path / write.__name__)), f"/{write.__name__}", recursive=True)
        assert found(texts, data, f"memory://{write.__name__}") == expected(texts)
    memory.rm("/gapless/v-10.npy")
    with pytest.raises(
        UsageError, match=r"memory://gapless lacks shard 10 of 9 to 11; there is v-9"
    ):
        read_vectors("memory://gapless", texts, data)


def test_each_text_gets_its_vector_from_the_hub(tmp_path, texts, data, hub):  # noqa: F811
    hub.add("someone/vectors", by_text(tmp_path / "vectors"))
    with hub.known(tmp_path / "home"):
        assert found(texts, data, "someone/vectors") == expected(texts)


def test_half_precision_and_pairs(tmp_path, texts, data):
    for dtype, name in ((torch.bfloat16, "b.safetensors"), (torch.float16, "h.safetensors")):
        save_file({"v": torch.from_numpy(VECTORS).to(dtype)}, tmp_path / name)
        assert found(texts, data, tmp_path / name) == expected(texts)
    np.save(tmp_path / "h.npy", VECTORS.astype(np.float16))
    assert read_vectors(str(tmp_path / "h.npy"), texts, data).dtype == np.float16
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("\n".join(json.dumps({"query": t, "positive": f"{t}!"}) for t in ROWS))
    linked = read_texts(str(pairs), column=None, unit="document", rows=None)
    with pytest.raises(
        UsageError, match="30 vectors for 30 texts; pairs need the columns text and"
    ):
        read_vectors(str(tmp_path / "h.npy"), linked, str(pairs))


def test_many_vectors_are_in_a_file(tmp_path):
    file, count = tmp_path / "texts.txt", 40_000
    file.write_text("\n".join(f"document {n}" for n in range(count)))
    every = read_texts(str(file), column=None, unit="document", rows=None)
    vectors = np.random.default_rng(0).standard_normal((count, 512), dtype=np.float32)
    np.save(tmp_path / "v.npy", vectors)
    chosen = read_vectors(str(tmp_path / "v.npy"), every, str(file))
    assert isinstance(chosen, np.memmap)
    assert vectors.nbytes > vector_shards.MAX_IN_MEMORY
    assert np.array_equal(chosen, vectors[every.rows])


NAN, ZERO, TABLE = VECTORS.copy(), VECTORS.copy(), VECTORS.tolist()
NAN[:, 1], ZERO[:] = np.nan, 0


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"v.npy": VECTORS[:4]}, r"/vectors has 4 vectors for 30 texts\ngive one"),
        (
            {"v.npy": VECTORS[:, 0]},
            r"v.npy holds float32 \[30\]; it must hold floats, with one row",
        ),
        ({"v.npy": VECTORS.astype(int)}, r"v.npy holds int64 \[30, 3\]; it must hold floats"),
        (
            {"v.npy": NAN},
            r"v.npy:\d+: the vector is zero or not finite, for the text 'document \d+'",
        ),
        ({"v.npy": ZERO}, r"v.npy:\d+: the vector is zero or not finite"),
        (
            {"v-1.npy": VECTORS[:7], "v-2.npy": VECTORS[7:, :2]},
            "v-2.npy:1: the vector has 2 numbers, and those before it 3",
        ),
        (
            {"v-1.npy": VECTORS[:7], "v-2.npy": VECTORS[7:].astype(np.float16)},
            r"v-2.npy holds float16, and .*v-1.npy float32",
        ),
        (
            {"v-1.npy": VECTORS[:8], "v-2.npy": VECTORS[:7], "v-3.npy": VECTORS[:7]},
            "has 22 vectors for 30 texts; .*/v-2.npy has 7 rows, and .*/v-1.npy 8",
        ),
        (
            {"v-1.npy": VECTORS, "v-3.npy": VECTORS},
            "lacks shard 2 of 1 to 3; there is v-1.npy, v-3",
        ),
        ({"v-1.npy": VECTORS, "v-01.npy": VECTORS}, "has shard 1 twice: v-01.npy and v-1.npy"),
        (
            {"v-00001-of-00003.npy": VECTORS, "v-00002-of-00003.npy": VECTORS},
            "lacks shard 0 of 0 to 2",
        ),
        ({"1.npy": VECTORS, "2.parquet": {"vector": TABLE}}, "in several formats: .npy, .parquet"),
        ({"v.txt": b"one"}, "has no vectors of a known format; there is v.txt"),
        ({"v.npy": VECTORS[:, :0]}, r"v.npy holds float32 \[30, 0\]; it must hold floats"),
        ({"v.npy": b"\x93NUMPY"}, "v.npy cannot be read as a .npy array"),
        ({"v.safetensors": b"\x93NUMPY"}, "v.safetensors cannot be read as safetensors"),
        ({"v.parquet": b"PAR1"}, "v.parquet"),
        (
            {"v.parquet": {"text": ROWS, "a": TABLE, "b": TABLE}},
            "has no column vector; the columns are",
        ),
        (
            {"v.parquet": {"text": ROWS[:27], "vector": TABLE[:27]}},
            "has no vector for 2 of 20 texts, the first being 'document 27'",
        ),
        (
            {"v.parquet": {"text": ROWS, "vector": [*TABLE[:9], [1.0], *TABLE[10:]]}},
            "v.parquet:10: the vector has 1 numbers, and those before it 3",
        ),
        (
            {"v.parquet": {"text": ROWS, "vector": [*TABLE[:9], None, *TABLE[10:]]}},
            "v.parquet:10: column 'vector' holds NoneType, not a vector",
        ),
        (
            {"v.parquet": {"id": [["id-0"]] * COUNT, "vector": TABLE}},
            r"v.parquet:1: column 'id' holds \['id-0'\]",
        ),
        (
            {"v.parquet": {"text": [*ROWS, ROWS[27]], "vector": [*TABLE, TABLE[3]]}},
            "v.parquet:31: another vector of the text 'document 27' was read before",
        ),
        (
            {
                "1.parquet": {"text": ROWS[:9], "vector": TABLE[:9]},
                "2.parquet": {"vector": TABLE[9:]},
            },
            "2.parquet has the column None, and .*1.parquet text",
        ),
    ],
)
def test_what_does_not_match_is_refused_with_its_place(tmp_path, data, files, message):
    texts = read_texts(data, column=None, unit="document", rows=20)
    (tmp_path / "vectors").mkdir()
    for name, content in files.items():
        path = tmp_path / "vectors" / name
        if isinstance(content, dict):
            parquet(path, **content)
        elif isinstance(content, bytes):
            path.write_bytes(content)
        else:
            np.save(path, content)
    with pytest.raises(UsageError, match=message):
        read_vectors(str(tmp_path / "vectors"), texts, data)


def test_repeated_vectors_of_a_text_are_no_error(tmp_path, texts, data):
    near = (VECTORS[27] * 1.001).tolist()
    parquet(tmp_path / "v.parquet", text=[*ROWS, ROWS[27]], vector=[*TABLE, near])
    assert found(texts, data, tmp_path / "v.parquet") == expected(texts)


def test_vectors_that_are_not_there_or_have_no_text_are_refused(tmp_path, texts, data):
    # It could be the name of a data set.
    with pytest.raises(UsageError, match=r"no vectors at none\.npy: there is no such file"):
        read_vectors("none.npy", texts, data)
    with pytest.raises(UsageError, match="no vectors at"):
        read_vectors(str(tmp_path / "*.npy"), texts, data)
    parquet(tmp_path / "v.parquet", id=["id-1"], vector=[[1.0]])
    listed = tmp_path / "listed.jsonl"
    listed.write_text(json.dumps({"text": "one", "id": [1]}) + "\n" + json.dumps({"text": "two"}))
    own = read_texts(str(listed), column=None, unit="document", rows=None)
    with pytest.raises(UsageError, match=r"listed.jsonl:1: column 'id' holds \[1\]"):
        read_vectors(str(tmp_path / "v.parquet"), own, str(listed))
    plain = tmp_path / "plain.txt"
    plain.write_text("\n".join(ROWS))
    own = read_texts(str(plain), column=None, unit="document", rows=None)
    with pytest.raises(
        UsageError, match=r"plain.txt:1 has no 'id', and the vectors are matched by it"
    ):
        read_vectors(str(tmp_path / "v.parquet"), own, str(plain))
