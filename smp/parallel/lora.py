"""Low-rank adapters of frozen linear layers (LoRA: Hu et al., arXiv:2106.09685), with peft's names and files.

The factors are parameters of the layer itself, ``lora_A`` (rank, inputs) and ``lora_B`` (outputs, rank): blocks remain
the sharding units, and tensor parallelism splits the factors as it splits the weight.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from torch import nn
from torch.distributed.tensor import DTensor

from smp.config import ActivationConfig, Settings
from smp.delayed_init import fill_added_
from smp.errors import UserError
from smp.log import get_logger
from smp.memory.shape import ModelShape, Moment, Workload
from smp.mesh import Mesh
from smp.models.added import AddedParameter, Apart, add_parameters, added_parameters, leave_out_frozen, remember_files
from smp.models.experts import expert_modules
from smp.models.family import Family
from smp.models.init_rules import InitRule, drawn
from smp.models.meta_model import meta_model
from smp.models.registry import family_of
from smp.models.weight_files import ADAPTER_CONFIG
from smp.parallel import expert_adapters, nf4, trained_beside
from smp.parallel.adapter import Adapter
from smp.parallel.adapter_config import ALL_LINEAR, NO_LAYERS, WEIGHTS, other_base
from smp.parallel.adapter_files import GivenAdapter, base_of, config_text, names_beside, taken_for_experts
from smp.parallel.linear import is_transposed, product_of, replace_product
from smp.parallel.lora_config import Config
from smp.parallel.refusals import require_model
from smp.parallel.sharding_cost import gathered_blocks
from smp.parallel.technique import Parameters, Setup
from smp.parallel.token_rows import all_rows

logger = get_logger("model")


def warn_of_base(adapter_path: str, base: str) -> None:
    """Warn of an adapter that says to be of another base model than ``base``."""
    if (theirs := other_base(pathlib.Path(adapter_path).expanduser(), base)) is not None:
        logger.warning(
            "%s was trained with %s, as its %s says, and is used with %s, of the same shapes: if those are other "
            "weights, it computes something else.", adapter_path, theirs, ADAPTER_CONFIG, base,
        )  # fmt: skip


def log_reach(model: nn.Module, family: Family, config: Config) -> None:
    """Log which layers get no adapters that have a reason, and of a mixture which do, with the routed experts."""
    if not config.lora_rank:
        return
    if config.lora_target_modules == (ALL_LINEAR,) and family.uncalled:
        left = sorted({path.rpartition(".")[2] for path in family.uncalled})
        logger.info(
            "--lora_target_modules %s: no adapters of %s, whose weights the model or its kernels read without calling "
            "the layer.", ALL_LINEAR, ", ".join(left),
        )  # fmt: skip
    if not expert_modules(model):
        return
    every = {name.rpartition(".")[2] for name in expert_adapters.matrices(model)}
    found = {name for names in expert_adapters.target_parameters(model, config).values() for name in names}
    reached = {path.rpartition(".")[2] for path in target_layers(model, family, config)}
    said = f"The routed experts ({', '.join(sorted(every))}) get none and are frozen."
    if found:
        said = f"The routed experts get adapters of {', '.join(sorted(found))}."
    logger.info(
        "--lora_target_modules %s: adapters of %s. %s",
        " ".join(config.lora_target_modules), ", ".join(sorted(reached)) or "no layers", said,
    )  # fmt: skip
    if config.lora_dropout and (taken := taken_for_experts(model, reached)):
        logger.warning(
            "peft takes adapters of %s for those of routed experts, and leaves them out, where there was dropout: let "
            "it load the merged model (--save_merged_model 1), or train with --lora_dropout 0.", ", ".join(taken),
        )  # fmt: skip


@contextlib.contextmanager
def left_out(model: nn.Module) -> Iterator[None]:
    """Let a model compute what its base does, without gradients."""
    products = map(product_of, model.modules())
    inner = {product.inner if isinstance(product, nf4.Unpacked) else product for product in products}
    adapters: list[Any] = [*(product for product in inner if isinstance(product, Adapter)), *all_rows(model)]
    adapters += expert_adapters.adapters_of(model)
    for adapter in adapters:
        adapter.left_out = True
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.left_out = False


def linear_layers(model: nn.Module, family: Family) -> dict[str, nn.Module]:
    """Return the linear layers of the blocks by path, but for routers of experts, which return more than a product."""
    blocks = model.get_submodule(family.blocks)
    return {
        f"{family.blocks}.{path}": module
        for path, module in blocks.named_modules()
        if (isinstance(module, nn.Linear) and not hasattr(module, "top_k")) or is_transposed(module)
    }


def target_layers(model: nn.Module, family: Family, config: Config) -> dict[str, nn.Module]:
    """Return the layers that get adapters by path.

    Raises:
        UserError: a target is the end of no layer's name, or an adapter would never be used.
    """
    layers, targets = linear_layers(model, family), config.lora_target_modules
    if targets == (NO_LAYERS,) and config.lora_target_parameters:
        return {}
    if targets == (ALL_LINEAR,):
        return {path: layer for path, layer in layers.items() if path not in family.uncalled}
    found = _matching(layers, config)
    if uncalled := [path for path in family.uncalled if path in found]:
        source = "--lora_target_modules" if config.adapter_path is None else f"{config.adapter_path}/{ADAPTER_CONFIG}"
        others = sorted({path.rpartition(".")[2] for path in layers if path not in family.uncalled})
        raise UserError(
            f"{source}: {' '.join(targets)} has {uncalled[0]}, whose weight the model reads without calling the layer: "
            f"an adapter of it would never be used: choose others, as --lora_target_modules {' '.join(others)}"
        )
    return found


def _matching(layers: Mapping[str, nn.Module], config: Config) -> dict[str, nn.Module]:
    targets = config.lora_target_modules
    source, advice = "--lora_target_modules", f"or {ALL_LINEAR} for all"
    if config.adapter_path is not None:  # whose targets no flag changes
        source = f"{config.adapter_path}/{ADAPTER_CONFIG}: target_modules"
        advice = "and what else it adapts peft's merge_and_unload merges into the base model"
    names = ", ".join(sorted({path.rpartition(".")[2] for path in layers}))
    if not targets:
        raise UserError(f"{source} is empty; there are {names}, {advice}")
    for target in targets:
        if not any(_matches(path, target) for path in layers):
            raise UserError(
                f"{source} {target} is the end of no linear layer's name in the blocks; there are {names}, {advice} "
                f"(regular expressions are not known)"
            )
    return {path: layer for path, layer in layers.items() if any(_matches(path, target) for target in targets)}


def _matches(path: str, target: str) -> bool:
    # An adapter of a larger model names layers as they are called there: below another prefix.
    return path == target or path.endswith(f".{target}") or target.endswith(f".{path.partition('.')[2]}")


def has_dropout(settings: Settings) -> bool:
    """Tell whether adapters draw random numbers in training; False of an adapter that cannot be read."""
    try:
        return settings[Config].with_adapter().lora_dropout > 0
    except UserError:
        return False


def problems(hf_config: Any, setup: Setup) -> list[str]:
    """Return why the adapter of ``--adapter_path`` cannot be used, or its dropout."""
    config, found = setup.settings[Config], []
    try:
        config.with_adapter()
    except UserError as error:
        found.append(str(error))
    if setup.settings[ActivationConfig].compile is True and has_dropout(setup.settings):
        found.append("--compile 1 cannot compile the draws of --lora_dropout: leave one of them out")
    if config.qlora:
        experts = nf4.problems_of_experts(meta_model(hf_config).model)
        found += [*nf4.problems(setup.mesh.tp.size), *experts]
    return found


def parameters(model: nn.Module, family: Family, settings: Settings) -> Parameters:
    """Return the factors of every target: A uniform as torch's linear layers, B zero, or those of the adapter given."""
    config = settings[Config].with_adapter()
    if not config.lora_rank:
        return Parameters()
    layers, beside = target_layers(model, family, config), trained_beside.fields(model, family, config)
    names = names_beside(base_of(model, settings), family)
    names = expert_adapters.in_files(names, expert_adapters.names_of_factors(model, config))
    apart = Apart(WEIGHTS, {ADAPTER_CONFIG: config_text(model, family, config, settings, layers, beside)}, names)
    added = [*_factors(layers, config, apart), *expert_adapters.factors(model, config, apart)]
    if config.adapter_path is not None:
        given = GivenAdapter(config)
        given.require({each.key for each in added}, of=".lora_")
        added = [dataclasses.replace(each, initial=given.rule(each)) for each in added]
    return Parameters(added, freezes=True)


