"""Make lists of candidates for rerankers from labelled pairs of texts.

    python benchmarks/lists.py QNLI OUT [--queries 6000] [--candidates 5] [--judged 500]
                               [--judged-candidates 16]
    python benchmarks/lists.py QQP OUT --columns question1 question2 --positive 1

Each list has a query, the text that belongs to it, and the texts with the best BM25 scores. QNLI
and QQP are directories with train.jsonl.gz and validation.jsonl.gz. The lists are written to
train.jsonl and validation.jsonl in OUT.
"""

import argparse
import gzip
import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
from scipy.sparse import csr_matrix

K1, B = 1.2, 0.75


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def bm25(sentences: list[str]) -> tuple[csr_matrix, dict[str, int]]:
    """Return the weights of words in sentences, [words, sentences], and the row of each word."""
    counts = [Counter(words(sentence)) for sentence in sentences]
    vocabulary = {
        word: n for n, word in enumerate(sorted({word for count in counts for word in count}))
    }
    rows = np.array([vocabulary[word] for count in counts for word in count])
    columns = np.repeat(np.arange(len(counts)), [len(count) for count in counts])
    frequencies = np.array([n for count in counts for n in count.values()], dtype=np.float64)
    lengths = np.array([count.total() for count in counts])
    documents = np.bincount(rows, minlength=len(vocabulary))
    rarity = np.log1p((len(counts) - documents + 0.5) / (documents + 0.5))
    penalties = K1 * (1 - B + B * lengths / lengths.mean())
    saturated = frequencies * (K1 + 1) / (frequencies + penalties[columns])
    shape = len(vocabulary), len(counts)
    return csr_matrix((rarity[rows] * saturated, (rows, columns)), shape=shape), vocabulary


def lists(
    file: Path, columns: tuple[str, str], positive: int, queries: int, candidates: int, seed: int
) -> list[dict[str, object]]:
    with gzip.open(file, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    asking, asked = columns
    sentences = sorted({row[asked] for row in rows})
    weights, vocabulary = bm25(sentences)
    # Only queries with one positive text, because another one would be used as a negative.
    belonging: dict[str, set[str]] = {}
    for row in rows:
        if row["label"] == positive:
            belonging.setdefault(row[asking], set()).add(row[asked])
    answered = {query: texts.pop() for query, texts in belonging.items() if len(texts) == 1}
    chosen = np.random.default_rng(seed).permutation(sorted(answered))[:queries]
    rows_of_split: list[dict[str, object]] = []
    for question in chosen.tolist():
        known = sorted({vocabulary[word] for word in words(question) if word in vocabulary})
        scores = np.asarray(weights[known].sum(axis=0))[0]
        nearest = [sentences[n] for n in np.argsort(-scores, kind="stable")[: candidates + 1]]
        others = [sentence for sentence in nearest if sentence != answered[question]][
            : candidates - 1
        ]
        rows_of_split.append(
            {"query": question, "positive": answered[question], "negative": others}
        )
    return rows_of_split


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pairs", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--columns", nargs=2, default=("question", "sentence"))
    parser.add_argument(
        "--positive", type=int, default=0, help="label of the pairs that belong together"
    )
    parser.add_argument("--queries", type=int, default=6000)
    parser.add_argument("--candidates", type=int, default=5)
    parser.add_argument("--judged", type=int, default=500)
    parser.add_argument("--judged-candidates", type=int, default=16)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    sizes = {
        "train": (options.queries, options.candidates),
        "validation": (options.judged, options.judged_candidates),
    }
    for seed, (split, (queries, candidates)) in enumerate(sizes.items()):
        rows_of_split = lists(
            options.pairs / f"{split}.jsonl.gz",
            tuple(options.columns),
            options.positive,
            queries,
            candidates,
            seed,
        )
        (options.out / f"{split}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows_of_split)
        )


if __name__ == "__main__":
    main()
