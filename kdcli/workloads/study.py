"""Run a verb once for each variant of its recipe and each seed, and compare the variants.

Every run has a directory of its own, with a report, so an interrupted study repeats no finished
run, and the run that was interrupted continues from its checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from kdcli.disk import as_directory
from kdcli.engine.launch import already_done, claim
from kdcli.engine.memory import release_memory
from kdcli.engine.progress import Progress
from kdcli.errors import UsageError
from kdcli.recipe.resolve import Resolved
from kdcli.recipe.sections import RunOptions
from kdcli.report.combine import combine_reports, mean_report
from kdcli.report.finish import RunResult
from kdcli.report.schema import Report
from kdcli.run.context import RunContext
from kdcli.run.dry_run import Estimate
from kdcli.run.stages import Run, run_command, run_stages
from kdcli.workloads.settings import OnTask

RecipeT = TypeVar("RecipeT", bound=OnTask)
Names = Callable[[Report, str], Mapping[str, str]]
"""Returns the models of a run's report that are compared: their names there -> their names in the
comparison. Its arguments are the report and the name of the variant."""


@dataclass(frozen=True)
class Member(Generic[RecipeT]):
    """A run of a study.

    Attributes:
        variant: The name of its variant. Runs of one variant differ in their seeds only.
        folder: Its directory, relative to the study's.
        resolved: The recipe that repeats this run alone.
        prepare: Checks and loads everything that the run needs, and writes nothing.
    """

    variant: str
    folder: Path
    resolved: Resolved[RecipeT]
    prepare: Callable[[RunContext[RecipeT]], Run]


def with_seed(resolved: Resolved[RecipeT], seed: int) -> Resolved[RecipeT]:
    """Return the recipe of one run: with this seed, and without variants."""
    train = resolved.recipe.train.model_copy(update={"seed": seed})
    changes = {"train": train, "seeds": 1, "ablate": None}
    origins = {k: o for k, o in resolved.origins.items() if k not in ("seeds", "ablate")}
    return Resolved(resolved.recipe.model_copy(update=changes), origins)


def seeds_of(resolved: Resolved[OnTask], seeds: int, variant: str) -> list[tuple[int, Path]]:
    """Return the seeds of a variant, each with the directory of its run."""
    first, folder = resolved.recipe.train.seed, Path(as_directory(variant) if variant else "")
    several = seeds > 1
    return [(n, folder / f"seed-{n}" if several else folder) for n in range(first, first + seeds)]


def run_study(
    members: Sequence[Member[RecipeT]],
    resolved: Resolved[RecipeT],
    options: RunOptions,
    name: str,
    names: Names,
) -> RunResult | Estimate | None:
    """Run every member in turn and compare them, or run the only one in the directory itself.

    Args:
        members: The runs.
        resolved: The recipe of the study.
        options: The options of the study.
        name: Name of the run directory, unless the options give a directory.
        names: Names the models in the comparison.

    Raises:
        UsageError: A variant cannot be used. Nothing is written.
    """
    if len(members) == 1:
        return run_command(members[0].resolved, options, name, members[0].prepare)
    options.check_pushed(len(members))
    if options.dry_run:
        variants = len({member.variant for member in members})
        option = "--ablate" if variants > 1 else "--seeds"
        raise UsageError(
            f"{option} and --dry-run contradict each other",
            f"omit {option} to estimate one of the {len(members)} runs",
        )
    return run_command(resolved, options, name, partial(_prepare, members, names))


def _prepare(members: Sequence[Member[RecipeT]], names: Names, context: RunContext[RecipeT]) -> Run:
    """Check every variant before the first one trains. Training loads data and models again."""
    first_of_variant = {member.variant: member for member in reversed(members)}
    _name_equal_variants(reversed(first_of_variant.values()))
    for member in reversed(first_of_variant.values()):
        member.prepare(_inside(context, member))
    release_memory()
    return Run([], partial(_train, members, names, context))


def _name_equal_variants(members: Iterable[Member[RecipeT]]) -> None:
    """Log variants whose trainings are equal, such as two numbers of epochs with --max-steps."""
    known: dict[str, str] = {}
    for member in members:
        recipe = member.resolved.recipe
        if recipe.train.max_steps is not None:
            train = recipe.train.model_copy(update={"epochs": 0.0})
            recipe = recipe.model_copy(update={"train": train})
        same = known.setdefault(recipe.model_dump_json(), member.variant)
        if same != member.variant:
            Progress.warn(f"the variants {same} and {member.variant} give the same training")


def _inside(context: RunContext[RecipeT], member: Member[RecipeT]) -> RunContext[RecipeT]:
    place = context.folder / member.folder
    return context.inside(place, member.resolved, overwrite=context.options.overwrite)


def _train(members: Sequence[Member[RecipeT]], names: Names, context: RunContext[RecipeT]) -> None:
    """Train every member that is not finished, then report on all."""
    session, reports = context.session, dict[str, list[Report]]()
    for number, member in enumerate(members, 1):
        place = context.folder / member.folder
        Progress.log(f"run {number} of {len(members)}: {member.folder}")
        if not already_done(session, place):
            own = _inside(context, member)
            run = member.prepare(own)
            claim(session, place, run.resolved or own.resolved, own.options)
            run_stages(own, run)
            release_memory()
        if session.is_main:
            report = RunResult.read(place).report
            renamed = report.renamed(mapping := names(report, member.variant))
            # A pruning names the masked form of its model, and the comparison may show another.
            *_, last = mapping.values()
            pruning = renamed.pruning or [
                p.model_copy(update={"model": last}) for p in report.pruning
            ]
            renamed = renamed.model_copy(update={"pruning": pruning})
            reports.setdefault(member.variant, []).append(renamed)
    if session.is_main:
        combine_reports(
            context.folder,
            command=context.recipe.model_dump()["verb"],
            recipe=context.recipe,
            reports={name: mean_report(of_seeds) for name, of_seeds in reports.items()},
            notes=[f"{member.variant or 'seeds'}: {member.folder}/" for member in members],
        )
