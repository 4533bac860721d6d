"""State dicts of model and optimizer: whole and sharded, saved here and read there, and the reverse."""

from __future__ import annotations

import copy
import pathlib
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.tensor import DTensor

import smp
from smp import FSDP
from smp.errors import UserError
from tests import fsdp1
from tests.distributed import run_distributed

FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
CONFIGS = {
    FULL: (FullStateDictConfig, FullOptimStateDictConfig),
    SHARDED: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


def make(kind, *, seed: int = 1, strategy="FULL_SHARD", **kwargs):
    """A model of FSDP here or of torch, or a plain one, in fp64, and its AdamW with two groups."""
    model = fsdp1.build(seed=seed, **kwargs).double()
    if kind is not None:
        wrap = FSDP if kind is FSDP else fsdp1.torch_fsdp
        if "HYBRID" in strategy:
            where = {"device_mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s"))}
        else:
            where = {}
        strategy = strategy if kind is FSDP else torch.distributed.fsdp.ShardingStrategy[strategy]
        model = wrap(model, auto_wrap_policy=fsdp1.by_block, sharding_strategy=strategy, **where)
    decayed = [p for n, p in model.named_parameters() if "norm" not in n]
    others = [p for n, p in model.named_parameters() if "norm" in n]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=1e-2)


