"""State of a model and its optimizer that is saved: parameters, buffers, optimizer state and settings."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP1
from torch.distributed.tensor import DTensor

from smp.checkpoint.safetensors_io import DTYPE_NAMES
from smp.checkpoint.tagged_json import encode
from smp.errors import UserError, a_type
from smp.models.added import left_out
from smp.models.file_names import buffers_of, clean_name, parameters_of
from smp.optim.optimizers import kind_of_optimizer
from smp.parallel.sharding import reshard

# What names of tensors of a job's data begin with.
OF_DATA = "data."
_OF_DATA = "_smp_of_data"


def set_tensors_of_data(model: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Let checkpoints of a model also hold tensors of the job's data, which are the same on all ranks.

    What restores a checkpoint without having set them passes over them.

    Args:
        tensors: by names that begin with ``data.``.
    """
    setattr(model, _OF_DATA, tensors)


def tensors_of_data(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return what :func:`set_tensors_of_data` was given."""
    return getattr(model, _OF_DATA, {})


def plain(model: nn.Module) -> nn.Module:
    """Return the model whose names go into a checkpoint: DDP's own module.

    Raises:
        UserError: it is no module, or something else than DTensor shards it, so that a rank's tensors do not say what
            they are part of.
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"Checkpointer takes a torch.nn.Module, got {a_type(model)}: put several into an nn.ModuleList")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    # Not by isinstance: smp's own drop-in answers to that name, too.
    if any(type(module) is TorchFSDP1 for module in model.modules()):
        raise UserError(
            "Checkpointer does not know torch's FSDP1, whose flat parameters have no names: use "
            "smp.FullyShardedDataParallel, which takes the same arguments"
        )
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise UserError("Checkpointer does not know DeepSpeed's ZeRO-3: use the engine's own save_checkpoint")
    return model


def require_known(optimizer: torch.optim.Optimizer) -> None:
    """Raise a UserError for an optimizer whose state cannot be seen."""
    name = type(optimizer).__name__
    # By name: importing it takes long, and warns.
    if "ZeroRedundancyOptimizer" in (kind.__name__ for kind in type(optimizer).__mro__):
        raise UserError(
            f"Checkpointer: {name} has another part of its state on every rank: shard the model (smp.FSDP), and give "
            f"it the plain optimizer"
        )
    if not isinstance(optimizer, torch.optim.Optimizer) or not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise UserError(
            f"Checkpointer: a {name} is no torch.optim.Optimizer: give the one that it wraps, or of several each to "
            f"its own Checkpointer of another name"
        )


def model_entry(name: str, hf_config: Any) -> dict[str, Any]:
    """Describe the model in a manifest: its name, its Hugging Face config if it has one, and a digest of that."""
    if not hasattr(hf_config, "to_json_string"):
        return {"name": name, "config": {}}
    text = hf_config.to_json_string(use_diff=False)
    return {"name": name, "config": json.loads(text), "hash": hashlib.sha256(text.encode()).hexdigest()}


def alike(model: nn.Module) -> list[int]:
    """Return the ranks of this one's tensor-parallel group, whose generators must agree; itself alone without one."""
    for parameter in model.parameters():
        if isinstance(parameter, DTensor) and "tp" in (names := parameter.device_mesh.mesh_dim_names or ()):
            mesh, coordinate = parameter.device_mesh.mesh, parameter.device_mesh.get_coordinate()
            if coordinate is not None:
                here = tuple(
                    slice(None) if axis == "tp" else index for axis, index in zip(names, coordinate, strict=True)
                )
                return mesh[here].tolist()
    return [dist.get_rank()]


def parameter_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, str]:
    """Return the names of the model's parameters.

    Raises:
        UserError: the optimizer has one that is not the model's.
    """
    reshard(model)  # a forward that no backward has followed leaves gathered parameters
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in parameters_of(model).items()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise UserError(
                    f"Checkpointer: the optimizer has a parameter of shape {tuple(parameter.shape)} that the model "
                    f"does not have: make the optimizer from model.parameters() after the model was sharded"
                )
    return names


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return what :func:`state_tensors` does, without the optimizer's."""
    reshard(model)
    left = left_out(model)
    tensors = {f"model.{name}": p.detach() for name, p in parameters_of(model).items() if name not in left}
    return tensors | {f"model.{name}": buffer for name, buffer in buffers_of(model)} | tensors_of_data(model)


