"""Split a model by its family's plan: parameters become DTensors over the mesh, modules compute with the local ones."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from smp.errors import ConfigError, UserError
from smp.models.family import Family
from smp.models.tensor_plan import Part, TensorPlan, tensor_parallel_problems
from smp.parallel.loss import SPLIT_HEAD, SplitHead
from smp.parallel.technique import draws
from smp.parallel.tensor.forward import split_forward
from smp.parallel.tensor.group import TPGroup
from smp.parallel.tensor.layers import (
    ColumnParallel,
    Replicated,
    ReplicatedParams,
    split_embedding,
    split_head,
    split_part,
)

_MARK = "_smp_tensor_parallel"


def is_split(model: nn.Module) -> bool:
    """Return whether :func:`split_model` was applied."""
    return hasattr(model, _MARK)


def _split_head_of(tp: TPGroup, vocabulary: int) -> SplitHead:
    """Describe the split head to the loss in chunks."""
    return SplitHead(
        first=tp.bounds(vocabulary)[0],
        group=tp.group,
        gather=lambda part: tp.gather(part)[0] if tp.sequence_parallel else part,
        reduce=lambda partial: tp.reduce(partial)[0],
    )


def _from_rank0(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Broadcast rank 0's values, to ``device``; collective."""
    values = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
    dist.broadcast(values, src=0)
    return values


def take_from_rank0(model: nn.Module, device: torch.device, *, parameters: bool = True) -> None:
    """Give buffers, and parameters, rank 0's values on ``device``; collective.

    Other ranks' tensors may have any values, or be on the meta device.
    """
    done: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[name] = _from_rank0(buffer, device)
        if not parameters:
            continue
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) not in done:
                done[id(parameter)] = nn.Parameter(_from_rank0(parameter.detach(), device), parameter.requires_grad)
            module._parameters[name] = done[id(parameter)]


class _Distributor:
    """Replaces parameters by DTensors, a tied one by one."""

    def __init__(self, tp: TPGroup, *, from_rank0: bool):
        self.tp, self.from_rank0 = tp, from_rank0
        self._done: dict[int, nn.Parameter] = {}  # by id of the original parameter

    def __call__(self, module: nn.Module, name: str, placement: Placement) -> None:
        parameter = module._parameters[name]
        if parameter is None or isinstance(parameter, DTensor):
            return
        if id(parameter) not in self._done:
            self._done[id(parameter)] = self._distribute(parameter, placement)
        module._parameters[name] = self._done[id(parameter)]

    def _distribute(self, parameter: nn.Parameter, placement: Placement) -> nn.Parameter:
        tp, shape, stride = self.tp, parameter.shape, parameter.stride()
        full = parameter.detach()
        if self.from_rank0:
            full = _from_rank0(full, torch.device(tp.device))
        if isinstance(placement, Shard):
            first, last = tp.bounds(shape[placement.dim])
            # A copy, so that the unsharded tensor is freed.
            full = full.narrow(placement.dim, first, last - first).clone(memory_format=torch.contiguous_format)
        own = DTensor.from_local(full, tp.mesh, [placement], run_check=False, shape=shape, stride=stride)
        return nn.Parameter(own, requires_grad=parameter.requires_grad)


def _child(module: nn.Module, path: str, where: str) -> nn.Module:
    try:
        return module.get_submodule(path)
    except AttributeError:
        raise UserError(f"the tensor-parallel plan names {path}, which {where} does not have") from None


def _linear(module: nn.Module, path: str, where: str) -> nn.Linear:
    found = _child(module, path, where)
    if not isinstance(found, nn.Linear) or type(found).forward is not nn.Linear.forward:
        raise UserError(f"the tensor-parallel plan splits {path} of {where}, which is a {type(found).__name__}: only "
                        f"nn.Linear can be split, and its product is replaced by smp.parallel.linear")  # fmt: skip
    return found


def _rows(tp: TPGroup, linear: nn.Linear, heads: int | None) -> tuple[bool, slice]:
    """Return whether a column-parallel layer's rows are sharded, and the rows that this rank computes.

    Heads are never cut; where there are fewer than ranks, the layer is replicated and several ranks compute a head.
    """
    rows = linear.out_features
    if heads is None or heads % tp.size == 0:
        return True, slice(*tp.bounds(rows))
    width, head = rows // heads, tp.rank * heads // tp.size
    return False, slice(head * width, (head + 1) * width)


