"""The library in a user's own script: ``smp.init`` lays the mesh, ``smp.parallelize`` shards a Hugging Face model.

The only module with state: the configuration and mesh of ``init``, handed on to everything below.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from smp.compat.state import State
from smp.config import ActivationConfig, LossConfig, ParallelConfig
from smp.environment import malloc
from smp.errors import UserError
from smp.mesh import Mesh, resolve_mesh, served_device_type
from smp.models.registry import family_of
from smp.parallel.activation_checkpoint import checkpointed_blocks
from smp.parallel.offload import apply_activation_offload, build_store
from smp.parallel.parallelize import parallelize as _parallelize
from smp.parallel.tensor.group import TPGroup
from smp.parallel.tensor.split import is_split, split_model, take_from_rank0
from smp.parallel.tensor.technique import build_tp_group
from smp.runtime import read_launch


@dataclasses.dataclass(frozen=True)
class _Initialized:
    mesh: Mesh
    parallel: ParallelConfig
    tp: TPGroup | None
    offloading: bool  # SMP v2's sm_activation_offloading: told by smp.state, done by offload_wrapper
    horizon: int  # its activation_loading_horizon


_current: _Initialized | None = None

# SMP v2's keys that are no settings of ParallelConfig: the values that are accepted, and what to do about others.
_SMP_KEYS: dict[str, tuple[tuple[Any, ...], str]] = {
    "sm_activation_offloading": ((False, True), "use True or False, and apply smp.offload_wrapper to the model"),
    "allow_empty_shards": ((True, False), "use True or False; fully_shard always allows empty shards"),
}


# Whole numbers among them: (default, least, greatest).
_SMP_NUMBERS = {"random_seed": (0, 0, 2**31 - 1), "activation_loading_horizon": (2, 1, 10_000)}


def _read_smp_keys(values: dict[str, Any]) -> dict[str, Any]:
    """Take SMP v2's own keys out of ``values``.

    Raises:
        UserError: a value asks for what is not there.
    """
    found = {}
    for key, (allowed, otherwise) in _SMP_KEYS.items():
        found[key] = value = values.pop(key, allowed[0])
        if value not in allowed:
            raise UserError(f"smp.init: {key} {value} is not available: {otherwise}")
    for key, (default, least, greatest) in _SMP_NUMBERS.items():
        found[key] = value = values.pop(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= greatest:
            raise UserError(f"smp.init: {key} {value} is not allowed: give a whole number from {least} to {greatest}")
    return found


def _require_init(caller: str) -> _Initialized:
    if _current is None:
        raise UserError(f"{caller} needs a mesh: call smp.init({{...}}) before it")
    return _current


def _for_state() -> tuple[Mesh, TPGroup | None, bool]:
    current = _require_init("smp.state")
    return current.mesh, current.tp, current.offloading


state = State(_for_state)


def _read(config: dict[str, Any] | str | Path | None) -> dict[str, Any]:
    if isinstance(config, (str, Path)):
        try:
            config = json.loads(Path(config).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"smp.init: {config} is no readable JSON ({error}): give a dict or a JSON file") from None
    values = {} if config is None else config
    if not isinstance(values, dict):
        raise UserError(f"smp.init takes a dict, the path of a JSON file or None, got a {type(values).__name__}")
    own = {key: value for key, value in values.items() if key in (*_SMP_KEYS, *_SMP_NUMBERS)}
    values = {key: value for key, value in values.items() if key not in own}
    known = {f.name: f.name for f in dataclasses.fields(ParallelConfig)}
    known |= {alias: f.name for f in dataclasses.fields(ParallelConfig) for alias in f.metadata["aliases"]}
    for key in values:
        if key not in known:
            every = sorted((*known, *_SMP_KEYS, *_SMP_NUMBERS))
            near = difflib.get_close_matches(key, every, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(every)}"
            raise UserError(f"smp.init: unknown key {key}: {hint}")
    return own | {known[key]: value for key, value in values.items()}


def init(config: dict[str, Any] | str | Path | None = None) -> Mesh:
    """Lay the device mesh over the running process group; call after ``dist.init_process_group``.

    Args:
        config: settings of :class:`smp.ParallelConfig` such as ``{"hybrid_shard_degree": 8}`` and SMP v2's keys: a
            dict, or the path of a JSON file. ``sm_activation_offloading`` is only told by ``smp.state``, as there:
            :func:`offload_wrapper` is what offloads.

    Returns:
        The mesh: ``mesh.data_rank`` and ``mesh.data_size`` say which part of the data this rank reads.

    Raises:
        UserError: no process group runs, or the configuration does not fit it.
    """
    global _current
    if not dist.is_initialized():
        raise UserError("smp.init needs a process group: call torch.distributed.init_process_group(...) before it")
    values = _read(config)
    own = _read_smp_keys(values)
    parallel = ParallelConfig(**values)
    world = dist.get_world_size()
    launch = read_launch()
    local = launch.local_world_size if launch.world_size == world else world
    laid_out = resolve_mesh(parallel, world_size=world, local_world_size=local)
    device_type = served_device_type()
    if device_type == "cpu":
        malloc.keep_freed_memory()
    mesh = laid_out.join(device_type)
    tp = build_tp_group(mesh, parallel, random_seed=own["random_seed"]) if laid_out.tp.size > 1 else None
    offloading, horizon = own["sm_activation_offloading"], own["activation_loading_horizon"]
    _current = _Initialized(mesh, parallel, tp, offloading, horizon)
    return mesh


def current() -> tuple[Mesh, ParallelConfig] | None:
    """The mesh and the settings of :func:`init`, or None before it."""
    return None if _current is None else (_current.mesh, _current.parallel)


def is_initialized() -> bool:
    """Whether :func:`init` has been called."""
    return _current is not None


def _split(model: nn.Module, current: _Initialized, *, from_rank0: bool = False) -> None:
    family = family_of(model.config)
    if current.tp is not None and not is_split(model):
        split_model(model, family, current.tp, from_rank0=from_rank0)
    elif from_rank0 and current.tp is None:
        take_from_rank0(model, torch.device(current.mesh.device_type))


def transform(
    model: nn.Module,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    config: Any = None,
    load_state_dict_from_rank0: bool = False,
    cp_comm_type: str = "p2p",
) -> nn.Module:
    """Apply tensor parallelism to a Hugging Face causal language model in place, as SMP v2's ``transform``.

    With ``tensor_parallel_degree`` 1 there is nothing to split. Shard the result with :func:`parallelize`.

    Args:
        model: Llama, Mistral, GPT-NeoX or of a family of :func:`smp.register_family`; the same on every rank, or on the
            meta device.
        device: where to move the model's parameters and buffers afterwards.
        dtype: what to convert them to.
        config: SMP v2's ``MoEConfig``: refused.
        load_state_dict_from_rank0: take all values from rank 0, one parameter at a time; other ranks may hold any, or
            be on the meta device. Collective.
        cp_comm_type: of context parallelism, which is not available: only the default.

    Raises:
        UserError: ``init`` was not called, the architecture is not supported, or the degree does not fit its shape.
    """
    current = _require_init("smp.transform")
    if config is not None:
        raise UserError("smp.transform: config is for mixture-of-experts models, which are out of scope for now")
    if cp_comm_type != "p2p":
        raise UserError("smp.transform: cp_comm_type is for context parallelism, which is out of scope: leave it out")
    _split(model, current, from_rank0=load_state_dict_from_rank0)
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
        horizon = 2 if _current is None else _current.horizon
    apply_activation_offload(blocks, build_store(directory), horizon=horizon)
    return model


def parallelize(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    activation_checkpointing: bool = False,
    activation: ActivationConfig | None = None,
    loss: LossConfig | None = None,
) -> nn.Module:
    """Shard a Hugging Face causal language model in place over the mesh of :func:`init`; :func:`transform` it before.

    Gradients are summed over data ranks: divide the loss by the global number of valid tokens
    (:func:`smp.count_valid_tokens`), not by the rank's.

    Args:
        model: Llama, Mistral or GPT-NeoX, on this rank's device.
        dtype: dtype to compute in; None keeps the parameters' own. Reduction is then in fp32.
        activation_checkpointing: recompute each block in backward.
        activation: everything about activations, instead of ``activation_checkpointing``.
        loss: make the loss in chunks; None leaves the head as it is.

    Raises:
        UserError: ``init`` was not called, or the architecture is not supported.
    """
    current, family = _require_init("smp.parallelize"), family_of(model.config)
    _split(model, current)
    if activation is None:
        activation = ActivationConfig(activation_checkpointing=activation_checkpointing)
    return _parallelize(
        model,
        family,
        mesh=current.mesh,
        parallel=current.parallel,
        activation=activation,
        dtype=dtype,
        loss=loss,
    )
