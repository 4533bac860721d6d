"""Dry run of a job of any size on one machine: meta tensors over torch's fake process group."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from smp.config import Settings
from smp.delayed_init import build_on_meta
from smp.memory.estimate import estimate_memory, memory_table
from smp.memory.shape import ModelShape, Workload
from smp.mesh import Mesh
from smp.models.model_config import ResolvedModel
from smp.models.registry import build_model
from smp.parallel.choices import Choice
from smp.parallel.parallelize import apply_techniques
from smp.parallel.technique import Setup


@contextlib.contextmanager
def sharded_model(resolved: ResolvedModel, mesh: Mesh, settings: Settings, *, rank: int = 0) -> Iterator[nn.Module]:
    """Build the model on the meta device, split and sharded as on ``rank`` of ``mesh``; no group may be running."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=mesh.world_size)
    try:
        build = functools.partial(build_model, resolved.hf_config, attn_implementation=resolved.attn_implementation)
        model = build_on_meta(build)
        yield apply_techniques(model, Setup(resolved.family, mesh.join("cpu"), settings))
    finally:
        dist.destroy_process_group()


def sharded_parameters(
    resolved: ResolvedModel, mesh: Mesh, settings: Settings
) -> dict[str, tuple[torch.Size, torch.Size]]:
    """Shard the model as on rank 0 of ``mesh``; returns every parameter's global and local shape by name."""
    with sharded_model(resolved, mesh, settings) as model:
        return {
            name: (parameter.shape, parameter.to_local().shape if isinstance(parameter, DTensor) else parameter.shape)
            for name, parameter in model.named_parameters()
        }


def report(
    resolved: ResolvedModel,
    mesh: Mesh,
    *,
    shape: ModelShape,
    work: Workload,
    available: int | None,
    choices: Sequence[Choice] = (),
    where: str = "",
    host: dict[str, int] | None = None,
) -> str:
    """Format the result of a dry run: the mesh, the memory table of one rank, and what is chosen.

    Args:
        available: bytes that a rank may use; None if it is planned for another machine.
        where: what the memory is predicted for, as ``, on a GPU``.
        host: prediction of the host memory of a rank on a GPU.
    """
    shapes = sharded_parameters(resolved, mesh, work.settings)
    local = sum(local.numel() for _, local in shapes.values())
    return "\n".join(
        [
            f"{resolved.name}: {shape.parameters:,} parameters in {len(shapes)} tensors; rank 0 stores {local:,}",
            f"mesh: {mesh} = {mesh.world_size} processes",
            "",
            f"predicted peak of each rank{where}:",
            memory_table(estimate_memory(shape, mesh, work), available),
            "",
            *([] if host is None else ["predicted host memory of each rank:", memory_table(host, None), ""]),
            *(["settings that are auto:", *map(str, choices)] if choices else []),
        ]
    )
