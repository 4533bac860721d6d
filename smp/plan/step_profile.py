"""The memory profile of a step on fake tensors: where each storage is made."""

from __future__ import annotations

import contextlib
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._pytree import tree_leaves

from smp.memory.categories import OTHER, copied_inside
from smp.memory.profile import MemoryProfile, _Storage
from smp.plan import fake_cuda, workspace, world
from smp.plan.events import BEGIN, Allocation, AllocationEvent, StepPhase, Trace

aten = torch.ops.aten


class StepTrace(MemoryProfile):
    """The memory profile of a step on fake tensors, which also notes where, and on which stream."""

    plain = (FakeTensor,)

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        device: torch.device,
        mode: FakeTensorMode,
        capability: tuple[int, int] | None = None,
    ):
        self.point = StepPhase(0, BEGIN, None)
        self._fake = mode
        self._points: list[StepPhase] = []
        self._streams: dict[int, str] = {}
        self._allocations: dict[int, tuple[StepPhase, int]] = {}
        self._counts: dict[StepPhase, int] = {}
        self._order: list[_Storage] = []
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
        self._points.append(self.point)
        if id(entry) not in self._allocations:
            index = self._counts[self.point] = self._counts.get(self.point, -1) + 1
            self._allocations[id(entry)] = (self.point, index)
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

    def collect(self, owners: dict[int, int], blocks: int) -> Trace:
        """Return the trace.

        Args:
            owners: the blocks of storages that exist before the step, by ``id``.
        """
        numbers = {id(entry): number for number, entry in enumerate(self._order)}
        allocations = [
            Allocation(*self._allocations[id(entry)], entry, self._streams[id(entry)]) for entry in self._order
        ]
        changes = [
            AllocationEvent(point, numbers[id(entry)], delta)
            for point, (_, entry, delta) in zip(self._points, self._log, strict=True)
        ]
        for entry in self._order:
            entry.reference = None  # which holds this profile, and with it the model
        initial = [owners.get(id(entry)) for entry in self._order[: self.initial]]
        return Trace(blocks, allocations, changes, initial, sum(world.connected.values()))

    # --- operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer what reads values, and count what kernels allocate inside."""
        if func is aten._local_scalar_dense.default:
            return 1.0 if args[0].dtype.is_floating_point else 1  # masks have no padding, counts are above 0
        if any(hasattr(t, "__tensor_flatten__") for t in types):
            return NotImplemented
        kwargs = kwargs or {}
        if world.paused:
            return func(*args, **kwargs)
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._faked, (args, kwargs))
        name = func._schema.name
        if self._capability is not None and not self._has_cublas and workspace.is_product(name):
            self._has_cublas, before, self.point = True, self.point, StepPhase(0, BEGIN, None)  # of no block
            self._change(_Storage(OTHER, 0), workspace.cublas_bytes(self._capability))
            self.point = before
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self._capability is not None:
            inside = workspace.inside(name, [t for t in tree_leaves(args) if isinstance(t, torch.Tensor)])
            if inside:
                self._change(passing := _Storage(OTHER, 0), inside)
                self._change(passing, 0)
        if name.startswith(("c10d::", "smp::reduce_tokens", "symm_mem::")):
            self._collective(name, args)
        return result

    def _faked(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, FakeTensor) or tensor.is_meta else self._fake.from_tensor(tensor)

    # --- collectives

    def _collective(self, name: str, args: Any) -> None:
        """Note the memory that smddp shares for the group; exchanges of all with all it leaves to gloo."""
        moves = any(kind in name for kind in ("reduce_scatter", "reduce_tokens", "gather", "all_reduce", "allreduce",
                                              "broadcast"))  # fmt: skip
        group = self._group_of(args) if moves else None
        if group is not None:
            world.connect(group)

    def _group_of(self, args: Any) -> dist.ProcessGroup | None:
        for each in tree_leaves(args):
            if isinstance(each, torch.ScriptObject):
                with contextlib.suppress(RuntimeError, TypeError):
                    return dist.ProcessGroup.unbox(each)
            if isinstance(each, str):
                with contextlib.suppress(RuntimeError, KeyError, ValueError, TypeError):
                    return dist.distributed_c10d._resolve_process_group(cast(Any, each))
        return None
