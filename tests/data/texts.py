"""Small texts in every format, and the corpus made of one."""

import csv
import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from encoders import tiny_tokenizer

from kdcli.data.text.corpus import Corpus, open_corpus

DOCUMENTS = [f"w{i % 50} w{i % 7} w{i % 11}" for i in range(400)]


def corpus(source, **changes) -> Corpus:
    given = {
        "max_length": 16,
        "column": None,
        "isolated": False,
        "held_out_blocks": 4,
        "log": lambda _: None,
    }
    return open_corpus(str(source), tiny_tokenizer(), **given | changes)


def tokens(found: Corpus) -> np.ndarray:
    """The training stream, copied."""
    return np.array(found.train.stream.read(0, len(found.train.stream)))


def write(path, documents) -> None:
    """Write documents in the format of the path's name, next to a column that is no text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"text": d, "label": 1} for d in documents]
    opened = gzip.open if path.suffix == ".gz" else open
    kind = path.name.removesuffix(".gz").rsplit(".")[-1]
    if kind == "parquet":
        table = pa.Table.from_pylist(rows)
        with opened(path, "wb") as file:
            pq.write_table(table, file)
        return
    with opened(path, "wt", encoding="utf-8", newline="") as file:
        if kind == "txt":
            file.write("\n".join(documents))
        elif kind == "jsonl":
            file.write("\n".join(map(json.dumps, rows)))
        else:
            delimiter = "\t" if kind == "tsv" else ","
            writer = csv.DictWriter(file, ["text", "label"], delimiter=delimiter)
            writer.writeheader()
            writer.writerows(rows)
