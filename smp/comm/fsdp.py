"""Zero-copy collectives for ``fully_shard``: buffers in memory that the ranks of a host share.

``fully_shard`` copies its shard into a gathered buffer and its gradients into a reduce-scatter input anyway. Where
these buffers are shared, AllGather inside a host is one round of waiting, and ReduceScatter reads the peers' gradients
where they are. Installed with torch's ``set_custom_all_gather`` and ``set_custom_reduce_scatter``; the classes have
the two methods of torch's private interfaces ``AllGather`` and ``ReduceScatter``.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from smp.comm.buffer_pool import BufferPool, control_bytes, tensor
from smp.comm.connect import Collectives
from smp.comm.cuda import all_gather_single, reduce_scatter_single
from smp.comm.group import SmddpGroup, either
from smp.comm.intra_host import HostCollectives
from smp.comm.reduction import Reduction, reduction_name, supported

PATH = "shared buffer"

_pools: weakref.WeakKeyDictionary[SmddpGroup, _Pool] = weakref.WeakKeyDictionary()


class _Pool:
    """A group's shared buffers, and which of them are out."""

    def __init__(self, group: SmddpGroup):
        connection = group.connect()
        self.peers, self.seconds = connection.peers, group.seconds
        self.one_host = len(connection.topology.hosts) == 1
        limit = connection.settings.shared
        self.buffers: BufferPool | None = None
        if self.peers.size > 1 and connection.collectives is not None and limit:
            segment, _ = connection.share("buffers", control_bytes(self.peers.size) + limit, group.seconds)
            if segment is not None:
                self.buffers = BufferPool(segment, self.peers, poison=connection.settings.poison)

    def allocate(self, size: Sequence[int], dtype: torch.dtype, *, shared: int) -> torch.Tensor:
        """Return this rank's part of a buffer of ``shared`` times the bytes asked for; 1: all ranks get the whole."""
        numel = math.prod(int(s) for s in size)
        part = numel * dtype.itemsize
        lease = self.buffers.lease(part * shared, self.seconds) if self.buffers is not None else None
        if lease is None:
            return torch.empty(numel, dtype=dtype)
        full = tensor(lease, numel * shared, dtype)
        return full if shared == 1 else full[self.peers.local * numel :][:numel]

    def offset(self, buffer: torch.Tensor) -> int | None:
        """Return the offset of a tensor in the shared memory, or None if it is elsewhere."""
        if self.buffers is None:
            return None
        offset = buffer.data_ptr() - self.buffers.segment.address
        return offset if 0 <= offset < self.buffers.segment.size else None


def _pool(group: SmddpGroup) -> _Pool:
    if group not in _pools:
        _pools[group] = _Pool(group)
    return _pools[group]


def _allocate(group: SmddpGroup, size: Sequence[int], dtype: torch.dtype, *, shared: int) -> torch.Tensor:
    with group.failing():
        return _pool(group).allocate(size, dtype, shared=shared)


class SharedAllGather:
    """AllGather into memory that the host's ranks share.

    Args:
        group: the sharding group, of backend ``smddp``.
    """

    def __init__(self, group: SmddpGroup):
        self._group = group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return the gathered buffer, 1-D: the same memory on every rank of the host, or private above the limit."""
        return _allocate(self._group, size, dtype, shared=1)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather.

        Args:
            output_tensor: from :meth:`allocate`, its slice of this rank filled.
            input_tensor: that slice.

        Raises:
            torch.distributed.DistBackendError: the ranks ask for different things, or a peer is gone.
        """
        offset = _pool(self._group).offset(output_tensor)
        if offset is None:
            return all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)
        part = input_tensor.numel() * input_tensor.element_size()
        address = output_tensor.data_ptr()
        inner = either(self._group._plain, "all_gather_single", "_allgather_base")

        def run(collectives: Collectives, signature: bytes) -> None:
            collectives.gather_shared(signature, address, part)

        key = ("all_gather", input_tensor.dtype, input_tensor.numel(), "@", offset)
        work = self._group.launch(
            "all_gather", part, key, run, lambda: inner(output_tensor, input_tensor), tensors=[output_tensor],
            async_op=async_op, path=PATH,
        )  # fmt: skip
        return work if async_op else None


class SharedReduceScatter:
    """ReduceScatter that reads the peers' inputs where they are.

    Args:
        group: the sharding group, of backend ``smddp``.
    """

    def __init__(self, group: SmddpGroup):
        self._group = group
        self._input_next = True

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Alternately the input, in shared memory, and the output, in private memory: it becomes the gradients."""
        pool = _pool(self._group)
        shared, self._input_next = self._input_next and pool.one_host, not self._input_next
        if not shared:
            return torch.empty(*size, dtype=dtype, device=device)
        return _allocate(self._group, size, dtype, shared=pool.peers.size)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce.

        Args:
            output_tensor: 1-D, this rank's part.
            input_tensor: 1-D, ``group.size()`` times as long.

        Raises:
            torch.distributed.DistBackendError: the ranks ask for different things, or a peer is gone.
        """
        pool, name = _pool(self._group), reduction_name(op)
        offset = pool.offset(input_tensor)
        if offset is None or not supported(name, input_tensor.dtype):
            return reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        size, rank, numel = pool.peers.size, pool.peers.local, input_tensor.numel()
        itemsize = input_tensor.element_size()
        base = offset - rank * numel * itemsize  # of the first rank's input
        assert pool.buffers is not None
        memory = pool.buffers.segment.map
        inner = either(self._group._plain, "reduce_scatter_single", "_reduce_scatter_base")

        def run(collectives: Collectives, signature: bytes) -> None:
            assert isinstance(collectives, HostCollectives)
            part = output_tensor.numel()
            starts = [base + (r * numel + rank * part) * itemsize for r in range(size)]
            parts = [torch.frombuffer(memory, dtype=input_tensor.dtype, count=part, offset=s) for s in starts]
            reduction = Reduction(name, size)
            collectives.reduce_in_place(signature, parts, output_tensor, reduction)
            reduction.finish(output_tensor)

        key = ("reduce_scatter", name, input_tensor.dtype, numel, "of shared memory at", base)
        work = self._group.launch(
            "reduce_scatter", output_tensor.numel() * itemsize, key, run,
            lambda: inner(output_tensor, input_tensor), tensors=[output_tensor], async_op=async_op, path=PATH,
        )  # fmt: skip
        return work if async_op else None


def install(module: FSDPModule, group: dist.ProcessGroup) -> bool:
    """Use shared buffers for one sharded module.

    Args:
        module: a module that ``fully_shard`` was applied to, on the CPU.
        group: the group its parameters are sharded over.

    Returns:
        Whether they are used: not if ``group`` is of another backend, or of one rank.
    """
    if not isinstance(group, SmddpGroup) or group.size() == 1:
        return False
    module.set_custom_all_gather(SharedAllGather(group))  # type: ignore[arg-type] # the interface is private
    module.set_custom_reduce_scatter(SharedReduceScatter(group))  # type: ignore[arg-type]
    return True


def use_shared_buffers(model: nn.Module, group: dist.ProcessGroup | None = None) -> int:
    """Use shared buffers for every module of a model that ``fully_shard`` was applied to.

    Args:
        model: on the CPU; modules that are not sharded are left alone.
        group: what its parameters are sharded over, such as ``mesh.get_group("dp_shard")``; default: all ranks.

    Returns:
        How many modules use them: 0 if ``group`` is of another backend, or of one rank.
    """
    group = group or dist.group.WORLD
    assert group is not None
    return sum(install(module, group) for module in model.modules() if isinstance(module, FSDPModule))
