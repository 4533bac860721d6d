"""Asynchronous saves from a GPU, on streams that note what they wait for: who waits for the copy, and where it lies."""

from __future__ import annotations

import contextlib
import gc
import threading
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

from smp.checkpoint.background import HostCopies
from smp.checkpoint.checkpointer import Checkpointer
from smp.checkpoint.safetensors_io import Piece
from smp.errors import RunError, UserError
from tests.clock import HANG_SECONDS
from tests.distributed import run_distributed
from tests.fake_gpu import FakeStream


class Stream(FakeStream):
    """A stream whose events say who waits for them, and end at ``go``."""

    go = threading.Event()

    def record_event(self, event=None):
        def synchronize():
            self._log.append(f"{threading.current_thread().name} waits for {self.name}")
            assert self.go.wait(HANG_SECONDS)

        return SimpleNamespace(name=self.name, synchronize=synchronize)


@contextlib.contextmanager
def gpu(*, status=0):
    """Tensors of 64 bits say that they are a GPU's, but for those in locked memory of the host."""
    log, streams = [], threading.local()
    locked = {}

    def current_stream(device=None):
        return getattr(streams, "current", main)

    @contextlib.contextmanager
    def chosen(stream):
        streams.current = stream
        yield

    def register(address, nbytes, flags):
        locked[address] = nbytes
        log.append(f"locked {nbytes}")
        return status

    main = Stream("main", log)
    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=lambda address: locked.pop(address))
    with contextlib.ExitStack() as stack:
        for name, value in {
            "current_stream": current_stream, "stream": chosen, "Stream": lambda: Stream("side", log),
            "Event": lambda blocking: blocking, "device": lambda device: contextlib.nullcontext(),
            "cudart": lambda: runtime,
        }.items():  # fmt: skip
            stack.enter_context(mock.patch(f"torch.cuda.{name}", value))

        def of_gpu(tensor):
            inside = any(start <= tensor.data_ptr() < start + size for start, size in locked.items())
            return tensor.dtype is torch.float64 and not inside

        is_cuda = property(of_gpu)
        stack.enter_context(mock.patch.object(torch.Tensor, "is_cuda", is_cuda, create=True))
        yield log, locked


class Counting(nn.Module):
    """A model whose forward changes a buffer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 3, dtype=torch.float64)
        self.register_buffer("seen", torch.zeros(1, dtype=torch.float64))

    def forward(self, hidden):
        self.seen += 1
        return self.linear(hidden)


def _train(model, optimizer):
    model(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
    optimizer.step()


def _of_a_step(folder: str) -> None:
    with gpu() as (log, locked):
        model = Counting()
        optimizer = torch.optim.AdamW(model.parameters())
        checkpointer = Checkpointer(folder, model, optimizer)
        nbytes = checkpointer.reserve()
        assert log == ["locked 3584"]  # parameters, both moments and the buffer: seven of 512 bytes
        _train(model, optimizer)
        expected = {name: value.clone() for name, value in model.state_dict().items()}
        checkpointer.save(1, wait=False)
        _train(model, optimizer)  # goes on, though the copy has not ended on the device
        assert not torch.equal(model.linear.weight, expected["linear.weight"])
        writing = checkpointer.writing
        assert not writing.ended
        Stream.go.set()
        checkpointer.finish()
        waits = ["main waits for side"] * 2  # when the script goes on, and before the update
        assert sorted(log[1:]) == [*waits, "side waits for main", "smp-checkpoint waits for side"]
        assert sum(p.tensor.nbytes for p in writing._copy(writing._snapshot.pieces)) == nbytes  # and nothing was added
        again = Counting()
        Checkpointer(folder, again, torch.optim.AdamW(again.parameters())).load()
        assert all(torch.equal(value, expected[name]) for name, value in again.state_dict().items())
        del checkpointer, writing, optimizer
        gc.collect()
        assert not locked


def test_the_stream_waits_for_the_copy_and_the_host_does_not(tmp_path):
    run_distributed(_of_a_step, str(tmp_path), world_size=1)


def _of_frozen_parameters(folder: str) -> None:
    with gpu() as (log, _):
        model = nn.ModuleDict({"frozen": nn.Linear(5, 3, dtype=torch.float64), "trained": nn.Linear(3, 2)})
        model["frozen"].requires_grad_(False)
        checkpointer = Checkpointer(folder, model, torch.optim.AdamW(model["trained"].parameters()))
        checkpointer.save(1, wait=False)
        Stream.go.set()
        checkpointer.finish()
    assert "smp-checkpoint waits for side" in log, log


def test_what_the_optimizer_does_not_change_is_waited_for_too(tmp_path):
    run_distributed(_of_frozen_parameters, str(tmp_path), world_size=1)


def _of_a_lost_device(folder: str) -> None:
    def lost(device):
        raise RuntimeError("the device is lost")

    with gpu():
        model = Counting()
        checkpointer = Checkpointer(folder, model, torch.optim.AdamW(model.parameters()))
        with mock.patch("torch.cuda.device", lost), mock.patch("threading.excepthook", lambda args: None):
            checkpointer.save(1, wait=False)
            assert checkpointer.writing._copied.wait(HANG_SECONDS)  # nobody is left waiting for the copy
        with pytest.raises(RunError, match="the thread that wrote it has died"):
            checkpointer.finish()


def test_a_thread_that_cannot_begin_leaves_nobody_waiting(tmp_path):
    run_distributed(_of_a_lost_device, str(tmp_path), world_size=1)


def test_buffers_are_parts_of_one_range():
    tensors = [torch.rand(size, dtype=torch.float64) for size in (3, 100)] + [
        torch.rand(2, 2),
        torch.tensor(1.0).double(),
    ]
    pieces = [Piece(str(index), tensor, (0,) * tensor.dim()) for index, tensor in enumerate(tensors)]
    with gpu() as (log, locked):
        copies = HostCopies()
        copied = copies(pieces)
        assert log == ["locked 2048"]  # 3 and 1 numbers in 512 bytes each, 100 in 1024
        ((start, size),) = locked.items()
        inside = [start <= piece.tensor.data_ptr() < start + size for piece in copied]
        assert inside == [True, True, False, True]
        assert all(torch.equal(one.tensor, other) for one, other in zip(copied, tensors, strict=True))
        assert [p.tensor.data_ptr() for p in copies(pieces)] == [p.tensor.data_ptr() for p in copied] and len(log) == 1
        del copies, copied
        assert not locked


def test_memory_that_cannot_be_locked():
    with (
        gpu(status=2),
        pytest.raises(UserError, match=r"512 B.* could not be page-locked \(CUDA error 2\): .* sharded"),
    ):
        HostCopies().reserve([Piece("a", torch.zeros(1, dtype=torch.float64), (0,))])
