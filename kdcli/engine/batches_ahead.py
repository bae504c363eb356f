"""Batches of a run: on an accelerator built one step ahead, in a thread, while the device
computes."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import torch

from kdcli.types import Batch

Make = Callable[[int, int], list[Batch]]
"""Step, sequences of a micro-batch -> the step's micro-batches, on the CPU."""


@dataclass
class BatchesAhead:
    """A step's micro-batches by `make`, a pure function: what a step gets does not depend on what
    was built before. On an accelerator a thread, which ends with the context, builds those of the
    next step, up to step `last`, in pinned memory. On a CPU nothing is built ahead: it would take
    cores from the step."""

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
        """The micro-batches of a step; raises what `make` raises."""
        if self._thread is None:
            return self.make(step, micro)
        # All in the one thread: an order may keep its latest pass, and is not made for two at once.
        ready = self._ahead.pop((step, micro), None) or self._thread.submit(
            self._pinned, step, micro
        )
        found = ready.result()
        self._ahead = {}
        if step < self.last:
            self._ahead[step + 1, micro] = self._thread.submit(self._pinned, step + 1, micro)
        return found

    def _pinned(self, step: int, micro: int) -> list[Batch]:
        """Memory that the device copies from without waiting; MPS shares the CPU's."""
        batches = self.make(step, micro)
        if self.device.type == "mps":
            return batches
        return [{name: tensor.pin_memory() for name, tensor in batch.items()} for batch in batches]
