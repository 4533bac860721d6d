"""Requests of a process repeated by this machine's malloc: a script of the standard library alone, to start at once.

Reads pairs of a number and the bytes that it shall have, 0 to free it, as 64-bit integers, and prints the bytes of the
heap that it takes: ``python -I -S malloc_replay.py SEED < requests``. No page of what is asked for is touched.
"""

from __future__ import annotations

import array
import collections
import ctypes
import random
import sys

_ALIGNED = 64  # bytes, as torch aligns tensors
_NEW = 2**22  # bytes that no free block of an interpreter has, so that they are the heap's last
_LEFT = 100_000  # bytes of the largest block that is free before
_PR_SET_THP_DISABLE = 41


def repeat(requests: array.array[int], seed: int) -> int:
    """Make requests of malloc, small blocks between them; return the bytes up to the end of the last place."""
    libc, place = ctypes.CDLL(None), ctypes.c_void_p()
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.posix_memalign.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_size_t]
    libc.prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)  # else a page that malloc writes to is 2 MiB
    chance, small = random.Random(seed), collections.deque[int]()
    places: list[int | None] = [None] * (max(requests[::2]) + 1)
    start = end = libc.malloc(_NEW)
    libc.free(start)
    for size in range(_LEFT, 16, -16):  # take what the interpreter has left free, on which the result would hang
        while (left := libc.malloc(size)) < start:
            pass
        libc.free(left)
    for storage, nbytes in zip(requests[::2], requests[1::2], strict=True):
        libc.free(places[storage])
        places[storage] = None
        if nbytes:
            if libc.posix_memalign(ctypes.byref(place), _ALIGNED, nbytes):
                raise MemoryError
            places[storage] = place.value
            end = max(end, (place.value or 0) + nbytes)
        if chance.random() < 0.1:
            small.append(libc.malloc(chance.randrange(120, 4000)))
        if len(small) > 100:
            small.rotate(chance.randrange(100))
            libc.free(small.pop())
    return int(end) - int(start)


if __name__ == "__main__":
    print(repeat(array.array("q", sys.stdin.buffer.read()), int(sys.argv[1])))
