"""Let glibc's malloc keep the memory that a training step frees, for the next step to take.

By default glibc gives blocks above 32 MiB back to the system when they are freed, and every page of the next one is a
fault: a fifth of a step on CPUs (``benchmarks/train_step.py``). A step allocates the same blocks again and again, so
keeping them costs little memory. What the user has set of glibc's malloc stays.

Memory is lost where small blocks are next to tensors. A tensor is aligned to 64 bytes: glibc takes 96 more, and frees
what lies before and behind it, mostly 48 bytes each. Once a small block of the process has taken one of these places,
the tensor's, when it is freed, is 48 bytes too short for the next tensor of its size (glibc's bug 14581, mended in
2.39). So a process of the launcher takes small blocks from a stock first.
"""

from __future__ import annotations

import ctypes
import os
import re

# Besides, what a running process cannot ask for by itself: huge pages, and free small blocks in queues instead of
# stacks. From glibc's caches and fast bins the last one that was freed is taken first, which is one next to a tensor.
_KEPT = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=1099511627776"
_IN_QUEUES = "glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0"
TUNABLES = f"{_KEPT}:glibc.malloc.hugetlb=1:{_IN_QUEUES}"

_BESIDE = (24, 40, 56, 72, 88)  # bytes: what fits next to a tensor
_STOCK = 8192  # blocks of each

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of malloc.h
_INT_MAX = 2**31 - 1
_GIVEN_BACK = 4 * 2**20  # bytes: a threshold up to here gives nearly all tensors back

# The most of what `unused_heap` is about: with a stock; without one, of jobs that keep what backward needs
# and that recompute it.
_UNUSED_STOCKED, _UNUSED = 0.20, (0.38, 0.72)


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


def stocks_small_blocks() -> bool:
    """Tell whether the environment sets malloc as :func:`keep_freed_memory` needs it to stock small blocks."""
    return is_glibc() and _IN_QUEUES in os.environ.get("GLIBC_TUNABLES", "")


def keep_freed_memory() -> None:
    """Set the malloc of this process, unless the environment sets it; under the launcher's settings stock small blocks.

    No-op without glibc.
    """
    if stocks_small_blocks():
        _stock_small_blocks()
    elif is_glibc() and not set_by_environment():
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, _INT_MAX)


def _stock_small_blocks() -> None:
    """Free every second of many small blocks: between two that stay none becomes one with another."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    for size in _BESIDE:
        blocks = [libc.malloc(size) for _ in range(2 * _STOCK)]
        for block in blocks[::2]:
            libc.free(block)


def unused_heap(*, recomputes: bool) -> float:
    """Return how much malloc holds in free blocks at the peak of a process, of its tensors' bytes, as it is set now.

    The most that was measured on the jobs of ``benchmarks/plan.py bytes``. With a stock of small blocks to 0.20; else
    up to 0.36 and with recomputation 0.71, as much when freed memory is kept as by glibc's own rule; none where large
    blocks are given back at once, with which a step takes 1.3 times the time, also on huge pages.
    """
    if not is_glibc():
        return 0.0
    settings = f"{os.environ.get('GLIBC_TUNABLES', '')}:mmap_threshold={os.environ.get('MALLOC_MMAP_THRESHOLD_', '')}"
    thresholds = [int(size, 0) for size in re.findall(r"mmap_threshold=(0x[0-9a-fA-F]+|\d+)", settings)]
    if any(size <= _GIVEN_BACK for size in thresholds):
        return 0.0
    return _UNUSED_STOCKED if stocks_small_blocks() else _UNUSED[recomputes]
