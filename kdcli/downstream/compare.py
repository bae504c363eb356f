"""Downstream scores of models made on text: each is fine-tuned alike in its own run below the output directory."""

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kdcli.data.tasks import OWN, task_of
from kdcli.downstream.predictions import Features
from kdcli.downstream.recipes import downstream_recipe
from kdcli.downstream.run import drop_weights, run_inside
from kdcli.downstream.settings import DownstreamSettings, FinetuneRecipe
from kdcli.downstream.task import PreparedTask, check_task_data, features_of, order_and_schedule, prepare
from kdcli.recipe.resolve import Resolved
from kdcli.recipe.sections import Invocation
from kdcli.training.launch import Session, make_schedule

DOWNSTREAM = "downstream"  # directory of these fine-tunings
Tasks = dict[str, tuple[PreparedTask, Resolved[FinetuneRecipe]]]  # name of a task -> its data, and how to fine-tune


def check_tasks(settings: DownstreamSettings, seed: int) -> None:
    """Raise a UsageError for tasks that cannot be opened, as far as that shows without their data."""
    for name in settings.tasks:
        downstream_recipe(settings, name, seed)
        if name != OWN:
            task_of(name)


def opened(settings: DownstreamSettings, model: str, seed: int, invocation: Invocation, session: Session) -> Tasks:
    """Load and check the tasks before anything is trained; a dry run does not tokenise and returns none. `model`: any
    model with the common tokenizer, whose training rows are those of all."""
    tasks = {}
    for name in settings.tasks:
        resolved = _with_model(downstream_recipe(settings, name, seed), model)
        if not invocation.dry_run:
            task, _ = prepare(resolved.recipe, session)
            order_and_schedule(task, resolved.recipe)
            tasks[name] = task, resolved
            continue
        data, headed, _ = check_task_data(resolved.recipe, session)
        # No examples: this checks the tokenizer alone.
        Features.of(data.task, [], headed.tokenizer, **features_of(resolved.recipe.data, data.task, headed))
        if data.task.kind != "span":
            # The rows of a span task are windows, whose number is not known yet.
            train = resolved.recipe.train
            make_schedule(train, math.ceil(len(data.train) / train.batch_size))
    return tasks


def _with_model(resolved: Resolved[FinetuneRecipe], model: str) -> Resolved[FinetuneRecipe]:
    return replace(resolved, recipe=resolved.recipe.model_copy(update={"model": model}))


def scored(session: Session, tasks: Tasks, sources: Mapping[str, str | Path], folder: Path) -> list[dict[str, Any]]:
    """Fine-tune every model on every task; runs that are done are read back. `sources`: name in the report -> where the
    model is, a `Path` for one that this run made. `folder`: of all these runs; their reports stay, their weights are
    deleted."""
    evaluations = []
    for task_name, (task, resolved) in tasks.items():
        for name, source in sources.items():
            where = folder / task_name / name.replace(" ", "-").replace(":", "_")
            # The run may move to another machine; what it was given may not.
            named = Path(os.path.relpath(source, where)).as_posix() if isinstance(source, Path) else source
            result = run_inside(task, _with_model(resolved, named), where, str(source))
            evaluations += [e.model_dump() | {"model": name} for e in result.report.evaluations]
            if session.is_main:
                drop_weights(where)
    return evaluations
