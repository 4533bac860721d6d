"""Split a model by its family's plan: parameters become DTensors over the mesh, modules compute with the local ones."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from smp.delayed_init import from_rank0, refuse_other_numbers
from smp.errors import ConfigError, UserError, a_type
from smp.local_shards import local_tensor
from smp.models.attention_support import attention_dropout
from smp.models.family import Family, tensor_parallel_problems
from smp.models.tensor_plan import Part, PlanSizes
from smp.parallel.linear import is_transposed, product_of
from smp.parallel.loss import SPLIT_HEAD, SplitHead
from smp.parallel.technique import draws
from smp.parallel.tensor.forward import split_forward
from smp.parallel.tensor.functions import SumGradients
from smp.parallel.tensor.fused import RowRedistribution, fused_rows, share_of, split_norm
from smp.parallel.tensor.group import TPGroup
from smp.parallel.tensor.layers import (
    ColumnParallel,
    Replicated,
    ReplicatedParams,
    compute_all_tokens,
    compute_with,
    split_embedding,
    split_head,
    split_part,
)
from smp.parallel.token_rows import ROWS, rows_of

_MARK = "_smp_tensor_parallel"


def is_split(model: nn.Module) -> bool:
    """Return whether :func:`split_model` was applied."""
    return hasattr(model, _MARK)


def _split_head_of(tp: TPGroup, vocabulary: int, *, full_sequence: bool) -> SplitHead:
    """Describe the split head to the loss in chunks; ``full_sequence``: its input is of all tokens."""
    if full_sequence and tp.sequence_parallel:
        return SplitHead(tp.bounds(vocabulary)[0], tp.group, gather=lambda part: part, reduce=lambda partial: partial)
    return SplitHead(
        first=tp.bounds(vocabulary)[0],
        group=tp.group,
        gather=lambda part: tp.gather(part)[0] if tp.sequence_parallel else part,
        reduce=lambda partial: tp.reduce(partial)[0],
    )


def take_from_rank0(model: nn.Module, device: torch.device, *, parameters: bool = True) -> None:
    """Give buffers, and parameters, rank 0's values on ``device``; collective.

    Other ranks' tensors may have any values, or be on the meta device. What is split already stays as it is.

    Raises:
        UserError: ranks have unequal numbers of them.
    """
    refuse_other_numbers(len([*model.parameters(), *model.buffers()]), [None], device)
    done: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[name] = from_rank0(buffer, device)
        if not parameters:
            continue
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if isinstance(parameter, DTensor):
                continue
            if id(parameter) not in done:
                done[id(parameter)] = nn.Parameter(from_rank0(parameter.detach(), device), parameter.requires_grad)
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
            full = from_rank0(full, torch.device(tp.device))
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


def _linear(module: nn.Module, path: str, where: str) -> Any:
    """Return a linear layer of a part; transformers' models have some of their own that compute the same."""
    found = _child(module, path, where)
    plain = isinstance(found, nn.Linear) and (
        type(found).forward is nn.Linear.forward or type(found).__module__.startswith("transformers.models.")
    )
    if not plain and not is_transposed(found):
        raise UserError(f"the tensor-parallel plan splits {path} of {where}, which is {a_type(found)}: only "
                        f"nn.Linear can be split, and its product is replaced by smp.parallel.linear")  # fmt: skip
    return found


