"""Sharding units, and exactly the collectives that a layout needs."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers  # noqa: F401  imported before the ranks are forked
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import smp.comm
from smp.comm.gloo import DirectAllGather, DirectReduceScatter
from smp.config import ActivationConfig, ParallelConfig
from smp.fsdp.param_group import groups_of
from smp.models.registry import family_of
from smp.parallel import sharding
from smp.parallel.parallelize import parallelize
from smp.parallel.sharding import fsdp_modules, set_gradient_sync, size_based_units
from smp.train.step import forward
from tests.distributed import run_distributed
from tests.reference import Layout, build_reference, rank_batch, train_parallel

BLOCKS = 3
UNITS = BLOCKS + 2  # embedding and (norm, head) besides


class CountCollectives(TorchDispatchMode):
    """Counts the direct collectives, and by name every other one but their messages."""

    def __init__(self):
        super().__init__()
        self.counts: dict[str, int] = {}
        self.patches = pytest.MonkeyPatch()

    def count(self, kind: str) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + 1

    def __enter__(self):
        for cls, kind in ((DirectAllGather, "all_gather"), (DirectReduceScatter, "reduce_scatter")):
            call = cls.__call__
            self.patches.setattr(cls, "__call__", lambda *a, c=call, k=kind, **kw: (self.count(k), c(*a, **kw))[1])
        return super().__enter__()

    def __exit__(self, *exception):
        self.patches.undo()
        return super().__exit__(*exception)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional") and func._opname not in ("send", "recv_"):
            self.count("all_reduce" if func._opname.startswith(("allreduce", "all_reduce")) else func._opname)
        return func(*args, **(kwargs or {}))


def sharded(layout: Layout, name: str = "llama_gqa", **parallel) -> nn.Module:
    model = copy.deepcopy(build_reference(name, torch.float32)).train()
    parallel = {"sharding_strategy": layout.strategy, "hybrid_shard_degree": layout.degree, **parallel}
    config = ParallelConfig(reshard_between_microbatches=not layout.keep, **parallel)
    activation = ActivationConfig(activation_checkpointing=layout.checkpointing)
    with mock.patch.object(sharding, "MIN_UNIT_PARAMETERS", layout.min_unit):
        return parallelize(
            model, family_of(model.config), mesh=layout.mesh(), parallel=config, activation=activation, dtype=None
        )


def collectives(model: nn.Module, *, microbatches: int, defer: bool, keep: bool = False) -> dict[str, int]:
    """Collectives of forward and backward over some micro-batches, by name."""
    batch = rank_batch(0, dist.get_rank(), dist.get_world_size(), microbatches)
    forward(model, batch.microbatches[0], torch.device("cpu")).backward()  # sets up what is set up once
    smp.comm.reset_report()
    with CountCollectives() as counter:
        for index, microbatch in enumerate(batch.microbatches):
            last = index == microbatches - 1
            set_gradient_sync(model, last=last, defer=defer, keep=keep)
            forward(model, microbatch, torch.device("cpu")).backward()
            groups = [g for m in fsdp_modules(model) for g in groups_of(m)]
            assert all(group.is_unsharded for group in groups) if keep and not last else True
    assert all(group.is_sharded for group in groups)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    if dist.get_backend() == "smddp":
        report = smp.comm.report()
        calls = names(*(report.calls(kind) for kind in ("all_gather", "reduce_scatter", "all_reduce")))
        ops = {"_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter"}
        seen = {ops.get(op, op): count for op, count in counter.counts.items()}
        assert seen == calls, "nothing goes past our own group"
        return calls
    return counter.counts


def _check_counts(cases):
    for layout, defer, microbatches, expected in cases:
        found = collectives(sharded(layout), microbatches=microbatches, defer=defer, keep=layout.keep)
        assert found == expected, (layout, defer, microbatches, found)


def names(gathers: int, scatters: int, reduces: int = 0) -> dict[str, int]:
    counts = {"all_gather": gathers, "reduce_scatter": scatters, "all_reduce": reduces}
    return {name: count for name, count in counts.items() if count}


@pytest.mark.parametrize("backend", [pytest.param("gloo", marks=pytest.mark.full), "smddp"])
def test_full_shard_gathers_blocks_twice(backend):
    # Forward gathers every unit; backward again those that were freed (the last is not) and that it needs (the
    # embedding is not).
    gathers = UNITS + UNITS - 2
    full, zero2 = Layout("full_shard"), Layout("shard_grad_op")
    cases = [
        (full, False, 1, names(gathers, UNITS)),
        (Layout("full_shard", checkpointing=True), False, 1, names(gathers, UNITS)),
        (full, False, 2, names(2 * gathers, 2 * UNITS)),
        # Gradients are kept whole until the last micro-batch.
        (full, True, 2, names(2 * gathers, UNITS)),
        (zero2, False, 1, names(UNITS, UNITS)),
        (Layout("no_shard"), False, 2, names(0, 0, UNITS)),
        # With parameters kept over the step, each unit is gathered once.
        (Layout("full_shard", keep=True), False, 3, names(UNITS, 3 * UNITS)),
        (Layout("full_shard", keep=True, checkpointing=True), True, 2, names(UNITS, UNITS)),
    ]
    run_distributed(_check_counts, cases, world_size=2, backend=backend)


@pytest.mark.parametrize("backend", [pytest.param("gloo", marks=pytest.mark.slow), "smddp"])
def test_replicas_reduce_once_per_step(backend):
    gathers = UNITS + UNITS - 2
    hybrid = Layout("hybrid_shard", 2)
    cases = [
        # The sharding group reduces every micro-batch, the replicas only the last.
        (hybrid, False, 2, names(2 * gathers, 2 * UNITS, UNITS)),
        (hybrid, True, 2, names(2 * gathers, UNITS, UNITS)),
        (Layout("hybrid_shard", 2, keep=True), False, 2, names(UNITS, 2 * UNITS, UNITS)),
    ]
    run_distributed(_check_counts, cases, world_size=4, backend=backend)


def _check_tied():
    model = sharded(Layout("full_shard"), "llama_tied")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    # The tied unit is gathered once and kept; blocks are gathered twice.
    assert collectives(model, microbatches=1, defer=False) == names(1 + 2 * BLOCKS, 1 + BLOCKS)


def test_tied_weights_make_one_unit():
    run_distributed(_check_tied, world_size=2)


def _check_bits(reference, layout):
    resharded, kept = (list(train_parallel(reference, dataclasses.replace(layout, keep=k), 2)) for k in (False, True))
    assert [step[:2] for step in resharded] == [step[:2] for step in kept]


@pytest.mark.parametrize("defer", [False, True])
def test_kept_parameters_change_no_bit(defer):
    layout = Layout("full_shard", accumulation=2, defer=defer)
    run_distributed(_check_bits, build_reference("llama_tied", torch.float32), layout, world_size=2)


def _check_local_share():
    model = sharded(Layout("full_shard"))
    local = sum(p.to_local().numel() for p in model.parameters())
    whole = sum(p.numel() for p in model.parameters())
    assert abs(local - whole / 4) <= 0.02 * whole


def test_each_rank_holds_its_share():
    run_distributed(_check_local_share, world_size=4)


def _check_prefetch():
    model = sharded(Layout("full_shard"), forward_prefetch=False, backward_fetch_policy="backward_post")
    states = [m._get_fsdp_state() for m in fsdp_modules(model)]
    assert not any(s._states_to_forward_prefetch for s in states)
    order: list[str] = []
    for index, block in enumerate(model.model.layers):
        (group,) = groups_of(block)
        unshard = group.unshard
        group.unshard = lambda *a, u=unshard, i=index, **k: (order.append(f"gather {i}"), u(*a, **k))
        block.register_full_backward_pre_hook(lambda *_, i=index: order.append(f"backward {i}"))
    batch = rank_batch(0, dist.get_rank(), 2, 1)
    loss = forward(model, batch.microbatches[0], torch.device("cpu"))
    order.clear()
    loss.backward()
    # Without prefetch, no block's parameters are asked for before the block after it has begun its backward.
    assert order.index("gather 1") > order.index("backward 2")


def test_backward_post_fetches_late():
    run_distributed(_check_prefetch, world_size=2)


def test_size_based_units():
    model = nn.Sequential(nn.Linear(10, 10), nn.Sequential(nn.Linear(20, 20), nn.Linear(3, 3)), nn.Linear(20, 20))
    units = [unit.modules[0] for unit in size_based_units(model.children(), reshard=True, minimum=400)]
    assert units == [model[1][0], model[2]]


def _check_size_based_ties():
    # The embedding alone reaches the first size, a block the second, and only all blocks together the third.
    for name, (minimum, inside_blocks) in itertools.product(
        ("llama_tied", "gpt_neox_tied"), ((3_000, 2 * BLOCKS), (7_000, BLOCKS), (10_000, 0))
    ):
        model = sharded(Layout("full_shard", min_unit=minimum), name, auto_wrap_policy="size_based_auto_wrap_policy")
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight, (name, minimum)
        groups = {id(m._get_fsdp_state()) for m in fsdp_modules(model)}
        assert len(groups) == inside_blocks + 2, (name, minimum)  # the tied unit and the root


def test_size_based_units_keep_ties():
    run_distributed(_check_size_based_ties, world_size=2)
