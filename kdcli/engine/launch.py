"""Start a training verb: choose its device, processes, directory and schedule."""

import math
import os
from dataclasses import fields
from pathlib import Path
from typing import Protocol

import torch
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import broadcast_object_list

from kdcli.disk import as_directory
from kdcli.engine.device import choose_device, choose_dtype
from kdcli.engine.fan_out import fan_out
from kdcli.engine.inputs import content_of_inputs
from kdcli.engine.processes import joined
from kdcli.engine.run_dir import (
    RunDir,
    flatten_recipe,
    numbered,
    run_to_continue,
    run_to_overwrite,
)
from kdcli.engine.session import Session, start
from kdcli.errors import ChildFailed, MachineError, UsageError, did_you_mean
from kdcli.messages import log
from kdcli.recipe.sections import RunOptions, TrainSettings
from kdcli.types import Schedule

ENGINES = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "tensor or context parallelism",
}
"""Environment variable of `accelerate launch` -> the engine that it selects."""


class SavedRecipe(Protocol):
    """A resolved recipe, as `recipe.yaml` holds it."""

    def to_yaml(self) -> str: ...


def launch(dtype: str, options: RunOptions, *, judging: bool = False) -> Session | None:
    """Open this process's session, or start one process per device.

    Args:
        dtype: `auto`, `fp32`, `bf16` or `fp16`.
        judging: See `Session`.

    Returns:
        None if this process started the others and they have finished.

    Raises:
        UsageError, MachineError: See `check_machine`.
        ChildFailed: A process that was started here failed and has printed why.
    """
    device, compute_dtype = check_machine(dtype, options)
    count = process_count(device, options)
    if count > 1 and not joined() and not options.dry_run:
        code = fan_out(options.arguments, count, on_cpu=device.type == "cpu")
        if code:
            raise ChildFailed(code)
        return None
    accelerator = start(device, compute_dtype, options.report_to)
    if accelerator.num_processes > 1:
        device = accelerator.device
    return Session(accelerator, device, judging)


MAX_PER_CORE = 4
"""The number of processes of a core beyond which memory would end before the work."""


def process_count(device: torch.device, options: RunOptions) -> int:
    """Return the number of processes: the given one, or one per accelerator.

    Raises:
        UsageError: Several processes would share one device.
        MachineError: There are fewer devices than processes.
    """
    count, names_one = options.processes, ":" in options.device
    if device.type == "cpu":
        cores = os.cpu_count() or 1
        if count is not None and count > MAX_PER_CORE * cores and not joined():
            raise MachineError(
                f"--processes {count}: number of cores here: {cores}",
                f"give at most {MAX_PER_CORE * cores}; more than {cores} are rarely faster",
            )
        return count or 1
    devices = torch.accelerator.device_count()
    if count is None:
        return 1 if names_one else devices
    if count > 1 and device.type == "mps":
        raise UsageError(
            f"--processes {count}: mps is one device", "omit --processes, or use --device cpu"
        )
    if count > 1 and names_one:
        raise UsageError(
            f"--processes {count}: --device {options.device} is one device",
            f"omit --processes, or give --device {device.type}",
        )
    if count > devices and not joined():
        raise MachineError(
            f"--processes {count}: number of {device.type} devices here: {devices}",
            f"give at most {devices}, since each process needs a device of its own",
        )
    return count


def check_machine(dtype: str, options: RunOptions) -> tuple[torch.device, torch.dtype]:
    """Choose the device and the dtype of a run.

    Raises:
        UsageError: The device, dtype or tracker is unknown, or the environment selects an engine
            that kdcli does not support.
        MachineError: This machine lacks the device or the dtype.
    """
    refuse_engines()
    check_tracker(options.report_to)
    device = choose_device(options.device)
    return device, choose_dtype(dtype, device)


def check_tracker(name: str) -> None:
    """Check the value of `--report-to`.

    Args:
        name: `none`, `all`, or a tracker of accelerate.

    Raises:
        UsageError: The tracker is unknown or not installed.
    """
    known = sorted(LOGGER_TYPE_TO_CLASS)
    installed = sorted(str(tracker) for tracker in get_available_trackers())
    available = f"installed: {', '.join(installed) or 'none'}"
    if name not in (*known, "none", "all"):
        raise UsageError(
            f"unknown tracker '{name}' (--report-to){did_you_mean(name, known)}",
            f"allowed: none, all, {', '.join(known)}; {available}",
        )
    if name == "all" and not installed:
        raise UsageError(
            "--report-to all: no tracker is installed", f"install one of {', '.join(known)}"
        )
    if name in known and name not in installed:
        raise UsageError(
            f"--report-to {name}: it is not installed",
            f"pip install {name.replace('_', '-')}; {available}",
        )


