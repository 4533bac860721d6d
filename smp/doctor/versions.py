"""Python and the packages: there, new enough, and the same on every rank."""

from __future__ import annotations

import importlib.metadata
import platform
import re

from smp.comm.kernel import load
from smp.comm.segment import refusal
from smp.doctor.room import Room

# As in pyproject.toml, which a test compares.
MINIMUM = {
    "python": "3.11",
    "torch": "2.11",
    "transformers": "5.17",
    "accelerate": "1.10",
    "datasets": "4.0",
    "safetensors": "0.6",
    "pyyaml": "6.0",
    "xxhash": "3.0",
}


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (2, 13, 0) of ``2.13.0+cpu``."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def installed() -> dict[str, str | None]:
    """The version of everything in ``MINIMUM``; None where it is not installed. Nothing is imported."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in list(MINIMUM)[1:]:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def check_versions(room: Room) -> None:
    """Versions below the least that smp works with."""
    found = installed()
    room.measure("versions", found)
    wrong = False
    for name, least in MINIMUM.items():
        version = found[name]
        if version is None:
            room.problem(f"{name} is not installed: pip install '{name}>={least}'", package=name)
        elif numbers(version) < numbers(least):
            what = f"install Python {least} or newer" if name == "python" else f"pip install '{name}>={least}'"
            room.problem(f"{name} {version} is older than {least}, the least that smp works with: {what}", package=name)
        else:
            continue
        wrong = True
    if not wrong:
        room.ok(", ".join(f"{name} {version}" for name, version in found.items()), **found)


def check_backend_parts(room: Room) -> None:
    """What the smddp backend needs of this machine to exchange through shared memory at full speed."""
    if why := refusal():
        room.warn(f"smddp cannot share memory between processes here, and leaves everything to gloo: {why}")
        return
    if load() is None:
        room.warn(
            "smddp's C kernel cannot be compiled or loaded here, so that Python runs its rounds and short collectives "
            "take a third longer: install a C compiler (cc, gcc or clang), and see that ~/.cache is writable"
        )
        return
    room.ok("memory can be shared between processes, and smddp's C kernel is compiled")
