"""From a resolved model to one that trains: the only place that knows the order of the parts.

build (meta) -> split over tensor-parallel ranks -> compile blocks -> checkpoint blocks -> offload their activations
-> make the loss in chunks -> shard -> materialise -> fill (initial or pretrained values)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from smp.config import ActivationConfig, LossConfig, ParallelConfig, PrecisionConfig
from smp.delayed_init import build_on_meta, initialize_, materialize_
from smp.errors import ConfigError, UserError
from smp.memory.warnings import warn_of_cache_flushes
from smp.mesh import Mesh
from smp.models.family import Family
from smp.models.model_config import ResolvedModel
from smp.models.registry import build_model, init_rule
from smp.models.tensor_plan import tensor_parallel_problems
from smp.parallel.activation_checkpoint import apply_activation_checkpointing
from smp.parallel.loss import chunk_loss
from smp.parallel.offload import apply_activation_offload, build_store
from smp.parallel.sharding import MIN_UNIT_PARAMETERS, Unit, shard_model, size_based_units, transformer_units
from smp.parallel.tensor.apply import is_split, split_model
from smp.parallel.tensor.region import Region
from smp.pretrained import load_pretrained_


def compute_dtype(precision: PrecisionConfig, device: torch.device) -> torch.dtype:
    """The dtype of forward and backward: bf16 on an accelerator and fp32 on a CPU unless ``--bf16`` says otherwise.

    CPUs without fast bf16 units are slower in bf16 than in fp32.
    """
    wanted = device.type != "cpu" if precision.bf16 is None else precision.bf16
    return torch.bfloat16 if wanted else torch.float32


def model_blocks(model: nn.Module, family: Family) -> list[nn.Module]:
    """The transformer blocks, in order."""
    return list(model.get_submodule(family.blocks).children())


def tensor_region(mesh: Mesh, parallel: ParallelConfig, *, random_seed: int = 0) -> Region:
    """This rank's tensor-parallel group."""
    return Region(
        mesh.tp_mesh,
        sequence_parallel=parallel.sequence_parallel,
        save_gathered=parallel.tp_save_gathered,
        random_seed=random_seed,
    )


def _units(
    model: nn.Module, family: Family, *, parallel: ParallelConfig, reshard: bool, min_unit_parameters: int
) -> list[Unit]:
    embedding, norm, head = (model.get_submodule(p) for p in (family.embedding, family.final_norm, family.head))
    blocks, tied = model_blocks(model, family), head.weight is embedding.weight
    if parallel.auto_wrap_policy == "size_based_auto_wrap_policy":
        parts = blocks if tied else model.children()
        units = size_based_units(parts, reshard=reshard, minimum=min_unit_parameters)
        return [*units, Unit([embedding, norm, head], reshard=False)] if tied else units
    return transformer_units(embedding=embedding, blocks=blocks, final=[norm, head], tied=tied, reshard=reshard)


def parallelize(
    model: nn.Module,
    family: Family,
    *,
    mesh: Mesh,
    parallel: ParallelConfig,
    activation: ActivationConfig,
    dtype: torch.dtype | None,
    loss: LossConfig | None = None,
    min_unit_parameters: int = MIN_UNIT_PARAMETERS,
) -> nn.Module:
    """Apply tensor parallelism, what is done about activations, and sharding to a Hugging Face model, in place.

    Args:
        model: of ``family``'s architecture, real or on the meta device.
        dtype: dtype to compute in; None keeps the parameters' own.
        loss: make the loss in chunks; None leaves the head as it is.
        min_unit_parameters: what the size-based policy takes for large enough.

    Raises:
        ConfigError: the model cannot be split over so many tensor-parallel and sharding ranks.
    """
    if problems := tensor_parallel_problems(
        family.tensor_plan, model.config, degree=mesh.tp.size, shard=mesh.shard.size
    ):
        raise ConfigError(problems)
    blocks = model_blocks(model, family)
    tied_before = sum(1 for _ in model.parameters())
    if mesh.tp.size > 1 and not is_split(model):
        split_model(model, family, tensor_region(mesh, parallel))
    if activation.compile:
        for block in blocks:
            # Inside checkpointing: compilation does not look into it, and would compile nothing.
            block.forward = torch.compile(block.forward)  # type: ignore[method-assign]
    cast(Any, model.config).use_cache = False  # recomputation would fill it twice
    if activation.activation_checkpointing:
        apply_activation_checkpointing(
            blocks, mode=activation.activation_checkpointing_mode, every=activation.activation_checkpointing_every
        )
    if activation.offload_activations:
        store = build_store(activation.offload_dir)
        apply_activation_offload(blocks, store, horizon=activation.activation_loading_horizon)
    if loss is not None and loss.loss_chunk_tokens:
        chunk_loss(model, head=family.head, chunk_tokens=loss.loss_chunk_tokens, z_loss=loss.z_loss)
    reshard = mesh.reshard_after_forward
    units = _units(model, family, parallel=parallel, reshard=reshard, min_unit_parameters=min_unit_parameters)
    shard_model(model, units, mesh=mesh, parallel=parallel, param_dtype=dtype, cpu_offload=activation.cpu_offload)
    if sum(1 for _ in model.parameters()) != tied_before:
        raise UserError("sharding untied the head from the embedding; this is a defect in smp, please report it")
    if parallel.fsdp_cache_flush_warnings:
        warn_of_cache_flushes(model, mesh.device_type)
    return model


def prepare_model(
    resolved: ResolvedModel,
    *,
    mesh: Mesh,
    parallel: ParallelConfig,
    activation: ActivationConfig,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    load_weights: bool,
    loss: LossConfig | None = None,
    record: Callable[[str], None] = lambda tag: None,
) -> nn.Module:
    """Build the model on the meta device, shard it, and give each rank's part its values.

    Args:
        resolved: architecture and, when finetuning, where the weights are.
        dtype: dtype to compute in; parameters are fp32.
        seed: of the initial values.
        load_weights: fill from ``resolved.weights`` (when it has any) instead of drawing initial values.
        loss: see :func:`parallelize`.
        record: called with the name of each phase, for the memory tracker.
    """
    build = functools.partial(build_model, resolved.hf_config, attn_implementation=resolved.attn_implementation)
    record("Before model creation")
    model = build_on_meta(build) if resolved.delayed_param else build()
    record("Before FSDP wrapper")
    parallelize(model, resolved.family, mesh=mesh, parallel=parallel, activation=activation, dtype=dtype, loss=loss)
    materialize_(model, torch.device("cpu") if activation.cpu_offload else device)
    if activation.cpu_offload:  # buffers are computed with on the device
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(device)
    if load_weights and resolved.weights is not None:
        load_pretrained_(model, resolved.weights, hf_config=resolved.hf_config)
    else:
        rule = functools.partial(init_rule, hf_config=resolved.hf_config)
        initialize_(model, lambda module, name: rule(module, name).as_tuple(), seed=seed)
    record("After FSDP wrapper")
    return model.train()
