"""Experts over ranks in a user's script: transform splits them, and FSDP or fully_shard shards what a rank has."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import DTensor

import smp
from smp.compat.group_checkpoints import in_group
from smp.errors import UserError
from smp.fsdp import meshes
from smp.mesh import lay_out
from tests.distributed import run_distributed
from tests.experts import build, config_of

TOLERANCE = {"rtol": 1e-9, "atol": 1e-12}


def _rows(step: int) -> torch.Tensor:
    return torch.randint(0, 64, (4, 12), generator=torch.Generator().manual_seed(step))


def _train(model, optimizer, rank: int, size: int) -> list[float]:
    found = []
    for step in range(3):
        ids = _rows(step).chunk(size)[rank]
        logits = model(input_ids=ids).logits[:, :-1]  # the loss of transformers is in fp32
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        norm = smp.clip_grad_norm_(model, 0.5) if size > 1 else torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        value = loss.detach().clone()
        if size > 1:
            dist.all_reduce(value)
        found.append([value.item() / size, norm.item()])
    return found


def _plain(kind: str):
    torch.set_num_threads(1)
    model = build(kind)
    found = _train(model, torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9), 0, 1)
    return found, {name: value.detach().clone() for name, value in model.named_parameters()}


def _shard_units(model):
    for block in model.model.layers:
        smp.fully_shard(block)
    return smp.fully_shard(model)


def _shard_by_smp(model):
    return smp.parallelize(model, gradient_reduction="mean")


def _wrap_units(model):
    return smp.FSDP(
        model, auto_wrap_policy=lambda module, recurse, **_: recurse or "DecoderLayer" in type(module).__name__
    )


def _script(kind: str, way, degrees: dict[str, int], wanted, values) -> None:
    mesh = smp.init(degrees)
    model = build(kind)
    if dist.get_rank() > 0:
        model.to("meta")
    model = way(smp.transform(model, load_state_dict_from_rank0=True))
    experts = [p for name, p in model.named_parameters() if ".experts." in name and p.dim() == 3]
    assert experts and all(mesh.degree("ep") in p.device_mesh.shape for p in experts)
    found = _train(model, torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9), mesh.data_rank, mesh.data_size)
    torch.testing.assert_close(
        torch.tensor(found, dtype=torch.float64), torch.tensor(wanted, dtype=torch.float64), **TOLERANCE
    )
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        torch.testing.assert_close(parameter.full_tensor(), values[name], **TOLERANCE)


@pytest.mark.parametrize("way", [_wrap_units, _shard_units, _shard_by_smp])
@pytest.mark.parametrize(
    ("kind", "world", "degrees"),
    [
        ("qwen3_moe", 2, {"expert_parallel_degree": 2}),
        pytest.param("gpt_oss", 4, {"expert_parallel_degree": 2, "hybrid_shard_degree": 2}, marks=pytest.mark.full),
    ],
)
def test_a_script_trains_as_one_process(kind, world, degrees, way):
    run_distributed(_script, kind, way, degrees, *_plain(kind), world_size=world)


def _methods() -> None:
    smp.init({"expert_parallel_degree": 2})
    model = build("mixtral")
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.AdamW((model := _wrap_units(smp.transform(model))).parameters(), lr=1e-2)
    full = model.state_dict()
    for name, value in before.items():
        assert torch.equal(full[name], value), name
    name = "model.layers.1.mlp.experts.down_proj"
    with smp.FSDP.summon_full_params(model):
        for key, value in model.named_parameters():
            assert torch.equal(value, before[key]), key
        model.get_parameter(name).data[5] += 1
    assert torch.equal(model.state_dict()[name][5], before[name][5] + 1)
    model.load_state_dict(before)
    ids = _rows(0)[dist.get_rank() :: 2]
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    state = smp.FSDP.optim_state_dict(model, optimizer)
    assert state["state"][name]["exp_avg"].shape == before[name].shape
    optimizer.load_state_dict(smp.FSDP.optim_state_dict_to_load(model, optimizer, state))
    again = smp.FSDP.optim_state_dict(model, optimizer)
    assert torch.equal(again["state"][name]["exp_avg"], state["state"][name]["exp_avg"])
    with smp.FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        assert model.state_dict()[name].to_local().shape[0] == 4


def test_the_methods_of_fsdp_show_all_experts():
    run_distributed(_methods, world_size=2)


def _refused() -> None:
    smp.init({"expert_parallel_degree": 2})
    torch.manual_seed(dist.get_rank())
    model = build("mixtral")
    with torch.no_grad():
        model.lm_head.weight.add_(dist.get_rank())
    with pytest.raises(UserError, match=r"smp\.transform: .*load_state_dict_from_rank0=True"):
        smp.transform(model)
    model = smp.transform(build("mixtral"))
    with pytest.raises(UserError, match=r"over the ep ranks of the mesh of smp\.init, and FSDP shards over another"):
        smp.FSDP(model, sharding_strategy="NO_SHARD")


def test_what_cannot_be_sharded_is_refused():
    run_distributed(_refused, world_size=2)


def test_fsdp_says_that_it_sends_no_tokens(monkeypatch, caplog):
    mixtral = build("mixtral")
    monkeypatch.setattr(meshes, "_job", lambda: (lay_out(1, 2, ep=2), None, None))
    meshes.warn_of_experts(torch.nn.Linear(2, 2))
    assert not caplog.text
    meshes.warn_of_experts(mixtral)
    assert "expert_parallel_degree 2 has no effect: FSDP shards and gathers these experts" in caplog.text


def _filled_by_a_function() -> None:
    smp.init({"expert_parallel_degree": 2})
    model = smp.transform(smp.meta_init(config_of("mixtral")))
    initer = smp.DelayedParamIniter(
        model, lambda module: [p.normal_() for p in module.parameters(recurse=False)], seed=3
    )
    model = smp.FSDP(model, param_init_fn=initer.get_param_init_fn())
    experts = model.state_dict()["model.layers.1.mlp.experts.down_proj"]
    assert not torch.equal(experts[0], experts[4]) and bool(experts.isfinite().all())


def test_a_function_of_a_script_fills_all_experts_differently():
    run_distributed(_filled_by_a_function, world_size=2)


def _group_without_all_experts() -> None:
    mesh = smp.init({"tensor_parallel_degree": 2, "expert_parallel_degree": 4})
    model = _wrap_units(smp.transform(build("mixtral")))
    name = "model.layers.1.mlp.experts.down_proj"
    assert in_group(model.get_parameter(name), None) is model.get_parameter(name)
    with pytest.raises(UserError, match=r"has not all experts, .*: save and load without process_group"):
        in_group(model.get_parameter(name), mesh.shard.group)


def test_a_checkpoint_of_a_group_without_all_experts_is_refused():
    run_distributed(_group_without_all_experts, world_size=4)
