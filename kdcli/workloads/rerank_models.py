"""Load the models that score the candidate passages of a query."""

from __future__ import annotations

from dataclasses import replace

from kdcli.data.labelled.lists import RERANK_TASK
from kdcli.models.cross_encoder import (
    ACTIVATION_CLASSES,
    activation_of,
    set_activation,
    with_own_settings,
)
from kdcli.models.heads import kind_of_head, load_for_task
from kdcli.models.load import load_config
from kdcli.models.model import Model
from kdcli.workloads.embedder import Embedder
from kdcli.workloads.task_models import load_scored


def load_cross_encoder(
    source: str,
    *,
    seed: int,
) -> Model:
    """Load a cross-encoder to train, and store its activation in its configuration.

    A model without a head of one output gets a new one.

    Raises:
        UsageError: The model cannot be loaded, or cannot have such a head.
    """
    model = with_own_settings(load_for_task(source, RERANK_TASK, new_head=True, seed=seed))
    activation = activation_of(model.source, model.model.config)
    if activation is not None:
        set_activation(model.model, activation)
    return model


def activation_taught_by(teacher: Model) -> str:
    """Return the activation of a student that learns a teacher's scores.

    It is the teacher's own. Cosines, the scores of an embedding model, have none.
    """
    if isinstance(teacher, Embedder):
        return ACTIVATION_CLASSES["Identity"]
    own = activation_of(teacher.source, teacher.model.config)
    # `CrossEncoder` assumes this one for a model that names none.
    return own or ACTIVATION_CLASSES["Sigmoid"]


def open_reranker(source: str, *, pooling: str | None = None) -> Model:
    """Load a cross-encoder, an embedding model or an export of either, to score candidates.

    Raises:
        UsageError: The model cannot be loaded, or is neither.
    """
    if pooling is None and is_reranker(source):
        model = load_scored(source, RERANK_TASK)
        # Refuse an activation that would order the candidates differently.
        activation_of(source, model.model.config)
        return model
    embedder = Embedder.open_scored(source, pooling=pooling)
    return replace(embedder, note=f"cosines of its vectors; {embedder.note}")


def is_reranker(
    source: str,
) -> bool:
    """Whether a model is a cross-encoder with one output.

    Raises:
        UsageError: The model's configuration cannot be loaded.
    """
    config = load_config(source, weights=False, compacted=True)
    names = config.architectures or ()
    return config.num_labels == 1 and any(kind_of_head(config, n) == "class" for n in names)
