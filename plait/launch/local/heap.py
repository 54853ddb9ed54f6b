"""How a rank's C library keeps its memory: what a step has freed stays at hand for the next one."""

from __future__ import annotations

import ctypes
import os

# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER = -1
_LARGEST = 32 << 20
"""Size in bytes from which on a block is always mapped from the system; older glibc versions refuse more."""
_OWN_WISHES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory instead of returning it to the kernel; returns whether it does from now on.

    Every micro-batch frees its activations, and the next one needs as many. Once returned, their pages must be found
    and zeroed again: measured at 16 sequences at a time (22 layers, width 128), the steps after the first took 4.2 to
    5.3 s with it and 4.2 s without, at the same peak of memory. Other C libraries, and users who have set glibc's own
    variables, are left alone.
    """
    if any(name in os.environ for name in _OWN_WISHES) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # Setting one of the two ends glibc's own search for both.
    return mallopt is not None and bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST) and mallopt(_M_TRIM_THRESHOLD, _NEVER))
