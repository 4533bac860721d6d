"""The shim that lets a build of torch without GPUs hold fake CUDA tensors: compiled once, loaded before torch."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from smp.errors import UserError

SOURCE = Path(__file__).with_name("cuda_shim.cpp")
CACHE = Path.home() / ".cache" / "smp" / "kernels"


def compiler() -> str | None:
    """Return the C++ compiler of this machine, or None."""
    return next((found for name in ("g++", "c++", "clang++") if (found := shutil.which(name))), None)


def build_shim(folder: Path = CACHE, source: Path = SOURCE) -> Path:
    """Compile the shim against the headers of the installed torch, once for each torch; returns the library.

    Raises:
        UserError: there is no compiler, or the shim does not compile.
    """
    spec = find_spec("torch")
    assert spec is not None and spec.submodule_search_locations
    torch = Path(spec.submodule_search_locations[0])  # torch is not imported before the shim is loaded
    sources = b"".join(path.read_bytes() for path in (SOURCE, source, torch / "version.py"))
    library = folder / f"cuda_shim_{hashlib.sha256(sources).hexdigest()[:16]}.so"
    if library.exists():
        return library
    if (found := compiler()) is None:
        raise UserError(
            "a plan for GPUs needs a C++ compiler (g++, c++ or clang++) and none is on the PATH: install one"
        )
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    built = library.with_suffix(f".{os.getpid()}")
    include = (f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include")
    link = (f"-L{torch}/lib", f"-Wl,-rpath,{torch}/lib", "-Wl,--no-as-needed", "-ltorch_cpu", "-lc10")
    command = [found, "-O0", "-shared", "-fPIC", "-std=c++20", *include, str(source), "-o", str(built), *link]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"the shim for planning on fake GPUs does not compile with {found}:\n{done.stderr[-3000:]}")
    built.replace(library)
    return library


def python_with(library: Path, module: str) -> list[str]:
    """Return the command of a process that runs a module, with the shim loaded before torch looks for CUDA."""
    program = (
        "import ctypes, runpy, sys; "
        "ctypes.CDLL(sys.argv.pop(1), ctypes.RTLD_GLOBAL); "
        "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
    )
    return [sys.executable, "-c", program, str(library), module]
