"""The session of a run: its device, its precision, and the communication of its processes."""

from __future__ import annotations

import atexit
import contextlib
import math
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import (
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    broadcast,
    broadcast_object_list,
    gather_object,
)
from torch import Tensor

from kdcli.engine.peers import join
from kdcli.errors import ChildFailed, KdcliError, MachineError, UsageError

T = TypeVar("T")
Fact = str | int | float
MIXED_PRECISION = {torch.float32: "no", torch.bfloat16: "bf16", torch.float16: "fp16"}
COLLECTIVE_TIMEOUT = timedelta(days=7)
"""The timeout is long, because one process may work for hours while the others wait for it in a
collective. `kdcli.engine.peers` notices processes that have ended."""
ROUNDING = 1e-4
"""Relative difference up to which numbers count as equal. Machines may add in another order."""
MAX_DIFFERENCES = 20
"""Maximum number of differences between processes that an error lists."""


@dataclass(frozen=True)
class Session:
    """The device, the precision and the processes of a run.

    Attributes:
        accelerator: Handles precision, optimiser and trackers.
        device: The device of this process.
        judging: Whether the verb only evaluates. Scores are then computed in the session's dtype;
            verbs that train compute them in float32.
        alone: Whether this process computes without the others, which wait or go on.
    """

    accelerator: Accelerator
    device: torch.device
    judging: bool = False
    alone: bool = False

    @property
    def processes(self) -> int:
        """The number of processes that share the work."""
        return 1 if self.alone else int(self.accelerator.num_processes)

    @property
    def rank(self) -> int:
        """The number of this process among those that share the work."""
        return 0 if self.alone else int(self.accelerator.process_index)

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes and prints."""
        return bool(self.accelerator.is_main_process)

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of matrix products. Trained weights stay in float32."""
        names = {name: dtype for dtype, name in MIXED_PRECISION.items()}
        return names.get(self.accelerator.mixed_precision, torch.float32)

    def wait(self) -> None:
        """Wait for all processes."""
        self.accelerator.wait_for_everyone()

    def on_main(self, action: Callable[[], T]) -> T:
        """Call a function in the main process only, and return its result in every process.

        Raises:
            KdcliError: The function raised it. The other processes raise a silent `ChildFailed`.
        """
        if self.processes == 1:
            return action()
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

    def broadcast(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Send the main process's tensors to the CPU of every process.

        Tensors of the other processes are ignored, because they may not have access to the main
        process's disk.
        """
        if self.processes == 1:
            return dict(tensors)
        layouts = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        (layouts,) = broadcast_object_list([layouts])
        received = {}
        for name, (shape, dtype) in layouts.items():
            tensor = tensors[name] if self.is_main else torch.empty(shape, dtype=dtype)
            received[name] = broadcast(tensor.to(self.device)).cpu()
        return received

    def gather(self, value: T) -> list[T]:
        """Return the values of all processes, in every process."""
        if self.processes == 1:
            return [value]
        return cast(list[T], gather_object([value]))

    def agree(self, facts: Mapping[str, Fact]) -> None:
        """Check that all processes have the same facts. Floats may differ by rounding.

        Raises:
            UsageError: Some facts differ; the message names each one with both values. It is
                raised in every process.
        """
        if self.processes == 1:
            return
        ranks = self.gather(dict(facts))
        differences = []
        for name in dict.fromkeys(name for rank in ranks for name in rank):
            values = [rank.get(name, "not set") for rank in ranks]
            others = [rank for rank, value in enumerate(values) if not _same(values[0], value)]
            if others:
                in_other = f"{values[others[0]]} in process {others[0]}"
                differences.append(f"  {name}: {values[0]} in process 0, {in_other}")
        if differences:
            listed = differences[:MAX_DIFFERENCES]
            if len(differences) > MAX_DIFFERENCES:
                listed.append(f"  and {len(differences) - MAX_DIFFERENCES} more")
            raise UsageError(
                "\n".join(["the processes of this run differ:", *listed]),
                "start all of them with the same command, on the same data and models",
            )

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Return the sum of a tensor over all processes."""
        if self.processes == 1:
            return values
        summed: Tensor = self.accelerator.reduce(values.to(self.device), "sum")
        return summed

    def any_rank(self, flag: bool) -> bool:
        """Return True in every process if the flag is True in any of them."""
        if self.processes == 1:
            return flag
        return bool(self.sum_over_ranks(torch.tensor([float(flag)])).item())


def _same(value: Fact, other: Fact) -> bool:
    if isinstance(value, float) and isinstance(other, float):
        return math.isclose(value, other, rel_tol=ROUNDING, abs_tol=ROUNDING)
    return value == other


@contextlib.contextmanager
def own_state() -> Iterator[None]:
    """Give a verb its own accelerate state and random numbers, and restore the caller's at the end.

    All accelerators of a process share their device and precision. Python may call several verbs,
    and train with an `Accelerator` or a `Trainer` of its own before and after them.
    """
    shared = [kind._shared_state for kind in (PartialState, AcceleratorState, GradientState)]
    before = [dict(state) for state in shared]
    for state in shared:
        state.clear()
    has_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = range(torch.cuda.device_count()) if has_cuda else ()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        for state, values in zip(shared, before, strict=True):
            state.clear()
            state.update(values)


def start(device: torch.device, dtype: torch.dtype, report_to: str = "none") -> Accelerator:
    """Join the processes of a launcher (torchrun, srun, accelerate, kdcli), if there are any.

    Args:
        device: The device of a single process. Each of several processes uses the device of its
            local rank.
        dtype: The dtype of matrix products; weights and optimiser stay in float32.
        report_to: `none`, `all`, or an installed tracker of accelerate.

    Raises:
        MachineError: Several processes cannot share the device, or a process does not join.
    """
    peers = join()
    with warnings.catch_warnings():
        # Without this, each of several CPU processes warns about its number of threads.
        warnings.filterwarnings("ignore", message="OMP_NUM_THREADS")
        accelerator = Accelerator(
            cpu=device.type == "cpu",
            mixed_precision=MIXED_PRECISION[dtype],
            log_with=None if report_to == "none" else report_to,
            # Some trackers need a directory here; `track` sets the real one.
            project_dir=tempfile.gettempdir(),
            # The engine accumulates gradients itself, whatever the environment asks for.
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
            kwargs_handlers=[InitProcessGroupKwargs(timeout=COLLECTIVE_TIMEOUT)],
        )
    if peers is not None and accelerator.num_processes == 1:
        raise MachineError(
            f"several processes cannot share {device.type} devices",
            "train in one process, or on CUDA",
        )
    if device.index and accelerator.num_processes == 1:
        torch.get_device_module(device).set_device(device)
    if device.type == "cpu":
        # A gloo group that outlives the interpreter aborts the process, even after an error.
        atexit.register(accelerator.state.destroy_process_group)
    return accelerator
