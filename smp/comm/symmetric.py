"""Memory of the GPUs of one host that every rank's GPU can read: torch's symmetric memory.

torch finds the ranks through a registered process group, and numbers its messages in that group's store with a counter
of the process. Ranks that are in unequal numbers of groups count differently and then wait for each other for ever. So
a group registers a plain process group for this alone, with a store that counts from 0 at every rendezvous.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import ProcessGroup

from smp.comm.buffer_pool import BufferPool
from smp.comm.settings import Settings
from smp.comm.topology import gather
from smp.errors import first_line

_PAGE = 4096
_torch: Any = getattr(_distributed_c10d, "_SymmetricMemory", None)
_names = itertools.count()


class RankInfo(NamedTuple):
    """A rank as the others need to know it: its GPU (a UUID), its settings, and its problem, if there is one."""

    gpu: str
    settings: list[int]
    problem: str


def rank_info(device: torch.device, settings: Settings) -> RankInfo:
    """Return this rank's info."""
    own = [settings.workspace, settings.gpu_minimum, settings.gpu_shared]
    backend = _torch.get_backend(device) if hasattr(_torch, "get_backend") else None
    if not settings.workspace:
        problem = "SMP_SYMMETRIC_WORKSPACE_BYTES is 0"
    elif backend != "CUDA":
        problem = f"torch's symmetric memory is set to {backend}" if backend else "torch has no symmetric memory"
    else:
        return RankInfo(str(torch.cuda.get_device_properties(device).uuid), own, "")
    return RankInfo("", own, problem)


def obstacle(
    infos: Sequence[RankInfo],
    rank: int,
    ranks: Sequence[int],
    visible: Mapping[str, int],
    access: Callable[[int, int], bool],
) -> str:
    """Return why a rank's GPU cannot read the others', or an empty string.

    Args:
        infos: of all ranks of the group.
        rank: the rank, in the group.
        ranks: the job's rank of each.
        visible: the index in this process of each GPU that it sees, by UUID.
        access: whether the GPU of the first index can read the second's memory.
    """
    problem = next((p.problem for p in infos if p.problem), "")
    if problem:
        return problem
    if any(p.settings != infos[0].settings for p in infos):
        return "the ranks' SMP_SYMMETRIC_ or SMDDP_ settings differ"
    own = infos[rank].gpu
    for other, their in zip(ranks, infos, strict=True):
        if their.gpu == own:
            continue  # torch's rendezvous decides whether ranks may share a GPU
        if their.gpu not in visible:
            return f"the GPU of rank {other} is hidden from rank {ranks[rank]}"
        if not access(visible[own], visible[their.gpu]):
            return f"no peer access between the GPUs of ranks {ranks[rank]} and {other}"
    return ""


def _visible() -> dict[str, int]:
    return {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}


def neighbours_obstacle(size: int) -> str:
    """Return why the GPUs of each ``size`` neighbouring ranks cannot read each other's memory, or an empty string.

    Collective over all ranks, which get the same answer.
    """
    rank, everyone = dist.get_rank(), [None] * dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device())
    dist.all_gather_object(everyone, rank_info(device, Settings()))
    first = rank - rank % size
    infos: Any = everyone[first : first + size]
    own = obstacle(infos, rank - first, range(first, first + size), _visible(), torch.cuda.can_device_access_peer)
    dist.all_gather_object(everyone, own)
    return next(filter(None, everyone), "")


