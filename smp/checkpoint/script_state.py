"""What a user's script has to save: parameters, buffers, the state and settings of whatever optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP1
from torch.distributed.tensor import DTensor, zeros

from smp.checkpoint.files import DTYPE_NAMES
from smp.checkpoint.manifest import Manifest
from smp.checkpoint.tagged_json import decode, encode
from smp.errors import UserError
from smp.parallel.sharding import reshard


def plain(model: nn.Module) -> nn.Module:
    """The model whose names go into a checkpoint: DDP's own module.

    Raises:
        UserError: it is no module, or something else than DTensor shards it, so that a rank's tensors do not say what
            they are part of.
    """
    if not isinstance(model, nn.Module):
        raise UserError(
            f"Checkpoints takes a torch.nn.Module, got a {type(model).__name__}: put several into an nn.ModuleList"
        )
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    # Not by isinstance: smp's own drop-in answers to that name, too.
    if any(type(module) is TorchFSDP1 for module in model.modules()):
        raise UserError(
            "Checkpoints does not know torch's FSDP1, whose flat parameters have no names: use "
            "smp.FullyShardedDataParallel, which takes the same arguments"
        )
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise UserError("Checkpoints does not know DeepSpeed's ZeRO-3: use the engine's own save_checkpoint")
    return model


def require_known(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose state cannot be seen.

    Raises:
        UserError: naming it.
    """
    name = type(optimizer).__name__
    # By name: importing it takes long, and warns.
    if "ZeroRedundancyOptimizer" in (kind.__name__ for kind in type(optimizer).__mro__):
        raise UserError(
            f"Checkpoints: {name} holds another part of its state on every rank: shard the model (smp.FSDP), and give "
            f"it the plain optimizer"
        )
    if not isinstance(optimizer, torch.optim.Optimizer) or not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise UserError(
            f"Checkpoints: a {name} is no torch.optim.Optimizer: give the one that it wraps, or of several each to its "
            f"own Checkpoints of another name"
        )


# What wrappers put into names; a checkpoint has the names of the model itself.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.")


