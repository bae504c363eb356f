"""Data sets on which embedding models are scored without fine-tuning."""

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast

import numpy as np

from kdcli.data.labelled.label_values import number_of
from kdcli.data.labelled.request import RowsRequest
from kdcli.data.labelled.row_checks import BadRows
from kdcli.data.labelled.splits import open_task
from kdcli.data.labelled.task_data import Labelled, open_labelled
from kdcli.data.storage import NotFound
from kdcli.data.tasks import named_tasks, task_of
from kdcli.engine.session import Session
from kdcli.errors import UsageError
from kdcli.messages import silenced
from kdcli.metrics import classification
from kdcli.metrics.bootstrap import WeightedScorer
from kdcli.metrics.retrieval import RETRIEVAL_METRICS
from kdcli.models.embedding_format import is_embedder
from kdcli.models.load import pickled_head
from kdcli.models.model import Model
from kdcli.report.schema import Evaluation
from kdcli.types import OWN, Array, Example, RowHashes, Task
from kdcli.workloads.beir import RETRIEVAL, Index, Retrieval, read_retrieval
from kdcli.workloads.embedder import Embedder, cosines
from kdcli.workloads.finetune_recipes import downstream_recipe, eval_source
from kdcli.workloads.labelled import LabelledWorkload, scores_of
from kdcli.workloads.predictions import Prediction
from kdcli.workloads.scores import ModelScores
from kdcli.workloads.settings import DownstreamSettings, LabelledSettings

REPETITIONS, SEED, MAX_ITERATIONS = 10, 42, 100
"""MTEB's number of repetitions, seed, and limit of the solver's iterations."""
SAMPLES_PER_LABEL = 8
METRICS = ("accuracy", "macro_f1")


@dataclass(frozen=True)
class ClassEvaluation:
    """Evaluation of embedding models on texts with one class each.

    Attributes:
        data: The task, its training rows and its evaluation rows.
        session: The device on which vectors are computed.
        samples: Number of training rows of each class that a regression is fitted to.
        max_length: Maximum number of tokens in a text; None for the model's own maximum.
    """

    data: Labelled
    session: Session
    samples: int = SAMPLES_PER_LABEL
    max_length: int | None = None
    gated_metrics: Sequence[str] = METRICS

    @property
    def name(self) -> str:
        return self.data.task.name

    @property
    def row_count(self) -> int:
        """Number of evaluation rows."""
        return self.data.count

    @property
    def examples(self) -> list[Example]:
        """The evaluation rows. A user's own task has one set."""
        return self.data.sets[""]

    @property
    def notes(self) -> list[str]:
        return [
            *self.data.notes,
            f"means of {REPETITIONS} logistic regressions on vectors, each fitted to "
            f"{self.samples} training rows of each class, as in MTEB",
        ]

    def score(self, model: Embedder) -> ModelScores:
        """Fit the regressions to a model's vectors, and score their predictions.

        Raises:
            UsageError: The training rows have a single class.
        """
        train, examples = self.data.train, self.examples
        draws = draw_rows(_classes(train), self.samples)
        used = np.unique(np.concatenate(draws))
        used_rows = [train[n] for n in used]
        train_ND, other_MD = (self._vectors(model, rows) for rows in (used_rows, examples))
        labels_N, truth = np.array(_classes(used_rows)), _classes(examples)
        if len(set(labels_N.tolist())) < 2:
            raise UsageError(
                f"the {len(train)} training rows have a single class, and a regression needs two",
                "add rows of other classes, or raise data.train_rows",
            )
        scorers: list[WeightedScorer] = []
        for drawn in draws:
            at = np.searchsorted(used, drawn)
            predictions = _predict(train_ND[at], labels_N[at], other_MD)
            scorers.append(classification.scorer(self.data.task, predictions, truth))

        def score(rows: Array) -> dict[str, float]:
            of_draws = [scorer(rows) for scorer in scorers]
            return {m: float(np.mean([scores[m] for scores in of_draws])) for m in METRICS}

        count = len(examples)
        evaluation = Evaluation(
            model="",
            task=self.name,
            set="",
            split=self.data.split,
            n=count,
            metrics=score(np.arange(count)),
        )
        return ModelScores(
            [evaluation],
            {"": replace(scorers[0], score=score)},
            {"": count},
            examples={"": examples},
            notes=[model.note],
        )

    def _vectors(self, model: Embedder, examples: Sequence[Example]) -> Array:
        texts = [example.texts[0] for example in examples]
        return model.vectors(texts, "", self.session, self.max_length)


def _classes(examples: Sequence[Example]) -> list[int]:
    return [cast("int", example.label) for example in examples]


def draw_rows(labels: Sequence[int], samples: int) -> list[Array]:
    """Draw the rows of each repetition, at most `samples` of each label.

    As in MTEB, the generator starts with the same seed each time, and shuffles the order that the
    repetition before it left.
    """
    order, draws = list(range(len(labels))), list[Array]()
    for _ in range(REPETITIONS):
        np.random.RandomState(SEED).shuffle(order)
        counts: Counter[int] = Counter()
        drawn: list[int] = []
        for row in order:
            if counts[labels[row]] < samples:
                counts[labels[row]] += 1
                drawn.append(row)
        draws.append(np.array(drawn))
    return draws


def _predict(train_ND: Array, labels_N: Array, other_MD: Array) -> list[int]:
    """Fit a regression, and predict the classes of other vectors."""
    # scikit-learn takes seconds to import.
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    regression = LogisticRegression(max_iter=MAX_ITERATIONS, random_state=SEED)
    with warnings.catch_warnings():
        # The limit is part of the protocol.
        warnings.simplefilter("ignore", ConvergenceWarning)
        regression.fit(train_ND, labels_N)
    predictions: list[int] = regression.predict(other_MD).tolist()
    return predictions


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
    request = settings.rows_request(name)
    task = _task_in(request)
    if scores_pairs(task) and task.kind == "class":
        request = replace(request, columns={**request.columns, "kind": "score"})
    # A model with a classifier that is not read would be scored by other ones.
    if scores_classes(task) and not any(map(pickled_head, trained)):
        data = open_labelled(request, trained=trained, skip_repeated=False)
        return ClassEvaluation(data, session, samples_per_label, settings.max_length)
    data = open_labelled(request, training=False, trained=trained)
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
        with silenced():
            return open_task(
                request,
                BadRows(),
                preferred=(request.split, "train"),
                head=None,
                trains=False,
                withheld=False,
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
