"""The library in a user's script: ``smp.init`` builds the mesh, ``smp.parallelize`` shards a Hugging Face model.

The only module with state: the configuration and mesh of ``init``, handed on to everything below.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from smp.compat.init_settings import in_names_of_init, read_config, read_settings, read_smp_keys
from smp.compat.moe import MoEConfig, add_losses, read_moe_config, script_balance, tell_of_sharding
from smp.compat.state import State
from smp.config import ActivationConfig, LossConfig, ParallelConfig, Settings
from smp.delayed_init import build_on_meta, first_ranks_seed
from smp.environment import malloc
from smp.errors import ConfigError, UserError
from smp.faults.agreement import require_same_weights
from smp.mesh import Mesh, resolve_mesh, served_device_type
from smp.models.added import LOADED, leave_out_frozen, remember_files
from smp.models.registry import build_model, family_of
from smp.models.text_part import language_config
from smp.parallel import context, documents, experts
from smp.parallel.activation_checkpoint import checkpointed_blocks, leave_out_cache
from smp.parallel.context.batch import shard_batch
from smp.parallel.context.functions import CP_COMM_TYPES
from smp.parallel.offload import apply_activation_offload, build_store
from smp.parallel.optimizers import following_optimizers
from smp.parallel.parallelize import fill_model
from smp.parallel.parallelize import parallelize as _parallelize
from smp.parallel.refusals import (
    refuse_changes,
    refuse_under_tensor_parallelism,
    require_kind,
    require_model,
    require_same_batch,
    require_unsharded,
)
from smp.parallel.script_hooks import compare_batches, follow_script
from smp.parallel.sequences import log_probs
from smp.parallel.sharding import average_gradients, reshard
from smp.parallel.technique import Setup
from smp.parallel.tensor.group import TPGroup
from smp.parallel.tensor.split import is_split, split_model, take_from_rank0
from smp.parallel.tensor.technique import build_tp_group
from smp.pretrained import load_pretrained_
from smp.runtime import local_world_size


@dataclasses.dataclass(frozen=True)
class _Initialized:
    mesh: Mesh
    parallel: ParallelConfig
    tp: TPGroup | None
    own: dict[str, Any]  # SMP v2's keys that are no settings of ParallelConfig
    random_seed: int | None  # as it was given
    done: set[str] = dataclasses.field(default_factory=set)  # a model was split; ranks of a sequence compared batches


_current: _Initialized | None = None


def _require_init(caller: str) -> _Initialized:
    if _current is None:
        raise UserError(f"{caller} needs a mesh: call smp.init({{...}}) before it")
    return _current


def _for_state() -> tuple[Mesh, TPGroup | None, bool]:
    current = _require_init("smp.state")
    return current.mesh, current.tp, current.own["sm_activation_offloading"]


def _forget() -> None:
    global _current
    _current = None


state = State(_for_state, _forget)


def init(config: dict[str, Any] | str | Path | None = None, **settings: Any) -> Mesh:
    """Build the device mesh over the running process group; call after ``dist.init_process_group``.

    Degrees that were set on :data:`smp.state` before are taken, too.

    Args:
        config: settings of :class:`smp.ParallelConfig` such as ``{"hybrid_shard_degree": 8}`` and SMP v2's keys: a
            dict, or the path of a JSON file. ``sm_activation_offloading`` is only reported by ``smp.state``, as there:
            :func:`offload_wrapper` is what offloads.
        settings: the same by keyword, such as ``dp_shard=8, cp=2, tp=2``, the mesh's names of ``hybrid_shard_degree``,
            ``context_parallel_degree`` and ``tensor_parallel_degree``. ``dp_replicate`` follows from them; given, it is
            checked.

    Returns:
        The mesh: ``mesh.data_rank`` and ``mesh.data_size`` say which part of the data this rank reads.

    Raises:
        UserError: no process group runs, or the configuration does not fit it.
    """
    global _current
    if not dist.is_initialized():
        raise UserError("smp.init needs a process group: call torch.distributed.init_process_group(...) before it")
    values = read_settings(config := read_config(config), settings, state.given)
    random_seed = values.get("random_seed")
    own, replicas = read_smp_keys(values), values.pop("dp_replicate", None)
    world = dist.get_world_size()
    with in_names_of_init({*config, *settings}):
        parallel = ParallelConfig(**values)
        laid_out = resolve_mesh(parallel, world_size=world, local_world_size=local_world_size())
    if replicas not in (None, laid_out.replicas.size):
        raise UserError(
            f"smp.init: dp_replicate {replicas}, but {world} processes make {laid_out}: choose another dp_shard"
        )
    device_type = served_device_type()
    if device_type == "cpu":
        malloc.keep_freed_memory()
    mesh = laid_out.join(device_type)
    tp = build_tp_group(mesh, parallel, random_seed=own["random_seed"]) if laid_out.tp.size > 1 else None
    _current = _Initialized(mesh, parallel, tp, own, random_seed)
    tell_of_sharding(laid_out)
    state.given.clear()
    return mesh


def current() -> tuple[Mesh, ParallelConfig, int | None] | None:
    """Return the mesh, the settings and the given ``random_seed`` of :func:`init`, or None before it."""
    return None if _current is None else (_current.mesh, _current.parallel, _current.random_seed)


def is_initialized() -> bool:
    """Return True once :func:`init` has been called."""
    return _current is not None


def _split(model: nn.Module, current: _Initialized, *, from_rank0: bool = False, comm_type: str | None = None) -> None:
    """Apply expert, context and tensor parallelism, in the techniques' order, unless they have been."""
    family = family_of(model.config)
    if not is_split(model):  # tensor parallelism takes experts as they are
        setup = Setup(family, current.mesh, Settings((current.parallel, script_balance(model))))
        experts.check_and_apply(model, setup, take=from_rank0)
        add_losses(model, setup)
    if current.mesh.cp.size > 1 and not context.is_split(model):
        settings = Settings((current.parallel,))
        if comm_type is not None:
            settings = settings.changed(cp_comm_type=comm_type)
        setup = Setup(family, current.mesh, settings, device_type=current.mesh.device_type)
        if problems := context.problems(model.config, setup):
            raise ConfigError(problems)
        context.apply(model, setup)
    documents.apply(model, Setup(family, current.mesh))
    if current.tp is not None and not is_split(model):
        refuse_under_tensor_parallelism(model)
        split_model(model, family, current.tp, from_rank0=from_rank0)
        compare_batches(model, current.mesh)
    elif from_rank0 and current.tp is None:
        take_from_rank0(model, torch.device(current.mesh.device_type))
    current.done.add("split")


