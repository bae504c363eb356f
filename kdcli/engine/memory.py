"""Measure and release memory."""

import ctypes
import gc
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import psutil
import torch

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_of(call: Callable[[], object], device: torch.device) -> int | None:
    """Return by how many bytes memory grew at most during a call.

    Allocated memory is measured on devices that count it, and resident memory on Linux. The result
    is None on other systems.
    """
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
    """Return the largest number of bytes that this process has used so far.

    Allocated memory is measured on devices that count it, and resident memory elsewhere.
    """
    if (counter := _counter(device)) is not None:
        return int(counter.max_memory_allocated(device))
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource  # This module does not exist on Windows.

    # The unit is bytes on macOS and kilobytes on Linux.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def begin_peak(device: torch.device) -> None:
    """Reset the value of `peak_so_far` on devices that count their memory."""
    if (counter := _counter(device)) is not None:
        counter.reset_peak_memory_stats(device)


def free_cached(device: torch.device) -> None:
    """Return cached memory to the device."""
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


def _counter(device: torch.device) -> ModuleType | None:
    """Return the module that counts a device's memory.

    The result is None on a CPU and on MPS, which use the process's memory.
    """
    # The functions of torch.accelerator do not exist before PyTorch 2.9, and fail an assertion on
    # MPS before 2.14.
    return torch.get_device_module(device) if device.type not in ("cpu", "mps") else None


def _status(key: str) -> int:
    value = re.search(rf"{key}:\s+(\d+) kB", STATUS.read_text("utf-8"))
    if value is None:
        raise OSError(f"{STATUS} has no line {key}")
    return 1024 * int(value[1])


def release_memory() -> None:
    """Free unreachable objects, and return their memory to the device and the system.

    The C library keeps freed memory. Without this, a process that trains several models one after
    another would keep the peak memory of the largest, and fragments of the others.
    """
    gc.collect()
    if (device := torch.accelerator.current_accelerator()) is not None:
        free_cached(device)
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # Only glibc has it
        if trim is not None:
            trim(0)
