"""The optimizer's state where ranks differ: in the order of its parameters and groups, and in what they are given."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP

from smp import FSDP
from smp.errors import UserError
from tests import fsdp1
from tests.distributed import run_distributed

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
        optimizer.zero_grad()
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

    rank0 = FSDP.full_optim_state_dict(model, optimizer)
    box = [rank0]
    dist.broadcast_object_list(box, src=0)  # with rank 0's groups
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    trained = train(twin, wanted, range(3, 5))
    for way in ("shard", "scatter"):
        again = layers(seed=7, sharding_strategy=strategy)
        again.load_state_dict(kept)
        optimizer = adam(again, mixed=True)
        if way == "shard":
            state = FSDP.shard_full_optim_state_dict(box[0], again, optim=optimizer)
        else:
            state = FSDP.scatter_full_optim_state_dict(rank0 or None, again, optim=optimizer)
        optimizer.load_state_dict(state)
        assert fsdp1.worst(train(again, optimizer, range(3, 5)), trained) == 0, way


@pytest.mark.parametrize("backend", ["gloo", "smddp"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
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
    wanted = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False, group=mine)
    saved = FSDP.full_optim_state_dict(model, optimizer, group=mine)
    with FSDP.state_dict_type(model, FULL, optim_state_dict_config=RANK0):
        again = FSDP.optim_state_dict(model, optimizer, group=mine)
    for found in (saved, again):
        assert bool(found) == (rank % 2 == 0)
        if found:
            same_state(found, wanted)
    other = FSDP.full_optim_state_dict(model, optimizer, group=dist.new_group([1, 0, 3, 2]))
    assert bool(other) == (rank == 0), "of the group's first rank"

    for way in ("scatter", "config"):
        fresh = layers(seed=half, process_group=mine)
        into = adam(fresh)
        if way == "scatter":
            state = FSDP.scatter_full_optim_state_dict(saved or None, fresh, optim=into, group=mine)
        else:
            with FSDP.state_dict_type(fresh, FULL, optim_state_dict_config=RANK0):
                state = FSDP.optim_state_dict_to_load(fresh, into, saved, group=mine)
        into.load_state_dict(state)
        same_state(FSDP.full_optim_state_dict(fresh, into, rank0_only=False), wanted)

    if half:  # alone, of ranks that rank 0 is not among
        with pytest.raises(UserError, match=r"the model is on ranks \[2, 3\].*give group="):
            FSDP.scatter_full_optim_state_dict(saved or None, model, optim=optimizer)
    for call in (FSDP.scatter_full_optim_state_dict, FSDP.full_optim_state_dict):
        with pytest.raises(UserError, match=r"group is -100, which is no process group with this rank"):
            if call is FSDP.full_optim_state_dict:
                call(model, optimizer, group=groups[1 - half])
            else:
                call(saved or None, model, optim=optimizer, group=groups[1 - half])
    with pytest.raises(UserError, match="group is 'world', which is no process group"):
        FSDP.full_optim_state_dict(model, optimizer, group="world")
    everywhere = layers()  # of one model on all ranks, any group that holds them spreads rank 0's
    into = adam(everywhere)
    state = FSDP.scatter_full_optim_state_dict(saved if rank == 0 else None, everywhere, optim=into)
    into.load_state_dict(state)
    whole = FSDP.sharded_optim_state_dict(everywhere, into, group=dist.group.WORLD)["state"]["0.weight"]["exp_avg"]
    first = whole.full_tensor()
    if rank == 0:
        assert torch.equal(first, wanted["state"]["0.weight"]["exp_avg"])


def test_the_group_says_whose_state_it_is():
    run_distributed(_halves, world_size=4, timeout=60)


@pytest.mark.slow
def test_the_group_says_whose_state_it_is_over_smddp():
    run_distributed(_halves, world_size=4, backend="smddp", timeout=60)


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
    plain = layers(lambda m: m)
    state = {"state": dict(FSDP.full_optim_state_dict(model, optimizers[0], rank0_only=False)["state"])}
    numbered = FSDP.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, plain)
    assert set(numbered) == {"state"} and set(numbered["state"]) == {0, 1, 2, 3}
    with pytest.raises(UserError, match="has no 'state'"):
        FSDP.optim_state_dict_to_load(model, optimizers[0], {"param_groups": []})


@pytest.mark.parametrize("kind", [FULL, SHARDED])
def test_a_state_without_param_groups(kind):
    run_distributed(_without_groups, kind, world_size=2, timeout=60)
