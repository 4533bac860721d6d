"""Memory of the device and of the process, in GiB (1024**3 bytes)."""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from smp.log import get_logger
from smp.units import GIB

logger = get_logger(__name__)


def memory_stats(device: torch.device) -> dict[str, float | None]:
    """Read the memory in use, cheap enough for every step.

    Returns:
        ``mem_allocated_gib``: live tensors on the device; None on a CPU.
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
    """Return the resident memory of this process; without /proc, its highest so far."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return peak_rss_bytes()
    return pages * resource.getpagesize()


def peak_rss_bytes() -> int:
    """Return the highest resident memory of this process so far."""
    try:  # ru_maxrss begins with that of the process that started this one
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split(None, 1)[0]) * 1024
    except (OSError, IndexError):
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def cpu_tensor_bytes() -> int:
    """Sum the storages of all CPU tensors that Python knows, each counted once.

    Tensors that only autograd references (saved for backward) are not seen. Slow: every Python object is visited.
    """
    gc.collect()
    sizes: dict[int, int] = {}
    for thing in gc.get_objects():
        # Wrappers such as DTensor hold a plain tensor, which is an object of its own.
        plain = type(thing) in (torch.Tensor, torch.nn.Parameter)
        if plain and thing.device.type == "cpu" and thing.layout is torch.strided:
            storage = thing.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


class MemoryTracker:
    """Logs SMP v2's memory lines at marked points of a run, on rank 0, if it is enabled.

    Args:
        device: the device of this rank; its line is left out on a CPU.
    """

    def __init__(self, device: torch.device, *, enabled: bool, rank: int):
        self._device, self._enabled = device, enabled and rank == 0
        self._base = self._last = rss_bytes()
        self._held: list[tuple[str, Mapping[str, float], int]] = []  # until connect()
        self._write: Callable[[str, Mapping[str, float], int], None] | None = None

    def connect(self, write: Callable[[str, Mapping[str, float], int], None]) -> None:
        """Pass tag, values in GiB by name, and step of each record to ``write``, too, those of earlier ones first."""
        self._write = write
        for entry in self._held:
            write(*entry)

    def record(self, tag: str, step: int) -> None:
        """Log the memory under ``tag``, such as "After forward", and reset the peak."""
        if not self._enabled:
            return
        if self._device.type == "cuda":
            self._record_gpu(tag, step)
        self._record_cpu(tag, step)

    def _send(self, tag: str, values: Mapping[str, float], step: int) -> None:
        if self._write is None:
            self._held.append((tag, values, step))
        else:
            self._write(tag, values, step)

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