def _factors(layers: Mapping[str, nn.Module], config: Config, apart: Apart) -> Iterator[AddedParameter]:
    for path, layer in layers.items():
        outputs, inputs = _sizes(layer)
        bound = 1 / math.sqrt(inputs)  # kaiming_uniform_ with a = sqrt(5)
        uniform = drawn(lambda values, generator, b=bound: values.uniform_(-b, b, generator=generator))
        yield AddedParameter(path, "lora_A", (config.lora_rank, inputs), uniform, apart)
        yield AddedParameter(path, "lora_B", (outputs, config.lora_rank), InitRule(), apart)


def _sizes(layer: Any) -> tuple[int, int]:
    """Return outputs and inputs."""
    first, second = layer.weight.shape
    return (second, first) if is_transposed(layer) else (first, second)


def apply(model: nn.Module, setup: Setup) -> None:
    """Let the targets add the factors' product; before the layers are split."""
    if nf4.is_quantised(model) and (found := nf4.problems(setup.mesh.tp.size)):
        raise UserError(found[0])
    _replace_products(model, setup.family, setup.settings)


def _replace_products(model: nn.Module, family: Family, settings: Settings) -> None:
    config = settings[Config].with_adapter()
    if config.lora_rank:
        adapter = Adapter(config.scale, config.lora_dropout)
        for layer in target_layers(model, family, config).values():
            replace_product(layer, adapter)  # type: ignore[arg-type]
        expert_adapters.apply(model, config)
        if config.qlora:
            nf4.quantise(model, linear_layers(model, family))


