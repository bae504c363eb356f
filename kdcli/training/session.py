"""The processes of a run, the device of each, and whether code that comes with a model may run."""

import atexit
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor

from kdcli.errors import ChildFailed, KdcliError, UsageError
from kdcli.training.processes import take_slurm


@dataclass(frozen=True)
class Session:
    """Where a run computes; made once, by `kdcli.training.launch`."""

    accelerator: Accelerator
    device: torch.device
    trust_remote_code: bool = False

    @property
    def is_main(self) -> bool:
        """True in the one process that writes and prints."""
        return bool(self.accelerator.is_main_process)

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of matrix products; trained weights stay float32."""
        return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.accelerator.mixed_precision, torch.float32)

    def wait(self) -> None:
        """Wait for all processes."""
        self.accelerator.wait_for_everyone()

    def in_main(self, action: Callable[[], object]) -> None:
        """Run `action` in the main process while the others wait. Raises KdcliError: raised by `action`; the other
        processes raise a silent `ChildFailed`."""
        error: KdcliError | None = None
        if self.is_main:
            try:
                action()
            except KdcliError as caught:
                error = caught
        (code,) = broadcast_object_list([error.exit_code if error else 0])
        if code:
            raise error or ChildFailed(code)

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


def start(device: torch.device, dtype: torch.dtype, report_to: str = "none") -> Accelerator:
    """Join the processes of a launcher (torchrun, SLURM, accelerate, kdcli), or start as the only one.

    Args:
        device: of a single process; each of several takes the device of its local rank.
        dtype: of the student's matrix products; weights and optimiser stay float32.
        report_to: `none`, or an installed tracker that accelerate knows.
    """
    precision = {torch.float32: "no", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    trackers = None if report_to == "none" else report_to
    take_slurm()
    try:
        with warnings.catch_warnings():
            # Otherwise every one of several CPU processes reports its number of threads.
            warnings.filterwarnings("ignore", message="OMP_NUM_THREADS")
            accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision=precision, log_with=trackers)
    except ValueError as error:
        if trackers is None:
            raise
        raise UsageError(f"--report-to {report_to}: {error}", f"pip install {report_to}") from None
    if trackers and not accelerator.log_with:
        raise UsageError(f"--report-to {report_to}: it is not installed", f"pip install {report_to}")
    if device.type == "cuda" and accelerator.num_processes == 1:
        torch.cuda.set_device(device)
    if device.type == "cpu":
        # A gloo group that outlives the interpreter aborts the process, also after an error.
        atexit.register(accelerator.state.destroy_process_group)
    return accelerator


def track(session: Session, folder: Path) -> None:
    """Start the tracker of `--report-to`; what it writes to disk goes to `logs/` of the run directory."""
    session.accelerator.project_configuration.logging_dir = str(folder / "logs")
    session.accelerator.init_trackers("kdcli")
