"""Retrieval data as BEIR has it, and the rankings that vectors make of them.

A directory holds `corpus.jsonl` (`_id`, `title`, `text`), `queries.jsonl` (`_id`, `text`) and
`qrels/test.tsv` (query, document, relevance).
"""

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kdcli.data.sources import open_source
from kdcli.engine.launch import Session
from kdcli.errors import UsageError
from kdcli.metrics.retrieval import rank_documents, ranking_metrics, similarities
from kdcli.workloads.embedder import Embedder
from kdcli.workloads.rankings import ranking_scores
from kdcli.workloads.workload import Array, ModelScores

RETRIEVAL = "retrieval"
TOP = 100
"""Documents that are ranked for a query."""
QUERIES_AT_ONCE = 256


@dataclass(frozen=True)
class Retrieval:
    """A corpus, queries, and how relevant which documents are to each.

    Attributes:
        name: the directory's name.
        documents, queries: id -> text.
        relevance: query -> document -> relevance.
    """

    name: str
    documents: dict[str, str]
    queries: dict[str, str]
    relevance: dict[str, dict[str, float]]

    def score(self, model: Embedder, session: Session) -> ModelScores:
        """Rank the corpus for each query by a model's vectors."""
        values = retrieval_scores(self, model, session)
        return ranking_scores(RETRIEVAL, "test", values, [model.note])


def read_retrieval(source: str) -> Retrieval:
    """Raises UsageError: a file is missing; an id occurs twice; a judgement of an unknown query or
    document, or two that differ; no query has a relevant document; a judged query without text."""
    folder = Path(source).expanduser()
    qrels = next(
        (p for p in (folder / "qrels" / "test.tsv", folder / "qrels.tsv") if p.is_file()), None
    )
    if not source or qrels is None:
        raise UsageError(
            f"no retrieval data at {source or 'nowhere'}",
            "--data DIR with corpus.jsonl, queries.jsonl and qrels/test.tsv, as BEIR has them",
        )
    documents, queries = (_by_id(folder, name) for name in ("corpus", "queries"))
    relevance: dict[str, dict[str, float]] = {}
    with qrels.open(encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.reader(file, delimiter="\t"), 1):
            if number == 1 and row and not row[-1].strip().lstrip("-").isdigit():
                continue
            if len(row) != 3 or not row[2].strip().lstrip("-").isdigit():
                raise UsageError(
                    f"{qrels}:{number} must hold query, document and relevance, separated by tabs"
                )
            query, document, grade = row[0], row[1], float(row[2])
            if query not in queries or document not in documents:
                unknown = f"query {query}" if query not in queries else f"document {document}"
                raise UsageError(f"{qrels}:{number} judges {unknown}, which is not there")
            if relevance.setdefault(query, {}).setdefault(document, grade) != grade:
                raise UsageError(
                    f"{qrels}:{number} judges document {document} for query {query} again, "
                    "otherwise"
                )
    asked = {q: t for q, t in queries.items() if any(g > 0 for g in relevance.get(q, {}).values())}
    if not asked:
        raise UsageError(f"{qrels} names no relevant document of any query")
    if (blank := next((query for query, text in asked.items() if not text), None)) is not None:
        raise UsageError(
            f"query {blank} of {folder} has no text", "fill it in, or take its judgements out"
        )
    return Retrieval(folder.name, documents, asked, relevance)


def retrieval_scores(data: Retrieval, model: Embedder, session: Session) -> dict[str, Array]:
    """Metric -> its value for each query, [Q]."""
    documents, queries = list(data.documents), list(data.queries)
    d_ND = model.vectors(list(data.documents.values()), "document", session)
    q_QD = model.vectors(list(data.queries.values()), "query", session)
    rankings: list[list[str]] = []
    for begin in range(0, len(queries), QUERIES_AT_ONCE):
        some = queries[begin : begin + QUERIES_AT_ONCE]
        q_some_QD = q_QD[begin : begin + QUERIES_AT_ONCE]
        scores_QN = similarities(q_some_QD, d_ND, model.format.similarity)
        rankings += rank_documents(scores_QN, some, documents, data.relevance, TOP)
    rows = [ranking_metrics(r, data.relevance[q]) for q, r in zip(queries, rankings, strict=True)]
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def _by_id(folder: Path, name: str) -> dict[str, str]:
    file = next(
        (p for p in (folder / f"{name}.jsonl", folder / f"{name}.jsonl.gz") if p.is_file()), None
    )
    if file is None:
        raise UsageError(f"{folder} has no {name}.jsonl")
    found: dict[str, str] = {}
    for _, rows in open_source(str(file)).tables("train"):
        for where, row in rows:
            number, text, title = row.get("_id"), row.get("text"), row.get("title") or ""
            if (
                not isinstance(number, str)
                or not isinstance(text, str)
                or not isinstance(title, str)
            ):
                raise UsageError(
                    f"{where}: needs the texts '_id' and 'text', there are {', '.join(row)}"
                )
            if number in found:
                raise UsageError(f"{where}: _id {number} occurs twice")
            found[number] = f"{title} {text}".strip()
    if not found:
        raise UsageError(f"{file} is empty")
    return found
