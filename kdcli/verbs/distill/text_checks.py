"""Check a distillation on text, and tokenise the text, before the processes start."""

from __future__ import annotations

from kdcli.engine.launch import check_machine
from kdcli.errors import UsageError
from kdcli.losses import check_settings, inputs_of, masks_text
from kdcli.models.grammar import goal_of
from kdcli.models.load import load_config, load_tokenizer
from kdcli.recipe.sections import RunOptions
from kdcli.verbs.distill.plan import plan
from kdcli.verbs.distill.settings import EMBEDDING, SOFT_TARGETS, DistillRecipe
from kdcli.verbs.distill.space import StudentVectors, vector_settings
from kdcli.verbs.distill.student import relation_kernel
from kdcli.workloads.finetuning import check_downstream
from kdcli.workloads.text import check_masking, read_corpus


def check_text_recipe(recipe: DistillRecipe) -> None:
    """Check a recipe before models and data are read.

    Raises UsageError: a missing teacher or shape, a wrong setting, or a method for tasks.
    """
    _check_read_keys(recipe)
    if recipe.teacher is None:
        raise UsageError(
            "no teacher given",
            "kdcli distill TEACHER --to LxH; TEACHER is a hub id, a directory or 'demo'",
        )
    if not recipe.student.to:
        raise UsageError("no student shape given", "add --to LxH, for example --to 6x384")
    check_settings(recipe.method, recipe.loss)
    if not inputs_of(recipe.method) & {"text", "masked"}:
        raise UsageError(
            f"method {recipe.method} learns from a task's examples, not from text",
            "add --task TASK",
        )


def _check_read_keys(recipe: DistillRecipe) -> None:
    """Check that a recipe sets no key that only embedding students read."""
    if recipe.data.partition is not None:
        raise UsageError(
            f"data.partition divides texts, and method {recipe.method} reads blocks of text",
            f"remove it, or use --method {EMBEDDING}",
        )
    if recipe.more_teachers:
        raise UsageError(
            f"--also-teacher: method {recipe.method} compares the states of one teacher",
            f"several teachers need --method {EMBEDDING}, or --task T",
        )
    if recipe.student.source is not None:
        raise UsageError(
            f"--student: method {recipe.method} compares token states, so its student starts from "
            "the teacher",
            f"distil another encoder with --method {EMBEDDING}, or on a task with --task T "
            f"--method {SOFT_TARGETS}",
        )
    if vector_settings(recipe) != StudentVectors():
        raise UsageError(
            f"the keys of workload: are for --method {EMBEDDING}, not for {recipe.method}",
            "omit them",
        )


def read_text(recipe: DistillRecipe, options: RunOptions) -> None:
    """Check everything that needs no weights, then tokenise the text unless it is cached.

    Call it before the processes join. Tokenising may take hours, but a process group times out
    after minutes if all processes wait for one.

    Raises KdcliError: the recipe, a model or the text cannot be used.
    """
    check_text_recipe(recipe)
    relation_kernel(recipe.relation.kernel, *check_machine(recipe.train.dtype, options))
    source = str(recipe.teacher)
    config = load_config(source)
    if goal_of(recipe.student.to) is None:
        options.check_pushed(len(plan(recipe, config)))
    check_downstream(recipe.eval, recipe.train.seed)
    tokenizer = load_tokenizer(source)
    if is_masked(recipe):
        check_masking(recipe.data, tokenizer, source)
    read_corpus(recipe.data, tokenizer)


def is_masked(recipe: DistillRecipe) -> bool:
    """Return whether the loss reads masked text."""
    return masks_text(recipe.method, recipe.loss)
