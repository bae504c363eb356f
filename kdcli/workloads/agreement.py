"""Agreement of embedding models with a teacher on held-out texts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kdcli.data.text.sentences import Texts
from kdcli.engine.session import Session
from kdcli.metrics.regression import spearman
from kdcli.metrics.retrieval import similarities
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
        texts: The held-out texts.
        vectors_NE: The teacher's vectors for the texts.
        session: The device on which vectors are computed.
        seed: Seed for drawing the pairs.
        split: Name of the held-out texts in the report.
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

    def score(self, model: Embedder) -> ModelScores:
        """Compare a model's vectors with the teacher's."""
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


@dataclass(frozen=True)
class AgreementScorer:
    """The metrics of `TeacherAgreement` as a function of the selected texts.

    The pairs are drawn among the selected texts. A bootstrap therefore draws texts with all their
    pairs. The pairs of a text resemble each other, so an interval from single pairs would be far
    too narrow.

    Attributes:
        cosines: The model's and the teacher's cosines of all pairs of texts, [N, N] each. None for
            the teacher itself, which agrees with itself.
        shared_N: The share of each text's nearest neighbours that the model keeps.
        share_2P: Numbers in [0, 1) that draw the pairs.
    """

    cosines: tuple[Array, Array] | None
    shared_N: Array
    share_2P: Array

    def __call__(self, rows: Array) -> dict[str, float]:
        """Score the texts with the given numbers."""
        left_P, right_P = rows[(self.share_2P * len(rows)).astype(np.int64)]
        # A text and itself agree in every model. Rounding may differ in (i, j) and (j, i).
        differ_P = left_P != right_P
        correlation = float(differ_P.any())
        if self.cosines is not None:
            at = tuple(f(left_P, right_P)[differ_P] for f in (np.minimum, np.maximum))
            correlation = spearman(self.cosines[0][at], self.cosines[1][at])
        return {"spearman": correlation, "neighbours@10": float(self.shared_N[rows].mean())}

    def example_values(self) -> dict[str, Array]:
        """Return each text's own value of the metric that is a mean over texts."""
        return {"neighbours@10": self.shared_N}


def agreement_scorer(own_ND: Array, teacher_NE: Array, seed: int) -> AgreementScorer:
    """Return the metrics of `TeacherAgreement` as a function of the selected texts.

    Args:
        own_ND, teacher_NE: The vectors of the model and the teacher for the same texts.
        seed: Seed for drawing the pairs.
    """
    count = len(own_ND)
    share_2P = np.random.default_rng(seed).random((2, PAIRS))
    if np.array_equal(own_ND, teacher_NE):
        return AgreementScorer(None, np.ones(count), share_2P)
    own_NN, teacher_NN = (similarities(x, x, "cosine") for x in (own_ND, teacher_NE))
    shared_N = _shared_neighbours(own_NN, teacher_NN, min(NEIGHBOURS, count - 1))
    return AgreementScorer((own_NN, teacher_NN), shared_N, share_2P)


def _shared_neighbours(x_NN: Array, y_NN: Array, count: int) -> Array:
    """Compute the share of each row's `count` nearest neighbours in y that x shares, [N].

    Both are cosines of all pairs.
    """
    pairs = zip(_nearest(x_NN, count), _nearest(y_NN, count), strict=True)
    return np.array([len(np.intersect1d(a, b)) / count for a, b in pairs])


def _nearest(cosines_NN: Array, count: int) -> Iterator[Array]:
    """Yield the numbers of each text's `count` nearest other texts, in any order.

    Ties go to the earlier text.
    """
    for text, cosines_N in enumerate(cosines_NN):
        others_N = cosines_N.copy()
        others_N[text] = -np.inf
        # A partition takes a tenth of the time of a sort.
        least = np.partition(others_N, -count)[-count]
        nearer, equal = np.flatnonzero(others_N > least), np.flatnonzero(others_N == least)
        yield np.concatenate([nearer, equal[: count - len(nearer)]])
