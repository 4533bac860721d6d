"""What trains over gloo trains over ``smddp``, with the same numbers, and its exchanges go through shared memory."""

from __future__ import annotations

import pathlib
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.compat import compare, through

WIDTH = 384  # a square of it in fp64 is more than one slot of the shared memory


def build() -> nn.Sequential:
    torch.manual_seed(0)
    sizes = ((16, WIDTH), (WIDTH, WIDTH), (WIDTH, 8))
    layers: list[nn.Module] = []
    for inside, outside in sizes:
        layers += [nn.Linear(inside, outside, dtype=torch.float64), nn.GELU()]
    return nn.Sequential(*layers[:-1])


def batch(step: int, rank: int | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + (dist.get_rank() if rank is None else rank))
    return torch.randn(4, 16, dtype=torch.float64, generator=generator)


def full(parameters) -> list[torch.Tensor]:
    """The whole parameters; those that a rank does not have, or only in part, are gathered."""
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in parameters]
    return [p.detach().clone() for p in whole]


def train(model, *, steps: int = 3, optimizer=None, data_rank: int | None = None) -> list[torch.Tensor]:
    """The losses of a few steps, and what became of the parameters."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    losses, dtype = [], next(model.parameters()).dtype
    for step in range(steps):
        loss = model(batch(step, data_rank).to(dtype)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses + full(model.parameters())


# --- replicated


@through("all_reduce", "all_gather", "broadcast")
def ddp():
    return train(DistributedDataParallel(build(), gradient_as_bucket_view=True, bucket_cap_mb=1))


@through("all_reduce")
def ddp_hook():
    model = DistributedDataParallel(build())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return train(model)


@through("all_reduce", "broadcast")
def zero_redundancy():
    model = DistributedDataParallel(build())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2, foreach=False)
    return train(model, optimizer=optimizer)


def test_replicated():
    compare(ddp, ddp_hook, zero_redundancy, world_size=2)


# --- sharded


@through("all_gather", "reduce_scatter")
def fsdp1():
    model = FullyShardedDataParallel(build(), device_id=torch.device("cpu"), use_orig_params=True)
    results = train(model)[:3]
    with FullyShardedDataParallel.summon_full_params(model):
        return results + full(model.parameters())


def shard(mesh, **options) -> Any:
    model = build()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


@through("all_gather", "reduce_scatter")
def fsdp2():
    return train(shard(init_device_mesh("cpu", (dist.get_world_size(),))))


@through("all_gather", "reduce_scatter")
def fsdp2_single_precision():
    """torch lets the backend take the mean of these gradients, and divides those of others itself."""
    return train(shard(None).float())


@through("all_gather", "reduce_scatter")
def fsdp2_prefetch():
    model = shard(None)
    layers: list[Any] = [layer for layer in model if isinstance(layer, nn.Linear)]
    model.set_modules_to_forward_prefetch(layers[:2])
    layers[0].set_modules_to_forward_prefetch(layers[1:])
    layers[2].set_modules_to_backward_prefetch(layers[1::-1])
    model._set_unshard_async_op(True)
    model.unshard(async_op=True)
    return train(model)


@through("all_gather", "reduce_scatter")
def fsdp2_memory_of_the_group():
    model = shard(None)
    for module in (model, *model[::2]):
        module.set_allocate_memory_from_process_group_for_comm(True)
    return train(model)


def test_sharded():
    cases = (fsdp1, fsdp2, fsdp2_single_precision, fsdp2_prefetch, fsdp2_memory_of_the_group)
    compare(*cases, world_size=2)


# --- meshes of two dimensions


@through("all_gather", "reduce_scatter", "all_reduce")
def hsdp():
    return train(shard(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))))


@through("all_gather", "reduce_scatter", "all_reduce")
def tensor_parallel_and_fsdp2():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model: Any = parallelize_module(build(), mesh["tensor"], plan)
    model = fully_shard(model, mesh=mesh["data"])
    return train(model, data_rank=mesh.get_local_rank("data"))


def test_two_dimensions():
    compare(hsdp, tensor_parallel_and_fsdp2, world_size=4)


@through("all_gather", "reduce_scatter", "all_reduce", "broadcast")
def redistributions():
    """Every placement to every other, in one dimension and in two, also of a length that does not divide."""
    results = []
    size = dist.get_world_size()
    whole = torch.arange(7.0 * 12 * 640, dtype=torch.float64).view(7, 12, 640)
    mesh = init_device_mesh("cpu", (size,))
    placements = [Replicate(), Shard(0), Shard(1), Shard(2)]
    for before in placements:
        tensor = distribute_tensor(whole.clone(), mesh, [before])
        for after in placements:
            results.append(tensor.redistribute(placements=[after]).to_local().clone())
    partial = DTensor.from_local(whole + dist.get_rank(), mesh, [Partial()])
    results += [partial.redistribute(placements=[after]).to_local().clone() for after in placements]
    grid = init_device_mesh("cpu", (2, size // 2))
    tensor = distribute_tensor(whole.clone(), grid, [Shard(0), Shard(1)])
    results.append(tensor.redistribute(placements=[Shard(1), Replicate()]).to_local().clone())
    return [*results, tensor.full_tensor()]


def test_dtensor():
    compare(redistributions, world_size=4)


# --- checkpoints, pipelines


def checkpoint_in(folder: pathlib.Path):
    @through("all_gather", "reduce_scatter")
    def checkpoint():
        here = folder / dist.get_backend()
        model = shard(None)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        train(model, optimizer=optimizer)
        state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.save(state, checkpoint_id=here / "save")
        # A group of its own: the saving thread's exchanges must not mix with the training's, which goes on.
        future: Any = dcp.async_save(state, checkpoint_id=here / "async", process_group=dist.new_group())
        train(model, optimizer=optimizer, steps=1)
        future.result()
        results = []
        for name in ("save", "async"):
            fresh = shard(None)
            saved = get_model_state_dict(fresh)
            dcp.load({"model": saved}, checkpoint_id=here / name)
            set_model_state_dict(fresh, saved)
            results.append(full(fresh.parameters()))
        assert all(torch.equal(first, second) for first, second in zip(*results, strict=True))
        return results

    return checkpoint


@through()
def pipeline():
    """Point-to-point only, which is gloo's."""
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = build()
    cut = [whole[:2], whole[2:]][rank]
    stage = PipelineStage(cut, rank, size, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=lambda out, target: (out - target).pow(2).mean())
    data = torch.cat([batch(0, 0), batch(1, 0)])
    losses: list[torch.Tensor] = []
    target = torch.ones(8, 8, dtype=torch.float64)
    if rank == 0:
        schedule.step(data)
    else:
        torch.testing.assert_close(schedule.step(target=target, losses=losses), build()(data))
    return [*losses, *(p.grad for p in cut.parameters())]


def test_checkpoint_and_pipeline(tmp_path):
    compare(checkpoint_in(tmp_path), pipeline, world_size=2)
