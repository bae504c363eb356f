"""Agreement of embedding models with a teacher on held-out texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kdcli.data.text.sentences import Texts
from kdcli.engine.launch import Session
from kdcli.metrics.bootstrap import Scorer
from kdcli.metrics.regression import spearman
from kdcli.models.model import Model
from kdcli.report.schema import Evaluation
from kdcli.types import Array
from kdcli.workloads.embedder import Embedder
from kdcli.workloads.scores import ModelScores

PAIRS, NEIGHBOURS = 40_000, 10
"""Number of text pairs whose cosines are compared, and number of nearest neighbours per text."""


@dataclass(frozen=True)
class TeacherAgreement:
    """Evaluation of embedding models by their agreement with a teacher on held-out texts.

    `spearman` is the correlation between the model's and the teacher's cosines of random pairs.
    `neighbours@10` is the share of a text's ten nearest neighbours according to the teacher that
    are also among its ten nearest neighbours according to the model.

    Attributes:
        texts: the held-out texts.
        vectors_NE: the teacher's vectors for the texts.
        session: the device on which vectors are computed.
        seed: seed for drawing the pairs.
        split: name of the held-out texts in the report.
    """

    texts: Texts
    vectors_NE: Array
    session: Session
    seed: int
    split: str = "held-out texts"
    name: str = "agreement with the teacher"
    gated_metrics: Sequence[str] = ("spearman", "neighbours@10")

    @property
    def row_count(self) -> int:
        """Number of texts."""
        return len(self.texts)

    def score(self, model: Model) -> ModelScores:
        """Compare a model's vectors with the teacher's."""
        assert isinstance(model, Embedder)
        own_ND = vectors_of_texts(model, self.texts, self.session)
        count = len(self.texts)
        score = agreement_scorer(own_ND, self.vectors_NE, self.seed)
        evaluation = Evaluation(
            model="",
            task=self.name,
            set="",
            split=self.split,
            n=count,
            metrics=score(np.arange(count)),
            reference="teacher",
        )
        is_own = np.array_equal(own_ND, self.vectors_NE)
        return ModelScores(
            [evaluation], {"": score}, {"": count}, notes=[model.note], is_reference=is_own
        )


def vectors_of_texts(model: Embedder, texts: Texts, session: Session) -> Array:
    """Compute the vectors of texts, each with the prompt of its role, [N, E] float32."""
    roles = np.array(texts.roles)
    vectors_NE: Array | None = None
    for role in dict.fromkeys(texts.roles):
        at = np.flatnonzero(roles == role)
        of_role = model.vectors([texts.texts[n] for n in at], role, session)
        if vectors_NE is None:
            vectors_NE = np.empty((len(texts), of_role.shape[1]), np.float32)
        vectors_NE[at] = of_role
    assert vectors_NE is not None, "there are no texts"
    return vectors_NE


def agreement_scorer(own_ND: Array, teacher_NE: Array, seed: int) -> Scorer:
    """Return the metrics of `TeacherAgreement` as a function of the selected texts.

    The pairs are drawn among the selected texts. A bootstrap therefore draws texts with all their
    pairs. The pairs of a text resemble each other, so an interval from single pairs would be far
    too narrow.

    Args:
        own_ND, teacher_NE: the vectors of the model and the teacher for the same texts.
        seed: seed for drawing the pairs.
    """
    share_2P = np.random.default_rng(seed).random((2, PAIRS))
    own_NN, teacher_NN = _cosines(own_ND), _cosines(teacher_NE)
    shared_N = _shared_neighbours(own_NN, teacher_NN, min(NEIGHBOURS, len(own_ND) - 1))
    is_same = np.array_equal(own_ND, teacher_NE)

    def score(rows: Array) -> dict[str, float]:
        left_P, right_P = rows[(share_2P * len(rows)).astype(np.int64)]
        # A text and itself agree in every model. Rounding may differ in (i, j) and (j, i).
        differ_P = left_P != right_P
        first_P, second_P = (f(left_P, right_P)[differ_P] for f in (np.minimum, np.maximum))
        own_P, teacher_P = own_NN[first_P, second_P], teacher_NN[first_P, second_P]
        # The teacher itself is a baseline, so do not sort its cosines for every resample.
        correlation = float(own_P.size > 0) if is_same else spearman(own_P, teacher_P)
        return {"spearman": correlation, "neighbours@10": float(shared_N[rows].mean())}

    return score


def _cosines(x_ND: Array) -> Array:
    """Compute the cosines of all pairs of vectors, [N, N]."""
    unit_ND = x_ND / np.maximum(np.linalg.norm(x_ND, axis=1, keepdims=True), 1e-12)
    cosines_NN: Array = unit_ND @ unit_ND.T
    return cosines_NN


def _shared_neighbours(x_NN: Array, y_NN: Array, count: int) -> Array:
    """Compute the share of each row's `count` nearest neighbours in y that x shares, [N].

    Both are cosines of all pairs.
    """
    nearest = []
    for cosines_NN in (x_NN, y_NN):
        others_NN = np.where(np.eye(len(cosines_NN), dtype=bool), -np.inf, cosines_NN)
        nearest.append(np.argsort(-others_NN, axis=1, kind="stable")[:, :count])
    pairs = zip(*nearest, strict=True)
    return np.array([len(np.intersect1d(a, b)) / count for a, b in pairs])
