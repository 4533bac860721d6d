"""The optimizer's state where ranks differ: in the order of its parameters and groups, and in what they are given."""

from __future__ import annotations

import copy
import math
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullOptimStateDictConfig, ShardedOptimStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.optim import _NamedOptimizer

import smp
from smp import FSDP, DelayedParamIniter
from smp.errors import UserError
from smp.optim.config import OptimConfig
from smp.optim.optimizers import build_optimizer
from tests import fsdp1
from tests.distributed import run_distributed
from tests.reference import build_reference

FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
RANK0 = FullOptimStateDictConfig(rank0_only=True)
# For torch's own: on a CPU its offload_to_cpu copies nothing, and the buffers are used again.
KEPT = {
    FULL: FullOptimStateDictConfig(offload_to_cpu=False),
    SHARDED: ShardedOptimStateDictConfig(offload_to_cpu=False),
}


def layers(wrap=FSDP, *, seed: int = 0, **kwargs):
    """Four parameters of one shape."""
    torch.manual_seed(seed)
    return wrap(nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4))), **kwargs)


def adam(model, *, mixed: bool = False):
    """Two groups; if ``mixed``, each rank has them and their parameters in an order of its own, as from sets."""
    parameters = list(model.parameters())
    groups = [{"params": parameters[:2], "lr": 1e-2}, {"params": parameters[2:], "lr": 3e-2}]
    if mixed and dist.get_rank() % 2:
        groups = [{**group, "params": group["params"][::-1]} for group in groups[::-1]]
    return torch.optim.AdamW(groups)


def train(model, optimizer, steps) -> dict[str, torch.Tensor]:
    for step in steps:
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        model(x).pow(2).mean().backward()
        optimizer.step()
        model.zero_grad()  # a named optimizer of torch has no such method
    return fsdp1.whole(model)


def same_state(found, wanted) -> None:
    assert found["state"].keys() == wanted["state"].keys()
    for name, values in wanted["state"].items():
        for part, value in values.items():
            assert torch.equal(found["state"][name][part], value), (name, part)


def reversed_on_odd_ranks(values: dict) -> dict:
    return dict(reversed(values.items())) if dist.get_rank() % 2 else values


def _order(strategy):
    model, twin = layers(sharding_strategy=strategy), layers(sharding_strategy=strategy)
    optimizer, wanted = adam(model, mixed=True), adam(twin)
    train(model, optimizer, range(3))
    train(twin, wanted, range(3))
    full, expected = FSDP.optim_state_dict(model, optimizer), FSDP.optim_state_dict(twin, wanted)
    same_state(full, expected)
    lrs = {name: group["lr"] for group in full["param_groups"] for name in group["params"]}
    assert lrs == {"0.weight": 1e-2, "1.weight": 1e-2, "2.weight": 3e-2, "3.weight": 3e-2}

    own = optimizer.state_dict()
    own["state"] = {number: reversed_on_odd_ranks(values) for number, values in own["state"].items()}
    same_state(FSDP.optim_state_dict(model, optimizer, own), expected)

    rank0 = full if dist.get_rank() == 0 else {}
    box = [rank0]
    dist.broadcast_object_list(box, src=0)  # with rank 0's groups
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    trained = train(twin, wanted, range(3, 5))
    for way in ("whole", "config"):
        again = layers(seed=7, sharding_strategy=strategy)
        again.load_state_dict(kept)
        optimizer = adam(again, mixed=True)
        if way == "config":
            FSDP.set_state_dict_type(again, FULL, None, RANK0)
        saved = box[0] if way == "whole" else rank0 or None
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(again, optimizer, saved))
        assert fsdp1.worst(train(again, optimizer, range(3, 5)), trained) == 0, way


@pytest.mark.parametrize(("strategy", "backend"), [("FULL_SHARD", "smddp"), ("NO_SHARD", "gloo")])
@pytest.mark.smoke
def test_ranks_may_order_their_parameters_as_they_like(strategy, backend):
    run_distributed(_order, strategy, world_size=2, backend=backend, timeout=60)