def _check_comm_type(caller: str, comm_type: str | None) -> None:
    if comm_type not in (None, *(allowed := ("auto", *CP_COMM_TYPES))):
        raise UserError(f"{caller}: cp_comm_type {comm_type!r} is not allowed: give {', '.join(allowed)}")


def transform(
    model: nn.Module,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    config: MoEConfig | None = None,
    load_state_dict_from_rank0: bool = False,
    cp_comm_type: str | None = None,
) -> nn.Module:
    """Apply expert, tensor and context parallelism to a causal language model in place, as SMP v2's ``transform``.

    At degrees of 1 no layer is split. Shard the result with :func:`parallelize`.

    Args:
        model: a decoder of transformers with a tensor-parallel plan (docs/models.md); the same on every rank, or on the
            meta device.
        device: where to move the model's parameters and buffers afterwards.
        dtype: what to convert them to.
        config: of a mixture of experts: how its tokens are spread over them.
        load_state_dict_from_rank0: take all values from rank 0, one parameter at a time; other ranks may have any, or
            be on the meta device. Collective.
        cp_comm_type: communication of context parallelism, as :class:`smp.ParallelConfig`'s; None: that of ``init``.

    Raises:
        UserError: ``init`` was not called, the architecture is not supported, a degree does not fit it, or ranks that
            would split them have different weights.
    """
    current = _require_init("smp.transform")
    _check_comm_type("smp.transform", cp_comm_type)
    require_model("smp.transform", model)
    if config is not None:
        read_moe_config(model, config)
    splits = current.tp is not None or current.mesh.degree("ep") > 1
    if splits and not is_split(model) and not load_state_dict_from_rank0:
        require_same_weights(model, "smp.transform")
    with following_optimizers(model):
        _split(model, current, from_rank0=load_state_dict_from_rank0, comm_type=cp_comm_type)
    leave_out_cache(model)
    if is_split(model):
        refuse_changes(model, "smp.transform")
    return model.to(device=device, dtype=dtype) if device is not None or dtype is not None else model


