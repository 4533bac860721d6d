"""A process group for tensors whose device is ``cuda`` and whose memory is the host's: gloo, on the same memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work

NAME = "hostcuda"


def on_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.ops.cuda_shim.on_host(value) if value.is_cuda else value
    return [on_host(each) for each in value] if isinstance(value, (list, tuple)) else value


def _forwarded(name: str) -> Any:
    def call(self: HostGroup, *arguments: Any, **options: Any) -> Work:
        return getattr(self._gloo, name)(*map(on_host, arguments), **options)

    return call


class HostGroup(dist.ProcessGroup):
    """Collectives of fully_shard, tensor parallelism and the job."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any):
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        for device in ("cpu", "cuda"):
            self._register_backend(torch.device(device), dist.ProcessGroup.BackendType.GLOO, self._gloo)
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    allreduce = _forwarded("allreduce")
    broadcast = _forwarded("broadcast")
    allgather = _forwarded("allgather")
    _allgather_base = _forwarded("_allgather_base")
    _reduce_scatter_base = _forwarded("_reduce_scatter_base")
    all_gather_single = _forwarded("_allgather_base")  # the names of torch 2.13
    reduce_scatter_single = _forwarded("_reduce_scatter_base")
    allgather_into_tensor_coalesced = _forwarded("allgather_into_tensor_coalesced")
    reduce_scatter_tensor_coalesced = _forwarded("reduce_scatter_tensor_coalesced")
    alltoall_base = _forwarded("alltoall_base")
    gather = _forwarded("gather")
    scatter = _forwarded("scatter")
    send = _forwarded("send")
    recv = _forwarded("recv")
    barrier = _forwarded("barrier")


def register() -> None:
    dist.Backend.register_backend(NAME, HostGroup, devices=["cuda"])