def _halves():
    """Two models, each on half of the ranks: what one half saves is not the other's."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half, mine = rank // 2, groups[rank // 2]
    model = layers(seed=half, process_group=mine)
    optimizer = adam(model)
    train(model, optimizer, range(2))
    wanted = FSDP.optim_state_dict(model, optimizer)
    FSDP.set_state_dict_type(model, FULL, None, RANK0)
    saved = FSDP.optim_state_dict(model, optimizer, group=mine)
    assert bool(saved) == (rank % 2 == 0)
    if saved:
        same_state(saved, wanted)
    other = FSDP.optim_state_dict(model, optimizer, group=dist.new_group([1, 0, 3, 2]))
    assert bool(other) == (rank == 0), "of the group's first rank"

    fresh = layers(seed=half, process_group=mine)
    into = adam(fresh)
    with FSDP.state_dict_type(fresh, FULL, optim_state_dict_config=RANK0):
        into.load_state_dict(FSDP.optim_state_dict_to_load(fresh, into, saved, group=mine))
    same_state(FSDP.optim_state_dict(fresh, into), wanted)

    if half:  # alone, of ranks that rank 0 is not among
        with pytest.raises(UserError, match=r"the model is on ranks \[2, 3\].*give group="):
            FSDP.optim_state_dict_to_load(model, optimizer, saved)
    for call in (FSDP.optim_state_dict_to_load, FSDP.optim_state_dict):
        with pytest.raises(UserError, match=r"group is -100, which is no process group with this rank"):
            call(model, optimizer, saved or None, group=groups[1 - half])
    with pytest.raises(UserError, match="group is 'world', which is no process group"):
        FSDP.optim_state_dict(model, optimizer, group="world")
    everywhere = layers()  # of one model on all ranks, any group that holds them spreads rank 0's
    FSDP.set_state_dict_type(everywhere, FULL, None, RANK0)
    into = adam(everywhere)
    into.load_state_dict(FSDP.optim_state_dict_to_load(everywhere, into, saved if rank == 0 else None))
    FSDP.set_state_dict_type(everywhere, SHARDED)
    whole = FSDP.optim_state_dict(everywhere, into, group=dist.group.WORLD)["state"]["0.weight"]["exp_avg"]
    first = whole.full_tensor()
    if rank == 0:
        assert torch.equal(first, wanted["state"]["0.weight"]["exp_avg"])


def test_the_group_says_whose_state_it_is():
    run_distributed(_halves, world_size=4, timeout=60)


def _without_groups(kind):
    """As FSDP1: what has no param_groups gives none, and the script adds them."""
    model, twin = layers(), layers(fsdp1.torch_fsdp)
    optimizers = adam(model), adam(twin)
    for trained, optimizer in zip((model, twin), optimizers, strict=True):
        train(trained, optimizer, range(2))
    for cls, trained, optimizer in zip((FSDP, TorchFSDP), (model, twin), optimizers, strict=True):
        own = copy.deepcopy(optimizer.state_dict())
        groups = own.pop("param_groups")
        with warnings.catch_warnings(), cls.state_dict_type(trained, kind, None, KEPT[kind]):
            warnings.simplefilter("ignore")
            saved = cls.optim_state_dict(trained, optimizer, own)
            assert "param_groups" not in saved
            whole = cls.optim_state_dict(trained, optimizer)
            assert saved["state"].keys() == whole["state"].keys()
            loaded = cls.optim_state_dict_to_load(trained, optimizer, saved)
        assert set(loaded) == {"state"}
        fresh = adam(trained)
        fresh.load_state_dict({**loaded, "param_groups": groups})
        for parameter, values in optimizer.state.items():
            for part, value in values.items():
                assert torch.equal(fsdp1.local(fresh.state[parameter][part]), fsdp1.local(value)), part
        with warnings.catch_warnings(), pytest.raises((KeyError, UserError)) as caught:
            warnings.simplefilter("ignore")
            cls.optim_state_dict_to_load(trained, optimizer, saved, load_directly=True)
        if cls is FSDP:
            assert "has no 'param_groups'" in str(caught.value)
    with pytest.raises(UserError, match="has no 'state'"):
        FSDP.optim_state_dict_to_load(model, optimizers[0], {"param_groups": []})


@pytest.mark.parametrize("kind", [FULL, SHARDED])
def test_a_state_without_param_groups(kind):
    run_distributed(_without_groups, kind, world_size=2, timeout=60)


def _ranks_differ(sizes):
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])
    model = layers(device_mesh=mesh, sharding_strategy="HYBRID_SHARD" if len(sizes) == 2 else "FULL_SHARD")
    last = dist.get_rank() == dist.get_world_size() - 1
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam(parameters[:-1] if last else parameters)
    train(model, optimizer, range(1))
    wanted = rf"state of 3.weight is exp_avg, exp_avg_sq on rank 0 and nothing on rank {dist.get_world_size() - 1}: "
    for config in (None, RANK0):
        with FSDP.state_dict_type(model, FULL, None, config), pytest.raises(UserError, match=wanted):
            FSDP.optim_state_dict(model, optimizer)
    with FSDP.state_dict_type(model, SHARDED):  # which gathers nothing
        assert len(FSDP.optim_state_dict(model, optimizer)["state"]) == (3 if last else 4)

    optimizer = torch.optim.Adam(parameters, amsgrad=last)
    train(model, optimizer, range(1))
    with pytest.raises(UserError, match=r"exp_avg, exp_avg_sq on rank 0 and exp_avg, exp_avg_sq, max_exp_avg_sq on "):
        FSDP.optim_state_dict(model, optimizer)
    assert fsdp1.mean(torch.tensor(float(dist.get_rank()))) == (dist.get_world_size() - 1) / 2, "ranks stay in step"


@pytest.mark.parametrize(("sizes", "backend"), [((2,), "gloo"), ((2, 2), "smddp")])
def test_all_ranks_refuse_states_that_differ(sizes, backend):
    run_distributed(_ranks_differ, sizes, world_size=math.prod(sizes), backend=backend, timeout=60)


def _named(model, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _NamedOptimizer(model.named_parameters(), torch.optim.Adam, None, model, lr=1e-2, **options)


def _otherwise_kept():
    """State of a named optimizer, of another wrapping and mesh, and of a model that lacked a parameter."""
    model, plain = layers(), layers()
    named, optimizer = _named(model), torch.optim.Adam(plain.parameters(), lr=1e-2)
    train(model, named, range(2))
    train(plain, optimizer, range(2))
    full = FSDP.optim_state_dict(plain, optimizer)
    same_state(FSDP.optim_state_dict(model, named), full)
    again = layers()
    fresh = _named(again)
    fresh.init_state()
    again.load_state_dict(plain.state_dict())
    loaded = FSDP.optim_state_dict_to_load(again, fresh, full, is_named_optimizer=True)
    assert set(loaded["state"]) == set(loaded["param_groups"][0]["params"]) == set(full["state"])
    fresh.load_state_dict(loaded)
    with FSDP.state_dict_type(plain, SHARDED):
        sharded = FSDP.optim_state_dict(plain, optimizer)
    kept = {name: value.clone() for name, value in plain.state_dict().items()}
    wanted = train(plain, optimizer, range(2, 4))
    assert fsdp1.worst(train(again, fresh, range(2, 4)), wanted) == 0

    half = [dist.new_group([0]), dist.new_group([1])][dist.get_rank()]
    unwrapped = layers(lambda m: m)
    unwrapped[0] = FSDP(unwrapped[0])
    for other in (unwrapped, layers(sharding_strategy="NO_SHARD"), layers(process_group=half)):
        other.load_state_dict(kept)
        mixed = adam(other, mixed=True)  # ranks order the parameters differently
        state = FSDP.optim_state_dict_to_load(other, mixed, {"state": sharded["state"]})
        mixed.load_state_dict({**state, "param_groups": mixed.state_dict()["param_groups"]})
        same_state(FSDP.optim_state_dict(other, mixed), full)
        train(other, mixed, range(1))

    larger = layers(lambda m: m)
    larger.add_module("4", nn.Linear(4, 4, bias=False))
    larger = FSDP(larger)
    optimizer = torch.optim.Adam(larger.parameters())
    with pytest.raises(UserError, match=r"1 saved ones, whose 'params' lack 4\.weight: add it"):
        FSDP.optim_state_dict_to_load(larger, optimizer, full)
    full["param_groups"][0]["params"].append("4.weight")
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(larger, optimizer, full))
    assert len(optimizer.state) == 4
    train(larger, optimizer, range(1))
    with pytest.raises(UserError, match="state of nobody belongs to no parameter of the model"):
        FSDP.optim_state_dict(larger, optimizer, {"state": {"nobody": {}}})


def test_states_of_other_optimizers_and_shardings():
    run_distributed(_otherwise_kept, world_size=2, timeout=60)


def _losses(model, optimizer, *, steps=range(3), schedule=False):
    """Train on the same batch on all ranks, as one process would."""
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5) if schedule else None
    losses = []
    for step in steps:
        loss = fsdp1.loss_of(model, fsdp1.batch(step, 0))
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 0.5)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


def _by_shape(model):
    """Two groups, matrices and the rest, which only whole parameters tell apart."""
    parameters = list(model.parameters())
    groups = [[p for p in parameters if p.ndim >= 2], [p for p in parameters if p.ndim < 2]]
    assert all(groups)
    return torch.optim.AdamW([{"params": groups[0], "weight_decay": 0.5}, {"params": groups[1]}], lr=1e-2)


def _made_before():
    tied = {"tied": True}
    plain = fsdp1.build(**tied).double()
    wanted = _losses(plain, _by_shape(plain), steps=range(5), schedule=True)
    for policy in (None, fsdp1.by_block):
        for use_orig_params in (False, True):
            model = fsdp1.build(**tied).double()
            optimizer = _by_shape(model)
            model = FSDP(model, auto_wrap_policy=policy, use_orig_params=use_orig_params)
            assert _losses(model, optimizer, steps=range(5), schedule=True) == pytest.approx(wanted, rel=1e-9)

    # It has stepped already, and goes on with a shard of its state.
    model = fsdp1.build(**tied).double()
    optimizer = _by_shape(model)
    begun = _losses(model, optimizer, steps=range(2))
    model = FSDP(model, auto_wrap_policy=fsdp1.by_block)
    plain = fsdp1.build(**tied).double()
    again = _losses(plain, _by_shape(plain), steps=range(5))
    assert begun + _losses(model, optimizer, steps=range(2, 5)) == pytest.approx(again, rel=1e-9)
    assert set(FSDP.optim_state_dict(model, optimizer)["state"]) == set(fsdp1.whole(model))

    with torch.device("meta"):
        model = fsdp1.build().double()
    optimizer = _by_shape(model)
    delayed = DelayedParamIniter(model)
    model = FSDP(model, auto_wrap_policy=fsdp1.by_block, param_init_fn=delayed.get_param_init_fn())
    plain = fsdp1.build().double()
    plain.load_state_dict(model.state_dict())
    assert _losses(model, optimizer) == pytest.approx(_losses(plain, _by_shape(plain)), rel=1e-9)

    model = FSDP(fsdp1.build(**tied).double(), auto_wrap_policy=fsdp1.by_block)
    with FSDP.summon_full_params(model):
        optimizer = _by_shape(model)
    assert _losses(model, optimizer, steps=range(5), schedule=True) == pytest.approx(wanted, rel=1e-9)

    model = fsdp1.build(**tied).double()
    optimizer = _by_shape(model)
    for layer in model.layers:
        smp.fully_shard(layer)
    assert _losses(smp.fully_shard(model), optimizer, steps=range(5), schedule=True) == pytest.approx(wanted, rel=1e-9)

    with mock.patch("gc.get_objects", side_effect=AssertionError("nobody holds a parameter of it")):
        model = FSDP(fsdp1.build(**tied), auto_wrap_policy=fsdp1.by_block)
        with FSDP.summon_full_params(model):
            pass


def test_an_optimizer_made_before_trains_the_sharded_parameters():
    run_distributed(_made_before, world_size=2, timeout=60)


def _made_before_parallelize(degrees):
    ids = torch.arange(24).view(2, 12)

    def losses(model, optimizer):
        found = []
        for _ in range(3):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    plain = build_reference("llama_tied", torch.float64)
    wanted = losses(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    smp.init(degrees)
    for where in ("transform", "parallelize"):
        model = build_reference("llama_tied", torch.float64)
        if where == "parallelize":
            smp.transform(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if where == "transform":
            smp.transform(model)
        model = smp.parallelize(model, gradient_reduction="mean")
        assert losses(model, optimizer) == pytest.approx(wanted, rel=1e-6), where  # transformers' loss is in fp32


@pytest.mark.parametrize("degrees", [{"hybrid_shard_degree": 2}, {"tensor_parallel_degree": 2}])
def test_an_optimizer_made_before_parallelize(degrees):
    run_distributed(_made_before_parallelize, degrees, world_size=2, timeout=60)


def _of_entries():
    """State of a job's optimizers: momentum alone, moments of another dtype."""
    for config in (OptimConfig(optimizer="muon"), OptimConfig(optimizer_state_dtype="bf16")):
        model, again = layers(), layers(seed=1)
        optimizer, fresh = (build_optimizer(each, config, lr=1e-2) for each in (model, again))
        train(model, optimizer, range(2))
        full = FSDP.optim_state_dict(model, optimizer)
        again.load_state_dict(model.state_dict())
        fresh.load_state_dict(FSDP.optim_state_dict_to_load(again, fresh, full))
        same_state(FSDP.optim_state_dict(again, fresh), full)
        wanted = train(model, optimizer, range(2, 4))
        assert fsdp1.worst(train(again, fresh, range(2, 4)), wanted) == 0


def test_states_of_a_jobs_optimizers():
    run_distributed(_of_entries, world_size=2)
