"""Run a verb once for each variant of its recipe and each seed, and compare the runs.

The runs of a study train side by side, in one process per device. Each has a directory of its own,
with a report, so an interrupted study repeats no finished run, and the runs that were interrupted
continue from their checkpoints.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Generic, TypeVar

from kdcli.data.labelled.kept import keep_rows
from kdcli.disk import as_directory
from kdcli.engine.launch import already_done, claim, launch, track
from kdcli.engine.memory import release_memory
from kdcli.engine.pool import Pool
from kdcli.engine.processes import joined, stop_requests
from kdcli.errors import MachineError
from kdcli.kept import keep_results
from kdcli.messages import facts_once, log, warn
from kdcli.recipe.resolve import Resolved
from kdcli.recipe.sections import RunOptions
from kdcli.report.combine import combine_reports, mean_report
from kdcli.report.finish import RunResult
from kdcli.report.schema import Report
from kdcli.run.context import RunContext
from kdcli.run.dry_run import Estimate, StageEstimate
from kdcli.run.side_by_side import alone, open_pool
from kdcli.run.stages import Run, dry_run, run_command, run_stages
from kdcli.types import Card
from kdcli.workloads.settings import OnTask

RecipeT = TypeVar("RecipeT", bound=OnTask)
Names = Callable[[Report, str], Mapping[str, str]]
"""Returns the models of a run's report that are compared: their names there -> their names in the
comparison. Its arguments are the report and the name of the variant."""


@dataclass(frozen=True)
class Member(Generic[RecipeT]):
    """A run of a study. It must be possible to pickle.

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


Members = Sequence[Member[RecipeT]]


@dataclass(frozen=True)
class Study(Generic[RecipeT]):
    """A study whose runs have been checked against each other.

    Attributes:
        members: The runs.
        report: Writes the report of the study, in the main process.
        resolved: The recipe to store in its directory, if the check changed it.
        begins_alone: Whether the first run makes something that the others share.
    """

    members: Members[RecipeT]
    report: Callable[[], object]
    resolved: Resolved[RecipeT] | None = None
    begins_alone: bool = False


Check = Callable[[RunContext[RecipeT], Members[RecipeT]], Study[RecipeT]]
"""Checks the runs of a study before the first one trains, and writes nothing."""


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
    members: Members[RecipeT],
    resolved: Resolved[RecipeT],
    options: RunOptions,
    name: str,
    check: Check[RecipeT],
) -> RunResult | Estimate | None:
    """Run every member and compare them, or run the only one in the directory itself.

    The members run side by side if the options give several processes. If another launcher started
    several processes, these train every member together, one after another.

    Args:
        members: The runs.
        resolved: The recipe of the study.
        options: The options of the study.
        name: Name of the run directory, unless the options give a directory.
        check: Checks the runs against each other.

    Raises:
        UsageError: A variant cannot be used. Nothing is written.
    """
    if len(members) == 1:
        return run_command(members[0].resolved, options, name, members[0].prepare)
    with (
        stop_requests(at_once=True) as stop,
        TemporaryDirectory(prefix="kdcli-study-") as folder,
        keep_rows(),
        # The runs of one seed begin with the same students.
        keep_results(Path(folder)),
        facts_once() as facts,
        nullcontext() if joined() else open_pool(options, stop, facts) as pool,
    ):
        own = options if joined() else replace(options, processes=1)
        return run_command(resolved, own, name, partial(_prepare, members, check, pool))


def _prepare(
    members: Members[RecipeT],
    check: Check[RecipeT],
    pool: Pool | None,
    context: RunContext[RecipeT],
) -> Run:
    study = check(context, members)
    release_memory()
    return Run(
        [],
        partial(_train, study, pool, context),
        study.resolved,
        partial(_estimate, study.members, context),
    )


def _inside(context: RunContext[RecipeT], member: Member[RecipeT]) -> RunContext[RecipeT]:
    place = context.folder / member.folder
    return context.inside(place, member.resolved, overwrite=context.options.overwrite)


def first_of_each(members: Members[RecipeT]) -> list[Member[RecipeT]]:
    """Return the first run of each variant."""
    return list({member.variant: member for member in reversed(members)}.values())[::-1]


def _estimate(members: Members[RecipeT], context: RunContext[RecipeT]) -> Estimate:
    """Estimate the first run of each variant, and count its time for every seed."""
    cards, stages = dict[str, Card](), list[StageEstimate]()
    for first in first_of_each(members):
        one = dry_run(context.session, first.prepare(_inside(context, first)))
        release_memory()
        cards |= one.cards
        seeds = sum(member.variant == first.variant for member in members)
        more = f" and {seeds - 1} more seeds" if seeds > 1 else ""
        stages += [
            replace(stage, folder=stage.folder + more, seconds=seeds * stage.seconds)
            for stage in one.stages
        ]
    return Estimate(cards, stages)


