"""Activation offloading as a technique."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from smp.config import ActivationConfig
from smp.errors import UserError
from smp.memory.shape import ModelShape, Moment, Workload
from smp.mesh import Mesh
from smp.parallel.activation_checkpoint import waiting_bytes
from smp.parallel.offload.offload import apply_activation_offload
from smp.parallel.offload.stores import build_store, require_directory
from smp.parallel.technique import Setup, model_blocks

Config = ActivationConfig


def problems(hf_config: Any, setup: Setup) -> list[str]:
    """Refuse a CPU without a directory to offload to, and a directory that cannot be written."""
    config = setup.settings[Config]
    if not config.offload_activations:
        return []
    if config.offload_dir is None:
        return [] if setup.device_type != "cpu" else [
            "--offload_activations 1 on a CPU needs --offload_dir, as activations are in host memory already: give a "
            "directory on a fast local disk, or use --activation_checkpointing 1 alone"
        ]  # fmt: skip
    try:
        require_directory(Path(config.offload_dir))
    except UserError as error:
        return [str(error)]
    return []


def apply(model: nn.Module, setup: Setup) -> None:
    """Offload the tensors that the model's blocks save for backward."""
    config = setup.settings[Config]
    if config.offload_activations:
        store = build_store(config.offload_dir)
        apply_activation_offload(model_blocks(model, setup.family), store, horizon=config.activation_loading_horizon)


# The moments at which all blocks' activations would be held.
_ALL_WAIT = (Moment.LOSS, Moment.HEAD, Moment.LAST_BLOCK, Moment.LAST_REDUCTION)


def cost(shape: ModelShape, mesh: Mesh, work: Workload) -> dict[str, int]:
    """Count the offloaded activations: all but the last blocks, the computing one, and two in transfer."""
    config = work.settings[Config]
    if not config.offload_activations or work.moment not in _ALL_WAIT:
        return {}
    blocks = min(shape.layers, config.activation_loading_horizon + 3)
    stays, waits = (waiting_bytes(shape, mesh, work, blocks=count) for count in (blocks, shape.layers))
    return {"activations": stays - waits}
