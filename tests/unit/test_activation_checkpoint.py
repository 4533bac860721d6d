"""Activation checkpointing: the same bits, and less kept."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import smp
from smp.errors import UserError
from smp.parallel.activation_checkpoint import apply_activation_checkpointing, checkpointed_blocks
from tests.distributed import run_distributed
from tests.reference import global_batch
from tests.unit.test_activation_offload import blocks_of, dropout_model, gradients


def saved_bytes(model) -> int:
    """What autograd keeps of one forward: distinct storages, parameters left out."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        loss = model(input_ids=global_batch(0)[0], use_cache=False).logits.sum()
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    del loss
    return sum(size for pointer, size in sizes.items() if pointer not in parameters)


@pytest.mark.parametrize("name", ["gpt_neox", "llama_gqa"])
@pytest.mark.parametrize(("mode", "every"), [("full", 1), ("full", 2), ("selective", 1), ("selective", 2)])
def test_same_bits(name, mode, every):
    reference = dropout_model(name)
    expected = gradients(copy.deepcopy(reference))
    apply_activation_checkpointing(blocks_of(reference), mode=mode, every=every)
    assert all(torch.equal(a, b) for a, b in zip(gradients(reference), expected, strict=True))


class Products(TorchDispatchMode):
    """Counts matrix products that are really computed."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def products(model) -> int:
    """Matrix products of one backward."""
    loss = model(input_ids=global_batch(0)[0], use_cache=False).logits.sum()
    with Products() as counter:
        loss.backward()
    return counter.count


def test_selective_recomputes_half_of_the_products():
    counts = {}
    for mode in ("none", "selective", "full"):
        model = dropout_model("llama_gqa")
        if mode != "none":
            apply_activation_checkpointing(blocks_of(model), mode=mode)
        counts[mode] = products(model)
    # Seven products in each of three blocks. The last ones of a block are not needed: recomputation stops before.
    assert counts["none"] < counts["selective"] < counts["full"]
    assert counts["full"] - counts["none"] >= 3 * 6
    assert counts["selective"] - counts["none"] <= (counts["full"] - counts["none"] + 3) // 2


def test_every_nth_block():
    kept = []
    for every in (1, 2, 3, 4):
        model = dropout_model("llama_gqa")
        apply_activation_checkpointing(blocks_of(model), every=every)
        kept.append(saved_bytes(model))
    plain = saved_bytes(dropout_model("llama_gqa"))
    # Of three blocks three, two, one and one are recomputed.
    assert kept[0] < kept[1] < kept[2] == kept[3] < plain


def test_blocks_of_a_model():
    model = dropout_model("llama_gqa")
    apply_activation_checkpointing(model, check_fn=lambda module: type(module).__name__ == "LlamaDecoderLayer")
    assert checkpointed_blocks(model) == blocks_of(model)
    other = dropout_model("llama_gqa")
    apply_activation_checkpointing(other.model.layers)
    assert checkpointed_blocks(other) == blocks_of(other)
    with pytest.raises(UserError, match="finds no block: give check_fn"):
        apply_activation_checkpointing(model)


def test_bad_modes():
    for options in ({"mode": "some"}, {"every": 0}):
        with pytest.raises(UserError, match="takes mode full or selective and every >= 1"):
            apply_activation_checkpointing([], **options)


def _split_modes(sequence):
    """Recomputation of split layers: the same bits, and what is kept is not exchanged again."""
    smp.init({"tensor_parallel_degree": 2, "sequence_parallel": sequence})
    reference = dropout_model("llama_gqa")
    found, reductions = {}, {}
    operation = "reduce_scatter" if sequence else "all_reduce"
    for mode in ("none", "full", "selective"):
        model = smp.transform(copy.deepcopy(reference))
        if mode != "none":
            apply_activation_checkpointing(blocks_of(model), mode=mode)
        torch.manual_seed(0)
        loss = model(input_ids=global_batch(0)[0]).logits.to_local().square().sum()
        dist.barrier()
        smp.comm.reset_report()
        loss.backward()
        reductions[mode] = smp.comm.report().calls(operation)
        found[mode] = [p.grad.to_local() for p in model.parameters()]
    for mode in ("full", "selective"):
        assert all(torch.equal(a, b) for a, b in zip(found[mode], found["none"], strict=True)), mode
    # Of a block's two reductions the second is after all that backward needs.
    assert reductions["full"] == reductions["none"] + 3
    assert reductions["selective"] == reductions["none"]


@pytest.mark.parametrize("sequence", [True, False])
def test_selective_keeps_exchanges(sequence):
    run_distributed(_split_modes, sequence, world_size=2, backend="smddp")
