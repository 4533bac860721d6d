"""Techniques: files or folders of this package with the members of :class:`Technique`."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import torch
from torch import nn

from smp.config import Section, Settings
from smp.memory.shape import ModelShape, Workload
from smp.mesh import Mesh
from smp.microbatch import Microbatch
from smp.models.attention_support import random_rates
from smp.models.family import Family


@dataclasses.dataclass(frozen=True)
class Setup:
    """Target of the preparation of a model.

    Attributes:
        family: the model's architecture.
        mesh: laid out, which is enough for ``problems``, or joined.
        settings: each technique reads its own section.
        dtype: to compute in; None keeps the parameters' own.
        device_type: ``cpu`` or ``cuda``; None where it is not known, as in a dry run.
    """

    family: Family
    mesh: Mesh
    settings: Settings = Settings()
    dtype: torch.dtype | None = None
    device_type: str | None = None


class Technique(Protocol):
    """An in-place transform of a model; ``smp.parallel.parallelize`` lists them in order.

    Optional, with a default here: ``own_part``.
    """

    @property
    def Config(self) -> type[Section]:  # noqa: N802
        """Section of its settings."""

    def problems(self, hf_config: Any, setup: Setup, /) -> list[str]:
        """Return one sentence for each reason why it cannot be applied; nothing is built yet."""

    def apply(self, model: nn.Module, setup: Setup, /) -> None:
        """Apply it in place, if its settings ask for it; the model is real or on the meta device."""

    def cost(self, shape: ModelShape, mesh: Mesh, work: Workload, /) -> dict[str, int]:
        """Return the bytes that it adds on a rank at ``work.moment``, by category; negative: that it saves."""


def no_problems(hf_config: Any, setup: Setup) -> list[str]:
    """Implement ``problems`` of a technique that fits any model and mesh."""
    return []


def no_cost(shape: ModelShape, mesh: Mesh, work: Workload) -> dict[str, int]:
    """Implement ``cost`` of a technique with negligible memory."""
    return {}


def own_part(microbatch: Microbatch, setup: Setup) -> Microbatch:
    """Return what this rank computes of a micro-batch, which is not changed; by default all of it."""
    return microbatch


def model_blocks(model: nn.Module, family: Family) -> list[nn.Module]:
    """Return the transformer blocks, in order."""
    return list(model.get_submodule(family.blocks).children())


def draws(module: nn.Module, hf_config: Any = None) -> bool:
    """Return whether a module may draw random numbers: whether it, or the config if that is given, has dropout."""
    if hf_config is not None and random_rates(hf_config):
        return True
    return any(
        (isinstance(m, nn.Dropout) and m.p > 0)
        or any("drop" in name and isinstance(rate, float) and rate > 0 for name, rate in vars(m).items())
        for m in module.modules()
    )
