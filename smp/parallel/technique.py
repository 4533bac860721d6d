"""Techniques: files or folders of this package with the members of :class:`Technique`.

Those of :class:`OptionalMembers` may be left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from smp.config import Section, Settings
from smp.errors import UserError
from smp.memory.shape import ModelShape, Workload
from smp.mesh import Mesh
from smp.models.added import AddedParameter
from smp.models.attention_support import RANDOM_RATE, random_rates
from smp.models.family import Family
from smp.parallel.microbatch import Microbatch


@dataclasses.dataclass(frozen=True)
class Setup:
    """Target of the preparation of a model.

    Attributes:
        mesh: laid out, which is enough for ``problems``, or joined.
        settings: each technique reads its section.
        dtype: to compute in; None keeps that of the parameters.
        device_type: ``cpu`` or ``cuda``; None where it is not known, as in a dry run.
    """

    family: Family
    mesh: Mesh
    settings: Settings = Settings()
    dtype: torch.dtype | None = None
    device_type: str | None = None


class Technique(Protocol):
    """An in-place transform of a model; ``smp.parallel.parallelize`` lists them in order."""

    @property
    def Config(self) -> type[Section]:  # noqa: N802
        """Section of its settings."""

    def apply(self, model: nn.Module, setup: Setup, /) -> None:
        """Apply it in place, if its settings ask for it; the model is real or on the meta device."""


class Parameters(NamedTuple):
    """Parameters that a technique adds to a model.

    Attributes:
        freezes: the model's others are not trained.
        trained: parameters of the model that are trained though another technique freezes them.
    """

    added: Sequence[AddedParameter] = ()
    freezes: bool = False
    trained: Sequence[AddedParameter] = ()


class Sent(NamedTuple):
    """A collective of a block, in its forward and backward pass of one micro-batch.

    Attributes:
        kind: ``all_gather``, ``reduce_scatter``, ``all_to_all``, or ``send`` to the next rank.
        nbytes: of the larger side: the gathered output, the input that is reduced, or what is sent.
        axis: of the mesh, whose ranks take part.
        times: how often, on average over the blocks.
        hidden_by: what GPUs compute meanwhile: attention, ``forward`` or ``backward``; empty: nothing.
    """

    kind: str
    nbytes: float
    axis: str
    times: float
    hidden_by: str = ""


class Traffic(NamedTuple):
    """What a technique sends, and the bytes that it moves in a rank's memory, for each forward pass of a block."""

    sent: Sequence[Sent] = ()
    moved: float = 0.0


class OptionalMembers:
    """Members that a technique may have besides, and what they do where it has not."""

    @staticmethod
    def problems(hf_config: Any, setup: Setup, /) -> list[str]:
        """Return one sentence for each reason why it cannot be applied; nothing is built yet."""
        return []

    @staticmethod
    def cost(shape: ModelShape, mesh: Mesh, work: Workload, /) -> dict[str, int]:
        """Return the bytes that it adds on a rank at ``work.moment``, by category; negative: that it saves."""
        return {}

    @staticmethod
    def traffic(shape: ModelShape, mesh: Mesh, work: Workload, /) -> Traffic:
        """Return what a block sends and moves because of it; the seconds of a step follow from it."""
        return Traffic()

    @staticmethod
    def parameters(model: nn.Module, family: Family, settings: Settings, /) -> Parameters:
        """Return what it adds, by its settings; the model is as it was built, real or on the meta device."""
        return Parameters()

    @staticmethod
    def own_part(microbatch: Microbatch, setup: Setup, /) -> Microbatch:
        """Return what this rank computes of a micro-batch, which is not changed."""
        return microbatch

    @staticmethod
    def extra_loss(model: nn.Module, setup: Setup, /) -> torch.Tensor | None:
        """Return what the last forward adds to the sum of this rank's token losses, 0-d; it is not logged."""
        return None

    @staticmethod
    def after_update(model: nn.Module, setup: Setup, skipped: torch.Tensor, /) -> None:
        """Change what follows from a step; ``skipped``, 0-d bool on the device: the update was left out."""

    @staticmethod
    def metrics(model: nn.Module, setup: Setup, /) -> dict[str, torch.Tensor]:
        """Return what is logged of the last step, by name; collective. Numbers (0-d), or tables for files alone."""
        return {}


def member(technique: Technique, name: str) -> Any:
    """Return a member of a technique, or the default of :class:`OptionalMembers`."""
    return getattr(technique, name, None) or getattr(OptionalMembers, name)


_IN_STEPS = "_smp_in_steps"


def follow_steps(model: nn.Module, techniques: Sequence[Technique], setup: Setup) -> None:
    """Let :func:`extra_loss`, :func:`after_update` and :func:`metrics` of the model call the techniques'."""
    names = ("extra_loss", "after_update", "metrics")
    setattr(model, _IN_STEPS, [(*(member(each, name) for name in names), setup) for each in techniques])


def extra_loss(model: nn.Module, loss: torch.Tensor) -> torch.Tensor:
    """Return the loss of the forward that has just run, with what the techniques add."""
    for add, _, _, setup in getattr(model, _IN_STEPS, ()):
        if (extra := add(model, setup)) is not None:
            loss = loss + extra
    return loss


def after_update(model: nn.Module, skipped: torch.Tensor) -> None:
    """Call the techniques' ``after_update``."""
    for _, follow, _, setup in getattr(model, _IN_STEPS, ()):
        follow(model, setup, skipped)


def metrics(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the techniques' ``metrics``; collective."""
    found: dict[str, torch.Tensor] = {}
    for _, _, measure, setup in getattr(model, _IN_STEPS, ()):
        found |= measure(model, setup)
    return found


def model_blocks(model: nn.Module, family: Family) -> list[nn.Module]:
    """Return the transformer blocks, in order.

    Raises:
        UserError: the model has none where those of the family are.
    """
    try:
        return list(model.get_submodule(family.blocks).children())
    except AttributeError:
        raise misses(model, family, family.blocks) from None


def misses(model: nn.Module, family: Family, path: str) -> UserError:
    """Return the refusal of a model without a module of its family."""
    return UserError(
        f"the model ({type(model).__name__}) has no {path}, as {family.name} models of transformers have: "
        f"describe it with smp.register_family, under a model_type of its own"
    )


def draws(module: nn.Module, hf_config: Any = None) -> bool:
    """Return whether a module may draw random numbers: whether it, or the config if given, has dropout or jitter."""
    if hf_config is not None and random_rates(hf_config):
        return True
    return any(
        (isinstance(m, nn.Dropout) and m.p > 0)
        or any(RANDOM_RATE.search(name) and isinstance(rate, float) and rate > 0 for name, rate in vars(m).items())
        for m in module.modules()
    )
