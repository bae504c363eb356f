"""`kdcli compress`: make a smaller model that can be shipped.

The search reads from top to bottom in `_search`: the known candidates, untrained latencies, the
teacher, its exports, shapes by successive halving, and pruning. Each part is made by another verb,
scored next to the teacher on held-out rows, and the best one is verified and put into best/.
"""

import math
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from kdcli.data.labelled.kept import keep_rows
from kdcli.data.labelled.partition import VERIFICATION, Partition
from kdcli.disk import as_directory
from kdcli.engine.inputs import changed_inputs
from kdcli.engine.processes import joined
from kdcli.engine.run_dir import RunDir
from kdcli.errors import GateError, KdcliError, MachineError, UsageError
from kdcli.messages import facts_once, log, log_fact
from kdcli.models.embedding_format import check_computed
from kdcli.models.files import stored_weights
from kdcli.models.load import location
from kdcli.recipe.resolve import Resolved, inherited
from kdcli.recipe.sections import RunOptions
from kdcli.report.finish import RunResult
from kdcli.report.schema import Report
from kdcli.report.text import directory_word, duration, megabytes
from kdcli.report.titles import SELECTION
from kdcli.run.context import cpu_session
from kdcli.run.side_by_side import open_pool
from kdcli.run.stages import stoppable
from kdcli.types import Kind, task_title
from kdcli.verbs.compress.answer import ship
from kdcli.verbs.compress.divide import PARTITION, divide_rows
from kdcli.verbs.compress.halving import try_family, try_shapes
from kdcli.verbs.compress.limits import GoalSettings, conflict
from kdcli.verbs.compress.question import (
    choose_folder,
    compression_of,
    hashes_of_inputs,
)
from kdcli.verbs.compress.record import Record
from kdcli.verbs.compress.scored import TEACHER, deployed_bytes
from kdcli.verbs.compress.search import PRUNE, Search, check_backends, evaluation_request
from kdcli.verbs.compress.settings import BY_MODEL, CompressRecipe, detected
from kdcli.verbs.compress.shape_timings import (
    BudgetError,
    Untrained,
    budget_error,
    measure_untrained,
    too_slow,
)
from kdcli.verbs.compress.steps import PAGE, Step, Steps
from kdcli.verbs.compress.verb_steps import VERBS, Verbs, verb_steps
from kdcli.workloads import open_evaluation
from kdcli.workloads.decisions import KINDS
from kdcli.workloads.finetuning import describe_learning, describe_score
from kdcli.workloads.labelled import LabelledWorkload

NAME = "the fine-tuned teacher"
REMEDY = (
    "train it for more epochs, such as with --set plan.finetune.train.epochs=10, or with a larger "
    "learning rate, such as with --set plan.finetune.train.lr=1e-3 for a small model"
)


def run(resolved: Resolved[CompressRecipe], options: RunOptions, verbs: Verbs = VERBS) -> RunResult:
    """Compress a model and report.

    A finished run whose recipe differs in its goal alone answers from what it has tried, and trains
    only what is missing. The same command goes on in it if its report names a next candidate.

    Raises:
        GateError: No candidate meets the goal. The report and the nearest candidate are written.
        UsageError: The goal, the model or the data cannot be used. Nothing is written.
    """
    if joined():
        raise UsageError(
            "compress starts its own processes, and another launcher already started several",
            "start it once, with --processes N",
        )
    recipe = resolved.recipe
    data = directory_word(str(recipe.task), recipe.data.source)
    name = as_directory(f"compress-{Path(str(recipe.model)).name}-{data}")
    folder, earlier, is_answered = choose_folder(name, resolved, options)
    if earlier is not None and is_answered:
        log(f"{folder} is done already")
        with suppress(KdcliError):
            now, record = hashes_of_inputs(resolved, folder), Record.read(RunDir(folder))
            if changed := changed_inputs(now, record.inputs):
                log(
                    f"{changed} after this run began, so the answer may be outdated; start again "
                    "with --overwrite"
                )
        return checked(earlier)
    options = replace(options, resume=options.resume or earlier is not None)
    is_resumed = RunDir(folder).check(
        resolved.to_yaml(), resume=options.resume, overwrite=options.overwrite
    )
    if earlier is None:
        log(f"output directory: {folder}")
    if resolved.origins["task"] == BY_MODEL:
        log(f"{recipe.model}: {detected(str(recipe.task))}")
    log(*inherited(resolved))
    record = Record.read(RunDir(folder)) if is_resumed else Record()
    with stoppable(options, folder) as stop, ExitStack() as opened:
        budget = recipe.budget or math.inf
        steps = Steps(folder, options, budget, stop, record, verbs.clock)
        facts = opened.enter_context(facts_once())
        steps.pool = opened.enter_context(open_pool(options, stop, facts))
        if (pool := steps.pool) is not None:
            weights = weight_bytes(recipe)
            size = f" ({weights / 1e6:.0f} MB)" if weights else ""
            log(
                f"independent steps run side by side in {pool.size} processes with {pool.threads} "
                f"{'thread' if pool.threads == 1 else 'threads'} each; every process holds its own "
                f"copy of the teacher{size}"
            )
        with steps.stopping(), keep_rows():
            search = _search(resolved, steps, verbs)
            search.measure()
            return checked(ship(search))


