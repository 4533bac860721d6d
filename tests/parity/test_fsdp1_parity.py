"""Scripts written for FSDP1 train alike: against torch's own FSDP1 and against one plain process."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy, fully_shard

import smp
from smp.errors import UserError
from tests import fsdp1
from tests.distributed import run_distributed
from tests.reference import build_reference, global_batch

STEPS, MICRO = 10, 2
CLIP = {1.0: 5.0, 2.0: 0.5, float("inf"): 0.02}  # by the kind of norm: what clips most steps


def train(model, *, rank: int, norm_type: float = 2.0, make=torch.optim.AdamW, steps: int = STEPS):
    """A script of FSDP1's time: two micro-batches, the first under ``no_sync``, clipping."""
    optimizer = make(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for step in range(steps):
        for micro in range(MICRO):
            quiet = model.no_sync() if micro < MICRO - 1 else contextlib.nullcontext()
            with quiet:
                loss = fsdp1.loss_of(model, fsdp1.batch(step, rank, micro)) / MICRO
                loss.backward()
            losses.append(fsdp1.mean(loss))
        norms.append(float(model.clip_grad_norm_(CLIP[norm_type], norm_type)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def train_plain(model, *, ranks: int, norm_type: float = 2.0, steps: int = STEPS):
    """The same in one process that sees every rank's batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for step in range(steps):
        for micro in range(MICRO):
            parts = [fsdp1.loss_of(model, fsdp1.batch(step, rank, micro)) for rank in range(ranks)]
            loss = sum(parts) / ranks / MICRO
            loss.backward()
            losses.append(loss.item())
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP[norm_type], norm_type)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def close(found, wanted, tolerance: float, what) -> None:
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert abs(a - b) <= tolerance * max(1.0, abs(b)), (what, a, b)


def _meshes(strategy):
    """What FSDP1 needs on a CPU to know where to shard: nothing, or a mesh of two by the rest."""
    if "HYBRID" not in strategy:
        return {}
    return {"device_mesh": init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("r", "s"))}


def _strategies(strategies):
    """Against the plain process in fp64, where order of additions hardly shows; against FSDP1, whose clipping cannot
    do fp64, in fp32."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for strategy, norm_type in strategies:
        where = _meshes(strategy)
        plain = fsdp1.build().double()
        wanted = train_plain(plain, ranks=ranks, norm_type=norm_type)
        ours = smp.FSDP(
            fsdp1.build().double(), auto_wrap_policy=fsdp1.by_block, sharding_strategy=strategy.lower(), **where
        )
        found = train(ours, rank=rank, norm_type=norm_type)
        close(found[0], wanted[0], 1e-12, strategy)
        close(found[1], wanted[1], 1e-12, strategy)
        assert max(found[1]) > CLIP[norm_type], "gradients were clipped"
        assert fsdp1.worst(fsdp1.whole(ours), fsdp1.whole(plain)) < 1e-10, strategy
        arguments = {"auto_wrap_policy": fsdp1.by_block, "sharding_strategy": ShardingStrategy[strategy], **where}
        ours, theirs = smp.FSDP(fsdp1.build(), **arguments), fsdp1.torch_fsdp(fsdp1.build(), **arguments)
        found, wanted = (train(model, rank=rank, norm_type=norm_type) for model in (ours, theirs))
        close(found[0], wanted[0], 1e-5, strategy)
        close(found[1], wanted[1], 1e-4, strategy)
        assert fsdp1.worst(fsdp1.whole(ours), fsdp1.whole(theirs)) < 1e-4, strategy


FLAT = [("FULL_SHARD", 2.0), ("SHARD_GRAD_OP", float("inf")), ("NO_SHARD", 2.0)]
SLOW = pytest.mark.slow


@pytest.mark.parametrize("backend", [pytest.param("gloo", marks=SLOW), "smddp"])
@pytest.mark.full
def test_every_strategy_trains_as_fsdp1_and_as_one_process(backend):
    run_distributed(_strategies, FLAT, world_size=2, backend=backend)


HYBRID = [("HYBRID_SHARD", 2.0), ("_HYBRID_SHARD_ZERO2", 1.0)]


@pytest.mark.parametrize(("backend", "strategies"), [pytest.param(b, HYBRID, marks=SLOW) for b in ("gloo", "smddp")])
def test_hybrid_strategies_train_as_fsdp1_and_as_one_process(backend, strategies):
    run_distributed(_strategies, strategies, world_size=4, backend=backend)


def _mixed(count):
    rank = dist.get_rank()
    settings = [
        MixedPrecision(torch.bfloat16, torch.float32, torch.float32),
        MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16),
        MixedPrecision(param_dtype=torch.bfloat16),
        MixedPrecision(reduce_dtype=torch.bfloat16),
    ]
    for mixed in settings[:count]:
        ours = smp.FSDP(fsdp1.build(), auto_wrap_policy=fsdp1.by_block, mixed_precision=mixed)
        torchs = fsdp1.torch_fsdp(fsdp1.build(), auto_wrap_policy=fsdp1.by_block, mixed_precision=mixed)
        with torch.no_grad():  # with gradients and without a backward, FSDP1's next gradients are wrong
            logits = ours(fsdp1.batch(0, 0))
            assert logits.dtype == (mixed.param_dtype or torch.float32)
            assert torch.equal(logits, torchs(fsdp1.batch(0, 0))), mixed
        # Not Adam: it makes a whole step of a gradient that is nothing but rounding.
        found, theirs = (train(model, rank=rank, make=torch.optim.SGD) for model in (ours, torchs))
        close(found[0][:2], theirs[0][:2], 0.0, mixed)
        close(found[0], theirs[0], 1e-3, mixed)
        close(found[1], theirs[1], 2e-2, mixed)
        assert ours.state_dict()["scale"].dtype == torch.float32, "buffers are saved as they were"


@pytest.mark.parametrize(
    ("backend", "count"), [("gloo", 1), pytest.param("gloo", 4, marks=SLOW), pytest.param("smddp", 4, marks=SLOW)]
)
def test_mixed_precision_computes_the_same_bits_as_fsdp1(backend, count):
    run_distributed(_mixed, count, world_size=2, backend=backend)


def _options():
    """What must not change the numbers."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    wanted = train_plain(fsdp1.build().double(), ranks=ranks, steps=3)
    for options in (
        {"backward_prefetch": None},
        {"backward_prefetch": BackwardPrefetch.BACKWARD_POST, "forward_prefetch": True},
        {"cpu_offload": CPUOffload(offload_params=True)},
        {"sync_module_states": True, "device_id": torch.device("cpu")},
        {"use_orig_params": True, "limit_all_gathers": False},
        {"process_group": dist.group.WORLD},
        {"auto_wrap_policy": None},
    ):
        model = fsdp1.build(seed=1 + rank if "sync_module_states" in options else 1).double()
        model = smp.FSDP(model, **{"auto_wrap_policy": fsdp1.by_block, **options})
        close(train(model, rank=rank, steps=3)[0], wanted[0], 1e-12, options)
    tied = train_plain(fsdp1.build(tied=True).double(), ranks=ranks, steps=3)
    model = smp.FSDP(fsdp1.build(tied=True).double(), auto_wrap_policy=fsdp1.by_block)
    close(train(model, rank=rank, steps=3)[0], tied[0], 1e-12, "tied")
    assert model.head.weight is model.embed.weight


@SLOW
def test_options_do_not_change_the_numbers():
    run_distributed(_options, world_size=2)


def _frozen():
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def freeze(model):
        model.embed.requires_grad_(False)  # a whole unit's, when it is one
        for layer in model.layers:
            layer.up.requires_grad_(False)  # some of a unit's
        return model.double()

    plain = freeze(fsdp1.build())
    wanted = train_plain(plain, ranks=ranks, steps=3)
    policy = smp_policy([torch.nn.Embedding, fsdp1.Block])
    ours = smp.FSDP(freeze(fsdp1.build()), auto_wrap_policy=policy)
    close(train(ours, rank=rank, steps=3)[0], wanted[0], 1e-12, "frozen")
    before, after = fsdp1.whole(fsdp1.build().double()), fsdp1.whole(ours)
    assert torch.equal(before["embed.weight"], after["embed.weight"])
    assert torch.equal(before["layers.0.up.weight"], after["layers.0.up.weight"])
    assert not torch.equal(before["layers.0.down.weight"], after["layers.0.down.weight"])


def smp_policy(classes):
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    return ModuleWrapPolicy(classes)


def test_frozen_parameters_stay_and_the_others_train():
    run_distributed(_frozen, world_size=2)


def _counted(model) -> Counter:
    smp.comm.reset_report()
    for micro in range(2):
        fsdp1.loss_of(model, fsdp1.batch(micro, dist.get_rank())).backward()
    return Counter({name: smp.comm.report().calls(name) for name in ("all_gather", "reduce_scatter", "all_reduce")})


def _counts():
    ours = smp.FSDP(fsdp1.build(), auto_wrap_policy=fsdp1.by_block)
    torchs = fsdp1.build()
    for layer in torchs.layers:
        smp.fully_shard(layer)
    smp.fully_shard(torchs)
    bare = fsdp1.build()
    for layer in bare.layers:
        fully_shard(layer)
    fully_shard(bare)
    for module in (bare, *bare.layers):
        module.set_force_sum_reduction_for_comms(True)
    found, report = _counted(ours), smp.comm.report()
    assert all(report.calls(name, "shared buffer") == found[name] for name in ("all_gather", "reduce_scatter"))
    assert found == _counted(torchs) == _counted(bare)
    assert found["reduce_scatter"] == 2 * (fsdp1.BLOCKS + 1)
    assert found["all_gather"] == 2 * (2 * fsdp1.BLOCKS + 1), "each block twice, the root once"
    kept = smp.FSDP(fsdp1.build(), auto_wrap_policy=fsdp1.by_block, sharding_strategy="shard_grad_op")
    assert _counted(kept)["all_gather"] == 2 * (fsdp1.BLOCKS + 1)
    with ours.no_sync():
        assert _counted(ours)["reduce_scatter"] == 0


def test_exchanges_as_often_as_fully_shard_alone():
    run_distributed(_counts, world_size=2, backend="smddp")


def _is_block(module) -> bool:
    return type(module).__name__.endswith("LlamaDecoderLayer")


def _caches():
    """Gradients of a model whose config has transformers' default, ``use_cache=True``, by its own forward."""
    smp.init()
    plain = build_reference("llama_gqa", torch.float64)
    plain.config.use_cache = True
    ids = global_batch(0)[0]

    def gradients(model):
        model(input_ids=ids, labels=ids).loss.backward()
        return [g.full_tensor() if hasattr(g, "full_tensor") else g for g in (p.grad for p in model.parameters())]

    wanted = gradients(copy.deepcopy(plain))
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("smp").addHandler(handler)
    reentrant = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT)
    parallelize = functools.partial(smp.parallelize, gradient_reduction="mean")
    for shard in (smp.FSDP, smp.fully_shard, smp.transform, parallelize):
        model = shard(copy.deepcopy(plain))
        apply_activation_checkpointing(model, checkpoint_wrapper_fn=reentrant, check_fn=_is_block)
        assert fsdp1.worst(dict(enumerate(gradients(model))), dict(enumerate(wanted))) < 1e-12, shard
        told = shard is not parallelize and dist.get_rank() == 0  # parallelize sets it in the config
        assert [line.split(" in ")[0] for line in lines] == ["use_cache is off"] * told
        lines.clear()
        with torch.no_grad():
            assert model(ids, use_cache=True).past_key_values.get_seq_length() == ids.shape[1]
        assert model.generate(ids[:1], max_new_tokens=2, do_sample=False).shape[1] == ids.shape[1] + 2
        with pytest.raises(UserError, match="use_cache=True or past_key_values with reentrant checkpointing"):
            model(ids, use_cache=True)
    model = copy.deepcopy(plain)
    smp.apply_activation_checkpointing(model, check_fn=_is_block, mode="selective")
    assert fsdp1.worst(dict(enumerate(gradients(model))), dict(enumerate(wanted))) < 1e-12


def test_recomputation_fills_no_cache():
    run_distributed(_caches, world_size=2)
