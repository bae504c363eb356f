"""Small texts in every format, and the corpus made of one."""

import bz2
import csv
import gzip
import io
import json
import lzma

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from encoders import tiny_tokenizer
from reading import logged_to

from kdcli.data.text.corpus import Corpus, open_corpus

DOCUMENTS = [f"w{i % 50} w{i % 7} w{i % 11}" for i in range(400)]


def corpus(source, log=None, **changes) -> Corpus:
    given = {
        "max_length": 16,
        "column": None,
        "isolated": False,
        "held_out_blocks": 4,
    }
    with logged_to([] if log is None else log):
        return open_corpus(str(source), tiny_tokenizer(), **given | changes)


def tokens(found: Corpus) -> np.ndarray:
    """The training stream, copied."""
    return np.array(found.train.stream.read(0, len(found.train.stream)))


PACK = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": lambda content: pa.Codec("zstd").compress(content, asbytes=True),
}


def encoded(kind: str, documents) -> bytes:
    """Documents in a format, next to a column that is no text."""
    rows = [{"text": d, "label": 1} for d in documents]
    binary, text = io.BytesIO(), io.StringIO()
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), binary)
    elif kind == "arrow":
        table = pa.Table.from_pylist(rows)
        with pa.ipc.new_stream(binary, table.schema) as writer:
            writer.write_table(table)
    elif kind == "txt":
        text.write("\n".join(documents))
    elif kind == "json":
        json.dump({"version": 1, "data": rows}, text, indent=1)
    elif kind in ("jsonl", "ndjson"):
        text.write("\n".join(map(json.dumps, rows)))
    else:
        writer = csv.DictWriter(text, ["text", "label"], delimiter="\t" if kind == "tsv" else ",")
        writer.writeheader()
        writer.writerows(rows)
    return binary.getvalue() or text.getvalue().encode()


def write(path, documents) -> None:
    """Write documents in the format of the path's name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    *_, kind, packing = path.name.split(".")
    if packing in PACK:
        path.write_bytes(PACK[packing](encoded(kind, documents)))
    else:
        path.write_bytes(encoded(packing, documents))
