"""Models on the meta device, values from rank 0, and over which ranks: groups, meshes, ``smp.init``."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import smp
from smp import FSDP, DelayedParamIniter
from smp.delayed_init import initialize_
from smp.errors import UserError
from smp.fsdp import meshes
from smp.fsdp.units import unit_of
from smp.models.meta_model import init_rules
from tests import fsdp1
from tests.distributed import run_distributed
from tests.model_checks import in_double


def on_meta(cls=fsdp1.Tiny, **kwargs):
    with torch.device("meta"):
        return cls(**kwargs)


def agree(model) -> dict[str, torch.Tensor]:
    """The whole values; every rank must have the same."""
    values = fsdp1.whole(model) | {name: b.clone() for name, b in model.named_buffers()}
    for name, value in values.items():
        first = value.clone()
        dist.broadcast(first, src=0)
        assert torch.equal(first, value), name
    return values


def _to_zero(module: nn.Module) -> None:
    module.to_empty(device="cpu", recurse=False)
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        nn.init.constant_(tensor, 0.25)


def _meta():
    torch.manual_seed(0)
    calls, held, bare = [], [], on_meta(tied=True)

    def init(module):
        calls.append(module)
        _to_zero(module)
        own = [p.to_local() if hasattr(p, "to_local") else p for p in bare.parameters()]
        held.append(sum(p.numel() for p in own if not p.is_meta))

    total, block = sum(p.numel() for p in bare.parameters()), sum(p.numel() for p in bare.layers[0].parameters())
    model = FSDP(bare, auto_wrap_policy=fsdp1.by_block, param_init_fn=init)
    assert len(calls) == len(set(calls)) == len(list(model.modules())), "each module once"
    rest = total - fsdp1.BLOCKS * block
    assert max(held) <= total / 2 + max(block, rest) < total, "never the whole model"
    assert all((v == 0.25).all() for v in agree(model).values())
    assert model.embed.weight is model.head.weight, "allocated apart, still tied"
    fsdp1.loss_of(model, fsdp1.batch(0, 0)).backward()

    model = FSDP(on_meta(tied=True), param_init_fn=lambda m: None if isinstance(m, nn.Embedding) else _to_zero(m))
    assert model.embed.weight is model.head.weight and all((v == 0.25).all() for v in agree(model).values())

    model = FSDP(on_meta(), auto_wrap_policy=fsdp1.by_block)  # reset_parameters of every module
    assert fsdp1.loss_of(model, fsdp1.batch(0, 0)) < 10 and torch.equal(model.scale, torch.tensor([0.5]))

    seen = []
    FSDP(on_meta(), auto_wrap_policy=fsdp1.by_block, param_init_fn=_to_zero, post_param_init_fn=seen.append)
    assert [type(m).__name__ for m in seen] == [*["FSDPBlock"] * fsdp1.BLOCKS, "FSDPTiny"], "each unit, then the root"

    lost = on_meta()
    lost.extra = nn.Module()
    lost.extra.weight = nn.Parameter(torch.empty(3, device="meta"))
    with pytest.raises(UserError, match=r"a Module on the meta device has no reset_parameters\(\)"):
        FSDP(lost)
    with pytest.raises(UserError, match="weight of a Norm is on the meta device, without values: give a param_init_fn"):
        FSDP(on_meta(), param_init_fn=lambda m: None if isinstance(m, fsdp1.Norm) else _to_zero(m))


def test_models_on_the_meta_device_are_filled_unit_by_unit():
    run_distributed(_meta, world_size=2)


class Own(fsdp1.Tiny):
    """With its own rule, as nanoGPT and the models of transformers have it."""

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)
        elif hasattr(module, "reset_parameters"):
            module.reset_parameters()


def delayed(model, **kwargs):
    initer = DelayedParamIniter(model, **kwargs)
    return initer, {"param_init_fn": initer.get_param_init_fn(), "post_param_init_fn": initer.get_post_param_init_fn()}


def _delayed():
    torch.manual_seed(dist.get_rank())  # the values must not come from it
    found = []
    for policy in (fsdp1.by_block, None, ModuleWrapPolicy({nn.Linear, fsdp1.Block})):
        model = on_meta(Own, tied=True)
        initer, functions = delayed(model, seed=3)
        count = sum(p.numel() for p in fsdp1.build(tied=True).parameters())
        with initer.validate_params_and_buffers_inited():
            model = FSDP(model, auto_wrap_policy=policy, **functions)
        assert initer.count_num_params() == count
        assert model.embed.weight is model.head.weight
        found.append(agree(model))
    for other in found[1:]:
        assert all(torch.equal(other[name], value) for name, value in found[0].items()), "the same at any wrapping"
    assert 0.015 < found[0]["layers.0.up.weight"].std() < 0.025
    assert not torch.equal(found[0]["layers.0.up.weight"], found[0]["layers.1.up.weight"])
    model = on_meta(Own)
    other = agree(FSDP(model, **delayed(model, seed=4)[1]))
    assert not torch.equal(other["embed.weight"], found[0]["embed.weight"])

    model = on_meta()  # no rule of the model's: reset_parameters
    _, functions = delayed(model)
    assert agree(FSDP(model, auto_wrap_policy=fsdp1.by_block, **functions))["layers.0.up.bias"].std() > 0
    model, filled = on_meta(tied=True), []
    _, functions = delayed(model, init_method_using_config=lambda m: filled.append(m) or _ones(m))
    assert all((v == 1).all() for v in agree(FSDP(model, **functions)).values())
    assert model.embed in filled and model.head not in filled, "a tied weight is filled once"


def _ones(module):
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        nn.init.ones_(tensor)


def _delayed_errors():
    model = on_meta()
    initer = DelayedParamIniter(model)
    still = pytest.raises(UserError, match=r"embed.weight is still on the meta device")
    with still, initer.validate_params_and_buffers_inited():
        pass
    with initer.validate_params_and_buffers_inited(enabled=False):
        pass
    with pytest.raises(UserError, match=r"layers.0.norm1.weight was on the meta device, and the model's own"):
        lazy = lambda m: None if isinstance(m, fsdp1.Norm) else _to_zero(m)  # noqa: E731
        FSDP(model, param_init_fn=DelayedParamIniter(model, lazy).get_param_init_fn(), auto_wrap_policy=fsdp1.by_block)
    with pytest.raises(UserError, match="not of the model that DelayedParamIniter was made for"):
        FSDP(on_meta(), param_init_fn=initer.get_param_init_fn())


@pytest.mark.parametrize("dtype", [torch.complex64, torch.uint8, torch.int8, torch.bool])
def test_delayed_param_initer_fills_buffers_of_any_dtype(dtype):
    module = nn.Module()
    module.register_buffer("table", torch.ones(3, dtype=dtype, device="meta"))
    DelayedParamIniter(module, lambda m: m.table.zero_()).get_param_init_fn()(module)
    assert module.table.dtype == dtype and module.table.tolist() == [0] * 3


def test_delayed_param_initer():
    run_distributed(_delayed, world_size=2)
    run_distributed(_delayed_errors, world_size=2)


def started():
    """The configuration of a tied Llama, and the plain model as smp starts it with the seed 5."""
    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    plain = LlamaForCausalLM(config)
    initialize_(plain, init_rules(config, seed=5), seed=5)
    return config, plain


def _transformers():
    """A Llama of transformers, buffers and all on the meta device: the values of smp's own initialisation."""
    config, plain = started()
    model = on_meta(LlamaForCausalLM, config=config)
    assert model.model.rotary_emb.inv_freq.is_meta
    _, functions = delayed(model, seed=5)
    model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}), **functions)
    found = agree(model)
    assert all(torch.equal(found[name], p) for name, p in plain.named_parameters())
    assert torch.equal(found["model.rotary_emb.inv_freq"], plain.model.rotary_emb.inv_freq)
    ids = torch.arange(8)[None]
    torch.testing.assert_close(model(ids).logits, plain(ids).logits)
    assert model.config is config and model.dtype == torch.float32
    with torch.no_grad():
        wanted = plain.generate(ids, max_new_tokens=4, do_sample=False)
        assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), wanted)
        with FSDP.summon_full_params(model, writeback=False, recurse=False):
            assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), wanted)
    model.save_pretrained  # noqa: B018 # its own methods are there


