"""Degrees and micro-batch for a model on so many GPUs, chosen by the memory planner."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from smp.config import ParallelConfig
from smp.dry_run import degree_table
from smp.errors import UserError
from smp.memory_plan import GIB, ModelShape, Workload, estimate_memory, model_shape, processes_that_fit
from smp.mesh import Degrees, resolve_degrees
from smp.models.model_config import ModelConfig, ResolvedModel, resolve_model
from smp.models.registry import build_model
from smp.models.tensor_plan import tensor_parallel_problems

# What CUDA, NCCL and fragmentation take of a GPU.
_USABLE = 0.92
# Above this, larger batches teach little more: SMP v2 advises tensor parallelism to stay below.
_MOST_TOKENS = 4 * 2**20
_BATCHES = (4, 2, 1)


@dataclasses.dataclass(frozen=True)
class Choice:
    """What was chosen.

    Args:
        words: the flags that were not given, with their values.
        lines: what there is to say of it.
    """

    words: list[str]
    lines: list[str]


@dataclasses.dataclass(frozen=True)
class _Layout:
    degrees: Degrees
    work: Workload
    extra: tuple[str, ...]

    def bytes(self, shape: ModelShape) -> int:
        return sum(estimate_memory(shape, self.degrees, self.work).values())


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
    family = resolved.family
    with torch.device("meta"):
        model = build_model(resolved.hf_config, attn_implementation=resolved.attn_implementation)
    shape = model_shape(
        model, resolved.hf_config, embedding=family.embedding, blocks=family.blocks, gated_mlp=family.gated_mlp
    )
    budget, smallest = int(gpu_memory_gib * _USABLE * GIB), None
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
    enough = processes_that_fit(shape, smallest.work, budget, tp=smallest.degrees.tp)
    more = f"use {-(-enough // gpus)} nodes" if enough and enough > nodes * gpus else "use GPUs of more memory"
    raise UserError(
        f"{resolved.name} does not fit on {nodes} node(s) of {gpus} GPU(s) with {gpu_memory_gib:g} GiB: each needs at "
        f"least {smallest.bytes(shape) / GIB:.1f} GiB and has {budget / GIB:.1f} GiB to use; {more}, or a shorter "
        f"--max_context_width"
    )


def _layouts(
    resolved: ResolvedModel, settings: Mapping[str, Any], given: frozenset[str], *, nodes: int, gpus: int
) -> Iterator[_Layout]:
    """All that may be tried, the best first."""
    tps = [tp for tp in range(1, gpus + 1) if gpus % tp == 0]
    if "tensor_parallel_degree" in given:
        tps = [settings["tensor_parallel_degree"]]
    samples = settings["global_batch_size"]
    # The job refuses more data-parallel processes than samples.
    tps = [tp for tp in tps if samples is None or nodes * gpus // tp <= samples]
    batches = [settings["train_batch_size"]] if "train_batch_size" in given else _BATCHES
    extras: list[tuple[str, ...]] = [()]
    if "offload_activations" not in given and settings["activation_checkpointing"]:
        extras.append(("--offload_activations", "1"))
    for extra in extras:
        for most_tokens in (_MOST_TOKENS, float("inf")):
            for tp in tps:
                for batch in batches:
                    tokens = batch * settings["gradient_accumulation_steps"] * (nodes * gpus // tp)
                    tokens *= resolved.sequence_length
                    if (tokens > most_tokens and samples is None) or nodes * gpus % tp:
                        continue
                    work = _workload(resolved, settings, batch, offload=bool(extra))
                    for degrees in _degrees(resolved, settings, given, world=nodes * gpus, local=gpus, tp=tp):
                        yield _Layout(degrees, work, extra)


def _degrees(
    resolved: ResolvedModel, settings: Mapping[str, Any], given: frozenset[str], *, world: int, local: int, tp: int
) -> Iterator[Degrees]:
    """The legal sharding degrees, the smallest first; the one that was chosen, if one was."""
    strategy, chosen = settings["sharding_strategy"], settings["hybrid_shard_degree"]
    keeps = strategy == "_hybrid_shard_zero2"
    if "hybrid_shard_degree" in given or strategy not in ("hybrid_shard", "_hybrid_shard_zero2"):
        parallel = ParallelConfig(
            sharding_strategy=strategy, hybrid_shard_degree=chosen, tensor_parallel_degree=tp
        )  # fmt: skip
        candidates = [resolve_degrees(parallel, world_size=world, local_world_size=local)]
    else:
        data, inside = world // tp, max(1, local // tp)
        shards = (d for d in range(1, data + 1) if data % d == 0 and (inside % d == 0 or d % inside == 0))
        candidates = [Degrees(data // d, d, tp, reshard_after_forward=d > 1 and not keeps) for d in shards]
    for degrees in candidates:
        plan, config = resolved.family.tensor_plan, resolved.hf_config
        if not tensor_parallel_problems(plan, config, degree=tp, shard=degrees.dp_shard):
            yield degrees


def _workload(resolved: ResolvedModel, settings: Mapping[str, Any], batch: int, *, offload: bool) -> Workload:
    bf16 = settings["bf16"] is None or settings["bf16"]
    offloads = offload or settings["offload_activations"]
    return Workload(
        sequence_length=resolved.sequence_length,
        micro_batch_size=batch,
        compute_bytes=2 if bf16 else 4,
        activation_checkpointing=settings["activation_checkpointing"],
        sequence_parallel=settings["sequence_parallel"],
        save_gathered=settings["tp_save_gathered"],
        loss_chunk=settings["loss_chunk_tokens"],
        recomputed_every=settings["activation_checkpointing_every"],
        selective=settings["activation_checkpointing_mode"] == "selective",
        offload_horizon=settings["activation_loading_horizon"] if offloads else 0,
        cpu_offload=settings["cpu_offload"],
        attention_matrix=resolved.attn_implementation == "eager",
    )


def _choice(
    resolved: ResolvedModel,
    shape: ModelShape,
    layout: _Layout,
    given: frozenset[str],
    *,
    gpu_memory_gib: float,
    needed: int,
) -> Choice:
    degrees, work = layout.degrees, layout.work
    chosen = {
        "hybrid_shard_degree": degrees.dp_shard,
        "tensor_parallel_degree": degrees.tp,
        "train_batch_size": work.micro_batch_size,
    }
    if "sharding_strategy" in given:
        del chosen["hybrid_shard_degree"]  # which may stand against it; the strategy decides
    words = [word for name, value in chosen.items() if name not in given for word in (f"--{name}", str(value))]
    tokens = work.micro_batch_size * work.sequence_length * degrees.data_size
    lines = [
        f"{resolved.name}: {shape.parameters:,} parameters, {work.sequence_length} tokens a sample, on "
        f"{degrees.data_size * degrees.tp} GPUs of {gpu_memory_gib:g} GiB: dp_replicate {degrees.dp_replicate} x "
        f"dp_shard {degrees.dp_shard} x tp {degrees.tp}, {work.micro_batch_size} sample(s) a forward pass,",
        f"{tokens:,} tokens in each round of forward passes; predicted peak {needed / GIB:.1f} GiB of each GPU.",
        *degree_table(shape, work, degrees.data_size, degrees).splitlines(),
    ]
    return Choice([*words, *layout.extra], lines)
