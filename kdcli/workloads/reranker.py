"""A reranker at work: a cross-encoder with one output, its export, or an embedding model, that scores a query with
each of its passages, and what rankings are judged by."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from kdcli.data.batches import BatchOrder
from kdcli.data.labelled.features import Array, TokenizedRows, encode
from kdcli.data.labelled.lists import RERANK, Lists, read_lists
from kdcli.data.labelled.rows import hashes_of
from kdcli.deploy.environment import latency_threads
from kdcli.deploy.exported import Export
from kdcli.engine.evaluation import evaluate
from kdcli.engine.launch import Session
from kdcli.engine.progress import Progress
from kdcli.errors import UsageError
from kdcli.metrics.retrieval import ranking_metrics
from kdcli.models.capture import capture
from kdcli.models.embedder import PROMPTS, beside_model
from kdcli.models.load import load_config
from kdcli.models.model import Model
from kdcli.models.shape import positions_of
from kdcli.models.training_rows import NO_ROWS
from kdcli.types import Batch, Job, Needs, RowHashes, StepLoss, Term
from kdcli.workloads.embedder import Embedder, cosines
from kdcli.workloads.runtimes import load_judged, runner_outputs
from kdcli.workloads.settings import LabelledSettings

METRICS = RERANK.metrics


@dataclass(frozen=True)
class Reranker:
    """A model that scores candidates. `cross_encoder` is None where `scores`, [R] float32, are cosines of an embedding
    model's vectors."""

    source: str
    model: Any  # of transformers, or an `Export`
    note: str
    scores: Callable[[Lists], Array]
    cross_encoder: Model | None = None


def open_reranker(
    source: str, session: Session, *, max_length: int | None, pooling: str | None = None
) -> Reranker:
    """Load a cross-encoder or an embedding model, or an export of either. Raises UsageError: a model that is neither;
    see `load_judged` and `Embedder`."""
    trusted = session.trust_remote_code
    if pooling is None and is_reranker(source, trust_remote_code=trusted):
        loaded = load_judged(source, RERANK, trust_remote_code=trusted)

        def by_cross_encoder(lists: Lists) -> Array:
            return scores_of(session, loaded.model, read_by(lists, loaded, max_length))

        return Reranker(source, loaded.model, loaded.note, by_cross_encoder, loaded)
    embedder = Embedder.open_judged(source, pooling=pooling, trust_remote_code=trusted)

    def by_cosine(lists: Lists) -> Array:
        passages, places = np.unique(np.array(lists.passages, dtype=object), return_inverse=True)
        queries_QE = embedder.vectors(lists.queries, "query", session)
        passages_PE = embedder.vectors(passages.tolist(), "document", session)
        owners = np.repeat(np.arange(len(lists)), lists.sizes)
        return cosines(queries_QE[owners], passages_PE[places]).astype(np.float32)

    return Reranker(source, embedder.model, f"cosines of its vectors; {embedder.note}", by_cosine)


def judged_lists(settings: LabelledSettings, trained: Mapping[str, RowHashes]) -> tuple[Lists, str]:
    """The lists that rerankers are judged by, and their split. `trained`: model -> rows that trained it; queries with
    such a row are left out. Raises UsageError: see `read_lists`; no other query."""
    if settings.source is None:
        raise UsageError(
            "task rerank needs --data", "a file or directory of queries with their passages"
        )
    _, lists, split = read_lists(settings.source, seed=settings.split_seed, log=Progress.log)
    known_R = np.isin(hashes_of(lists.examples), np.concatenate([NO_ROWS, *trained.values()]))
    known_Q = np.logical_or.reduceat(known_R, lists.ends - lists.sizes)
    if not known_Q.any() or settings.judge_trained_rows:
        return (
            lists,
            f"{split}, {known_Q.sum():,} of {len(lists):,} trained a model"
            if known_Q.any()
            else split,
        )
    if known_Q.all():
        message = f"all {len(lists):,} queries of the {split} split trained a judged model"
        raise UsageError(
            message,
            "give --data with others, or judge by them with --set data.judge_trained_rows=true",
        )
    Progress.log(
        f"left out {known_Q.sum():,} of {len(lists):,} queries: they trained a judged model"
    )
    return lists.take(np.flatnonzero(~known_Q)), split


def read_by(lists: Lists, model: Model, max_length: int | None) -> TokenizedRows:
    """Query and passage of each candidate as a model's tokens."""
    length = tokens_of_row(model, max_length)
    # As `CrossEncoder` reads a pair: with token types only if the tokenizer gives them unasked.
    types = model.token_types and "token_type_ids" in model.tokenizer.model_input_names
    return encode(RERANK, lists.examples, model.tokenizer, max_length=length, token_types=types)


def tokens_of_row(model: Model, max_length: int | None) -> int:
    """Tokens of a row at most."""
    return int(min(max_length or RERANK.max_length, positions_of(model.model.config) or 1 << 30))


def scores_of(session: Session, model: PreTrainedModel | Export, rows: TokenizedRows) -> Array:
    """A cross-encoder's score of each row, before its activation, [R] float32. An export runs in its own runtime."""
    if isinstance(model, Export):
        made = model.runner(latency_threads())
        return np.stack(runner_outputs(made, rows, positions_of(model.config)))[:, 0].astype(
            np.float32
        )
    captured, by_length = capture(model, Needs(logits=True)), rows.by_length()

    def step(batch: Batch) -> StepLoss:
        logits = captured(batch).logits
        return StepLoss({"loss": Term(logits.new_zeros(()), "rows")}, logits)

    order = BatchOrder(len(rows), 1, 0)
    job = Job(
        {"model": captured}, step, by_length, order, by_length, compute_metrics=lambda outputs: {}
    )
    found = np.empty(len(rows), np.float32)
    found[by_length.example] = np.stack(evaluate(session, job).outputs)[:, 0]
    return found


def per_query(lists: Lists, scores_R: Array) -> dict[str, Array]:
    """Metric -> its value for each query, [Q]. Of equal scores the less relevant passage comes first, so that a model
    that cannot tell them apart gains nothing."""
    values: dict[str, list[float]] = {name: [] for name in METRICS}
    for begin, end in zip(lists.ends - lists.sizes, lists.ends, strict=True):
        order = np.lexsort((lists.labels[begin:end], -scores_R[begin:end]))
        relevance = {str(n): float(label) for n, label in enumerate(lists.labels[begin:end])}
        found = ranking_metrics([str(n) for n in order], relevance)
        for name in METRICS:
            values[name].append(found[name])
    return {name: np.array(of_query) for name, of_query in values.items()}


def activation_of(model: Model) -> str | None:
    """What a cross-encoder's files say of its activation, in any of the keys that have been used."""
    config = model.model.config
    told = getattr(config, "sentence_transformers", None)
    found = told.get("activation_fn") if isinstance(told, dict) else None
    found = found or getattr(config, "sbert_ce_default_activation_function", None)
    found = found or (beside_model(model.source, PROMPTS) or {}).get("activation_fn")
    return found if isinstance(found, str) else None


def is_reranker(source: str, *, trust_remote_code: bool = False) -> bool:
    """Whether a model is a cross-encoder with one output. Raises UsageError: see `kdcli.models.load`."""
    config = load_config(source, trust_remote_code=trust_remote_code, weights=False, compacted=True)
    return config.num_labels == 1 and any(
        "ForSequenceClassification" in n for n in config.architectures or ()
    )
