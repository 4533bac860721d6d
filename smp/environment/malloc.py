"""Let glibc's malloc keep the memory that a training step frees, for the next step to take.

By default glibc gives blocks above 32 MiB back to the system when they are freed, and every page of the next one is a
fault: a fifth of a step on CPUs (``benchmarks/train_step.py``). A step allocates the same blocks again and again, so
keeping them costs little memory. What the user has set of glibc's malloc stays.
"""

from __future__ import annotations

import ctypes
import os
import re

# Besides, what a running process cannot ask for by itself: huge pages, and no caches of small blocks. Around an aligned
# block, as a tensor's, lie two small ones; while these are in a cache they do not become one with it again when it is
# freed, and no tensor of its size fits there (glibc's bug 14581, mended in 2.39).
_KEPT = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=1099511627776"
_NOT_CACHED = "glibc.malloc.tcache_count=0"
TUNABLES = f"{_KEPT}:glibc.malloc.hugetlb=1:{_NOT_CACHED}"

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of malloc.h
_INT_MAX = 2**31 - 1
_GIVEN_BACK = 4 * 2**20  # bytes: a threshold up to here gives nearly all tensors back

# The least of what `unused_heap` is about.
LEAST_UNUSED = 0.10
# The most, of jobs that keep what backward needs and of those that recompute it.
_UNUSED, _UNUSED_CACHED = (0.30, 0.36), (0.38, 0.72)


def is_glibc() -> bool:
    """Tell whether this process runs on glibc."""
    return hasattr(ctypes.CDLL(None), "gnu_get_libc_version")


def set_by_environment() -> bool:
    """Tell whether the environment sets glibc's malloc: the user, or the launcher through :func:`tunables`."""
    return any(name == "GLIBC_TUNABLES" or name.startswith("MALLOC_") for name in os.environ)


def tunables() -> dict[str, str]:
    """Return the environment variable for processes to be started; empty if the user has set another."""
    return {} if set_by_environment() else {"GLIBC_TUNABLES": TUNABLES}


def as_here() -> dict[str, str]:
    """Return the environment variable for a process that plans this one: also what is not set stays so."""
    return {"GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", "")}


def keep_freed_memory() -> None:
    """Set the malloc of this process; do nothing if the environment sets it, or without glibc."""
    if is_glibc() and not set_by_environment():
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, _INT_MAX)


def unused_heap(*, recomputes: bool) -> float:
    """Return how much malloc holds in free blocks at the peak of a process, of its tensors' bytes, as it is set now.

    Measured on the jobs of ``benchmarks/plan.py bytes``: 0.11 to 0.27, and with recomputation to 0.32; with glibc's
    caches of small blocks up to 0.36 and 0.71, as much when freed memory is kept as by glibc's own rule; none where
    large blocks are given back at once, with which a step takes 1.3 times the time, also on huge pages. Small
    allocations, as nodes of what is recomputed, lie in large blocks that were freed, into which no tensor of their size
    fits then. The same job differs by some hundredths from run to run. The most is counted.

    Args:
        recomputes: whether blocks are recomputed in backward.
    """
    if not is_glibc():
        return 0.0
    settings = f"{os.environ.get('GLIBC_TUNABLES', '')}:mmap_threshold={os.environ.get('MALLOC_MMAP_THRESHOLD_', '')}"
    thresholds = [int(size, 0) for size in re.findall(r"mmap_threshold=(0x[0-9a-fA-F]+|\d+)", settings)]
    if any(size <= _GIVEN_BACK for size in thresholds):
        return 0.0
    return (_UNUSED if _NOT_CACHED in settings else _UNUSED_CACHED)[recomputes]
