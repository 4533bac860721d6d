"""A made-up technique with parameters of its own: a file, and a line of ``parallelize.TECHNIQUES``, before ``tensor``.

Beside two frozen or trained linear layers of each block, two small factors; if nothing is frozen, also a gain of each
block's output, an extra loss that keeps it small, and a shift that grows with each update.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from smp.config import Section, Settings, setting
from smp.models.added import AddedParameter, Apart
from smp.models.family import Family
from smp.models.file_names import FileNames, Rename
from smp.models.init_rules import drawn
from smp.parallel.linear import Product, replace_product
from smp.parallel.technique import Parameters, Setup, model_blocks

RANK, SCALE = 3, 2.0
LAYERS = ("self_attn.q_proj", "mlp.down_proj")
NAMES = FileNames(to_file=(Rename(r"\.down$", ".A"), Rename(r"\.up$", ".B")))
APART = Apart("adapter.safetensors", {"adapter.json": '{"r": 3}'}, NAMES)


class Adapter(Product):
    """Two small factors beside a weight."""

    own: ClassVar = {"down": "inputs", "up": "outputs"}

    def forward(self, x, weight, bias, down, up, *, product=None):  # type: ignore[no-untyped-def,override]
        return super().forward(x, weight, bias, product=product) + SCALE * (x @ down.T) @ up.T

    def input_gradient(self, gradient, weight, down, up, *, into=None, product=None):  # type: ignore[no-untyped-def,override]
        found = super().input_gradient(gradient, weight, into=into, product=product)
        return found.addmm_(gradient @ up, down, alpha=SCALE)

    def parameter_gradients(self, gradient, x, weight, down, up, *, needs):  # type: ignore[no-untyped-def,override]
        of_weight = super().parameter_gradients(gradient, x, weight, needs=needs)
        return [*of_weight, SCALE * (gradient @ up).T @ x, SCALE * gradient.T @ (x @ down.T)]

    def as_one(self, x, weight, down, up):  # type: ignore[no-untyped-def,override]
        return torch.cat([x, SCALE * x @ down.T], 1), torch.cat([weight, up], 1)

    @staticmethod
    def plain(module: Any, x: torch.Tensor) -> torch.Tensor:
        """The same by autograd alone."""
        return F.linear(x, module.weight, module.bias) + SCALE * F.linear(F.linear(x, module.down), module.up)

    @staticmethod
    def layers(model: Any) -> list[nn.Linear]:
        """All linear layers but the head."""
        head = model.get_output_embeddings()
        return [module for module in model.modules() if isinstance(module, nn.Linear) and module is not head]

    @staticmethod
    def prepare(module: Any) -> None:
        """Add the factors, and freeze the weight."""
        outputs, inputs = module.weight.shape
        module.weight.requires_grad_(False)
        module.down = nn.Parameter(0.3 * torch.randn(RANK, inputs, dtype=module.weight.dtype))
        module.up = nn.Parameter(0.3 * torch.randn(outputs, RANK, dtype=module.weight.dtype))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Section):
    adapters: bool = setting(False, "Whether there are any.")
    freeze: bool = setting(False, "Train nothing else.")


def parameters(model: nn.Module, family: Family, settings: Settings) -> Parameters:
    config = settings[Config]
    added = list(_added(model, family, gains=not config.freeze)) if config.adapters else []
    return Parameters(added, freezes=config.adapters and config.freeze)


def _added(model: nn.Module, family: Family, *, gains: bool) -> Iterator[AddedParameter]:
    values = drawn(lambda values, generator: values.uniform_(-0.3, 0.3, generator=generator))
    for index, block in enumerate(model.get_submodule(family.blocks).children()):
        path = f"{family.blocks}.{index}"
        for layer in LAYERS:
            outputs, inputs = block.get_submodule(layer).weight.shape  # type: ignore[misc,union-attr]
            for name, shape in (("down", (RANK, inputs)), ("up", (outputs, RANK))):
                yield AddedParameter(f"{path}.{layer}", name, shape, values, APART)
        if gains:
            ones = drawn(lambda values, generator: values.fill_(1.25))
            yield AddedParameter(path, "gain", (model.config.hidden_size,), ones)  # type: ignore[union-attr]


def apply(model: nn.Module, setup: Setup) -> None:
    config = setup.settings[Config]
    for block in model_blocks(model, setup.family) if config.adapters else ():
        for layer in LAYERS:
            replace_product(block.get_submodule(layer), Adapter())  # type: ignore[arg-type]
        if not config.freeze:
            _scale(block)


def _scale(block: Any) -> None:
    forward = block.forward
    block.register_buffer("shift", torch.zeros((), dtype=block.gain.dtype))

    def scaled(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        out = forward(hidden, *args, **kwargs)
        block.penalty = hidden[..., 0].numel() * (block.gain - 1).square().sum()  # of this rank's tokens
        return out * block.gain + block.shift

    block.forward = scaled


def extra_loss(model: nn.Module, setup: Setup) -> torch.Tensor | None:
    blocks: list[Any] = model_blocks(model, setup.family)
    return sum(block.penalty for block in blocks) if hasattr(blocks[0], "penalty") else None  # type: ignore[return-value]


def after_update(model: nn.Module, setup: Setup, skipped: torch.Tensor) -> None:
    for block in model_blocks(model, setup.family):
        if hasattr(block, "shift"):
            block.shift += 0.01 * ~skipped  # type: ignore[operator]
