"""Offloading of a GPU's tensors, on streams that note what they wait for: whose memory may be reused, and when."""

from __future__ import annotations

import contextlib
import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from smp.parallel.offload import HostStore, apply_activation_offload, stores
from tests.fake_gpu import FakeStream


class Device:
    """A CPU that says it is a GPU, to :class:`HostStore`."""

    type = "cuda"

    def __eq__(self, other):
        return other is self

    def __hash__(self):
        return 0


class NotingStream(FakeStream):
    """Its events are numbered, and named by it."""

    def __init__(self, name, log):
        super().__init__(name, log)
        self.events = 0

    def record_event(self):
        self.events += 1
        return SimpleNamespace(name=f"{self.name} {self.events}")


@pytest.fixture
def log(monkeypatch):
    """What streams wait for and what is recorded on them. ``log.current`` is the computing stream."""

    class Log(list):
        current: FakeStream

    log = Log()
    log.current, names = NotingStream("main", log), itertools.cycle(("out", "back"))
    device, empty, empty_like = Device(), torch.empty, torch.empty_like
    plain = torch.Tensor.device

    def on_cpu(original):
        def make(*args, **kwargs):
            kwargs.pop("pin_memory", None)
            return original(*args, **({**kwargs, "device": "cpu"} if kwargs.get("device") is device else kwargs))

        return make

    monkeypatch.setattr(stores, "torch", SimpleNamespace(**{**vars(torch), "empty": on_cpu(empty)}))
    stores.torch.empty_like = on_cpu(empty_like)
    stores.torch.cuda = SimpleNamespace(
        Stream=lambda device: NotingStream(next(names), log),
        current_stream=lambda device: log.current,
        stream=lambda stream: contextlib.nullcontext(),
    )
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: log.append(f"recorded on {stream.name}"))
    monkeypatch.setattr(
        torch.Tensor, "device", property(lambda tensor: d if (d := plain.__get__(tensor)).type == "meta" else device)
    )
    return log


def test_the_computing_stream_waits_and_nothing_is_recorded(log):
    tensor, store = torch.arange(6.0), HostStore()
    stored = store.put(tensor)
    assert log == ["out waits for main"]
    assert stored.written() and stored.written()
    assert log[1:] == ["main waits for out 1"]  # its memory may be reused from here on
    ready = stored.load()
    assert log[2:] == ["back waits for main", "back waits for out 1"]
    assert torch.equal(ready(), tensor) and log[4:] == ["main waits for back 1"]
    stored.free()
    assert len(log) == 5
    again = store.put(tensor)  # in the same buffer, once it has been read
    assert log[5:] == ["out waits for main", "out waits for back 1"] and again.written()


def test_what_leaves_is_held_until_the_stream_waits(log):
    memory = torch.arange(8.0).reshape(2, 4)
    for tensor in (memory, memory.t()[::2]):  # with gaps: copied on the device first
        stored = HostStore().put(tensor)
        held = stored._moving
        assert held.is_contiguous() and (held.data_ptr() == tensor.data_ptr()) == (tensor is memory)
        assert stored.written() and stored._moving is None


def test_dropped_while_it_leaves(log):
    """As by a forward that raises, or a graph that is freed without a backward."""
    store = HostStore()
    blocks = [nn.Sigmoid(), nn.Sigmoid()]
    apply_activation_offload(blocks, store, horizon=1, minimum_bytes=1)
    result = blocks[0](torch.rand(4, 4).requires_grad_())
    assert log == ["out waits for main"]
    del result
    assert log[1:] == ["main waits for out 1"] and len(store._free) == 1


def test_dropped_while_it_returns(log):
    stored = HostStore().put(torch.ones(4))
    stored.written()
    loading = stored.load()
    log.clear()
    stored.free()
    assert log == ["main waits for back 1"]
    del loading


def test_used_on_another_stream(log):
    """The stream that allocated the memory does not wait there."""
    stored = HostStore().put(torch.ones(4))
    stored.written()
    loading = stored.load()
    log.clear()
    log.current = NotingStream("side", log)
    loading()
    assert log == ["side waits for back 1", "recorded on side"]


def test_a_step(log):
    """Every transfer is waited for; nothing is recorded."""
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Sigmoid()) for _ in range(4)]
    apply_activation_offload(blocks, HostStore(), horizon=1, minimum_bytes=1)
    hidden = torch.rand(4, 8).requires_grad_()
    for block in blocks:
        hidden = block(hidden)
    hidden.sum().backward()
    left = [line for line in log if line.startswith("main waits for out")]
    returned = [line for line in log if line.startswith("main waits for back")]
    assert len(set(left)) == len(left) == len(set(returned)) == len(returned) == 6
    assert not [line for line in log if "recorded" in line]
