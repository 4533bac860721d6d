"""Report of the backend: calls and bytes by operation and size class, with the path taken and the reason.

Counted per process. Two ranks of one job can be compared line by line: paths are chosen from what is the same on all.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import weakref
from typing import Any, NamedTuple

import torch
from torch._C import _distributed_c10d

from smp.comm.arena import LastOperation
from smp.units import readable


class Key(NamedTuple):
    """Key of a count. ``size`` is the upper end of the size class in bytes, a power of two (0: no data)."""

    operation: str
    size: int
    path: str
    why: str


@dataclasses.dataclass
class Count:
    """``nbytes`` is what each rank gives to an all_gather or all_reduce, and gets from a reduce_scatter."""

    calls: int = 0
    nbytes: int = 0


class Report(dict[Key, Count]):
    """The counts so far. Printed, it is a table.

    Attributes:
        gpu_bytes: memory of this rank's GPU in communication buffers now, which torch's statistics do not show.
    """

    gpu_bytes: int = 0

    def calls(self, operation: str | None = None, path: str | None = None) -> int:
        """Return the number of calls, of one operation or on one path if given."""
        return sum(c.calls for k, c in self.items() if operation in (None, k.operation) and path in (None, k.path))

    def __str__(self) -> str:
        rows = [("operation", "up to", "calls", "bytes", "path", "why")]
        for key, count in sorted(self.items()):
            rows.append(
                (key.operation, readable(key.size), str(count.calls), readable(count.nbytes), key.path, key.why)
            )
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        if self.gpu_bytes:
            lines.append(f"communication buffers on the GPU, outside torch's statistics: {readable(self.gpu_bytes)}")
        return "\n".join(lines)


_counts: dict[tuple[str, int, str, str], list[int]] = collections.defaultdict(lambda: [0, 0])
_groups: weakref.WeakSet[Any] = weakref.WeakSet()


def count(operation: str, nbytes: int, path: str, why: str = "") -> None:
    """Count one call."""
    entry = _counts[operation, (nbytes - 1).bit_length() if nbytes else -1, path, why]
    entry[0] += 1
    entry[1] += nbytes


def watch(group: Any) -> None:
    """Include a group in the report and in :func:`last_operations`. It is held weakly.

    Args:
        group: has ``last_operations()`` and ``gpu_bytes``.
    """
    _groups.add(group)


def report() -> Report:
    """Return the counts of this process's ``smddp`` groups since the start, or since :func:`reset_report`."""
    table = Report()
    table.gpu_bytes = sum(group.gpu_bytes for group in list(_groups))
    for (operation, power, path, why), (calls, nbytes) in list(_counts.items()):
        table[Key(operation, 0 if power < 0 else 1 << power, path, why)] = Count(calls, nbytes)
    return table


def reset_report() -> None:
    """Reset the counts."""
    _counts.clear()


def last_operations() -> dict[str, list[LastOperation]]:
    """Return, for each group, the latest operation of every rank on this host: the hook for a watchdog.

    It reads shared memory and waits for nobody, so it may be called from any thread while a collective hangs.
    """
    return {group.label: group.last_operations() for group in list(_groups) if group.last_operations()}


def nccl_operations() -> list[str]:
    """Describe the collective that each NCCL group of this rank waits for, or its last one, by torch's flight recorder.

    It asks CUDA for events, with the interpreter's lock: where CUDA hangs, so does this process.
    """
    dump = getattr(_distributed_c10d, "_dump_nccl_trace_json", None)  # not in builds for CPUs
    found: dict[Any, tuple[str, str]] = {}
    last = {}
    for each in json.loads(dump()).get("entries", []) if dump else ():
        group, number = tuple(each["process_group"]), each["p2p_seq_id" if each["is_p2p"] else "collective_seq_id"]
        last[group] = number
        if group not in found or found[group][1] == "completed":
            name, sizes = each["profiling_name"].removeprefix("nccl:"), (each["input_sizes"], each["output_sizes"])
            found[group] = f"{name} #{number} ({sizes[0]} to {sizes[1]})", each["state"]
    return [
        f"NCCL group {' '.join(group)}: {what}, {state}; enqueued up to #{last[group]}"
        for group, (what, state) in found.items()
    ]


def record(operation: str, nbytes: int) -> Any:
    """Return a profiler range for one collective, named with its size; None while no profiler runs."""
    if not torch.autograd._profiler_enabled():
        return None
    return torch.profiler.record_function(f"smddp:{operation} {readable(nbytes)}")
