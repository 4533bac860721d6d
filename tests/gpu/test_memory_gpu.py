"""Activations and loss on a GPU: the same bits off the device, pinned buffers used again, less memory."""

from __future__ import annotations

import copy

import pytest
import torch

from smp.activation_checkpoint import apply_activation_checkpointing
from smp.activation_offload import DiskStore, HostStore, apply_activation_offload
from smp.chunked_loss import linear_cross_entropy
from tests.parity import global_batch
from tests.test_activation_offload import blocks_of, dropout_model

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


def peak(layers: int, offload: bool) -> int:
    blocks = [Wide().cuda() for _ in range(layers)]
    apply_activation_checkpointing(blocks)
    store = HostStore()
    if offload:
        apply_activation_offload(blocks, store, horizon=2)
    hidden = torch.randn(2**18, 64, device="cuda", requires_grad=True)  # 64 MiB
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
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
