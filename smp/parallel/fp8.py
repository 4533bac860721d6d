"""Linear layers and routed experts of the blocks in fp8, by torchao.

Values are cast for each product (:mod:`smp.parallel.fp8_products` and :mod:`smp.parallel.fp8_experts`), with scales of
that moment; parameters, gradients, the optimizer's state, checkpoints and exports are those of a model without. The
head, the embedding, norms, routers and attention stay in the dtype of the computation.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import nn

from smp.config import ActivationConfig, ParallelConfig, Section, Settings, setting
from smp.errors import ConfigError
from smp.log import get_logger
from smp.memory.shape import ModelShape, Moment, Workload, splits_tokens
from smp.mesh import Mesh
from smp.models.experts import expert_modules
from smp.models.family import Family
from smp.models.meta_model import meta_model
from smp.models.projection import is_transposed
from smp.parallel.choices import Choice, Situation
from smp.parallel.expert_adapters import matrices
from smp.parallel.experts.compute import PRODUCTS
from smp.parallel.linear import product_of, replace_product
from smp.parallel.lora import Config as LoraConfig
from smp.parallel.lora import linear_layers
from smp.parallel.nf4 import INSTALL, Unpacked, is_installed
from smp.parallel.sharding_cost import computes_with_shards
from smp.parallel.technique import Setup, Traffic, model_blocks

logger = get_logger("model")

MX = "mxfp8"
_ALIGNED, _MX_ALIGNED = 16, 32  # values, of outputs and inputs, which products in fp8 take
# Compute capability of the first GPUs with such products.
_CAPABILITY, _MX_CAPABILITY = ((8, 9), "Ada, Hopper"), ((10, 0), "Blackwell")
# Major compute capability of the GPUs that have grouped products in fp8, as of torch 2.13: with other recipes, MXFP8.
_GROUPED, _MX_GROUPED = (9, "Hopper"), (10, "Blackwell")
_MOVED = 5  # bytes of each value that is cast: read in bf16 for the largest one, read again, and written


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Section):
    """Products of linear layers and routed experts in fp8."""

    fp8: bool = setting(
        False, "Compute the blocks' linear layers in fp8, on GPUs from Ada and Hopper on; on CPUs it is emulated."
    )
    fp8_recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"] = setting(
        "rowwise_with_gw_hp",
        "Scales of fp8, powers of two: one for each tensor; for each row; for each row, with the weights' gradients "
        "not in fp8; or, on Blackwell, for each 32 values.",
    )
    fp8_experts: bool = setting(
        False, "Compute routed experts in fp8, too, on Hopper, with recipe `mxfp8` on Blackwell."
    )
    fp8_all_gather: bool = setting(
        False, "Gather sharded weights of layers in fp8 in fp8, with recipe `tensorwise`: a byte for a value."
    )

    def problems(self) -> list[str]:
        """Add a recipe without fp8."""
        found = super().problems()
        if not self.fp8 and self.fp8_recipe != "rowwise_with_gw_hp":
            found.append(f"--fp8_recipe {self.fp8_recipe} is of --fp8 1: set it, or leave the recipe out")
        if self.fp8_experts and not self.fp8:
            found.append("--fp8_experts 1 is of --fp8 1: set it, or leave this out")
        if self.fp8_all_gather and not (self.fp8 and self.fp8_recipe == "tensorwise"):
            given = f"--fp8 1 --fp8_recipe {self.fp8_recipe}" if self.fp8 else "--fp8 0"
            found.append(f"--fp8_all_gather 1 gathers weights with one scale for a tensor, got {given}: set --fp8 1 "
                         f"--fp8_recipe tensorwise, or leave it out")  # fmt: skip
        return found


def lacking(config: Config, device: torch.device) -> list[str]:
    """Return what this machine lacks for fp8."""
    if not config.fp8:
        return []
    if not is_installed():
        return [f"--fp8 1 computes with torchao, which is not installed: {INSTALL}, or leave it out"]
    if device.type == "cuda" and (found := too_old(config, torch.cuda.get_device_capability(device))):
        return found
    try:
        from smp.parallel import fp8_products

        if config.fp8_recipe == MX:
            fp8_products.Blocks(device.type)
        if config.fp8_experts:
            _grouped(config, device.type)
    except ImportError as error:
        return [f"--fp8 1 --fp8_recipe {config.fp8_recipe}: this torchao has no such casts where 0.18 has them "
                f"({error}): {INSTALL}==0.18.0"]  # fmt: skip
    return []


def too_old(config: Config, capability: tuple[int, int] | None) -> list[str]:
    """Return why a GPU has no such products, by its compute capability; None: a CPU, which emulates them."""
    needed, since = _MX_CAPABILITY if config.fp8_recipe == MX else _CAPABILITY
    if not config.fp8 or capability is None:
        return []
    major, grouped = _MX_GROUPED if config.fp8_recipe == MX else _GROUPED
    if capability >= needed:
        return [] if not config.fp8_experts or capability[0] == major else [
            f"--fp8_experts 1 --fp8_recipe {config.fp8_recipe} needs a GPU with grouped products in fp8 ({grouped}): "
            f"leave --fp8_experts out"
        ]  # fmt: skip
    has, least = (".".join(map(str, each)) for each in (capability, needed))
    advice = "another recipe" if config.fp8_recipe == MX else "--bf16 1 alone"
    return [f"--fp8 1 --fp8_recipe {config.fp8_recipe} needs a GPU of compute capability {least} ({since}) or higher, "
            f"and this one has {has}: use {advice}"]  # fmt: skip


def _grouped(config: Config, device_type: str) -> Any:
    """Return the product of routed experts.

    Raises:
        ImportError: torchao has no such products.
    """
    from smp.parallel.fp8_experts import grouped

    return grouped(device_type, mx=config.fp8_recipe == MX, weights=config.fp8_recipe == "rowwise")


def _sizes(layer: Any) -> tuple[int, int]:
    """Return outputs and inputs; a weight in 4 bits has another shape."""
    return (layer.nf, layer.nx) if is_transposed(layer) else (layer.out_features, layer.in_features)


def _aligned(config: Config, ranks: int = 1) -> int:
    """Return what outputs and inputs must be multiples of, so that the part of each of so many ranks can be in fp8."""
    return ranks * (_MX_ALIGNED if config.fp8_recipe == MX else _ALIGNED)


def _layers(model: nn.Module, family: Family, aligned: int) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """Return the blocks' linear layers by path: those that fp8 products take on each rank, and the others."""
    routers = set()
    for path, module in expert_modules(model):
        experts: Any = module.down_proj
        block = model.get_submodule(path.rpartition(".")[0])
        routers |= {id(each) for each in block.children() if getattr(each, "out_features", None) == len(experts)}
    taken: dict[str, nn.Module] = {}
    others: dict[str, nn.Module] = {}
    for path, layer in linear_layers(model, family).items():
        if id(layer) in routers:
            continue
        is_called = path not in family.uncalled and (is_transposed(layer) or type(layer).forward is nn.Linear.forward)
        fits = all(size % aligned == 0 for size in _sizes(layer))
        (taken if is_called and fits else others)[path] = layer
    return taken, others


