"""FSDP on GPUs: torch's own FSDP1, ours and one plain process train alike; offloading; saved files go both ways."""

from __future__ import annotations

import os
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import CPUOffload, FullStateDictConfig, MixedPrecision, ShardingStrategy, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP

import smp
from tests import fsdp1

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a CUDA device"),
]
STEPS = 10


def _train(model, rank: int, *, clip: bool = True) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        loss = fsdp1.loss_of(model, fsdp1.batch(step, rank).cuda())
        loss.backward()
        if clip:
            model.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(fsdp1.mean(loss))
    return losses


def _close(found, wanted, tolerance: float) -> None:
    assert all(abs(a - b) <= tolerance * max(1, abs(b)) for a, b in zip(found, wanted, strict=True)), (found, wanted)


def _cases(rank: int) -> None:
    device = torch.cuda.current_device()
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        arguments = {"auto_wrap_policy": fsdp1.by_block, "sharding_strategy": ShardingStrategy[strategy]}
        ours = smp.FSDP(fsdp1.build(), device_id=device, **arguments)
        assert next(ours.parameters()).device.type == "cuda" and ours.scale.is_cuda
        theirs = TorchFSDP(fsdp1.build(), device_id=device, use_orig_params=True, **arguments)
        _close(_train(ours, rank), _train(theirs, rank), 1e-5)
    mixed = MixedPrecision(torch.bfloat16, torch.float32)
    ours = smp.FSDP(fsdp1.build(), auto_wrap_policy=fsdp1.by_block, mixed_precision=mixed, device_id=device)
    theirs = TorchFSDP(fsdp1.build(), auto_wrap_policy=fsdp1.by_block, mixed_precision=mixed, device_id=device)
    _close(_train(ours, rank)[:2], _train(theirs, rank)[:2], 1e-3)

    model = smp.FSDP(fsdp1.build(), auto_wrap_policy=fsdp1.by_block, cpu_offload=CPUOffload(offload_params=True))
    plain = smp.FSDP(fsdp1.build(), auto_wrap_policy=fsdp1.by_block)
    _close(_train(model, rank), _train(plain, rank), 1e-5)
    assert next(model.parameters()).device.type == "cpu"

    with torch.device("meta"):
        model = fsdp1.Tiny(tied=True)
    initer = smp.DelayedParamIniter(model)
    functions = {"param_init_fn": initer.get_param_init_fn(), "post_param_init_fn": initer.get_post_param_init_fn()}
    model = smp.FSDP(model, auto_wrap_policy=fsdp1.by_block, **functions)
    assert model.embed.weight is model.head.weight and model.embed.weight.device.type == "cuda"
    _train(model, rank)
    rank0 = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with smp.FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, rank0):
        state = model.state_dict()
    assert bool(state) == (rank == 0) and all(not value.is_cuda for value in state.values())
    with smp.FSDP.summon_full_params(model, rank0_only=True, writeback=False, offload_to_cpu=True):
        assert model.head.weight.device.type == ("cpu" if rank == 0 else "cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    fsdp1.loss_of(model, fsdp1.batch(0, rank).cuda()).backward()
    optimizer.step()
    saved = smp.FSDP.optim_state_dict(model, optimizer)
    assert not saved["state"]["norm.weight"]["exp_avg"].is_cuda
    optimizer.load_state_dict(smp.FSDP.optim_state_dict_to_load(model, optimizer, saved))

    synced = smp.FSDP(fsdp1.build(seed=1 + rank), sync_module_states=True, device_id=device)
    whole = fsdp1.whole(synced)
    assert all(torch.equal(whole[n].cpu(), p) for n, p in fsdp1.build(seed=1).named_parameters())
    if dist.get_world_size() > 1:
        other = (device + 1) % torch.cuda.device_count()
        with pytest.raises(smp.UserError, match=r"call torch.cuda.set_device"):
            smp.FSDP(fsdp1.build(), device_id=other)


def _rank(rank: int, world: int, folder: str, backend: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    torch.cuda.set_device(rank)
    warnings.simplefilter("ignore")
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world)
    _cases(rank)
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["nccl", "smddp"])
def test_trains_as_fsdp1(tmp_path, backend):
    world = min(2, torch.cuda.device_count())
    mp.start_processes(_rank, args=(world, str(tmp_path), backend), nprocs=world, start_method="spawn")
