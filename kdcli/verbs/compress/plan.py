"""The plan of a compression: candidates from cheap to expensive.

1. The model itself on every backend. 2. Shapes from large to small; those whose untrained latency
misses the goal are skipped, and the others are trained by successive halving. 3. The model pruned
and compacted.
"""

from pathlib import Path

from kdcli.errors import GateError, MachineError, UsageError
from kdcli.models.layout import COMPACT_PATHS
from kdcli.models.load import load_config, location
from kdcli.recipe.sections import RecipeValues
from kdcli.verbs.compress import steps
from kdcli.verbs.compress.budget import check_cost, estimate
from kdcli.verbs.compress.choice import conflict, is_bounded
from kdcli.verbs.compress.halving import try_shapes
from kdcli.verbs.compress.judge import CandidateScores, deployed_bytes
from kdcli.verbs.compress.recipes import EXPORTS, backend_of
from kdcli.verbs.compress.runner import product
from kdcli.verbs.compress.search import Candidate, Search
from kdcli.verbs.compress.settings import GoalSettings
from kdcli.verbs.compress.shapes import Untrained, missed_untrained, too_slow

PRUNE: RecipeValues = {"sparsity": [0.9]}


def check_reachable(search: Search, untrained: Untrained, *, is_fine_tuned: bool) -> None:
    """Refuse a goal for which nothing needs to be trained.

    Raises UsageError: the model meets the goal as it is; GateError: no backend and no shape can.
    """
    goal, recipe = search.goal, search.runner.recipe
    if not is_bounded(goal):
        return
    files = Path(location(str(recipe.model))).glob("model*.safetensors")
    weights = sum(file.stat().st_size for file in files)
    size = deployed_bytes(str(recipe.model), weights) / 1e6
    ms = untrained.teacher.ms
    small = goal.max_mb is None or (weights > 0 and size <= goal.max_mb)
    fast = goal.max_latency_ms is None or ms <= goal.max_latency_ms
    if is_fine_tuned and goal.speedup is None and small and fast:
        raise UsageError(
            f"{recipe.model} meets every limit already: {ms:.2f} ms, {size:.1f} MB",
            "nothing was trained; ask for more",
        )
    missed = {
        name: missed_untrained(goal, times, best=True, is_shape=name in untrained.shapes)
        for name, times in (untrained.shapes | untrained.backends).items()
    }
    if recipe.plan.prune is None and all(missed.values()):
        whys = [f"{name}: {'; '.join(of.values())}" for name, of in missed.items()]
        why = conflict(missed.values()) or "; ".join(whys)
        raise GateError(
            f"no shape and no backend of the plan can meet the goal: {why}",
            "nothing was trained; name others in plan.shapes",
        )


def follow_plan(search: Search, untrained: Untrained) -> CandidateScores:
    """Try candidates from cheap to expensive until one meets the goal with confidence.

    Raises MachineError: no candidate could be made.
    """
    slow = slow_backends(search.goal, untrained)
    for backend in search.backends:
        if why := slow.get(backend):
            search.skip(backend, why)
        else:
            search.export(backend, search.teacher, backend)
    # If the fastest model is wanted, shapes are scored as well as backends.
    if is_bounded(search.goal) and search.judge():
        search.notes.append("a backend alone meets the goal, so nothing smaller was trained")
    else:
        try_shapes(search, untrained.shapes)
        if search.scores is None:
            search.judge()
        if not search.met:
            try_pruning(search)
    if search.scores is None:
        # The model closest to the goal is on a backend that is too slow or too large for it.
        for backend in slow:
            search.export(backend, search.teacher, backend)
        search.judge()
    if search.scores is None:
        whys = "; ".join(f"{one.name}: {one.skipped}" for one in search.candidates.values())
        raise MachineError(f"no candidate could be made: {whys}")
    return search.scores


def slow_backends(goal: GoalSettings, untrained: Untrained) -> dict[str, str]:
    """Return the backends on which the model itself misses the goal, with the reasons.

    If every shape is too slow as well, no backend is returned, because the model closest to the
    goal may be on one of these backends.
    """
    if len(too_slow(goal, untrained.shapes)) == len(untrained.shapes):
        return {}
    missed = {
        name: missed_untrained(goal, times, best=True, is_shape=False)
        for name, times in untrained.backends.items()
    }
    return {name: "; ".join(whys.values()) for name, whys in missed.items() if whys}


def try_pruning(search: Search) -> None:
    """Prune the model and compact it."""
    runner, name = search.runner, "pruned"
    keys = runner.recipe.plan.prune
    if keys is None:
        return
    kind = load_config(search.teacher).model_type
    if kind not in COMPACT_PATHS:
        search.skip(name, f"{kind} has no compact form")
        return
    step = runner.trainer.prune(search.teacher, PRUNE | keys)
    if why := check_cost(runner, name, estimate(runner, name, step)):
        search.skip(name, why)
    elif search.finishes(name, step):
        search.export(
            f"{name}-{search.fastest}", product(runner.path(name)), search.fastest, [name]
        )
        search.judge()


def follow_steps(search: Search) -> CandidateScores:
    """Run the steps of a recipe one after another, and score the model that each of them left."""
    runner = search.runner
    recipe, model = runner.recipe, Path(search.teacher)
    trained: list[str] = []
    for number, named in enumerate(recipe.steps, 1):
        ((verb, keys),) = named.items()
        name = f"{number}-{verb}"
        if verb in EXPORTS:
            search.export(name, model, backend_of(verb, keys), trained, required=True)
            continue
        if verb == "trim":
            model = runner.require(
                name, steps.trim_step(runner.verbs, str(model), runner.training_text, keys)
            )
        else:
            if verb == "prune":
                step = runner.trainer.prune(str(model), keys, search.teacher)
            else:
                step = runner.trainer.distill(str(model), keys)
            model = product(runner.require(name, step))
            trained.append(name)
        parent = trained[-1] if trained else None
        search.candidates[name] = Candidate(name, model, "", parent, str(model))
    search.judge()
    assert search.scores is not None
    return search.scores