def track(session: Session, folder: Path) -> None:
    """Start the tracker of `--report-to`. Its files go to `logs/` in the run directory."""
    session.accelerator.project_configuration.logging_dir = str(folder / "logs")
    session.accelerator.init_trackers("kdcli")


def refuse_engines() -> None:
    """Raise a UsageError if the environment selects an engine that kdcli does not support."""
    for name, engine in ENGINES.items():
        if os.environ.get(name, "false").lower() in ("1", "true", "yes", "on"):
            raise UsageError(
                f"{name} asks for {engine}, but every process trains a whole student",
                "remove it from the accelerate configuration",
            )


def choose_output_dir(
    name: str, resolved: SavedRecipe, options: RunOptions, session: Session
) -> Path:
    """Return the output directory, the same in every process: `-o`, or else `runs/NAME`.

    The directory is not changed. A dry run may name any directory.

    Raises:
        UsageError: The processes have different recipes, or the directory cannot be claimed, see
            `RunDir.check`.
    """
    recipe = resolved.to_yaml()
    session.agree(flatten_recipe(recipe))
    resume, overwrite = options.resume, options.overwrite
    folder = Path(broadcast_object_list([output_dir(name, options, recipe)])[0])
    # A step of another run always resumes, and has no words of a command line.
    if resume and options.arguments and not RunDir(folder).is_run:
        log(f"{folder} holds no run to resume; a new run begins there")
    if not options.dry_run:
        session.on_main(
            lambda: RunDir(folder).check(
                recipe, resume=resume, overwrite=overwrite, written=options.written
            )
        )
    return folder


def output_dir(name: str, options: RunOptions, recipe_yaml: str) -> Path:
    """Return the output directory as this process sees it: `-o`, or else one in `runs/`.

    Args:
        name: The name of a new directory in `runs/`.
        options: The options of the run.
        recipe_yaml: The resolved recipe. `--resume` looks for a run that has it, and `--overwrite`
            for a run on the same data.
    """
    if options.output_dir is not None:
        return options.output_dir
    name = as_directory(name)
    if options.resume:
        return run_to_continue(name, recipe_yaml)
    if options.overwrite:
        return run_to_overwrite(name, recipe_yaml)
    return numbered(name, taken=False)


def claim(session: Session, folder: Path, resolved: SavedRecipe, options: RunOptions) -> None:
    """Claim the output directory in the main process, while all others wait.

    Raises:
        UsageError: The directory is not empty, holds a run with another recipe or with other
            content of its inputs, or is in use.
        MachineError: The directory cannot be written.
    """

    def claim_in_main() -> None:
        recipe, run = resolved.to_yaml(), RunDir(folder)
        content = content_of_inputs(recipe, folder)
        if options.resume and run.is_run:
            run.check_inputs(content)
        RunDir.claim(
            folder,
            recipe,
            resume=options.resume,
            overwrite=options.overwrite,
            written=options.written,
        )
        run.record_inputs(content)

    session.on_main(claim_in_main)


def claim_or_resume(session: Session, folder: Path, resolved: SavedRecipe) -> bool:
    """Claim or resume a stage's directory inside a run.

    Returns:
        True, after a log line, if the stage is already done.
    """
    recipe = resolved.to_yaml()
    session.on_main(lambda: RunDir.claim(folder, recipe, resume=True).path)
    return already_done(session, folder)


def already_done(session: Session, folder: Path) -> bool:
    """Return True, after a log line, if the directory's run has written its report."""
    done = session.on_main(lambda: RunDir(folder).done)
    if done:
        log(f"{folder} is done already")
        if session.is_main:
            # A run that was killed right after its report still has its checkpoints.
            RunDir(folder).drop_checkpoints()
    return done


def make_schedule(settings: TrainSettings, steps_per_pass: float) -> Schedule:
    """Make the schedule of a run.

    Args:
        steps_per_pass: Optimiser steps in one pass over the data.

    Raises:
        UsageError: The warm-up is as long as the run.
    """
    steps = settings.max_steps
    if steps is None:
        steps = max(1, math.ceil(settings.epochs * steps_per_pass))
    warmup = settings.warmup_steps
    if warmup is None or not steps:
        warmup = int(settings.warmup_fraction * steps)
    if warmup >= max(1, steps):
        raise UsageError(
            f"train.warmup_steps {warmup} must be less than the {steps} steps of the run",
            "set a lower value with --set train.warmup_steps=N, or train longer",
        )
    shared = {field.name for field in fields(Schedule)} - {"steps", "warmup_steps"}
    return Schedule(steps=steps, warmup_steps=warmup, **settings.model_dump(include=shared))
