"""Experts of a mixture over ranks: each keeps some, and tokens are sent to the ranks of theirs; none is dropped.

It is applied before tensor parallelism, which takes what is split already as it is.

The axis is folded over sharding, context and tensor ranks, and takes no ranks of its own. What is not an expert is
sharded and computed as in any model. Source of the folding: torchtitan's ``ParallelDims``.
"""

from __future__ import annotations

import math
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from smp.axes import divisors, listed
from smp.config import ParallelConfig
from smp.delayed_init import from_rank0
from smp.errors import ConfigError
from smp.memory.shape import FULL, ModelShape, Workload, splits_tokens
from smp.mesh import Mesh
from smp.models.experts import expert_modules, fp32_routers, multiplies_all
from smp.models.meta_model import meta_model
from smp.optim.config import OptimConfig
from smp.parallel.experts import balance
from smp.parallel.experts.balance import after_update, extra_loss, metrics
from smp.parallel.experts.compute import compute
from smp.parallel.experts.config import ExpertsConfig
from smp.parallel.experts.dispatch import inverse, read_counts, send_back, send_to_experts, sort_by_expert
from smp.parallel.technique import Sent, Setup, Traffic

__all__ = ["Config", "after_update", "apply", "extra_loss", "metrics", "problems", "traffic"]

Config = ExpertsConfig
NAME = "smp"  # of the experts function in transformers' registry
_GROUP, _APPLIED = "_smp_expert_group", "_smp_experts_applied"
# Functions of transformers that gather a matrix for each token, or have no backward.
_REFUSED = ("batched_mm", "deepgemm", "deepgemm_megamoe")


