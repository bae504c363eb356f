"""Peak memory of one call, and the errors that mean out of memory."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_of(call: Callable[[], Any], device: torch.device) -> int | None:
    """Bytes by which memory grew at most during a call: allocated on CUDA, resident on Linux; None elsewhere."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        return int(torch.cuda.max_memory_allocated(device) - before)
    try:
        RESET.write_text("5")
        before = _status("VmRSS")
    except OSError:
        call()
        return None
    call()
    return max(0, _status("VmHWM") - before)


def peak_so_far(device: torch.device) -> int:
    """Bytes that this process has held at most: allocated on CUDA, resident elsewhere."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated())
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource  # Windows has no such module.

    # Kilobytes on Linux, bytes on macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def is_out_of_memory(error: RuntimeError) -> bool:
    """True for PyTorch's out-of-memory errors of devices and of the CPU allocator."""
    text = str(error)
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in text or "not enough memory" in text


def _status(key: str) -> int:
    found = re.search(rf"{key}:\s+(\d+) kB", STATUS.read_text("utf-8"))
    if found is None:
        raise OSError(f"{STATUS} does not name {key}")
    return 1024 * int(found[1])
