"""One training step of a rank, run on fake tensors: every storage's bytes, every operation and every collective.

The job's own code runs: ``apply_techniques``, ``build_optimizer`` and ``train_step``, under the memory profile that a
real run uses. The account therefore is a real run's, to the byte, as far as operations show what they allocate.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._pytree import tree_leaves

from smp.config import ActivationConfig, ParallelConfig
from smp.data.data_pipeline import StepBatch
from smp.delayed_init import build_on_meta, materialize_
from smp.memory.categories import OTHER, copied_inside
from smp.memory.profile import MemoryProfile, _Storage
from smp.mesh import Mesh
from smp.models.registry import build_model
from smp.parallel.linear import local_tensor
from smp.parallel.parallelize import apply_techniques
from smp.parallel.technique import Setup, model_blocks
from smp.plan import fake_cuda, workspace, world
from smp.plan.records import Exchange, Operation, TensorShape
from smp.train.optimizer import build_optimizer
from smp.train.run_plan import Job
from smp.train.step import train_step

aten = torch.ops.aten
BEGIN, FORWARD, BACKWARD, UPDATE = "begin", "forward", "backward", "update"


class Place(NamedTuple):
    """A part of the step: its micro-batch, phase, and the block or None."""

    microbatch: int
    phase: str
    block: int | None
    part: str = ""  # between blocks: "embedding", "head", ...


class Birth(NamedTuple):
    """A storage: where it was first allocated, after how many others there, its category and stream."""

    place: Place
    rank: int
    storage: _Storage
    stream: str


class Change(NamedTuple):
    """A change of a storage's bytes."""

    place: Place
    birth: int  # index of the storage in ``Trace.births``
    delta: int


class Trace(NamedTuple):
    """What a rank's step allocates and does.

    Attributes:
        blocks: of the traced model.
        initial: storages that exist before the step, as (block or None, category, bytes), in the order of their making.
        births, changes: of storages; those of ``initial`` come first in both.
        events: operations and collectives by place, in the order of the places.
        shared: bytes of ``initial`` that the ranks of a host share.
        parameters: this rank's, of one block in the middle.
        groups: of each axis with more than one rank: ranks, and those of them on this rank's host.
    """

    blocks: int
    births: list[Birth]
    changes: list[Change]
    owners: list[int | None]  # of the first births, which exist before the step: the block
    events: dict[Place, list[Operation | Exchange]]
    shared: int
    groups: dict[str, tuple[int, int]]
    parameters: tuple[TensorShape, ...]


