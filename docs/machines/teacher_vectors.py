"""Embed many texts on a Ray cluster: python teacher_vectors.py TEXTS VECTORS URL MODEL

TEXTS is a directory of Parquet files with a column `text`. VECTORS gets a file of the same name for
each, with `text` and `vector`, for `kdcli distill --data VECTORS --teacher-vectors VECTORS`. Files
that are there are skipped, so start it again after a failure. URL is a server with /v1/embeddings,
such as vLLM, text-embeddings-inference or a load balancer in front of several. All nodes need both
directories.
"""

import os
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
import urllib3

TEXTS, VECTORS = map(Path, sys.argv[1:3])
URL, MODEL = sys.argv[3:5]
ROWS = 256  # Texts in a request
COLUMNS = pa.schema({"text": pa.string(), "vector": pa.list_(pa.float32())})
# A server that is busy or starts again is asked for up to ten minutes.
RETRIES = urllib3.Retry(
    14, status_forcelist=(429, 500, 502, 503, 504), allowed_methods=None, backoff_factor=0.5
)


def embed(texts):
    response = urllib3.request(
        "POST",
        f"{URL}/v1/embeddings",
        json={"model": MODEL, "input": texts},
        headers={"Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', 'none')}"},
        retries=RETRIES,
        timeout=600,
    )
    assert response.status == 200, f"status {response.status}: {response.data[:500]!r}"
    rows = sorted(response.json()["data"], key=lambda row: row["index"])
    vectors = np.array([row["embedding"] for row in rows], np.float32)
    assert len(vectors) == len(texts), f"{len(vectors)} vectors for {len(texts)} texts"
    assert np.isfinite(vectors).all(), "a vector is not finite"
    return vectors


@ray.remote(num_cpus=0.25, max_retries=10)  # Four requests under way for each CPU
def embed_file(name):
    unfinished = VECTORS / f"{name}.unfinished"
    with pq.ParquetWriter(unfinished, COLUMNS) as writer:
        for batch in pq.ParquetFile(TEXTS / name).iter_batches(ROWS, columns=["text"]):
            texts = batch["text"].to_pylist()
            writer.write(pa.table({"text": texts, "vector": list(embed(texts))}, COLUMNS))
    unfinished.rename(VECTORS / name)


ray.init()
VECTORS.mkdir(parents=True, exist_ok=True)
names = [path.name for path in sorted(TEXTS.glob("*.parquet"))]
missing = [name for name in names if not (VECTORS / name).exists()]
print(f"{len(names)} files, {len(missing)} to embed")
ray.get([embed_file.remote(name) for name in missing])
