"""Memory of the device and of the process, in GiB (1024**3 bytes)."""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch

from smp.log import get_logger

logger = get_logger(__name__)

GIB = 1024**3


def memory_stats(device: torch.device) -> dict[str, float | None]:
    """Memory now, cheap enough for every step.

    Returns:
        ``mem_allocated_gib``: bytes of live tensors on the device; None on a CPU, where nothing keeps that account.
        ``mem_peak_gib``: their highest sum so far (since the last record where memory is profiled); on a CPU, the
        highest resident memory of the process. ``host_rss_gib``: resident memory of the process now.
    """
    if device.type == "cuda":
        allocated: float | None = torch.cuda.memory_allocated(device) / GIB
        peak = torch.cuda.max_memory_allocated(device) / GIB
    else:
        allocated, peak = None, peak_rss_bytes() / GIB
    return {"mem_allocated_gib": allocated, "mem_peak_gib": peak, "host_rss_gib": rss_bytes() / GIB}


def rss_bytes() -> int:
    """Resident memory of this process now; where the system does not tell (no /proc), its highest so far."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return peak_rss_bytes()
    return pages * resource.getpagesize()


def peak_rss_bytes() -> int:
    """The highest resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def cpu_tensor_bytes() -> int:
    """Bytes of the storages behind all CPU tensors that Python knows, each counted once.

    Tensors that only autograd holds (saved for backward) are not seen. It walks every object: for profiling only.
    """
    gc.collect()
    sizes: dict[int, int] = {}
    for thing in gc.get_objects():
        # By type: DTensor and other wrappers hold a plain tensor, which is found by itself.
        plain = type(thing) in (torch.Tensor, torch.nn.Parameter)
        if plain and thing.device.type == "cpu" and thing.layout is torch.strided:
            storage = thing.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


class ScalarWriters(Protocol):
    """Where curves go; ``smp.train.metrics.Writers`` is one."""

    def scalars(self, tag: str, values: Mapping[str, float], step: int) -> None:
        """Several curves in one chart."""


class MemoryTracker:
    """Logs SMP v2's memory lines at marked places of a run, on rank 0; nothing unless it is enabled.

    Args:
        device: the device of this rank; its line is left out on a CPU.
        enabled: whether lines were asked for.
        rank: of the process.
    """

    def __init__(self, device: torch.device, *, enabled: bool, rank: int):
        self._device, self._enabled = device, enabled and rank == 0
        self._base = self._last = rss_bytes()
        self._held: list[tuple[str, Mapping[str, float], int]] = []  # before there is a run directory to write to
        self._writers: ScalarWriters | None = None

    def connect(self, writers: ScalarWriters) -> None:
        """Send the numbers to ``writers``, too, from the first on."""
        self._writers = writers
        for entry in self._held:
            writers.scalars(*entry)

    def record(self, tag: str, step: int) -> None:
        """Log the memory now under ``tag``, such as "After forward", and start a new peak."""
        if not self._enabled:
            return
        if self._device.type == "cuda":
            self._record_gpu(tag, step)
        self._record_cpu(tag, step)

    def _send(self, tag: str, values: Mapping[str, float], step: int) -> None:
        if self._writers is None:
            self._held.append((tag, values, step))
        else:
            self._writers.scalars(tag, values, step)

    def _where(self) -> str:
        return f"(torch, rank, device) = ({torch.__version__}, 0, {self._device.index or 0})"

    def _record_gpu(self, tag: str, step: int) -> None:
        device = self._device
        torch.cuda.synchronize(device)
        free, total = torch.cuda.mem_get_info(device)
        allocated, max_allocated = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        reserved, max_reserved = torch.cuda.memory_reserved(device), torch.cuda.max_memory_reserved(device)
        logger.info(
            "[GPU MEMORY]@%04d %s, (alloc, max_alloc, cache, max_cache) = (%7.4f, %7.4f, %7.4f, %7.4f) GiB. "
            "Totally used GPU memory: %.4f GiB. [%s]",
            step, self._where(), allocated / GIB, max_allocated / GIB, reserved / GIB, max_reserved / GIB,
            (total - free) / GIB, tag,
        )  # fmt: skip
        torch.cuda.reset_peak_memory_stats(device)
        usage = {
            "allocated": allocated / GIB,
            "max_allocated": max_allocated / GIB,
            "max_reserved": max_reserved / GIB,
            "reserved": reserved / GIB,
        }
        self._send(f"GPUMemoryGB/{tag}", usage, step)

    def _record_cpu(self, tag: str, step: int) -> None:
        tensors, now = cpu_tensor_bytes() / GIB, rss_bytes()
        total, change, base = (now - self._base) / GIB, (now - self._last) / GIB, self._base / GIB
        self._last = now
        logger.info(
            "[CPU MEMORY]@%04d %s, (torch tensor, mem, change since last measurement, base) = "
            "(%7.4f, %7.4f, %7.4f, %7.4f) GiB. [%s]",
            step, self._where(), tensors, total, change, base, tag,
        )  # fmt: skip
        usage = {"base": base, "delta": change, "torch": tensors, "total": total}
        self._send(f"CPUMemoryGB/{tag}", usage, step)
