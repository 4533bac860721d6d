"""The shim that lets a build of torch without GPUs hold fake CUDA tensors: compiled once, loaded before torch."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from smp.environment import cache_folder, cached_library
from smp.errors import UserError

SOURCE = Path(__file__).with_name("cuda_shim.cpp")
_PROGRAM = """
import ctypes, os, runpy, sys
ctypes.CDLL(sys.argv.pop(1), ctypes.RTLD_GLOBAL)
kept = os.dup(2)
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
try:
    import torch  # a build for CUDA complains that its hooks come second
finally:
    os.dup2(kept, 2)
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)  # a thread of the device that still ends a backward would abort with Python
"""


def compiler() -> str | None:
    """Return the C++ compiler of this machine, or None."""
    return next((found for name in ("g++", "c++", "clang++") if (found := shutil.which(name))), None)


def build_shim(folder: Path | None = None, source: Path = SOURCE) -> Path:
    """Compile the shim against the headers of the installed torch, once for each torch; returns the library.

    Args:
        folder: of the library; None: ``~/.cache/smp/kernels``.

    Raises:
        UserError: there is no compiler, the shim does not compile, or the library cannot be written.
    """
    spec = find_spec("torch")
    assert spec is not None and spec.submodule_search_locations
    torch = Path(spec.submodule_search_locations[0])  # torch is not imported before the shim is loaded
    # The library has the path of torch's: an equal torch of another environment, which may go, is another one.
    sources = b"".join(path.read_bytes() for path in (SOURCE, source, torch / "version.py")) + bytes(torch)
    folder = folder or cache_folder("kernels")
    try:
        return cached_library("cuda_shim", sources, functools.partial(_compile, torch, source), folder)
    except OSError as error:
        raise UserError(
            f"the shim for planning on fake GPUs cannot be kept in {folder} ({error}): set HOME to a directory that "
            f"can be written to"
        ) from None


def _compile(torch: Path, source: Path, built: Path) -> None:
    if (found := compiler()) is None:
        raise UserError(
            "a plan for GPUs needs a C++ compiler (g++, c++ or clang++) and none is on the PATH: install one"
        )
    include = (f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include")
    link = (f"-L{torch}/lib", f"-Wl,-rpath,{torch}/lib", "-Wl,--no-as-needed", "-ltorch_cpu", "-lc10")
    kernels = ["-DCUDA_SHIM_HAS_VALUES"] if (torch / "lib" / "libtorch_cuda.so").exists() else []  # torch's own
    options = ["-O0", "-shared", "-fPIC", "-std=c++20", *kernels]
    command = [found, *options, *include, str(source), "-o", str(built), *link]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"the shim for planning on fake GPUs does not compile with {found}:\n{done.stderr[-3000:]}")


def python_with(library: Path, module: str) -> list[str]:
    """Return the command of a process that runs a module, with the shim loaded before torch looks for CUDA."""
    return [sys.executable, "-c", _PROGRAM, str(library), module]