def steps(model, optimizer, first: int, count: int, *, plain: bool = False) -> list[float]:
    losses, ranks, rank = [], dist.get_world_size(), dist.get_rank()
    for step in range(first, first + count):
        if plain:
            loss = sum(fsdp1.loss_of(model, fsdp1.batch(step, r)) for r in range(ranks)) / ranks
        else:
            loss = fsdp1.loss_of(model, fsdp1.batch(step, rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(fsdp1.mean(loss))
    return losses


def quiet(call, *args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call(*args, **kwargs)


def states(cls, model, optimizer, kind=FULL, model_config=None, optim_config=None):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with cls.state_dict_type(model, kind, model_config, optim_config):
            return model.state_dict(), cls.optim_state_dict(model, optimizer)


def load(cls, model, optimizer, saved, kind=FULL) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with cls.state_dict_type(model, kind):
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(cls.optim_state_dict_to_load(model, optimizer, saved[1]))


def read(model, optimizer, folder) -> dict:
    """Read what ``torch.distributed.checkpoint`` has saved into a model and an optimizer without a state."""
    with FSDP.state_dict_type(model, SHARDED):
        target = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
        dcp.load(target, checkpoint_id=str(folder))
        model.load_state_dict(target["model"])
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, target["optim"]))
    return target


def _whole_states(folder):
    """Rank 0 saves; a plain model, torch's FSDP1 and ours go on from the file, and the reverse."""
    rank = dist.get_rank()
    model, optimizer = make(FSDP)
    steps(model, optimizer, 0, 3)
    rank0 = FullStateDictConfig(offload_to_cpu=True, rank0_only=True), FullOptimStateDictConfig(rank0_only=True)
    saved = states(FSDP, model, optimizer, FULL, *rank0)
    assert (
        FSDP.get_state_dict_type(model).state_dict_type == FULL
        and not FSDP.get_state_dict_type(model).state_dict_config.rank0_only
    ), "what was chosen before holds again"
    if rank == 0:
        torch.save(saved, folder / "ours.pt")
        assert saved[0].keys() == fsdp1.build().state_dict().keys()
        assert all(type(value) is torch.Tensor for value in saved[0].values())
    else:
        assert dict(saved[0]) == {} and saved[1] == {}
    model_t, optimizer_t = make(TorchFSDP)
    steps(model_t, optimizer_t, 0, 3)
    # Not its offload_to_cpu: on a CPU it copies nothing, and the buffers are used again.
    saved_t = states(TorchFSDP, model_t, optimizer_t, FULL, None, FullOptimStateDictConfig(offload_to_cpu=False))
    if rank == 0:
        torch.save(saved_t, folder / "torchs.pt")
        assert saved[1]["state"].keys() == saved_t[1]["state"].keys()
        for name, values in saved_t[1]["state"].items():
            assert {k: v.shape for k, v in values.items()} == {k: v.shape for k, v in saved[1]["state"][name].items()}
        assert [set(g["params"]) for g in saved[1]["param_groups"]] == [
            set(g["params"]) for g in saved_t[1]["param_groups"]
        ]
        assert saved[1]["param_groups"][0].keys() == saved_t[1]["param_groups"][0].keys()
    dist.barrier()
    wanted = steps(model, optimizer, 3, 4)
    for file in ("ours.pt", "torchs.pt"):
        for cls in (TorchFSDP, FSDP):
            from_file = torch.load(folder / file, weights_only=False)
            again = make(cls, seed=7)
            load(cls, *again, from_file)
            found = steps(*again, 3, 4)
            tolerance = 0.0 if (file, cls) == ("ours.pt", FSDP) else 1e-9
            for a, b in zip(found, wanted, strict=True):
                assert abs(a - b) <= tolerance, (file, cls, a, b)
        plain, plain_optimizer = make(None, seed=7)
        plain.load_state_dict(from_file[0])
        rekeyed = FSDP.rekey_optim_state_dict(from_file[1], OptimStateKeyType.PARAM_ID, plain, optim=plain_optimizer)
        plain_optimizer.load_state_dict(rekeyed)
        for a, b in zip(steps(plain, plain_optimizer, 3, 4, plain=True), wanted, strict=True):
            assert abs(a - b) <= 1e-9


def test_whole_states_go_to_and_from_fsdp1_and_a_plain_model(tmp_path):
    run_distributed(_whole_states, tmp_path, world_size=2)


def _sharded_states(folder, strategy):
    model, optimizer = make(FSDP, strategy=strategy)
    steps(model, optimizer, 0, 2)
    saved = states(FSDP, model, optimizer, SHARDED, ShardedStateDictConfig(), ShardedOptimStateDictConfig())
    assert all(isinstance(saved[0][name], DTensor) for name, _ in model.named_parameters())
    assert isinstance(saved[1]["state"]["head.weight"]["exp_avg"], DTensor)
    dcp.save({"model": saved[0], "optim": saved[1]}, checkpoint_id=str(folder / "dcp"))
    wanted = steps(model, optimizer, 2, 3)

    again, optimizer_again = make(FSDP, seed=7, strategy=strategy)
    steps(again, optimizer_again, 9, 1)  # so that there is a state to read into
    into = states(FSDP, again, optimizer_again, SHARDED)
    target = {"model": into[0], "optim": into[1]}
    dcp.load(target, checkpoint_id=str(folder / "dcp"))
    load(FSDP, again, optimizer_again, (target["model"], target["optim"]), SHARDED)
    assert steps(again, optimizer_again, 2, 3) == wanted, "bit for bit"

    fresh, optimizer_fresh = make(FSDP, seed=8, strategy=strategy)  # without a state to read into
    read(fresh, optimizer_fresh, folder / "dcp")
    assert steps(fresh, optimizer_fresh, 2, 3) == wanted, "bit for bit"

    # On other ranks: what dcp saved, read by a plain model's names into whole tensors.
    plain = fsdp1.build(seed=7).double()
    whole = {"model": plain.state_dict()}
    dcp.load(whole, checkpoint_id=str(folder / "dcp"))
    plain.load_state_dict(whole["model"])
    full = FSDP.optim_state_dict(again, optimizer_again)
    assert full["state"]["head.weight"]["exp_avg"].shape == plain.head.weight.shape


@pytest.mark.parametrize("strategy", ["FULL_SHARD", pytest.param("NO_SHARD", marks=pytest.mark.slow)])
def test_sharded_states_go_through_dcp(tmp_path, strategy):
    run_distributed(_sharded_states, tmp_path, strategy, world_size=2, backend="smddp")


@pytest.mark.slow
def test_sharded_states_of_hybrid_sharding_go_through_dcp(tmp_path):
    run_distributed(_sharded_states, tmp_path, "HYBRID_SHARD", world_size=4)


def _torchs_own_functions():
    """``get_state_dict`` and ``set_state_dict`` of torch.distributed.checkpoint."""
    for kind in (FULL, SHARDED):
        model, optimizer = make(FSDP)
        steps(model, optimizer, 0, 2)
        FSDP.set_state_dict_type(model, kind)
        kept, state = copy.deepcopy(get_state_dict(model, optimizer))
        assert isinstance(kept["head.weight"], DTensor) == (kind == SHARDED), "unlike FSDP1's, by the type that is set"
        assert isinstance(state["state"]["head.weight"]["exp_avg"], DTensor)
        wanted = steps(model, optimizer, 2, 2)
        again, optimizer_again = make(FSDP, seed=7)
        FSDP.set_state_dict_type(again, kind)
        set_state_dict(again, optimizer_again, model_state_dict=kept, optim_state_dict=state)
        assert steps(again, optimizer_again, 2, 2) == wanted
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert bool(whole) == (dist.get_rank() == 0)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    again, _ = make(FSDP, seed=7)
    set_model_state_dict(again, whole, options=options)
    assert fsdp1.worst(fsdp1.whole(again), fsdp1.whole(model)) == 0


def test_the_functions_of_torch_distributed_checkpoint():
    run_distributed(_torchs_own_functions, world_size=2)


def _properties():
    model = FSDP(fsdp1.build(tied=True), auto_wrap_policy=fsdp1.by_block)
    model(fsdp1.batch(0, 0))  # no backward follows: the root stays gathered
    full = model.state_dict()
    assert full["embed.weight"].data_ptr() == full["head.weight"].data_ptr(), "written once"
    plain = fsdp1.build(tied=True).state_dict()
    assert all(torch.equal(full[name], plain[name]) for name in plain)
    full["embed.weight"].zero_()
    assert model.state_dict()["embed.weight"].any(), "whole tensors are copies"
    single = FSDP(torch.nn.Linear(3, 3), sharding_strategy="NO_SHARD")
    single.state_dict()["weight"].zero_()
    assert single.state_dict()["weight"].any()

    holder = torch.nn.Sequential(FSDP(torch.nn.Linear(3, 5)), torch.nn.Linear(5, 2))
    assert all(type(v) is torch.Tensor for v in holder.state_dict().values()), "a plain module around units"
    before = FSDP.set_state_dict_type(holder, SHARDED)
    assert before.state_dict_type == FULL and isinstance(holder.state_dict()["0.weight"], DTensor)
    with pytest.raises(ZeroDivisionError), FSDP.state_dict_type(holder, FULL):
        assert not isinstance(holder.state_dict()["0.weight"], DTensor)
        raise ZeroDivisionError
    assert isinstance(holder.state_dict()["0.weight"], DTensor), "also after an error"
    holder.load_state_dict({name: torch.ones(v.shape) for name, v in holder.state_dict().items()})
    assert torch.equal(holder[0].weight.full_tensor(), torch.ones(5, 3))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    fsdp1.loss_of(model, fsdp1.batch(0, 0)).backward()
    optimizer.step()
    model(fsdp1.batch(0, 0))
    assert len(FSDP.optim_state_dict(model, optimizer)["state"]) == len(list(model.parameters()))
    translated = smp.FullStateDictConfig(rank0_only=False, translate_on_save=True)
    with FSDP.state_dict_type(model, FULL, translated):
        assert type(model.state_dict()["norm.weight"]) is torch.Tensor


def test_what_state_dicts_hold():
    run_distributed(_properties, world_size=2)


def _kept(tensors):
    return {key: fsdp1.local(value).clone() for key, value in tensors.items()}


def _same(tensors, kept):
    return all(torch.equal(fsdp1.local(value), kept[key]) for key, value in tensors.items())


def _flat(state):
    """The tensors of an optimizer's state."""
    tensors = {(name, key): v for name, values in state["state"].items() for key, v in values.items()}
    return tensors | {("groups", number): group["lr"] for number, group in enumerate(state["param_groups"])}


def _copies():
    """A state dict stays as it is while training continues, and training does not write into what it has loaded."""
    for kind, offload in ((FULL, False), (FULL, True), (SHARDED, False), (SHARDED, True)):
        for strategy in ("FULL_SHARD", "NO_SHARD"):
            model, optimizer = make(FSDP, strategy=strategy)
            for group in optimizer.param_groups:
                group["lr"] = torch.tensor(1e-2)
            steps(model, optimizer, 0, 2)
            FSDP.set_state_dict_type(model, kind, *(config(offload_to_cpu=offload) for config in CONFIGS[kind]))
            best, state = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
            kept, kept_state = _kept(best), _kept(_flat(state))
            losses = steps(model, optimizer, 2, 2)
            optimizer.param_groups[0]["lr"].fill_(1.0)
            assert _same(best, kept) and _same(_flat(state), kept_state), (kind, offload, strategy)
            for _ in range(2):  # the second time, what was loaded has been trained on
                model.load_state_dict(best)
                optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state))
                assert steps(model, optimizer, 2, 2) == losses, (kind, offload, strategy)
                assert _same(best, kept) and _same(_flat(state), kept_state), (kind, offload, strategy)
    tied = FSDP(fsdp1.build(tied=True), auto_wrap_policy=fsdp1.by_block)
    FSDP.set_state_dict_type(tied, SHARDED)
    state = tied.state_dict()
    assert state["embed.weight"] is state["head.weight"]


