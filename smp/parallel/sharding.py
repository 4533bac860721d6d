"""Hybrid sharding over torch's ``fully_shard`` (FSDP2), unit by unit."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from smp.comm import cuda, fsdp, gloo
from smp.config import ActivationConfig, ParallelConfig
from smp.errors import UserError
from smp.memory.warnings import warn_of_cache_flushes
from smp.mesh import Mesh
from smp.models.experts import fp32_routers
from smp.models.family import Family
from smp.optim.config import OptimConfig
from smp.parallel import one_rank
from smp.parallel.activation_checkpoint import hide_from_selection
from smp.parallel.choices import Choice, Situation
from smp.parallel.gradient_sum import begin_microbatch, sum_gradients
from smp.parallel.sharding_cost import cost as cost
from smp.parallel.technique import Setup, model_blocks
from smp.parallel.units import Unit, size_based_units, transformer_units, with_inner

Config = ParallelConfig
T = TypeVar("T")

# FSDP1's size_based_auto_wrap_policy used this default.
MIN_UNIT_PARAMETERS = 100_000_000
_SUMMED = "_smp_gradients_are_summed"  # attribute of a model


class _One(float):
    """The factor 1. By a plain number torch divides what a sharding group of one rank reduces, into a copy."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple[Any, ...], kwargs: Any = None) -> Any:
        return args[0]


def fsdp_modules(model: nn.Module) -> Iterator[FSDPModule]:
    """Return every module that ``fully_shard`` was applied to, outermost first."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def shard_model(
    model: nn.Module,
    units: list[Unit],
    *,
    mesh: Mesh,
    parallel: ParallelConfig,
    param_dtype: torch.dtype | None,
    cpu_offload: bool = False,
    rounds_once: bool = False,
) -> nn.Module:
    """Shard ``model`` in place, each unit over the mesh's data axes.

    Gradients are summed over ranks, not averaged: the loss is divided by the global number of valid tokens, which
    makes the update the same at any layout.

    Args:
        model: parameters real or on the meta device.
        units: from :func:`transformer_units` or :func:`size_based_units`; the root takes the rest.
        parallel: prefetch and buffer settings.
        param_dtype: dtype to compute in; None keeps the parameters' own. Reduction is in fp32.
        cpu_offload: keep shards, their gradients and so the optimizer's state in host memory.
        rounds_once: sum the gradients of micro-batches before they get the parameters' dtype.
    """
    reduced = param_dtype is not None and param_dtype != torch.float32
    policy = MixedPrecisionPolicy(
        param_dtype=param_dtype if reduced else None,
        # The sum over ranks in bf16 would depend on how many there are: no two layouts would train alike.
        reduce_dtype=torch.float32 if reduced else None,
        # Positions, masks and chosen tokens are inputs too; a cast would take digits from those that count.
        cast_forward_inputs=False,
    )
    policies = {False: policy, True: dataclasses.replace(policy, param_dtype=None)}
    # Memory is pinned for copies to a GPU.
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if cpu_offload else OffloadPolicy()
    *units, root = with_inner(model, [*units, Unit([model], reshard=False)], fp32_routers(model) if reduced else ())
    every = [each for outer in (*units, root) for each in (*outer.inside, outer)]  # those inside first
    alone = all(mesh.fsdp_mesh_of(unit.axis).size() == 1 for unit in every)  # sharded over one rank, and no replicas
    for unit in every:
        # [Note: units inside of units] fully_shard leaves to a later, outer call what an earlier one has sharded. The
        # other way round the outer unit would own the parameters, over the wrong mesh, and the inner one none.
        over, modules = mesh.fsdp_mesh_of(unit.axis), unit.modules
        group = over.get_group(over.ndim - 1)
        place = functools.partial(placement, ranks=1 if unit.axis is None else group.size())
        fully_shard(
            modules if len(modules) > 1 else modules[0], mesh=over, reshard_after_forward=unit.reshard,
            mp_policy=policies[unit.fp32], shard_placement_fn=place, offload_policy=offload,
        )  # fmt: skip
        # The gradient of a look-up reads no weights: without this backward would gather the table to free it again.
        unit.first.set_unshard_in_backward(unit.in_backward)
        for module in cast(list[FSDPModule], modules):
            # Both are needed: a factor of 1 alone still asks gloo for an operation it does not have.
            if over.size() > 1:
                module.set_gradient_divide_factor(_One(1))
            module.set_force_sum_reduction_for_comms(True)
            if rounds_once:
                sum_gradients(module)
            if group.size() == 1:  # first: what it allocates, too, is outside of inference mode
                one_rank.use_in_place(module, reduces=alone and not cpu_offload)
            # By module, as its parameter group has the buffers; over the group of the last dimension, the shards.
            install_collectives(module, group, mesh.device_type, shared_buffers=parallel.shared_buffers)
            if unit.axis is not None or unit.fp32:
                hide_from_selection(module)
    _set_prefetch(units, parallel)
    if alone:
        one_rank.use_one_stream(model)
    # What clips, logs or wraps the gradients later must know whether they are sums: a factor of all ranks is at stake.
    setattr(model, _SUMMED, True)
    return model


def average_gradients(model: nn.Module, mesh: Mesh) -> None:
    """Divide the summed gradients of a sharded model by the number of ranks that have different tokens.

    By a hook, as torch divides by ``set_gradient_divide_factor`` twice where a sharding group has one rank.
    """
    for module in fsdp_modules(model) if mesh.loss.size > 1 else ():
        module.set_all_reduce_hook(lambda gradients: gradients.div_(mesh.loss.size))  # type: ignore[arg-type]
    setattr(model, _SUMMED, False)


def averages_gradients(model: nn.Module) -> bool:
    """Return whether gradients of a sharded model are averaged over ranks, as torch's ``fully_shard`` does."""
    return any(fsdp_modules(model)) and not getattr(model, _SUMMED, False)


