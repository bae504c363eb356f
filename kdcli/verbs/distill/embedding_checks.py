"""Check the recipe and the models of an embedding distillation."""

from __future__ import annotations

from collections.abc import Mapping

from kdcli.errors import UsageError
from kdcli.losses import build_objective, check_settings
from kdcli.types import ModelShape, Needs
from kdcli.verbs.distill.settings import DistillRecipe, StudentSettings
from kdcli.verbs.distill.space import vector_settings
from kdcli.workloads.embedder import Embedder
from kdcli.workloads.embedding import METHOD
from kdcli.workloads.task_models import same_tokens


def check_embedding(recipe: DistillRecipe) -> None:
    """Check a recipe before models and texts are read.

    Raises UsageError: a missing teacher or shape, or a key that this method does not use.
    """
    if recipe.teacher is None or not (recipe.student.to or recipe.student.source):
        missing = "no teacher" if recipe.teacher is None else "no student shape"
        raise UsageError(
            f"{missing} given", "kdcli distill TEACHER --to LxH --method embedding --data TEXT"
        )
    check_settings(METHOD, recipe.loss)
    if recipe.more_teachers and vector_settings(recipe).vectors:
        raise UsageError(
            "--teacher-vectors replaces the teachers' vectors, so --also-teacher has no effect",
            "omit one of them",
        )
    if recipe.data.pack_isolated:
        raise UsageError(
            "data.pack_isolated is for methods that read blocks of text, not for embedding"
        )
    if recipe.variants or recipe.eval.at:
        raise UsageError(
            f"--ablate and eval.at are for methods that read blocks of text, not for {METHOD}"
        )


def check_signals(
    recipe: DistillRecipe, teacher: Embedder, origin: Embedder, shapes: Mapping[str, ModelShape]
) -> None:
    """Check that a loss that compares tokens has a student with the teacher's tokens and layers.

    Raises UsageError: the student's tokenizer is another one, or the student is static. Also if a
        static student starts from another encoder, or its teacher's vectors have a length that
        counts.
    """
    if any(to.is_static for to in shapes.values()):
        _check_static(recipe, teacher)
    other_tokens = bool(recipe.student.source) and not same_tokens(
        teacher.tokenizer, origin.tokenizer
    )
    for name, to in shapes.items():
        if not (to.is_static or other_tokens):
            continue
        objective = build_objective(METHOD, recipe.loss, teacher.shape, to)
        if objective.teacher_needs != Needs() and to.is_static:
            raise UsageError(
                "loss.relations_weight and loss.hidden_weight compare token states, and a static "
                f"student ({name}) has none",
                "leave them at 0",
            )
        if objective.teacher_needs != Needs():
            raise UsageError(
                "loss.relations_weight and loss.hidden_weight compare tokens, and "
                f"{origin.source} has other tokens than {teacher.source}",
                "leave them at 0: the other terms compare whole texts",
            )


def check_static_start(student: StudentSettings) -> None:
    """Check how a static student starts. Raises UsageError: from an encoder, or from layers."""
    if student.source:
        raise UsageError(
            "--student: a static student has the teacher's tokens and starts from its vectors",
            "omit --student, or give a shape with layers",
        )
    if student.layers is not None:
        raise UsageError(
            "student.layers names layers to copy, and a static student has none",
            "omit it, or give a shape with layers",
        )
    if student.init == "copied":
        raise UsageError(
            "student.init=copied copies layers, and a static student has none",
            "omit it, or give a shape with layers",
        )


def _check_static(recipe: DistillRecipe, teacher: Embedder) -> None:
    """Check that a static student can learn from a teacher. Raises UsageError: it cannot."""
    check_static_start(recipe.student)
    fmt = teacher.format
    if fmt.similarity != "cosine" and not fmt.normalize:
        raise UsageError(
            f"the vectors of {teacher.source} are compared by {fmt.similarity}, so that their "
            "length counts; a static student's vectors have length 1",
            "give a shape with layers, such as 3x384",
        )