class _CountingAnew(dist.Store):
    """A store for torch's rendezvous: the numbers in its keys are counted from 0 since :meth:`begin`."""

    def __init__(self, store: dist.Store, timeout: timedelta):
        super().__init__()
        self._store, self._timeout = store, timeout
        self._turn, self._first = 0, -1

    def begin(self) -> None:
        self._turn, self._first = self._turn + 1, -1

    def _key(self, key: str) -> str:
        found = re.fullmatch(r"([^/]*/)(\d+)(.*)", key)
        if found is None:
            return f"{self._turn}/{key}"
        if self._first < 0:
            self._first = int(found[2])
        return f"{self._turn}/{found[1]}{int(found[2]) - self._first}{found[3]}"

    def set(self, key: str, value: Any) -> None:
        self._store.set(self._key(key), value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(self._key(key))

    def add(self, key: str, value: int) -> int:
        return self._store.add(self._key(key), value)

    def check(self, keys: list[str]) -> bool:
        return self._store.check([self._key(key) for key in keys])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._store.wait([self._key(key) for key in keys], self._timeout)


class Block:
    """Symmetric memory: as many bytes on every rank's GPU.

    Args:
        memory: this rank's bytes, which live as long as the block.
        handle: torch's view of everyone's.
    """

    def __init__(self, memory: torch.Tensor, handle: Any):
        self.memory, self._handle = memory, handle
        self.address, self.nbytes = memory.data_ptr(), memory.numel()
        self.stream: Any = None  # that last used it as a leased buffer

    def part(self, rank: int, start: int, nbytes: int) -> torch.Tensor:
        """Return bytes of one rank as a tensor on this rank's GPU, which does not keep the block alive."""
        return self._handle.get_buffer(rank, (nbytes,), torch.uint8, start)

    def barrier(self, timeout: float) -> None:
        """Let the current stream wait until every rank's has come here; after ``timeout`` seconds the GPU raises."""
        self._handle.barrier(0, int(timeout * 1000))


class Memory:
    """The allocator of a group's blocks.

    Every rank must make the same calls in the same order, and all get the same answer.

    Args:
        store: of the group; keys under ``gpu`` are used.
        rank: this rank in the group.
        ranks: the job's rank of each.
        gloo: the group's gloo backend: torch names a group by its backend.
    """

    def __init__(
        self, store: dist.Store, rank: int, ranks: Sequence[int], device: torch.device, *, gloo: Any, timeout: timedelta
    ):
        self._plain_store = dist.PrefixStore("gpu", store)
        self._rank, self._ranks, self._device, self._timeout = rank, ranks, device, timeout
        self._turns = itertools.count()
        # The ranks begin a rendezvous together; if one fails in it, the others must say so while it waits for them.
        patience = min(timeout / 2, timedelta(minutes=1))
        self._store = _CountingAnew(dist.PrefixStore("rendezvous", self._plain_store), patience)
        self._group = ProcessGroup(self._store, rank, len(ranks))
        self._group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
        self._name = dist.distributed_c10d.GroupName(f"smddp-gpu-{next(_names)}")
        # The registry does not keep the group alive; this object does.
        _distributed_c10d._register_process_group(self._name, self._group)
        weakref.finalize(self, _distributed_c10d._unregister_process_group, self._name)

    def obstacle(self, settings: Settings) -> str:
        """Return why the group cannot have any, or an empty string."""
        values = self._gather(json.dumps(rank_info(self._device, settings)))
        infos = [RankInfo(*json.loads(value)) for value in values]
        access = torch.cuda.can_device_access_peer
        return self._agree(obstacle(infos, self._rank, self._ranks, _visible(), access))

    def allocate(self, nbytes: int) -> tuple[Block | None, str]:
        """Make a block, or return None and the reason.

        Raises:
            torch.distributed.DistBackendError: a rank did not come in time; the message names it.
        """
        memory, handle, problem = None, None, ""
        try:
            memory = _torch.empty_strided_p2p((nbytes,), (1,), torch.uint8, self._device)
            torch.cuda.synchronize(self._device)  # its signals are zeroed before anybody sees them
        except RuntimeError as error:
            problem = first_line(error)
        if problem := self._agree(problem):
            return None, problem
        assert memory is not None
        self._store.begin()
        try:
            handle = _torch.rendezvous(memory, self._name)
        except RuntimeError as error:
            problem = first_line(error)
        problem = self._agree(problem)
        return (None, problem) if problem else (Block(memory, handle), "")

    def _agree(self, problem: str) -> str:
        return next((answer for answer in self._gather(problem) if answer), "")

    def _gather(self, text: str) -> list[str]:
        what = "come to the set-up of GPU memory"
        turn = f"{next(self._turns)}/"
        return gather(self._plain_store, turn, text, self._rank, self._ranks, self._timeout, what)


class _Lease:
    """The hold on a leased buffer."""

    def __init__(self, hold: object, block: Block, nbytes: int):
        self._hold, self._block = hold, block
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (block.address, False), "version": 2,
        }  # fmt: skip


def _tensor(lease: _Lease, device: torch.device) -> torch.Tensor:
    """Return the bytes of a lease as a tensor whose storage keeps the lease alive."""
    return torch.as_tensor(lease, device=device)


class SymmetricBuffers:
    """Buffers in symmetric memory, the same ones on every rank: the pool decides which.

    A rank's buffer is written by that rank alone, so the order of its streams is enough for using one again.
    """

    def __init__(self, pool: BufferPool, memory: Memory, seconds: Callable[[], float], poison: bool):
        self._pool, self._memory, self._seconds, self._poison = pool, memory, seconds, poison
        self._blocks: dict[int, Block | None] = {}  # by the pool's offset
        self._by_address: dict[int, Block] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's GPU that the buffers take."""
        return sum(block.nbytes for block in self._by_address.values())

    def lease(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Return a 1-D buffer for the current stream; None if the limit or the GPU's memory is reached.

        It is given back when its last tensor is gone, and the next user's stream then waits for this one.
        """
        nbytes = numel * dtype.itemsize
        hold = self._pool.lease(nbytes, self._seconds()) if nbytes else None
        if hold is None:
            return None
        offset = ctypes.addressof(hold) - self._pool.segment.address  # type: ignore[arg-type] # a ctypes array
        if offset not in self._blocks:
            block, _ = self._memory.allocate(-(-nbytes // _PAGE) * _PAGE)
            self._blocks[offset] = block
            if block is not None:
                self._by_address[block.address] = block
        block = self._blocks[offset]
        if block is None:
            return None
        current = torch.cuda.current_stream(block.memory.device)
        if block.stream is not None and block.stream != current:
            current.wait_stream(block.stream)
        block.stream = current
        if self._poison:
            with torch.inference_mode():  # the block may have been made in it
                block.memory[:nbytes].fill_(0xFF)
        return _tensor(_Lease(hold, block, nbytes), block.memory.device).view(dtype)

    def find(self, tensor: torch.Tensor) -> Block | None:
        """Return the block at whose beginning a contiguous tensor lies, or None."""
        return self._by_address.get(tensor.data_ptr())
