"""`kdcli distill`: students of a teacher, on text or, with `--task`, on a task; `--ablate` compares variants of it."""

from collections.abc import Mapping
from dataclasses import replace

from kdcli.engine.launch import choose_output_dir, claim, launch, track
from kdcli.engine.progress import Progress
from kdcli.errors import UsageError
from kdcli.recipe.resolve import Resolved
from kdcli.recipe.sections import RunOptions
from kdcli.report.combine import Part, combine_reports
from kdcli.report.finish import RunResult
from kdcli.report.schema import TEACHER, Role
from kdcli.run.dry_run import Estimate
from kdcli.run.stages import run_command, run_stages
from kdcli.verbs.distill.embedding import METHOD, check_embedding, prepare_embedding, with_method
from kdcli.verbs.distill.settings import DistillRecipe, TaskDistillRecipe
from kdcli.verbs.distill.stages import STUDENT, WITHOUT, TaskRun
from kdcli.verbs.distill.task import check_task, prepare_task, read_general
from kdcli.verbs.distill.text import prepare_text, read_text
from kdcli.workloads.as_trained import as_trained


def run(resolved: Resolved[DistillRecipe], invocation: RunOptions) -> RunResult | Estimate | None:
    """Distil on text, measure and report; returns and raises as `run_command`."""
    resolved = with_method(resolved)
    if resolved.recipe.method == METHOD:
        check_embedding(resolved.recipe)
        return run_command(resolved, invocation, prepare_embedding)
    read_text(resolved.recipe, invocation)
    return run_command(resolved, invocation, prepare_text)


def run_on_task(
    resolved: Resolved[TaskDistillRecipe], invocation: RunOptions
) -> RunResult | Estimate | None:
    """Distil on a task, measure and report; returns and raises as `run_command`."""
    resolved = as_trained(resolved, resolved.recipe.teacher)
    check_task(resolved.recipe)
    read_general(resolved.recipe, invocation)
    return run_command(resolved, invocation, prepare_task)


def run_variants(
    variants: Mapping[str, Resolved[TaskDistillRecipe]], invocation: RunOptions
) -> RunResult | None:
    """Distil on a task once for each variant, each in a directory of its own, and compare the students. Returns the
    report that compares them; None in a process that prints nothing."""
    variants = {
        name: as_trained(resolved, resolved.recipe.teacher) for name, resolved in variants.items()
    }
    first = next(iter(variants.values()))
    invocation.check_pushed(len(variants))
    if invocation.dry_run:
        raise UsageError(
            "--ablate and --dry-run do not go together",
            "estimate the recipe itself: leave --ablate out",
        )
    for name, resolved in variants.items():
        check_task(resolved.recipe)
        inside = invocation.output_dir / name if invocation.output_dir else None
        read_general(resolved.recipe, replace(invocation, output_dir=inside))
    session = launch(first.recipe.train.dtype, invocation)
    if session is None:
        return None
    folder = choose_output_dir(f"ablate-{first.recipe.task}", first, invocation, session)

    def prepared(name: str) -> TaskRun:
        inside = replace(invocation, output_dir=folder / name, resume=not invocation.overwrite)
        return prepare_task(variants[name], inside, session)

    run = prepared(next(iter(variants)))
    # Errors of later variants are found before the first one trains.
    for resolved in variants.values():
        replace(run, resolved=resolved).objective()
    claim(session, folder, first, invocation)
    track(session, folder)
    for number, name in enumerate(variants):
        Progress.log(f"variant {name}")
        run = prepared(name) if number else run
        claim(session, run.folder, run.resolved, run.invocation)
        run_stages(session, run)
    session.accelerator.end_training()
    if not session.is_main:
        return None
    # All variants share the teacher; the undistilled student too, up to its start.
    models = {name: {TEACHER: TEACHER, STUDENT: name, WITHOUT: WITHOUT} for name in variants}
    roles: dict[str, Role] = {TEACHER: "teacher", STUDENT: "student", WITHOUT: "undistilled"}
    parts = [
        Part(name, RunResult.read(folder / name), shown, roles) for name, shown in models.items()
    ]
    return combine_reports(
        folder,
        command="distill",
        recipe=first.recipe,
        parts=parts,
        notes=[f"{n}: {n}/" for n in variants],
    )
