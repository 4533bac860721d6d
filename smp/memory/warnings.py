"""Warnings when a GPU's memory is so full that the allocator has to flush its cache: it stalls the device each time."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from smp.log import get_logger

logger = get_logger(__name__)

_RETRIES, _FAILURES = "num_alloc_retries", "num_ooms"  # since the process began


def warn_of_cache_flushes(model: nn.Module, device_type: str) -> None:
    """Log a warning before a training forward if the CUDA allocator has flushed its cache since the one before.

    Args:
        model: the root module.
        device_type: ``cpu``, whose allocator has no cache, does nothing.

    Source: ``fsdp_cache_flush_warnings`` of SMP v2.
    """
    if device_type != "cuda":
        return
    device = torch.device("cuda", torch.cuda.current_device())

    def counts() -> tuple[int, int]:
        found = torch.cuda.memory_stats(device)  # counters of the host: no synchronisation
        return found.get(_RETRIES, 0), found.get(_FAILURES, 0)

    before = counts()

    def warn(model: nn.Module, inputs: tuple[Any, ...]) -> None:
        nonlocal before
        if not model.training:
            return
        now = counts()
        flushes, failures = now[0] - before[0], now[1] - before[1]
        before = now
        if flushes > 0 or failures > 0:  # negative: the counters were reset
            logger.warning(
                "%s was short of memory since the last forward: flushes of its allocator's cache, which stall it: %d "
                "(%d in all); failed allocations: %d. Shard over more ranks (--hybrid_shard_degree) or use less: "
                "docs/memory.md says how.", device, max(flushes, 0), now[0], max(failures, 0),
            )  # fmt: skip

    model.register_forward_pre_hook(warn)
