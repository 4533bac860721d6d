"""Activation offloading: the same bits, tensors ahead of use, nothing left behind."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import resource
import threading

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from smp.config import ActivationConfig
from smp.errors import ConfigError, UserError
from smp.memory.profile import profile_memory
from smp.parallel.activation_checkpoint import apply_activation_checkpointing
from smp.parallel.offload import DiskStore, HostStore, apply_activation_offload
from tests.clock import HANG_SECONDS
from tests.reference import build_reference, global_batch


def blocks_of(model):
    return list((model.model if hasattr(model, "model") else model.gpt_neox).layers)


def dropout_model(name="gpt_neox"):
    model = build_reference(name, torch.float32).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.1
    return model


def gradients(model, steps=3):
    torch.manual_seed(0)
    found = []
    for step in range(steps):
        ids, labels = global_batch(step)
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        loss.backward()
        found.append(loss.detach())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    return [*found, *(p.grad for p in model.parameters())]


def stores(tmp_path):
    return {"host": HostStore, "disk": lambda: DiskStore(tmp_path)}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("store", ["host", "disk"])
@pytest.mark.parametrize("name", ["gpt_neox", "llama_gqa"])
def test_same_bits(name, store, checkpointing, tmp_path):
    reference = dropout_model(name)
    expected = gradients(copy.deepcopy(reference))
    for horizon in (1, 2, 5):
        model, made = copy.deepcopy(reference), Counting(stores(tmp_path)[store]())
        if checkpointing:
            apply_activation_checkpointing(blocks_of(model))
        apply_activation_offload(blocks_of(model), made, horizon=horizon, minimum_bytes=1)
        assert all(torch.equal(a, b) for a, b in zip(gradients(model), expected, strict=True)), horizon
        moved = max(0, 3 - horizon) * 3  # blocks and steps
        assert made.puts == moved if checkpointing else made.puts >= 10 * moved
        assert made.loads == made.puts and made.frees == made.puts
    assert list(tmp_path.iterdir()) == []


class Counting:
    """A store that counts what it does, and notes in which order."""

    def __init__(self, store):
        self.store, self.puts, self.loads, self.frees, self.order = store, 0, 0, 0, []

    def put(self, tensor):
        self.puts += 1
        return Counted(self, self.store.put(tensor), self.puts - 1)


class Counted:
    def __init__(self, counting, stored, number):
        self.counting, self.stored, self.number = counting, stored, number

    def written(self):
        return self.stored.written()

    def load(self):
        self.counting.loads += 1
        self.counting.order.append(self.number)
        return self.stored.load()

    def free(self):
        self.counting.frees += 1
        self.stored.free()


class Noting(nn.Module):
    """A block that notes when its backward computes."""

    def __init__(self, index, order):
        super().__init__()
        self.linear, self.index, self.order = nn.Linear(32, 32), index, order

    def forward(self, hidden_states):
        hidden_states.register_hook(lambda gradient: self.order.append(f"done {self.index}"))
        return hidden_states + self.linear(hidden_states).tanh()


@pytest.mark.parametrize("horizon", [1, 2, 3])
def test_blocks_come_ahead_of_use(horizon, tmp_path):
    made = Counting(DiskStore(tmp_path))
    blocks = [Noting(i, made.order) for i in range(6)]
    apply_activation_checkpointing(blocks)
    apply_activation_offload(blocks, made, horizon=horizon, minimum_bytes=1)
    hidden = torch.randn(2, 4, 32, requires_grad=True) * 1
    for block in blocks:
        hidden = block(hidden)
    assert made.puts == 6 - horizon
    hidden.sum().backward()
    for index in range(6 - horizon):
        # Asked for when the block `horizon` after it begins, which is when the one after that is done.
        loaded = made.order.index(index)
        if index + horizon + 1 < 6:
            assert f"done {index + horizon + 1}" in made.order[:loaded], (index, made.order)
        assert f"done {index + horizon}" not in made.order[:loaded], (index, made.order)


class Attending(nn.Module):
    """A block whose backward needs its parameter as it is, a view of it, its input and a mask."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(32, 32))

    def forward(self, hidden_states, mask):
        return torch.relu(hidden_states @ self.weight * mask) @ self.weight.view(2, 16, 32).reshape(32, 32).t()


def test_parameters_and_what_blocks_share_stay(tmp_path):
    blocks = [Attending() for _ in range(4)]
    made = Counting(DiskStore(tmp_path))
    memory = []
    put = made.put
    made.put = lambda tensor: memory.append(tensor.untyped_storage().data_ptr()) or put(tensor)
    apply_activation_offload(blocks, made, horizon=1, minimum_bytes=1)
    mask, hidden = torch.rand(64, 32), torch.rand(64, 32).requires_grad_()
    for block in blocks:
        hidden = block(hidden, mask)
    stay = {tensor.untyped_storage().data_ptr() for tensor in (mask, *(block.weight for block in blocks))}
    assert len(memory) >= 2 * 3 and stay.isdisjoint(memory)
    hidden.sum().backward()
    assert made.loads == made.puts


def test_fake_tensors_leave_and_return_as_real_ones_do():
    """They have no address: all are at 0."""

    def moved(mode):
        with mode:
            blocks, made = [Attending() for _ in range(4)], Counting(HostStore())
            apply_activation_offload(blocks, made, horizon=1, minimum_bytes=1)
            mask, hidden = torch.rand(64, 32), torch.rand(64, 32).requires_grad_()
            for block in blocks:
                hidden = block(hidden, mask)
            hidden.sum().backward()
            assert made.loads == made.puts
            return made.puts

    real = moved(contextlib.nullcontext())
    assert real >= 2 * 3 and moved(FakeTensorMode()) == real and moved(torch.device("meta")) == 0


