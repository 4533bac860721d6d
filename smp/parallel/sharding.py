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
from smp.comm.arena import Layout
from smp.comm.settings import read_settings
from smp.config import ActivationConfig, CommConfig, ParallelConfig
from smp.errors import UserError
from smp.memory.shape import ModelShape, Moment, Trained, Workload
from smp.memory.warnings import warn_of_cache_flushes
from smp.mesh import Mesh
from smp.models.experts import fp32_routers
from smp.models.family import Family
from smp.optim.config import OptimConfig
from smp.optim.optimizers import state_bytes, working_bytes
from smp.parallel import one_rank
from smp.parallel.activation_checkpoint import hide_from_selection
from smp.parallel.choices import Choice, Situation
from smp.parallel.gradient_sum import begin_microbatch, sum_gradients
from smp.parallel.technique import Setup, model_blocks
from smp.parallel.units import Unit, size_based_units, transformer_units, with_inner

Config = ParallelConfig
T = TypeVar("T")

# FSDP1's size_based_auto_wrap_policy used this default.
MIN_UNIT_PARAMETERS = 100_000_000
_SUMMED = "_smp_gradients_are_summed"  # attribute of a model


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
    frozen = None if cpu_offload else one_rank.frozen_parameters(model, param_dtype)
    *units, root = with_inner(model, [*units, Unit([model], reshard=False)], fp32_routers(model) if reduced else ())
    ranks = set[int]()  # of a parameter, sharded and replicated
    for unit in (each for outer in (*units, root) for each in (*outer.inside, outer)):  # those inside first
        # [Note: units inside of units] fully_shard leaves to a later, outer call what an earlier one has sharded. The
        # other way round the outer unit would own the parameters, over the wrong mesh, and the inner one none.
        over, modules = mesh.fsdp_mesh_of(unit.axis), unit.modules
        group = over.get_group(over.ndim - 1)
        place = functools.partial(placement, ranks=1 if unit.axis is None else group.size())
        fully_shard(
            modules if len(modules) > 1 else modules[0], mesh=over, reshard_after_forward=unit.reshard,
            mp_policy=policies[unit.fp32], shard_placement_fn=place, offload_policy=offload,
            ignored_params=frozen if group.size() == 1 else None,
        )  # fmt: skip
        ranks.add(over.size())
        # The gradient of a look-up reads no weights: without this backward would gather the table to free it again.
        unit.first.set_unshard_in_backward(unit.in_backward)
        for module in cast(list[FSDPModule], modules):
            # Both are needed: a factor of 1 alone still asks gloo for an operation it does not have.
            if over.size() > 1:  # a group of one rank would divide by it, into a copy
                module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if rounds_once:
                sum_gradients(module)
            # By module, as its parameter group has the buffers; over the group of the last dimension, the shards.
            install_collectives(module, group, mesh.device_type, shared_buffers=parallel.shared_buffers)
            if group.size() == 1:
                one_rank.reduce_in_place(module)
            if unit.axis is not None or unit.fp32:
                hide_from_selection(module)
    _set_prefetch(units, parallel)
    if ranks == {1}:
        one_rank.use_one_stream(model)
    # What clips, logs or wraps the gradients later must know whether they are sums: a factor of all ranks is at stake.
    setattr(model, _SUMMED, True)
    return model


def average_gradients(model: nn.Module, mesh: Mesh) -> None:
    """Divide the summed gradients of a sharded model by the number of ranks that have different tokens.

    By a hook, as torch divides by ``set_gradient_divide_factor`` twice where a sharding group has one rank.
    """
    for module in fsdp_modules(model):
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


