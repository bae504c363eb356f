"""Reuse freed memory, where the C library would return it to the system.

This module loads no large library.
"""

import ctypes
import os
import platform

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # The numbers of malloc.h
MMAP_BYTES = 1 << 30
OLD_MMAP_BYTES = 1 << 25
"""Older versions of glibc refuse a larger threshold."""


def keep_freed_memory() -> bool:
    """Let this process keep the memory that it frees.

    Without this, glibc maps each large activation of a training step anew, and the system clears
    all of its pages again. docs/evidence/speed.md has the measurements. Settings from the user are
    kept.

    Returns:
        Whether freed memory is kept. Only glibc can do this.
    """
    chosen = any(name.startswith("MALLOC_") for name in os.environ)
    if chosen or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    is_set = mallopt(M_MMAP_THRESHOLD, MMAP_BYTES) or mallopt(M_MMAP_THRESHOLD, OLD_MMAP_BYTES)
    return bool(is_set and mallopt(M_TRIM_THRESHOLD, -1))
