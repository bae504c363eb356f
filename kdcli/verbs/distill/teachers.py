"""Join the vectors of several teachers into the targets of one embedding student."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kdcli.errors import UsageError
from kdcli.targets.targets import Vectors
from kdcli.types import Array
from kdcli.verbs.distill.settings import DistillRecipe
from kdcli.verbs.distill.space import vector_settings
from kdcli.workloads.embedder import Embedder


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


def open_more_teachers(
    recipe: DistillRecipe,
    first: Embedder,
) -> list[Embedder]:
    """Open the teachers after the first one.

    Raises UsageError: a model cannot be used, is named twice, or has vectors whose length counts.
    """
    settings = vector_settings(recipe)
    sources = [str(recipe.teacher), *recipe.more_teachers]
    for source in recipe.more_teachers:
        if sources.count(source) > 1:
            raise UsageError(f"--also-teacher {source}: this model is already a teacher")
    others = [Embedder.open(source, pooling=settings.pooling) for source in recipe.more_teachers]
    for teacher in [first, *others] if others else []:
        if teacher.format.similarity != "cosine" and not teacher.format.normalize:
            raise UsageError(
                f"--also-teacher joins vectors of length 1, but those of {teacher.source} are "
                f"compared by {teacher.format.similarity}, so that their length counts",
                "choose teachers that are compared by the cosine",
            )
    return others
