"""Delayed parameter initialisation: build on the meta device, shard, then draw only this rank's shards.

Every value is a function of (seed, parameter name, position in the parameter), so the weights are the same at any
layout and no rank ever allocates the full model.

[Note: values by block]
A parameter is cut, in row-major order, into blocks of ``BLOCK`` elements. Each block has a generator, seeded
by a hash of (seed, name, block number), and is always drawn in full, on the CPU. A rank draws the blocks that its
shard touches and keeps its part of them.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from smp.errors import UserError
from smp.local_shards import local_part
from smp.models.added import Encoded, added_parameters, encoded_parameters, trained_parameters
from smp.models.file_names import parameters_of
from smp.models.init_rules import InitRule, LargeOnMeta, Step

BLOCK = 1 << 16


def first_ranks_seed(groups: Iterable[dist.ProcessGroup | None], device: torch.device | str) -> int:
    """Return the seed of torch's generator on the first rank, for all; collective.

    Scripts may seed each rank differently, or none; replicas must begin with the same values.

    Args:
        groups: along every axis of the mesh, in one order on all ranks; None stands for all ranks.
        device: that the backend serves.
    """
    seed = torch.tensor(torch.initial_seed() % 2**63, device=device)
    for group in groups:
        dist.broadcast(seed, group=group, group_src=0)
    return int(seed)


def from_rank0(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Broadcast rank 0's values, to ``device``; collective."""
    values = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
    dist.broadcast(values, src=0)
    return values


def refuse_other_numbers(number: int, groups: Iterable[dist.ProcessGroup | None], device: torch.device) -> None:
    """Refuse ranks that would broadcast unequal numbers of parameters and buffers; collective.

    Args:
        number: this rank's.
        groups: as :func:`first_ranks_seed`'s.
        device: that the backend serves.
    """
    most_and_least = torch.tensor([number, -number], device=device)
    for group in groups:
        dist.all_reduce(most_and_least, dist.ReduceOp.MAX, group=group)
    most, least = most_and_least.tolist()
    if most != -least:
        raise UserError(
            f"a model's values are taken from the first rank, and ranks have from {-least} to {most} parameters and "
            f"buffers of it: build the same one on all; where embedding and head are tied on some alone, set "
            f"config.tie_word_embeddings to False before it is built, or call model.tie_weights() on the first rank"
        )


def build_on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """Call ``build`` so that parameters are on the meta device and buffers are real.

    Buffers such as rotary frequencies are computed in constructors; from the meta device they could not be
    restored.
    """
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False), LargeOnMeta():
        return build()


