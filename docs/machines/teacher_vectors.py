"""Embed many texts on a Ray cluster: python teacher_vectors.py TEXTS VECTORS URL MODEL

TEXTS is a directory of Parquet files with a column `text`. VECTORS gets Parquet files with `text`
and `vector`, for `kdcli distill --data VECTORS --teacher-vectors VECTORS`. URL is a server with
/v1/embeddings, such as vLLM, text-embeddings-inference or a load balancer in front of several.
"""

import json
import os
import sys
import urllib.request

import numpy as np
import ray

TEXTS, VECTORS, URL, MODEL = sys.argv[1:5]
REQUESTS = 64  # Batches under way


def embed(batch):
    body = json.dumps({"model": MODEL, "input": batch["text"].tolist()}).encode()
    headers = {"Content-Type": "application/json"}
    headers["Authorization"] = f"Bearer {os.environ.get('OPENAI_API_KEY', 'none')}"
    request = urllib.request.Request(f"{URL}/v1/embeddings", body, headers)
    with urllib.request.urlopen(request, timeout=600) as answer:
        rows = sorted(json.load(answer)["data"], key=lambda row: row["index"])
    vectors = np.array([row["embedding"] for row in rows], np.float32)
    assert len(vectors) == len(batch["text"]), "the server left texts out"
    return {"text": batch["text"], "vector": vectors}


texts = ray.data.read_parquet(TEXTS, columns=["text"])
vectors = texts.map_batches(
    embed,
    batch_size=256,
    num_cpus=0.25,
    concurrency=REQUESTS,
    max_retries=10,
    retry_exceptions=True,
)
vectors.write_parquet(VECTORS, min_rows_per_file=100_000)
