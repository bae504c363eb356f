"""What a compression calls: other verbs, the latency worker and the clock."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kdcli.deploy.latency import Latency, measure_latency
from kdcli.deploy.runners import check_backend
from kdcli.recipe.resolve import Resolved
from kdcli.recipe.sections import RunOptions
from kdcli.verbs.distill.outputs import distill_reranker
from kdcli.verbs.distill.run import distill, distill_on_task
from kdcli.verbs.distill.settings import DistillRecipe, TaskDistillRecipe
from kdcli.verbs.evaluate.run import evaluate
from kdcli.verbs.export.run import export
from kdcli.verbs.finetune.run import finetune, finetune_reranker
from kdcli.verbs.prune.run import prune
from kdcli.verbs.trim.run import trim
from kdcli.workloads.settings import RerankRecipe


@dataclass(frozen=True)
class Verbs:
    """The verbs that a compression calls. A test gives its own.

    Attributes:
        measure: measures latencies.
        check_backend: raises an error if a backend cannot be used on this machine.
        clock: the seconds from which durations are computed.
    """

    finetune: Callable[..., object]
    distill: Callable[..., object]
    prune: Callable[..., object]
    trim: Callable[..., object]
    export: Callable[..., object]
    evaluate: Callable[..., object]
    measure: Callable[..., Latency] = measure_latency
    check_backend: Callable[[str, str], None] = check_backend
    clock: Callable[[], float] = time.monotonic


def _finetune(resolved: Resolved[Any], options: RunOptions) -> object:
    if isinstance(resolved.recipe, RerankRecipe):
        return finetune_reranker(resolved, options)
    return finetune(resolved, options)


def _distill(resolved: Resolved[Any], options: RunOptions) -> object:
    recipe = resolved.recipe
    if isinstance(recipe, RerankRecipe):
        return distill_reranker(resolved, options)
    if isinstance(recipe, TaskDistillRecipe):
        return distill_on_task(resolved, options)
    assert isinstance(recipe, DistillRecipe)
    return distill(resolved, options)


VERBS = Verbs(_finetune, _distill, prune, trim, export, evaluate)
