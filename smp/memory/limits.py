"""Memory that a process may use: its GPU's, or its share of the host's within the control group's limit."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from pathlib import Path, PurePosixPath

import torch
import torch.distributed as dist

from smp.units import GIB

# CUDA's context of a process. Not measured with a GPU.
CONTEXT_BYTES = int(0.6 * GIB)

# The folder, the name of its line in /proc/self/cgroup, and its files: version 2 and version 1.
_GROUPS = (
    ("sys/fs/cgroup", "", "memory.max", "memory.current", "inactive_file"),
    ("sys/fs/cgroup/memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def control_group(root: Path = Path("/"), controller: str = "") -> PurePosixPath:
    """Return this process's control group below ``root``: of version 2, or of a controller of version 1."""
    top = PurePosixPath("sys/fs/cgroup") / controller
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            own = top / path.lstrip("/")
            if controller in controllers.split(",") and (root / own).is_dir():
                return own
    return top  # a container's own group is its root


def memory_limit(root: Path = Path("/")) -> tuple[int, int] | None:
    """Return the bytes that this process's control group may use and those left; None without a limit.

    Of the group and its parents, the one with the least left counts. Inactive file cache, which the kernel drops first,
    does not count as used.
    """
    found = []
    for top, controller, limit, used, cached in _GROUPS:
        own = control_group(root, controller)
        for group in (own, *own.parents):
            if not group.is_relative_to(top):
                break
            with contextlib.suppress(OSError, ValueError):  # `max`: no limit
                most, taken = int((root / group / limit).read_text()), 0
                with contextlib.suppress(OSError):
                    taken = int((root / group / used).read_text())
                    lines = (line.split() for line in (root / group / "memory.stat").read_text().splitlines())
                    taken -= sum(int(size) for name, size in lines if name == cached)
                found.append((most, max(0, most - max(0, taken))))
    return min(found, key=lambda each: each[1], default=None)


def meminfo(root: Path = Path("/")) -> dict[str, int]:
    """Return the bytes of each line of ``/proc/meminfo`` by its name; nothing without that file, as on macOS."""
    with contextlib.suppress(OSError, ValueError):
        lines = (line.split() for line in (root / "proc/meminfo").read_text().splitlines() if line.endswith(" kB"))
        return {name.rstrip(":"): int(size) * 1024 for name, size, _unit in lines}
    return {}


def _host_total() -> int | None:
    with contextlib.suppress(OSError, ValueError):
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return total if total > 0 else None
    return None


def _least(*limits: int | None) -> int:
    return min((limit for limit in limits if limit is not None), default=sys.maxsize)


def installed_memory() -> int:
    """Return the bytes that all processes of this host may use, whatever is in use now; ``sys.maxsize``: not known."""
    group = memory_limit()
    return _least(_host_total(), group and group[0])


def available_memory(device: torch.device, local_world_size: int) -> int:
    """Return the bytes that one process may use: its own GPU's, or its share of what the host has left.

    Of a GPU, what is free and the process' own context, which is part of what it needs. Without any known limit,
    ``sys.maxsize``.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)  # first: the next line makes a context, which takes memory, on the current device
        free, total = torch.cuda.mem_get_info(device)
        return min(free + CONTEXT_BYTES, total)
    group = memory_limit()
    host = meminfo().get("MemAvailable", _host_total())
    share = _least(host, group and group[1]) // local_world_size
    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return share if soft == resource.RLIM_INFINITY else min(share, soft)


def agree_on_memory(device: torch.device, local_world_size: int) -> int:
    """Return the least that :func:`available_memory` finds on any rank; collective."""
    everyone = [0] * dist.get_world_size()
    dist.all_gather_object(everyone, available_memory(device, local_world_size))
    return min(everyone)