def cost(shape: ModelShape, mesh: Mesh, work: Workload) -> dict[str, int]:
    """Count the sharded states, the gathered units, and the gradients that are being reduced.

    Trained parameters and their gradients are of ``--param_dtype``, gradients that accumulate fp32, frozen parameters
    of the computation's dtype; all, and the optimizer's state, are sharded over sharding and tensor-parallel ranks, and
    in a group of one gathering what is trained is a copy.
    Backward gathers a block while the one above it is computed, and reduces each unit from a copy of its gradients,
    which lives until the next unit's are reduced.
    """
    fp32, moment = 4, work.moment
    degrees = mesh.tp.size, mesh.degree("ep")
    units, (trained, table, last, block) = shape.unit_sizes(*degrees), shape.trained(*degrees)
    total = units.parameters
    in_host_memory = work.settings[ActivationConfig].cpu_offload and work.device_type != "cpu"
    optim = work.settings[OptimConfig]
    shards = 0 if in_host_memory else optim.parameter_bytes
    state = 0.0 if in_host_memory else state_bytes(shape.specs, optim)
    frozen = -(-(total - trained) // mesh.shard.size) * (min(fp32, work.compute_bytes) if shards else 0)
    reduced = _reduced(shape, moment, last=last, block=block, total=trained)
    accumulated = work.accumulation > 1
    deferred = accumulated and work.settings[Config].defer_gradient_sync
    gradients = trained if accumulated and not deferred else reduced
    sums = 0
    if accumulated and not deferred and optim.parameter_bytes < fp32 and moment is not Moment.UPDATE:
        gradients, sums = reduced, trained  # in fp32, on the device, beside what the reductions leave
    if shape.frozen_but is None:  # else experts are frozen, too, but for factors, which are few
        block = shape.gathered(units, mesh).block
    unreduced = _unreduced(shape, mesh, moment, table=table, last=last, block=block)
    copied = {
        Moment.LOSS: 0, Moment.LAST_BLOCK: 0 if shape.tied else last, Moment.FIRST_BLOCK: block, Moment.UPDATE: 0,
    }.get(moment, unreduced)  # fmt: skip
    copies = _copies(mesh, work, receives=copied == unreduced)
    updates = moment is Moment.UPDATE
    gathered = shape.gathered(units, mesh)
    if mesh.shard.size == 1 and shards:  # what is frozen is used as it is
        gathered = Trained(trained, table, last, shape.trained(*degrees).block)
    gathered_by_update = working_bytes(shape.specs, mesh, work.settings[OptimConfig]) if updates else 0
    if deferred:
        unreduced = max(unreduced, trained - reduced)
    return {
        "parameters": -(-trained // mesh.shard.size) * shards + frozen,
        "gradients": -(-gradients // mesh.shard.size) * shards + -(-sums // mesh.shard.size) * fp32,
        "optimizer state": int(-(-trained // mesh.shard.size) * state),
        "gathered parameters": _gathered(gathered, shape, mesh, work) * work.compute_bytes,
        "gradients before reduction": unreduced * fp32,
        "communication buffers": copies * copied * fp32 + _buffer_bytes(shape, mesh, work) + gathered_by_update,
    }


def _unreduced(shape: ModelShape, mesh: Mesh, moment: Moment, *, table: int, last: int, block: int) -> int:
    """Count the parameters whose gradients exist unsharded, before they are reduced."""
    # Activations are most when the first gradient of the block, of its last product, is made.
    of_product = min(block, shape.hidden * shape.intermediate // mesh.tp.size)
    return {
        Moment.LOSS: 0,  # the head's gradient is in what the loss counts
        Moment.HEAD: last, Moment.LAST_BLOCK: of_product, Moment.FIRST_BLOCK: of_product,
        Moment.LAST_REDUCTION: block, Moment.FIRST_REDUCTION: block,
        Moment.EMBEDDING: last if shape.tied else table, Moment.UPDATE: 0,
    }[moment]  # fmt: skip


def _copies(mesh: Mesh, work: Workload, *, receives: bool) -> int:
    """Count the copies of a unit's gradients that its reduction takes: torch's, and those of the backend."""
    # A rank alone reduces in place; with replicas torch divides into a copy.
    copies = int(mesh.shard.size > 1 or mesh.loss.size > 1)
    if work.device_type != "cpu":
        return copies
    if work.settings[CommConfig].distributed_backend == "smddp":
        return max(copies, mesh.shard.size)  # in memory that all ranks of the host share
    return copies + (receives and mesh.loss.size > 1)  # gloo's receive buffers


def _reduced(shape: ModelShape, moment: Moment, *, last: int, block: int, total: int) -> int:
    """Count the parameters whose gradients are reduced, or being reduced, in one backward."""
    above = 0 if shape.tied else last
    return {
        Moment.LOSS: 0, Moment.HEAD: above, Moment.LAST_BLOCK: above, Moment.LAST_REDUCTION: above + block,
        Moment.FIRST_BLOCK: above + (shape.layers - 1) * block, Moment.FIRST_REDUCTION: above + shape.layers * block,
    }.get(moment, total)  # fmt: skip


def gathered_blocks(shape: ModelShape, mesh: Mesh, work: Workload) -> int:
    """Count the blocks whose parameters are gathered."""
    return _gathered(Trained(shape.layers, 0, 0, 1), shape, mesh, work)


def _gathered(sizes: Trained, shape: ModelShape, mesh: Mesh, work: Workload) -> int:
    """Count what is gathered of units of these sizes; the embedding's, unless tied, are freed after its forward."""
    moment, (total, _, last, block) = work.moment, sizes
    keeps = not (mesh.reshard_after_forward and work.settings[Config].reshard_between_microbatches)
    if not work.settings[Config].reshard_between_microbatches and (work.accumulation > 1 or moment is Moment.LOSS):
        return 0 if moment is Moment.UPDATE else total
    below = last if shape.tied else 0  # a tied unit is gathered until backward ends
    if moment in (Moment.LOSS, Moment.HEAD):
        return last + block * (shape.layers if keeps else int(moment is Moment.HEAD))
    if moment in (Moment.LAST_BLOCK, Moment.LAST_REDUCTION):
        return below + block * (shape.layers if keeps else min(2, shape.layers))
    if moment in (Moment.FIRST_BLOCK, Moment.FIRST_REDUCTION):
        return below + block
    return below if moment is Moment.EMBEDDING else 0


def _buffer_bytes(shape: ModelShape, mesh: Mesh, work: Workload) -> int:
    """Count the buffers that units are gathered in: in forward, ``fully_shard`` keeps the last one.

    Backend smddp keeps on a GPU its workspace, and two buffers of each kind of unit; on a CPU, the memory that a host's
    ranks share: an arena for each group, taking all ranks to be on one host, and a gathered unit.
    """
    backend, parallel = work.settings[CommConfig].distributed_backend, work.settings[Config]
    gathered = shape.unit_sizes(mesh.tp.size).last * work.compute_bytes if mesh.shard.size > 1 else 0
    if backend == "smddp" and work.device_type == "cpu":
        # Measured: under tensor parallelism two groups of its ranks have one.
        gathers = parallel.cp_comm_type == "all_gather"  # gloo does the others
        roles = (mesh.shard, mesh.replicas, mesh.tp, mesh.tp, *([mesh.cp] if gathers else []), mesh.loss)
        sizes = [size for size in (*(role.size for role in roles), mesh.world_size) if size > 1]
        arenas = sum(Layout.with_scratch(read_settings().scratch, size).total for size in sizes)
        return arenas + (0 if work.moment is Moment.UPDATE else gathered)
    last = gathered if work.moment is Moment.LOSS else 0
    if backend != "smddp" or work.device_type != "cuda" or not parallel.shared_buffers or mesh.shard.size == 1:
        return last
    settings = read_settings()
    kinds = shape.of_rank(shape.parameters - (shape.layers - 1) * shape.block, 1, mesh.tp.size)
    return settings.workspace + min(2 * kinds * work.compute_bytes, settings.gpu_shared)
