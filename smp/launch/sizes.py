"""Degrees and micro-batch for a model on so many GPUs, chosen by the memory planner."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from smp.config import AUTO
from smp.dry_run import degree_table
from smp.errors import UserError
from smp.memory.plan import GIB, USABLE, peak_bytes, processes_that_fit
from smp.memory.shape import ModelShape, Workload, model_shape, workload
from smp.mesh import Mesh, tensor_parallel_choices
from smp.models.model_config import ModelConfig, ResolvedModel, resolve_model
from smp.parallel.parallelize import settings_of
from smp.plan.layouts import MOST_TOKENS, legal_meshes

_BATCHES = (4, 2, 1)


@dataclasses.dataclass(frozen=True)
class Choice:
    """The sizes that were chosen.

    Args:
        arguments: the flags that were not given, with their values.
        lines: an account of them, for the script's head.
    """

    arguments: list[str]
    lines: list[str]


@dataclasses.dataclass(frozen=True)
class _Layout:
    mesh: Mesh
    work: Workload
    extra: tuple[str, ...]

    def bytes(self, shape: ModelShape) -> int:
        return peak_bytes(shape, self.mesh, self.work)


def choose_sizes(
    settings: Mapping[str, Any], given: frozenset[str], *, nodes: int, gpus: int, gpu_memory_gib: float
) -> Choice:
    """Choose what was not given: the smallest tensor-parallel degree, the largest micro-batch up to 4, the smallest
    sharding degree, in this order, that fit, with a global batch of at most 4 Mi tokens where that can be.

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
    resolved = resolve_model(ModelConfig(**{name: value for name, value in settings.items() if name in fields}))
    shape = model_shape(resolved)
    budget, smallest = int(gpu_memory_gib * USABLE * GIB), None
    if settings["sharding_strategy"] not in (AUTO, "hybrid_shard", "_hybrid_shard_zero2"):
        given |= {"hybrid_shard_degree"}  # which may stand against it; the strategy decides
    for layout in _layouts(resolved, settings, given, nodes=nodes, gpus=gpus):
        needed = layout.bytes(shape)
        if needed <= budget:
            return _choice(resolved, shape, layout, given, gpu_memory_gib=gpu_memory_gib, needed=needed)
        smallest = min(smallest or layout, layout, key=lambda tried: tried.bytes(shape))
    if smallest is None:
        samples = settings["global_batch_size"]
        fewer = (
            "" if samples is None else f", and each data-parallel process needs one of --global_batch_size {samples}"
        )
        raise UserError(
            f"{resolved.name} cannot be split over {nodes} node(s) of {gpus} GPU(s) as asked: the sharding and "
            f"tensor-parallel degrees must divide them{fewer}; choose other degrees, or leave them out"
            + (", or fewer nodes, or a larger batch" if fewer else "")
        )
    enough = processes_that_fit(shape, smallest.work, budget, tp=smallest.mesh.tp.size, cp=smallest.mesh.cp.size)
    more = f"use {-(-enough // gpus)} nodes" if enough and enough > nodes * gpus else "use GPUs of more memory"
    raise UserError(
        f"{resolved.name} does not fit on {nodes} node(s) of {gpus} GPU(s) with {gpu_memory_gib:g} GiB: each needs at "
        f"least {smallest.bytes(shape) / GIB:.1f} GiB and has {budget / GIB:.1f} GiB to use; {more}, or a shorter "
        f"--max_context_width"
    )


def _layouts(
    resolved: ResolvedModel, settings: Mapping[str, Any], given: frozenset[str], *, nodes: int, gpus: int
) -> Iterator[_Layout]:
    """Yield the layouts to try, the best first."""
    world, samples, cp = nodes * gpus, settings["global_batch_size"], settings["context_parallel_degree"]
    chosen = "tensor_parallel_degree" in given
    tps = [settings["tensor_parallel_degree"]] if chosen else tensor_parallel_choices(gpus)
    batches = [settings["train_batch_size"]] if "train_batch_size" in given else _BATCHES
    extras: list[tuple[str, ...]] = [()]
    if "offload_activations" not in given and settings["activation_checkpointing"]:
        extras.append(("--offload_activations", "1"))
    # The job refuses more data-parallel processes than samples.
    legal = tensor_parallel_choices(world, cp=cp, most_data=samples)
    tps = [tp for tp in tps if tp in legal]
    bf16 = settings["bf16"] is None or settings["bf16"]
    asked = workload(resolved, settings_of(settings), batch=1, compute_bytes=2 if bf16 else 4, device_type="cuda")
    for extra, most_tokens in itertools.product(extras, (MOST_TOKENS, float("inf"))):
        for tp, batch in itertools.product(tps, batches):
            work = dataclasses.replace(
                asked.changed(offload_activations=True) if extra else asked, micro_batch_size=batch
            )
            for mesh in legal_meshes(resolved, settings, given, world=world, local=gpus, tp=tp, cp=cp):
                tokens = batch * settings["gradient_accumulation_steps"] * mesh.data.size * resolved.sequence_length
                if tokens <= most_tokens or samples is not None:
                    yield _Layout(mesh, work, extra)


def _choice(
    resolved: ResolvedModel,
    shape: ModelShape,
    layout: _Layout,
    given: frozenset[str],
    *,
    gpu_memory_gib: float,
    needed: int,
) -> Choice:
    mesh, work = layout.mesh, layout.work
    chosen = {
        "hybrid_shard_degree": mesh.shard.size,
        "tensor_parallel_degree": mesh.tp.size,
        "train_batch_size": work.micro_batch_size,
    }
    arguments = [
        argument for name, value in chosen.items() if name not in given for argument in (f"--{name}", str(value))
    ]
    tokens = work.micro_batch_size * work.sequence_length * mesh.data.size
    lines = [
        f"{resolved.name}: {shape.parameters:,} parameters, {work.sequence_length} tokens a sample, on "
        f"{mesh.world_size} GPUs of {gpu_memory_gib:g} GiB: {mesh}, {work.micro_batch_size} sample(s) a forward pass,",
        f"{tokens:,} tokens in each round of forward passes; predicted peak {needed / GIB:.1f} GiB of each GPU.",
        *degree_table(shape, work, mesh).splitlines(),
    ]
    return Choice([*arguments, *layout.extra], lines)
