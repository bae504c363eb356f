"""What models made on text are worth: each fine-tuned alike on a task, in a run of its own below the output directory.

Read and checked before anything is trained, run at the end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kdcli.downstream.predictions import Features
from kdcli.downstream.recipes import downstream_recipe
from kdcli.downstream.run import WEIGHTS, run_inside
from kdcli.downstream.settings import DownstreamSettings, FinetuneRecipe
from kdcli.downstream.task import PreparedTask, checked, features_of, order_and_schedule, prepare
from kdcli.recipe.resolve import Resolved
from kdcli.recipe.sections import Invocation
from kdcli.training.launch import make_schedule
from kdcli.training.session import Session

DOWNSTREAM = "downstream"
"""Directory of the fine-tunings by which models are compared."""

Tasks = dict[str, tuple[PreparedTask, Resolved[FinetuneRecipe]]]
"""Name of a task → what is fine-tuned on, and how."""


def opened(
    settings: DownstreamSettings,
    model: str,
    seed: int,
    invocation: Invocation,
    session: Session,
) -> Tasks:
    """The tasks on which models will be compared, read before anything is trained.

    A dry run checks them, and tokenises and returns none.

    Args:
        model: where one with the tokenizer of all of them is; the recipes name it.

    Raises:
        UsageError: a task, its data or its recipe cannot be used with such models.
    """
    found = {}
    for name in settings.tasks:
        resolved = downstream_recipe(settings, name, seed)
        resolved = replace(resolved, recipe=resolved.recipe.model_copy(update={"model": model}))
        if invocation.dry_run:
            _check_task(resolved.recipe, invocation)
            continue
        task, _ = prepare(resolved.recipe, session, trust_remote_code=invocation.trust_remote_code)
        order_and_schedule(task, resolved.recipe)
        found[name] = task, resolved
    return found


def _check_task(recipe: FinetuneRecipe, invocation: Invocation) -> None:
    """What would keep a task from being fine-tuned on, found without tokenising its examples."""
    data, headed, _ = checked(recipe, trust_remote_code=invocation.trust_remote_code)
    # What the tokenizer must be able to do does not depend on examples.
    Features.of(data.task, [], headed.tokenizer, **features_of(recipe.data, data.task, headed))
    if data.task.kind != "span":
        # Of contexts it is windows that make a pass, which are not known.
        make_schedule(recipe.train, math.ceil(len(data.train) / recipe.train.batch_size))


def scored(session: Session, tasks: Tasks, sources: Mapping[str, str], folder: Path) -> list[dict[str, Any]]:
    """Evaluations of models, each fine-tuned alike in a run of its own, which is never repeated when it is done.

    Args:
        sources: name in the report → where the model is.
        folder: of all these runs.
    """
    found = []
    for task_name, (task, resolved) in tasks.items():
        for name, source in sources.items():
            of_model = replace(resolved, recipe=resolved.recipe.model_copy(update={"model": source}))
            where = folder / task_name / name.replace(" ", "-").replace(":", "_")
            result = run_inside(task, of_model, where)
            found += [e.model_dump() | {"model": name} for e in result.report.evaluations]
            if session.is_main:
                # Their reports stay; the models themselves are not what was asked for.
                (where / WEIGHTS).unlink(missing_ok=True)
    return found
