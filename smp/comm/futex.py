"""Waiting for a word of shared memory to change, and copying, through the C library.

Calls through ``ctypes.CDLL`` let go of Python's lock while they run.
"""

from __future__ import annotations

import ctypes
import platform

_libc = ctypes.CDLL(None, use_errno=False)
_FUTEX_NUMBER = {"x86_64": 202, "AMD64": 202, "aarch64": 98}.get(platform.machine(), -1)
_WAIT, _WAKE, _EVERYONE = 0, 1, 2**31 - 1

copy = _libc.memcpy
copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
copy.restype = None


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_syscall = _libc.syscall
_syscall.argtypes = (ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p)
_syscall.restype = ctypes.c_long

_SLICE = _Timespec(0, 50_000_000)
_SLICE_ADDRESS = ctypes.addressof(_SLICE)


def wait(address: int, value: int) -> None:
    """Sleep until woken, for at most 50 ms; return at once if the word at ``address`` is not ``value``."""
    _syscall(_FUTEX_NUMBER, address, _WAIT, value, _SLICE_ADDRESS)


def wake(address: int) -> None:
    """Wake everyone who waits for the word at ``address``."""
    _syscall(_FUTEX_NUMBER, address, _WAKE, _EVERYONE, None)
