"""Choose the space in which an embedding student learns the vectors of its teachers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kdcli.engine.session import Session
from kdcli.messages import log
from kdcli.models.embedding_format import EmbeddingFormat, dense_layer
from kdcli.models.reduce import components
from kdcli.recipe.methods import own_settings
from kdcli.targets.served import ServerSettings
from kdcli.targets.targets import Vectors
from kdcli.types import Array, ModelShape, Objective, Signals
from kdcli.verbs.distill.settings import DistillRecipe
from kdcli.workloads.embedder import Embedder
from kdcli.workloads.embeddings import METHOD, EmbeddingWorkload, Settings

BASIS_ROWS = 50_000
"""Number of vectors that give the principal components."""
ROTATED_ROWS = 1000
"""Number of a student's vectors before training to which the targets are rotated."""


class StudentVectors(Settings):
    """The `workload` section of `distill --method embedding`."""

    dense: bool = False
    """Whether a student that is narrower than its teacher's vectors gets a dense layer up to
    their width. Otherwise it learns their principal components."""
    router: bool = False
    """Whether to save router/ too, a sentence-transformers model that encodes queries with the
    student and documents with the teacher."""
    vectors: str | None = None
    """Vectors of the teacher: a file, directory, pattern, URL or hub data set (default:
    computed)."""
    server: ServerSettings = ServerSettings()


def vector_settings(recipe: DistillRecipe) -> StudentVectors:
    """Return the recipe's `workload` section.

    Raises:
        UsageError: An unknown key or value.
    """
    return own_settings(StudentVectors, recipe.workload, "workload", f"method {METHOD}")


def is_foreign(recipe: DistillRecipe, origin: Embedder) -> bool:
    """Return whether students learn vectors of a space other than `origin`'s own."""
    if vector_settings(recipe).vectors is not None or recipe.student.source is not None:
        return True
    # The dense layer of the first of several teachers leads to its own vectors alone.
    return bool(recipe.more_teachers) and bool(origin.format.layers)


def student_format(recipe: DistillRecipe, origin: Embedder, to: ModelShape) -> EmbeddingFormat:
    """Return how a student with layers makes vectors, before it gets a dense layer of its own."""
    other_space = is_foreign(recipe, origin) or recipe.loss.get("dimensions")
    if to.hidden != origin.shape.hidden or other_space:
        return replace(origin.format, layers=(), truncate_dim=None)
    return origin.format


@dataclass(frozen=True)
class VectorSpace:
    """The teacher's vectors, and the students' formats and targets that follow from them.

    Attributes:
        recipe: The recipe of the run.
        session: The devices of the run.
        workload: The texts, and the encoder that students start from.
        vectors: The teacher's vectors of the texts.
        teacher_width: The number of their components.
    """

    recipe: DistillRecipe
    session: Session
    workload: EmbeddingWorkload
    vectors: Vectors
    teacher_width: int

    @property
    def origin(self) -> Embedder:
        """The encoder that students start from, with their tokenizer."""
        assert self.workload.reader is not None
        return self.workload.reader

    def of_student(
        self, to: ModelShape, model: PreTrainedModel
    ) -> tuple[EmbeddingFormat, Array | None]:
        """Return how a student makes vectors, and the basis of its targets; None for no basis.

        Args:
            to: The student's shape.
            model: The student before training.
        """
        recipe, fmt = self.recipe, student_format(self.recipe, self.origin, to)
        teacher_width, dimensions = self.teacher_width, recipe.loss.get("dimensions")
        foreign = is_foreign(recipe, self.origin)
        width, basis_ED = fmt.width(to.hidden), None
        if width == teacher_width and not (foreign or dimensions):
            return fmt, None
        if dimensions or (width < teacher_width and not vector_settings(recipe).dense):
            basis_ED = self._basis(min(width, teacher_width))
        student = Embedder(model.eval(), self.origin.tokenizer, "", format=fmt)
        rotation_ED = self._rotation(basis_ED, student)
        if basis_ED is not None and not dimensions:
            return fmt, basis_ED @ rotation_ED
        # If the components will be cut, or the space is another model's, the targets must not be
        # rotated. A dense layer rotates the student's vectors instead.
        return replace(fmt, layers=(dense_layer(torch.from_numpy(rotation_ED)),)), basis_ED

    def of_static(self, to: ModelShape) -> tuple[EmbeddingFormat, Array | None]:
        """Return how a static student makes vectors, and the basis of its targets."""
        # A mean over tokens has no natural length, so the vectors always have length 1.
        fmt = replace(
            self.origin.format,
            pooling="mean",
            normalize=True,
            layers=(),
            max_length=None,
            truncate_dim=None,
        )
        dimensions = self.recipe.loss.get("dimensions")
        if to.hidden == self.teacher_width and not dimensions:
            return fmt, None
        return fmt, self._basis(to.hidden)

    def _basis(self, width: int) -> Array:
        """Return the principal components of the teacher's vectors, and log what they hold."""
        generator = np.random.default_rng(self.recipe.train.seed)
        drawn = generator.permutation(self.workload.train_numbers)[:BASIS_ROWS]
        sample = np.sort(drawn)
        basis_ED = principal_basis(self.vectors(sample), width)
        x = self.vectors(sample).astype(np.float64)
        share = np.square(x @ basis_ED).sum() / np.square(x).sum()
        log(
            f"the student learns {basis_ED.shape[1]} principal components of the teacher's "
            f"{self.teacher_width}-wide vectors, which hold {share:.1%} of the vectors' squared "
            "length"
        )
        return basis_ED

    def _rotation(self, basis_ED: Array | None, student: Embedder) -> Array:
        """Return the rotation [E, D] that best maps the targets to the student's vectors.

        The targets are the teacher's vectors in a basis, and the student's vectors are taken
        before training (orthogonal Procrustes). Every rotation keeps all cosines, so the nearest
        one leaves the least to learn. It is fitted to training texts only, because the held-out
        texts must score a student that never saw them.
        """
        texts = self.workload.all_texts.texts
        generator = np.random.default_rng(self.recipe.train.seed)
        rows = np.sort(generator.permutation(self.workload.train_numbers)[:ROTATED_ROWS])
        on_cpu = replace(self.session, device=torch.device("cpu"))
        own_ND = student.vectors([texts[n] for n in rows], "", on_cpu)
        targets_NE = self.vectors(rows).astype(np.float64)
        if basis_ED is not None:
            targets_NE = targets_NE @ basis_ED
        u, _, v = np.linalg.svd(targets_NE.T @ own_ND, full_matrices=False)
        return np.asarray(u @ v, dtype=np.float32)


