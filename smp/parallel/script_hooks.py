"""What a script does with a sharded model outside of its training step, as forward hooks.

It evaluates before the optimizer has stepped, calls the backbone without the head, adds parameters, or has read other
samples on each rank.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from smp.errors import UserError
from smp.mesh import Mesh
from smp.parallel.activation_checkpoint import leave_out_cache
from smp.parallel.optimizers import part_to_load
from smp.parallel.refusals import refuse_changes, require_same_batch
from smp.parallel.sharding import reshard


def follow_script(model: nn.Module, call: str) -> None:
    """Let a sharded model do, or refuse in a sentence, what a script asks of it outside of its training step.

    Args:
        call: that has sharded it, for messages.
    """
    refuse_added(model, call)
    refuse_changes(model, call)
    take_full_tensors(model)
    reshard_after_evaluation(model)
    let_backbone_be_called(model, call)
    leave_out_cache(model)


def refuse_added(model: nn.Module, call: str) -> None:
    """Let the first forward refuse what was added to a sharded model to be trained: nothing reduces its gradient."""
    names, ids = {name for name, _ in model.named_parameters()}, {id(p) for p in model.parameters()}
    if not any(isinstance(p, DTensor) and p.device_mesh.size() > 1 for p in model.parameters()):
        return

    def check(*_: object) -> None:
        handle.remove()
        for name, parameter in model.named_parameters():
            own = isinstance(parameter, DTensor) or name in names or id(parameter) in ids
            if parameter.requires_grad and not own:
                raise UserError(
                    f"{name} was added to the model after {call} had sharded it, so that no rank would reduce its "
                    f"gradient: add parameters, such as adapters, before {call}"
                )

    handle = model.register_forward_pre_hook(torch.compiler.disable(check), prepend=True)


def take_full_tensors(model: nn.Module) -> None:
    """Let ``load_state_dict`` take full tensors, of which each rank keeps its part."""

    def keep(_: nn.Module, state_dict: dict[str, Any], prefix: str, *unused: Any) -> None:
        reshard(model)  # a forward without a backward leaves parameters gathered
        for name, parameter in model.named_parameters(prefix.rstrip("."), remove_duplicate=False):
            if name in state_dict:
                state_dict[name] = part_to_load(state_dict[name], parameter)

    model.register_load_state_dict_pre_hook(keep)


def reshard_after_evaluation(model: nn.Module) -> None:
    """Let a forward without gradients free the parameters that ``fully_shard`` leaves gathered for a backward.

    An optimizer, a clipping or a script that reads or changes parameters before the next forward then has the sharded
    ones.
    """

    def free(module: nn.Module, *_: object) -> None:
        # Not inside of the forward of a module around this one, whose units may be called again.
        if (
            not torch.is_grad_enabled()
            and cast(FSDPModule, module)._get_fsdp_state()._state_ctx.iter_forward_root is None
        ):
            reshard(module)

    model.register_forward_hook(torch.compiler.disable(free))


def let_backbone_be_called(model: nn.Module, call: str) -> None:
    """Let a script call a sharded model's backbone without its head, or refuse that where gradients would be lost."""
    backbone, root = getattr(model, "base_model", model), cast(FSDPModule, model)._get_fsdp_state()

    def enter(module: nn.Module, *_: object) -> None:
        if root._state_ctx.iter_forward_root is not None:
            return
        if root._fsdp_param_group is not None:
            raise UserError(
                f"a {type(module).__name__} has parameters that {call} shards with the model around it: call the "
                f"model, with output_hidden_states=True for hidden states"
            )
        root._lazy_init()

    if backbone is not model:
        backbone.register_forward_pre_hook(torch.compiler.disable(enter))


def compare_batches(model: nn.Module, mesh: Mesh) -> None:
    """Let a tensor-parallel model compare the first batch of training, and of evaluation, over its ranks."""
    compared: set[bool] = set()

    def compare(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = args[0] if args else kwargs.get("input_ids")
        if module.training in compared or not isinstance(ids, torch.Tensor) or torch.compiler.is_compiling():
            return
        require_same_batch("tensor parallelism", ids, mesh.tp, mesh)
        compared.add(module.training)

    model.register_forward_pre_hook(compare, with_kwargs=True)
