"""The start of every training verb: session, device, processes, output directory, schedule."""

import atexit
import math
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import (
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    broadcast,
    broadcast_object_list,
    gather_object,
)
from torch import Tensor

from kdcli.engine.device import choose_device, choose_dtype
from kdcli.engine.peers import join
from kdcli.engine.processes import fan_out, joined
from kdcli.engine.progress import Progress
from kdcli.engine.run_dir import ABSENT, RunDir, leaves, numbered
from kdcli.errors import ChildFailed, KdcliError, MachineError, UsageError, did_you_mean
from kdcli.recipe.sections import RunOptions, TrainSettings
from kdcli.types import Schedule

T = TypeVar("T")
ENGINES = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "tensor or context parallelism",
}
ROUNDING = 1e-4
"""Relative difference up to which numbers count as the same: machines may differ in how they sum."""
MOST_SHOWN = 20


@dataclass(frozen=True)
class Session:
    """Where a run computes; made once, by `launch`."""

    accelerator: Accelerator
    device: torch.device
    trust_remote_code: bool = False
    judging: bool = (
        False  # In a verb that only judges, scores are computed in its dtype; elsewhere in float32
    )

    @property
    def is_main(self) -> bool:
        """True in the one process that writes and prints."""
        return bool(self.accelerator.is_main_process)

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of matrix products; trained weights stay float32."""
        return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(
            self.accelerator.mixed_precision, torch.float32
        )

    def wait(self) -> None:
        """Wait for all processes."""
        self.accelerator.wait_for_everyone()

    def in_main(self, action: Callable[[], T]) -> T:
        """What `action` returns in the main process, where alone it runs, in all of them. Raises KdcliError: raised by
        `action`; the other processes raise a silent `ChildFailed`."""
        error, value = None, None
        if self.is_main:
            try:
                value = action()
            except KdcliError as caught:
                error = caught
        code, value = broadcast_object_list([error.exit_code if error else 0, value])
        if code:
            raise error or ChildFailed(code)
        return cast(T, value)

    def from_main(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The main process's tensors in all processes, on the CPU; the others, which need not see its disk, give
        none."""
        if self.accelerator.num_processes == 1:
            return dict(tensors)
        (kinds,) = broadcast_object_list(
            [{name: (t.shape, t.dtype) for name, t in tensors.items()}]
        )
        mine = {
            name: tensors.get(name, torch.empty(shape, dtype=dtype))
            for name, (shape, dtype) in kinds.items()
        }
        return {name: broadcast(tensor.to(self.device)).cpu() for name, tensor in mine.items()}

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Check that all processes found the same; numbers may differ by rounding. Raises UsageError in all of them:
        some differ, with the name and both values."""
        if self.accelerator.num_processes == 1:
            return
        ranks: list[dict[str, Any]] = gather_object([dict(facts)])
        differing = []
        for name in dict.fromkeys(name for rank in ranks for name in rank):
            values = [rank.get(name, ABSENT) for rank in ranks]
            if all(_same(values[0], value) for value in values):
                continue
            other = next(rank for rank, value in enumerate(values) if not _same(values[0], value))
            differing.append(
                f"  {name}: {values[0]} in process 0, {values[other]} in process {other}"
            )
        if differing:
            more = (
                [f"  and {len(differing) - MOST_SHOWN} more"] if len(differing) > MOST_SHOWN else []
            )
            raise UsageError(
                "\n".join(["the processes of this run differ:", *differing[:MOST_SHOWN], *more]),
                "start all of them by the same command, on the same data and models",
            )

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """The sum of a tensor over all processes."""
        if self.accelerator.num_processes == 1:
            return values
        summed: Tensor = self.accelerator.reduce(values.to(self.device), "sum")
        return summed

    def any_rank(self, flag: bool) -> bool:
        """True in every process when the flag is up in any."""
        if self.accelerator.num_processes == 1:
            return flag
        return bool(self.sum_over_ranks(torch.tensor([float(flag)])).item())


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, float) and isinstance(other, float):
        return math.isclose(value, other, rel_tol=ROUNDING, abs_tol=ROUNDING)
    return bool(value == other)


def start(device: torch.device, dtype: torch.dtype, report_to: str = "none") -> Accelerator:
    """Join the processes of a launcher (torchrun, SLURM, accelerate, kdcli), or start as the only one.

    Args:
        device: of a single process; each of several takes the device of its local rank.
        dtype: of the student's matrix products; weights and optimiser stay float32.
        report_to: `none`, `all`, or an installed tracker, see `check_tracker`.
    """
    precision = {torch.float32: "no", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    # Some trackers need a directory here; `track` gives the real one.
    how: dict[str, Any] = {
        "log_with": None if report_to == "none" else report_to,
        "project_dir": tempfile.gettempdir(),
    }
    # The engine accumulates, whatever the environment says.
    how["gradient_accumulation_plugin"] = GradientAccumulationPlugin(num_steps=1)
    # One process may work for hours while the others wait; `kdcli.engine.peers` sees those that are gone.
    how["kwargs_handlers"] = [InitProcessGroupKwargs(timeout=timedelta(days=7))]
    others = join()
    with warnings.catch_warnings():
        # Otherwise every one of several CPU processes reports its number of threads.
        warnings.filterwarnings("ignore", message="OMP_NUM_THREADS")
        accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision=precision, **how)
    if others is not None and accelerator.num_processes == 1:
        raise MachineError(
            f"several processes cannot share {device.type} devices",
            "train in one process, or on CUDA",
        )
    if device.index and accelerator.num_processes == 1:
        torch.get_device_module(device).set_device(device)
    if device.type == "cpu":
        # A gloo group that outlives the interpreter aborts the process, also after an error.
        atexit.register(accelerator.state.destroy_process_group)
    return accelerator


def refuse_engines() -> None:
    """Raise a UsageError where the environment, such as `accelerate launch` sets it, asks for what is not done here."""
    for name, what in ENGINES.items():
        if os.environ.get(name, "false").lower() in ("1", "true", "yes", "on"):
            raise UsageError(
                f"{what} is asked for ({name}), but every process trains a whole student",
                "leave it out of the accelerate configuration",
            )


def check_tracker(name: str) -> None:
    """Check `--report-to`: `none`, `all`, or a tracker of accelerate. Raises UsageError: unknown, or not installed."""
    known, installed = (
        sorted(LOGGER_TYPE_TO_CLASS),
        sorted(str(one) for one in get_available_trackers()),
    )
    here = f"installed: {', '.join(installed) or 'none'}"
    if name not in (*known, "none", "all"):
        allowed = f"allowed: none, all, {', '.join(known)}; {here}"
        raise UsageError(
            f"unknown tracker '{name}' (--report-to){did_you_mean(name, known)}", allowed
        )
    if name == "all" and not installed:
        raise UsageError(
            "--report-to all: no tracker is installed", f"install one of {', '.join(known)}"
        )
    if name in known and name not in installed:
        raise UsageError(
            f"--report-to {name}: it is not installed",
            f"pip install {name.replace('_', '-')}; {here}",
        )


def track(session: Session, folder: Path) -> None:
    """Start the tracker of `--report-to`; what it writes to disk goes to `logs/` of the run directory."""
    session.accelerator.project_configuration.logging_dir = str(folder / "logs")
    session.accelerator.init_trackers("kdcli")


def choose_output_dir(name: str, resolved: Any, invocation: RunOptions, session: Session) -> Path:
    """The output directory, the same in all processes: `-o`, else `runs/NAME`. Touches nothing. Raises UsageError: see
    `RunDir.check`; a dry run may name any directory."""
    session.agree(leaves(resolved.to_yaml()))
    named = invocation.output_dir or numbered(name, taken=invocation.resume or invocation.overwrite)
    folder = Path(broadcast_object_list([named])[0])
    if not invocation.dry_run:
        how = {"resume": invocation.resume, "overwrite": invocation.overwrite}
        session.in_main(lambda: RunDir(folder).check(resolved.to_yaml(), **how))
    return folder


def claim(session: Session, folder: Path, resolved: Any, invocation: RunOptions) -> None:
    """Claim the output directory while all processes wait; see `RunDir.claim`."""
    how = {"resume": invocation.resume, "overwrite": invocation.overwrite}
    session.in_main(lambda: RunDir.claim(folder, resolved.to_yaml(), **how).path)


def claim_or_resume(session: Session, folder: Path, resolved: Any) -> bool:
    """Claim or resume a stage's directory inside a run; True, and a log line, if the stage is already done."""
    session.in_main(lambda: RunDir.claim(folder, resolved.to_yaml(), resume=True).path)
    return already_done(session, folder)


