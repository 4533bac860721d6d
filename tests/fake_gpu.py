"""GPUs and torch's symmetric memory, played by the CPU: what is copied and in what order is real, streams are not.

For ranks that are processes, see :func:`gpus`.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import numpy
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group

from smp.comm import group as smddp_group
from smp.comm import symmetric


class FakeStream:
    """A stream that logs what it waits for."""

    device = torch.device("cuda", 0)

    def __init__(self, name: str, log: list):
        self.name, self._log = name, log

    def wait_stream(self, other):
        self._log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        self._log.append(f"{self.name} waits for {event.name}")

    def record_event(self):
        return SimpleNamespace(name=f"work on {self.name}", query=lambda: False)


def host_tensor(lease, device) -> torch.Tensor:
    """A lease's bytes as a CPU tensor, whose storage keeps the lease alive, as torch's do over a GPU's."""
    interface = lease.__cuda_array_interface__ | {"version": 3}
    return torch.from_numpy(numpy.asarray(SimpleNamespace(__array_interface__=interface, lease=lease)))


def map_memory(descriptor: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED), dtype=torch.uint8)


class FakeTorch:
    """``_SymmetricMemory`` between processes; like torch 2.13's it numbers its exchanges by a counter of the process.

    Args:
        first: where this process's counter is.
        fails: ``memory`` or ``rendezvous``: what does not work on this rank.
    """

    def __init__(self, first: int = 0, fails: str = ""):
        self._numbers, self._fails = itertools.count(first), fails
        self._descriptors: dict[int, int] = {}

    def get_backend(self, device):
        return "CUDA"

    def empty_strided_p2p(self, size, stride, dtype, device):
        assert (len(size), stride, dtype) == (1, (1,), torch.uint8)
        if self._fails == "memory":
            raise RuntimeError("out of memory\nand much more")
        descriptor = os.memfd_create("fake")
        os.ftruncate(descriptor, size[0])
        memory = map_memory(descriptor, size[0])
        self._descriptors[memory.data_ptr()] = descriptor
        return memory

    def rendezvous(self, memory, name):
        group = _resolve_process_group(name)
        assert group.group_name is not None  # torch's barrier asks for it
        # A prefix store calls set and get as the C++ code does.
        store = dist.PrefixStore(f"CUDASymmetricMemory/{next(self._numbers)}", group.get_group_store())
        store.set(str(group.rank()), f"{os.getpid()} {self._descriptors[memory.data_ptr()]}")
        if self._fails == "rendezvous":
            raise RuntimeError("cannot import")
        memories = []
        for rank in range(group.size()):
            pid, descriptor = store.get(str(rank)).decode().split()
            opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR)
            memories.append(map_memory(opened, len(memory)))
            os.close(opened)
        all_are_here = f"CUDASymmetricMemory/{next(self._numbers)}"
        group.get_group_store().set(f"{all_are_here}/{group.rank()}", "1")
        group.get_group_store().wait([f"{all_are_here}/{rank}" for rank in range(group.size())])
        return FakeHandle(memories, lambda: group._get_backend(torch.device("cpu")).barrier().wait())


class FakeHandle:
    """torch's view of everyone's memory."""

    def __init__(self, memories, meet):
        self._memories, self._meet = memories, meet

    def get_buffer(self, rank, sizes, dtype, storage_offset=0):
        assert dtype == torch.uint8
        part = self._memories[rank][storage_offset : storage_offset + sizes[0]]
        assert len(part) == sizes[0], "out of bounds"
        return part

    def barrier(self, channel, timeout_ms):
        assert channel == 0 and timeout_ms >= 1000
        self._meet()


@contextlib.contextmanager
def gpus(first: int = 0) -> Iterator[list[str]]:
    """In a process of a group of backend ``smddp``: CPU tensors of collectives that have a GPU path take it.

    Args:
        first: where this process's counter of exchanges begins.

    Yields:
        What streams have waited for.
    """
    log: list[str] = []
    stream = FakeStream("main", log)
    uuid = SimpleNamespace(uuid=f"GPU-{dist.get_rank()}")
    with contextlib.ExitStack() as stack:
        for name, value in {
            "torch.cuda.Event": lambda: SimpleNamespace(name="the last", record=lambda stream: None),
            "torch.cuda.Stream": lambda device: FakeStream("side", log),
            "torch.cuda.current_stream": lambda device=None: stream,
            "torch.cuda.stream": mock.MagicMock(),
            "torch.cuda.synchronize": lambda device: None,
            "torch.cuda.is_current_stream_capturing": lambda: False,
            "torch.cuda.get_device_properties": lambda index: uuid if index == torch.device("cpu") else _other(index),
            "torch.cuda.device_count": dist.get_world_size,
            "torch.cuda.can_device_access_peer": lambda one, other: one != other,
        }.items():
            stack.enter_context(mock.patch(name, value))
        stack.enter_context(mock.patch.object(symmetric, "_torch", FakeTorch(first)))
        stack.enter_context(mock.patch.object(symmetric, "_tensor", host_tensor))
        stack.enter_context(mock.patch.object(smddp_group, "plain_gpu", lambda tensors: True))
        stack.enter_context(mock.patch.object(smddp_group, "plain_cpu", lambda tensors: False))
        stack.enter_context(mock.patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None))
        yield log


def _other(index: int) -> SimpleNamespace:
    return SimpleNamespace(uuid=f"GPU-{index}")
