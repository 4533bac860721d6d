"""What of the GPU path needs no GPU: choices, reasons, the order of copies, barriers and streams."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from functools import partial
from types import SimpleNamespace
from typing import ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import BarrierOptions

from smp.comm import cuda, symmetric
from smp.comm.copy_engine import CopyEngine
from smp.comm.cuda import GpuCollectives, SymmetricAllGather, install, zero_copy_available
from smp.comm.settings import Settings, read_settings
from smp.comm.symmetric import Block, RankInfo, obstacle
from smp.comm.work_queue import DONE, GpuWork
from smp.errors import UserError
from tests.clock import HANG_SECONDS
from tests.distributed import run_distributed
from tests.fake_gpu import FakeHandle, FakeStream

HALF = 4096
SIZES = [0, 1, 63, 1024, 1025, 5000]


# --- choices and reasons


@pytest.mark.parametrize(
    ("size", "changes", "expected"),
    [
        (2**20, {}, ""),
        (2**20 - 1, {}, "too small"),
        (2**20, {"capturing": True}, "in a graph capture"),
        (2**20, {"coalescing": True}, "in a coalesced batch"),
        (0, {"gpu_minimum": 0}, ""),
    ],
)
def test_choice(size, changes, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: changes.get("capturing", False))
    settings = dataclasses.replace(Settings(), **{k: v for k, v in changes.items() if k.startswith("gpu")})
    part = torch.empty(size, dtype=torch.uint8, device="meta")
    gpu = SimpleNamespace(unavailable="", device=part.device, settings=settings)
    coalescing = changes.get("coalescing", False)
    assert GpuCollectives.why_not(gpu, part, coalescing=coalescing) == expected


@pytest.mark.parametrize(
    ("places", "visible", "denied", "expected"),
    [
        ("abc", "abc", [], ""),
        ("aaa", "a", [], ""),  # one GPU for all: for torch to refuse
        ("abc", "ab", [], "the GPU of rank 30 is hidden from rank 10"),
        ("abc", "abc", [(0, 2)], "no peer access between the GPUs of ranks 10 and 30"),
        ("abc", "abc", [(1, 2)], ""),  # another rank's to say
    ],
)
def test_obstacles(places, visible, denied, expected):
    members = [RankInfo(gpu, [1], "") for gpu in places]
    indices = {gpu: index for index, gpu in enumerate(visible)}
    assert obstacle(members, 0, [10, 20, 30], indices, lambda a, b: (a, b) not in denied) == expected


def test_obstacles_that_all_ranks_see():
    def check(*places):
        return {obstacle(places, rank, [0, 1], {"a": 0, "b": 1}, lambda a, b: True) for rank in range(2)}

    assert check(RankInfo("a", [1], ""), RankInfo("", [1], "no way")) == {"no way"}
    assert check(RankInfo("a", [1], ""), RankInfo("b", [2], "")) == {
        "the ranks' SMP_SYMMETRIC_ or SMDDP_ settings differ"
    }


def _neighbours():
    rank, denied = dist.get_rank(), set()
    uuids = {0: SimpleNamespace(uuid="GPU-0"), 1: SimpleNamespace(uuid="GPU-1")}
    uuids[torch.device("cuda", rank % 2)] = uuids[rank % 2]
    with (
        mock.patch.multiple(
            torch.cuda,
            current_device=lambda: rank % 2,
            device_count=lambda: 2,
            get_device_properties=uuids.__getitem__,
            can_device_access_peer=lambda one, other: (rank, one, other) not in denied,
        ),
        mock.patch.object(symmetric, "_torch", SimpleNamespace(get_backend=lambda device: "CUDA")),
    ):
        assert symmetric.neighbours_obstacle(2) == ""  # two hosts of two
        denied.add((3, 1, 0))
        assert symmetric.neighbours_obstacle(2) == "no peer access between the GPUs of ranks 3 and 2"
        uuids[torch.device("cuda", rank % 2)] = SimpleNamespace(uuid=f"{rank}")
        assert symmetric.neighbours_obstacle(4) == "the GPU of rank 1 is hidden from rank 0"


def test_all_ranks_hear_of_a_neighbour_that_cannot_be_read():
    run_distributed(_neighbours, world_size=4)


def test_a_place_says_what_stands_in_the_way(monkeypatch):
    device = torch.device("cuda", 0)
    assert symmetric.rank_info(device, Settings(workspace=0)).problem == "SMP_SYMMETRIC_WORKSPACE_BYTES is 0"
    for backend, problem in [
        ("NCCL", "torch's symmetric memory is set to NCCL"),
        (None, "torch has no symmetric memory"),
    ]:
        monkeypatch.setattr(symmetric, "_torch", SimpleNamespace(get_backend=lambda device, backend=backend: backend))
        assert symmetric.rank_info(device, Settings()).problem == problem
    monkeypatch.setattr(symmetric, "_torch", None)
    assert symmetric.rank_info(device, Settings()).problem == "torch has no symmetric memory"
    monkeypatch.setattr(symmetric, "_torch", SimpleNamespace(get_backend=lambda device: "CUDA"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-7"))
    assert symmetric.rank_info(device, Settings()) == RankInfo("GPU-7", [32 * 2**20, 2**20, 8 * 2**30], "")


def test_knobs(monkeypatch):
    for name, value in [("WORKSPACE_BYTES", 2**20), ("MINIMUM_BYTES", 5), ("REDUCE_SCATTER", 0)]:
        monkeypatch.setenv(f"SMP_SYMMETRIC_{name}", str(value))
    settings = read_settings()
    assert (settings.workspace, settings.gpu_minimum) == (2**20, 5)
    assert (settings.shared, settings.gpu_shared) == (64 * 2**30, 8 * 2**30)
    monkeypatch.setenv("SMDDP_AG_SORT_BUFFER_SIZE_BYTES", str(2**33))
    assert read_settings().shared == read_settings().gpu_shared == 2**33
    monkeypatch.setenv("SMP_SYMMETRIC_REDUCE_SCATTER", "1")
    with pytest.raises(UserError, match="no longer supported: NCCL does every reduce_scatter on GPUs"):
        read_settings()


# --- the order of copies and barriers


class World:
    """Ranks that are threads, and what they share. One of them is slow after every barrier."""

    def __init__(self, size: int, slow: int):
        self.size, self.slow, self.barrier = size, slow, threading.Barrier(size)
        self._errors: list[BaseException] = []

    def blocks(self, nbytes: int) -> list[Block]:
        memories = [torch.full((nbytes,), 0xEE, dtype=torch.uint8) for _ in range(self.size)]
        return [Block(memories[r], FakeHandle(memories, partial(self.meet, r))) for r in range(self.size)]

    def meet(self, rank: int) -> None:
        self.barrier.wait(HANG_SECONDS)
        if rank == self.slow:
            time.sleep(0.002)

    def run(self, fn) -> None:
        def main(rank):
            try:
                fn(rank)
            except BaseException as error:
                self._errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=main, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        broken = [e for e in self._errors if not isinstance(e, threading.BrokenBarrierError)]
        if self._errors:
            raise (broken or self._errors)[0]


def values(rank: int, turn: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * turn + rank)
    return (torch.randn(numel, generator=generator) * 8).to(dtype)


WORLDS = [(2, 0), (2, 1), (3, 1), (4, 0), (4, 3)]


@pytest.mark.parametrize(("size", "slow"), WORLDS)
def test_gathers_through_the_workspace(size, slow):
    world = World(size, slow)
    workspace = world.blocks(2 * HALF)

    def rank_main(rank):
        engine = CopyEngine(workspace[rank], rank, size, lambda: 7.5)
        for turn, (numel, dtype) in enumerate(itertools.product(SIZES, [torch.float32, torch.bool, torch.bfloat16])):
            expected = torch.cat([values(r, turn, numel, dtype) for r in range(size)])
            output = torch.empty(size * numel, dtype=dtype)
            source = values(rank, turn, numel, dtype)
            if turn % 2:  # in place
                source = output[rank * numel : (rank + 1) * numel].copy_(source)
            engine.all_gather(output.view(torch.uint8), source.view(torch.uint8), None)
            assert torch.equal(output, expected), (turn, numel, dtype)

    world.run(rank_main)


@pytest.mark.parametrize(("size", "slow"), WORLDS)
def test_gathers_into_a_block(size, slow):
    world = World(size, slow)
    workspace, blocks = world.blocks(2 * HALF), world.blocks(4 * 5000 * size)

    def rank_main(rank):
        engine = CopyEngine(workspace[rank], rank, size, lambda: 7.5)
        for turn, numel in enumerate(SIZES[1:] + SIZES[1:]):
            output = blocks[rank].memory[: 4 * size * numel].view(torch.float32)
            source = output[rank * numel : (rank + 1) * numel]
            source.copy_(values(rank, turn, numel, torch.float32))
            if turn % 3 == 2:
                source = source.clone()
            engine.all_gather(output.view(torch.uint8), source.view(torch.uint8), blocks[rank])
            assert torch.equal(output, torch.cat([values(r, turn, numel, torch.float32) for r in range(size)]))

    world.run(rank_main)


# --- streams


@pytest.fixture
def streams(monkeypatch):
    """``torch.cuda`` with named streams; what they do is logged."""
    log: list[str] = []

    def record(stream):
        log.append(f"{stream.name} records")

    state = SimpleNamespace(log=log, current=FakeStream("main", log))
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(name="the last", record=record))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream("side", log))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: state.current)
    monkeypatch.setattr(torch.cuda, "stream", mock.MagicMock())
    return state


def lone(streams) -> GpuCollectives:
    topology = SimpleNamespace(members=(0,), hosts=((0,),))
    connection = SimpleNamespace(settings=Settings(), topology=topology)
    return GpuCollectives(connection, 0, torch.device("cuda", 0), gloo=None, seconds=lambda: 1.0)


def test_a_synchronous_call_runs_on_the_current_stream(streams):
    gpu = lone(streams)
    assert gpu.unavailable == "one rank"
    gpu._gather = lambda output, source: streams.log.append(torch.is_inference_mode_enabled())
    assert gpu.all_gather(mock.Mock(), mock.Mock(), async_op=False) is DONE
    assert streams.log == ["main waits for the last", True, "main records"]
    torch.cuda.stream.assert_called_once_with(streams.current)


def test_an_asynchronous_call_runs_beside_it(streams):
    gpu, output, source = lone(streams), mock.Mock(), mock.Mock()
    gpu._gather = lambda output, source: streams.log.append("copies")
    work = gpu.all_gather(output, source, async_op=True)
    assert streams.log == ["side waits for main", "side waits for the last", "copies", "side records"]
    assert {tensor.record_stream.call_args.args[0].name for tensor in (output, source)} == {"side"}
    assert isinstance(work, GpuWork) and not work.is_completed() and work.result() == [output]
    streams.current = FakeStream("another", streams.log)
    assert work.wait() and streams.log[-1] == "another waits for work on side"


def on_cpu(streams, rank: int) -> GpuCollectives:
    """Two ranks' collectives, of which the other one is a copy of this one's workspace."""
    gpu = lone(streams)
    memory = torch.zeros(2 * HALF, dtype=torch.uint8)
    block = Block(
        memory, SimpleNamespace(get_buffer=lambda r, sizes, dtype, at: memory[at:][: sizes[0]], barrier=mock.Mock())
    )
    gpu._rank, gpu._size, gpu._engine = rank, 2, CopyEngine(block, rank, 2, lambda: 1.0)
    return gpu


@pytest.mark.parametrize("rank", [0, 1])
def test_tensors_of_any_layout(streams, rank):
    gpu, source = on_cpu(streams, rank), torch.arange(4.0)
    scattered = torch.zeros(8, 2)[:, 0]
    gpu.all_gather(scattered, source, async_op=False)
    assert scattered.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    for start in range(5):  # the input is any part of the output
        output = torch.arange(8.0)
        gpu.all_gather(output, output[start : start + 4], async_op=False)
        assert output.tolist() == [start + i for i in range(4)] * 2


def test_several_hosts_are_left_to_nccl(streams):
    connection = SimpleNamespace(settings=Settings(), topology=SimpleNamespace(members=(0, 1), hosts=((0,), (1,))))
    gpu = GpuCollectives(connection, 0, torch.device("cuda", 0), gloo=None, seconds=lambda: 1.0)
    assert gpu.unavailable == "several hosts" == gpu.share_buffers()


# --- fully_shard


class Module:
    """What ``install`` asks of a module."""

    def __init__(self):
        self.set: list = []

    def set_custom_all_gather(self, comm):
        self.set.append(comm)

    def set_symm_mem_for_comm(self, backend):
        self.set.append(backend)


def _no_gpu():
    reason = "no CUDA device" if dist.get_backend() == "smddp" else f"backend {dist.get_backend()}"
    assert zero_copy_available(dist.group.WORLD) == reason
    module = Module()
    assert install(module, dist.group.WORLD) == reason and not module.set


@pytest.mark.parametrize("backend", ["smddp", "gloo"])
def test_without_a_gpu(backend):
    run_distributed(_no_gpu, world_size=1, backend=backend)


def test_install(monkeypatch):
    gpu = SimpleNamespace(share_buffers=lambda: "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    module = Module()
    assert install(module, SimpleNamespace(gpu=lambda device: gpu)) is None
    assert [type(comm) for comm in module.set] == [SymmetricAllGather]


@pytest.mark.parametrize("error", ["", "no allocation backend NCCL\nmore"])
def test_install_across_hosts(error, monkeypatch):
    gpu = SimpleNamespace(share_buffers=lambda: "several hosts")
    summed = []
    # Of cuda's torch alone: torch keeps the functions that take a device, in every test of the process.
    zeros = lambda *size, device: summed.append(device) or torch.zeros(*size)  # noqa: E731
    monkeypatch.setattr(cuda, "torch", SimpleNamespace(**{**vars(torch), "zeros": zeros}))
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: module.set.append((tensor.tolist(), group)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        cuda._symmetric_memory, "set_backend", mock.Mock(side_effect=RuntimeError(error) if error else None)
    )
    module, group = Module(), SimpleNamespace(gpu=lambda device: gpu)
    if error:
        assert install(module, group) == "several hosts, and no allocation backend NCCL" and not module.set
    else:
        # NCCL's communicator exists before its symmetric memory is set up.
        assert install(module, group) is None and module.set == [([0.0], group), "NCCL"]
        assert summed == [torch.device("cuda", 0)]


class FakeNccl:
    """``ProcessGroupNCCL``, played by gloo; keeps the options that it was made with."""

    made: ClassVar[list] = []

    class Options:
        pass

    def __new__(cls, store, rank, size, options):
        cls.made.append(options)
        return dist.ProcessGroupGloo(store, rank, size, timeout=options._timeout)


def _inner_nccl():
    barriers = []
    with (
        mock.patch.multiple(torch.cuda, is_available=lambda: True, current_device=lambda: 3),
        mock.patch.multiple(dist, is_nccl_available=lambda: True, ProcessGroupNCCL=FakeNccl, create=True),
    ):
        group = dist.new_group([0, 2], backend="smddp")
        if dist.get_rank() == 1:
            return
        (options,) = FakeNccl.made
        assert options.group_name == group.group_name and options.global_ranks_in_group == [0, 2]
        group._plain = SimpleNamespace(barrier=lambda opts: barriers.append(opts.device))
        dist.barrier(group=group)  # torch says cpu where a group serves CPUs too
        given = BarrierOptions()
        given.device = torch.device("cuda", 1)
        group.barrier(given)
    assert barriers == [torch.device("cuda", 3), torch.device("cuda", 1)]


def test_the_inner_nccl_knows_its_group_and_its_device():
    run_distributed(_inner_nccl, world_size=3)


# --- messages between two ranks


class Messages(dist.ProcessGroup):
    """A group of another class than torch's, which writes down what is asked of it."""

    def __init__(self, *, coalesces: bool):
        super().__init__(0, 2)
        self.said, self._backend = [], SimpleNamespace(supports_coalescing=coalesces)

    def _get_backend(self, device):
        return self._backend

    def _start_coalescing(self, device):
        self.said.append("start")

    def _end_coalescing(self, device):
        self.said.append("end")
        return DONE

    def send(self, tensors, peer, tag):
        self.said.append(f"send to {peer}")
        return DONE

    def recv(self, tensors, peer, tag):
        self.said.append(f"receive from {peer}")
        return DONE


@pytest.mark.parametrize("coalesces", [True, False])
def test_a_shift_sends_and_receives_as_one_batch(coalesces, monkeypatch):
    from smp.mesh import Role
    from smp.parallel.context.functions import _Shift

    group = Messages(coalesces=coalesces)
    monkeypatch.setitem(dist.distributed_c10d._world.pg_group_ranks, group, {0: 0, 1: 1})
    sent = torch.ones(2)
    assert _Shift(sent, Role(2, 0, group)).wait().shape == sent.shape
    both = ["send to 1", "receive from 1"]
    assert group.said == (["start", *both, "end"] if coalesces else both)  # gloo needs no batch
