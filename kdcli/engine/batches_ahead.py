"""Build the batches of a run one step ahead, in a thread, while the accelerator computes."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import torch

from kdcli.types import Batch

Make = Callable[[int, int], list[Batch]]
"""Returns the micro-batches of a step, on the CPU, for the step and the micro-batch's size."""


@dataclass
class BatchesAhead:
    """Build the micro-batches of each step.

    On an accelerator, a thread builds the next step's micro-batches in pinned memory. The thread
    ends with the context. On a CPU nothing is built ahead, because it would take cores from the
    step.

    Attributes:
        make: Builds the micro-batches. It must be a pure function, so that a step's batches do not
            depend on what was built before.
        device: The device of the run.
        last: The last step.
    """

    make: Make
    device: torch.device
    last: int
    _thread: ThreadPoolExecutor | None = None
    _ahead: dict[tuple[int, int], "Future[list[Batch]]"] = field(default_factory=dict)

    def __enter__(self) -> Self:
        if self.device.type != "cpu":
            self._thread = ThreadPoolExecutor(1, "batches")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def of(self, step: int, micro: int) -> list[Batch]:
        """Return the micro-batches of a step. Raises whatever `make` raises."""
        if self._thread is None:
            return self.make(step, micro)
        # Use this one thread for all batches: an order may cache its latest pass, and is not
        # thread-safe.
        future = self._ahead.pop((step, micro), None) or self._thread.submit(
            self._pinned, step, micro
        )
        batches = future.result()
        self._ahead = {}
        if step < self.last:
            self._ahead[step + 1, micro] = self._thread.submit(self._pinned, step + 1, micro)
        return batches

    def _pinned(self, step: int, micro: int) -> list[Batch]:
        """Build batches in pinned memory, which the device can copy without waiting."""
        batches = self.make(step, micro)
        if self.device.type == "mps":  # It shares the CPU's memory.
            return batches
        return [{name: tensor.pin_memory() for name, tensor in batch.items()} for batch in batches]
