"""The legal layouts of a job: degrees, micro-batch, recomputation and offloading; what was given is kept."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from smp.axes import AXES, divisors, fit_together, folds, split_degrees
from smp.config import AUTO, ActivationConfig, ParallelConfig
from smp.memory.advice import OFFLOADING
from smp.memory.shape import NONE, RECOMPUTATION, Workload, recomputations, workload
from smp.mesh import Mesh, lay_out, resolve_mesh, sharding_choices
from smp.models.experts import expert_layers
from smp.models.family import tensor_parallel_problems
from smp.models.meta_model import meta_model
from smp.models.model_config import ModelConfig, ResolvedModel
from smp.optim.config import OptimConfig
from smp.optim.optimizers import find_problems
from smp.parallel.context.technique import problems
from smp.parallel.parallelize import settings_of, table_of
from smp.parallel.technique import Setup
from smp.train.preference import Config as PreferenceConfig

# Above this, larger batches teach little more: SMP v2 advises tensor parallelism to stay below.
MOST_TOKENS = 4 * 2**20
# Shorter sequences are not split over ranks, nor into shorter parts: the exchanges would take more than they save.
LONG, SHORTEST_PART = 16384, 4096
_BATCHES = (1, 2, 4, 8, 16)


@dataclasses.dataclass(frozen=True)
class Layout:
    """A layout to plan.

    Attributes:
        mesh: laid out.
        flags: the settings that were chosen, by name; those that the user has given are not among them.
        work: of one forward pass, with the micro-batches of a step.
        tokens: of a step over all ranks.
    """

    mesh: Mesh
    flags: Mapping[str, Any]
    work: Workload
    tokens: int


def layouts(
    resolved: ResolvedModel,
    settings: Mapping[str, Any],
    given: frozenset[str],
    *,
    nodes: int,
    local: int,
    device_type: str,
    fixed: bool = False,
) -> Iterator[Layout]:
    """Yield the legal layouts; what was given is kept.

    Args:
        settings: all settings of the job, by name.
        given: those that the user has chosen.
        nodes, local: hosts, and ranks of each.
        fixed: yield the one of ``settings`` alone.
    """
    if fixed:
        given = frozenset(settings)
    elif settings["sharding_strategy"] not in (AUTO, "hybrid_shard", "_hybrid_shard_zero2"):
        given |= {"hybrid_shard_degree"}  # which may stand against it; the strategy decides
    world, samples = nodes * local, settings["global_batch_size"]
    tries = {axis.name: [settings[axis.flag]] if axis.flag in given else divisors(world) for axis in AXES}
    if "tensor_parallel_degree" not in given:
        tries["tp"] = divisors(local)
    if "context_parallel_degree" not in given:
        tries["cp"] = _context_degrees(resolved, settings, world=world, device_type=device_type)
    if "expert_parallel_degree" not in given:
        tries["ep"] = _expert_degrees(resolved, world)
    tried = [dict(zip(tries, degrees, strict=True)) for degrees in itertools.product(*tries.values())]
    batches = [settings["train_batch_size"]] if "train_batch_size" in given else _BATCHES
    bf16 = device_type != "cpu" if settings["bf16"] is None else settings["bf16"]
    sections = settings_of(settings, PreferenceConfig)
    asked = workload(
        resolved, sections, batch=1, compute_bytes=2 if bf16 else 4, device_type=device_type,
        is_async=settings["checkpoint_type"].startswith("async_"),
        rows_of_sample=sections[PreferenceConfig].rows_of_sample(settings["pack"]),
    )  # fmt: skip
    saving, table = list(_savings(settings, given, device_type)), table_of(resolved, asked.settings)
    # The job refuses more data-parallel processes than samples.
    for degrees in (each for each in tried if fixed or fit_together(world, each, most_data=samples)):
        meshes = legal_meshes(resolved, settings, given, world=world, local=local, degrees=degrees)
        suited = [mesh for mesh in meshes if not find_problems(table, mesh, asked.settings[OptimConfig])]
        for mesh, saved in itertools.product(suited, saving):
            split = {a.flag: degrees[a.name] for a in reversed(AXES) if a.multiplies or degrees[a.name] > 1}
            chosen = {**split, "hybrid_shard_degree": mesh.shard.size, **saved}
            flags = {name: value for name, value in chosen.items() if name not in given}
            one = asked.changed(**flags)
            for batch in batches:
                accumulation = _accumulation(settings, mesh, batch, chosen=len(batches) > 1)
                rows = asked.rows_of_sample * (samples or batch * mesh.data.size * (accumulation or 0))
                tokens = rows * resolved.sequence_length
                if accumulation and (samples or tokens <= MOST_TOKENS or batch == batches[0]):
                    sizes = {"train_batch_size": batch} if len(batches) > 1 else {}
                    work = dataclasses.replace(one, micro_batch_size=batch, accumulation=accumulation)
                    yield Layout(mesh, {**flags, **sizes}, work, tokens)


def _expert_degrees(resolved: ResolvedModel, world: int) -> list[int]:
    """Return the degrees that divide the experts of each layer, and the ranks; 1 for a model without experts."""
    layers = expert_layers(meta_model(resolved.hf_config, resolved.attn_implementation).model)
    return divisors(math.gcd(world, *(layer.experts for layer in layers))) if layers else [1]


def _context_degrees(
    resolved: ResolvedModel, settings: Mapping[str, Any], *, world: int, device_type: str
) -> list[int]:
    """Return the context-parallel degrees to try: above 1 only where sequences are long."""
    if resolved.sequence_length < LONG:
        return [1]
    asked = settings_of(settings, ModelConfig)
    dtype = torch.float32 if settings["bf16"] is False else None

    def legal(cp: int) -> bool:  # as the job says
        setup = Setup(resolved.family, lay_out(shard=cp, cp=cp), asked, dtype, device_type)
        return not problems(resolved.hf_config, setup)

    most = resolved.sequence_length // SHORTEST_PART
    return [cp for cp in divisors(world) if cp <= most and legal(cp)]


def legal_meshes(
    resolved: ResolvedModel,
    settings: Mapping[str, Any],
    given: frozenset[str],
    *,
    world: int,
    local: int,
    degrees: Mapping[str, int],
) -> Iterator[Mesh]:
    """Yield a mesh for each legal sharding degree, the smallest first; one alone for a degree that was given.

    Args:
        degrees: of the axes, by name.
    """
    strategy, chosen = settings["sharding_strategy"], settings["hybrid_shard_degree"]
    keeps = strategy == "_hybrid_shard_zero2"
    if "hybrid_shard_degree" in given:
        multiplied, _ = split_degrees(degrees)
        fits_another = any(a.multiplies and a.flag not in given for a in AXES) and chosen > 0 and world % chosen == 0
        if fits_another and (world // multiplied % chosen or not folds(chosen, degrees)):
            return
        # A degree that was given is refused with its sentence where it does not fit; others are left out.
        asked: dict[str, Any] = {a.flag: degrees[a.name] for a in AXES if a.multiplies or a.flag in given}
        parallel = ParallelConfig(sharding_strategy=strategy, hybrid_shard_degree=chosen, **asked)
        mesh: Mesh | None = resolve_mesh(parallel, world_size=world, local_world_size=local)
        for axis in AXES:
            mesh = mesh and mesh.with_degree(axis.name, degrees[axis.name])
        candidates = [mesh] if mesh else []
    else:
        candidates = sharding_choices(world_size=world, local_world_size=local, keep_gathered=keeps, **degrees)
    for mesh in candidates:
        family, config = resolved.family, resolved.hf_config
        if not tensor_parallel_problems(family, config, degree=mesh.tp.size, shard=mesh.shard.size):
            yield mesh


def _accumulation(settings: Mapping[str, Any], mesh: Mesh, batch: int, *, chosen: bool) -> int | None:
    """Return the micro-batches of a step; None where a chosen ``batch`` does not divide the global one."""
    samples = settings["global_batch_size"]
    if samples is None:
        return settings["gradient_accumulation_steps"]
    each = batch * mesh.data.size
    # With one sample a pass, the last of them may be of fewer ranks.
    return None if samples % each and chosen and batch > 1 else -(-samples // each)


def _savings(settings: Mapping[str, Any], given: frozenset[str], device_type: str) -> Iterator[dict[str, Any]]:
    """Yield recomputation and offloading, what takes least time first."""
    known = {name: settings[name] for name in RECOMPUTATION[-1] if name in given or settings[name] != AUTO}
    # Of what was given as auto nothing is searched: the job chooses it.
    recomputing = [dict[str, Any]()] if AUTO in known.values() else recomputations(known)
    yield from recomputing
    # On a CPU it takes a directory. Of blocks that are not recomputed it moves nearly everything.
    if "offload_activations" not in given and device_type != "cpu":
        for chosen in recomputing:
            how = {**known, **chosen}
            if how.get("activation_checkpointing", True) and how.get("activation_checkpointing_every", 1) == 1:
                yield {**chosen, **OFFLOADING}


def differences(layout: Layout, other: Layout) -> tuple[tuple[str, str], ...]:
    """Return what ``layout`` has that ``other`` has not, by kind, in words."""
    mine, theirs = parts(layout), parts(other)
    return tuple((name, text) for name, text in mine.items() if theirs[name] != text)


def parts(layout: Layout) -> dict[str, str]:
    """Return the parts of a layout by kind, in words."""
    config, kept = layout.work.settings[ActivationConfig], layout.work.recomputation
    some = kept != NONE and layout.work.every > 1
    return {
        "shard": f"shard {layout.mesh.shard.size}",
        **{axis.name: f"{axis.name} {layout.mesh.degree(axis.name)}" for axis in reversed(AXES)},
        "batch": f"batch {layout.work.micro_batch_size}",
        "recomputation": f"recompute {kept}" + (f" of 1 in {layout.work.every} blocks" if some else ""),
        "offloading": "offloaded" if config.offload_activations else "not offloaded",
    }