def join_vectors(vectors: Sequence[Vectors]) -> Vectors:
    """Return the teachers' vectors of a text one after the other, with length 1 together.

    Each teacher has the same weight: the cosine of two joined vectors is the mean of the teachers'
    cosines. A text for which a teacher gives no direction has zeros there.
    """

    def join(numbers: Array) -> Array:
        parts = [_unit(of_teacher(numbers)) for of_teacher in vectors]
        joined_NE: Array = np.concatenate(parts, axis=-1) / np.float32(np.sqrt(len(parts)))
        return joined_NE

    return join


def _unit(vectors_NE: Array) -> Array:
    vectors_NE = np.asarray(vectors_NE, np.float32)
    lengths_N1 = np.linalg.norm(vectors_NE, axis=-1, keepdims=True)
    unit_NE: Array = vectors_NE / np.maximum(lengths_N1, np.finfo(np.float32).tiny)
    return unit_NE


class Basis(nn.Module):
    """Projects vectors onto the teacher's principal components that a student learns, [E, D].

    The components are not trained, but checkpoints hold them.
    """

    basis_ED: Tensor

    def __init__(self, basis_ED: Tensor, inner: nn.Module) -> None:
        super().__init__()
        self.register_buffer("basis_ED", basis_ED)
        self.inner = inner

    def forward(self, vectors: Tensor | None) -> Tensor | None:
        if vectors is None:
            return None
        with torch.autocast(vectors.device.type, enabled=False):
            return vectors.float() @ self.basis_ED


def projected(objective: Objective, basis_ED: Array | None) -> Objective:
    """Return the objective with the teacher's vectors in another basis."""
    if basis_ED is None:
        return objective
    basis = Basis(torch.from_numpy(basis_ED), objective.projections)

    def terms(t: Signals, s: Signals) -> Mapping[str, Tensor]:
        in_basis = replace(
            t,
            pooled=basis(t.pooled),
            anchors=basis(t.anchors),
            positive=basis(t.positive),
            negatives=basis(t.negatives),
        )
        return objective.terms(in_basis, s)

    return replace(objective, projections=basis, terms=terms)


def principal_basis(vectors_NE: Array, width: int) -> Array:
    """Return the `width` orthonormal directions with the most energy, [E, width] in float32.

    They come from the second moments rather than the covariance, because cosines are measured
    from the origin and not from the mean.
    """
    x_NE = torch.from_numpy(vectors_NE.astype(np.float64))
    return np.ascontiguousarray(components(x_NE.T @ x_NE, width).float().numpy())