@pytest.mark.slow
def test_a_llama_on_the_meta_device_starts_as_smp_starts_it():
    run_distributed(_transformers, world_size=2)


def _seed_of_the_script():
    """Ranks may seed differently, as for dropout: replicas begin with the first rank's values."""

    def seeded(seed, **own):
        torch.manual_seed(seed + dist.get_rank())
        model = on_meta(Own, tied=True)
        return FSDP(model, auto_wrap_policy=fsdp1.by_block, **own, **delayed(model)[1])

    model = on_meta(Own, tied=True)
    wanted = agree(FSDP(model, auto_wrap_policy=fsdp1.by_block, **delayed(model, seed=7)[1]))
    for strategy in ("NO_SHARD", "FULL_SHARD"):
        found = agree(seeded(7, sharding_strategy=strategy))
        assert all(torch.equal(found[name], value) for name, value in wanted.items()), strategy
    assert not torch.equal(agree(seeded(8))["embed.weight"], wanted["embed.weight"])

    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
    )  # fmt: skip
    for given in ({}, {"random_seed": 7}, {"random_seed": 0}):
        smp.init(tensor_parallel_degree=2, hybrid_shard_degree=1, **given)
        torch.manual_seed(7 + dist.get_rank())
        model = smp.transform(on_meta(LlamaForCausalLM, config=config))
        found = agree(FSDP(model, **delayed(model)[1]))
        torch.manual_seed(7 + dist.get_rank())
        same = agree(smp.parallelize(smp.meta_init(config)))
        assert all(torch.equal(found[name], value) for name, value in same.items())
        first = wanted.setdefault("llama", found["lm_head.weight"])
        assert torch.equal(found["lm_head.weight"], first) == (given.get("random_seed") != 0), given