def offload_wrapper(model: nn.Module, *, horizon: int | None = None, directory: str | None = None) -> nn.Module:
    """Offload the activations of a model's checkpointed blocks, in place: the name that torch and SMP v2 use.

    Args:
        model: :func:`smp.apply_activation_checkpointing` was applied to it.
        horizon: blocks ahead of the one that computes whose tensors may be back on the device; None: ``init``'s
            ``activation_loading_horizon``, or 2.
        directory: on a fast local disk; None: host memory.

    Raises:
        UserError: no block was checkpointed, a horizon below 1, or the directory cannot be written.
    """
    blocks = checkpointed_blocks(model)
    if not blocks:
        raise UserError("offload_wrapper finds no checkpointed block: call apply_activation_checkpointing before it")
    if horizon is None:
        horizon = 2 if _current is None else _current.own["activation_loading_horizon"]
    apply_activation_offload(blocks, build_store(directory), horizon=horizon)
    return model


def parallelize(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    activation_checkpointing: bool = False,
    activation: ActivationConfig | None = None,
    loss: LossConfig | None = None,
    gradient_reduction: Literal["sum", "mean"] = "sum",
) -> nn.Module:
    """Shard a Hugging Face causal language model in place over the mesh of :func:`init`; :func:`transform` it before.

    Args:
        model: a decoder of transformers, the same on every rank; or of :func:`meta_init`: each rank then allocates its
            shards alone and draws their initial values, by the ``random_seed`` of ``init``, or without one by the
            first rank's ``torch.manual_seed``.
        dtype: dtype to compute in; None keeps that of the parameters. Reduction is then in fp32.
        activation_checkpointing: recompute each block in backward.
        activation: everything about activations, instead of ``activation_checkpointing``.
        loss: make the loss in chunks; None leaves the head as it is.
        gradient_reduction: over data ranks, and those of a sequence. ``sum``: divide the loss by the global number of
            valid tokens (:func:`smp.count_valid_tokens`), not by the rank's. ``mean``, as FSDP and DDP: divide it by
            the rank's.

    Raises:
        UserError: ``init`` was not called, the architecture is not supported, some ranks alone have a meta model, or
            ranks have different weights.
    """
    current = _require_init("smp.parallelize")
    require_model("smp.parallelize", model)
    require_unsharded("smp.parallelize", model)
    require_kind("smp.parallelize", "dtype", dtype, torch.dtype, "torch.bfloat16")
    require_kind("smp.parallelize", "activation", activation, ActivationConfig, "smp.ActivationConfig()")
    require_kind("smp.parallelize", "loss", loss, LossConfig, "smp.LossConfig()")
    family = family_of(model.config)
    if gradient_reduction not in ("sum", "mean"):
        raise UserError(f"smp.parallelize: gradient_reduction {gradient_reduction!r} is not allowed: give sum or mean")
    on_meta = _is_on_meta(model, current.mesh)
    if activation is None:
        activation = ActivationConfig(activation_checkpointing=activation_checkpointing)
    if not is_split(model):
        require_same_weights(model, "smp.parallelize")
    with following_optimizers(model):
        _split(model, current)
        _parallelize(
            model, family, mesh=current.mesh, parallel=current.parallel, activation=activation, dtype=dtype, loss=loss,
            balance=script_balance(model),
        )  # fmt: skip
        if gradient_reduction == "mean":
            average_gradients(model, current.mesh)
        if on_meta:
            device, seed = torch.device(current.mesh.device_type), current.random_seed
            if seed is None:
                seed = first_ranks_seed([None], device)
            fill_model(model, model.config, device=device, cpu_offload=activation.cpu_offload, seed=seed)
    follow_script(model, "smp.parallelize")
    return model


