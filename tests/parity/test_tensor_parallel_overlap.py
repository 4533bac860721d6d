"""Exchanges that overlap their products compute what separate ones do, in exactly as many exchanges."""

from __future__ import annotations

import collections
import dataclasses

import pytest
import torch
import transformers  # noqa: F401  imported before the ranks are forked
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from smp.loss import causal_lm_loss_sum
from smp.models.registry import family_of
from smp.parallel.activation_checkpoint import apply_activation_checkpointing
from smp.parallel.technique import model_blocks
from tests.distributed import run_distributed
from tests.reference import (
    Layout,
    assert_parity,
    build_reference,
    reference_trajectory,
    relative,
    tiny_config,
    train_parallel,
)
from tests.tensor_parallel import ROWS, HostWorkspace, build, overlap_on_cpu, split_only

LENGTH = 12
GATHERED, REDUCED = "symm_mem.fused_all_gather_matmul.default", "symm_mem.fused_matmul_reduce_scatter.default"
LAYOUTS = [
    Layout("no_shard", tp=2, overlap=True, checkpointing=True, accumulation=2),
    Layout("no_shard", tp=2, overlap=True, save_gathered=True),
]


def _equal(references, layouts, pipelined=False):
    overlap_on_cpu(pipelined=pipelined)
    for reference, expected in references:
        for layout in layouts:
            assert_parity(reference, expected, layout, 1e-9)
            separate = dataclasses.replace(layout, overlap=False)
            steps = len(expected.losses)
            for one, other in zip(
                *(train_parallel(reference, each, steps) for each in (layout, separate)), strict=True
            ):
                assert one[:2] == pytest.approx(other[:2], rel=1e-12)
                assert all(relative(one[2][name] - other[2][name], other[2][name]) <= 1e-12 for name in other[2])
    assert bool(HostWorkspace.barriers) == pipelined


@pytest.mark.full
@pytest.mark.parametrize("name", ["llama_gqa", "gpt_neox"])
def test_equals_separate_exchanges_and_hugging_face(name):
    reference = build_reference(name, torch.float64)
    run_distributed(_equal, [(reference, reference_trajectory(reference, 2))], LAYOUTS, world_size=2, backend="gloo")


@pytest.mark.full
def test_equals_them_in_what_runs_on_gpus():
    """With torch's code for GPUs: one rank's tokens after the other, copied between the ranks' memories."""
    reference = build_reference("gpt_neox", torch.float64)
    layout = Layout("no_shard", tp=4, overlap=True, checkpointing=True)
    pairs = [(reference, reference_trajectory(reference, 1))]
    run_distributed(_equal, pairs, [layout], True, world_size=4, backend="gloo")


class Exchanges(TorchDispatchMode):
    """Counts collectives, those in a product by their name."""

    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("symm_mem", "c10d", "_c10d_functional", "smp"):
            self.counts[str(func) if func.namespace == "symm_mem" else func._opname] += 1
        return func(*args, **(kwargs or {}))

    def taken(self):
        found = {name: n for name, n in self.counts.items() if "allreduce" not in name and name != "wait_tensor"}
        self.counts.clear()
        return found


def _counts():
    overlap_on_cpu()
    config = tiny_config("llama_gqa")
    blocks = config.num_hidden_layers
    ids = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % config.vocab_size
    # Of an embedding, which reduces, and a head, which gathers.
    ends = {"reduce_tokens": 1, "_allgather_base_": 1}
    # Columns gather anew in backward, and reduce the gradient; both beside products. A row's gradient is gathered.
    separate = {"_allgather_base_": 2 * blocks + 2, "_reduce_scatter_base_": 2 * blocks + 1}
    for mode, saved, recomputed in [
        (None, False, {}),
        (None, True, {}),
        # A block is computed again up to what its backward reads last: its second reduction is not.
        ("full", False, {GATHERED: 2 * blocks, REDUCED: blocks}),
        ("selective", False, {GATHERED: 2 * blocks}),  # keeps the first reduction, too
    ]:
        layout = Layout("no_shard", tp=2, overlap=True, save_gathered=saved)
        model = split_only(build(config, torch.float32), layout)
        if mode:
            apply_activation_checkpointing(model_blocks(model, family_of(config)), mode=mode)
        with Exchanges() as exchanges:
            loss = causal_lm_loss_sum(model(input_ids=ids).logits, ids)
            assert exchanges.taken() == {**ends, GATHERED: 2 * blocks, REDUCED: 2 * blocks}
            loss.backward()
            found = exchanges.taken()
        expected = {**separate, GATHERED: 2 * blocks + recomputed.get(GATHERED, 0), REDUCED: recomputed.get(REDUCED, 0)}
        if saved:
            expected["_allgather_base_"] = 1
        assert found == {name: n for name, n in expected.items() if n}, (mode, saved)


def test_exactly_the_exchanges():
    run_distributed(_counts, world_size=2, backend="gloo")


def _frozen():
    overlap_on_cpu()
    config = tiny_config("gpt_neox")
    ids = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % config.vocab_size
    gradients = []
    for overlap in (True, False):
        model = split_only(build(config), Layout("no_shard", tp=2, overlap=overlap))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("embed_in" in name or name.endswith("bias"))
        causal_lm_loss_sum(model(input_ids=ids).logits, ids).backward()
        gradients.append({name: p.grad.to_local() for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-11, atol=1e-13)


@pytest.mark.full
def test_frozen_weights():
    run_distributed(_frozen, world_size=2, backend="gloo")


def _compiled(reference, expected):
    overlap_on_cpu()
    assert_parity(reference, expected, Layout("no_shard", tp=2, overlap=True, compile=True), 1e-9)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


@pytest.mark.slow
def test_compiled_blocks_are_one_graph():
    reference = build_reference("gpt_neox", torch.float64)
    run_distributed(_compiled, reference, reference_trajectory(reference, 2), world_size=2, backend="gloo")


@pytest.mark.full
def test_sharded_over_other_ranks():
    layout = Layout("full_shard", tp=2, overlap=True, keep=True, accumulation=2, checkpointing=True, defer=True)
    reference = build_reference("llama_tied", torch.float64)
    run_distributed(_equal, [(reference, reference_trajectory(reference, 2))], [layout], world_size=4, backend="gloo")