def _search(resolved: Resolved[CompressRecipe], steps: Steps, verbs: Verbs) -> Search:
    """Check goal, model and data, claim the directory, and try candidates until one meets the goal.

    Raises:
        KdcliError: The goal, the model or the data cannot be used, or no candidate can be made.
    """
    recipe, record, read = resolved.recipe, steps.record, len(steps.record.lines)
    make = verb_steps(recipe, verbs)
    make.check_trainings()
    fits, has_labels, kind = check_model(resolved)
    partition, notes = divide_rows(recipe, steps)
    inputs = hashes_of_inputs(resolved, steps.folder)
    if changed := changed_inputs(inputs, record.inputs):
        raise UsageError(
            f"{changed} since the run in {steps.folder} began",
            "choose another directory with -o, or start again with --overwrite",
        )
    missing = check_backends(recipe, verbs)
    question = record.ask(recipe, inputs)
    search = Search(
        make=make,
        steps=steps,
        teacher=str(recipe.model),
        has_labels=has_labels,
        kind=kind,
        fits=fits,
        known=question.known,
        missing=missing,
        notes=notes,
    )
    check_cascade(search)
    log_fact(*notes)
    for backend, why in missing.items():
        search.skip(backend, why)

    def claim() -> None:
        if record.run is None:
            claim_folder(resolved, search, partition, read)

    steps.claim_run = claim
    if question.known and not recipe.steps and record.has_tried(recipe):
        use_partition(search, partition)
        if not fits:
            search.teacher = str(steps.path(finetuning(search)))
        if search.answers_from_earlier():
            log_teacher(search)
            steps.claim()
            return search
    untrained = None
    try:
        if not recipe.steps:
            untrained = measure_untrained(search, partition)
            search.fastest = untrained.fastest
            check_reachable(search, untrained)
        check_budget(search)
    except BudgetError:
        # A later run with a larger budget reuses the timings.
        if steps.has_measured:
            steps.claim()
        raise
    steps.claim()
    if not fits:
        search.teacher = str(steps.require(finetuning(search)))
    log_teacher(search)
    if untrained is None:
        search.follow_steps()
    else:
        follow_plan(search, untrained)
    return search


def check_cascade(search: Search) -> None:
    """Refuse `--cascade` for answers of which a model does not say how sure it is.

    Raises:
        UsageError: The model gives vectors, scores, answers to questions or texts.
    """
    reads, kinds = search.make.reads, ("class", "multi", "tokens")
    if search.goal.cascade and reads != "lists" and (reads == "text" or search.kind not in kinds):
        gives = "vectors" if reads == "text" else f"answers of kind {search.kind}"
        raise UsageError(
            "--cascade is for classes, several labels, labels of words and rerankers, and "
            f"{search.recipe.model} gives {gives}, which do not say how sure the model is",
            "remove --cascade",
        )


def finetuning(search: Search) -> Step:
    """Return the step that fine-tunes the model."""
    recipe = search.recipe
    return search.make.finetune(TEACHER, str(recipe.model), recipe.plan.finetune)


