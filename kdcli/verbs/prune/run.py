"""`kdcli prune`: remove weights of an encoder while it learns.

Every method and sparsity is a stage. A batch of token ids gives outputs under the masks. The loss
adds the labels' terms, the teacher's terms and the method's own. After training, the masked, the
compact and the sparse form are compared with the dense model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from transformers import AutoModel

from kdcli.engine.progress import Progress
from kdcli.errors import UsageError
from kdcli.models.load import load_weights
from kdcli.models.model import Model
from kdcli.pruners import check_settings, defaults, smp
from kdcli.recipe.resolve import Resolved, set_among
from kdcli.recipe.sections import RunOptions
from kdcli.report.finish import RunResult
from kdcli.report.own_data import directory_word
from kdcli.report.schema import Report
from kdcli.run.context import RunContext
from kdcli.run.dry_run import Estimate
from kdcli.run.stages import Run, Stage, StageJob
from kdcli.targets.targets import delete_signals
from kdcli.types import Outcome
from kdcli.verbs.prune.build import build_pruning, restore_precision
from kdcli.verbs.prune.method_recipes import with_defaults
from kdcli.verbs.prune.save import COMPACT, DENSE, MASKED, save_pruned
from kdcli.verbs.prune.settings import PruneRecipe
from kdcli.workloads import open_workload
from kdcli.workloads.as_trained import as_trained
from kdcli.workloads.finetuning import (
    learning_notes,
    request_of,
    scores_after_training,
    with_trivial_answer,
)
from kdcli.workloads.requests import WorkloadRequest
from kdcli.workloads.study import Member, compare, run_study, seeds_of, with_seed
from kdcli.workloads.workload import Workload

Recipes = Sequence[Resolved[PruneRecipe]]
REMEDY = "Keep more of the weights (--sparsity), or train for more epochs (--epochs)"
EMBEDDING_TASK = "embedding"


def prune(
    recipes: Recipes, options: RunOptions, variants: Mapping[str, Recipes] | None = None
) -> RunResult | Estimate | None:
    """Prune once for each variant, seed, method and sparsity. If there are several, compare them.

    Args:
        recipes: One recipe for each method; they differ in the method's own settings only.
        options: Where and how to run.
        variants: The recipes of each variant, by its name; None for the recipes alone.
    """
    members = [
        Member(name, seed_folder / folder, with_seed(own, seed), _prepare)
        for variant, of_variant in (variants or {"": recipes}).items()
        for complete in [_complete(of_variant)]
        for seed, seed_folder in seeds_of(complete[0], complete[0].recipe.seeds, variant)
        for name, folder, own in runs_of(complete, variant)
    ]
    options.check_pushed(len(members))
    whole = _complete(recipes)[0]
    recipe = whole.recipe
    data = directory_word(str(recipe.task), recipe.data.source)
    name = f"prune-{Path(str(recipe.model)).name}-{data}"
    return run_study(members, whole, options, name, partial(compare, _names))


def _complete(recipes: Recipes) -> list[Resolved[PruneRecipe]]:
    """Check the recipes of a run, and fill in what the model, the teacher and the methods say."""
    origin = recipes[0].recipe
    recipes = [as_trained(as_trained(each, origin.model), origin.teacher) for each in recipes]
    first, methods = recipes[0].recipe, [r.recipe.method for r in recipes]
    if first.model is None or first.task is None:
        raise UsageError(
            "prune needs a model and a task", "kdcli prune MODEL --task TASK --sparsity 0.9"
        )
    for each in recipes:
        check_settings(each.recipe.method, each.recipe.pruner)
    sparsities = [f"{s:g}" for s in first.sparsity]
    for name, values in (("method", methods), ("sparsity", sparsities)):
        if repeated := [value for value in values if values.count(value) > 1]:
            raise UsageError(f"{name} {repeated[0]} was given twice", "give each once")
    named = (set_among(each, ("workload.pooling", "loss", "eval")) for each in recipes)
    wrong = next(filter(None, named), None)
    if wrong is not None and first.task != EMBEDDING_TASK:
        raise UsageError(
            f"{wrong} is for --task {EMBEDDING_TASK}, not for task {first.task}", "omit it"
        )
    return [with_defaults(each) for each in recipes]


def _names(report: Report, variant: str) -> dict[str, str]:
    """Name the pruned model of a run by its variant, next to the dense model."""
    # Only the compact form is smaller: a model with zeros is as big as the dense one.
    return {DENSE: DENSE, COMPACT if COMPACT in report.cards else MASKED: variant}


def _prepare(context: RunContext[PruneRecipe]) -> Run:
    """Check model and data against each other and tokenise, without claiming the directory."""
    recipe = context.recipe
    others = [recipe.teacher] if recipe.teacher is not None else []
    workload, model = open_workload(prune_request(recipe, others), context.session)
    teacher: Model | None = None
    if recipe.teacher is not None:
        teacher = workload.load_teacher(recipe.teacher, model, head=recipe.head)
    if not workload.has_labels:
        workload = workload.with_reference(teacher or model)
    schedule = workload.plan(recipe.train).schedule
    settings = check_settings(recipe.method, recipe.pruner)
    if isinstance(settings, smp.Settings):
        settings.rising(schedule.steps)
    return Run([_stage(context, workload, model, teacher)])


def prune_request(recipe: PruneRecipe, other_models: Sequence[str]) -> WorkloadRequest:
    """Build the request for a recipe's workload."""
    # Without labels, the model learns from its own head or from a teacher's.
    own_head = recipe.data.labels == "teacher" and recipe.teacher is None
    request = request_of(
        recipe, str(recipe.model), new_head=not own_head, other_models=other_models
    )
    return replace(request, loss=recipe.loss, evaluation=recipe.eval)


