"""Data sets on which embedding models are scored without fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from kdcli.data.labelled.label_values import number_of
from kdcli.data.labelled.request import RowsRequest
from kdcli.data.labelled.row_checks import BadRows
from kdcli.data.labelled.splits import open_task
from kdcli.data.labelled.task_data import open_labelled
from kdcli.data.storage import NotFound
from kdcli.data.tasks import named_tasks, task_of
from kdcli.engine.progress import Progress
from kdcli.engine.session import Session
from kdcli.errors import UsageError
from kdcli.metrics.retrieval import RETRIEVAL_METRICS
from kdcli.models.embedding_format import is_embedder
from kdcli.models.load import pickled_head
from kdcli.models.model import Model
from kdcli.types import OWN, RowHashes, Task
from kdcli.workloads.beir import RETRIEVAL, Retrieval, read_retrieval
from kdcli.workloads.embedder import Embedder, cosines
from kdcli.workloads.finetune_recipes import downstream_recipe, eval_source
from kdcli.workloads.labelled import LabelledWorkload, scores_of
from kdcli.workloads.predictions import Prediction
from kdcli.workloads.scores import ModelScores
from kdcli.workloads.settings import DownstreamSettings, LabelledSettings
from kdcli.workloads.vector_classes import SAMPLES_PER_LABEL, ClassEvaluation
from kdcli.workloads.vector_index import Index

SCORE = "score"
"""The column in which MTEB's data sets of text pairs hold their numbers."""
TEXTS = Task("texts", "score", ("text",), ())
"""The task of texts alone."""


class EvalSet(Protocol):
    """A data set on which embedding models are scored without fine-tuning."""

    @property
    def name(self) -> str: ...

    @property
    def row_count(self) -> int: ...

    @property
    def gated_metrics(self) -> Sequence[str]: ...

    def score(self, model: Embedder) -> ModelScores: ...


@dataclass
class PairEvaluation(LabelledWorkload):
    """Evaluation of embedding models on pairs of texts with a score.

    The metric is the correlation of the scores with the cosines of the vectors.
    """

    def score(self, model: Model, *, worst: int = 0) -> ModelScores:
        assert isinstance(model, Embedder)
        evaluator, _ = self.evaluator_for(model)
        examples, max_length = evaluator.features.examples, self.settings.max_length
        sides = [[e.texts[side] for e in examples] for side in (0, 1)]
        first, second = (model.vectors(side, "", self.session, max_length) for side in sides)
        cosine_of_example = cosines(first, second)
        outputs = [cosine_of_example[[int(n)]] for n in evaluator.features.rows.example]
        predictions: list[Prediction] = evaluator.features.predictions(outputs)
        texts = [*sides[0], *sides[1]]
        rows = model.tokenize(texts, [""] * len(texts), max_length)
        cut = "sentence-transformers cuts texts" if model.format.library else "no text was cut"
        if rows.truncated:
            share = rows.truncated / len(texts)
            cut = f"{share:.1%} of the texts were cut at {rows.lengths.max()} tokens"
        note = f"cosine of its vectors; {model.note}; {cut}"
        # Cosines and scores have different scales, so no pair can be called a mistake.
        return scores_of(evaluator, self.split, predictions, 0, [note])


@dataclass(frozen=True)
class RetrievalEvaluation:
    """Evaluation of embedding models on retrieval, by their own documents or by an index."""

    data: Retrieval
    session: Session
    name: str = RETRIEVAL
    index: Index | None = None
    max_length: int | None = None
    gated_metrics: Sequence[str] = RETRIEVAL_METRICS

    @property
    def row_count(self) -> int:
        """Number of queries."""
        return len(self.data.queries)

    def score(self, model: Embedder) -> ModelScores:
        """Rank the corpus for each query and score the rankings."""
        return self.data.score(model, self.session, self.index, self.max_length)


