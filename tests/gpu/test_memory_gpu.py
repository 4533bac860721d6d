"""Memory on a GPU: the same bits off the device, pinned buffers used again, less memory, and the accounts of it."""

from __future__ import annotations

import copy

import pytest
import torch

from smp.memory.profile import profile_memory
from smp.memory.tracker import MemoryTracker, memory_stats
from smp.memory.warnings import logger as warnings_logger
from smp.memory.warnings import warn_of_cache_flushes
from smp.parallel.activation_checkpoint import apply_activation_checkpointing
from smp.parallel.loss import chunk_loss, linear_cross_entropy
from smp.parallel.offload import DiskStore, HostStore, apply_activation_offload
from smp.units import GIB
from tests.reference import global_batch
from tests.unit.test_activation_offload import blocks_of, dropout_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def gradients(model, steps=3):
    torch.manual_seed(0)
    losses = []
    for step in range(steps):
        ids, labels = (part.cuda() for part in global_batch(step))
        model.zero_grad()
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        loss.backward()
        losses.append(loss.detach())
    return [*losses, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("store", ["host", "disk"])
@pytest.mark.parametrize("horizon", [1, 2])
def test_same_bits(store, horizon, checkpointing, tmp_path):
    reference = dropout_model("llama_gqa").cuda()
    expected = gradients(copy.deepcopy(reference))
    if checkpointing:
        apply_activation_checkpointing(blocks_of(reference))
    made = HostStore() if store == "host" else DiskStore(tmp_path)
    apply_activation_offload(blocks_of(reference), made, horizon=horizon, minimum_bytes=0)
    assert all(torch.equal(a, b) for a, b in zip(gradients(reference), expected, strict=True))


class Wide(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(64, 64)

    def forward(self, hidden_states):
        return hidden_states + self.linear(hidden_states).relu()


def peak(layers: int, offload: bool, *, ahead: bool = False) -> int:
    blocks = [Wide().cuda() for _ in range(layers)]
    apply_activation_checkpointing(blocks)
    store = HostStore()
    if offload:
        apply_activation_offload(blocks, store, horizon=2)
    hidden = torch.randn(2**18, 64, device="cuda", requires_grad=True)  # 64 MiB
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        if ahead:  # the host asks for everything before the device begins
            torch.cuda._sleep(10**9)
        out = hidden
        for block in blocks:
            out = block(out)
        out.sum().backward()
    torch.cuda.synchronize()
    if offload:  # each buffer was used again by the second pass
        assert sum(len(free) for free in store._free.values()) == layers - 2
    return torch.cuda.max_memory_allocated()


def test_what_stays_on_the_device_does_not_grow_with_layers():
    assert peak(24, False) - peak(12, False) > 11 * 2**26
    assert abs(peak(24, True) - peak(12, True)) < 2**26
    # Nor when no transfer has ended by the time that the next tensors are allocated.
    assert abs(peak(24, True, ahead=True) - peak(24, True)) < 2**26


def test_loss_in_chunks():
    torch.manual_seed(0)
    hidden = torch.randn(2, 512, 256, device="cuda", requires_grad=True)
    weight = (torch.randn(32_000, 256, device="cuda") * 0.02).requires_grad_()
    labels = torch.randint(0, 32_000, (2, 512), device="cuda")
    logits = (hidden @ weight.T)[:, :-1].flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    wanted = torch.autograd.grad(expected, (hidden, weight))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = linear_cross_entropy(hidden, weight, labels, chunk_tokens=128)
    found = torch.autograd.grad(loss, (hidden, weight))
    assert torch.cuda.max_memory_allocated() - before < 512 * 2 * 32_000 * 4
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    for one, other in zip(found, wanted, strict=True):
        assert torch.linalg.norm(one - other) <= 1e-4 * torch.linalg.norm(other)


@pytest.mark.parametrize("on_host", [False, True])
def test_loss_in_chunks_in_bf16(on_host):
    """Products that are summed in fp32, tokens that the host chooses, and no wait for the GPU."""
    torch.manual_seed(0)
    hidden = torch.randn(2, 512, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(32_000, 256, device="cuda") * 0.02).bfloat16().requires_grad_()
    labels = torch.randint(0, 32_000, (2, 512))
    labels[:, :300] = -100
    exact = [tensor.detach().float().requires_grad_() for tensor in (hidden, weight)]
    logits = (exact[0] @ exact[1].T)[:, :-1].flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten().cuda(), reduction="sum")
    wanted = torch.autograd.grad(expected, exact)
    given = labels if on_host else labels.cuda()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = linear_cross_entropy(hidden, weight, given.pin_memory() if on_host else given, chunk_tokens=128)
        found = torch.autograd.grad(loss, (hidden, weight))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    for one, other in zip(found, wanted, strict=True):
        assert torch.linalg.norm(one.float() - other) <= 1e-2 * torch.linalg.norm(other)


def test_memory_may_be_written_to_once_its_tensor_has_left():
    """A change in place after that is ordered after the copy, however far behind the device is."""
    store, tensor = HostStore(), torch.ones(2**24, device="cuda")
    torch.cuda._sleep(10**8)
    stored = store.put(tensor)
    assert stored.written()
    tensor.fill_(2)
    assert float(stored.load()().min()) == 1 and float(tensor.min()) == 2
    changed = store.put(tensor)
    tensor.add_(1)
    assert not changed.written()


@pytest.mark.parametrize("name", ["llama_gqa", "gpt_neox"])
def test_the_categories_sum_to_what_the_allocator_says(name):
    model = chunk_loss(dropout_model(name).cuda(), chunk_tokens=16)
    optimizer = torch.optim.AdamW(model.parameters())
    ids, labels = (part.cuda().repeat(16, 1) for part in global_batch(0))
    parameters = sum(p.numel() for p in model.parameters()) * 4
    for _ in range(2):  # in the first step the optimizer's state and the library's own buffers are made
        torch.cuda.synchronize()
        with profile_memory(model, optimizer) as account:
            model(input_ids=ids, labels=labels, use_cache=False).loss.backward()
            account.mark("backward")
            optimizer.step()
            optimizer.zero_grad()
            account.mark("update")
    peak = account.peak()
    assert account.measured == torch.cuda.max_memory_allocated()
    assert abs(peak.total - account.measured) <= 0.02 * account.measured, account.table()
    small = 512 * sum(1 for _ in model.parameters())  # what is rounded up for each tensor
    assert parameters <= peak.categories["parameters"] <= parameters + small, account.table()
    assert 2 * parameters <= account.at("update").categories["optimizer state"] <= 2 * (parameters + small)
    assert parameters <= account.at("backward").categories["gradients"] <= parameters + small, account.table()
    assert "by the allocator" in account.table()


def test_out_of_memory_carries_the_table():
    with pytest.raises(torch.OutOfMemoryError) as failure, profile_memory(torch.nn.Linear(8, 8).cuda()):
        torch.empty(2**50, dtype=torch.uint8, device="cuda")
    assert "Memory by category at the peak" in failure.value.__notes__[0]


def test_a_flush_of_the_cache_is_said(caplog, monkeypatch):
    """The allocator is given so little that it must let go of what it keeps to get more."""
    model = torch.nn.Linear(8, 8).cuda()
    warn_of_cache_flushes(model, "cuda")
    torch.cuda.empty_cache()
    monkeypatch.setattr(warnings_logger.parent, "propagate", True)
    everything = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**28) / everything)
    try:
        for mib in (200, 220):
            torch.empty(mib * 2**20, dtype=torch.uint8, device="cuda")
        with caplog.at_level("WARNING", logger="smp"):
            model(torch.zeros(8, device="cuda"))
            model(torch.zeros(8, device="cuda"))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert len(caplog.messages) == 1 and "was short of memory since the last forward" in caplog.messages[0]


def test_the_lines_of_smp():
    found = {}

    def write(tag, values, step):
        found[tag, step] = values

    device = torch.device("cuda", torch.cuda.current_device())
    tracker = MemoryTracker(device, enabled=True, rank=0)
    tracker.connect(write)
    held = torch.empty(2**28, dtype=torch.uint8, device=device)
    tracker.record("After forward", 1)
    usage = found["GPUMemoryGB/After forward", 1]
    assert usage["reserved"] >= usage["allocated"] >= held.nbytes / GIB and usage["max_allocated"] >= usage["allocated"]
    del held
    tracker.record("After train step", 1)  # the peak began anew
    assert found["GPUMemoryGB/After train step", 1]["max_allocated"] == pytest.approx(usage["allocated"], abs=0.01)
    assert memory_stats(device)["mem_allocated_gib"] <= usage["allocated"] - 0.24
