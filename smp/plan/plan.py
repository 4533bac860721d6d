"""The plan of one layout: the job's step is traced, written out to all blocks, added up and timed.

For a process of its own (:mod:`smp.plan.worker`), as what torch and transformers ask of values is replaced.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib
import math
from collections.abc import Sequence
from typing import Any

import torch

from smp.config import ActivationConfig
from smp.environment.malloc import stocks_small_blocks, unused_heap
from smp.errors import ConfigError, Problems
from smp.memory.plan import BASE_CPU_BYTES
from smp.models.model_config import resolve_model
from smp.parallel.activation_checkpoint import waiting_bytes
from smp.parallel.allocator import AllocatorConfig
from smp.parallel.parallelize import find_problems
from smp.plan import world
from smp.plan.allocator import reserved_bytes
from smp.plan.blocks import Repeat, Step, UnequalBlocksError, blocks_to_trace, segments, whole_step
from smp.plan.devices import DeviceRow
from smp.plan.events import FORWARD, Trace
from smp.plan.fork import in_child
from smp.plan.heap import heap_bytes
from smp.plan.memory import account
from smp.plan.packed import packed_bytes
from smp.plan.records import GIB, LayoutPlan, Operation, RankMemory, Segment, StepTime
from smp.plan.sdpa import PLANNED_AS_SDPA
from smp.plan.time import step_time
from smp.plan.trace import MOST_MICROBATCHES, microbatch_rows, trace_step, untraced_bytes
from smp.runtime import Launch, choose_backend
from smp.train.arguments import parse_args
from smp.train.run_plan import Job, check_global_batch, choose_settings, make_job, planned_batch, sizes

# Outside of the caching allocator: CUDA's context, and each communicator of NCCL. No GPU of ours has measured them.
_CONTEXT_BYTES, _COMMUNICATOR_BYTES = int(0.6 * GIB), int(0.3 * GIB)
_MARGIN = 2  # blocks at each end, of which prefetching makes other buffers than of those between


def plan_layout(words: Sequence[str], *, nodes: int, local: int, row: DeviceRow, exact: bool = False) -> LayoutPlan:
    """Plan a job with the layout of its flags.

    Args:
        words: the training job's flags.
        nodes: hosts.
        local: ranks of each.
        row: the device; ``cpu`` plans processes of this machine.
        exact: trace all blocks, and the last rank, too.

    Raises:
        UserError: the flags, or the layout, are not legal.
    """
    device = torch.device("cuda" if row.is_gpu else "cpu")
    limit = int(row.memory * GIB) or None
    ranks = sorted({0, nodes * local - 1}) if exact else [0]
    world.prepare(device.type, row.capability or (0, 0), local, limit or 0)
    plans = [_Rank(list(words), device, nodes * local, local, rank, limit, row, exact=exact) for rank in ranks]
    first = plans[0]
    largest = max(plans, key=lambda plan: plan.memory.needed)
    return LayoutPlan(
        mesh=str(first.job.mesh),
        memory=largest.memory,
        step=first.step,
        tokens=first.batch * first.job.model.sequence_length,
        method="exact" if first.exact else "blocks",
        notes=[f"chosen: {choice}" for choice in first.job.choices],
    )


def warm_up(words: Sequence[str]) -> None:
    """Import what a plan needs, so that forks of this process need not.

    Raises:
        UserError: the model is not known.
    """
    import torch._dynamo  # noqa: F401  by the first operation under a mode

    config = resolve_model(parse_args(list(words)).model, here=False).hf_config
    importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))


class _Rank:
    """The plan of one rank.

    Attributes:
        exact: whether all blocks were traced.
    """

    def __init__(
        self, words: list[str], device: torch.device, ranks: int, local: int, rank: int, limit: int | None,
        row: DeviceRow, *, exact: bool,
    ):  # fmt: skip
        self.row, self.limit, self.local = row, limit, local
        config = parse_args(words)
        problems = Problems()
        launch = Launch(rank, ranks, rank % local, local)
        if row.is_gpu and config.model.attn_implementation in PLANNED_AS_SDPA:
            config = dataclasses.replace(config, model=dataclasses.replace(config.model, attn_implementation="sdpa"))
        self.job = job = make_job(config, launch, device, resolve_model(config.model), problems)
        problems += find_problems(job.model.hf_config, job.setup)
        self.batch = problems.attempt(check_global_batch, planned_batch(config, job.mesh), job.mesh) or 0
        if problems:
            raise ConfigError(problems)
        job.choices.extend(choose_settings(job, limit or 1 << 60, batch=self.batch))
        self.backend = choose_backend(config.comm, device)
        self.rows = microbatch_rows(job)
        layers = job.model.hf_config.num_hidden_layers
        period, margin = self._repetition()
        few = layers if exact else blocks_to_trace(layers, period=period, margin=margin)
        trace = self._trace(few)
        try:
            repeated = Repeat(trace.blocks, layers, period, margin)
            whole = whole_step(trace, repeated)
        except UnequalBlocksError:
            trace = self._trace(layers)
            repeated = Repeat(layers, layers, 1, 1)
            whole = whole_step(trace, repeated)
        self.exact = repeated.traced == layers
        self.memory = self._memory(trace, whole)
        self.step = self._time(trace, repeated)

    def _repetition(self) -> tuple[int, int]:
        """Return the blocks after which blocks are alike again, and those at each end that are not."""
        config, model = self.job.settings[ActivationConfig], self.job.model.hf_config
        types = getattr(model, "layer_types", None) or [""]
        own = next(p for p in range(1, len(types) + 1) if all(a == b for a, b in zip(types, types[p:], strict=False)))
        every = config.activation_checkpointing_every if config.activation_checkpointing else 1
        period = math.lcm(own, every)
        margin = _MARGIN + (config.activation_loading_horizon if config.offload_activations else 0)
        margin += self.job.mesh.cp.size > 1  # the first block makes what the attention of all asks for
        return period, -(-margin // period) * period  # so that the blocks at the end keep their place in the period

    def _trace(self, blocks: int) -> Trace:
        job = _with_blocks(self.job, blocks)
        # In a process of its own: torch keeps caches of meshes, whose groups end with the trace.
        return in_child(functools.partial(_traced, job, self.backend, self.row.capability if self.row.is_gpu else None))

    def _memory(self, trace: Trace, whole: Step) -> RankMemory:
        gpu, heap = self.row.is_gpu, (0, 0)
        found = account(whole, shared=trace.shared, waiting=0 if gpu else untraced_bytes(self.job))
        if gpu:
            expandable = self.job.settings[AllocatorConfig].expandable_segments is True
            reserved: int | None = reserved_bytes(whole, expandable=expandable)
            outside = _CONTEXT_BYTES + _COMMUNICATOR_BYTES * len(trace.groups)
        else:
            heap = self._unused_heap(trace, whole, found.peak.total)
            reserved, outside = None, BASE_CPU_BYTES + heap[1]
        return RankMemory(
            rank=self.job.launch.rank,
            peak=found.peak,
            own_peaks=found.own_peaks,
            reserved=reserved,
            outside=outside,
            limit=self.limit,
            shared=trace.shared,
            heap=heap,
            timeline=found.timeline,
        )

    def _unused_heap(self, trace: Trace, whole: Step, peak: int) -> tuple[int, int]:
        """Return the least and the most that a process on CPUs holds beyond its tensors' bytes at the peak."""
        shared, backend = trace.shared, self.backend if self.job.launch.world_size > 1 else ""
        if stocks_small_blocks():  # else small blocks of the process, which no plan knows, decide
            forward = (e for place, events in trace.events.items() if place.phase == FORWARD for e in events)
            packed = packed_bytes(event for event in forward if isinstance(event, Operation))
            ranks, here = trace.groups.get("shard", (1, 1))
            found = packed is not None and heap_bytes(
                whole, backend=backend, ranks=ranks if ranks == here else 1, shared=shared, packed=packed
            )
            if found:
                return max(0, found[0] - peak), max(0, found[1] - peak)
        unused = unused_heap(recomputes=self.job.settings[ActivationConfig].activation_checkpointing)
        return 0, int(unused * (peak - shared))  # what is shared is mapped, and no heap's

    def _time(self, trace: Trace, repeated: Repeat) -> StepTime | None:
        if not self.row.bandwidth:  # a CPU that nobody has measured
            return None
        config = self.job.settings[ActivationConfig]
        mode = config.activation_checkpointing_mode if config.activation_checkpointing else "none"
        offloaded = 0
        if config.offload_activations:
            shape, work = sizes(self.job)
            blocks = max(0, shape.layers - config.activation_loading_horizon)
            offloaded = waiting_bytes(shape, self.job.mesh, work, blocks=blocks) * len(self.rows)
        return step_time(
            _with_microbatches(segments(trace, repeated), len(self.rows)),
            self.row,
            local=self.local,
            groups=trace.groups,
            backend=self.backend,
            recompute=mode,
            offloaded=offloaded,
        )


def _traced(job: Job, backend: str, capability: tuple[int, int] | None) -> Trace:
    launch = job.launch
    with world.fake_group(launch.world_size, launch.rank, launch.local_world_size, backend):
        return trace_step(job, capability)


def _with_microbatches(found: list[tuple[Segment, int]], count: int) -> list[tuple[Segment, int]]:
    """Repeat the traced micro-batch between the first and the last."""
    if count <= MOST_MICROBATCHES:
        return found
    between = [pair for pair in found if pair[0].microbatch == 1 and pair[0].phase != "update"]
    last = found.index(between[-1]) + 1
    return [*found[:last], *between * (count - MOST_MICROBATCHES), *found[last:]]


def _with_blocks(job: Job, blocks: int) -> Job:
    """Return the job of a model with so many blocks."""
    config: Any = copy.deepcopy(job.model.hf_config)
    if config.num_hidden_layers == blocks:
        return job
    with contextlib.suppress(AttributeError):
        if config.layer_types:
            config.layer_types = config.layer_types[:blocks]
    config.num_hidden_layers = blocks
    return dataclasses.replace(job, model=dataclasses.replace(job.model, hf_config=config))