def _train(study: Study[RecipeT], pool: Pool | None, context: RunContext[RecipeT]) -> None:
    """Train every member that is not finished, then report on all.

    Raises:
        MachineError: The process of a member was killed again and again. The others have finished.
    """
    failures = list[MachineError]()

    def train(number: int, member: Member[RecipeT]) -> None:
        title = f"run {number} of {len(study.members)}: {member.folder}"
        if pool is None:
            _train_member(title, member, context)
            return
        options = replace(context.options, resume=True, overwrite=False, arguments=())
        call = partial(_train_alone, title, member, context.folder)
        try:
            pool.call(str(member.folder), call, options)
        except MachineError as failure:
            failures.append(failure)

    calls = [partial(train, *numbered) for numbered in enumerate(study.members, 1)]
    for together in [calls[:1], calls[1:]] if study.begins_alone else [calls]:
        if pool is not None:
            pool.side_by_side(together)
            continue
        for call in together:
            call()
    if failures:
        raise failures[0]
    if context.is_main:
        study.report()


def _train_alone(title: str, member: Member[RecipeT], folder: Path, options: RunOptions) -> None:
    """Train a member of the study in `folder`, in a process of a pool."""
    place = folder / member.folder
    with alone(place):
        session = launch(member.resolved.recipe.train.dtype, options)
        assert session is not None, "a process of a pool starts no others"
        track(session, place)
        _train_member(title, member, RunContext(member.resolved, options, session, folder))
        session.accelerator.end_training()


def _train_member(title: str, member: Member[RecipeT], context: RunContext[RecipeT]) -> None:
    """Train a member unless it is finished. `claim` emptied the directory for `--overwrite`."""
    log(title)
    session, place = context.session, context.folder / member.folder
    if already_done(session, place):
        return
    own = context.inside(place, member.resolved)
    run = member.prepare(own)
    claim(session, place, run.resolved or own.resolved, own.options)
    run_stages(own, run)
    release_memory()


def compare(
    names: Names, context: RunContext[RecipeT], members: Members[RecipeT]
) -> Study[RecipeT]:
    """Check every variant, as the first run of each loads it again, and compare their models."""
    members = without_repeated(members)
    variants = first_of_each(members)
    # A dry run prepares the variants anyway.
    for member in [] if context.dry_run else variants:
        member.prepare(_inside(context, member))
        release_memory()
    return Study(members, partial(report_on_all, names, context, members))


def without_repeated(members: Members[RecipeT]) -> list[Member[RecipeT]]:
    """Drop variants whose training is an earlier variant's, and log them.

    Two numbers of epochs with --max-steps are an example.
    """
    known, kept = dict[str, str](), set[str]()
    for member in first_of_each(members):
        recipe = member.resolved.recipe
        if recipe.train.max_steps is not None:
            train = recipe.train.model_copy(update={"epochs": 0.0})
            recipe = recipe.model_copy(update={"train": train})
        same = known.setdefault(recipe.model_dump_json(), member.variant)
        if same == member.variant:
            kept.add(same)
        else:
            warn(f"{member.variant} is the same training as {same}, which trains once for both")
    return [member for member in members if member.variant in kept]


def report_on_all(
    names: Names, context: RunContext[RecipeT], members: Members[RecipeT]
) -> RunResult:
    """Write a report that compares the models of all variants, with means over the seeds."""
    reports, notes = dict[str, list[Report]](), list[list[str]]()
    for member in members:
        report = RunResult.read(context.folder / member.folder).report
        notes.append(report.notes)
        renamed = report.renamed(mapping := names(report, member.variant))
        # A pruning names the masked form of its model, and the comparison may show another.
        *_, last = mapping.values()
        pruning = renamed.pruning or [p.model_copy(update={"model": last}) for p in report.pruning]
        renamed = renamed.model_copy(update={"pruning": pruning})
        reports.setdefault(member.variant, []).append(renamed)
    several = any(len(of_seeds) > 1 and of_seeds[0].pruning for of_seeds in reports.values())
    of_first_seed = ["the weights kept are those of the first seed"] if several else []
    return combine_reports(
        context.folder,
        command=context.recipe.model_dump()["verb"],
        recipe=context.recipe,
        reports={name: mean_report(of_seeds) for name, of_seeds in reports.items()},
        notes=[
            *(f"{member.variant or 'seeds'}: {member.folder}/" for member in members),
            *(
                f"in each of these directories: {note}"
                for note in notes[0]
                if all(note in others for others in notes)
            ),
            *of_first_seed,
        ],
    )
