"""Peak memory of one call, and the errors that mean out of memory."""

import ctypes
import gc
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_of(call: Callable[[], Any], device: torch.device) -> int | None:
    """Bytes by which memory grew at most during a call: allocated where the device counts them,
    resident on Linux; None elsewhere."""
    if (counter := _counter(device)) is not None:
        counter.reset_peak_memory_stats(device)
        before = counter.memory_allocated(device)
        call()
        return int(counter.max_memory_allocated(device) - before)
    try:
        RESET.write_text("5")
        before = _status("VmRSS")
    except OSError:
        call()
        return None
    call()
    return max(0, _status("VmHWM") - before)


def peak_so_far(device: torch.device) -> int:
    """Bytes that this process has held at most: allocated where the device counts them, resident
    elsewhere."""
    if (counter := _counter(device)) is not None:
        return int(counter.max_memory_allocated(device))
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource  # Windows has no such module.

    # Kilobytes on Linux, bytes on macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def begin_peak(device: torch.device) -> None:
    """Begin anew what `peak_so_far` tells, where the device counts it."""
    if (counter := _counter(device)) is not None:
        counter.reset_peak_memory_stats(device)


def free_cached(device: torch.device) -> None:
    """Give unused memory back to the device."""
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


def _counter(device: torch.device) -> Any:
    """The module that counts a device's memory; None on a CPU and on MPS, where it is the process's
    own."""
    # Not torch.accelerator: its functions are missing before PyTorch 2.9 and fail an assertion on
    # MPS before 2.14.
    return torch.get_device_module(device) if device.type not in ("cpu", "mps") else None


def is_out_of_memory(error: RuntimeError) -> bool:
    """True for PyTorch's out-of-memory errors of devices and of the CPU allocator."""
    text = str(error)
    return (
        isinstance(error, torch.OutOfMemoryError)
        or "can't allocate memory" in text
        or "not enough memory" in text
    )


def _status(key: str) -> int:
    found = re.search(rf"{key}:\s+(\d+) kB", STATUS.read_text("utf-8"))
    if found is None:
        raise OSError(f"{STATUS} does not name {key}")
    return 1024 * int(found[1])


def release_memory() -> None:
    """Free objects that nothing refers to, and give their memory back to the device and the system.

    The C library keeps freed memory for later. A process that trains several models one after
    another would otherwise hold the most that any of them needed, and fragments of the others.
    """
    gc.collect()
    if (device := torch.accelerator.current_accelerator()) is not None:
        free_cached(device)
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # Only glibc has it
        if trim is not None:
            trim(0)