def cost(shape: ModelShape, mesh: Mesh, work: Workload) -> dict[str, int]:
    """Count what weights in 4 bits save, and the mask of dropout that is made for the widest layer's input."""
    found: dict[str, int] = {}
    if work.settings[Config].qlora:
        found = nf4.cost(shape, work, shard=mesh.shard.size, gathered=gathered_blocks(shape, mesh, work))
    if work.moment in (Moment.LAST_BLOCK, Moment.FIRST_BLOCK) and has_dropout(work.settings):
        widest = max(shape.hidden, shape.intermediate // mesh.tp.size)
        found["activations"] = found.get("activations", 0) + work.tokens(mesh) * widest
    return found


def adapt(
    model: nn.Module,
    rank: int = 0,
    *,
    alpha: float = 16.0,
    target_modules: Sequence[str] | str | None = None,
    target_parameters: Sequence[str] | str = (),
    use_rslora: bool = False,
    dropout: float = 0.0,
    quantize: Literal["nf4"] | None = None,
    train_tokens: Sequence[int] = (),
    modules_to_save: Sequence[str] = (),
    adapter_path: str | os.PathLike[str] | None = None,
    seed: int = 0,
) -> nn.Module:
    """Freeze a Hugging Face causal language model and add low-rank adapters to it, in place.

    Before ``smp.transform``, ``smp.parallelize`` or ``FSDP``; the optimizer is made over parameters with
    ``requires_grad``. ``smp.export_hf`` writes the adapters in peft's format.

    Args:
        model: the same on every rank, or of ``smp.meta_init``.
        rank: of the factors; 0 with ``adapter_path``.
        alpha: the adapters' product is scaled by ``alpha / rank``, with ``use_rslora`` by ``alpha / sqrt(rank)``.
        target_modules: ends of the names of the blocks' linear layers that get adapters, or one; None: ``all-linear``.
        target_parameters: ends of the names of parameters that have the matrices of all experts of a layer, such as
            ``experts.down_proj``, and get adapters, as in peft; with ``target_modules`` empty these alone.
        dropout: of the adapters' input, while the model is in training mode; each data rank seeds torch's generators
            differently, those of a tensor-parallel group alike.
        quantize: store the weights of the blocks' linear layers in 4 bits.
        train_tokens: ids whose rows of the embedding and the head are trained, too.
        modules_to_save: ends of the names of modules that are trained as they are, such as ``embed_tokens``.
        adapter_path: directory of an adapter in peft's format to start from, which sets the others.
        seed: of the initial values, the same on every rank; on the meta device those of ``random_seed`` of ``init``.

    Raises:
        UserError: there is no rank, a target is no linear layer, the adapter is of another model, or the model is not
            one of Hugging Face.
    """
    require_model("smp.lora", model)
    if not rank and adapter_path is None:
        raise UserError("smp.lora: give a rank, such as 16, or an adapter_path")
    if added_parameters(model):
        raise UserError("smp.lora: the model has adapters already: call it once")
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise UserError("smp.lora: the model is split or sharded already: call it before that")
    if quantize not in (None, "nf4"):
        raise UserError(f"smp.lora: quantize is {quantize!r}; it is None or 'nf4'")
    hf_config: Any = model.config
    if target_modules is None:
        target_modules = ALL_LINEAR
    targets = (target_modules,) if isinstance(target_modules, str) else tuple(target_modules)
    parameter_targets = (target_parameters,) if isinstance(target_parameters, str) else tuple(target_parameters)
    targets = targets or (NO_LAYERS,) * bool(parameter_targets)
    config = Config(
        qlora=quantize == "nf4",
        lora_rank=rank, lora_alpha=alpha, lora_target_modules=targets, lora_use_rslora=use_rslora,
        lora_dropout=dropout, lora_train_tokens=tuple(map(str, train_tokens)),
        lora_modules_to_save=tuple(modules_to_save), lora_target_parameters=parameter_targets,
        adapter_path=None if adapter_path is None else os.fspath(adapter_path),
    )  # fmt: skip
    family, settings = family_of(hf_config), Settings((config,))
    source = getattr(hf_config, "_name_or_path", None)
    if problem := next(iter(trained_beside.problems_of(hf_config, config.with_adapter())), None):
        raise UserError(problem)
    for own in [each(model, family, settings) for each in (parameters, trained_beside.parameters)]:
        add_parameters(model, own.added, freezes=own.freezes, trained=own.trained)
    if adapter_path is not None:
        remember_files(model, "smp.lora", os.fspath(adapter_path))
    if not next(model.parameters()).is_meta:
        fill_added_(model, seed=seed)
    _replace_products(model, family, settings)
    trained_beside.train_rows(model, family, settings)
    log_reach(model, family, config.with_adapter())
    if config.adapter_path is not None and source:
        warn_of_base(config.adapter_path, source)
    if config.qlora and source and any(pathlib.Path(source).glob("*.safetensors")):
        leave_out_frozen(model, pathlib.Path(source))
    return model
