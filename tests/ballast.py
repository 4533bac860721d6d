"""A made-up technique, as a new one would be written: a file of its own, and a line of ``parallelize.TECHNIQUES``."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from smp.config import Section, setting
from smp.memory.shape import ModelShape, Workload
from smp.mesh import Mesh
from smp.parallel.technique import Setup, model_blocks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Section):
    """Memory that each block carries for nothing."""

    ballast_mib: int = setting(64, "MiB in each block.", minimum=0)


def problems(hf_config: Any, setup: Setup) -> list[str]:
    """Refuse an odd number of blocks."""
    layers, size = hf_config.num_hidden_layers, setup.settings[Config].ballast_mib
    if layers % 2:
        return [f"--ballast_mib {size} needs an even number of blocks, got {layers}: use --num_layers {layers + 1}"]
    return []


def apply(model: nn.Module, setup: Setup) -> None:
    """Hang a buffer on each block."""
    for block in model_blocks(model, setup.family):
        block.register_buffer("ballast", torch.zeros(setup.settings[Config].ballast_mib), persistent=False)


def cost(shape: ModelShape, mesh: Mesh, work: Workload) -> dict[str, int]:
    """Count the buffers, which no rank shares."""
    return {"ballast": shape.layers * work.settings[Config].ballast_mib * 2**20}
