"""The plan of one layout: the job's step is traced, written out to all blocks and added up.

For a separate process (:mod:`smp.plan.worker`), as what torch and transformers ask of values is replaced.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, cast

import torch

from smp.config import ActivationConfig
from smp.environment.malloc import unused_heap
from smp.errors import ConfigError, Problems, UserError
from smp.memory.estimate import process_bytes
from smp.models.model_config import resolve_model
from smp.optim import optimizers
from smp.parallel.allocator import AllocatorConfig
from smp.parallel.parallelize import find_problems
from smp.plan import world
from smp.plan.allocator import reserved_bytes
from smp.plan.blocks import Repeat, Step, UnequalBlocksError, blocks_to_trace, whole_step
from smp.plan.closed_time import step_time
from smp.plan.devices import DeviceRow
from smp.plan.events import Trace
from smp.plan.memory import account
from smp.plan.records import LayoutPlan, RankMemory
from smp.plan.sdpa import PLANNED_AS_SDPA
from smp.plan.trace import trace_step, untraced_bytes
from smp.processes import in_child, in_children
from smp.runtime import Launch, choose_backend
from smp.train.arguments import parse_args
from smp.train.checked_job import make_job
from smp.train.job import Job, check_global_batch, choose_settings, planned_batch, sizes
from smp.units import GIB

_MARGIN = 2  # blocks at each end, of which prefetching makes other buffers than of those between


def plan_layout(argv: Sequence[str], *, nodes: int, local: int, row: DeviceRow, exact: bool = False) -> LayoutPlan:
    """Plan a job with the layout of its flags.

    Args:
        argv: the training job's flags.
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
    plans = [_Rank(list(argv), device, nodes * local, local, rank, limit, row, exact=exact) for rank in ranks]
    first = plans[0]
    largest = max(plans, key=lambda plan: plan.memory.needed)
    return LayoutPlan(
        mesh=str(first.job.mesh),
        memory=largest.memory,
        step=first.step,
        tokens=first.batch * sizes(first.job)[1].rows_of_sample * first.job.model.sequence_length,
        method="exact" if first.exact else "blocks",
        notes=[f"chosen: {choice}" for choice in first.job.choices],
        chosen={choice.name: choice.value for choice in first.job.choices},
    )


def plan_layouts(
    jobs: Sequence[Sequence[str]], *, nodes: int, local: int, row: DeviceRow, exact: bool = False
) -> list[LayoutPlan | UserError]:
    """Plan jobs, all at once, each in a fork of this process; see :func:`plan_layout`."""
    import torch._dynamo  # noqa: F401  here, as the first operation under a mode imports it in each fork

    plan = functools.partial(plan_layout, nodes=nodes, local=local, row=row, exact=exact)
    return in_children([functools.partial(plan, argv) for argv in jobs])


class _Rank:
    """The plan of one rank."""

    def __init__(
        self, argv: list[str], device: torch.device, ranks: int, local: int, rank: int, limit: int | None,
        row: DeviceRow, *, exact: bool,
    ):  # fmt: skip
        self.row, self.limit, self.local = row, limit, local
        config = parse_args(argv)
        problems = Problems()
        launch = Launch(rank, ranks, rank % local, local)
        if row.is_gpu and config.model.attn_implementation in PLANNED_AS_SDPA:
            config = dataclasses.replace(config, model=dataclasses.replace(config.model, attn_implementation="sdpa"))
        self.job = job = make_job(config, launch, device, resolve_model(config.model), problems)
        problems += find_problems(job.model.hf_config, job.setup)
        problems += optimizers.find_problems(job.table, job.mesh, config.optim)
        self.batch = problems.attempt(check_global_batch, planned_batch(config, job.mesh), job.mesh) or 0
        if problems:
            raise ConfigError(problems)
        job.choices.extend(choose_settings(job, limit or 1 << 60, batch=self.batch))
        self.backend = choose_backend(config.comm, device)
        layers = job.model.hf_config.num_hidden_layers
        period, margin = self._repetition()
        few = layers if exact else blocks_to_trace(layers, period=period, margin=margin)
        trace = self._trace(few)
        try:
            repeated = Repeat(trace.blocks, layers, period, margin)
            step = whole_step(trace, repeated)
        except UnequalBlocksError:
            trace = self._trace(layers)
            repeated = Repeat(layers, layers, 1, 1)
            step = whole_step(trace, repeated)
        self.exact = repeated.traced == layers
        self.memory = self._memory(trace, step)
        shape, work = sizes(job)
        self.step = step_time(shape, job.mesh, work, row, local=local)

    def _repetition(self) -> tuple[int, int]:
        """Return the blocks after which blocks are alike again, and those at each end that are not."""
        config, model = self.job.settings[ActivationConfig], self.job.model.hf_config
        types = getattr(model, "layer_types", None) or [""]
        own = next(p for p in range(1, len(types) + 1) if all(a == b for a, b in zip(types, types[p:], strict=False)))
        every = cast(int, config.activation_checkpointing_every) if config.activation_checkpointing else 1
        period = math.lcm(own, every)
        margin = _MARGIN + (config.activation_loading_horizon if config.offload_activations else 0)
        margin += self.job.mesh.cp.size > 1  # the first block makes what the attention of all asks for
        return period, -(-margin // period) * period  # so that the blocks at the end keep their place in the period

    def _trace(self, blocks: int) -> Trace:
        job = _with_blocks(self.job, blocks)
        # In a forked process: torch keeps caches of meshes, whose groups end with the trace.
        return in_child(functools.partial(_traced, job, self.backend, self.row.capability if self.row.is_gpu else None))

    def _memory(self, trace: Trace, step: Step) -> RankMemory:
        gpu, heap = self.row.is_gpu, 0
        found = account(step, shared=trace.shared, waiting=None if gpu else untraced_bytes(self.job))
        if gpu:
            expandable = self.job.settings[AllocatorConfig].expandable_segments is True
            reserved: int | None = reserved_bytes(step, expandable=expandable)
        else:
            unused = unused_heap(recomputes=self.job.settings[ActivationConfig].activation_checkpointing is True)
            heap = int(unused * (found.peak.total - trace.shared))  # what is shared is mapped, and no heap's
            reserved = None
        return RankMemory(
            rank=self.job.launch.rank,
            peak=found.peak,
            own_peaks=found.own_peaks,
            reserved=reserved,
            outside=process_bytes(self.job.mesh, self.job.device.type) + heap,
            limit=self.limit,
            shared=trace.shared,
            heap=heap,
            timeline=found.timeline,
        )


def _traced(job: Job, backend: str, capability: tuple[int, int] | None) -> Trace:
    launch = job.launch
    with world.fake_group(launch.world_size, launch.rank, launch.local_world_size, backend):
        return trace_step(job, capability)


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
