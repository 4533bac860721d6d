"""AllGather inside a host by the GPUs' copy engines, where that is better than NCCL.

Copies between GPUs are done by copy engines: no multiprocessor is taken from concurrent matrix products, but for
one block of the barrier and, if the input does not lie in symmetric memory already, one local copy. Work is put on the
current stream, as NCCL's synchronous calls are. Callers in C++ (functional collectives, compiled graphs) are served by
NCCL.

A rank that dies or stays away leaves the others' GPUs in a barrier; after the group's timeout the barrier ends their
processes with a CUDA error, and prints which rank did not come.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work
from torch.distributed import _symmetric_memory
from torch.distributed.fsdp import FSDPModule

from smp.comm.buffer_pool import BufferPool, control_bytes
from smp.comm.connect import Connection
from smp.comm.copy_engine import CopyEngine
from smp.comm.symmetric import Memory, SymmetricBuffers
from smp.comm.tensors import Output, flat, nbytes, overlap
from smp.comm.work_queue import DONE, GpuWork
from smp.errors import first_line

PATH = "symmetric memory"
SEVERAL_HOSTS = "several hosts"
# The second names are those before torch 2.13.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def batch_isend_irecv(operations: Sequence[dist.P2POp]) -> list[Work]:
    """Send and receive as one batch over NCCL, also inside a group of ``smddp``.

    torch's function does so only for groups of exactly its class. Over another it calls one after the other, so that
    every rank's NCCL first sends, to ranks that do not receive yet: a hang above the size of its buffers.
    """
    group: Any = operations[0].group or dist.group.WORLD
    device = operations[0].tensor.device
    if type(group) is dist.ProcessGroup or not group._get_backend(device).supports_coalescing:
        return dist.batch_isend_irecv(list(operations))
    with dist._coalescing_manager(group, device, async_ops=True) as batch:
        for each in operations:
            peer = {"group_dst" if each.op is dist.isend else "group_src": each.group_peer}
            each.op(each.tensor, group=group, **peer)
    return batch.works


class GpuCollectives:
    """A group's collectives of tensors on GPUs. Making it and its buffers is collective.

    Args:
        rank: this rank in the group.
        seconds: the group's timeout.

    Attributes:
        unavailable: why NCCL does everything, or nothing.
        buffers: for ``fully_shard``, once :meth:`share_buffers` has made them.
    """

    def __init__(
        self, connection: Connection, rank: int, device: torch.device, *, gloo: Any, seconds: Callable[[], float]
    ):
        self.device, self.settings = device, connection.settings
        self.buffers: SymmetricBuffers | None = None
        self._connection, self._rank, self._seconds = connection, rank, seconds
        self._size = len(connection.topology.members)
        self._memory: Memory | None = None
        self._turn = threading.Lock()
        self._last = torch.cuda.Event()  # after the latest collective, on whatever stream it was
        self._side: torch.cuda.Stream | None = None
        self.unavailable = "one rank" if self._size == 1 else ""
        if len(connection.topology.hosts) > 1:
            self.unavailable = SEVERAL_HOSTS
        if self.unavailable:
            return
        ranks, timeout = connection.peers.ranks, timedelta(seconds=seconds())
        self._memory = Memory(connection.store, rank, ranks, device, gloo=gloo, timeout=timeout)
        self.unavailable = self._memory.obstacle(self.settings)
        if not self.unavailable:
            workspace, self.unavailable = self._memory.allocate(self.settings.workspace)
            if workspace is not None:
                self._engine = CopyEngine(workspace, rank, self._size, seconds)

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's GPU in the workspace and the buffers, which torch's statistics do not show."""
        workspace = 0 if self.unavailable else self.settings.workspace
        return workspace + (0 if self.buffers is None else self.buffers.nbytes)

    def why_not(self, tensor: torch.Tensor, *, coalescing: bool) -> str:
        """Return why NCCL gathers better, or an empty string: the same on all ranks.

        Args:
            tensor: one rank's part.
            coalescing: whether the call is one of a batch that NCCL starts and ends.
        """
        if self.unavailable:
            return self.unavailable
        if tensor.device != self.device:
            return f"not on {self.device}, the group's first GPU"
        if coalescing:
            return "in a coalesced batch"
        if torch.cuda.is_current_stream_capturing():  # the copies wait for other streams
            return "in a graph capture"
        return "too small" if nbytes(tensor) < self.settings.gpu_minimum else ""

    def all_gather(self, output: torch.Tensor, source: torch.Tensor, *, async_op: bool) -> Work:
        """Gather ``source`` of all ranks into ``output``, on the current stream, or asynchronously on a side stream.

        The collectives of a group follow each other on all streams: they share the workspace and its signals.
        """
        with self._turn:
            stream = current = torch.cuda.current_stream(self.device)
            if async_op:
                stream = self._side = self._side or torch.cuda.Stream(self.device)
                stream.wait_stream(current)
            # In inference mode all tensors can be written, made in it or not.
            with torch.cuda.stream(stream), torch.inference_mode():
                stream.wait_event(self._last)
                self._gather(output, source)
                self._last.record(stream)
            if not async_op:
                return DONE
            output.record_stream(stream)
            source.record_stream(stream)
            return GpuWork(stream, (output,))

    def _gather(self, output: torch.Tensor, source: torch.Tensor) -> None:
        out, part = Output(output, keep=False), flat(source)
        if overlap(part, out.memory) and part.data_ptr() != out.memory.data_ptr() + self._rank * nbytes(part):
            part = part.clone()
        block = self.buffers.find(out.memory) if self.buffers is not None else None
        self._engine.all_gather(out.flat.view(torch.uint8), part.view(torch.uint8), block)
        out.finish()

    def share_buffers(self) -> str:
        """Make buffers for ``fully_shard`` available; return why not, or an empty string."""
        if self.unavailable or self.buffers is not None:
            return self.unavailable
        limit, peers = self.settings.gpu_shared, self._connection.peers
        if not limit:
            return "SMDDP_AG_SORT_BUFFER_SIZE_BYTES is 0"
        # Only its beginning is ever touched: it is where the ranks agree which buffer is next.
        segment, why = self._connection.share("gpu-buffers", control_bytes(peers.size) + limit, self._seconds())
        if segment is None:
            return why
        assert self._memory is not None
        self.buffers = SymmetricBuffers(BufferPool(segment, peers), self._memory, self._seconds, self.settings.poison)
        return ""


