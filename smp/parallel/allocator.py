"""CUDA's caching allocator: segments that grow, ``expandable_segments:True`` in torch's terms."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from smp.config import AUTO, Auto, CommConfig, Section, setting
from smp.parallel.choices import Choice, Situation
from smp.runtime import allocator_variable


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllocatorConfig(Section):
    """CUDA's caching allocator."""

    expandable_segments: bool | Auto = setting(
        AUTO,
        "Let the segments of CUDA's allocator grow, against fragmentation. auto: on GPUs, unless PYTORCH_ALLOC_CONF or "
        "PYTORCH_CUDA_ALLOC_CONF is set, or with backend smddp.",
        plain=False,
    )


def choose(situation: Situation) -> Iterator[Choice]:
    """Let segments grow, unless the user has set the allocator.

    Not with ``smddp``: torch's pools of symmetric memory do not take such segments, and nobody has yet run its
    symmetric memory with them.
    """
    if variable := allocator_variable():
        yield Choice("expandable_segments", False, f"{variable} is set, and stays")
    elif situation.settings[CommConfig].distributed_backend == "smddp":
        yield Choice("expandable_segments", False, "not yet tried with the symmetric memory of smddp")
    else:
        yield Choice("expandable_segments", True, "less memory is lost between blocks of other sizes")


def use_expandable_segments() -> None:
    """Let the segments that CUDA's allocator makes from now on grow.

    torch reads ``PYTORCH_ALLOC_CONF`` once, at the first use of its allocators; this call works at any time, and child
    processes do not inherit it. What was allocated before stays where it is.
    """
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