def _checked_state(key: str, name: str, value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    if "." in key:
        raise UserError(f"Checkpointer: the key {key!r} of the optimizer's state has a dot: use another name")
    if isinstance(parameter, DTensor) and not isinstance(value, DTensor) and value.numel() != 1:
        raise UserError(
            f"Checkpointer: optim.{key}.{name} is a rank's own tensor of shape {tuple(value.shape)}, for a parameter "
            f"that is sharded: use an optimizer whose state is sharded alike, such as those of torch.optim"
        )
    return value


def state_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[torch.Tensor, dict[str, Any]] | None = None
) -> dict[str, torch.Tensor]:
    """Return all tensors that are saved, by name; loading writes into these very tensors.

    Parameters that stay as the pretrained weights have them are not: :func:`smp.models.added.left_out`.

    Args:
        state: of the optimizer, instead of its own.

    Raises:
        UserError: a tensor of the optimizer's state is a rank's own, so that its part of the full tensor is not known,
            or one has a dtype that files have no name for.
    """
    names = parameter_names(model, optimizer)
    entries = optimizer.state if state is None else state
    for stray in entries.keys() - names.keys():
        raise UserError(
            f"Checkpointer: {type(optimizer).__name__}.state contains {str(stray)[:40]!r} beside its parameters' "
            f"state: keep it in extra"
        )
    tensors: dict[str, torch.Tensor] = {}
    left = left_out(model)
    # In the order of the model, so that a resumed run writes the very files of one that was never stopped.
    for parameter, name in names.items():
        if name not in left:
            tensors[f"model.{name}"] = parameter.detach()
        for key, value in entries.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                tensors[f"optim.{key}.{name}"] = _checked_state(key, name, value, parameter)
    tensors |= {f"model.{name}": buffer for name, buffer in buffers_of(model)} | tensors_of_data(model)
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise UserError(
                f"Checkpointer: {name} is of {tensor.dtype}, which cannot be saved: use one of "
                f"{', '.join(DTYPE_NAMES.values())}"
            )
    return tensors


def changed_by(optimizer: torch.optim.Optimizer, model: nn.Module) -> set[str]:
    """Return the names of the tensors that nothing but the optimizer's own step changes."""
    names = parameter_names(model, optimizer)
    optimized = {names[p] for group in optimizer.param_groups for p in group["params"]}
    own = {f"optim.{key}.{names[p]}" for p, entries in optimizer.state.items() for key in entries}
    return own | {f"model.{name}" for name in optimized}


def extra_states(model: nn.Module) -> dict[str, Any]:
    """Return what modules keep beside parameters and buffers (``get_extra_state``), by their names, as JSON.

    Raises:
        UserError: one is not of what JSON has.
    """
    found = {}
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            try:
                found[clean_name(name)] = encode(module.get_extra_state(), "get_extra_state()")
            except ValueError as error:
                raise UserError(
                    f"Checkpointer: {name or type(module).__name__} has an extra state that cannot be saved ({error}): "
                    f"make it of numbers and texts, or make tensors buffers"
                ) from None
    return found


def settings_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer's settings by group, and what its state contains beside tensors, as JSON.

    Raises:
        UserError: a setting is no number, text, or list of them.
    """
    names = parameter_names(model, optimizer)
    groups = []
    for group in optimizer.param_groups:
        values = {k: v.item() if isinstance(v, torch.Tensor) else v for k, v in group.items() if k != "params"}
        groups.append({"names": [names[p] for p in group["params"]], "values": values})
    scalars = {
        names[parameter]: {k: v for k, v in entries.items() if not isinstance(v, torch.Tensor)}
        for parameter, entries in optimizer.state.items()
        if parameter in names
    }
    try:
        return {
            "class": "AdamW",
            **kind_of_optimizer(optimizer),
            "groups": [{"names": g["names"], "values": encode(g["values"], "param_groups")} for g in groups],
            "scalars": {name: encode(values, "state") for name, values in scalars.items() if values},
        }
    except ValueError as error:
        raise UserError(
            f"Checkpointer: a setting of {type(optimizer).__name__} cannot be saved ({error}): use numbers, texts and "
            f"lists of them"
        ) from None
