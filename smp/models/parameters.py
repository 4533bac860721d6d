"""Facts about each parameter of a model: its name, shape, unit and kind, and whether it is trained."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple

from torch import nn

from smp.models.added import AddedParameter, added_parameters
from smp.models.family import Family
from smp.models.file_names import clean_name
from smp.models.projection import is_transposed, projection_size

EMBEDDING, HEAD = "embedding", "head"

# What a parameter is to its module: weight of a linear layer, or of an adapter; matrices of experts in one parameter;
# rows that are looked up or multiplied to logits; a bias, a norm's weight; any other tensor, as a convolution's.
Kind = Literal["matrix", "experts", "table", "vector", "tensor"]


class ParameterSpec(NamedTuple):
    """A parameter of the full model.

    Attributes:
        name: in the model, without those of wrappers; of a tied one the first.
        shape: of all of it.
        unit: ``embedding``, the index of a block, or ``head``, which has what is outside of the others.
        kind: what it is to its module.
        trained: whether it has a gradient.
        added: whether a technique has added it to the model.
        transposed: whether a matrix is stored as (inputs, outputs), as GPT-2's.
        split: of a matrix, the dimension along which tensor parallelism splits it; None: none, or it is not known.
    """

    name: str
    shape: tuple[int, ...]
    unit: str | int
    kind: Kind
    trained: bool = True
    added: bool = False
    transposed: bool = False
    split: int | None = None

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True, eq=False)
class ParameterTable:
    """The parameters of a model in its order, a tied one once. Two are equal only if they are the same object."""

    specs: tuple[ParameterSpec, ...] = ()

    def __iter__(self) -> Iterator[ParameterSpec]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)

    @property
    def blocks(self) -> list[int]:
        """Indices of the blocks."""
        return sorted({spec.unit for spec in self.specs if isinstance(spec.unit, int)})

    @property
    def trained(self) -> list[ParameterSpec]:
        """Those that have a gradient."""
        return [spec for spec in self.specs if spec.trained]

    def count(self, counted: Callable[[ParameterSpec], bool] = lambda spec: True) -> int:
        """Count the elements of all parameters, or of some."""
        return sum(spec.size for spec in self.specs if counted(spec))

    def with_added(
        self, added: Iterable[AddedParameter], *, freezes: bool, trained: Iterable[AddedParameter], family: Family
    ) -> ParameterTable:
        """Return the table with what :func:`smp.models.added.add_parameters` does to a model."""
        names = {each.path for each in trained}
        specs = [
            spec._replace(trained=spec.name in names or (spec.trained and (spec.added or not freezes)))
            for spec in self.specs
        ]
        weights = {spec.name: spec for spec in self.specs}
        for each in added:
            split = _split_added(each.shape, family.split_axis(each.module), weights.get(f"{each.module}.weight"))
            kind: Kind = ("vector", "vector", "matrix", "experts", "tensor")[min(len(each.shape), 4)]
            specs.append(ParameterSpec(each.path, each.shape, _unit(each.path, family), kind, added=True, split=split))
        return ParameterTable(tuple(specs))


def parameter_table(model: nn.Module, family: Family | None = None) -> ParameterTable:
    """List the parameters of a model: real, sharded or on the meta device, with what techniques have added.

    Args:
        family: of its architecture; None: linear layers are taken to be of blocks.
    """
    added, head = added_parameters(model), getattr(model, "get_output_embeddings", lambda: None)()
    specs: dict[int, ParameterSpec] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full = clean_name(f"{prefix}.{name}" if prefix else name)
            kind = _kind(module, name, parameter.dim(), is_head=module is head, is_added=full in added)
            unit = _unit(full, family)
            axis = family.split_axis(clean_name(prefix)) if family else None
            weight = specs.get(id(module._parameters.get("weight")))
            shape, is_added = tuple(parameter.shape), full in added
            transposed = name == "weight" and is_transposed(module)
            split = _split_added(shape, axis, weight) if is_added else _split(module, name, axis)
            spec = ParameterSpec(full, shape, unit, kind, parameter.requires_grad, is_added, transposed, split)
            specs.setdefault(id(parameter), spec)
    return ParameterTable(tuple(specs.values()))


def _kind(module: nn.Module, name: str, dimensions: int, *, is_head: bool, is_added: bool) -> Kind:
    if dimensions < 2:
        return "vector"
    if is_added and dimensions == 2:
        return "matrix"
    if is_head or isinstance(module, nn.Embedding):
        return "table"
    if projection_size(module) and name == "weight":
        return "matrix"
    # transformers keeps the experts of a layer in parameters of three dimensions.
    return "experts" if dimensions == 3 and not isinstance(module, nn.Conv1d) else "tensor"


def _split(module: nn.Module, name: str, axis: str | None) -> int | None:
    """Return the dimension along which the weight of a layer is split, which is split along ``axis``."""
    if axis is None or name != "weight":
        return None
    transposed = projection_size(module) is not None and not isinstance(module, nn.Linear)
    return int((axis == "inputs") != transposed)


def _split_added(shape: tuple[int, ...], axis: str | None, weight: ParameterSpec | None) -> int | None:
    """Return the dimension of a matrix beside such a weight, as of :class:`smp.parallel.linear.Product`."""
    if weight is None or weight.split is None or len(shape) != 2:
        return None
    dim = int(axis == "inputs")
    return dim if shape[dim] == weight.shape[weight.split] else None


def _unit(name: str, family: Family | None) -> str | int:
    if family is None:
        return 0
    if name.startswith(f"{family.blocks}."):
        return int(name[len(family.blocks) + 1 :].partition(".")[0])
    return EMBEDDING if name.startswith(f"{family.embedding}.") else HEAD