def open_eval_sets(
    settings: DownstreamSettings, trained: Mapping[str, RowHashes], session: Session
) -> list[EvalSet]:
    """Open the tasks in the recipe's `eval` section.

    Args:
        settings: The recipe's `eval` section.
        trained: model -> hashes of the rows it was trained on.
        session: The session that evaluates.

    Raises:
        UsageError: A task cannot be scored with vectors, or its data cannot be used.
    """
    sets: list[EvalSet] = []
    for name in settings.tasks:
        if name == RETRIEVAL:
            source = eval_source(settings, name) or ""
            sets.append(RetrievalEvaluation(read_retrieval(source), session))
            continue
        recipe = downstream_recipe(settings, name, 0).recipe
        sets.append(open_labelled_set(name, recipe.data, trained, session))
    return sets


def open_labelled_set(
    name: str,
    settings: LabelledSettings,
    trained: Mapping[str, RowHashes],
    session: Session,
    samples_per_label: int = SAMPLES_PER_LABEL,
) -> PairEvaluation | ClassEvaluation:
    """Open a task of text pairs with a score, or a user's own texts with one class each.

    Rows that any of the models was trained on are dropped.

    Args:
        name: The task.
        settings: The recipe's `data` section.
        trained: model -> hashes of the rows it was trained on.
        session: The session that evaluates.
        samples_per_label: Number of training rows of each class; see `ClassEvaluation`.

    Raises:
        UsageError: The task cannot be scored with vectors, or its data cannot be used.
    """
    if name != OWN and not scores_pairs(task_of(name)):
        raise UsageError(
            f"task {name} cannot be scored with vectors, because it has no pairs with a number",
            f"use stsb, own (two texts and a number, or a text and a class) or {RETRIEVAL}; other "
            "tasks need a fine-tuned model",
        )
    request, log = settings.rows_request(name), Progress.log_fact
    task = _task_in(request)
    if scores_pairs(task) and task.kind == "class":
        request = replace(request, columns={**request.columns, "kind": "score"})
    # A model with a classifier that is not read would be scored by other ones.
    if scores_classes(task) and not any(map(pickled_head, trained)):
        data = open_labelled(request, trained=trained, skip_repeated=False, log=log)
        return ClassEvaluation(data, session, samples_per_label, settings.max_length)
    data = open_labelled(request, training=False, trained=trained, log=log)
    if not scores_pairs(data.task):
        raise UsageError(
            f"the rows of task {name} are of kind {data.task.kind}, but vectors are scored on "
            "pairs with a number, or on single texts with one class"
            f"{''.join(map(pickled_head, trained))}",
            "to classify rows, fine-tune the model first: kdcli finetune; to score its vectors, "
            "name two text columns, such as data.columns.text=[a, b], and if the labels are "
            "integers, also set data.columns.kind=score; in distill, put eval.overrides. before "
            "these keys",
        )
    # Cosines and scores have different scales, so the usual metric is a rank correlation.
    data = replace(data, task=replace(data.task, metrics=("spearman", "pearson")))
    return PairEvaluation(session, data, settings, None, None, None, notes=list(data.notes))


def _task_in(request: RowsRequest) -> Task:
    """Return the task of the rows that a request evaluates, without messages.

    If no rows are found, it is a task that nothing scores, because their reading reports the error.
    """
    try:
        return open_task(
            request,
            BadRows(),
            preferred=(request.split, "train"),
            head=None,
            trains=False,
            withheld=False,
            log=lambda message: None,
        ).task
    except NotFound:
        return TEXTS


def scores_pairs(task: Task) -> bool:
    """Whether a task has two texts and a number, so that vectors can be scored on it.

    Whole numbers in a column called `score` are taken as numbers, not as classes.
    """
    numbers = task.label == SCORE and all(number_of(name) is not None for name in task.labels)
    is_score = task.kind == "score" or (task.kind == "class" and numbers)
    return is_score and len(task.texts) == 2


def scores_classes(task: Task) -> bool:
    """Whether a task has one text and one class, so that vectors can be classified."""
    return task.kind == "class" and len(task.texts) == 1


def by_vectors(task: str, model: str, pooling: str | None = None) -> bool:
    """Whether models are scored on a task by their vectors.

    This is the case if the task has pairs with a number or is the user's own, and the first model
    is an embedding model or `pooling` turns it into one.

    Args:
        task: The task.
        model: The first model.
        pooling: The pooling chosen by the user, if any.
    """
    pairs = task == OWN or (task in named_tasks() and scores_pairs(task_of(task)))
    return pairs and (pooling is not None or is_embedder(model))
