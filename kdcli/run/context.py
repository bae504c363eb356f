"""The context of a run: recipe, options, session and directory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic

import torch

from kdcli.deploy.latency import Protocol, measure_latency
from kdcli.engine.launch import choose_output_dir, launch
from kdcli.engine.pool import undisturbed
from kdcli.engine.run_dir import RunDir
from kdcli.engine.session import Session, start
from kdcli.errors import Interrupted
from kdcli.messages import log
from kdcli.recipe.resolve import RecipeT, RecipeT_co, Resolved, inherited
from kdcli.recipe.sections import MeasureSettings, RunOptions
from kdcli.report.finish import ReportContents, RunResult, write_report


@dataclass(frozen=True)
class RunContext(Generic[RecipeT_co]):
    """The recipe of a run, its options, its device and its directory.

    Attributes:
        resolved: The recipe, with the origin of every value.
        options: Options of the run that do not change its result.
        session: Device, precision and processes.
        folder: The run directory.
    """

    resolved: Resolved[RecipeT_co]
    options: RunOptions
    session: Session
    folder: Path

    @property
    def recipe(self) -> RecipeT_co:
        """The validated recipe."""
        return self.resolved.recipe

    @property
    def dry_run(self) -> bool:
        """Whether the run only estimates its cost and writes nothing."""
        return self.options.dry_run

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes and prints."""
        return self.session.is_main

    def inside(
        self, folder: Path, resolved: Resolved[RecipeT], *, overwrite: bool = False
    ) -> RunContext[RecipeT]:
        """Open a nested run inside this run. It resumes unless `overwrite` is set.

        Args:
            folder: The directory of the nested run.
            resolved: Its recipe.
            overwrite: Delete an existing run in the directory.

        Raises:
            UsageError: The directory contains a run with a different recipe.
        """
        options = replace(
            self.options, output_dir=folder, resume=not overwrite, overwrite=overwrite, arguments=()
        )
        run_dir = choose_output_dir("", resolved, options, self.session)
        return RunContext(resolved, options, self.session, run_dir)

    def report(
        self,
        contents: ReportContents,
        settings: MeasureSettings | None = None,
        folder: Path | None = None,
    ) -> RunResult:
        """Measure latency, then write the report and the model cards.

        Args:
            contents: The contents of the report. The first timed model is the baseline for
                speed-ups.
            settings: The recipe's `measure` section; None measures nothing.
            folder: The directory of a stage; None for the run directory.
        """
        timed = [model.timed for model in contents.models if model.timed is not None]
        if settings is not None and settings.latency and timed:
            log("measuring latency, which --set measure.latency=false skips")
            protocol = Protocol(
                device=str(self.session.device),
                min_runs=settings.min_runs,
                min_seconds=settings.min_seconds,
            )
            with undisturbed():
                contents.latency = measure_latency(timed, protocol)
            if contents.latency.interrupted and not self.session.judging:
                # A training that is resumed repeats the measurements. Other verbs report the rest.
                raise KeyboardInterrupt
        if folder in (None, self.folder):
            contents.command_line = self.options.command_line(contents.command)
        result = write_report(RunDir(folder or self.folder), contents)
        if contents.latency is not None and contents.latency.interrupted:
            raise Interrupted("interrupted", f"the report in {result.folder} lacks latencies")
        return result


def cpu_session() -> Session:
    """Create a float32 session on the CPU, outside any run."""
    cpu = torch.device("cpu")
    return Session(start(cpu, torch.float32), cpu)


def open_run(
    resolved: Resolved[RecipeT],
    options: RunOptions,
    name: str,
    *,
    dtype: str,
    evaluates: bool = False,
) -> RunContext[RecipeT] | None:
    """Start the processes of a run and choose its directory without writing to it.

    Args:
        resolved: The recipe.
        options: The options of the run.
        name: Name of the directory in `runs/`, unless the options give a directory.
        dtype: The compute dtype.
        evaluates: Whether the run only evaluates. Such a run computes scores in `dtype`. Other runs
            compute scores in float32.

    Returns:
        None in a process that only started the other processes.

    Raises:
        UsageError: The directory belongs to another run, or the device or number of processes
            cannot be used.
    """
    session = launch(dtype, options, judging=evaluates)
    if session is None:
        return None
    folder = choose_output_dir(name, resolved, options, session)
    log(*inherited(resolved))
    return RunContext(resolved, options, session, folder)
