"""Compile each block with ``torch.compile``."""

from __future__ import annotations

import torch
from torch import nn

from smp.config import ActivationConfig
from smp.parallel.technique import Setup, model_blocks, no_cost, no_problems

Config = ActivationConfig
problems = no_problems
cost = no_cost


def apply(model: nn.Module, setup: Setup) -> None:
    """Compile the blocks; before checkpointing, whose wrapper compilation does not trace."""
    if setup.settings[Config].compile:
        for block in model_blocks(model, setup.family):
            block.forward = torch.compile(block.forward)  # type: ignore[method-assign]
