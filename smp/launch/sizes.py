"""Degrees and micro-batch for a model on so many GPUs, chosen by the memory planner."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from smp.config import flag_text
from smp.dry_run import degree_table
from smp.errors import UserError
from smp.memory.plan import GIB, USABLE, peak_bytes, processes_that_fit
from smp.memory.shape import ModelShape
from smp.models.model_config import ModelConfig, ResolvedModel, resolve_model
from smp.parallel.parallelize import settings_of, shape_of
from smp.plan.layouts import MOST_TOKENS, Layout, layouts

_MOST_SAMPLES = 4  # of a micro-batch


@dataclasses.dataclass(frozen=True)
class Choice:
    """The sizes that were chosen.

    Args:
        arguments: the flags that were not given, with their values.
        lines: an account of them, for the script's head.
    """

    arguments: list[str]
    lines: list[str]


def choose_sizes(
    settings: Mapping[str, Any], given: frozenset[str], *, nodes: int, gpus: int, gpu_memory_gib: float
) -> Choice:
    """Choose what was not given: the smallest context- and tensor-parallel degrees, the largest micro-batch up to 4,
    the smallest sharding degree, in this order, that fit, with a global batch of at most 4 Mi tokens where that can be.

    Activation offloading is added where nothing fits without it.

    Args:
        settings: all settings of the training job, by name.
        given: those that the user has chosen.
        nodes, gpus: hosts, and GPUs of each.
        gpu_memory_gib: of one GPU.

    Raises:
        UserError: nothing fits, or what was given is not legal.
    """
    fields = {field.name for field in dataclasses.fields(ModelConfig)}
    resolved = resolve_model(
        ModelConfig(**{name: value for name, value in settings.items() if name in fields}), here=False
    )
    shape = shape_of(resolved, settings_of(settings))
    budget, smallest = int(gpu_memory_gib * USABLE * GIB), None
    least = 0
    for layout in _layouts(resolved, settings, given, nodes=nodes, gpus=gpus):
        needed = peak_bytes(shape, layout.mesh, layout.work)
        if needed <= budget:
            return _choice(resolved, shape, layout, gpu_memory_gib=gpu_memory_gib, needed=needed)
        if smallest is None or needed < least:
            smallest, least = layout, needed
    if smallest is None:
        samples = settings["global_batch_size"]
        fewer = (
            "" if samples is None else f", and each data-parallel process needs one of --global_batch_size {samples}"
        )
        raise UserError(
            f"{resolved.name} cannot be split over {nodes} node(s) of {gpus} GPU(s) as asked: the sharding, "
            f"context- and tensor-parallel degrees must divide them{fewer}; choose other degrees, or leave them out"
            + (", or fewer nodes, or a larger batch" if fewer else "")
        )
    enough = processes_that_fit(shape, smallest.mesh, smallest.work, budget)
    more = f"use {-(-enough // gpus)} nodes" if enough and enough > nodes * gpus else "use GPUs of more memory"
    raise UserError(
        f"{resolved.name} does not fit on {nodes} node(s) of {gpus} GPU(s) with {gpu_memory_gib:g} GiB: each needs at "
        f"least {least / GIB:.1f} GiB and has {budget / GIB:.1f} GiB to use; {more}, or a shorter "
        f"--max_context_width"
    )


def _layouts(
    resolved: ResolvedModel, settings: Mapping[str, Any], given: frozenset[str], *, nodes: int, gpus: int
) -> Iterator[Layout]:
    """Yield the layouts to try, the best first; recomputation is as it was given, or full."""
    kept = given | {"activation_checkpointing", "activation_checkpointing_mode"}
    legal = layouts(resolved, settings, kept, nodes=nodes, local=gpus, device_type="cuda")

    def order(layout: Layout) -> tuple[int, ...]:
        offloads, tokens = "offload_activations" in layout.flags, 0 if settings["global_batch_size"] else layout.tokens
        sizes = (layout.mesh.cp.size, layout.mesh.tp.size, -layout.work.micro_batch_size, layout.mesh.shard.size)
        return (offloads, tokens > MOST_TOKENS, *sizes)

    for layout in sorted(legal, key=order):
        if layout.work.micro_batch_size <= _MOST_SAMPLES or "train_batch_size" in given:
            yield layout


def _choice(
    resolved: ResolvedModel, shape: ModelShape, layout: Layout, *, gpu_memory_gib: float, needed: int
) -> Choice:
    mesh, work = layout.mesh, layout.work
    arguments = [word for name in sorted(layout.flags) for word in (f"--{name}", flag_text(layout.flags[name]))]
    tokens = work.micro_batch_size * work.sequence_length * mesh.data.size
    lines = [
        f"{resolved.name}: {shape.parameters:,} parameters, {work.sequence_length} tokens a sample, on "
        f"{mesh.world_size} GPUs of {gpu_memory_gib:g} GiB: {mesh}, {work.micro_batch_size} sample(s) a forward pass,",
        f"{tokens:,} tokens in each round of forward passes; predicted peak {needed / GIB:.1f} GiB of each GPU.",
        *degree_table(shape, work, mesh).splitlines(),
    ]
    return Choice(arguments, lines)