def claim_folder(
    resolved: Resolved[CompressRecipe], search: Search, partition: Partition, read: int
) -> None:
    """Claim the directory, and write the chosen rows and the record to it.

    Raises:
        UsageError: Another process uses the directory, or has written to the record since this one
            read it. `read` is the number of lines that were read.
    """
    steps = search.steps
    claimed = RunDir.claim(
        steps.folder,
        resolved.to_yaml(),
        resume=steps.options.resume,
        overwrite=steps.options.overwrite,
    )
    try:
        lines = Record.read(claimed).lines
    except MachineError:
        claimed.release()
        raise
    if len(lines) != read:
        claimed.release()
        raise UsageError(
            f"another kdcli process finished in {steps.folder} while this one was starting",
            "run the same command with --resume",
        )
    use_partition(search, partition)
    steps.record.claim(claimed, read)


def use_partition(search: Search, partition: Partition) -> None:
    """Let every step read the chosen rows.

    They are written first, unless the recipe names a file or an earlier process wrote one.
    """
    data, file = search.recipe.data, search.steps.folder / PARTITION
    if data.partition is None:
        if not file.is_file():
            partition.write(file)
        data = data.model_copy(update={"partition": str(file)})
        search.make.recipe = search.recipe.model_copy(update={"data": data})


def check_budget(search: Search) -> None:
    """Raise a BudgetError if the budget is too small for any candidate."""
    steps = search.steps
    if steps.budget == math.inf:
        return
    spent = steps.seconds
    if steps.left <= 0:
        why = f"timing the backends and the untrained shapes took {duration(spent)}"
        raise budget_error(search, why, 2 * spent)
    if search.fits:
        return
    step = finetuning(search)
    cost = search.cost(step)
    why = steps.why_not_begun(step, cost)
    if cost.error:
        raise UsageError(f"{TEACHER} failed: {why}")
    if why:
        why = f"fine-tuning comes first, and {why}"
        raise budget_error(search, why, spent + 2 * cost.seconds)


def check_reachable(search: Search, untrained: Untrained) -> None:
    """Refuse a goal for which nothing needs to be trained.

    Raises:
        UsageError: The model meets the goal as it is.
        GateError: No backend and no shape can.
    """
    goal, recipe = search.goal, search.recipe
    if not goal.is_bounded:
        return
    weights = weight_bytes(recipe)
    size = deployed_bytes(str(recipe.model), weights) / 1e6 if weights else 0.0
    ms = untrained.teacher.ms
    if search.fits and all(limit.is_met_by_model(ms, size) for limit in goal.limits):
        facts = [f"{ms:.2f} ms", f"{megabytes(size)} MB"]
        raise UsageError(
            f"{recipe.model} meets every limit already: {', '.join(facts[not ms :])}",
            "nothing was trained; ask for more",
        )
    models = untrained.shapes | untrained.backends
    missed = {
        name: goal.untrained_misses(times, best=True, is_shape=name in untrained.shapes)
        for name, times in models.items()
    }
    if all(missed.values()) and not prunes_further(recipe, untrained):
        closest = goal.closest(models)
        why = f"{closest} comes closest: {'; '.join(missed[closest].values())}"
        raise GateError(
            "no shape and no backend of the plan can meet the goal: "
            f"{conflict(list(missed.values())) or why}",
            "nothing was trained; loosen the goal, or name other shapes in plan.shapes",
        )


def prunes_further(recipe: CompressRecipe, untrained: Untrained) -> bool:
    """Return whether pruning keeps fewer weights than each shape, so that it may meet the goal.

    A shape with as few weights has fewer layers than a pruned model, so it is faster.
    """
    if recipe.plan.prune is None:
        return False
    sparsity = (PRUNE | recipe.plan.prune)["sparsity"]
    return bool(1 - np.max(sparsity) < untrained.smallest)


def weight_bytes(recipe: CompressRecipe) -> int:
    """Return the total size of the model's weight files, in bytes; 0 if none is found."""
    files = stored_weights(Path(location(str(recipe.model))))
    return sum(file.stat().st_size for file in files)


