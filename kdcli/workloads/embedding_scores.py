"""Judging embedding models as they are, without fine-tuning: pairs with a score, and retrieval.

Retrieval reads a directory as BEIR has it: `corpus.jsonl` (`_id`, `title`, `text`), `queries.jsonl` (`_id`, `text`) and
`qrels/test.tsv` (query, document, relevance).
"""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kdcli.data.files import open_source
from kdcli.data.labelled.features import Array
from kdcli.data.labelled.task_data import Labelled, open_labelled
from kdcli.data.tasks import OWN, task_of, tasks
from kdcli.engine.launch import Session
from kdcli.engine.progress import Progress
from kdcli.errors import UsageError
from kdcli.metrics.bootstrap import Scorer
from kdcli.metrics.retrieval import ranking_metrics
from kdcli.models.embedder import read_format
from kdcli.report.schema import Comparison, Evaluation
from kdcli.types import RowHashes
from kdcli.workloads.embedder import Embedder, as_task_model, predict_pairs, scores_pairs
from kdcli.workloads.predictions import compared
from kdcli.workloads.rankings import ranked
from kdcli.workloads.recipes import downstream_recipe
from kdcli.workloads.settings import DownstreamSettings, LabelledSettings
from kdcli.workloads.task import DATA_KEYS, evaluator_of

RETRIEVAL = "retrieval"
TOP = 100  # Documents ranked for a query
QUERIES_AT_ONCE = 256


@dataclass(frozen=True)
class Retrieval:
    """A corpus, queries, and how relevant which documents are to each."""

    name: str
    documents: dict[str, str]
    queries: dict[str, str]
    relevance: dict[str, dict[str, float]]


@dataclass(frozen=True)
class Judged:
    """What embedding models are judged on: pairs with their evaluator's settings, or retrieval."""

    name: str
    pairs: Labelled | None = None
    settings: Any = None
    retrieval: Retrieval | None = None


def judged_sets(settings: DownstreamSettings, trained: Mapping[str, RowHashes]) -> list[Judged]:
    """The tasks of `eval`, read; `trained`: judged model -> the rows that trained it. Raises UsageError: a task that
    vectors cannot be judged on; unusable data."""
    found = []
    for name in settings.tasks:
        if name == RETRIEVAL:
            found.append(Judged(name, retrieval=read_retrieval(settings.source or "")))
            continue
        recipe = downstream_recipe(settings, name, 0).recipe
        found.append(Judged(name, open_pairs(name, recipe.data, trained), recipe.data))
    return found


def by_vectors(task: str, model: str, pooling: str | None = None) -> bool:
    """Whether models are judged on a task by the cosine of their vectors: on pairs with a score, where the first one is
    an embedding model or `pooling` makes it one."""
    pairs = task == OWN or (task in tasks() and scores_pairs(task_of(task)))
    return pairs and (pooling is not None or read_format(model) is not None)


def open_pairs(name: str, settings: LabelledSettings, trained: Mapping[str, RowHashes]) -> Labelled:
    """A task of pairs with a score, without rows that trained a judged model. `trained`: model -> those rows. Raises
    UsageError: another task; unusable data."""
    if name != "own" and not scores_pairs(task_of(name)):
        raise UsageError(
            f"task {name} is not judged by vectors: they are judged on pairs with a score",
            f"known: stsb, own (two texts and a number), {RETRIEVAL}; other tasks need a fine-tuned model",
        )
    where = settings.model_dump(include=DATA_KEYS)
    data = open_labelled(name, training=False, trained=trained, log=Progress.log, **where)
    if not scores_pairs(data.task):
        message = f"the rows of task {name} are of kind {data.task.kind}; vectors are judged on pairs with a score"
        raise UsageError(
            message,
            "name two columns of texts; set data.columns.kind=score for labels of whole numbers",
        )
    # A cosine has not the scale of the scores, and vectors rank: the field compares them by Spearman.
    return replace(data, task=replace(data.task, metrics=("spearman", "pearson")))


def scored(
    judged: Sequence[Judged],
    models: Mapping[str, Embedder],
    session: Session,
    resamples: int = 1000,
) -> tuple[list[Evaluation], list[Comparison]]:
    """Evaluate every model, and compare the others with the first one."""
    evaluations: list[Evaluation] = []
    comparisons: list[Comparison] = []
    for one in judged:
        if one.retrieval is not None:
            values = {
                name: retrieval_scores(one.retrieval, embedder, session)
                for name, embedder in models.items()
            }
            rows, differences = ranked(one.name, "test", values, resamples)
        else:
            rows, differences = _scored_pairs(one, models, session, resamples)
        evaluations, comparisons = evaluations + rows, comparisons + differences
    return evaluations, comparisons


def _scored_pairs(
    one: Judged, models: Mapping[str, Embedder], session: Session, resamples: int
) -> tuple[list[Evaluation], list[Comparison]]:
    assert one.pairs is not None
    evaluations: list[Evaluation] = []
    scorers: dict[str, Mapping[str, Scorer]] = {}
    for name, embedder in models.items():
        evaluator, _ = evaluator_of(one.pairs, one.settings, as_task_model(embedder))
        predictions = predict_pairs(embedder, evaluator, session)
        scorers[name] = evaluator.scorers(predictions)
        evaluations += evaluator.evaluations(name, one.pairs.split, predictions, 0)
    baseline, *others = scorers.items()
    return evaluations, [
        row for other in others for row in compared(evaluator, other, baseline, resamples)
    ]


def read_retrieval(source: str) -> Retrieval:
    """Raises UsageError: a file is missing; an id occurs twice; a judgement of an unknown query or document, or two
    that differ; no query has a relevant document; a judged query without text."""
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
                    f"{qrels}:{number} judges document {document} for query {query} again, otherwise"
                )
    asked = {q: t for q, t in queries.items() if any(g > 0 for g in relevance.get(q, {}).values())}
    if not asked:
        raise UsageError(f"{qrels} names no relevant document of any query")
    if (blank := next((query for query, text in asked.items() if not text), None)) is not None:
        raise UsageError(
            f"query {blank} of {folder} has no text", "fill it in, or take its judgements out"
        )
    return Retrieval(folder.name, documents, asked, relevance)


def retrieval_scores(data: Retrieval, embedder: Embedder, session: Session) -> dict[str, Array]:
    """Metric -> its value for each query, [Q]."""
    documents, queries = list(data.documents), list(data.queries)
    d_ND = embedder.vectors(list(data.documents.values()), "document", session)
    q_QD = embedder.vectors(list(data.queries.values()), "query", session)
    if embedder.format.similarity == "cosine":
        d_ND, q_QD = (
            x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12) for x in (d_ND, q_QD)
        )
    top = min(TOP, len(documents))
    ranked: list[list[str]] = []
    for begin in range(0, len(queries), QUERIES_AT_ONCE):
        scores_QN = q_QD[begin : begin + QUERIES_AT_ONCE] @ d_ND.T
        best = np.argsort(-scores_QN, axis=1, kind="stable")[:, :top]
        ranked += [[documents[i] for i in row] for row in best]
    rows = [ranking_metrics(r, data.relevance[q]) for q, r in zip(queries, ranked, strict=True)]
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