def _shape(tensor: torch.Tensor) -> TensorShape:
    return TensorShape(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


# Nothing is computed in these. fmt: off
_VIEWS = frozenset(
    {
        "view",
        "t",
        "transpose",
        "slice",
        "expand",
        "unsqueeze",
        "squeeze",
        "detach",
        "as_strided",
        "alias",
        "_unsafe_view",
        "split",
        "split_with_sizes",
        "select",
        "permute",
        "unbind",
        "_reshape_alias",
        "lift_fresh",
        "resize_",
        "set_",
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "record_stream",
        "is_pinned",
    }
)
# fmt: on


class StepTrace(MemoryProfile):
    """The memory profile of a step on fake tensors, which also notes where, on which stream, and what else happens."""

    plain = (FakeTensor,)

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        device: torch.device,
        mode: FakeTensorMode,
        length: int,
        capability: tuple[int, int] | None = None,
    ):
        self.place = Place(0, BEGIN, None)
        self._fake, self._length = mode, length
        self._places: list[Place] = []
        self._streams: dict[int, str] = {}
        self._births: dict[int, tuple[Place, int]] = {}
        self._counts: dict[Place, int] = {}
        self._order: list[_Storage] = []
        self.events: dict[Place, list[Operation | Exchange]] = {}
        self.axes: dict[str, str] = {}
        self.groups: dict[str, tuple[int, int]] = {}
        self._capability, self._has_cublas = capability, False
        super().__init__(model, optimizer, device)
        if device.type == "cpu":  # the ranks of torch's device mesh, int32
            self._change(_Storage(OTHER, 0), 4 * dist.get_world_size())
        self.initial = len(self._order)

    # --- the account

    def _change(self, entry: _Storage, nbytes: int) -> None:
        before = len(self._log)
        super()._change(entry, nbytes)
        if len(self._log) == before:
            return
        self._places.append(self.place)
        if id(entry) not in self._births:
            index = self._counts[self.place] = self._counts.get(self.place, -1) + 1
            self._births[id(entry)] = (self.place, index)
            self._streams[id(entry)] = self._stream()
            self._order.append(entry)

    def _stream(self) -> str:
        return fake_cuda.current_stream().name if self._device.type == "cuda" else ""

    def _is_elsewhere(self, tensor: torch.Tensor) -> bool:
        if isinstance(tensor, FakeTensor):  # whose `.device` is an operation
            return tensor.fake_device.type != self._device.type or tensor.fake_mode is not self._fake
        return True  # a real one has no place in a plan

    def _copied_inside(self, operation: Any, args: tuple[Any, ...]) -> int:
        return copied_inside(operation, args, backend=world.backend)

    def _shared_mappings(self) -> list[range]:
        return []

    def _measure(self) -> None:
        pass

    def collect(self, owners: dict[int, int], blocks: int, parameters: tuple[TensorShape, ...]) -> Trace:
        """Return the trace.

        Args:
            owners: the blocks of storages that exist before the step, by ``id``.
            blocks: how many.
            parameters: of one block.
        """
        numbers = {id(entry): number for number, entry in enumerate(self._order)}
        births = [Birth(*self._births[id(entry)], entry, self._streams[id(entry)]) for entry in self._order]
        changes = [
            Change(place, numbers[id(entry)], delta)
            for place, (_, entry, delta) in zip(self._places, self._log, strict=True)
        ]
        for entry in self._order:
            entry.reference = None  # which holds this profile, and with it the model
        held = [owners.get(id(entry)) for entry in self._order[: self.initial]]
        return Trace(blocks, births, changes, held, self.events, sum(world.connected.values()), self.groups, parameters)

    # --- operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer what reads values, and note everything else."""
        if func is aten._local_scalar_dense.default:
            return self._number(args[0].dtype)
        if any(hasattr(t, "__tensor_flatten__") for t in types):
            return NotImplemented
        kwargs = kwargs or {}
        if world.paused:
            return func(*args, **kwargs)
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._faked, (args, kwargs))
        name = func._schema.name
        if self._capability is not None and not self._has_cublas and workspace.is_product(name):
            self._has_cublas, place, self.place = True, self.place, Place(0, BEGIN, None)  # of no block
            self._change(_Storage(OTHER, 0), workspace.cublas_bytes(self._capability))
            self.place = place
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self._capability is not None:
            inside = workspace.inside(name, [t for t in tree_leaves(args) if isinstance(t, torch.Tensor)])
            if inside:
                self._change(passing := _Storage(OTHER, 0), inside)
                self._change(passing, 0)
        if name.startswith(("c10d::", "smp::reduce_tokens", "symm_mem::")):
            self._collective(name, args, result)
        elif name.partition("::")[2] not in _VIEWS and func.namespace not in ("prim", "profiler"):
            self._operation(str(func), args, kwargs, result)
        return result

    def _faked(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, FakeTensor) or tensor.is_meta else self._fake.from_tensor(tensor)

    def _number(self, dtype: torch.dtype) -> float | bool:
        """Return what is read from a fake tensor: labels have no gaps, masks no padding, no rank raises a flag."""
        name = _caller()
        if dtype is torch.bool:
            return not name.endswith("smp/parallel/loss.py")
        if name.endswith("train/step.py"):
            return self._length
        return 1.0 if dtype.is_floating_point else 0 if "/faults/" in name else 1

    def _operation(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        inputs = tuple(_shape(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor))
        outputs = tuple(_shape(t) for t in tree_leaves(result) if isinstance(t, torch.Tensor))
        self.events.setdefault(self.place, []).append(Operation(name, inputs, outputs))

    # --- collectives

    def _collective(self, name: str, args: Any, result: Any) -> None:
        kind = next((k for k in ("all_to_all", "alltoall", "reduce_scatter", "reduce_tokens", "gather", "all_reduce",
                                 "allreduce", "broadcast") if k in name), None)  # fmt: skip
        if kind is None:
            return
        tensors = [t for t in tree_leaves(args) if isinstance(t, torch.Tensor)]
        nbytes = max((t.nbytes for t in tensors), default=0)
        group = self._group_of(args)
        if name == "smp::reduce_tokens":
            kind = "reduce_scatter" if args[2] > 1 else "all_reduce"
        known = {"gather": "all_gather", "allreduce": "all_reduce", "alltoall": "all_to_all"}
        if group is not None:
            world._connect(group)
            self.exchange(known.get(kind, kind), nbytes, group)

    def _group_of(self, args: Any) -> dist.ProcessGroup | None:
        for each in tree_leaves(args):
            if isinstance(each, torch.ScriptObject):
                with contextlib.suppress(RuntimeError, TypeError):
                    return dist.ProcessGroup.unbox(each)
            if isinstance(each, str):
                with contextlib.suppress(RuntimeError, KeyError, ValueError, TypeError):
                    return dist.distributed_c10d._resolve_process_group(cast(Any, each))
        return None

    def exchange(self, kind: str, nbytes: int, group: dist.ProcessGroup) -> None:
        """Note a collective."""
        if group.size() == 1:
            return
        beside = self._device.type == "cuda" and fake_cuda.current_stream() is not fake_cuda.default
        axis = self.axes.get(group.group_name, "world")
        self.events.setdefault(self.place, []).append(Exchange(kind, nbytes, group.size(), axis, beside))


def _caller() -> str:
    """Return the file of the innermost line of smp, transformers or torch's optimizers on the stack."""
    frame = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if ("/smp/" in path and "/smp/plan/" not in path) or "/transformers/" in path:
            return path
        frame = frame.f_back  # type: ignore[assignment]
    return ""


class _Follower:
    """Follows a step through its micro-batches, phases and blocks."""

    def __init__(self, trace: StepTrace, blocks: list[nn.Module]):
        self.trace, self._microbatch, self._phase = trace, -1, BEGIN
        for index, block in enumerate(blocks):
            block.forward = functools.partial(self._block, index, len(blocks), block.forward)  # type: ignore[method-assign]

    def _go(self, phase: str, block: int | None, part: str = "") -> None:
        self._phase = phase
        self.trace.place = Place(max(self._microbatch, 0), phase, block, part)

    def enter(self, phase: str) -> None:
        """Follow ``train_step``'s own marks."""
        if phase == "forward":
            self._microbatch += 1
            self._go(FORWARD, None, "embedding")
        elif phase == "backward":
            self._go(BACKWARD, None, "head")
        elif phase == "optimizer":
            self._go(UPDATE, None)

    def _block(self, index: int, count: int, forward: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or self._phase != FORWARD:
            return forward(*args, **kwargs)
        self._go(FORWARD, index)
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
            self._go(FORWARD, None, "head")
        return result


def _allocate_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer's state, as its first step does."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _batch(job: Job) -> StepBatch:
    """Make a rank's micro-batches of the job, fake, on the host."""
    config = job.config
    size, length = config.run.train_batch_size, job.model.sequence_length
    samples = config.run.global_batch_size or size * job.mesh.data.size * config.run.gradient_accumulation_steps
    count = -(-samples // (job.mesh.data.size * size))

    def microbatch() -> dict[str, torch.Tensor]:
        made = {name: torch.empty(size, length, dtype=torch.int64) for name in ("input_ids", "labels")}
        if config.data.document_mask:
            made["position_ids"] = torch.empty(size, length, dtype=torch.int64)
            made["document_bounds"] = torch.empty(size + 1, dtype=torch.int32)
        return made

    return StepBatch([microbatch() for _ in range(count)], torch.empty(size * count, dtype=torch.int64))


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


def _name_groups(trace: StepTrace, mesh: Mesh) -> None:
    """Tell the trace the axis of each group."""
    roles = {"data": mesh.data, "tp": mesh.tp, "replicas": mesh.replicas, "shard": mesh.shard}
    for axis, role in roles.items():
        trace.axes[role.group.group_name] = axis
        if role.size > 1:
            trace.groups[axis] = (role.size, world.local_ranks(dist.get_process_group_ranks(role.group)))


def trace_step(job: Job, capability: tuple[int, int] | None = None) -> Trace:
    """Trace one step of a rank; :func:`smp.plan.world.fake_group` runs, and no other mode.

    Args:
        job: its mesh is laid out for the rank.
        capability: of the GPU, whose kernels' workspaces are counted.
    """
    mesh, settings, resolved = job.mesh.join(job.device.type), job.setup.settings, job.model
    build = functools.partial(build_model, resolved.hf_config, attn_implementation=resolved.attn_implementation)
    model, device, mode = build_on_meta(build), torch.device(job.device.type), world.fake_mode()
    _replace_buffers(model, mode.from_tensor)  # fully_shard moves them to the device
    with mode:
        apply_techniques(model, Setup(resolved.family, mesh, settings, job.dtype, job.device.type))
    config, blocks = job.config, model_blocks(model, resolved.family)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mode)
        cpu_offload = settings[ActivationConfig].cpu_offload
        materialize_(model, torch.device("cpu") if cpu_offload else device)
        _replace_buffers(model, lambda buffer: buffer.to(device))
        model.train()
        optimizer = build_optimizer(model, config.optim, lr=config.lr.lr)
        _allocate_state(optimizer)
        batch = _batch(job)
        trace = StepTrace(model, optimizer, device, mode, resolved.sequence_length, capability)
        _name_groups(trace, mesh)
        owners = _owners(model, optimizer, blocks, trace)
        follower = _Follower(trace, blocks)
        world.exchanged = trace.exchange
        stack.callback(setattr, world, "exchanged", world.nothing_exchanged)  # else it holds a model that failed
        with trace.running():
            result = train_step(
                model,
                optimizer,
                batch,
                device=device,
                grad_clip=config.optim.grad_clip,
                loss_group=mesh.loss.group,
                defer_sync=config.parallel.defer_gradient_sync,
                keep_gathered=not settings[ParallelConfig].reshard_between_microbatches,
                record=trace.mark,
                enter=follower.enter,
            )
        del result
    parameters = tuple(_shape(local_tensor(p)) for p in blocks[len(blocks) // 2].parameters())
    return trace.collect(owners, len(blocks), parameters)