class SymmetricAllGather:
    """AllGather for ``fully_shard`` without a local copy: its output is in symmetric memory, the input its slice.

    Args:
        group: the sharding group, of backend ``smddp``.
    """

    def __init__(self, group: Any):
        self._group = group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return the gathered buffer, 1-D."""
        buffers, leased = self._group.gpu(device).buffers, None
        if buffers is not None:
            with self._group.failing():
                leased = buffers.lease(math.prod(size), dtype)
        return torch.empty(*size, dtype=dtype, device=device) if leased is None else leased

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Work | None:
        """Gather; the arguments are those of ``all_gather_single``."""
        return all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


def zero_copy_available(group: dist.ProcessGroup) -> str | None:
    """Return why ``fully_shard`` cannot gather into symmetric memory over a group, or None if it can.

    Collective over the group: the first call makes the memory.

    Raises:
        torch.distributed.DistBackendError: a rank did not come in time.
    """
    if not hasattr(group, "gpu"):
        return f"backend {dist.get_backend(group)}"
    if not torch.cuda.is_available():
        return "no CUDA device"
    return group.gpu(torch.device("cuda", torch.cuda.current_device())).share_buffers() or None


def install(module: FSDPModule, group: dist.ProcessGroup) -> str | None:
    """Let one sharded module gather by copy engine; over several hosts, NCCL from its own symmetric memory.

    Collective over the group.

    Args:
        module: a module that ``fully_shard`` was applied to, on GPUs.
        group: the group its parameters are sharded over.

    Returns:
        Why the module keeps torch's ordinary collectives, or None if it does not.

    Raises:
        torch.distributed.DistBackendError: a rank did not come in time.
    """
    reason = zero_copy_available(group)
    if reason is None:
        module.set_custom_all_gather(SymmetricAllGather(group))  # type: ignore[arg-type] # the interface is private
    elif reason == SEVERAL_HOSTS and hasattr(module, "set_symm_mem_for_comm"):  # torch 2.13
        try:
            _symmetric_memory.set_backend("NCCL")
        except RuntimeError as error:  # torch was built without it, or another group of the process uses the other kind
            return f"{reason}, and {first_line(error)}"
        # The memory is registered with NCCL's communicator, which the group's first collective makes.
        dist.all_reduce(torch.zeros(1, device=torch.device("cuda", torch.cuda.current_device())), group=group)
        module.set_symm_mem_for_comm("NCCL")
        reason = None
    return reason
