"""Low-rank adapters added to their layers' weights, one weight at a time, as peft's ``merge_and_unload`` does it."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from smp.checkpoint.by_expert import matrices_of_experts
from smp.checkpoint.hf_export import full_tensor
from smp.config import Settings
from smp.models.added import added_parameters, base_of, encoded_parameters, trained_parameters
from smp.models.file_keys import Slices
from smp.models.file_names import buffers_of
from smp.models.registry import family_of
from smp.parallel import nf4
from smp.parallel.expert_adapters import factor_names
from smp.parallel.linear import is_transposed
from smp.parallel.lora import Adapter, Config
from smp.parallel.token_rows import ROWS
from smp.parallel.trained_beside import token_layers
from smp.pretrained import find_tensors, read_box, read_tensor

Read = Callable[[str], torch.Tensor]


def merged(model: nn.Module, settings: Settings) -> tuple[dict[str, torch.Tensor], Read]:
    """Return the model's own tensors by name, and what makes one of them with its adapter added; collective.

    They are in the dtype of the adapters. Pretrained weights are read from their files: the model has them in that of
    the computation, or in 4 bits.
    """
    added, encoded, base = added_parameters(model), encoded_parameters(model), base_of(model)
    config, trained = settings[Config].with_adapter(), trained_parameters(model)
    tensors = {**dict(model.named_parameters()), **dict(buffers_of(model))}
    dtype = tensors[next(iter(added))].dtype

    def gathered(name: str) -> torch.Tensor:
        tensor = full_tensor(tensors[name].detach())
        return stored(encoded[name].decode(tensor) if name in encoded else tensor, dtype)

    read: Read = gathered
    if base is not None:
        read = reader_of(model, pathlib.Path(base.weights), dtype, encoded, gathered, trained=trained)
    shapes = {name: encoded[name].shape if name in encoded else tensor.shape for name, tensor in tensors.items()}
    own = {
        name: stored(torch.empty(shapes[name], dtype=tensor.dtype, device="meta"), dtype)
        for name, tensor in tensors.items()
        if name not in added
    }
    tokens = token_layers(model, family_of(model.config), config)
    return own, merging(model, added, config.scale, read, tokens)


class Boxes:
    """The matrices of the experts of a layer, of which no more is made than what a tensor of an export has."""

    def __init__(self, read: Callable[[Slices], torch.Tensor]):
        self._read = read

    def detach(self) -> Boxes:
        """Return this."""
        return self

    def __getitem__(self, box: Slices) -> torch.Tensor:
        """Return a box, given by starts and stops."""
        return self._read(box)


def stored(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers in ``dtype``, integers as they are."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def reader_of(
    model: nn.Module,
    weights: pathlib.Path,
    dtype: torch.dtype,
    quantised: Container[str],
    others: Read,
    *,
    trained: Container[str],
) -> Read:
    """Return what reads a tensor by its name in the model.

    Args:
        model: real or on the meta device.
        quantised: names of weights that were stored in 4 bits.
        others: reads what the files do not have, the factors, and ``trained``.
        trained: names of the model's own parameters that are not as the files have them.

    Raises:
        UserError: the weights are not those of the model.
    """
    hf_config: Any = model.config
    files, experts = find_tensors(model, weights, hf_config=hf_config), matrices_of_experts(model)

    def read(name: str) -> Any:
        if name not in files or name in trained:
            return others(name)
        if name in experts:
            return Boxes(lambda box: read_box(files[name], box, dtype))
        weight = stored(read_tensor(files[name]), dtype)
        return nf4.rounded(weight) if name in quantised else weight

    return read


def merging(
    model: nn.Module, factors: Container[str], scale: float, read: Read, tokens: Mapping[str, Sequence[int]]
) -> Read:
    """Return what makes a weight with its adapter added, or with its trained rows.

    Args:
        model: has the layers, on any device.
        read: returns all of a weight, factor or matrix of rows by name.
        tokens: of the trained rows, in order, by the path of the module.
    """

    def read_merged(name: str) -> Any:
        weight, path = read(name), name.removesuffix(".weight")
        if path in tokens:
            rows = read(f"{path}.{ROWS}").to(weight.device)
            return weight.index_copy(0, torch.tensor(tokens[path], device=weight.device), rows)
        of_experts = factor_names(name)
        if of_experts[0] in factors:
            a, b = map(read, of_experts)
            experts: Any = model.get_submodule(name.rpartition(".")[0])
            return Boxes(lambda box: _with_factors(weight[box], a, b, scale, box, transposed=experts.is_transposed))
        if f"{path}.lora_A" not in factors:
            return weight
        a, b = (read(f"{path}.{factor}").to(weight.device) for factor in Adapter.own)
        delta = b @ a * scale
        return weight + (delta.T if is_transposed(model.get_submodule(path)) else delta)

    return read_merged


def _with_factors(
    weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float, box: Slices, *, transposed: bool
) -> torch.Tensor:
    """Return a box of the matrices of experts, with that of the factors' products added, one after the other."""
    found, (experts, *axes) = weight.clone(), box
    outputs, inputs = reversed(axes) if transposed else axes
    for matrix, one, other in zip(found, a[experts], b[experts], strict=True):
        delta = other[outputs].to(matrix.device) @ one[:, inputs].to(matrix.device) * scale
        matrix += delta.T if transposed else delta
    return found