def test_state_dicts_are_copies():
    run_distributed(_copies, world_size=2)


def _bad():
    model, optimizer = make(FSDP)
    steps(model, optimizer, 0, 1)
    full = FSDP.optim_state_dict(model, optimizer)
    with pytest.raises(UserError, match=r"LOCAL_STATE_DICT is not available.*SHARDED_STATE_DICT"):
        FSDP.set_state_dict_type(model, StateDictType.LOCAL_STATE_DICT)
    with pytest.raises(UserError, match="the type is a str: give a member of torch's StateDictType"):
        FSDP.set_state_dict_type(model, "FULL_STATE_DICT")
    with pytest.raises(UserError, match=r"the type is a FSDPTiny: .*after the model"):
        FSDP.set_state_dict_type(FULL, model)
    with pytest.raises(UserError, match="a AdamW is given as the model: give the model that FSDP returned"):
        FSDP.optim_state_dict(optimizer, model)
    with pytest.raises(UserError, match="state_dict_config is a ShardedStateDictConfig, and FULL_STATE_DICT takes"):
        FSDP.set_state_dict_type(model, FULL, ShardedStateDictConfig())
    with pytest.raises(UserError, match="nothing in the Linear is wrapped"):
        FSDP.set_state_dict_type(torch.nn.Linear(2, 2), FULL)
    with pytest.raises(UserError, match=r"translate_on_save=False\) is not available"):
        smp.FullStateDictConfig(translate_on_save=False)
    renamed = {**full, "state": {"nobody": next(iter(full["state"].values()))}}
    with pytest.raises(UserError, match="state of nobody belongs to no parameter"):
        FSDP.optim_state_dict_to_load(model, optimizer, renamed)
    regrouped = {**full, "param_groups": [{**group, "params": ["head.weight"]} for group in full["param_groups"]]}
    with pytest.raises(UserError, match="2 parameter groups are not the 2 saved ones"):
        FSDP.optim_state_dict_to_load(model, optimizer, regrouped)
    with pytest.raises(UserError, match="has no 'state': give"):
        FSDP.optim_state_dict_to_load(model, optimizer, {})
    other = {"head.weight": {"exp_avg": torch.ones(2, 2)}}
    with pytest.raises(UserError, match=r"exp_avg of head.weight has the shape \(2, 2\)"):
        FSDP.optim_state_dict_to_load(model, optimizer, {**full, "state": other})
    stranger = torch.optim.SGD(fsdp1.build().parameters(), lr=0.1)
    with pytest.raises(UserError, match="make the optimizer after FSDP"):
        FSDP.optim_state_dict(model, stranger)
    for value in (3, torch.ones(fsdp1.WIDTH).numpy()):
        with pytest.raises(RuntimeError, match=r'norm.weight", expected torch.Tensor'):
            model.load_state_dict({"norm.weight": value}, strict=False)
    with pytest.raises(RuntimeError, match=r"size mismatch for norm.weight"):
        model.load_state_dict({**model.state_dict(), "norm.weight": torch.ones(3)})
    with pytest.raises(RuntimeError, match=r"Missing key.*norm.weight"):
        model.load_state_dict({k: v for k, v in model.state_dict().items() if k != "norm.weight"})