def placement(parameter: nn.Parameter, ranks: int = 1) -> Shard | None:
    """Return the placement that shards a parameter: None, the first axis, unless tensor parallelism splits it unevenly.

    A DTensor that is sharded twice along one axis knows its offsets only if the first sharding is even.

    Args:
        ranks: that get even shards, of the second axis where they do not divide the first, as of few large matrices.
    """
    if isinstance(parameter, DTensor):
        rows, *others = parameter.to_local().shape
        if rows % ranks and others and others[0] % ranks == 0:
            return Shard(1)
        for placement in parameter.placements:
            if (
                isinstance(placement, Shard)
                and placement.dim == 0
                and parameter.shape[0] % parameter.device_mesh.size()
            ):
                return Shard(1)
    return None


def install_collectives(
    module: FSDPModule, group: dist.ProcessGroup, device_type: str, *, shared_buffers: bool = True
) -> None:
    """Replace torch's collectives of ``fully_shard`` where smp has faster ones for the backend of ``group``.

    Args:
        module: ``fully_shard`` was applied to it.
        group: ranks that its parameters are sharded over.
        shared_buffers: with backend smddp, use memory that the host's ranks share.
    """
    # A unit without parameters of its own, as a root of which every child is a unit, has no group.
    if (parameters := cast(Any, module)._get_fsdp_state()._fsdp_param_group) is not None:
        for name in ("unshard", "wait_for_unshard"):
            setattr(parameters, name, _outside_inference_mode(getattr(parameters, name)))
    backend = dist.get_backend(group)
    if backend == "gloo" and device_type == "cpu":  # gloo sends no GPU memory by itself
        gloo.install(module)
    elif backend == "smddp" and shared_buffers:
        fsdp.install(module, group) if device_type == "cpu" else cuda.install(module, group)


