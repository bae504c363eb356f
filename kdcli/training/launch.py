"""The start of every training verb: device, processes, output directory, schedule."""

import math
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate.utils import broadcast_object_list

from kdcli.errors import ChildFailed, UsageError
from kdcli.recipe.sections import Invocation, TrainSettings
from kdcli.training.device import choose_device, choose_dtype
from kdcli.training.processes import fan_out, is_main, joined
from kdcli.training.progress import Progress
from kdcli.training.run_dir import RunDir, numbered
from kdcli.training.session import Session, start
from kdcli.types import Schedule


class Prepared(Protocol):
    """A run that was checked and can begin."""

    @property
    def folder(self) -> Path:
        """Where its report will be."""

    @property
    def resolved(self) -> Any:
        """Its recipe, as it is written there."""

    @property
    def invocation(self) -> Invocation:
        """How it was asked for."""


def choose_output_dir(name: str, resolved: Any, invocation: Invocation, session: Session) -> Path:
    """The output directory, the same in all processes: `-o`, else `runs/NAME`. Touches nothing. Raises UsageError: see
    `RunDir.check`; a dry run may name any directory."""
    named = invocation.output_dir or numbered(name, taken=invocation.resume or invocation.overwrite)
    folder = Path(broadcast_object_list([named])[0])
    if not invocation.dry_run:
        how = {"resume": invocation.resume, "overwrite": invocation.overwrite}
        session.in_main(lambda: RunDir(folder).check(resolved.to_yaml(), **how))
    return folder


def claim(run: Prepared, session: Session) -> None:
    """Claim the output directory while all processes wait; see `RunDir.claim`."""
    how = {"resume": run.invocation.resume, "overwrite": run.invocation.overwrite}
    session.in_main(lambda: RunDir.claim(run.folder, run.resolved.to_yaml(), **how))


def claim_or_resume(session: Session, folder: Path, resolved: Any) -> bool:
    """Claim or resume a stage's directory inside a run; True, and a log line, if the stage is already done."""
    session.in_main(lambda: RunDir.claim(folder, resolved.to_yaml(), resume=True))
    return already_done(folder)


def already_done(folder: Path) -> bool:
    """Return True, and log it, if the directory's run has written its report."""
    done = RunDir(folder).done
    if done:
        Progress.log(f"{folder} is done already")
        if is_main():
            # A kill may have come between the report and this.
            RunDir(folder).drop_checkpoints()
    return done


def launch(dtype: str, invocation: Invocation) -> Session | None:
    """This process's session; None when processes started here have done the work. Raises UsageError, MachineError: no
    such device or dtype here; ChildFailed: a process failed and has printed why."""
    device = choose_device(invocation.device)
    chosen = choose_dtype(dtype, device)
    count = invocation.processes
    if count is None:
        count = torch.cuda.device_count() if invocation.device in ("auto", "cuda") else 1
    elif count < 1:
        raise UsageError(f"--processes must be at least 1, got {count}")
    if count > 1 and not joined() and not invocation.dry_run:
        code = fan_out(invocation.arguments, count, on_cpu=device.type == "cpu")
        if code:
            raise ChildFailed(code)
        return None
    accelerator = start(device, chosen, invocation.report_to)
    here = accelerator.device if accelerator.num_processes > 1 else device
    return Session(accelerator, here, invocation.trust_remote_code)


def make_schedule(settings: TrainSettings, steps_per_pass: float) -> Schedule:
    """The schedule of a run whose data take `steps_per_pass` optimiser steps a pass. Raises UsageError: the warm-up is
    as long as the run."""
    steps = settings.max_steps or max(1, math.ceil(settings.epochs * steps_per_pass))
    warmup = settings.warmup_steps if settings.warmup_steps is not None else int(settings.warmup_fraction * steps)
    if warmup >= steps:
        raise UsageError(
            f"train.warmup_steps {warmup} leaves nothing of {steps} steps",
            "lower it with --set train.warmup_steps=…, or train longer",
        )
    shared = {field.name for field in fields(Schedule)} - {"steps", "warmup_steps"}
    return Schedule(steps=steps, warmup_steps=warmup, **settings.model_dump(include=shared))