def experts_forward(
    module: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, *_: Any, **__: Any
) -> torch.Tensor:
    """Compute as transformers' eager experts, with those of other ranks computed there.

    Args:
        hidden: ``(tokens, hidden)``.
        index: ``(tokens, top_k)``, the experts of each token.
        weights: ``(tokens, top_k)``, theirs; multiplied where the token came from, so that routers have gradients.
    """
    group, top, index = getattr(module, _GROUP, None), index.shape[-1], torch.ops.smp.chosen_experts(index)
    experts = module.down_proj.shape[0]
    by_expert = sort_by_expert(index, experts)
    balance.note_counts(module, index, by_expert.counts)
    rows = hidden[by_expert.order // top]
    if group is None:
        out = compute(module, rows, read_counts(by_expert))
    else:
        rows, how = send_to_experts(rows, by_expert.counts, group)
        out = send_back(compute(module, rows, how.counts), how)
    out = out[inverse(by_expert.order)].view(len(index), top, -1)
    return (out * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)


def _forward_of_llama4(block: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute Llama 4's block with the experts of each token, whose input is scaled, and not their output.

    Its own forward multiplies every token with all experts, scaled by zero for those that are not chosen.
    """
    hidden = hidden.reshape(-1, block.hidden_dim)
    scores, logits = block.router(hidden)
    index = torch.ops.smp.chosen_experts(scores.topk(block.top_k, dim=1).indices)
    rows = (hidden.unsqueeze(1) * scores.gather(1, index).unsqueeze(-1)).view(-1, block.hidden_dim)
    out = block.experts(rows, index.view(-1, 1), torch.ones_like(rows[:, :1]))
    return block.shared_expert(hidden) + out.view(len(hidden), block.top_k, -1).sum(1), logits


def _gate_of_llama4(experts: Any, hidden: torch.Tensor) -> torch.Tensor:
    gate, up = hidden.chunk(2, dim=-1)
    return up * experts.act_fn(gate)


def _send_chosen(block: Any) -> None:
    """Let a block of Llama 4 compute the chosen experts alone."""
    vars(block.experts).update(has_gate=True, has_bias=False, is_transposed=True)
    for module, name, function in (
        (block, "forward", _forward_of_llama4),
        (block.experts, "forward", experts_forward),
        (block.experts, "_apply_gate", _gate_of_llama4),
    ):
        setattr(module, name, types.MethodType(function, module))


def problems(hf_config: Any, setup: Setup) -> list[str]:
    """Return why experts cannot be split, or balanced as asked for."""
    degree, found = setup.mesh.degree("ep"), balance.problems(hf_config, setup)
    model, kind, config = meta_model(hf_config).model, hf_config.model_type, setup.settings[Config]
    modules: list[Any] = [module for _, module in expert_modules(model)]
    if any(map(multiplies_all, modules)) and (config.method != "none" or config.adds_loss):
        found.append(
            f"{config.adds_loss or f'--moe_load_balancing {config.method}'}: a router of type {kind!r} "
            f"does not say what it has chosen: leave it out"
        )
    asked = getattr(hf_config, "_experts_implementation_internal", None)
    if asked in _REFUSED:
        found.append(f"experts_implementation {asked} is not for training: leave it out")
    if setup.settings[OptimConfig].param_dtype == "bf16" and fp32_routers(model):
        found.append(
            f"--param_dtype bf16: a model of type {kind!r} has routers in fp32, as in transformers: leave it out"
        )
    if degree == 1:
        return found
    flag = f"--expert_parallel_degree {degree}"
    if setup.mesh.tp.size > 1 and not setup.settings[ParallelConfig].sequence_parallel:
        found.append(
            f"{flag} with tensor parallelism needs --sequence_parallel 1, under which its ranks have different tokens: "
            f"set it, or leave {flag.split()[0]} out"
        )
    counts = sorted({module.down_proj.shape[0] for module in modules})
    if not modules:
        return [*found, f"{flag}: a model of type {kind!r} has no experts that can be split: leave it out"]
    if any(getattr(module, "has_post_expert_norm", False) for module in modules):
        return [*found, f"{flag}: the experts of type {kind!r} share a norm, which is not split: leave it out"]
    if math.gcd(*counts) % degree:
        legal = listed(divisors(math.gcd(*counts)))
        found.append(f"{flag} does not divide the {listed(counts)} experts of a layer: choose one of {legal}")
    return found


def traffic(shape: ModelShape, mesh: Mesh, work: Workload) -> Traffic:
    """Count the rows that are sent to experts and back, and their gradients; balanced."""
    if mesh.degree("ep") == 1 or not shape.sent:
        return Traffic()
    rows = work.tokens(mesh) * shape.sent * work.compute_bytes // (mesh.tp.size if splits_tokens(mesh, work) else 1)
    again = 6 if work.recomputation == FULL else 4  # selective keeps them
    times = 2 if work.forward_only else work.on_average(4, again)
    return Traffic([Sent("all_to_all", rows, "ep", times)])


def compute_here(model: nn.Module, found: Iterable[tuple[str, Any]]) -> None:
    """Let experts, by path, compute by smp's function."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    for path, module in found:
        if multiplies_all(module):
            _send_chosen(model.get_submodule(path.rpartition(".")[0]))
        else:
            module.config._experts_implementation_internal = NAME


def apply(model: nn.Module, setup: Setup, *, take: bool = False) -> None:
    """Let the experts compute by smp's function, and give each rank of the axis its own; with ``take`` rank 0's."""
    found = expert_modules(model)
    modules: list[Any] = [module for _, module in found]
    if not modules or hasattr(model, _APPLIED):
        return
    setattr(model, _APPLIED, True)
    compute_here(model, found)
    balance.follow(model, found, setup)
    if setup.mesh.degree("ep") == 1:
        return
    over = setup.mesh.view("ep")["ep"]
    for module in modules:
        setattr(module, _GROUP, setup.mesh.roles["ep"].group)
        for name, parameter in list(module.named_parameters(recurse=False)):
            full = parameter.detach()
            split = _of_rank0(full, over) if take else distribute_tensor(full, over, [Shard(0)], src_data_rank=None)
            # A script's init_empty_weights would move what is registered to the meta device.
            module._parameters[name] = nn.Parameter(split, requires_grad=parameter.requires_grad)


def _of_rank0(full: torch.Tensor, over: DeviceMesh) -> DTensor:
    """Return rank 0's values, split; one expert at a time is sent to all."""
    device, own = torch.device(over.device_type), len(full) // over.size()
    first, parts = over.get_local_rank() * own, []
    for expert, matrix in enumerate(full):
        values = from_rank0(matrix, device)
        if first <= expert < first + own:
            parts.append(values)
    return DTensor.from_local(torch.stack(parts), over, [Shard(0)], run_check=False)


def check_and_apply(model: nn.Module, setup: Setup, *, take: bool = False) -> None:
    """Apply it to a script's model, unless it has been.

    Args:
        take: give split experts rank 0's values; collective.

    Raises:
        ConfigError: it does not fit the model and the mesh.
    """
    if hasattr(model, _APPLIED):
        return
    if found := problems(model.config, setup):
        raise ConfigError(found)
    apply(model, setup, take=take)