def _outside_inference_mode(function: Callable[..., T]) -> Callable[..., T]:
    """Make what a first forward allocates, and training then writes into, tensors that training can use."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> T:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return called


def _set_prefetch(units: list[Unit], parallel: ParallelConfig) -> None:
    if parallel.forward_prefetch:
        for unit, following in itertools.zip_longest(units, units[1:]):
            # By the outer unit: recomputation runs the forward of those inside, which would gather the next block.
            ahead = [each.first for each in (*unit.inside, following) if each]
            unit.first.set_modules_to_forward_prefetch(ahead)
    if parallel.backward_fetch_policy == "backward_post":
        for unit in (each for outer in units for each in (outer, *outer.inside)):
            # An explicit list replaces the default (the unit before this one); itself is gathered already: no prefetch.
            unit.first.set_modules_to_backward_prefetch([unit.first])


def reshard(model: nn.Module) -> None:
    """Free every gathered parameter, so that ``named_parameters`` shows the sharded ones that the optimizer knows.

    Backward does this by itself; a forward that no backward follows leaves the last unit gathered.
    """
    for module in fsdp_modules(model):
        module.reshard()


def set_gradient_sync(model: nn.Module, *, last: bool, defer: bool, keep: bool = False) -> None:
    """Choose the reductions of the next micro-batch's backward, and whether it frees the gathered parameters.

    Before the last micro-batch of a step gradients are reduced over the sharding group alone, not over replicas. With
    ``defer`` nothing is reduced before the last one, and unsharded gradients are kept. With ``keep``, for a model that
    is sharded with ``reshard_between_microbatches`` off, parameters stay gathered until the last one.

    ``set_is_last_backward(False)`` is not used: it keeps the forward order of the previous micro-batch, and the first
    unit's backward then prefetches a unit that is not needed (one all-gather per micro-batch).
    """
    root = cast(FSDPModule, model)
    begin_microbatch(fsdp_modules(model), last=last)
    if defer:
        root.set_requires_gradient_sync(last)
    else:
        # With replicas the reduced shards of earlier micro-batches wait in the group for the last one's all-reduce: a
        # step must end with last=True, or the next one would begin with them.
        root.set_requires_all_reduce(last)
    if keep:
        root.set_reshard_after_backward(last)


def _whole_head(model: nn.Module, family: Family) -> nn.Module:
    """Return the head, or the module around it that has what the head shares, as a bias; the embedding aside."""
    path, embedded = family.head, {id(p) for p in model.get_submodule(family.embedding).parameters()}
    shared = {id(p) for p in model.get_submodule(path).parameters()} - embedded
    names = [name for name, p in model.named_parameters(remove_duplicate=False) if id(p) in shared]
    while path and not all(name.startswith(f"{path}.") for name in names):
        path = path.rpartition(".")[0]
    return model.get_submodule(path)


def _units(model: nn.Module, family: Family, parallel: ParallelConfig, *, reshard: bool) -> list[Unit]:
    embedding, head = model.get_submodule(family.embedding), _whole_head(model, family)
    final = [head] if family.final_norm is None else [model.get_submodule(family.final_norm), head]
    blocks = model_blocks(model, family)
    tied = model.get_submodule(family.head).weight is embedding.weight
    if parallel.auto_wrap_policy == "size_based_auto_wrap_policy":
        parts = blocks if tied else model.children()
        units = size_based_units(parts, reshard=reshard, minimum=MIN_UNIT_PARAMETERS)
        return [*units, Unit([embedding, *final], reshard=False)] if tied else units
    return transformer_units(embedding=embedding, blocks=blocks, final=final, tied=tied, reshard=reshard)


def choose(situation: Situation) -> Iterator[Choice]:
    """Keep parameters gathered over the micro-batches of a step where all of them fit."""
    name, count = "reshard_between_microbatches", situation.accumulation
    if count == 1:
        yield Choice(name, True, "a step has one micro-batch")
    elif situation.fits(**{name: False}):
        yield Choice(name, False, f"all gathered parameters fit, for the {count} micro-batches of a step")
    else:
        yield Choice(name, True, "all gathered parameters at once do not fit")


def apply(model: nn.Module, setup: Setup) -> None:
    """Shard the model; last, so that parameters are gathered outside of the other techniques' wrappers.

    Raises:
        UserError: a defect of smp has untied the head from the embedding.
    """
    mesh, parallel = setup.mesh, setup.settings[Config]
    # A tied weight in two units becomes two parameters, which then train apart: structural, not bookkeeping.
    before = sum(1 for _ in model.parameters())
    units = _units(model, setup.family, parallel, reshard=mesh.reshard_after_forward)
    if not parallel.reshard_between_microbatches:
        units = [unit._replace(reshard=False) for unit in units]
    cpu_offload = setup.settings[ActivationConfig].cpu_offload
    how = {"cpu_offload": cpu_offload, "rounds_once": setup.settings[OptimConfig].param_dtype == "bf16"}
    shard_model(model, units, mesh=mesh, parallel=parallel, param_dtype=setup.dtype, **how)
    if sum(1 for _ in model.parameters()) != before:
        raise UserError("sharding untied the head from the embedding; this is a defect in smp, please report it")
    if parallel.fsdp_cache_flush_warnings:
        warn_of_cache_flushes(model, mesh.device_type)
