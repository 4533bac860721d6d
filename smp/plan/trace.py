"""One training step of a rank, run on fake tensors.

The job's code runs: ``apply_techniques``, ``build_optimizer`` and ``train_step``, under the memory profile that a
real run uses. The account therefore is a real run's, to the byte, as far as operations show what they allocate.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._pytree import tree_leaves

from smp.config import ActivationConfig
from smp.data.data_pipeline import StepBatch
from smp.data.sampler import step_positions
from smp.delayed_init import build_on_meta, materialize_
from smp.local_shards import local_tensor
from smp.loss import IGNORE_INDEX
from smp.memory.categories import ACTIVATIONS, OTHER
from smp.mesh import Mesh
from smp.models.registry import build_model
from smp.optim.optimizers import build_optimizer
from smp.parallel.microbatch import Microbatch
from smp.parallel.parallelize import apply_techniques
from smp.parallel.technique import model_blocks
from smp.plan import world
from smp.plan.events import BACKWARD, BEGIN, FORWARD, REFERENCE, UPDATE, StepPhase, Trace
from smp.plan.step_profile import StepTrace
from smp.train.job import Job, planned_batch
from smp.train.preference import loss_of
from smp.train.step import TokenLoss, train_step

# Micro-batches that are traced: the first, one between, the last.
MOST_MICROBATCHES = 3


class _Follower:
    """Follows a step through its micro-batches, phases and blocks."""

    def __init__(self, trace: StepTrace, blocks: list[nn.Module], *, first: str):
        self.trace, self._microbatch, self._phase, self._first = trace, -1, BEGIN, first
        for index, block in enumerate(blocks):
            block.forward = functools.partial(self._block, index, len(blocks), block.forward)  # type: ignore[method-assign]

    def _go(self, phase: str, block: int | None, part: str = "") -> None:
        self._phase = phase
        self.trace.point = StepPhase(max(self._microbatch, 0), phase, block, part)

    def enter(self, phase: str) -> None:
        """Follow the marks of ``train_step``."""
        if phase == "forward":
            self._microbatch += 1
            self._go(self._first, None, "embedding")
        elif phase == "backward":
            self._go(BACKWARD, None, "head")
        elif phase == "optimizer":
            self._go(UPDATE, None)

    def _block(self, index: int, count: int, forward: Any, *args: Any, **kwargs: Any) -> Any:
        if self._phase not in (REFERENCE, FORWARD):
            return forward(*args, **kwargs)
        phase = FORWARD if torch.is_grad_enabled() else self._first
        self._go(phase, index)
        entering = next(
            (t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad), None
        )
        if index == 0 and entering is not None:
            entering.register_hook(lambda gradient: self._go(BACKWARD, None, "embedding"))
        result = forward(*args, **kwargs)
        leaving = next(t for t in tree_leaves(result) if isinstance(t, torch.Tensor))
        if leaving.requires_grad:
            leaving.register_hook(lambda gradient: self._go(BACKWARD, index))
        if index == count - 1:
            self._go(phase, None, "head")
        return result


def _allocate_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer's state, as its first step does."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def microbatch_rows(job: Job) -> list[int]:
    """Return the samples of each micro-batch of a step, on a data rank that has most."""
    size = job.mesh.data.size
    positions = step_positions(
        batch=planned_batch(job.config, job.mesh), micro=job.config.run.train_batch_size, rank=size - 1, size=size
    )
    return [len(each) for each in positions]


def _make_batch(job: Job, rows: list[int], samples: int) -> StepBatch:
    """Make micro-batches of the job on the host, with values where the loss numbers and chooses tokens by them.

    Every row is one document, or a pair of answers of half the length; what can be trained on is.

    Args:
        rows: samples of each.
        samples: of the whole step, whose numbers are in the batch.
    """
    length, integer, preference = job.model.sequence_length, torch.int64, job.config.preference
    of_sample = preference.rows_of_sample(job.config.data.pack)
    documents = 2 // of_sample if preference.dpo else 1

    def microbatch(samples: int) -> Microbatch:
        size = of_sample * samples
        bounds = np.arange(documents * size + 1) * length // documents
        ids, targets = (torch.zeros(size, length, dtype=integer) for _ in range(2))
        targets.view(-1)[bounds[1:] - 1] = IGNORE_INDEX
        made: Microbatch = {"input_ids": ids, "targets": targets, "sample_ids": torch.zeros(size, dtype=integer)}
        if job.config.data.keeps_apart or documents > 1:
            made["position_ids"] = torch.zeros(size, length, dtype=integer)
            made["document_bounds"] = torch.from_numpy(bounds.astype(np.int32))
            made["longest_document"] = -(-length // documents)
        if preference.keeps_reference(job.config.lora):
            made["reference"] = torch.zeros(samples, 2)
        return made

    return StepBatch([microbatch(size) for size in rows], torch.zeros(samples, dtype=integer))


def _batch(job: Job) -> StepBatch:
    rows = microbatch_rows(job)
    return _make_batch(job, rows if len(rows) <= MOST_MICROBATCHES else [*rows[:2], rows[-1]], sum(rows))


def _faked(part: Microbatch, mode: FakeTensorMode) -> Microbatch:
    with unset_fake_temporarily():
        found = {name: mode.from_tensor(each) if torch.is_tensor(each) else each for name, each in part.items()}
    return cast(Microbatch, found)


def _replay_parts(
    objective: TokenLoss, parts: Sequence[Microbatch], trace: StepTrace, mode: FakeTensorMode
) -> TokenLoss:
    """Serve precomputed micro-batch parts, in order: fake tensors have no values to cut by."""
    left = iter([_faked(part, mode) for part in parts])

    def own_part(microbatch: Microbatch) -> Microbatch:
        part = next(left)
        for each in part.values():
            if isinstance(each, torch.Tensor):
                trace._see(each, ACTIVATIONS)
        return part

    objective.own_part = own_part  # type: ignore[method-assign]
    return objective


def untraced_bytes(job: Job) -> dict[str, int]:
    """Return by category the bytes, on the host throughout the step, of the micro-batches that are not traced."""
    rows, found = microbatch_rows(job), Counter[str]()
    for size, times in Counter(rows[2:-1] if len(rows) > MOST_MICROBATCHES else []).items():
        (one,) = _make_batch(job, [size], 0).microbatches
        given, own = (_storages(part) for part in (one, loss_of(job.setup).own_part(one)))
        found[OTHER] += times * sum(given.values())
        found[ACTIVATIONS] += times * sum(size for key, size in own.items() if key not in given)
    return dict(found)


def _storages(part: Microbatch) -> dict[int, int]:
    storages = [each.untyped_storage() for each in part.values() if isinstance(each, torch.Tensor)]
    return {storage._cdata: storage.nbytes() for storage in storages}


def _owners(model: nn.Module, optimizer: Any, blocks: list[nn.Module], trace: StepTrace) -> dict[int, int]:
    """Return the block of each storage of a block's parameters, their state and buffers, by the entry's ``id``."""
    found: dict[int, int] = {}

    def own(tensor: Any, block: int) -> None:
        local = local_tensor(tensor) if isinstance(tensor, torch.Tensor) else None
        if local is not None and (entry := trace._live.get(local.untyped_storage()._cdata)):
            found[id(entry)] = block

    for index, block in enumerate(blocks):
        for parameter in block.parameters():
            own(parameter.data, index)
            for value in optimizer.state.get(parameter, {}).values():
                own(value, index)
        for buffer in block.buffers():
            own(buffer, index)
    return found


def _replace_buffers(model: nn.Module, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = make(buffer)


def _everyone(mesh: Mesh) -> dist.ProcessGroup:
    """Return the group of all ranks."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD if mesh.loss.size < mesh.world_size else mesh.loss.group