def _tied(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Return the (module, name) pairs of each parameter that several modules share."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append((module, name))
    return [found for found in owners.values() if len(found) > 1]


def materialize_(model: nn.Module, device: torch.device) -> None:
    """Allocate the local part of every parameter on ``device``, uninitialised, and move the buffers there."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers() if not buffer.is_meta}
    lost = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if lost:
        raise UserError(
            f"buffer {lost[0]} is on the meta device, so its value is lost: build the model with real buffers"
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        shared = _tied(model)
        model.to_empty(device=device)
        for (first, first_name), *others in shared:  # torch allocates a tied parameter of a plain model once per owner
            for module, name in others:
                module._parameters[name] = first._parameters[first_name]
    else:
        model.to(device)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])


@functools.lru_cache(maxsize=1)
def _block_values(rule: InitRule, seed: int, name: str, block: int) -> torch.Tensor:
    """Make one block's values, fp32, ``(BLOCK,)``; cached as neighbouring runs share a block."""
    digest = hashlib.blake2b(f"{seed}:{name}:{block}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return rule.block(block * BLOCK, BLOCK, generator)


def _contiguous_runs(shape: torch.Size, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Yield, in order, flat ``(start, length)`` ranges in ``shape`` of the box at ``offsets`` with ``sizes``."""
    split = max((axis for axis in range(len(shape)) if sizes[axis] != shape[axis]), default=0)
    inner = math.prod(shape[split + 1 :])
    outer = [range(offsets[axis], offsets[axis] + sizes[axis]) for axis in range(split)]
    strides = [math.prod(shape[axis + 1 :]) for axis in range(split)]

    def starts(axis: int, base: int) -> Iterator[int]:
        if axis == split:
            yield base
            return
        for index in outer[axis]:
            yield from starts(axis + 1, base + index * strides[axis])

    for base in starts(0, 0):
        yield base + offsets[split] * inner, sizes[split] * inner


@torch.no_grad()
def initialize_(model: nn.Module, rules: Callable[[str], InitRule], *, seed: int) -> None:
    """Give every parameter its initial value; each rank fills only its shard.

    Args:
        model: parameters allocated, plain or DTensor.
        rules: the rule of a parameter by its qualified name, as of :func:`smp.models.meta_model.init_rules`.

    Raises:
        UserError: a parameter has no rule, or is still on the meta device; the text names it.
    """
    encoded, parameters = encoded_parameters(model), parameters_of(model)
    for name, parameter in parameters.items():
        if parameter.is_meta:
            raise UserError(f"parameter {name} was left on the meta device, without values: allocate it first")
        if (of := rules(name).rows_of) is not None:
            source, rows = of
            drawn = torch.empty(parameter.shape)
            for row, values in zip(rows, drawn, strict=True):
                _fill(values, parameters[source].shape, (row, 0), rules(source), seed=seed, name=source)
            initialize_parameter_(parameter, values_rule(drawn), seed=seed, name=name)
        elif (how := encoded.get(name)) is None:
            initialize_parameter_(parameter, rules(name), seed=seed, name=name)
        else:
            weight = torch.empty(how.shape)
            initialize_parameter_(weight, rules(name), seed=seed, name=name)
            fill_encoded_(parameter, how, weight)
    _block_values.cache_clear()


def fill_encoded_(parameter: torch.Tensor, how: Encoded, weight: torch.Tensor) -> None:
    """Give this rank's part of a parameter the form of a weight, all of which every rank has."""
    local, offsets = local_part(parameter)
    box = tuple(slice(start, start + size) for start, size in zip(offsets, local.shape, strict=True))
    local.copy_(how.encode(weight)[box])


@torch.no_grad()
def initialize_parameter_(parameter: torch.Tensor, rule: InitRule, *, seed: int, name: str) -> None:
    """Give one parameter its initial value, as :func:`initialize_` does.

    Args:
        parameter: allocated, plain or DTensor.
        name: its qualified name in the model, on which its values depend.
    """
    local, offsets = local_part(parameter)
    if local.numel():
        _fill(local, parameter.shape, offsets, rule, seed=seed, name=name)


def values_rule(values: torch.Tensor) -> InitRule:
    """Return the rule of a parameter that begins with these values."""
    return InitRule((Step(0, values.numel(), "copy", values=values.flatten()),))


def _fill(
    part: torch.Tensor, shape: torch.Size, offsets: tuple[int, ...], rule: InitRule, *, seed: int, name: str
) -> None:
    """Give the values of a parameter's box at ``offsets`` to ``part``, contiguous, with all or the last of its axes."""
    flat, sizes = part.view(-1), (1,) * (len(shape) - part.dim()) + tuple(part.shape)
    filled = 0
    for start, length in _contiguous_runs(shape, offsets, sizes):
        end = start + length
        while start < end:
            block, inside = divmod(start, BLOCK)
            count = min(BLOCK - inside, end - start)
            flat[filled : filled + count].copy_(_block_values(rule, seed, name, block)[inside : inside + count])
            start, filled = start + count, filled + count


@torch.no_grad()
def fill_added_(model: nn.Module, *, seed: int) -> None:
    """Give the parameters that techniques have added, or trained from other values, their initial ones.

    Each rank fills only its shard. Rows of a matrix that is sharded by now have been read with it.
    """
    parameters = parameters_of(model)
    for name, each in added_parameters(model).items():
        if each.initial.rows_of is None:
            initialize_parameter_(parameters[name], each.initial, seed=seed, name=name)
        elif not isinstance(source := parameters[each.initial.rows_of[0]], DTensor):
            parameters[name].copy_(source[list(each.initial.rows_of[1])])
    for name, each in trained_parameters(model).items():
        if each.initial.steps:
            initialize_parameter_(parameters[name], each.initial, seed=seed, name=name)
    _block_values.cache_clear()
