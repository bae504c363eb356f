"""What every training verb does at its beginning: find the device, start the processes, take the output directory, turn
settings into a plan."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from accelerate.utils import broadcast_object_list

from kdcli.errors import ChildFailed, UsageError
from kdcli.recipe.sections import Invocation, TrainSettings
from kdcli.training.device import choose_device, choose_dtype
from kdcli.training.processes import fan_out, joined
from kdcli.training.progress import Progress
from kdcli.training.run_dir import RunDir, numbered
from kdcli.training.session import Session, start, track
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


RunT = TypeVar("RunT", bound=Prepared)
ResultT = TypeVar("ResultT")
EstimateT = TypeVar("EstimateT")


def run_command(
    resolved: Any,
    invocation: Invocation,
    *,
    prepare: Callable[[Any, Invocation, Session], RunT],
    probe: Callable[[RunT], EstimateT],
    run: Callable[[RunT], ResultT | None],
) -> ResultT | EstimateT | None:
    """What a training verb does, from its checked recipe on.

    Args:
        resolved: whose recipe has `train.dtype`.
        prepare: checks and loads all there is, and writes nothing.
        probe: estimates; a dry run ends with it.
        run: trains and reports there.

    Returns:
        Of `run`, or the estimate of a dry run; None in a process that has nothing to print.
    """
    session = launch(resolved.recipe.train.dtype, invocation)
    if session is None:
        return None
    prepared = prepare(resolved, invocation, session)
    if invocation.dry_run:
        return probe(prepared)
    claim(prepared, session)
    track(session, prepared.folder)
    result = run(prepared)
    session.wait()
    session.accelerator.end_training()
    return result if session.is_main else None


def choose_output_dir(name: str, resolved: Any, invocation: Invocation, session: Session) -> Path:
    """The output directory of a run, the same in all processes; nothing is touched.

    Args:
        name: of the directory below `runs/` where none was asked for.

    Raises:
        UsageError: see `RunDir.check`; a dry run may name any directory.
    """
    named = invocation.output_dir or numbered(name, taken=invocation.resume or invocation.overwrite)
    folder = Path(broadcast_object_list([named])[0])
    if not invocation.dry_run:
        how = {"resume": invocation.resume, "overwrite": invocation.overwrite}
        session.in_main(lambda: RunDir(folder).check(resolved.to_yaml(), **how))
    return folder


def claim(run: Prepared, session: Session) -> None:
    """Take the output directory, before any process goes on.

    Raises:
        KdcliError: see `RunDir.claim`.
    """
    how = {"resume": run.invocation.resume, "overwrite": run.invocation.overwrite}
    session.in_main(lambda: RunDir.claim(run.folder, run.resolved.to_yaml(), **how))


def claim_or_resume(session: Session, folder: Path, resolved: Any) -> bool:
    """Take the directory of a stage that lives inside a run's and goes on whenever that does.

    Returns:
        True when the stage was finished before, which is said.

    Raises:
        KdcliError: see `RunDir.claim`.
    """
    session.in_main(lambda: RunDir.claim(folder, resolved.to_yaml(), resume=True))
    return already_done(folder)


def already_done(folder: Path) -> bool:
    """True when the run of a directory wrote its report, which is said."""
    done = RunDir(folder).done
    if done:
        Progress.log(f"{folder} is done already")
    return done


def launch(dtype: str, invocation: Invocation) -> Session | None:
    """Where this process computes; None when the work was done by processes started here.

    Args:
        dtype: as `train.dtype`.

    Raises:
        UsageError, MachineError: device or number format cannot be had.
        ChildFailed: one of the processes failed and has said why.
    """
    device = choose_device(invocation.device)
    chosen = choose_dtype(dtype, device)
    count = invocation.processes or (torch.cuda.device_count() if invocation.device in ("auto", "cuda") else 1)
    if count > 1 and not joined() and not invocation.dry_run:
        code = fan_out(invocation.arguments, count, on_cpu=device.type == "cpu")
        if code:
            raise ChildFailed(code)
        return None
    accelerator = start(device, chosen, invocation.report_to)
    here = accelerator.device if accelerator.num_processes > 1 else device
    return Session(accelerator, here, invocation.trust_remote_code)


def make_schedule(settings: TrainSettings, steps_of_pass: float) -> Schedule:
    """The plan of a run.

    Args:
        steps_of_pass: optimiser steps of one pass over the data.

    Raises:
        UsageError: the warm-up leaves nothing of the run.
    """
    steps = settings.max_steps or max(1, math.ceil(settings.epochs * steps_of_pass))
    warmup = settings.warmup_steps if settings.warmup_steps is not None else int(settings.warmup_fraction * steps)
    if warmup >= steps:
        raise UsageError(
            f"train.warmup_steps {warmup} leaves nothing of {steps} steps",
            "lower it with --set train.warmup_steps=…, or train longer",
        )
    return Schedule(
        steps=steps,
        batch_size=settings.batch_size,
        lr=settings.lr,
        warmup_steps=warmup,
        weight_decay=settings.weight_decay,
        beta2=settings.beta2,
        clip=settings.clip,
        seed=settings.seed,
        micro_batch_size=settings.micro_batch_size,
        log_every=settings.log_every,
        eval_every=settings.eval_every,
        checkpoint_every=settings.checkpoint_every,
    )