class _PartSplitter:
    """Splits one part of a block."""

    def __init__(
        self, tp: TPGroup, block: nn.Module, part: Part, sizes: PlanSizes, distribute: _Distributor,
        replicated: ReplicatedParams,
    ):  # fmt: skip
        self.tp, self.part, self.sizes, self.distribute, self.replicated = tp, part, sizes, distribute, replicated
        self.where = f"{type(block).__name__}.{part.module}"
        self.module: Any = _child(block, part.module, type(block).__name__)
        self.slices: dict[int, Any] = {}
        self.redistributions: dict[int, RowRedistribution] = {}

    def _heads_of(self, path: str) -> int | None:
        if not self.part.heads:
            return None
        return self.sizes.key_value_heads if path in self.part.key_value else self.sizes.heads

    def _column(self, index: int, path: str, layer: Any) -> None:
        """Shard a column-parallel layer, or replicate it where heads are fewer than ranks, none of which is cut."""
        tp, heads = self.tp, self._heads_of(path)
        dim = 1 if is_transposed(layer) else 0
        rows = layer.weight.shape[dim]
        kinds = self.part.fused.get(path)
        if kinds is not None:
            number = {"heads": self.sizes.heads, "key_value": self.sizes.key_value_heads}
            needed = [fused_rows(kinds, rows, **number, rank=rank, tp=tp) for rank in range(tp.size)]
            self.redistributions[index] = RowRedistribution(tp, needed, rows)
            self.slices[index] = needed[tp.rank].to(tp.device)
        elif heads is None or heads % tp.size == 0:
            self.slices[index] = slice(*tp.bounds(rows))
        else:
            self.slices[index] = slice(*share_of("key_value", rows, heads=heads, rank=tp.rank, tp=tp))
            names = ("weight", "bias", *product_of(layer).own)
            self.replicated.params += [Replicated(layer, n, True) for n in names if getattr(layer, n) is not None]
            return
        self.distribute(layer, "weight", Shard(dim))
        for name, axis in {"bias": "outputs", **product_of(layer).own}.items():
            if (parameter := getattr(layer, name)) is None:
                continue
            # fully_shard cannot shard an unevenly sharded vector further.
            if axis != "outputs" or kinds is not None or (parameter.dim() == 1 and rows % tp.size):
                self.replicated.params.append(Replicated(layer, name, True))
            else:
                self.distribute(layer, name, Shard(0))

    def _norm(self, path: str, heads: int) -> None:
        """Split a norm over all of so many heads."""
        tp, norm = self.tp, self.module.get_submodule(path)
        if heads % tp.size == 0:
            self.distribute(norm, "weight", Shard(0))
            split_norm(tp, norm, lambda: norm.weight, copies=1)
            return
        own = slice(*share_of("key_value", norm.weight.shape[0], heads=heads, rank=tp.rank, tp=tp))
        index = len(self.replicated.params)
        self.replicated.params.append(Replicated(norm, "weight", True))
        split_norm(tp, norm, lambda: self.replicated.tensor(index)[own], copies=tp.size // heads)  # type: ignore[index]

    def _set_counts(self) -> None:
        """Give attributes that count heads or widths the numbers of a rank."""
        module, (heads, key_value, _), size = self.module, self.sizes, self.tp.size
        if any(name.startswith("config.") for name in self.part.counts):
            module.config = copy.copy(module.config)
        for path in self.part.counts:
            owner, name = (module.config, path.removeprefix("config.")) if "." in path else (module, path)
            setattr(owner, name, max(1, getattr(owner, name) // size))
        if self.part.heads and key_value < size and hasattr(module, "num_key_value_groups"):
            module.num_key_value_groups = heads // size

    def split(self, hf_config: Any) -> None:
        """Replace parameters and forwards."""
        part, tp, module = self.part, self.tp, self.module
        linears = [_linear(module, path, self.where) for path in part.columns]
        row = _linear(module, part.row, self.where)
        inputs = row.weight.shape[0 if is_transposed(row) else 1]
        for index, (path, layer) in enumerate(zip(part.columns, linears, strict=True)):
            self._column(index, path, layer)
        for path in part.norms:
            of_all = module.get_submodule(path).weight.shape[0] == inputs
            self._norm(path, self.sizes.heads if of_all else self.sizes.key_value_heads)
        self.distribute(row, "weight", Shard(0 if is_transposed(row) else 1))
        if row.bias is not None:  # added after the reduction
            self.replicated.params.append(Replicated(row, "bias", tp.sequence_parallel))
        for name, axis in product_of(row).own.items():
            if axis == "inputs":
                self.distribute(row, name, Shard(getattr(row, name).dim() - 1))
            else:
                self.replicated.params.append(Replicated(row, name, True))
        self._set_counts()
        for name in part.vectors:
            self.distribute(module, name, Shard(0))
        if part.vectors:
            compute_with(module, lambda: {name: local_tensor(module._parameters[name]) for name in part.vectors})
        known = {*part.columns, part.row}
        columns = ColumnParallel(
            tp, linears, self.slices, self.redistributions, self.replicated,
            inner=[part.columns.index(path) for path in part.inner],
            shared=any(p not in known for p, m in module.named_modules() if isinstance(m, nn.Linear)),
        )  # fmt: skip
        # A part that forks the generators for nothing would draw once from those that the ranks share.
        random = draws(module) or (part.heads and attention_dropout(hf_config) > 0)
        split_part(tp, module, columns, row, self.replicated, random=random)


def _replicate_rest(
    tp: TPGroup, root: nn.Module, distribute: _Distributor, replicated: ReplicatedParams, split: set[int],
    callers: Mapping[int, nn.Module],
) -> None:  # fmt: skip
    """Replicate parameters that no part has split; inside a part their gradients are partial sums on each rank.

    Args:
        split: ids of the modules of parts.
        callers: of modules in others, by id: the outermost, which may read their parameters itself.
    """
    known = {(id(h.module), h.name) for h in replicated.params}
    for module in root.modules():
        own = [
            name
            for name, parameter in module.named_parameters(recurse=False)
            if not isinstance(parameter, DTensor) and (id(module), name) not in known
        ]
        replicated.params += [Replicated(module, name, tp.sequence_parallel or id(module) in split) for name in own]
        if own:
            replicated.compute_with(module, callers.get(id(module)))
    for h in replicated.params:
        distribute(h.module, h.name, Replicate())


def _replicate_own(tp: TPGroup, module: nn.Module, distribute: _Distributor) -> None:
    """Replicate the parameters of a module outside the blocks: a norm, learned positions."""
    own = [name for name, parameter in module.named_parameters(recurse=False) if not isinstance(parameter, DTensor)]
    if own:
        replicated = ReplicatedParams(tp, [Replicated(module, name, tp.sequence_parallel) for name in own])
        replicated.compute_with(module)
        for name in own:
            distribute(module, name, Replicate())
        replicated.surround(module)


def split_model(model: nn.Module, family: Family, tp: TPGroup, *, from_rank0: bool = False) -> nn.Module:
    """Apply tensor parallelism to a Hugging Face causal language model, in place; before sharding.

    Args:
        model: of ``family``'s architecture, unsharded on every rank, or on the meta device.
        from_rank0: take every parameter's values from global rank 0; collective.

    Raises:
        ConfigError: the model cannot be split over so many ranks.
        UserError: the plan does not fit the model.
    """
    if problems := tensor_parallel_problems(family, model.config, degree=tp.size):
        raise ConfigError(problems)
    plan = family.tensor_plan
    assert plan is not None  # one of the problems, at any degree above 1
    tied = model.get_submodule(family.head).weight is model.get_submodule(family.embedding).weight
    if from_rank0:
        take_from_rank0(model, torch.device(tp.device), parameters=False)
    distribute = _Distributor(tp, from_rank0=from_rank0)
    embedding, head = (_child(model, path, "the model") for path in (family.embedding, family.head))
    if product_of(head).own:
        raise UserError(f"{family.head} multiplies by a product with parameters of its own, which tensor parallelism "
                        f"does not split: leave it out of the layers whose product is replaced")  # fmt: skip
    distribute(embedding, "weight", Shard(0))
    distribute(head, "weight", Shard(0))
    distribute(head, "bias", Shard(0))
    for module in (embedding, head):
        if (rows := rows_of(module)) is not None:
            if ROWS in module._parameters:
                distribute(module, ROWS, Replicate())
            bounds = tp.bounds(module.weight.shape[0])  # type: ignore[index,arg-type]
            rows.split(bounds, lambda values: SumGradients.apply(tp, values)[0])
    split_embedding(tp, embedding, full_sequence=family.full_sequence_embedding)  # type: ignore[arg-type]
    split_head(tp, head, full_sequence=family.full_sequence_embedding)  # type: ignore[arg-type]
    blocks, sizes = list(_child(model, family.blocks, "the model").children()), plan.sizes(model.config)
    for index, block in enumerate(blocks):
        replicated = ReplicatedParams(tp, [])
        inside: set[int] = set()
        callers: dict[int, nn.Module] = {}
        for part in plan.of_block(index):
            module = _child(block, part.module, type(block).__name__)
            if part.row:
                _PartSplitter(tp, block, part, part.sizes or sizes, distribute, replicated).split(model.config)
                inside |= {id(m) for m in module.modules()}
                continue
            callers |= {id(m): module for m in module.modules()}
            if tp.sequence_parallel:
                compute_all_tokens(tp, module)
        _replicate_rest(tp, block, distribute, replicated, inside, callers)
        replicated.surround(block)
    for module in model.modules():
        _replicate_own(tp, module, distribute)
    left = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    if left:
        raise UserError(f"the tensor-parallel plan of {family.name} says nothing of {left[0]}, outside the blocks")
    if (head.weight is embedding.weight) != tied:
        raise UserError("tensor parallelism untied the head from the embedding; this is a defect in smp")
    split_forward(model, tp, blocks, full_sequence_embedding=family.full_sequence_embedding)
    split_vocabulary = _split_head_of(tp, head.weight.shape[0], full_sequence=family.full_sequence_embedding)  # type: ignore[index,arg-type]
    setattr(model, SPLIT_HEAD, split_vocabulary)
    setattr(model, _MARK, tp)
    return model