def _matrices(model: nn.Module, config: Config) -> tuple[list[str], list[str]]:
    """Return the names of routed experts' parameters that grouped products in fp8 take, and of the others."""
    taken, others = list[str](), list[str]()
    for name in matrices(model):
        fits = all(size % _aligned(config) == 0 for size in model.get_parameter(name).shape[1:])
        (taken if fits else others).append(name)
    return taken, others


def _named(paths: Iterable[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in Counter(path.rpartition(".")[2] for path in paths).items())


def choose(situation: Situation) -> Iterator[Choice]:
    """Leave products to the layers, which overlapped collectives would compute otherwise."""
    if situation.settings[Config].fp8 and situation.mesh.tp.size > 1:
        yield Choice("tp_overlap", False, "products in fp8 are not computed inside of collectives")


def problems(hf_config: Any, setup: Setup) -> list[str]:
    """Return why no layer can be computed in fp8, and what does not go with it."""
    config = setup.settings[Config]
    if not config.fp8:
        return []
    found, aligned, model = [], _aligned(config, setup.mesh.tp.size), meta_model(hf_config).model
    taken, others = _layers(model, setup.family, aligned)
    if config.fp8_experts and not _matrices(model, config)[0]:
        found.append(
            f"--fp8_experts 1: the model has no routed experts with outputs and inputs of multiples of "
            f"{_aligned(config)}, which products in fp8 need: leave it out"
        )
    if not taken and not config.fp8_experts:
        found.append(
            f"--fp8 1: no linear layer of the blocks has outputs and inputs of multiples of {aligned} "
            f"({_named(others) or 'they have none'}), which products in fp8 need: leave it out"
        )
    if setup.settings[ParallelConfig].tp_overlap is True:
        found.append("--tp_overlap 1 computes products inside of collectives, not in fp8: leave it out, or --fp8 1")
    if setup.settings[Config].fp8_all_gather and setup.settings[LoraConfig].qlora:
        found.append("--fp8_all_gather 1: weights of --qlora 1 are gathered in 4 bits: leave it out")
    return found


def apply(model: nn.Module, setup: Setup) -> None:
    """Let the products of the blocks' linear layers and experts be in fp8; before they are split, after adapters.

    Raises:
        ConfigError: torchao is not installed, or another than is known.
    """
    config, mesh = setup.settings[Config], setup.mesh
    if not config.fp8 or setup.device_type is None:  # None: a dry run, which computes nothing
        return
    if found := lacking(config, torch.device("cpu")):
        raise ConfigError(found)
    from smp.parallel.fp8_products import Blocks, Fp8, Scaled, cast_frozen_once, in_fp8

    device, ranks = setup.device_type, mesh.tp_mesh if mesh.tp.size > 1 else None
    taken, others = _layers(model, setup.family, _aligned(config, mesh.tp.size))
    products = {}
    for path, layer in taken.items():
        scaled = config.fp8_recipe != MX
        casts = Scaled(config.fp8_recipe, device, sizes=_sizes(layer), mesh=ranks) if scaled else Blocks(device)
        products[path] = Fp8(casts)
        replace_product(layer, in_fp8(product_of(layer), products[path]))  # type: ignore[arg-type]
    if casts_once(mesh, setup.settings):
        frozen = {id(taken[path]): product for path, product in products.items() if _keeps(taken[path])}
        for block in model_blocks(model, setup.family):
            if inside := [(each, frozen[id(each)]) for each in block.modules() if id(each) in frozen]:
                cast_frozen_once(block, inside)
    _log(config, taken, others, _replace_experts(model, config, device), emulated=device == "cpu")


def _replace_experts(model: nn.Module, config: Config, device_type: str) -> str:
    """Let the products of routed experts be in fp8; returns what the log says of them."""
    taken, others = _matrices(model, config)
    if not config.fp8_experts:
        return "; the routed experts are not in fp8, as --fp8_experts is 0" if taken + others else ""
    product = _grouped(config, device_type)
    for path, _, name in (each.rpartition(".") for each in taken):
        vars(model.get_submodule(path)).setdefault(PRODUCTS, {})[name] = product
    said = f"; {len(taken)} of {len(taken + others)} grouped products of routed experts"
    # torch's take a scale for each row, and e4m3 alone, where tensorwise has e5m2 for gradients.
    said += ", as with rowwise_with_gw_hp" * (config.fp8_recipe == "tensorwise")
    return f"{said}, without {_named(others)} by their sizes" if others else said


def casts_once(mesh: Mesh, settings: Settings) -> bool:
    """Return whether frozen weights keep what they were cast to: where a rank has all of them, on its device."""
    return mesh.shard.size == 1 == mesh.tp.size and not settings[ActivationConfig].cpu_offload


def _keeps(layer: nn.Module) -> bool:
    """Return whether a layer's weight never changes, and is there as it is."""
    return not layer.weight.requires_grad and not isinstance(product_of(layer), Unpacked)  # type: ignore[union-attr]


def _log(config: Config, taken: Mapping, others: Mapping, of_experts: str, *, emulated: bool) -> None:
    if emulated:
        logger.warning("--fp8 1 on CPUs is emulated: the values are those of fp8, and it is slower than without.")
    said = f"{len(taken)} of {len(taken) + len(others)} linear layers of the blocks compute in fp8, {config.fp8_recipe}"
    if others:
        said += f"; not in fp8, by their sizes or as they are not called: {_named(others)}"
    logger.info("%s%s.", said, of_experts)


def cost(shape: ModelShape, mesh: Mesh, work: Workload) -> dict[str, int]:
    """Count what a product casts, and the casts of frozen weights that are kept."""
    if not work.settings[Config].fp8 or work.moment is Moment.UPDATE:
        return {}
    found, lora = {}, work.settings[LoraConfig]
    if shape.frozen_but is not None and not lora.qlora and casts_once(mesh, work.settings):
        copies = 1 if work.settings[Config].fp8_recipe == "tensorwise" else 2  # one for forward and one for backward
        found["parameters"] = copies * shape.layers * shape.linear
    if work.moment in (Moment.LAST_BLOCK, Moment.FIRST_BLOCK):
        dense = (work.tokens(mesh) + shape.hidden) * shape.intermediate // mesh.tp.size
        # Of experts, of which gate and up, two thirds, are one product.
        rows, weights = _of_experts(shape, mesh, work)
        found["activations"] = max(dense, int(work.imbalance * rows) + 2 * weights // 3)
    return found


def _of_experts(shape: ModelShape, mesh: Mesh, work: Workload) -> tuple[int, int]:
    """Count the values of rows, balanced, and of matrices that a layer's experts cast in forward on a rank."""
    if not work.settings[Config].fp8_experts:
        return 0, 0
    ranks = mesh.tp.size if splits_tokens(mesh, work) else 1
    # A token's experts save the inputs and outputs of three matrices: `sent`, and three times the inner width, twice.
    inner = (shape.routed // 2 - shape.sent) // 3
    return work.tokens(mesh) * (shape.sent + inner) // ranks, shape.experts // mesh.degree("ep")


def gathered_less(shape: ModelShape, mesh: Mesh, work: Workload) -> int:
    """Count the bytes of a block that its gather in fp8 leaves out; below 0 where it would gather nothing."""
    if not work.settings[Config].fp8_all_gather or (shape.frozen_but is not None and casts_once(mesh, work.settings)):
        return 0
    gathered = 0 if computes_with_shards(shape, mesh, work) else work.compute_bytes
    return (gathered - 1) * (shape.linear // mesh.tp.size)


def traffic(shape: ModelShape, mesh: Mesh, work: Workload) -> Traffic:
    """Count what the casts of a block's inputs and weights move."""
    if not work.settings[Config].fp8:
        return Traffic()
    tp = mesh.tp.size
    inputs = 2 * shape.hidden + ((shape.attention or shape.hidden) + shape.intermediate) // tp
    weights = shape.linear // tp // (mesh.shard.size if work.settings[Config].fp8_all_gather else 1)
    cast = work.tokens(mesh) * inputs + weights + sum(_of_experts(shape, mesh, work))
    return Traffic(moved=_MOVED * cast)
