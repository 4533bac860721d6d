"""Experts of mixtures: which modules have them, and forwards that are followed without their values."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from smp.models.projection import projection_size

_NONE = "smp_no_experts"  # an experts function under which no token is sent to an expert
_OF_LLAMA4 = "Llama4TextExperts"


def is_experts(module: nn.Module) -> bool:
    """Return whether a module has the experts of a layer, each parameter with all of them along its first axis.

    They are found by what transformers' ``use_experts_implementation`` sets, and not by names of classes.
    """
    return multiplies_all(module) or all(
        hasattr(module, name) for name in ("has_gate", "is_transposed", "has_bias", "down_proj")
    )


def multiplies_all(module: nn.Module) -> bool:
    """Return whether experts are multiplied with every token, as Llama 4's, which take no choices of a router."""
    return any(cls.__name__ == _OF_LLAMA4 for cls in type(module).__mro__)


def expert_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules with experts by path, in order."""
    return [(path, module) for path, module in model.named_modules() if is_experts(module)]


def fp32_routers(model: nn.Module) -> list[nn.Module]:
    """Return the routers of experts whose parameters transformers keeps in fp32 in a model that it loads in bf16."""
    kept = [name.replace("*", ".*") for name in getattr(model, "_keep_in_fp32_modules_strict", None) or ()]
    found = []
    for path, experts in expert_modules(model) if kept else ():
        around = path.rpartition(".")[0]
        for name, module in model.get_submodule(around).named_children():
            names = [f"{around}.{name}.{each}" for each, _ in module.named_parameters()]
            if module is not experts and names and all(re.search("|".join(kept), each) for each in names):
                found.append(module)
    return found


class Layer(NamedTuple):
    """The experts of a layer.

    Attributes:
        path: of the module.
        experts: their number.
        top: of these that each token is sent to.
        weights: elements of the matrices of one expert.
        parameters: of one expert: these, and its biases.
        router: elements of the matrix that chooses them, where it is of no linear layer; else 0.
    """

    path: str
    experts: int
    top: int
    weights: int
    parameters: int
    router: int


# How configs name the experts of a token.
TOP_KEYS = ("num_experts_per_tok", "moe_topk", "top_k_experts", "moe_k")


def expert_layers(model: nn.Module) -> list[Layer]:
    """Return the layers with experts, in order; the model may be on the meta device."""
    found = []
    for path, module in expert_modules(model):
        block: Any = model.get_submodule(path.rpartition(".")[0])
        beside = [child for child in block.children() if child is not module]
        count: int = module.down_proj.shape[0]  # type: ignore[index, union-attr, assignment]
        tops = [getattr(each, "top_k", None) for each in (block, *beside)]
        tops += [getattr(model.config, name, None) for name in TOP_KEYS]  # type: ignore[union-attr]
        top = next((value for value in tops if type(value) is int), count)
        own = [p for p in module.parameters(recurse=False) if p.shape[:1] == (count,)]
        matrices, parameters = (sum(p.numel() for p in own if p.dim() >= least) // count for least in (3, 1))
        routers = [each._parameters.get("weight") for each in beside if projection_size(each) is None]
        router = next((w.numel() for w in routers if w is not None and w.dim() == 2 and w.shape[0] == count), 0)
        found.append(Layer(path, count, top, matrices, parameters, router))
    return found


def idle_parameters(model: nn.Module) -> int:
    """Count the parameters of the experts that a token is not sent to; the model may be on the meta device."""
    return sum((layer.experts - layer.top) * layer.parameters for layer in expert_layers(model))


@contextlib.contextmanager
def implemented_by(configs: Iterable[Any], key: str, name: str) -> Iterator[None]:
    """Let the modules of configs compute by another function of transformers' registries.

    Args:
        key: of the configs, for the functions of a kind.
        name: of the function, in their registry.
    """
    former = {id(config): (config, getattr(config, key, None)) for config in configs}
    try:
        for config, _ in former.values():
            setattr(config, key, name)
        yield
    finally:
        for config, value in former.values():
            setattr(config, key, value)


def _leave_out(module: nn.Module, hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return hidden * 1


@contextlib.contextmanager
def without_experts(model: nn.Module) -> Iterator[None]:
    """Let experts return what they get: which tokens they have depends on values, and their products on the dtype."""
    configs = [config for _, module in expert_modules(model) if (config := getattr(module, "config", None))]
    if not configs:
        yield
        return
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(_NONE, _leave_out)
    with implemented_by(configs, "_experts_implementation_internal", _NONE):
        yield
