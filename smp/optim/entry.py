"""What an optimizer is to the rest of smp: an entry of :data:`smp.optim.optimizers.OPTIMIZERS`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from smp.mesh import Mesh
from smp.models.parameters import ParameterSpec, ParameterTable
from smp.optim.config import OptimConfig


class StateSpec(NamedTuple):
    """A tensor of the state of one parameter, zeros before the first update.

    Attributes:
        shape: of the full tensor: ``()``, the parameter's, or one of as many dimensions that is sharded like it.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the full tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


class Entry(Protocol):
    """An optimizer: a module with these members, or an object.

    Attributes:
        NAME: the value of ``--optimizer``.
    """

    NAME: str

    def takes(self, spec: ParameterSpec, /) -> bool:
        """Return whether it updates such a parameter; AdamW updates those that the job's optimizer does not."""
        ...

    def settings(self, config: OptimConfig, /) -> Mapping[str, Any]:
        """Return the settings of its parameter groups, beside ``lr`` and ``weight_decay``."""
        ...

    def state(self, shape: tuple[int, ...], dtype: torch.dtype, config: OptimConfig, /) -> Mapping[str, StateSpec]:
        """Return the state of a parameter of such a full shape and such a dtype, by key."""
        ...

    def update(
        self,
        parameters: list[nn.Parameter],
        states: list[dict[str, torch.Tensor]],
        group: Mapping[str, Any],
        skip: torch.Tensor | None,
        /,
    ) -> None:
        """Update parameters of one group by their gradients, in place, without gradients of its operations.

        Args:
            parameters: each with a gradient; DTensors of a sharded model.
            states: of each, as :meth:`state` says.
            group: its settings.
            skip: 0-d bool on the computing device: the update leaves parameters and states as they are; None: false.
        """
        ...


class OptionalMembers:
    """Members that an entry may have besides, and what they do where it has not.

    Attributes:
        MOVED_BESIDES: bytes that an update moves in memory for an element, without parameter, gradient and state.
    """

    MOVED_BESIDES: float = 0

    @staticmethod
    def missing() -> list[str]:
        """Return one sentence for each package that it computes with and that is not installed; a plan needs none."""
        return []

    @staticmethod
    def group_settings(spec: ParameterSpec, /) -> Mapping[str, Any]:
        """Return the settings of such a parameter's group, besides those of all its groups; text, numbers and bools."""
        return {}

    @staticmethod
    def problems(table: ParameterTable, mesh: Mesh, config: OptimConfig, /) -> list[str]:
        """Return one sentence for each reason why it cannot update such a model on such a mesh.

        Args:
            table: the parameters that it takes.
        """
        return []

    @staticmethod
    def gathered(table: ParameterTable, mesh: Mesh, config: OptimConfig, /) -> Mapping[str, float]:
        """Return the bytes that a rank gathers in one update, by axis of the mesh: of the larger side.

        Args:
            table: the parameters that it takes.
        """
        return {}

    @staticmethod
    def flops(table: ParameterTable, mesh: Mesh, config: OptimConfig, /) -> Mapping[int, float]:
        """Return the FLOPs of the matrix products of an update on a rank, by bytes of an element: 2 of bf16, or 4.

        Args:
            table: the parameters that it takes.
        """
        return {}

    @staticmethod
    def working_bytes(table: ParameterTable, mesh: Mesh, config: OptimConfig, /) -> int:
        """Return the most bytes that an update allocates on a rank besides the state, and frees."""
        return 0


def member(entry: Entry, name: str) -> Any:
    """Return a member of an entry, or the default of :class:`OptionalMembers`."""
    return getattr(entry, name, None) or getattr(OptionalMembers, name)
