"""The small files that the commands of `golden_cases.py` read: rows, texts, vectors and recipes."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np

PIPELINE = """verb: compress
task: demo-topic
data: {train_rows: 200, judged_rows: 60}
measure: {latency: false}
plan: {finetune: {train: {max_steps: 6, batch_size: 8, dtype: fp32, log_every: 1}}}
steps:
  - distill:
      student: {to: [2x64]}
      method: soft-targets
      train: {max_steps: 6, batch_size: 8, dtype: fp32, log_every: 1}
  - prune:
      method: smp
      sparsity: [0.5]
      train: {max_steps: 6, batch_size: 8, dtype: fp32, log_every: 1}
  - quantize: {format: onnx}
"""
SEARCH = """verb: compress
task: demo-topic
data: {train_rows: 200, judged_rows: 60}
measure: {min_runs: 2, min_seconds: 0.0}
plan:
  backends: [onnx]
  shapes: [2x64, 1x32]
  prune: null
  trim_from: 1.0
  undistilled: false
  distill: {train: {max_steps: 8, batch_size: 8, dtype: fp32, log_every: 1}}
"""

# Words that the demo's tokenizer knows as a whole, in part, or not at all.
VOCABULARY = (
    "they say that the grukmers are rokpair of and in to with on for as by at from this is was "
    "it be not or an have but one all we can her has there been if more when will who so no "
    "about zap lorem velt brimo kasten dorula mipset trenk"
)
WORDS = VOCABULARY.split()
KINDS = ("alpha", "beta")


def _words(rng: random.Random, lowest: int = 4, highest: int = 9) -> list[str]:
    """Draw a number of words between `lowest` and `highest`, both included."""
    return rng.choices(WORDS, k=rng.randint(lowest, highest))


def _class(rng: random.Random, index: int) -> dict[str, object]:
    kind = index % 2
    words = [*_words(rng), *rng.choices(WORDS[kind * 10 : kind * 10 + 10], k=3)]
    return {"text": " ".join(words), "label": KINDS[kind]}


def _score(rng: random.Random, index: int) -> dict[str, object]:
    words = _words(rng)
    return {"text": " ".join(words), "label": len(words) / 2 + index % 3}


def _multi(rng: random.Random, index: int) -> dict[str, object]:
    labels = [name for bit, name in enumerate(KINDS) if index >> bit & 1]
    return {"text": " ".join(_words(rng)), "label": labels}


def _tokens(rng: random.Random, index: int) -> dict[str, object]:
    words = _words(rng)
    tags = ["B-LOC" if word in WORDS[5:12] else "O" for word in words]
    return {"tokens": words, "ner_tags": tags}


def _span(rng: random.Random, index: int) -> dict[str, object]:
    words = _words(rng, 6, 12)
    place = rng.randrange(len(words))
    start = len(" ".join([*words[:place], ""]))
    answers = {"text": [words[place]], "answer_start": [start]}
    question = f"{words[place]} is where"
    return {
        "id": f"q{index}",
        "question": question,
        "context": " ".join(words),
        "answers": answers,
    }


def _generation(rng: random.Random, index: int) -> dict[str, object]:
    words = _words(rng, 3, 6)
    return {"source": " ".join(words), "target": " ".join(words[::-1][:4])}


def _pair(rng: random.Random, index: int) -> dict[str, object]:
    words, shared = _words(rng, 6, 6), index % 6
    other = [*words[:shared], *_words(rng, 6 - shared, 6 - shared)] if shared < 6 else words
    return {"a": " ".join(words), "b": " ".join(other), "label": shared + 0.5}


def _list(rng: random.Random, index: int) -> dict[str, object]:
    query = _words(rng, 2, 3)
    passages = [" ".join([*query, *_words(rng, 2, 3)]), *(" ".join(_words(rng)) for _ in range(2))]
    return {"query": " ".join([*query, f"{index}"]), "passages": passages, "labels": [1, 0, 0]}


def _scored_list(rng: random.Random, index: int) -> dict[str, object]:
    scores = [2.0 + rng.random(), rng.random(), -rng.random()]
    return _list(rng, index) | {"scores": scores}


TRAIN_ROWS, HELD_OUT_ROWS = 64, 24
ROW_OF_KIND: dict[str, Callable[[random.Random, int], dict[str, object]]] = {
    "class": _class,
    "score": _score,
    "multi": _multi,
    "tokens": _tokens,
    "span": _span,
    "generation": _generation,
    "pairs": _pair,
    "lists": _list,
    "scored-lists": _scored_list,
}
"""Name of a data set -> function that draws its row with a given number."""


def _write_rows(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def write_inputs(folder: Path) -> None:
    """Write the data files of all cases, with the same bytes in every call."""
    for kind, row in ROW_OF_KIND.items():
        rng = random.Random(kind)
        train = (row(rng, index) for index in range(TRAIN_ROWS))
        _write_rows(folder / kind / "train.jsonl", train)
        held_out = (row(rng, TRAIN_ROWS + index) for index in range(HELD_OUT_ROWS))
        _write_rows(folder / kind / "validation.jsonl", held_out)
    rng = random.Random("texts")
    texts = [" ".join([*_words(rng), f"{index}"]) for index in range(160)]
    (folder / "texts.txt").write_text("\n".join(texts), "utf-8")
    triples = (
        {"query": text, "positive": text.rsplit(" ", 2)[0], "negative": other}
        for text, other in itertools.pairwise(texts)
    )
    _write_rows(folder / "triples.jsonl", triples)
    _write_retrieval(folder / "beir", texts)
    generator = np.random.default_rng(0)
    vectors = generator.standard_normal((len(texts), 24)).astype(np.float32)
    np.save(folder / "vectors.npy", vectors)
    _write_parquet(folder / "vectors.parquet", texts, vectors)
    odds = generator.random(TRAIN_ROWS)
    np.save(folder / "soft.npy", np.stack([odds, 1 - odds], axis=1))
    (folder / "pipeline.yaml").write_text(PIPELINE, "utf-8")
    (folder / "search.yaml").write_text(SEARCH, "utf-8")


def _write_parquet(path: Path, texts: list[str], vectors: np.ndarray) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": texts[::-1], "vector": list(vectors[::-1])}), path)


def _write_retrieval(folder: Path, texts: list[str]) -> None:
    documents = ({"_id": f"d{n}", "title": "", "text": text} for n, text in enumerate(texts[:40]))
    _write_rows(folder / "corpus.jsonl", documents)
    queries = ({"_id": f"q{n}", "text": texts[n][: 6 + n]} for n in range(20))
    _write_rows(folder / "queries.jsonl", queries)
    lines = ["query-id\tcorpus-id\tscore", *(f"q{n}\td{n}\t1" for n in range(20))]
    (folder / "qrels").mkdir()
    (folder / "qrels" / "test.tsv").write_text("\n".join(lines), "utf-8")