def test_initial_values_follow_the_scripts_seed():
    run_distributed(_seed_of_the_script, world_size=4)


def _from_rank0(shape):
    rank, size = dist.get_rank(), dist.get_world_size()
    where = {}
    if len(shape) == 2:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("r", "s"))
        where = {"device_mesh": mesh, "sharding_strategy": "HYBRID_SHARD"}
    wanted = fsdp1.build(seed=1, tied=True)
    if rank == 0:
        model = fsdp1.build(seed=1, tied=True)
        model.scale.fill_(3.0)
    else:
        model = on_meta(tied=True)
    model = FSDP(
        model,
        auto_wrap_policy=fsdp1.by_block,
        sync_module_states=True,
        param_init_fn=None if rank == 0 else lambda m: m.to_empty(device="cpu", recurse=False),
        **where,
    )
    found = agree(model)
    assert all(torch.equal(found[name], p) for name, p in wanted.named_parameters())
    assert torch.equal(model.scale, torch.tensor([3.0])) and torch.equal(model.positions, wanted.positions)
    assert size == torch.tensor(shape).prod()


@pytest.mark.smoke
def test_values_come_from_rank_0():
    run_distributed(_from_rank0, (2,), world_size=2)
    run_distributed(_from_rank0, (2, 2), world_size=4)


def placed(model) -> tuple[str, list[list[int]]]:
    unit = unit_of(model)
    layout = unit.mesh.mesh.tolist()
    return unit.strategy.name, layout


