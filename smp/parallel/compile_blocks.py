"""Compile each block with ``torch.compile``."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator

import torch
from torch import nn

from smp.config import ActivationConfig
from smp.parallel.choices import Choice, Situation
from smp.parallel.technique import Setup, model_blocks, no_cost, no_problems

Config = ActivationConfig
problems = no_problems
cost = no_cost


def choose(situation: Situation) -> Iterator[Choice]:
    """Compile where Triton and a compiler are there."""
    missing = [name for name in ("triton",) if importlib.util.find_spec(name) is None]
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        missing.append("a C compiler")
    reason = f"{' and '.join(missing)} not found" if missing else "Triton and a compiler are here"
    yield Choice("compile", not missing, reason)


def apply(model: nn.Module, setup: Setup) -> None:
    """Compile the blocks; before checkpointing, whose wrapper compilation does not trace."""
    if setup.settings[Config].compile:
        for block in model_blocks(model, setup.family):
            block.forward = torch.compile(block.forward)  # type: ignore[method-assign]
