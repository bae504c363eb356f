"""Requests to open a workload, for training or for evaluating models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kdcli.errors import UsageError
from kdcli.recipe.sections import RecipeValues
from kdcli.types import RowHashes
from kdcli.workloads.settings import (
    DownstreamSettings,
    LabelledSettings,
    PoolingName,
    TaskHeadSettings,
)


def required_task(task: str | None) -> str:
    """Check that a recipe has a task, and return it.

    Raises:
        UsageError: `task` is None.
    """
    if task is None:
        raise UsageError(
            "no task given", "add --task, for example --task sst2, or --task own for your own files"
        )
    return task


@dataclass(frozen=True)
class WorkloadRequest:
    """A request to open a workload for training.

    Attributes:
        task: The value of `--task`.
        model: The model whose tokenizer reads the rows.
        data: The recipe's `data` section.
        head: Settings of the task head.
        settings: The recipe's `workload` section.
        metrics: Additional metrics from the `evaluate` library.
        choose_on: The evaluation set that decides which evaluation is best; None for the mean over
            all sets.
        seed: Seed for the weights of a new head.
        new_head: Add a new head to a model that has no fitting head. If False, such a model is
            refused.
        other_models: Other models that the run scores or learns from. Rows that any of them was
            trained on are dropped from the evaluation.
        generates: Whether the verb supports tasks that generate text.
        loss: Settings of the loss of embedding models.
        evaluation: The tasks on which embedding models are scored.
    """

    task: str
    model: str
    data: LabelledSettings
    head: TaskHeadSettings = field(default_factory=TaskHeadSettings)
    settings: RecipeValues = field(default_factory=dict)
    metrics: Sequence[str] = ()
    choose_on: str | None = None
    seed: int = 0
    new_head: bool = True
    other_models: Sequence[str] = ()
    generates: bool = False
    loss: RecipeValues = field(default_factory=dict)
    evaluation: DownstreamSettings = field(default_factory=DownstreamSettings)


@dataclass(frozen=True)
class EvaluationRequest:
    """A request to open a workload for evaluating models.

    Attributes:
        task: The value of `--task`.
        models: The models to evaluate. The first model decides whether heads or vectors are scored.
            If it has class names, they are also the class names of task `own`.
        data: The recipe's `data` section.
        trained: model -> hashes of the rows it was trained on. These rows are dropped.
        metrics: Additional metrics from the `evaluate` library.
        pooling: Pooling that turns plain encoders into embedding models.
        by_head: Score heads even if the first model is an embedding model.
        documents: The model or file whose vectors of documents are searched; None for each model's
            own.
        divided: Whether plain text that no partition divides comes from the split of `data`, if
            there is one. If False, it is the training split.
        label_map: The data's number for each class of the models, if their orders differ.
        samples_per_label: Number of training rows of each class, if vectors are classified.
    """

    task: str
    models: Sequence[str]
    data: LabelledSettings
    trained: Mapping[str, RowHashes] = field(default_factory=dict)
    metrics: Sequence[str] = ()
    pooling: PoolingName | None = None
    by_head: bool = False
    documents: str | None = None
    divided: bool = False
    label_map: Sequence[int] | None = None
    samples_per_label: int = 8