def test_what_does_not_fit_is_said():
    run_distributed(_bad, world_size=2)


def _fsdp1_dcp(folder: pathlib.Path, strategy: str):
    """A sharded checkpoint of FSDP1, read by ``torch.distributed.checkpoint``; FSDP1's ShardedTensors are refused."""
    old, optimizer_old = make(TorchFSDP)
    steps(old, optimizer_old, 0, 2)
    config = ShardedOptimStateDictConfig(offload_to_cpu=False)  # on a CPU it copies nothing, and reuses the buffers
    saved = states(TorchFSDP, old, optimizer_old, SHARDED, None, config)
    quiet(dcp.save, {"model": saved[0], "optim": saved[1]}, checkpoint_id=str(folder))
    wanted = steps(old, optimizer_old, 2, 3)

    model, optimizer = make(FSDP, seed=7, strategy=strategy)
    read(model, optimizer, folder)
    for a, b in zip(steps(model, optimizer, 2, 3), wanted, strict=True):
        assert abs(a - b) <= 1e-9

    replacement = r"is a ShardedTensor, .*checkpoint\.load into model\.state_dict\(\).*get_optimizer_state_dict"
    with pytest.raises(UserError, match=f"embed.weight {replacement}"):
        model.load_state_dict(saved[0])
    with pytest.raises(UserError, match=f"(exp_avg|exp_avg_sq) of .* {replacement}"):
        FSDP.optim_state_dict_to_load(model, optimizer, saved[1])