def _split_part(
    tp: TPGroup, block: nn.Module, part: Part, plan: TensorPlan, hf_config: Any, distribute: _Distributor,
    replicated: ReplicatedParams,
) -> None:  # fmt: skip
    where = f"{type(block).__name__}.{part.module}"
    module = _child(block, part.module, type(block).__name__)
    heads, key_value, _ = plan.sizes(hf_config)
    linears, slices = [], {}
    for index, path in enumerate(part.columns):
        linear = _linear(module, path, where)
        count = (key_value if path in part.key_value else heads) if part.heads else None
        split, rows = _rows(tp, linear, count)
        if not split:
            slices[index] = rows
            replicated.params += [
                Replicated(linear, name, True) for name in ("weight", "bias") if getattr(linear, name) is not None
            ]
        elif linear.bias is not None and linear.out_features % tp.size:
            # fully_shard cannot shard an unevenly sharded vector further.
            slices[index] = rows
            replicated.params.append(Replicated(linear, "bias", True))
            distribute(linear, "weight", Shard(0))
        else:
            distribute(linear, "weight", Shard(0))
            distribute(linear, "bias", Shard(0))
        linears.append(linear)
    row = _linear(module, part.row, where)
    distribute(row, "weight", Shard(1))
    if row.bias is not None:  # added after the reduction
        replicated.params.append(Replicated(row, "bias", tp.sequence_parallel))
    if part.heads and key_value < tp.size and hasattr(module, "num_key_value_groups"):
        module.num_key_value_groups = heads // tp.size  # type: ignore[assignment]
    columns = ColumnParallel(tp, linears, slices, replicated)
    split_part(tp, module, columns, row, replicated, random=draws(module, hf_config))


def _replicate_rest(
    tp: TPGroup, root: nn.Module, distribute: _Distributor, replicated: ReplicatedParams, split: set[int]
) -> None:
    """Replicate parameters that no part has split; inside a part their gradients are partial sums on each rank."""
    known = {(id(h.module), h.name) for h in replicated.params}
    for module in root.modules():
        own = [
            name
            for name, parameter in module.named_parameters(recurse=False)
            if not isinstance(parameter, DTensor) and (id(module), name) not in known
        ]
        replicated.params += [Replicated(module, name, tp.sequence_parallel or id(module) in split) for name in own]
        if own:
            replicated.compute_with(module)
    for h in replicated.params:
        distribute(h.module, h.name, Replicate())


def split_model(model: nn.Module, family: Family, tp: TPGroup, *, from_rank0: bool = False) -> nn.Module:
    """Apply tensor parallelism to a Hugging Face causal language model, in place; before sharding.

    Args:
        model: of ``family``'s architecture, unsharded on every rank, or on the meta device.
        family: gives the plan.
        tp: the group.
        from_rank0: take every parameter's values from global rank 0; collective.

    Raises:
        ConfigError: the model cannot be split over so many ranks.
        UserError: the plan does not fit the model.
    """
    plan = family.tensor_plan
    if problems := tensor_parallel_problems(plan, model.config, degree=tp.size):
        raise ConfigError(problems)
    assert plan is not None  # one of the problems, at any degree above 1
    tied = model.get_submodule(family.head).weight is model.get_submodule(family.embedding).weight
    if from_rank0:
        take_from_rank0(model, torch.device(tp.device), parameters=False)
    distribute = _Distributor(tp, from_rank0=from_rank0)
    embedding, head, norm = (
        _child(model, path, "the model") for path in (family.embedding, family.head, family.final_norm or "")
    )
    distribute(embedding, "weight", Shard(0))
    distribute(head, "weight", Shard(0))
    distribute(head, "bias", Shard(0))
    split_embedding(tp, embedding)  # type: ignore[arg-type]
    split_head(tp, head)  # type: ignore[arg-type]
    for block in _child(model, family.blocks, "the model").children():
        replicated = ReplicatedParams(tp, [])
        inside: set[int] = set()
        for part in plan.parts:
            _split_part(tp, block, part, plan, model.config, distribute, replicated)
            inside |= {id(m) for m in block.get_submodule(part.module).modules()}
        _replicate_rest(tp, block, distribute, replicated, inside)
        replicated.surround(block)
    replicated = ReplicatedParams(tp, [])
    _replicate_rest(tp, norm, distribute, replicated, set())
    replicated.surround(norm)
    left = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    if left:
        raise UserError(f"the tensor-parallel plan of {family.name} says nothing of {left[0]}, outside the blocks")
    if (head.weight is embedding.weight) != tied:
        raise UserError("tensor parallelism untied the head from the embedding; this is a defect in smp")
    split_forward(model, tp)
    setattr(model, SPLIT_HEAD, _split_head_of(tp, head.weight.shape[0]))  # type: ignore[index,arg-type]
    setattr(model, _MARK, tp)
    return model
