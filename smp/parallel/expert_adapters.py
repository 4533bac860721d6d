"""Low-rank adapters of the matrices of experts, of which a layer has all in one parameter: peft's target_parameters.

The factors are parameters of the module with the experts, along their first axis the experts: what splits and shards
the experts splits and shards them. peft's files have them joined to two matrices, as of linear layers.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import nn

from smp.errors import UserError
from smp.local_shards import local_tensor
from smp.models.added import AddedParameter, Apart
from smp.models.experts import expert_modules
from smp.models.file_keys import Conversion
from smp.models.file_names import FileNames
from smp.models.init_rules import InitRule, drawn
from smp.models.weight_files import ADAPTER_CONFIG
from smp.parallel.adapter import Adapter
from smp.parallel.experts.compute import BESIDE, multiply
from smp.parallel.experts.technique import compute_here
from smp.parallel.lora_config import Config

_MATRICES = 3  # axes of a parameter that has a matrix of each expert
_JOINED: Mapping[str, Literal["rows", "columns"]] = {"lora_A": "rows", "lora_B": "columns"}  # in peft's files
_LAST = "down_proj"  # of the matrices of experts, in every model of transformers; peft wraps it last


def factor_names(parameter: str) -> tuple[str, str]:
    """Return the names of the factors beside a parameter of experts."""
    a, b = Adapter.own
    return f"{parameter}_{a}", f"{parameter}_{b}"


def parameter_of(factor: str) -> str:
    """Return the name of the parameter of experts that a factor is beside."""
    return factor.rpartition("_lora_")[0]


def is_factor(name: str) -> bool:
    """Return whether a parameter is called as a factor of experts is."""
    return name.endswith(tuple(f"_{factor}" for factor in Adapter.own))


def in_files(names: FileNames, factors: Iterable[str]) -> FileNames:
    """Return names of an adapter's file with those of factors beside parameters of experts.

    peft wraps the experts once for each parameter that is adapted, and the first one's factors are the innermost
    wrapper's.

    Args:
        factors: names in the model of the factors of all parameters of experts.
    """
    known, conversions = set(factors), []
    for name in sorted(known):
        module, _, factor = name.rpartition(".")
        parameter = parameter_of(factor)
        own = factor.removeprefix(f"{parameter}_")
        is_inner = parameter != _LAST and f"{module}.{factor_names(_LAST)[0]}" in known
        file = f"{'base_layer.' * is_inner}{own}.weight"
        conversions.append(Conversion((file,), (factor,), prefixes=(f"{module}.",), joined=_JOINED[own]))
    return dataclasses.replace(names, conversions=tuple(conversions))


def matrices(model: nn.Module) -> list[str]:
    """Return the names of the parameters that have a matrix of each expert of a layer, in order."""
    return [
        f"{path}.{name}"
        for path, module in expert_modules(model)
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == _MATRICES and not is_factor(name)
    ]


def target_parameters(model: nn.Module, config: Config) -> dict[str, list[str]]:
    """Return the parameters of experts that get adapters, by the path of their module.

    Raises:
        UserError: a target is the end of no name of experts' matrices, or of another parameter's, too; there is
            dropout; or the experts are trained as they are.
    """
    targets, source = config.lora_target_parameters, "--lora_target_parameters"
    if config.adapter_path is not None:
        source = f"{config.adapter_path}/{ADAPTER_CONFIG}: target_parameters"
    if targets and config.lora_dropout:
        raise UserError(
            f"{source} with --lora_dropout {config.lora_dropout}: adapters of experts have none, as in peft: leave it "
            f"out"
        )
    known = matrices(model)
    names = sorted({".".join(name.split(".")[-2:]) for name in known})
    advice = f"there are {', '.join(names)}" if names else "the model has no experts in one parameter: leave it out"
    found: dict[str, list[str]] = {}
    every = [name for name, _ in model.named_parameters()] if targets else []
    for target in targets:
        own = [name for name in every if f".{name}".endswith(f".{target}")]
        if not own or (others := [name for name in own if name not in known]):
            what = f"the end of {others[0]}, no matrices of experts" if own else "the end of no parameter's name"
            raise UserError(f"{source} {target} is {what}; {advice}")
    for path, _, name in (name.rpartition(".") for name in known):
        if any(f".{path}.{name}".endswith(f".{target}") for target in targets):
            found.setdefault(path, []).append(name)
    for path in found:
        around = list(itertools.accumulate(path.split("."), "{}.{}".format))
        if saved := [name for name in config.lora_modules_to_save if any(each.endswith(name) for each in around)]:
            raise UserError(
                f"{source} has parameters of {path}, which --lora_modules_to_save {saved[0]} trains as they are: leave "
                f"one of them out"
            )
    return found


def names_of_factors(model: nn.Module, config: Config) -> list[str]:
    """Return the names of the factors of experts."""
    found = target_parameters(model, config).items()
    return [f"{path}.{name}" for path, own in found for parameter in own for name in factor_names(parameter)]


def factors(model: nn.Module, config: Config, apart: Apart) -> Iterator[AddedParameter]:
    """Yield the factors with peft's initial values: A uniform as torch's linear layers, B zero."""
    for path, parameters in target_parameters(model, config).items():
        module: Any = model.get_submodule(path)
        for parameter in parameters:
            count, outputs, inputs = getattr(module, parameter).shape
            if module.is_transposed:
                outputs, inputs = inputs, outputs
            bound = 1 / math.sqrt(inputs)
            uniform = drawn(lambda values, generator, b=bound: values.uniform_(-b, b, generator=generator))
            a, b = factor_names(parameter)
            yield AddedParameter(path, a, (count, config.lora_rank, inputs), uniform, apart)
            yield AddedParameter(path, b, (count, outputs, config.lora_rank), InitRule(), apart)


class ExpertAdapter:
    """The scaled product of rows with their experts' two factors; the product of the factors is never made.

    Args:
        parameter: of the experts, beside which the factors are.
        scale: of the factors' product.
    """

    def __init__(self, parameter: str, scale: float):
        self.scale, self.left_out = scale, False
        self._names = factor_names(parameter)

    def __call__(self, product: torch.Tensor, module: nn.Module, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Add it to the product of rows, sorted by expert, with the experts' matrices."""
        if self.left_out:
            return product
        a, b = (local_tensor(getattr(module, name)) for name in self._names)
        return product + multiply(multiply(rows, a, counts) * self.scale, b, counts)


def apply(model: nn.Module, config: Config) -> None:
    """Let experts add the factors' products."""
    for path, parameters in target_parameters(model, config).items():
        module = model.get_submodule(path)
        compute_here(model, [(path, module)])
        setattr(module, BESIDE, {name: ExpertAdapter(name, config.scale) for name in parameters})


def adapters_of(model: nn.Module) -> list[ExpertAdapter]:
    """Return the adapters of a model's experts."""
    return [adapter for module in model.modules() for adapter in getattr(module, BESIDE, {}).values()]