@pytest.mark.parametrize("strategy", ["FULL_SHARD", pytest.param("NO_SHARD", marks=pytest.mark.slow)])
def test_a_sharded_checkpoint_of_fsdp1_is_read(tmp_path, strategy):
    run_distributed(_fsdp1_dcp, tmp_path, strategy, world_size=2)


def _one_group(folder: pathlib.Path):
    """FSDP1 with ``use_orig_params=False`` has whole units in its groups: a script's second one, of norms, is empty."""
    flat = fsdp1.torch_fsdp(
        fsdp1.build(seed=1).double(), auto_wrap_policy=fsdp1.by_block, use_orig_params=False
    )  # fmt: skip
    names = dict(flat.named_parameters())
    assert not any("norm" in name for name in names)
    groups = [{"params": list(names.values()), "weight_decay": 0.1}, {"params": [], "weight_decay": 0.0}]
    old = torch.optim.AdamW(groups, lr=1e-2)
    norms = []
    for model in (FSDP(fsdp1.build(seed=1)), fsdp1.torch_fsdp(fsdp1.build(seed=1), use_orig_params=False)):
        fsdp1.loss_of(model, fsdp1.batch(0, dist.get_rank())).backward()
        norms += [smp.clip_grad_norm_(model, 0), smp.clip_grad_norm_(model, 0.1), smp.clip_grad_norm_(model, 0)]
    torch.testing.assert_close(norms[:3], norms[3:], rtol=1e-5, atol=0)
    steps(flat, old, 0, 2)
    for group in old.param_groups:
        group["lr"] = 3e-3
    config = ShardedOptimStateDictConfig(offload_to_cpu=False)
    saved = states(TorchFSDP, flat, old, SHARDED, None, config)
    quiet(dcp.save, {"model": saved[0], "optim": saved[1]}, checkpoint_id=str(folder))
    wanted = steps(flat, old, 2, 3)

    for decays in ((0.1, 0.1), (0.1, 0.0)):
        model, optimizer = make(FSDP, seed=7)
        for group, decay in zip(optimizer.param_groups, decays, strict=True):
            group["weight_decay"] = decay
        saved = read(model, optimizer, folder)
        assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(3e-3, d) for d in decays]
        losses = steps(model, optimizer, 2, 3)
        difference = max(abs(a - b) for a, b in zip(losses, wanted, strict=True))
        assert difference <= 1e-9 if decays[0] == decays[1] else difference > 1e-9
    optimizer.param_groups[0]["lr"] = 1.0
    with pytest.raises(UserError, match="2 parameter groups are not the 2 saved ones, and their lr differs: make"):
        FSDP.optim_state_dict_to_load(model, optimizer, saved["optim"])


def test_the_groups_of_flat_parameters_are_taken_by_name(tmp_path):
    run_distributed(_one_group, tmp_path, world_size=2)
