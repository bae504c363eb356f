"""`kdcli prune`: remove weights of an encoder while it learns.

Every method and sparsity is a stage. A batch of token ids gives outputs under the masks. The loss
adds the labels' terms, the teacher's terms and the method's own. After training, the masked, the
compact and the sparse form are compared with the dense model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
from kdcli.report.combine import combine_reports
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
from kdcli.workloads.study import Member, run_study, seeds_of, with_seed
from kdcli.workloads.workload import Workload

Recipes = Sequence[Resolved[PruneRecipe]]
REMEDY = "Keep more of the weights (--sparsity), or train for more epochs (--epochs)"
EMBEDDING_TASK = "embedding"


@dataclass(frozen=True)
class StageRecipe:
    """One method and sparsity.

    Attributes:
        name: The name in a report that compares several stages.
        resolved: The recipe that repeats this stage alone.
        folder: The stage's run directory.
    """

    name: str
    resolved: Resolved[PruneRecipe]
    folder: Path


def prune(
    recipes: Recipes, options: RunOptions, variants: Mapping[str, Recipes] | None = None
) -> RunResult | Estimate | None:
    """Prune once for each variant, seed, method and sparsity. If there are several, compare them.

    Args:
        recipes: One recipe for each method; they differ in the method's own settings only.
        options: Where and how to run.
        variants: The recipes of each variant, by its name; None for the recipes alone.
    """
    members: list[Member[PruneRecipe]] = []
    for variant, own in (variants or {"": recipes}).items():
        complete = _complete(own)
        for seed, folder in seeds_of(complete[0], complete[0].recipe.seeds, variant):
            seeded = [with_seed(each, seed) for each in complete]
            members.append(Member(variant, folder, seeded[0], partial(_prepare, seeded)))
    whole = _complete(recipes)
    options.check_pushed(len(stage_recipes(whole, Path())))
    first = whole[0].recipe
    data = directory_word(str(first.task), first.data.source)
    name = f"prune-{Path(str(first.model)).name}-{data}"
    return run_study(members, whole[0], options, name, _names)


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
    """Name the pruned models of a run by their variant and sparsity, next to the dense model."""
    names = {DENSE: DENSE}
    if MASKED not in report.cards:
        return names | {p.model: f"{variant} {p.model}".strip() for p in report.pruning}
    (pruning,) = report.pruning
    is_chosen = defaults(pruning.method).exact and pruning.masking != "threshold"
    share = f"{100 * pruning.sparsity:g} %" if is_chosen or not variant else ""
    form = COMPACT if COMPACT in report.cards else MASKED
    return names | {form: f"{variant} {share}".strip()}


def _prepare(recipes: Recipes, context: RunContext[PruneRecipe]) -> Run:
    """Check models and data against each other and tokenise, without claiming the directory."""
    recipe = context.recipe
    others = [recipe.teacher] if recipe.teacher is not None else []
    workload, model = open_workload(prune_request(recipe, others), context.session)
    teacher: Model | None = None
    if recipe.teacher is not None:
        teacher = workload.load_teacher(recipe.teacher, model, head=recipe.head)
    if not workload.has_labels:
        workload = workload.with_reference(teacher or model)
    heads = {repr(each.recipe.head): each.recipe for each in recipes}
    for head, each in heads.items():
        # Methods differ in their heads. A head that cannot be made is an error before the first
        # stage begins.
        if head != repr(recipe.head):
            workload.load(str(each.model), head=each.head, seed=each.train.seed)
    listed = stage_recipes(recipes, context.folder)
    for one in listed:
        own = one.resolved.recipe
        schedule = workload.plan(own.train).schedule
        settings = check_settings(own.method, own.pruner)
        if isinstance(settings, smp.Settings):
            settings.rising(schedule.steps)
    loaded: list[Model] = [model]
    stages = [_stage(context, workload, one, teacher, loaded) for one in listed]
    del model
    return Run(stages, lambda: _report_several(context, workload, listed))


def prune_request(recipe: PruneRecipe, other_models: Sequence[str]) -> WorkloadRequest:
    """Build the request for a recipe's workload."""
    # Without labels, the model learns from its own head or from a teacher's.
    own_head = recipe.data.labels == "teacher" and recipe.teacher is None
    request = request_of(
        recipe, str(recipe.model), new_head=not own_head, other_models=other_models
    )
    return replace(request, loss=recipe.loss, evaluation=recipe.eval)


def _stage(
    context: RunContext[PruneRecipe],
    workload: Workload,
    one: StageRecipe,
    teacher: Model | None,
    loaded: list[Model],
) -> Stage:
    """Build the stage of one method and sparsity.

    The first stage that is run takes the model in `loaded`, if it has the stage's head.
    """
    recipe, folder = one.resolved.recipe, one.folder

    def build() -> StageJob:
        Progress.log(f"{recipe.method}, sparsity {recipe.sparsity[0]:g}")
        model = loaded.pop() if loaded else None
        # A resumed run may begin with a method whose head is another one.
        if model is None or recipe.head != context.recipe.head:
            model = workload.load(str(recipe.model), head=recipe.head, seed=recipe.train.seed)
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

    return Stage(folder, one.resolved, build)


def _report_several(
    context: RunContext[PruneRecipe], workload: Workload, listed: Sequence[StageRecipe]
) -> None:
    """Compare the stages, unless a single stage has written the report."""
    if len(listed) == 1 or not context.is_main:
        return
    reports = {}
    for one in listed:
        report = RunResult.read(one.folder).report
        # Only the compact form is smaller: a model with zeros is as big as the dense one.
        form = COMPACT if COMPACT in report.cards else MASKED
        forms = report.renamed({DENSE: DENSE, form: one.name})
        reports[one.name] = forms.model_copy(update={"pruning": report.pruning})
    method, *others = dict.fromkeys(one.resolved.recipe.method for one in listed)
    notes = list(workload.notes)
    notes += [f"{one.name}: {one.folder.relative_to(context.folder)}" for one in listed]
    if others:
        notes.append(f"recipe.yaml here is the recipe of {method}; each run has its own")
    # Each stage's own report has its latencies.
    combine_reports(
        context.folder, command="prune", recipe=context.recipe, reports=reports, notes=notes
    )


def stage_recipes(recipes: Recipes, folder: Path) -> list[StageRecipe]:
    """Return the name, recipe and directory of each stage.

    If there are several methods or sparsities, the directory is `METHOD/`, `sparsity-S/` or both.
    A method whose density cannot be chosen has one stage.
    """
    stages = []
    for resolved in recipes:
        recipe = resolved.recipe
        exact = defaults(recipe.method).exact and recipe.pruner.get("masking") != "threshold"
        several = exact and len(recipe.sparsity) > 1
        for sparsity in recipe.sparsity if exact else recipe.sparsity[:1]:
            own = Resolved(recipe.model_copy(update={"sparsity": [sparsity]}), resolved.origins)
            method = [recipe.method] * (len(recipes) > 1)
            parts = [*method, *[f"sparsity-{sparsity:g}"] * several]
            shows_sparsity = several or len(recipes) == 1
            name = [*method, *[f"{100 * sparsity:g} %"] * shows_sparsity]
            stages.append(StageRecipe(" ".join(name), own, folder.joinpath(*parts)))
    return stages