def follow_plan(search: Search, untrained: Untrained) -> None:
    """Try candidates from cheap to expensive until one meets the goal with confidence.

    Raises:
        MachineError: No candidate could be made.
    """
    # The larger model of a cascade may be slower than the goal.
    slow = {} if search.goal.cascade else slow_backends(search.goal, untrained)
    fast = search.without(search.backends, slow)
    # If the fastest model is wanted, shapes are scored as well as backends.
    is_bounded = search.goal.is_bounded
    export_teacher(search, fast, now=is_bounded or search.recipe.budget is not None)
    if is_bounded and search.score():
        search.notes.append("a backend alone meets the goal, so nothing smaller was trained")
    else:
        try_all = try_family if search.recipe.plan.family else try_shapes
        try_all(search, untrained.shapes)
        if search.scores is None:
            search.score()
        if not search.met:
            search.try_pruning()
    if search.scores is None:
        # The model closest to the goal is on a backend that is too slow or too large for it.
        export_teacher(search, list(slow), now=True)
        search.score()
    if search.scores is None:
        whys = "; ".join(f"{one.name}: {one.skipped}" for one in search.candidates.values())
        raise MachineError(f"no candidate could be made: {whys}")


def export_teacher(search: Search, backends: Sequence[str], *, now: bool) -> None:
    """Write the model itself for several backends, now or beside the next training."""

    def export(branch: Search, backend: str) -> None:
        branch.export(backend, branch.teacher, backend)

    def compute_outputs(branch: Search, split: str) -> None:
        branch.compute_outputs(TEACHER, branch.teacher, split)

    search.deferred += [partial(export, backend=backend) for backend in backends]
    search.deferred += [
        partial(compute_outputs, split=split) for split in (SELECTION, VERIFICATION)
    ]
    if now:
        search.side_by_side()


def slow_backends(goal: GoalSettings, untrained: Untrained) -> dict[str, str]:
    """Return the backends on which the model itself misses the goal, with the reasons.

    If every shape is too slow as well, no backend is returned, because the model closest to the
    goal may be on one of these backends.
    """
    if len(too_slow(goal, untrained.shapes)) == len(untrained.shapes):
        return {}
    return goal.untrained_whys(untrained.backends, best=True, is_shape=False)


def checked(result: RunResult) -> RunResult:
    """Return the result of a compression.

    Raises:
        GateError: It missed the goal.
    """
    compression = compression_of(result)
    if not compression.met:
        table = f"{result.folder / PAGE} lists all candidates."
        hint = " ".join(filter(None, [table, compression.advice]))
        # A report of an earlier version says it in its sentence.
        missed = compression.missed or compression.sentence
        raise GateError(f"goal missed: {missed}", hint, folder=result.folder)
    return result


def check_model(
    resolved: Resolved[CompressRecipe],
) -> tuple[bool, bool, Kind | None]:
    """Return whether the model can do the task as it is, whether the rows have labels, and the kind
    of the labels, which only labelled tasks have.
    """
    recipe = resolved.recipe
    check_computed(str(recipe.model))
    session = cpu_session()
    workload = open_evaluation(evaluation_request(recipe), session)
    misfit = workload.misfit(str(recipe.model))
    fits = misfit is None
    if workload.needs_reference and not fits:
        raise UsageError(
            f"the rows have no labels, and {recipe.model} is not fine-tuned for them",
            "give rows with labels, or a fine-tuned model",
        )
    if not fits and resolved.origins["task"] == BY_MODEL:
        raise UsageError(
            f"the labels of {recipe.data.source} do not fit the head of {recipe.model}: {misfit}",
            "add --set data.labels=teacher to ignore them, or "
            f"--task {recipe.task} to train a new head on them first",
        )
    kind = workload.kind if isinstance(workload, LabelledWorkload) else None
    if recipe.goal.max_class_drop is not None and kind not in KINDS:
        raise UsageError(
            f"--max-class-drop is for classes, and {task_title(workload.name)} has none",
            "use --max-drop",
        )
    return fits, not workload.needs_reference, kind


def log_teacher(search: Search) -> None:
    """Log the scores of a fine-tuned teacher and of the trivial answer, and keep them as notes."""
    if not search.fits:
        notes = teacher_notes(RunResult.read(Path(search.teacher)).report)
        log(*notes)
        search.notes += notes


def teacher_notes(report: Report) -> list[str]:
    """Return a note on each score of a fine-tuned teacher, and a warning if it learned little.

    A teacher that has learned nothing can be compressed without any loss.
    """
    scores = [describe_score(one, NAME, "selection rows") for one in report.evaluations]
    losses = [point.loss for point in report.curve if point.loss is not None]
    signs = describe_learning(report.evaluations, losses)
    if not signs:
        return scores
    return [*scores, f"{NAME} {signs}. Every candidate learns from it, so {REMEDY}"]
