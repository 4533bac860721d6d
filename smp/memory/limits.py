"""What memory a process may use: its GPU's, or its share of the host's within the control group's limit."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from pathlib import Path, PurePosixPath

import torch

# The folder, the name of its line in /proc/self/cgroup, and its files: version 2 and version 1.
_GROUPS = (
    ("sys/fs/cgroup", "", "memory.max", "memory.current", "inactive_file"),
    ("sys/fs/cgroup/memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def control_group(root: Path = Path("/"), controller: str = "") -> PurePosixPath:
    """This process's control group below ``root``: of version 2, or of a controller of version 1."""
    top = PurePosixPath("sys/fs/cgroup") / controller
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            own = top / path.lstrip("/")
            if controller in controllers.split(",") and (root / own).is_dir():
                return own
    return top  # a container sees its own there


def memory_limit(root: Path = Path("/")) -> tuple[int, int] | None:
    """Bytes that this process's control group may use and bytes that are left, where one limits it.

    Of it and those above it, the one with the least left. File contents that nobody has read lately do not count as
    used: the kernel drops them first.
    """
    found = []
    for top, controller, limit, used, cached in _GROUPS:
        own = control_group(root, controller)
        for group in (own, *own.parents):
            if not group.is_relative_to(top):
                break
            with contextlib.suppress(OSError, ValueError):  # no limit is the word `max`
                most, taken = int((root / group / limit).read_text()), 0
                with contextlib.suppress(OSError):
                    taken = int((root / group / used).read_text())
                    lines = (line.split() for line in (root / group / "memory.stat").read_text().splitlines())
                    taken -= sum(int(size) for name, size in lines if name == cached)
                found.append((most, max(0, most - max(0, taken))))
    return min(found, key=lambda each: each[1], default=None)


def _host_free() -> int | None:
    """Bytes the host has left; all of its memory where the system does not say, as on macOS."""
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        pass  # not Linux
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None
    return total if total > 0 else None


def available_memory(device: torch.device, local_world_size: int) -> int:
    """Bytes that one process may use: its GPU's free memory, or its share of what the host has left.

    Where no limit can be read, the largest number.
    """
    if device.type == "cuda":
        # The least of the host's GPUs, so that all its ranks come to the same answer.
        return min(torch.cuda.mem_get_info(index)[0] for index in range(local_world_size))
    group = memory_limit()
    limits = [_host_free(), None if group is None else group[1]]
    share = min((limit for limit in limits if limit is not None), default=sys.maxsize) // local_world_size
    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return share if soft == resource.RLIM_INFINITY else min(share, soft)
