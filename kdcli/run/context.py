"""The context of a run: recipe, options, session and directory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from kdcli.engine.launch import Session, choose_output_dir, launch, start
from kdcli.engine.run_dir import RunDir
from kdcli.recipe.resolve import Resolved
from kdcli.recipe.sections import MeasureSettings, RunOptions, Section
from kdcli.report.finish import ReportContents, RunResult, measure, write_report

RecipeT = TypeVar("RecipeT", bound=Section)


@dataclass(frozen=True)
class RunContext(Generic[RecipeT]):
    """A run: what was asked for, and where it computes and writes.

    Attributes:
        resolved: the recipe, with the origin of every value.
        options: where and how to run. Nothing in it changes the result.
        session: device, precision and processes.
        folder: the run directory.
    """

    resolved: Resolved[RecipeT]
    options: RunOptions
    session: Session
    folder: Path

    @property
    def recipe(self) -> RecipeT:
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

    @property
    def trust_remote_code(self) -> bool:
        """Whether code that comes with a model may run."""
        return self.session.trust_remote_code

    def inside(
        self, folder: Path, resolved: Resolved[Any], *, overwrite: bool = False
    ) -> RunContext[Any]:
        """Open a run of its own inside this one, which continues unless it is overwritten.

        Raises:
            UsageError: the directory holds a run with another recipe.
        """
        options = replace(
            self.options, output_dir=folder, resume=not overwrite, overwrite=overwrite
        )
        chosen = choose_output_dir("", resolved, options, self.session)
        return RunContext(resolved, options, self.session, chosen)

    def report(
        self,
        contents: ReportContents,
        settings: MeasureSettings | None = None,
        folder: Path | None = None,
    ) -> RunResult:
        """Measure the models that are to be timed, then write the report and the model cards.

        Args:
            contents: the first of the timed models is the baseline of the speed-ups.
            settings: how latency is measured; None measures nothing.
            folder: the directory of a stage; None for the run's own.
        """
        timed = [model.timed for model in contents.models if model.timed is not None]
        if settings is not None and timed:
            contents.latency = measure(timed, settings, self.session)
        return write_report(RunDir(folder or self.folder), contents)


def cpu_session(*, trust_remote_code: bool = False) -> Session:
    """Return a CPU session in float32 that belongs to no run."""
    cpu = torch.device("cpu")
    return Session(start(cpu, torch.float32), cpu, trust_remote_code)


def open_run(
    resolved: Resolved[RecipeT],
    options: RunOptions,
    name: str,
    *,
    dtype: str,
    evaluates: bool = False,
) -> RunContext[RecipeT] | None:
    """Start the processes of a run and choose its directory, which stays untouched.

    Args:
        name: of the directory below `runs/`, unless the options give another.
        dtype: the compute dtype.
        evaluates: the run only evaluates, so that scores are computed in `dtype`; verbs that train
            compute them in float32.

    Returns:
        None in the process that only started the others.

    Raises:
        UsageError: another run's directory; see `kdcli.engine.launch.launch`.
    """
    session = launch(dtype, options, judging=evaluates)
    if session is None:
        return None
    folder = choose_output_dir(name.replace(":", "_"), resolved, options, session)
    return RunContext(resolved, options, session, folder)