def test_a_change_in_place_is_noticed(tmp_path):
    block = nn.Sequential(nn.Linear(32, 32), nn.Sigmoid())
    apply_activation_offload([block, nn.Linear(32, 32)], DiskStore(tmp_path), horizon=1, minimum_bytes=1)
    hidden = block(torch.randn(64, 32))
    hidden.add_(1)  # backward of sigmoid needs it
    with pytest.raises(RuntimeError, match="changed in place"):
        hidden.sum().backward()


def test_views_strides_and_twice(tmp_path):
    class Odd(nn.Module):
        def forward(self, hidden_states):
            turned = hidden_states.transpose(0, 1)
            part = turned[:, ::2]
            return (turned.exp().sum() + (part * part.sin()).sum()) * turned.cos().prod()

    for store in stores(tmp_path).values():
        odd, values = Odd(), torch.rand(12, 8, dtype=torch.float64)
        plain, moved = values.clone().requires_grad_(), values.clone().requires_grad_()
        Odd()(plain).backward()
        apply_activation_offload([odd, nn.Identity()], store(), horizon=1, minimum_bytes=1)
        result = odd(moved)
        result.backward(retain_graph=True)
        assert torch.equal(moved.grad, plain.grad)
        result.backward()
        assert torch.equal(moved.grad, 2 * plain.grad)


def test_places_are_used_again(tmp_path):
    store = DiskStore(tmp_path)
    model = dropout_model()
    apply_activation_checkpointing(blocks_of(model))
    apply_activation_offload(blocks_of(model), store, horizon=1, minimum_bytes=1)
    gradients(model, steps=1)
    size = os.fstat(store.descriptor).st_size
    gradients(model, steps=4)
    assert os.fstat(store.descriptor).st_size == size > 0
    model.eval()
    with torch.no_grad():
        model(global_batch(0)[0])
    assert os.fstat(store.descriptor).st_size == size


def test_a_store_that_is_gone_leaves_neither_file_nor_descriptor(tmp_path):
    store = DiskStore(tmp_path)
    descriptor = store.descriptor
    stored = store.put(torch.ones(5000))
    assert stored.load()().sum() == 5000 and os.fstat(descriptor)
    threads = [*store.writer._threads, *store.reader._threads]
    del store, stored
    gc.collect()
    for thread in threads:
        thread.join(HANG_SECONDS)
    assert not any(thread.is_alive() for thread in threads)
    with pytest.raises(OSError, match="Bad file descriptor"):  # a list of them would have one of its own
        os.fstat(descriptor)
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_may_be_freed_while_a_place_is_taken(tmp_path):
    """As a garbage collection does, which may come at any time in the same thread."""
    store, found = DiskStore(tmp_path), []

    def free_inside():
        with store._lock:
            store.give_back(0, 100)
        found.append(store.take(100))

    thread = threading.Thread(target=free_inside, daemon=True)
    thread.start()
    thread.join(HANG_SECONDS)
    assert found == [0]


def test_horizons_that_make_no_sense(tmp_path, caplog):
    for horizon in (0, -1):
        with pytest.raises(UserError, match=f"activation_loading_horizon must be at least 1, got {horizon}"):
            apply_activation_offload([nn.Linear(2, 2)], DiskStore(tmp_path), horizon=horizon)
    with pytest.raises(ConfigError, match="--activation_loading_horizon must be at least 1, got 0"):
        ActivationConfig(activation_loading_horizon=0)
    with caplog.at_level("WARNING", logger="smp"):
        apply_activation_offload([nn.Linear(2, 2), nn.Linear(2, 2)], DiskStore(tmp_path), horizon=1)
        assert not caplog.messages
        apply_activation_offload([nn.Linear(2, 2), nn.Linear(2, 2)], DiskStore(tmp_path), horizon=2)
    assert caplog.messages == [
        "Nothing is offloaded: the model has 2 blocks, and activation_loading_horizon keeps the last 2."
    ]


@pytest.mark.full
def test_what_stays_on_the_device_does_not_grow_with_layers(tmp_path):
    hidden_state = 512 * 32 * 4

    def kept(layers: int, offload: bool) -> int:
        """Bytes of activations at the peak of a forward and backward."""
        blocks = nn.ModuleList(Noting(index, []) for index in range(layers))
        apply_activation_checkpointing(blocks)
        if offload:
            apply_activation_offload(list(blocks), DiskStore(tmp_path), horizon=2, minimum_bytes=1)
        with profile_memory(blocks) as account:
            hidden = torch.randn(512, 32, requires_grad=True) * 1
            for block in blocks:
                hidden = block(hidden)
            hidden.sum().backward()
        return max(account.timeline(10**6).categories["activations"])

    assert kept(6, True) == kept(12, True) == kept(24, True)
    assert kept(24, False) - kept(12, False) == 12 * hidden_state


def test_a_full_or_missing_directory(tmp_path):
    with pytest.raises(UserError, match=r"--offload_dir .*none cannot be written .*: give a directory"):
        DiskStore(tmp_path / "none")
    store, limits = DiskStore(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
    try:
        stored = store.put(torch.zeros(100_000))
        with pytest.raises(UserError, match=r"is full: \d+ bytes of activations so far, \d+ bytes free"):
            stored.written()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
