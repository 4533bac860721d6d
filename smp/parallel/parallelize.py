"""Preparation of a model: build (meta) -> apply the techniques in order -> materialise -> fill."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import nn

from smp.config import ActivationConfig, LossConfig, ParallelConfig, PrecisionConfig, Section, Settings
from smp.delayed_init import build_on_meta, fill_added_, initialize_, materialize_
from smp.errors import ConfigError
from smp.memory.shape import ModelShape, model_shape
from smp.mesh import Mesh
from smp.models import added
from smp.models.family import Family
from smp.models.meta_model import init_rules, meta_model
from smp.models.model_config import ModelConfig, ResolvedModel
from smp.models.parameters import ParameterTable
from smp.models.registry import build_model
from smp.optim.config import OptimConfig
from smp.parallel import (
    activation_checkpoint,
    allocator,
    attention,
    compile_blocks,
    context,
    documents,
    experts,
    fp8,
    fp8_gather,
    lora,
    loss,
    offload,
    sharding,
    tensor,
    trained_beside,
)
from smp.parallel.choices import Chooser
from smp.parallel.microbatch import Microbatch
from smp.parallel.technique import Setup, Technique, follow_steps, member, misses
from smp.pretrained import load_pretrained_

# In the order in which they are applied: the only place that knows it. A new technique is a file and a line here.
TECHNIQUES: list[Technique] = [
    lora,
    trained_beside,
    context,
    documents,
    attention,
    experts,
    fp8,
    tensor,
    activation_checkpoint,
    compile_blocks,
    offload,
    loss,
    sharding,
    fp8_gather,
]
# Of settings that are auto, in the order in which they are chosen.
CHOOSERS: list[Chooser] = [
    context.choose,
    attention.choose,
    compile_blocks.choose,
    activation_checkpoint.choose,
    loss.choose,
    sharding.choose,
    fp8.choose,
    tensor.choose,
    allocator.choose,
]


def compute_dtype(precision: PrecisionConfig, device: torch.device) -> torch.dtype:
    """Return the dtype of forward and backward: that of ``--bf16``, else bf16 on an accelerator and fp32 on a CPU.

    CPUs without fast bf16 units are slower in bf16 than in fp32.
    """
    wanted = device.type != "cpu" if precision.bf16 is None else precision.bf16
    return torch.bfloat16 if wanted else torch.float32


def find_problems(hf_config: Any, setup: Setup) -> list[str]:
    """Return one sentence for each reason why a technique cannot be applied."""
    found = [problem for each in TECHNIQUES for problem in member(each, "problems")(hf_config, setup)]
    if setup.settings[OptimConfig].param_dtype == "bf16" and setup.dtype not in (None, torch.bfloat16):
        found.append("--param_dtype bf16 needs --bf16 1, to compute in bf16: set it, or leave --param_dtype out")
    return found


def left_padding_misfit(setup: Setup) -> str | None:
    """Return the settings with which a row must not hide a token before one that it shows; None: it may."""
    mesh, function = setup.mesh, setup.settings[ModelConfig].attn_implementation
    if mesh.cp.size > 1:
        return f"--context_parallel_degree {mesh.cp.size}"
    splits_tokens = mesh.tp.size > 1 and setup.settings[ParallelConfig].sequence_parallel
    if splits_tokens and not setup.family.full_sequence_embedding and function in attention.FLASH:
        return f"--attn_implementation {function} with --sequence_parallel 1"
    return None


def settings_of(values: Mapping[str, Any], *others: type[Section]) -> Settings:
    """Build the sections of the techniques and the optimizer, and others, from all settings by name."""
    kinds = dict.fromkeys([*(each.Config for each in TECHNIQUES), OptimConfig, *others])
    names = {kind: {field.name for field in dataclasses.fields(kind)} & values.keys() for kind in kinds}
    return Settings(tuple(kind(**{name: values[name] for name in names[kind]}) for kind in kinds))


def _check_modules(model: nn.Module, family: Family) -> None:
    modules = {path for path, _ in model.named_modules(remove_duplicate=False)}
    for path in (family.blocks, family.embedding, family.head):
        if path not in modules:
            raise misses(model, family, path)


def add_parameters(model: nn.Module, family: Family, settings: Settings) -> None:
    """Add the techniques' parameters, with values unless the model is on the meta device."""
    for technique in TECHNIQUES:
        own = member(technique, "parameters")(model, family, settings)
        if any(own):
            added.add_parameters(model, own.added, freezes=own.freezes, trained=own.trained)
            if not next(model.parameters()).is_meta:  # what a script has added before keeps its values
                fill_added_(model, seed=0)


def table_of(resolved: ResolvedModel, settings: Settings) -> ParameterTable:
    """Return the table of a model's parameters, with what the techniques add and freeze."""
    meta = meta_model(resolved.hf_config, resolved.attn_implementation)
    table = meta.table
    for technique in TECHNIQUES:
        own = member(technique, "parameters")(meta.model, resolved.family, settings)
        if any(own):
            table = table.with_added(own.added, freezes=own.freezes, trained=own.trained, family=resolved.family)
    return table


