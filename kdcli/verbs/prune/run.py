"""`kdcli prune`: removes weights of an encoder while it learns a task; one stage for each method and sparsity.

A batch of token ids -> logits under the masks -> hard loss, a teacher's soft loss, the method's own terms -> engine.
After training: the masked, the compact and the sparse form, measured beside the dense model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from transformers import AutoModel

from kdcli.engine.launch import Session, choose_output_dir
from kdcli.engine.progress import Progress
from kdcli.errors import UsageError
from kdcli.models.load import load_weights, location
from kdcli.models.model import Model
from kdcli.models.training_rows import all_rows, training_rows
from kdcli.pruners import check_settings, defaults, smp
from kdcli.recipe.resolve import Resolved
from kdcli.recipe.sections import RunOptions
from kdcli.report.combine import Part, combine_reports
from kdcli.report.finish import RunResult
from kdcli.report.schema import Role
from kdcli.run.dry_run import Estimate
from kdcli.run.stages import StageJob, run_command
from kdcli.targets.task_teacher import delete_signals, load_teacher
from kdcli.types import Outcome
from kdcli.verbs.prune.embedding import TASK as EMBEDDING
from kdcli.verbs.prune.embedding import prepare_embedding
from kdcli.verbs.prune.job import Pruning, build_pruning, restore_precision
from kdcli.verbs.prune.recipes import with_defaults
from kdcli.verbs.prune.save import COMPACT, DENSE, MASKED, save_and_report
from kdcli.verbs.prune.settings import PruneRecipe
from kdcli.workloads import task as tasks
from kdcli.workloads.as_trained import as_trained
from kdcli.workloads.task import PreparedTask, order_and_schedule

Recipes = Sequence[Resolved[PruneRecipe]]
PRUNED_ROLES: dict[str, Role] = {DENSE: "baseline", MASKED: "pruned", COMPACT: "pruned"}


@dataclass
class PruneStage:
    """One method and sparsity, in a directory of its own."""

    name: str  # in the report that compares several
    resolved: Resolved[PruneRecipe]
    folder: Path
    task: PreparedTask
    teacher: Model | None
    dry_run: bool
    headed: Model | None = None  # loaded already, for `build` to use
    built: Pruning | None = None

    def build(self) -> StageJob:
        task, recipe = self.task, self.resolved.recipe
        Progress.log(f"{recipe.method}, sparsity {recipe.sparsity[0]:g}")
        headed, self.headed = self.headed or task.load(recipe), None
        built = build_pruning(
            task, recipe, headed, self.teacher, None if self.dry_run else self.folder
        )
        Progress.log(*built.warnings)
        order, _ = order_and_schedule(task, recipe)
        tasks.log_padding(order)
        # A dry run keeps no model beyond its own stage.
        self.built = None if self.dry_run else built
        return StageJob(built.job, built.schedule, order.steps_of_pass, {DENSE: built.dense})

    def finish(self, outcome: Outcome) -> None:
        assert self.built is not None
        built, self.built = self.built, None
        recipe, trusted, base = built.recipe, self.task.session.trust_remote_code, None
        if not built.pruner.trains_weights:
            base = load_weights(str(recipe.model), AutoModel, trust_remote_code=trusted)
            # Before the scores, which are those of the saved model.
            restore_precision(built.headed.model, base)
        trained = tasks.trained_model(self.task, built.headed, outcome)
        if self.task.session.is_main:
            delete_signals(self.folder)
            before = [model.rows for model in (built.headed, self.teacher) if model is not None]
            rows = all_rows(self.task.data.rows, *before)
            save_and_report(self.task, built, base, self.folder, outcome, trained.predictions, rows)


@dataclass(frozen=True)
class PruneRun:
    """All stages of a command, checked."""

    resolved: Resolved[PruneRecipe]
    invocation: RunOptions
    folder: Path
    stages: list[PruneStage]

    def report(self) -> None:
        first, parts = self.stages[0], []
        # A single stage wrote the report.
        if len(self.stages) == 1 or not first.task.session.is_main:
            return
        for stage in self.stages:
            result = RunResult.read(stage.folder)
            # The compact form shows the gain: with zeros every model is as big as the dense one.
            form = COMPACT if COMPACT in result.report.models else MASKED
            names, roles = {DENSE: DENSE, form: stage.name}, PRUNED_ROLES
            parts.append(Part(stage.name, result, names, roles))
        method, *others = dict.fromkeys(stage.resolved.recipe.method for stage in self.stages)
        notes = [
            *first.task.notes,
            *(f"{stage.name}: {stage.folder.relative_to(self.folder)}" for stage in self.stages),
        ]
        notes += [f"recipe.yaml here is that of {method}; each run has its own"] if others else []
        # Latencies stay in each stage's own report.
        recipe = self.resolved.recipe
        combine_reports(self.folder, command="prune", recipe=recipe, parts=parts, notes=notes)


def run(recipes: Recipes, invocation: RunOptions) -> RunResult | Estimate | None:
    """Prune once for each method and sparsity and report; with several, compare them. `recipes`: one for each method,
    alike but for what belongs to the method. Raises KdcliError: see `run_command`."""
    made_by = recipes[0].recipe
    recipes = [as_trained(as_trained(each, made_by.model), made_by.teacher) for each in recipes]
    first, methods = recipes[0].recipe, [r.recipe.method for r in recipes]
    if first.model is None or first.task is None:
        raise UsageError(
            "prune needs a model and a task", "kdcli prune MODEL --task TASK --sparsity 0.9"
        )
    for each in recipes:
        check_settings(each.recipe.method, each.recipe.pruner)
    for what, given in (("method", methods), ("sparsity", [f"{s:g}" for s in first.sparsity])):
        if twice := [one for one in given if given.count(one) > 1]:
            raise UsageError(f"{what} {twice[0]} was given twice", "give each once")
    of_vectors = [
        key
        for each in recipes
        for key in each.origins
        if key.startswith(("embedding.", "loss.", "eval."))
    ]
    if of_vectors and first.task != EMBEDDING:
        raise UsageError(
            f"{of_vectors[0]} is for --task {EMBEDDING}, not for task {first.task}", "leave it out"
        )
    complete = [with_defaults(each) for each in recipes]
    invocation.check_pushed(len(stage_recipes(complete, Path())))
    prepare = prepare_embedding if first.task == EMBEDDING else _prepare
    return run_command(complete[0], invocation, partial(prepare, complete))


def _prepare(
    recipes: Recipes, first: Resolved[PruneRecipe], invocation: RunOptions, session: Session
) -> PruneRun:
    """Check models and data against each other and tokenise; claims nothing."""
    recipe = first.recipe
    folder = choose_output_dir(
        f"prune-{Path(str(recipe.model)).name}-{recipe.task}", first, invocation, session
    )
    beside = (
        {recipe.teacher: training_rows(location(recipe.teacher))}
        if recipe.teacher is not None
        else {}
    )
    task, headed = tasks.prepare(recipe, session, beside=beside)
    student = headed.tokenizer, str(recipe.model), recipe.head.label_map
    teacher = load_teacher(recipe.teacher, task, *student) if recipe.teacher is not None else None
    for head, each in {repr(each.recipe.head): each.recipe for each in recipes}.items():
        # Methods differ in their heads: one that cannot be made is an error before the first stage begins.
        if head != repr(recipe.head):
            task.load(each)
    shared = task, teacher, invocation.dry_run
    stages = [PruneStage(*own, *shared) for own in stage_recipes(recipes, folder)]
    for stage in stages:
        own = stage.resolved.recipe
        _, schedule = order_and_schedule(task, own)
        if isinstance(settings := check_settings(own.method, own.pruner), smp.Settings):
            settings.rising(schedule.steps)
    stages[0].headed = headed
    return PruneRun(first, invocation, folder, stages)


def stage_recipes(recipes: Recipes, folder: Path) -> list[tuple[str, Resolved[PruneRecipe], Path]]:
    """Name, recipe and directory of each stage: `METHOD/`, `sparsity-S/` or both where there are several of either. A
    method whose density cannot be chosen has one stage."""
    stages = []
    for resolved in recipes:
        recipe = resolved.recipe
        exact = defaults(recipe.method).exact and recipe.pruner.get("masking") != "threshold"
        several = exact and len(recipe.sparsity) > 1
        for sparsity in recipe.sparsity if exact else recipe.sparsity[:1]:
            own = Resolved(recipe.model_copy(update={"sparsity": [sparsity]}), resolved.origins)
            parts = [recipe.method] * (len(recipes) > 1) + [f"sparsity-{sparsity:g}"] * several
            name = [recipe.method] * (len(recipes) > 1) + [f"{100 * sparsity:g} %"] * (
                several or len(recipes) == 1
            )
            stages.append((" ".join(name), own, folder.joinpath(*parts)))
    return stages
