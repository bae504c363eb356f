"""Distilling a reranker: lists of candidates -> the teacher's scores, once -> a smaller cross-encoder -> report."""

from pathlib import Path
from typing import Any

import numpy as np

from kdcli.data.labelled.features import Array
from kdcli.data.labelled.lists import Lists, read_lists
from kdcli.disk import cache_dir
from kdcli.engine.launch import Session, choose_output_dir
from kdcli.engine.progress import Progress
from kdcli.errors import UsageError
from kdcli.models.card import describe_source, weights_hash
from kdcli.models.load import location
from kdcli.models.training_rows import training_rows
from kdcli.recipe.resolve import Resolved
from kdcli.recipe.sections import RunOptions
from kdcli.report.finish import RunResult
from kdcli.run.dry_run import Estimate
from kdcli.run.stages import run_command
from kdcli.targets.cache import SignalStore
from kdcli.targets.teacher import Teacher
from kdcli.types import Needs
from kdcli.workloads.rerank import RerankRun, RerankTeacher, student_of
from kdcli.workloads.reranker import is_reranker, open_reranker, read_by
from kdcli.workloads.settings import RerankRecipe


def run(resolved: Resolved[RerankRecipe], invocation: RunOptions) -> RunResult | Estimate | None:
    """Distil a reranker, judge it and report; returns and raises as `run_command`."""
    recipe = resolved.recipe
    if recipe.teacher is None and recipe.student.source is None:
        raise UsageError(
            "no teacher given",
            "kdcli distill TEACHER --task rerank --to LxH --data DIR; or --student, with scores in the data",
        )
    if recipe.student.to is None and recipe.student.source is None:
        raise UsageError(
            "no student given", "add --to LxH, for example --to 3x384, or --student DIR"
        )
    if recipe.data.source is None:
        raise UsageError(
            "task rerank needs --data", "a file or directory of queries with their passages"
        )
    return run_command(resolved, invocation, prepare)


def is_reranker_here(source: str | None) -> bool:
    """Whether a teacher that may not be there at all is a reranker."""
    if source is None:
        return False
    try:
        return is_reranker(source)
    except UsageError:
        # Said by the command that loads it.
        return False


def prepare(
    resolved: Resolved[RerankRecipe], invocation: RunOptions, session: Session
) -> RerankRun:
    """Check models and data; claims nothing. Raises KdcliError: they cannot be used."""
    recipe = resolved.recipe
    name = Path(str(recipe.teacher or recipe.student.source)).name
    named = f"distill-{name}-rerank-{recipe.student.to or 'student'}".replace(":", "_")
    folder = choose_output_dir(named, resolved, invocation, session)
    train, held_out, split = read_lists(
        str(recipe.data.source), seed=recipe.data.split_seed, log=Progress.log
    )
    if recipe.teacher is None and np.isnan(train.scores).any():
        raise UsageError(
            f"{int(np.isnan(train.scores).sum()):,} of {len(train.passages):,} training passages have no score",
            "name a teacher; or train on the labels alone: kdcli finetune MODEL --task rerank",
        )
    teacher = teacher_of(recipe, session, dry_run=invocation.dry_run) if recipe.teacher else None
    make = student_of(recipe, recipe.student.source or str(recipe.teacher), session, train)
    said = (
        f"the teacher is {recipe.teacher}"
        if teacher
        else f"the student learnt the scores in {recipe.data.source}"
    )
    return RerankRun(
        resolved,
        invocation,
        folder,
        session,
        "distill",
        make,
        teacher,
        train,
        held_out,
        split,
        notes=[said],
    )


def teacher_of(recipe: RerankRecipe, session: Session, *, dry_run: bool) -> RerankTeacher:
    """The teacher: a cross-encoder's output before its activation, or the cosine of an embedding model's vectors. A dry
    run takes zeros. Raises UsageError: a model that is neither."""
    source = str(recipe.teacher)
    opened = open_reranker(source, session, max_length=recipe.data.max_length)
    Progress.log(f"teacher {source}: {opened.note}")
    card, loaded = describe_source(opened.model, source), opened.cross_encoder

    def scores(lists: Lists, judged: bool) -> Array:
        if dry_run:
            return np.zeros(len(lists.passages), np.float32)
        if judged or loaded is None:
            return opened.scores(lists)
        encoded, needs = read_by(lists, loaded, recipe.data.max_length), Needs(logits=True)
        fingerprint = f"{weights_hash(loaded.model)}-{session.compute_dtype}"
        live = Teacher.frozen(source, loaded.model, needs, session).captured
        kept: dict[str, Any] = {"limit_bytes": int(recipe.cache_gb * 1e9), "log": Progress.log}
        kept |= {"needs": needs, "fingerprint": fingerprint, "device": session.device}
        store = SignalStore.open(cache_dir() / "scores", encoded, live, **kept)
        if store is None:
            raise UsageError(
                "the teacher's scores do not fit on the disk", "raise cache_gb, or free disk space"
            )
        return store.vectors(np.arange(len(encoded)))[:, 0]

    return RerankTeacher(source, scores, card, training_rows(location(source)))
