"""Warnings when a GPU's memory is so full that the allocator has to flush its cache: it stalls the device each time."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from smp.log import get_logger

logger = get_logger(__name__)

_RETRIES, _FAILURES = "num_alloc_retries", "num_ooms"  # since the process began


class _CacheFlushes:
    """What the allocator of a device has had to do, read before each forward that trains."""

    def __init__(self, device: torch.device):
        self._device = device
        self._before = self._counts()

    def _counts(self) -> tuple[int, int]:
        # Counters that the host keeps: reading them waits for nothing.
        found = torch.cuda.memory_stats(self._device)
        return found.get(_RETRIES, 0), found.get(_FAILURES, 0)

    def __call__(self, model: nn.Module, inputs: tuple[Any, ...]) -> None:
        if not model.training:
            return
        before, now = self._before, self._counts()
        self._before = now
        flushes, failures = now[0] - before[0], now[1] - before[1]
        if flushes <= 0 and failures <= 0:  # below: the counters were set back
            return
        logger.warning(
            "%s was short of memory since the last forward: flushes of its allocator's cache, which stall it: %d (%d "
            "in all); failed allocations: %d. Shard over more ranks (--hybrid_shard_degree) or hold less: "
            "docs/memory.md says how.", self._device, max(flushes, 0), now[0], max(failures, 0),
        )  # fmt: skip


def warn_of_cache_flushes(model: nn.Module, device_type: str) -> None:
    """Log a warning before a training forward if the CUDA allocator has flushed its cache since the one before.

    Args:
        model: the whole model.
        device_type: where it computes; a CPU's allocator keeps no cache, and nothing is watched.

    Source: ``fsdp_cache_flush_warnings`` of SMP v2.
    """
    if device_type == "cuda":
        model.register_forward_pre_hook(_CacheFlushes(torch.device("cuda", torch.cuda.current_device())))