def shape_of(resolved: ResolvedModel, settings: Settings) -> ModelShape:
    """Count the parameters of a model, with those that the techniques add."""
    return model_shape(resolved, table_of(resolved, settings))


def apply_techniques(model: nn.Module, setup: Setup, *, keeps_values: bool = True) -> nn.Module:
    """Apply every technique that is asked for, in place.

    Args:
        model: of the family's architecture, real or on the meta device.
        setup: its mesh is joined.
        keeps_values: whether the model's present values, if it has any, are the last it gets.

    Raises:
        ConfigError: naming every technique that does not fit the model and the mesh.
        UserError: the model's modules are not those of the family.
    """
    _check_modules(model, setup.family)
    if problems := find_problems(model.config, setup):
        raise ConfigError(problems)
    cast(Any, model.config).use_cache = False  # recomputation would fill it twice
    add_parameters(model, setup.family, setup.settings)
    kept = keeps_values and not next(model.parameters()).is_meta  # a script's
    if setup.dtype == torch.bfloat16 and not kept:
        added.narrow_frozen_(model, setup.dtype)
    if setup.settings[OptimConfig].param_dtype == "bf16" and not kept:  # buffers, such as rotary frequencies, stay
        added.narrow_(model, [name for name, _ in model.named_parameters()], torch.bfloat16)
    for each in TECHNIQUES:
        each.apply(model, setup)
    follow_steps(model, TECHNIQUES, setup)
    return model


def own_part(microbatch: Microbatch, setup: Setup) -> Microbatch:
    """Return what this rank computes of a micro-batch: what each technique in order takes of it."""
    for each in TECHNIQUES:
        microbatch = member(each, "own_part")(microbatch, setup)
    return microbatch


def parallelize(
    model: nn.Module,
    family: Family,
    *,
    mesh: Mesh,
    parallel: ParallelConfig,
    activation: ActivationConfig,
    dtype: torch.dtype | None,
    loss: LossConfig | None = None,
    balance: experts.ExpertsConfig | None = None,
) -> nn.Module:
    """Apply the techniques to a Hugging Face model, in place.

    Args:
        model: of ``family``'s architecture, real or on the meta device.
        dtype: dtype to compute in; None keeps that of the parameters.
        loss: make the loss in chunks; None leaves the head as it is.
        balance: of a mixture's experts; None: the model's router alone.

    Raises:
        ConfigError: a technique does not fit the model and the mesh.
    """
    sections = (parallel, activation, loss or LossConfig(loss_chunk_tokens=0), balance or experts.ExpertsConfig())
    return apply_techniques(model, Setup(family, mesh, Settings(sections), dtype))


def prepare_model(
    resolved: ResolvedModel,
    *,
    mesh: Mesh,
    settings: Settings,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    load_weights: bool,
    record: Callable[[str], None] = lambda tag: None,
) -> nn.Module:
    """Build the model on the meta device, apply the techniques, and fill each rank's shards.

    Args:
        resolved: architecture and, when finetuning, the path of the weights.
        mesh: joined.
        dtype: dtype to compute in; trained parameters are of ``--param_dtype``.
        load_weights: fill from ``resolved.weights`` (when it has any) instead of drawing initial values; where a
            technique has frozen the model, that is done at any rate, as checkpoints have only the others.
        record: called with the name of each phase, for the memory tracker.
    """
    build = functools.partial(build_model, resolved.hf_config, attn_implementation=resolved.attn_implementation)
    record("Before model creation")
    model = build_on_meta(build) if resolved.delayed_param else build()
    record("Before FSDP wrapper")
    apply_techniques(model, Setup(resolved.family, mesh, settings, dtype, device.type), keeps_values=False)
    fill_model(
        model,
        resolved.hf_config,
        device=device,
        cpu_offload=settings[ActivationConfig].cpu_offload,
        seed=seed,
        weights=resolved.weights if load_weights or added.is_frozen(model) else None,
    )
    record("After FSDP wrapper")
    return model.train()


def fill_model(
    model: nn.Module,
    hf_config: Any,
    *,
    device: torch.device,
    cpu_offload: bool,
    seed: int,
    weights: pathlib.Path | None = None,
) -> None:
    """Allocate this rank's shards on ``device`` and give them their values.

    Args:
        cpu_offload: keep parameters in host memory.
        seed: of the initial values, which are the same at every layout.
        weights: pretrained weights instead of initial values.
    """
    materialize_(model, torch.device("cpu") if cpu_offload else device)
    if cpu_offload:  # buffers stay on the device
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(device)
    if weights is not None:
        load_pretrained_(model, weights, hf_config=hf_config)
        fill_added_(model, seed=seed)
        added.leave_out_frozen(model, weights)
    else:
        own, rules = added.added_parameters(model), init_rules(hf_config, seed=seed)
        initialize_(model, lambda name: own[name].initial if name in own else rules(name), seed=seed)
        if added.trained_parameters(model):
            fill_added_(model, seed=seed)