def _stage(
    context: RunContext[PruneRecipe], workload: Workload, model: Model, teacher: Model | None
) -> Stage:
    recipe, folder = context.recipe, context.folder

    def build() -> StageJob:
        Progress.log(f"{recipe.method}, sparsity {recipe.sparsity[0]:g}")
        inside = None if context.dry_run else folder
        built = build_pruning(context, workload, recipe, model, teacher, inside)
        Progress.warn(*built.warnings)

        def finish(outcome: Outcome) -> None:
            base = None
            if not built.pruner.trains_weights:
                base = load_weights(str(recipe.model), AutoModel)
                # Restore before scoring, so that the scored model is the saved one.
                restore_precision(built.model.model, base)
            scores, notes = None, list[str]()
            if workload.has_metrics:
                scores = scores_after_training(workload, built.model, outcome)
            if context.is_main:
                delete_signals(folder)
                if scores is not None:
                    scores = with_trivial_answer(workload, scores)
                    # The loss also has the regulariser of the scores.
                    notes = learning_notes("the pruned model", scores.evaluations, None, REMEDY)
                save_pruned(context, workload, built, folder, outcome, scores, base, notes)

        cards = {DENSE: built.dense}
        return StageJob(built.job, built.schedule, built.steps_per_pass, finish, cards)

    return Stage(folder, context.resolved, build)


def runs_of(recipes: Recipes, variant: str) -> list[tuple[str, Path, Resolved[PruneRecipe]]]:
    """Return a run for each method and sparsity: its name in a comparison, directory and recipe.

    If there are several methods or sparsities, the directory is `METHOD/`, `sparsity-S/` or both.
    A method whose density cannot be chosen has one run.
    """
    runs = []
    for resolved in recipes:
        recipe = resolved.recipe
        exact = defaults(recipe.method).exact and recipe.pruner.get("masking") != "threshold"
        several = exact and len(recipe.sparsity) > 1
        shows_sparsity = several or (len(recipes) == 1 and (exact or not variant))
        for sparsity in recipe.sparsity if exact else recipe.sparsity[:1]:
            own = Resolved(recipe.model_copy(update={"sparsity": [sparsity]}), resolved.origins)
            method = [recipe.method] * (len(recipes) > 1)
            folder = Path(*method, *[f"sparsity-{sparsity:g}"] * several)
            name = [variant, *method, *[f"{100 * sparsity:g} %"] * shows_sparsity]
            runs.append((" ".join(filter(None, name)), folder, own))
    return runs