def shard_sequence(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Take this rank's tokens out of a batch, as SMP v2's ``get_batch_for_cp_rank``.

    ``model(**smp.shard_sequence(batch))`` is then the forward pass. Call it before the batch is moved to a GPU, with
    the same batch on all ranks of a sequence: those of one ``mesh.data_rank``. The first is compared; collective.

    Args:
        batch: ``input_ids`` and ``labels`` ``(batch, sequence)``, equal to the inputs but for -100; of packed documents
            also ``position_ids``, which restart at each document.

    Returns:
        ``input_ids``, ``position_ids`` and, shifted already, ``labels`` of this rank's tokens (as ``shift_labels``,
        too: Hugging Face's loss then takes them as they are), and what attention needs. Without context parallelism
        the batch with such labels.

    Raises:
        UserError: ``init`` was not called, no model was transformed, the batch has what cannot be cut by tokens, or
            ranks of a sequence have different ones.
    """
    current = _require_init("smp.shard_sequence")
    own = shard_batch(batch, current.mesh, balanced=current.parallel.cp_load_balance)
    if current.mesh.cp.size > 1:
        if "split" not in current.done:
            raise UserError("smp.shard_sequence needs a model that takes a part: call smp.transform before it")
        if "compared" not in current.done:
            require_same_batch("smp.shard_sequence", batch["input_ids"], current.mesh.cp, current.mesh)
            current.done.add("compared")
    return own


def sequence_log_probs(model: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
    """Return the sum of the log-probabilities of the labelled tokens of each sequence, in nats; can be differentiated.

    Logits exist for a chunk of tokens alone. Under context parallelism the ranks of a sequence are given the same
    batch, which is not sharded before, and all get the sums: one all-reduce. Let each of them differentiate the same
    loss of the sums, divided by the number of sequences of all ``mesh.data`` ranks, or of its own where gradients are
    averaged.

    Args:
        model: a causal language model of Hugging Face whose loss is in chunks: of :func:`parallelize` with
            ``loss=smp.LossConfig()``, or of :func:`smp.chunk_loss`.
        batch: on the host, ``input_ids`` and ``labels`` ``(batch, sequence)``, equal to the inputs but for -100; of
            packed documents also ``position_ids``, which restart at each document, or ``document_bounds``
            ``(documents + 1,)`` int32, where they begin in the flattened batch, and its end. An ``attention_mask``
            ``(batch, sequence)`` has padding on either side, on the left only where sequences are not packed:
            positions count from a sequence's first token.

    Returns:
        ``(batch,)``, of packed documents ``(documents,)`` in order, in at least fp32; 0 where no token is labelled. A
        document's first token is not predicted, and does not count.

    Raises:
        UserError: the model's loss is not in chunks, or the batch has no labels, or what cannot be cut by tokens.
    """
    if _current is None:
        return log_probs(model, batch, None)
    return log_probs(model, batch, _current.mesh, balanced=_current.parallel.cp_load_balance)


def _is_on_meta(model: nn.Module, mesh: Mesh) -> bool:
    """Tell whether every rank's model is on the meta device; collective."""
    count = torch.tensor(int(all(p.is_meta for p in model.parameters())), device=mesh.device_type)
    dist.all_reduce(count)
    if count and count != mesh.world_size:
        raise UserError(
            f"smp.parallelize: the model is on the meta device on {int(count)} of {mesh.world_size} ranks: build it so "
            f"on every rank, or take rank 0's weights by smp.transform(model, load_state_dict_from_rank0=True)"
        )
    return bool(count)


def meta_init(config: Any, *, attn_implementation: str | None = None) -> nn.Module:
    """Build a Hugging Face causal language model on the meta device: no memory for parameters, buffers are real.

    Args:
        config: Hugging Face's, such as a ``LlamaConfig``; it is copied. Of a larger model, its text model is built.
        attn_implementation: as ``from_pretrained``'s; None: sdpa, or eager for a model that cannot have it.

    Returns:
        The model for :func:`parallelize`, which gives it initial values; fp32.

    Raises:
        UserError: the architecture is not supported.
    """
    if not hasattr(config, "model_type"):
        raise UserError(f"smp.meta_init takes a config, got {config!r}: give AutoConfig.from_pretrained(directory)")
    config = language_config("the config", config)
    return build_on_meta(functools.partial(build_model, config, attn_implementation=attn_implementation))


def load_pretrained(model: nn.Module, weights: str | os.PathLike[str]) -> nn.Module:
    """Fill a model from safetensors files in place, after :func:`parallelize`; each rank reads its slices.

    Args:
        model: of a supported family.
        weights: a local Hugging Face directory, a ``.safetensors`` file or an ``.index.json``; every rank reads it.

    Raises:
        UserError: files that cannot be read or do not fit the model; no parameter is changed then.
    """
    require_model("smp.load_pretrained", model, changes=False)
    reshard(model)  # a gathered parameter is not the one that the optimizer updates
    load_pretrained_(model, Path(weights), hf_config=model.config)
    leave_out_frozen(model, Path(weights))
    remember_files(model, LOADED, Path(weights))
    return model