def _clean(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def buffers_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Those that a state dict would hold, by name; complex ones as real numbers, of which a last axis has two."""
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                real = torch.view_as_real(buffer) if buffer.is_complex() else buffer
                yield _clean(f"{prefix}.{name}" if prefix else name), real


def alike(model: nn.Module) -> list[int]:
    """The ranks of this one's tensor-parallel group, which must draw alike; itself alone where there is none."""
    for parameter in model.parameters():
        if isinstance(parameter, DTensor) and "tp" in (names := parameter.device_mesh.mesh_dim_names or ()):
            mesh, place = parameter.device_mesh.mesh, parameter.device_mesh.get_coordinate()
            if place is not None:
                here = tuple(slice(None) if axis == "tp" else index for axis, index in zip(names, place, strict=True))
                return mesh[here].tolist()
    return [dist.get_rank()]


def _named(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, str]:
    """The names of the model's parameters.

    Raises:
        UserError: the optimizer has one that is not the model's.
    """
    names: dict[torch.Tensor, str] = {parameter: _clean(name) for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise UserError(
                    f"Checkpoints: the optimizer holds a parameter of shape {tuple(parameter.shape)} that the model "
                    f"does not have: make the optimizer from model.parameters() after the model was sharded"
                )
    return names


def state_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[torch.Tensor, dict[str, Any]] | None = None
) -> dict[str, torch.Tensor]:
    """All tensors that are saved, by name; loading writes into these very tensors.

    Args:
        state: of the optimizer, instead of what it holds.

    Raises:
        UserError: a tensor of the optimizer's state is a rank's own, so that its part of the whole is not known, or one
            has a dtype that files have no name for.
    """
    reshard(model)
    names = _named(model, optimizer)
    tensors = {f"model.{name}": parameter.detach() for parameter, name in names.items()}
    tensors |= {f"model.{name}": buffer for name, buffer in buffers_of(model)}
    for parameter, entries in (optimizer.state if state is None else state).items():
        if parameter not in names:
            raise UserError(
                f"Checkpoints: {type(optimizer).__name__}.state holds {str(parameter)[:40]!r} beside its parameters' "
                f"state: keep it in extra"
            )
        for key, value in entries.items():
            if isinstance(value, torch.Tensor):
                name = f"optim.{key}.{names[parameter]}"
                if "." in key:
                    raise UserError(
                        f"Checkpoints: the key {key!r} of the optimizer's state has a dot: use another name"
                    )
                if isinstance(parameter, DTensor) and not isinstance(value, DTensor) and value.numel() != 1:
                    raise UserError(
                        f"Checkpoints: {name} is a rank's own tensor of shape {tuple(value.shape)}, for a parameter "
                        f"that is sharded: use an optimizer whose state is sharded alike, such as those of torch.optim"
                    )
                tensors[name] = value
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise UserError(
                f"Checkpoints: {name} is of {tensor.dtype}, which cannot be saved: use one of "
                f"{', '.join(DTYPE_NAMES.values())}"
            )
    return tensors


def changed_by(optimizer: torch.optim.Optimizer, model: nn.Module) -> set[str]:
    """The names of the tensors that nothing but the optimizer's own step changes."""
    names = _named(model, optimizer)
    held = {names[p] for group in optimizer.param_groups for p in group["params"]}
    own = {f"optim.{key}.{names[p]}" for p, entries in optimizer.state.items() for key in entries}
    return own | {f"model.{name}" for name in held}


def extra_states(model: nn.Module) -> dict[str, Any]:
    """What modules keep beside parameters and buffers (``get_extra_state``), by their names, as JSON.

    Raises:
        UserError: one is not of what JSON has.
    """
    found = {}
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            try:
                found[_clean(name)] = encode(module.get_extra_state(), "get_extra_state()")
            except ValueError as error:
                raise UserError(
                    f"Checkpoints: {name or type(module).__name__} has an extra state that cannot be saved ({error}): "
                    f"make it of numbers and texts, or make tensors buffers"
                ) from None
    return found


def restore_extra_states(model: nn.Module, saved: dict[str, Any]) -> None:
    """Give modules what :func:`extra_states` found."""
    for name, module in model.named_modules():
        if _clean(name) in saved:
            module.set_extra_state(decode(saved[_clean(name)]))


def settings_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's settings by group, and what its state holds beside tensors, as JSON.

    Raises:
        UserError: a setting is no number, text, or list of them.
    """
    names = _named(model, optimizer)
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
            "class": type(optimizer).__name__,
            "groups": [{"names": g["names"], "values": encode(g["values"], "param_groups")} for g in groups],
            "scalars": {name: encode(values, "state") for name, values in scalars.items() if values},
        }
    except ValueError as error:
        raise UserError(
            f"Checkpoints: a setting of {type(optimizer).__name__} cannot be saved ({error}): use numbers, texts and "
            f"lists of them"
        ) from None


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, manifest: Manifest) -> None:
    """Refuse a checkpoint of another optimizer, before anything is changed.

    Raises:
        UserError: it is of another class, or its groups hold other parameters.
    """
    saved = manifest.run["optimizer"]
    if saved.get("class") != type(optimizer).__name__:
        raise UserError(
            f"the checkpoint was made with the optimizer {saved.get('class')}, got {type(optimizer).__name__}: "
            f"use the same"
        )
    names = _named(model, optimizer)
    mine = [sorted(names[p] for p in group["params"]) for group in optimizer.param_groups]
    theirs = [sorted(group["names"]) for group in saved["groups"]]
    if mine != theirs:
        raise UserError(
            f"the checkpoint's optimizer has {len(theirs)} groups of {[len(g) for g in theirs]} parameters, this one "
            f"{len(mine)} of {[len(g) for g in mine]}, or of others: make the groups as before"
        )


def allocate(
    model: nn.Module, optimizer: torch.optim.Optimizer, manifest: Manifest
) -> dict[torch.Tensor, dict[str, Any]]:
    """The optimizer's state as the checkpoint has it, without values, so that it can be read into.

    Raises:
        UserError: it has the state of a parameter that the model does not have.
    """
    # A fused or capturable optimizer counts its steps on the device.
    groups = [group for group in optimizer.param_groups if group.get("fused") or group.get("capturable")]
    counted = {parameter for group in groups for parameter in group["params"]}
    by_name = {name: parameter for parameter, name in _named(model, optimizer).items()}
    state: dict[torch.Tensor, dict[str, Any]] = {}
    for name, entry in manifest.tensors.items():
        kind, _, rest = name.partition(".")
        key, _, parameter_name = rest.partition(".")
        if kind != "optim":
            continue
        if parameter_name not in by_name:
            raise UserError(f"the checkpoint has {name}, which the model does not have: load it into the same model")
        parameter = by_name[parameter_name]
        state.setdefault(parameter, {})[key] = _empty(
            parameter, entry.shape, entry.dtype, on_device=parameter in counted
        )
    return state


def _empty(parameter: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, *, on_device: bool) -> torch.Tensor:
    """A tensor of the state of a parameter, laid out as torch's optimizers do."""
    if shape == tuple(parameter.shape):
        return torch.zeros_like(parameter.detach(), dtype=dtype)
    if shape and isinstance(parameter, DTensor) and len(shape) == parameter.dim():
        return zeros(shape, dtype=dtype, device_mesh=parameter.device_mesh, placements=parameter.placements)
    return torch.zeros(shape, dtype=dtype, device=parameter.device if shape or on_device else "cpu")


def restore_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[torch.Tensor, dict[str, Any]],
    saved: dict[str, Any],
) -> None:
    """Give the optimizer its state and its settings back: the learning rate and the like of each group."""
    by_name = {name: parameter for parameter, name in _named(model, optimizer).items()}
    for name, values in saved["scalars"].items():
        state.setdefault(by_name[name], {}).update(decode(values))
    optimizer.state.clear()
    optimizer.state.update(state)
    for group, entry in zip(optimizer.param_groups, saved["groups"], strict=True):
        for key, value in decode(entry["values"]).items():
            if isinstance(group.get(key), torch.Tensor):
                group[key].fill_(value)
            else:
                group[key] = value