def _groups():
    rank = dist.get_rank()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    strided = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    half, stride = halves[rank // 2], strided[rank % 2]
    linear = lambda: nn.Linear(4, 4)  # noqa: E731
    mine = [0, 1] if rank < 2 else [2, 3]
    assert placed(FSDP(linear())) == ("FULL_SHARD", [0, 1, 2, 3])
    assert placed(FSDP(linear(), sharding_strategy="NO_SHARD")) == ("NO_SHARD", [[0], [1], [2], [3]])
    assert placed(FSDP(linear(), half)) == ("FULL_SHARD", mine)
    assert placed(FSDP(linear(), half, "NO_SHARD")) == ("NO_SHARD", [[r] for r in mine])
    pair = FSDP(linear(), (half, stride), ShardingStrategy.HYBRID_SHARD)
    assert placed(pair) == ("HYBRID_SHARD", [[0, 1], [2, 3]])
    again = FSDP(nn.Sequential(linear()), (half, stride), "_HYBRID_SHARD_ZERO2")
    assert unit_of(again).mesh is unit_of(pair).mesh, "units that are wrapped one by one share a mesh"
    assert placed(FSDP(linear(), sharding_strategy="HYBRID_SHARD")) == ("HYBRID_SHARD", [0, 1, 2, 3]), "one host"
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s"))
    assert placed(FSDP(linear(), device_mesh=mesh["s"])) == ("FULL_SHARD", mine)
    unnamed = [FSDP(linear(), None, "HYBRID_SHARD", device_mesh=init_device_mesh("cpu", (2, 2))) for _ in range(2)]
    assert placed(unnamed[0]) == ("HYBRID_SHARD", [[0, 1], [2, 3]]), "a mesh without names of its axes"
    for model in (pair, again, FSDP(linear(), half, "NO_SHARD"), *unnamed):
        x = torch.full((1, 4), float(rank))
        model(x).sum().backward()
        assert model.clip_grad_norm_(1.0) > 0
    with pytest.raises(UserError, match=r"HYBRID_SHARD with one process_group.*give the tuple"):
        FSDP(linear(), half, "HYBRID_SHARD")
    with pytest.raises(UserError, match="needs a process group"):
        dist.destroy_process_group()
        FSDP(linear())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def test_over_which_ranks():
    run_distributed(_groups, world_size=4)


def _after_init(cases):
    for config, strategy, wanted in cases:
        smp.init(config)
        model = FSDP(nn.Linear(4, 4), sharding_strategy=strategy)
        assert placed(model) == wanted, (config, strategy)
        given = FSDP(nn.Linear(4, 4), dist.group.WORLD, strategy if "HYBRID" not in strategy else "FULL_SHARD")
        assert "HYBRID" not in placed(given)[0], "what is given goes before smp.init"


def _trains_after_init():
    smp.init({"hybrid_shard_degree": 2, "shared_buffers": False})
    model = FSDP(fsdp1.build().double(), auto_wrap_policy=fsdp1.by_block)
    fsdp1.loss_of(model, fsdp1.batch(0, dist.get_rank())).backward()
    assert fsdp1.worst(fsdp1.gradients(model), fsdp1.plain_gradients(ranks=4)) < 1e-12
    assert smp.comm.report().calls("all_gather", "shared buffer") == 0, "as smp.init was told"


def test_gradients_after_smp_init_are_averaged_over_all():
    run_distributed(_trains_after_init, world_size=4, backend="smddp")


def test_smp_init_says_over_which_ranks():
    """SMP v2's rules: 0 leaves the script's strategy alone, 1 shards nothing, k is hybrid."""
    flat, rows = [0, 1, 2, 3], [[0, 1], [2, 3]]
    cases = [
        ({}, "FULL_SHARD", ("FULL_SHARD", flat)),
        ({}, "SHARD_GRAD_OP", ("SHARD_GRAD_OP", flat)),
        ({}, "HYBRID_SHARD", ("HYBRID_SHARD", flat)),
        ({}, "NO_SHARD", ("NO_SHARD", [[0], [1], [2], [3]])),
        ({"hybrid_shard_degree": 1}, "FULL_SHARD", ("NO_SHARD", [[0], [1], [2], [3]])),
        ({"hybrid_shard_degree": 2}, "FULL_SHARD", ("HYBRID_SHARD", rows)),
        ({"hybrid_shard_degree": 2}, "SHARD_GRAD_OP", ("HYBRID_SHARD", rows)),
        ({"hybrid_shard_degree": 2}, "_HYBRID_SHARD_ZERO2", ("_HYBRID_SHARD_ZERO2", rows)),
        ({"hybrid_shard_degree": 4}, "FULL_SHARD", ("HYBRID_SHARD", flat)),
    ]
    run_distributed(_after_init, cases, world_size=4)


def _hosts_of_two(rank):
    os.environ.update(LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2")


def test_hybrid_strategies_where_tensor_parallelism_takes_all_of_a_host():
    """smp.init shards over the hosts unless it is told a strategy, whose rules then hold for the script, too."""
    tp = {"tensor_parallel_degree": 2}
    cases = [
        (tp, "HYBRID_SHARD", ("HYBRID_SHARD", [0, 2])),
        (tp, "_HYBRID_SHARD_ZERO2", ("_HYBRID_SHARD_ZERO2", [0, 2])),
        (tp, "FULL_SHARD", ("FULL_SHARD", [0, 2])),
        ({**tp, "sharding_strategy": "hybrid_shard"}, "HYBRID_SHARD", ("HYBRID_SHARD", [[0], [2]])),
    ]
    run_distributed(_after_init_under_tp, cases, world_size=4, prepare=_hosts_of_two)


def _after_init_under_tp(cases):
    for config, strategy, (name, ranks) in cases:
        smp.init(config)
        model = FSDP(nn.Linear(4, 4), sharding_strategy=strategy)
        here = dist.get_rank() % 2
        shifted = [rank + here if isinstance(rank, int) else [rank[0] + here] for rank in ranks]
        assert placed(model) == (name, shifted), (config, strategy)


def _tensor_parallel(strategy):
    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        attn_implementation="eager", use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    plain = LlamaForCausalLM(config).double()
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).double()
    mesh = smp.init({"tensor_parallel_degree": 2})
    model = smp.transform(model)
    model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}), sharding_strategy=strategy)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (plain, model)]
    for step in range(5):
        batches = [fsdp1.batch(step, rank) % 40 for rank in range(mesh.data_size)]
        losses = [sum(_causal(plain, ids) for ids in batches) / len(batches), _causal(model, batches[mesh.data_rank])]
        for loss in losses:
            loss.backward()
        norms = [torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5), model.clip_grad_norm_(0.5)]
        torch.testing.assert_close(norms[1], norms[0], rtol=1e-9, atol=0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        mine = losses[1].detach().clone()
        dist.all_reduce(mine, group=mesh.data_group)
        torch.testing.assert_close(mine / mesh.data_size, losses[0].detach(), rtol=1e-9, atol=0)
    full = model.state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(full[name], value, rtol=1e-7, atol=1e-9)
    other = {name: torch.zeros_like(value) for name, value in full.items()}
    model.load_state_dict(other)
    model.load_state_dict(full)
    assert all(torch.equal(value, full[name]) for name, value in model.state_dict().items())


def _tensor_parallel_on_meta():
    """SMP v2's order: on the meta device, transformed, filled as FSDP wraps it."""
    config, plain = started()
    smp.init({"tensor_parallel_degree": 2})
    model = smp.transform(on_meta(LlamaForCausalLM, config=config))
    initer, functions = delayed(model, seed=5)
    with initer.validate_params_and_buffers_inited():
        model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}), **functions)
    full = model.state_dict()
    assert all(torch.equal(full[name], value) for name, value in plain.state_dict().items())
    ids = torch.arange(8)[None]
    torch.testing.assert_close(model(ids).logits.full_tensor(), plain(ids).logits)


@pytest.mark.slow
def test_a_transformed_model_on_the_meta_device():
    run_distributed(_tensor_parallel_on_meta, world_size=4)


def _causal(model, ids):
    return smp.causal_lm_loss_sum(model(ids).logits, ids) / smp.count_valid_tokens(ids)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.slow
def test_tensor_parallelism_below(strategy):
    with in_double():
        run_distributed(_tensor_parallel, strategy, world_size=4)


def test_a_mesh_that_tensor_parallelism_cannot_give_is_refused(monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda *a: 8)
    monkeypatch.setattr(meshes, "local_world_size", lambda: 4)
    with pytest.raises(UserError, match=r"give smp.init the same sharding_strategy"):
        given = smp.ParallelConfig(sharding_strategy="full_shard")
        meshes._from_job(smp.mesh.lay_out(1, 4, 2), given, ShardingStrategy.HYBRID_SHARD)
