"""FSDP1's attributes that scripts read, from the state of a unit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.fsdp import CPUOffload, FSDPModule, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp._common_utils import TrainingState

from smp.fsdp.meshes import default_mesh
from smp.fsdp.units import Unit


def process_group(unit: Unit) -> dist.ProcessGroup:
    """Return the group that a unit is sharded over; without sharding, the group of its replicas, as FSDP1.

    On the mesh of ``smp.init`` it is always the former, over which the first of the replicas saves, as in SMP v2.
    """
    replicated = unit.strategy == ShardingStrategy.NO_SHARD and unit.mesh != default_mesh()
    return unit.mesh.get_group(0 if replicated else unit.mesh.ndim - 1)


def _sharding_strategy(unit: Unit) -> ShardingStrategy:
    return unit.strategy if process_group(unit).size() > 1 else ShardingStrategy.NO_SHARD


def _training_state(unit: Unit) -> TrainingState:
    if unit.summoned is not None:
        return TrainingState.SUMMON_FULL_PARAMS
    module = unit.modules[0]
    assert isinstance(module, FSDPModule)
    idle = module._get_fsdp_state()._training_state.name == "IDLE"
    return TrainingState.IDLE if idle else TrainingState.FORWARD_BACKWARD


READERS: dict[str, Callable[[Unit], Any]] = {
    "process_group": process_group,
    "rank": lambda unit: process_group(unit).rank(),
    "world_size": lambda unit: process_group(unit).size(),
    "sharding_strategy": _sharding_strategy,
    "mixed_precision": lambda unit: unit.options.mixed_precision or MixedPrecision(),
    "cpu_offload": lambda unit: CPUOffload(unit.options.cpu_offload),
    "backward_prefetch": lambda unit: unit.options.backward_prefetch,
    "forward_prefetch": lambda unit: unit.options.forward_prefetch,
    "limit_all_gathers": lambda unit: unit.options.limit_all_gathers,
    "compute_device": lambda unit: unit.device,
    "training_state": _training_state,
}
