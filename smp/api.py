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

from smp.config import ActivationConfig, ParallelConfig
from smp.errors import UserError
from smp.mesh import Mesh, build_mesh, resolve_degrees
from smp.models.registry import family_of
from smp.runtime import read_launch
from smp.transform import parallelize as _parallelize


@dataclasses.dataclass(frozen=True)
class _Initialized:
    mesh: Mesh
    parallel: ParallelConfig


_current: _Initialized | None = None


def _read(config: dict[str, Any] | str | Path | None) -> dict[str, Any]:
    if isinstance(config, (str, Path)):
        try:
            config = json.loads(Path(config).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"smp.init: {config} is no readable JSON ({error}): give a dict or a JSON file") from None
    values = {} if config is None else config
    if not isinstance(values, dict):
        raise UserError(f"smp.init takes a dict, the path of a JSON file or None, got a {type(values).__name__}")
    known = {f.name: f.name for f in dataclasses.fields(ParallelConfig)}
    known |= {alias: f.name for f in dataclasses.fields(ParallelConfig) for alias in f.metadata["aliases"]}
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(sorted(known))}"
            raise UserError(f"smp.init: unknown key {key}: {hint}")
    return {known[key]: value for key, value in values.items()}


def _device_type() -> str:
    """What the process group serves besides the CPU: a group started without a backend names none itself."""
    backends = dist.get_backend_config().split(",")  # such as cpu:gloo,cuda:nccl
    serves_gpus = "cuda:nccl" in backends or "cuda:smddp" in backends
    return "cuda" if serves_gpus and torch.cuda.is_available() else "cpu"


def init(config: dict[str, Any] | str | Path | None = None) -> Mesh:
    """Lay the device mesh over the running process group; call after ``dist.init_process_group``.

    Args:
        config: settings of :class:`smp.ParallelConfig` such as ``{"hybrid_shard_degree": 8}``: a dict, or the path
            of a JSON file.

    Returns:
        The mesh: ``mesh.data_rank`` and ``mesh.data_size`` say which part of the data this rank reads.

    Raises:
        UserError: no process group runs, or the configuration does not fit it.
    """
    global _current
    if not dist.is_initialized():
        raise UserError("smp.init needs a process group: call torch.distributed.init_process_group(...) before it")
    parallel = ParallelConfig(**_read(config))
    world = dist.get_world_size()
    launch = read_launch()
    local = launch.local_world_size if launch.world_size == world else world
    degrees = resolve_degrees(parallel, world_size=world, local_world_size=local)
    _current = _Initialized(build_mesh(degrees, _device_type()), parallel)
    return _current.mesh


def is_initialized() -> bool:
    """Whether :func:`init` has been called."""
    return _current is not None


def parallelize(
    model: nn.Module, *, dtype: torch.dtype | None = None, activation_checkpointing: bool = False
) -> nn.Module:
    """Shard a Hugging Face causal language model in place over the mesh of :func:`init`.

    Gradients are summed over data ranks: divide the loss by the global number of valid tokens
    (:func:`smp.count_valid_tokens`), not by the rank's.

    Args:
        model: Llama, Mistral or GPT-NeoX, on this rank's device.
        dtype: dtype to compute in; None keeps the parameters' own. Reduction is then in fp32.
        activation_checkpointing: recompute each block in backward.

    Raises:
        UserError: ``init`` was not called, or the architecture is not supported.
    """
    if _current is None:
        raise UserError("smp.parallelize needs a mesh: call smp.init({...}) before it")
    activation = ActivationConfig(activation_checkpointing=activation_checkpointing)
    return _parallelize(
        model,
        family_of(model.config),
        mesh=_current.mesh,
        parallel=_current.parallel,
        activation=activation,
        dtype=dtype,
    )
