"""Classification of texts by their vectors, with the protocol of MTEB.

A logistic regression is fitted to the vectors of a few training rows of each class. This is
repeated with other rows, and the scores are means over the repetitions.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from kdcli.data.labelled.task_data import Labelled
from kdcli.engine.session import Session
from kdcli.errors import UsageError
from kdcli.metrics import classification
from kdcli.metrics.bootstrap import Scorer
from kdcli.report.schema import Evaluation
from kdcli.types import Array, Example
from kdcli.workloads.embedder import Embedder
from kdcli.workloads.scores import ModelScores

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
        scorers: list[Scorer] = []
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
            [evaluation], {"": score}, {"": count}, examples={"": examples}, notes=[model.note]
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