def already_done(session: Session, folder: Path) -> bool:
    """Return True, and log it, if the directory's run has written its report."""
    done = session.in_main(lambda: RunDir(folder).done)
    if done:
        Progress.log(f"{folder} is done already")
        if session.is_main:
            # A kill may have come between the report and this.
            RunDir(folder).drop_checkpoints()
    return done


def check_machine(dtype: str, invocation: RunOptions) -> tuple[torch.device, torch.dtype]:
    """The device and dtype of a run. Raises UsageError, MachineError: no such device, dtype or tracker here."""
    refuse_engines()
    check_tracker(invocation.report_to)
    device = choose_device(invocation.device)
    return device, choose_dtype(dtype, device)


def launch(dtype: str, invocation: RunOptions, *, judging: bool = False) -> Session | None:
    """This process's session; None when processes started here have done the work. `judging` as in
    `Session`. Raises UsageError, MachineError: no such device, dtype or tracker here; ChildFailed: a process failed and
    has printed why."""
    device, chosen = check_machine(dtype, invocation)
    count = invocation.processes
    if count is None:
        count = (
            1
            if ":" in invocation.device or device.type == "cpu"
            else torch.accelerator.device_count()
        )
    if count > 1 and device.type == "mps":
        raise UsageError(
            f"--processes {count}: mps is one device", "leave it out, or use --device cpu"
        )
    if count > 1 and not joined() and not invocation.dry_run:
        code = fan_out(invocation.arguments, count, on_cpu=device.type == "cpu")
        if code:
            raise ChildFailed(code)
        return None
    accelerator = start(device, chosen, invocation.report_to)
    here = accelerator.device if accelerator.num_processes > 1 else device
    return Session(accelerator, here, invocation.trust_remote_code, judging)


def make_schedule(settings: TrainSettings, steps_per_pass: float) -> Schedule:
    """The schedule of a run whose data take `steps_per_pass` optimiser steps a pass. Raises UsageError: the warm-up is
    as long as the run."""
    steps = settings.max_steps or max(1, math.ceil(settings.epochs * steps_per_pass))
    warmup = (
        settings.warmup_steps
        if settings.warmup_steps is not None
        else int(settings.warmup_fraction * steps)
    )
    if warmup >= steps:
        raise UsageError(
            f"train.warmup_steps {warmup} leaves nothing of {steps} steps",
            "lower it with --set train.warmup_steps=…, or train longer",
        )
    shared = {field.name for field in fields(Schedule)} - {"steps", "warmup_steps"}
    return Schedule(steps=steps, warmup_steps=warmup, **settings.model_dump(include=shared))