def trace_step(job: Job, capability: tuple[int, int] | None = None) -> Trace:
    """Trace one step of a rank; :func:`smp.plan.world.fake_group` runs, and no other mode.

    Args:
        job: its mesh is laid out for the rank.
        capability: of the GPU, whose kernels' workspaces are counted.
    """
    setup, resolved = dataclasses.replace(job.setup, mesh=job.mesh.join(job.device.type)), job.model
    build = functools.partial(build_model, resolved.hf_config, attn_implementation=resolved.attn_implementation)
    table, model = job.table, build_on_meta(build)  # with values, where code computes with them: before the mode
    device, mode = torch.device(job.device.type), world.fake_mode()
    _replace_buffers(model, mode.from_tensor)  # fully_shard moves them to the device
    with mode:
        apply_techniques(model, setup)
    config, blocks, real = job.config, model_blocks(model, resolved.family), _batch(job)
    parts = [*map(loss_of(setup).own_part, real.microbatches)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(mode)
        cpu_offload = setup.settings[ActivationConfig].cpu_offload
        materialize_(model, torch.device("cpu") if cpu_offload else device)
        _replace_buffers(model, lambda buffer: buffer.to(device))
        model.train()
        optimizer = build_optimizer(model, config.optim, lr=config.lr.lr, table=table, seed=config.run.seed)
        _allocate_state(optimizer)
        batch = StepBatch([_faked(each, mode) for each in real.microbatches], mode.from_tensor(real.sample_ids))
        trace = StepTrace(model, optimizer, device, mode, capability)
        objective = _replay_parts(loss_of(setup), parts, trace, mode)
        world.connect(_everyone(setup.mesh))  # over it all ranks agree at every step
        owners = _owners(model, optimizer, blocks, trace)
        beside = config.preference.dpo and not config.preference.keeps_reference(config.lora)
        follower = _Follower(trace, blocks, first=REFERENCE if beside else FORWARD)
        with trace.running():
            result = train_step(
                model,
                optimizer,
                batch,
                setup=setup,
                device=device,
                grad_clip=config.optim.grad_clip,
                objective=objective,
                record=trace.mark,
                enter=follower.enter,
            )
        del result
    return trace.collect(owners, len(blocks))
