"""Threads and kernels that a process computes with: its share of the host's cores, and deterministic kernels."""

from __future__ import annotations

import os
import socket

# torch is imported where it is used: commands that start processes do so before they import it themselves.


def available_cores() -> int:
    """Return the number of cores that this process may use, by its affinity; macOS has none."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_threads(processes: int) -> dict[str, str]:
    """Return the variable that shares this host's cores among processes, or none if the user has set it."""
    return {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(max(1, available_cores() // processes))}


def set_default_threads(processes: int) -> None:
    """Share this host's cores among ``processes`` to come, unless the user has set OMP_NUM_THREADS."""
    os.environ.update(default_threads(processes))


def share_cores() -> None:
    """Compute with this process's share of the cores that it may use, unless OMP_NUM_THREADS is above 1; collective.

    torchrun sets OMP_NUM_THREADS to 1 where the user has not, so that 1 does not tell a wish. Launchers give each
    process separate cores, or the same to all of a host: ranks with the same cores share them.
    """
    import torch
    import torch.distributed as dist

    affinity = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    everyone: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine := (socket.gethostname(), affinity))
    if os.environ.get("OMP_NUM_THREADS", "1") == "1":
        torch.set_num_threads(max(1, available_cores() // everyone.count(mine)))


def use_one_tokenizer_thread() -> None:
    """Convert texts one after the other in this process, one of many that do."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def use_deterministic_kernels() -> None:
    """Let each operation give the same bits each time, in this process; call it before the first matrix product.

    An operation that has no such kernel raises RuntimeError from then on. cuBLAS reads its variable as it starts.
    """
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a debugging aid, slow
    torch.use_deterministic_algorithms(True)
