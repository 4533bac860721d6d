"""A made-up technique whose matrices a folded axis splits: a line of ``parallelize.TECHNIQUES``, before ``tensor``.

To each block's output is added the sum of what all its matrices make of a token. A rank has some of them: it gathers
the tokens of the ranks of the axis, and they add up what theirs make.
"""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from smp.config import ParallelConfig, Settings
from smp.local_shards import local_tensor
from smp.models.added import AddedParameter
from smp.models.family import Family
from smp.models.init_rules import drawn
from smp.parallel.technique import Parameters, Setup, model_blocks

Config = ParallelConfig
AXIS, MATRICES = "ep", 12


def _all_gathered(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts)


def _own_sum(every: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    dist.all_reduce(every := every.clone(), group=group)
    return every.chunk(group.size())[group.rank()].clone()


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _all_gathered(part, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _own_sum(gradient, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, every: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _own_sum(every, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _all_gathered(gradient, ctx.group), None


class Mixture(nn.Module):
    """``(tokens, hidden)`` -> the same; ``weight`` is ``(matrices, hidden, hidden)``."""

    group: dist.ProcessGroup | None = None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        every = tokens if self.group is None else _Gather.apply(tokens, self.group)
        made = torch.stack([torch.tanh(every @ matrix) for matrix in local_tensor(self.weight)]).sum(0)
        return made if self.group is None else _Sum.apply(made, self.group)


def add_mixtures(blocks: list[Any]) -> None:
    """Add the modules, without weights."""
    for block in blocks:
        block.mixture = Mixture()
        block.forward = types.MethodType(_forward, block)  # which copies of the model copy


def _forward(block: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    hidden = type(block).forward(block, *args, **kwargs)
    # Backward needs what comes after the mixture first, and so computes the block again before the mixture's backward.
    return hidden + torch.tanh(block.mixture(hidden.flatten(0, -2))).view_as(hidden)


def parameters(model: nn.Module, family: Family, settings: Settings) -> Parameters:
    """Add the matrices, unless the model has them."""
    blocks = list(model.get_submodule(family.blocks).children())
    if hasattr(blocks[0], "mixture"):
        return Parameters()
    add_mixtures(blocks)
    width = model.config.hidden_size  # type: ignore[union-attr]
    values = drawn(lambda values, generator: values.normal_(std=0.05, generator=generator))
    return Parameters([
        AddedParameter(f"{family.blocks}.{index}.mixture", "weight", (MATRICES, width, width), values)
        for index in range(len(blocks))
    ])  # fmt: skip


def apply(model: nn.Module, setup: Setup) -> None:
    """Give each rank of the axis its matrices."""
    if setup.mesh.degree(AXIS) == 1:
        return
    over = setup.mesh.view(AXIS)[AXIS]
    for block in model_blocks(model, setup.family):
        module: Any = block.mixture
        module.group = setup.mesh.roles[AXIS].group
        module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), over, [Shard(0)], src_data_rank=None))
