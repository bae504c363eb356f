"""Evaluation on MTEB tasks, such as `mteb:STS12`, with the data and metrics of the mteb library."""

import logging
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

from kdcli.deploy.sessions import library
from kdcli.engine.session import Session
from kdcli.errors import UsageError
from kdcli.metrics.retrieval import pairwise_similarities, similarities
from kdcli.models.files import HUB_ERRORS
from kdcli.report.schema import Evaluation
from kdcli.types import Array
from kdcli.workloads.embedder import Embedder
from kdcli.workloads.embeddings import EmbeddingWorkload, Settings
from kdcli.workloads.requests import EvaluationRequest
from kdcli.workloads.scores import ModelScores

PREFIX = "mteb:"
ROLES = {"query": "query", "document": "document"}
"""mteb's prompt type -> role of a text."""


class Encoder:
    """An embedding model with the interface of mteb's `EncoderProtocol`.

    Attributes:
        texts: Number of texts encoded so far.
    """

    def __init__(self, embedder: Embedder, session: Session, meta: Any) -> None:
        self.embedder, self.session, self.mteb_model_meta, self.texts = embedder, session, meta, 0

    def encode(
        self, inputs: Iterable[Mapping[str, Any]], *, prompt_type: Any = None, **_: Any
    ) -> Array:
        """Encode the texts in the field `text` of every batch, [N, E] float32."""
        texts = [text for batch in inputs for text in batch["text"]]
        self.texts += len(texts)
        role = ROLES.get(str(getattr(prompt_type, "value", "")), "")
        return self.embedder.vectors(texts, role, self.session)

    def similarity(self, x_ND: Array, y_MD: Array) -> torch.Tensor:
        """Compute the similarity of every x to every y, [N, M]."""
        function = self.embedder.format.similarity
        return torch.from_numpy(similarities(_rows(x_ND), _rows(y_MD), function)).float()

    def similarity_pairwise(self, x_ND: Array, y_ND: Array) -> torch.Tensor:
        """Compute the similarity of every x to its y, [N]."""
        function = self.embedder.format.similarity
        return torch.from_numpy(pairwise_similarities(_rows(x_ND), _rows(y_ND), function)).float()


def _rows(v_ND: Any) -> Array:
    """Return an array or tensor of vectors as an array. mteb also compares two single vectors."""
    return np.atleast_2d(np.asarray(v_ND))


def open_task(name: str) -> Any:
    """Load an MTEB task and its data.

    Args:
        name: The task's name with `PREFIX`.

    Raises:
        UsageError: The task does not exist, it does not consist of texts, or its data is neither
            in the cache nor available from the hub.
        MachineError: mteb is not installed.
    """
    mteb = library("mteb", "embed")
    logging.getLogger("mteb").setLevel(logging.ERROR)
    try:
        task = mteb.get_task(name.removeprefix(PREFIX))
    except KeyError as error:
        raise UsageError(
            f"unknown mteb task: {error.args[0]}", "example: kdcli evaluate MODEL --task mteb:STS12"
        ) from None
    if task.is_aggregate:
        parts = ", ".join(part.metadata.name for part in task.metadata.tasks)
        raise UsageError(f"{name} consists of several tasks", f"choose one of them: {parts}")
    if task.metadata.modalities != ["text"]:
        raise UsageError(
            f"{name} is a task of {', '.join(task.metadata.modalities)}, but kdcli's models only "
            "read text",
            "choose a text task",
        )
    try:
        task.load_data()
    except (*HUB_ERRORS, ValueError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(
            f"the data of {name} ({task.metadata.dataset['path']}) is not in the cache and cannot "
            f"be downloaded: {reason}",
            "run the command once with access to the hub, or use --task own or retrieval",
        ) from None
    return task


@dataclass(frozen=True)
class MtebEvaluation:
    """Evaluation of embedding models on an MTEB task, without confidence intervals.

    Attributes:
        task: The task with its data.
        session: The device on which vectors are computed.
        name: The task's name with `PREFIX`.
    """

    task: Any
    session: Session
    name: str

    @property
    def row_count(self) -> int:
        """Number of rows; 0, because only mteb knows it."""
        return 0

    @property
    def gated_metrics(self) -> Sequence[str]:
        return (self.task.metadata.main_score,)

    def score(self, model: Embedder) -> ModelScores:
        """Compute the task's main score for every subset and split.

        The reported number of rows is the number of texts that mteb has encoded.
        """
        mteb, rows = library("mteb", "embed"), list[Evaluation]()
        meta = library("mteb.models", "embed").ModelMeta.create_empty()
        encoder = Encoder(model, self.session, meta)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = mteb.evaluate(
                encoder, self.task, cache=None, co2_tracker=False, show_progress_bar=False
            )
        for split, subsets in result.task_results[0].scores.items():
            for scores in subsets:
                subset = "" if scores["hf_subset"] == "default" else scores["hf_subset"]
                metrics = {self.task.metadata.main_score: float(scores["main_score"])}
                row = Evaluation(
                    model="",
                    task=self.name,
                    set=subset,
                    split=split,
                    n=encoder.texts,
                    metrics=metrics,
                )
                rows.append(row)
        return ModelScores(rows, {}, {}, notes=[model.note])


def open_evaluation(request: EvaluationRequest, session: Session) -> EmbeddingWorkload:
    """Open an MTEB task to evaluate embedding models.

    Raises:
        UsageError: The task or its data cannot be used.
        MachineError: mteb is not installed.
    """
    task = open_task(request.task)
    name = f"{PREFIX}{task.metadata.name}"
    notes = [f"data and metrics of mteb {version('mteb')}, without confidence intervals"]
    settings = Settings(pooling=request.pooling)
    eval_set = MtebEvaluation(task, session, name)
    return EmbeddingWorkload(session, None, None, [eval_set], settings, notes=notes, name=name)
