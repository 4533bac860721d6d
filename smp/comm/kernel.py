"""The C kernel of the rounds: compiled at the first use, kept, and never needed.

A short collective costs what its instructions cost, and in Python those are some 20 microseconds. ``kernel.c`` does the
same in two. It is compiled with the machine's C compiler into the user's cache; without one, or with
``SMP_COMM_KERNEL=0``, the same rounds run in Python. Ranks with and without it work together.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import shutil
import subprocess
from pathlib import Path

from smp.environment import cached_library
from smp.errors import UserError
from smp.log import get_logger

_SOURCE = Path(__file__).with_name("kernel.c")
_logger = get_logger("comm")
_FLAGS = ("-O2", "-shared", "-fPIC", "-std=gnu11")


class ArenaView(ctypes.Structure):
    """``Arena`` of ``kernel.c``."""

    _fields_ = (
        ("base", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("rank", "size", "counters", "line", "slots", "stride", "per_rank")),
        *((name, ctypes.c_int64) for name in ("data", "signature_bytes", "spins", "yields")),
    )


class Gather(ctypes.Structure):
    """``Gather`` of ``kernel.c``."""

    _fields_ = (
        ("signature", ctypes.c_char_p),
        ("source", ctypes.c_void_p),
        ("sizes", ctypes.c_void_p),
        ("addresses", ctypes.c_void_p),
        ("chunk", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("first", ctypes.c_uint32),
        ("needed", ctypes.c_uint32),
        ("index", ctypes.c_int64),
        ("filled", ctypes.c_int64),
        ("taken", ctypes.c_int64),
    )


class Kernel:
    """The functions of the compiled library.

    Each returns 0 when it is done, -1 if the ranks do not do the same, and 1 + a local rank that has not arrived yet.

    Raises:
        OSError: it cannot be loaded.
    """

    def __init__(self, path: Path):
        library = ctypes.CDLL(str(path))  # lets go of Python's lock while it runs
        arena, signature = ctypes.c_void_p, ctypes.c_char_p
        self.agree, self.meet, self.gather = library.smp_agree, library.smp_meet, library.smp_gather
        self.agree.argtypes = self.meet.argtypes = (arena, ctypes.c_uint32, signature)
        self.gather.argtypes = (arena, ctypes.c_void_p)
        for function in (self.agree, self.meet, self.gather):
            function.restype = ctypes.c_int64


@functools.cache
def load() -> Kernel | None:
    """Return the kernel, compiled if need be; None where that is not possible, which costs speed only."""
    try:
        source = _SOURCE.read_bytes() + repr((_FLAGS, platform.machine(), platform.libc_ver())).encode()
        return Kernel(cached_library("rounds", source, _compile))
    except (OSError, RuntimeError, UserError, subprocess.SubprocessError) as error:
        _logger.debug("the C kernel of the smddp backend is not used: %s", error)
        return None


def _compile(path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise RuntimeError("no C compiler")
    subprocess.run([compiler, *_FLAGS, "-o", path, _SOURCE], check=True, capture_output=True, timeout=60)
