"""Cost of a run: tokens or steps to hours and money, and the bytes that it leaves on hosts' memory and disks."""

from __future__ import annotations

import dataclasses

from smp.checkpoint.config import CheckpointConfig
from smp.config import ActivationConfig
from smp.memory.host import estimate_host_memory
from smp.memory.shape import ModelShape, Workload
from smp.mesh import Mesh
from smp.optim.config import OptimConfig
from smp.optim.optimizers import state_bytes
from smp.parallel import lora
from smp.parallel.activation_checkpoint import waiting_bytes


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a number of tokens takes.

    Attributes:
        device_hours: hours times devices.
        money: None without a price.
    """

    tokens: int
    steps: int
    hours: float
    device_hours: float
    money: float | None


def cost_of(tokens: int, *, step_tokens: int, step_seconds: float, devices: int, price: float | None) -> Cost:
    """Return what it costs to train on so many tokens.

    Args:
        step_tokens: of a step over all ranks.
        price: of a device for an hour.
    """
    steps = -(-tokens // step_tokens)
    hours = steps * step_seconds / 3600
    return Cost(tokens, steps, hours, hours * devices, None if price is None else price * hours * devices)


def host_bytes(
    shape: ModelShape, mesh: Mesh, work: Workload, checkpoint: CheckpointConfig, *, local: int
) -> dict[str, int]:
    """Predict the memory of one host, by category, of a job on GPUs; on CPUs the plan of a rank has it.

    Args:
        local: ranks of a host.
    """
    if work.device_type == "cpu":
        return {}
    one = estimate_host_memory(shape, mesh, work, is_async=checkpoint.is_async, is_local=checkpoint.is_local)
    names = {"process": "processes", "offloaded activations": "pinned copies of activations"}
    return {names.get(name, name): size * local for name, size in one.items()}


def checkpoint_bytes(shape: ModelShape, work: Workload) -> int:
    """Predict the bytes of a checkpoint: trained parameters, and the state of their optimizer."""
    config = work.settings[OptimConfig]
    each = config.parameter_bytes + state_bytes(shape.specs, config)
    return int(each * shape.trained(1).parameters)


def disk_bytes(
    shape: ModelShape, mesh: Mesh, work: Workload, checkpoint: CheckpointConfig, *, local: int
) -> dict[str, int]:
    """Predict the bytes on disks, by use: of the job, but activations of each host."""
    replicas = mesh.replicas.size if checkpoint.is_local else 1
    one = checkpoint_bytes(shape, work) * replicas
    kept = sum(checkpoint.num_kept_checkpoints) + checkpoint.keep_best
    # A new one is whole before an old one goes.
    found = {"checkpoint": one, "kept checkpoints": one * (kept + 1)}
    if checkpoint.save_final_model:
        trained = shape.trained(1).parameters
        merged = shape.frozen_but is not None and work.settings[lora.Config].merges
        added = trained - shape.own_trained.parameters
        found["final model"] = work.settings[OptimConfig].parameter_bytes * (
            shape.parameters - added if merged else trained
        )
    activation = work.settings[ActivationConfig]
    blocks = shape.layers - activation.activation_loading_horizon
    if activation.offload_activations and activation.offload_dir is not None and blocks > 0:
        found["offloaded activations"] = local * waiting_bytes(shape, mesh, work, blocks=blocks)
    return found
