"""Tasks of mteb by name, `mteb:STS12`: its data and measures, and the vectors of kdcli's
encoder."""

import logging
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from torch.nn import functional as F

from kdcli.data.labelled.features import Array
from kdcli.deploy.sessions import library
from kdcli.engine.launch import Session
from kdcli.errors import UsageError
from kdcli.models.files import HUB_ERRORS
from kdcli.models.model import Model
from kdcli.report.schema import Evaluation
from kdcli.workloads.embedder import Embedder
from kdcli.workloads.embedding import EmbeddingWorkload
from kdcli.workloads.settings import VectorSettings
from kdcli.workloads.workload import EvaluationRequest, ModelScores

PREFIX = "mteb:"
ROLES = {"query": "query", "document": "document"}  # Of mteb's prompt types


class Encoder:
    """An embedding model as mteb's `EncoderProtocol` wants it; `texts` counts what it has read."""

    def __init__(self, embedder: Embedder, session: Session, meta: Any) -> None:
        self.embedder, self.session, self.mteb_model_meta, self.texts = embedder, session, meta, 0

    def encode(
        self, inputs: Iterable[Mapping[str, Any]], *, prompt_type: Any = None, **_: Any
    ) -> Array:
        """Batches with the texts under `text` -> their vectors, float32 [N, E]."""
        texts = [text for batch in inputs for text in batch["text"]]
        self.texts += len(texts)
        role = ROLES.get(str(getattr(prompt_type, "value", "")), "")
        return self.embedder.vectors(texts, role, self.session)

    def similarity(self, x_ND: Array, y_MD: Array) -> torch.Tensor:
        """Of each x with each y, [N, M]."""
        return self._tensor(x_ND) @ self._tensor(y_MD).T

    def similarity_pairwise(self, x_ND: Array, y_ND: Array) -> torch.Tensor:
        """Of each x with its y, [N]."""
        return (self._tensor(x_ND) * self._tensor(y_ND)).sum(-1)

    def _tensor(self, v_ND: Any) -> torch.Tensor:
        v_ND = torch.as_tensor(v_ND)
        return F.normalize(v_ND, dim=-1) if self.embedder.format.similarity == "cosine" else v_ND


def open_task(name: str) -> Any:
    """A task of mteb with its data. `name`: with `PREFIX`. Raises UsageError: no such task, one of
    other than texts, or its data is neither in a cache nor to be had; MachineError: mteb is
    missing."""
    mteb = library("mteb", "embed")
    logging.getLogger("mteb").setLevel(logging.ERROR)
    try:
        task = mteb.get_task(name.removeprefix(PREFIX))
    except KeyError as error:
        raise UsageError(
            f"mteb has no such task: {error.args[0]}", "kdcli evaluate MODEL --task mteb:STS12"
        ) from None
    if task.is_aggregate:
        parts = ", ".join(part.metadata.name for part in task.metadata.tasks)
        raise UsageError(f"{name} is made of several tasks", f"name one of them: {parts}")
    if task.metadata.modalities != ["text"]:
        raise UsageError(
            f"{name} is a task of {', '.join(task.metadata.modalities)}, and kdcli's models read "
            "texts"
        )
    try:
        task.load_data()
    except (*HUB_ERRORS, ValueError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        message = (
            f"the data of {name} ({task.metadata.dataset['path']}) is not in the cache and cannot "
            f"be had: {reason}"
        )
        raise UsageError(
            message, "run it once where the hub can be reached, or judge by --task own or retrieval"
        ) from None
    return task


@dataclass(frozen=True)
class MtebEvaluation:
    """A task of mteb as a set that embedding models are scored on; it gives no intervals.

    Attributes:
        task: the task with its data.
        session: where vectors are computed.
        name: the task's name with `PREFIX`.
    """

    task: Any
    session: Session
    name: str

    @property
    def row_count(self) -> int:
        """Unknown: mteb reads the rows."""
        return 0

    @property
    def gated_metrics(self) -> Sequence[str]:
        return (self.task.metadata.main_score,)

    def score(self, model: Model) -> ModelScores:
        """Score a model by the task's main score, for each subset and split. The number of rows is
        the number of texts that mteb reads."""
        assert isinstance(model, Embedder)
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
    """Open a task of mteb.

    Raises:
        UsageError, MachineError: see `open_task`.
    """
    task = open_task(request.task)
    name = f"{PREFIX}{task.metadata.name}"
    notes = [f"data and measure of mteb {version('mteb')}, which gives no intervals"]
    settings = VectorSettings(pooling=request.pooling)
    eval_set = MtebEvaluation(task, session, name)
    return EmbeddingWorkload(session, None, None, [eval_set], settings, notes=notes, name=name)
