"""The world in which a step is planned: torch's fake process group, fake tensors, and stand-ins for what reads values.

For a process that does nothing else: what is replaced stays replaced. Each stand-in is named after the trap it avoids;
``tests/parity/test_plan_bytes.py`` or ``tests/unit/test_plan_world.py`` fails without it.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._decomp import decomposition_table
from torch._subclasses import fake_impls, fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from smp.comm.arena import Layout
from smp.comm.settings import read_settings
from smp.parallel import sharding
from smp.parallel.offload import technique as offload_technique
from smp.parallel.tensor import technique as tensor_technique
from smp.plan import fake_cuda
from smp.plan.sdpa import attend

aten = torch.ops.aten
# A pause of the account: torch's DTensor propagates shapes with whole tensors under whatever mode is active.
paused = 0

backend = "gloo"  # of the job that is planned; the group itself is torch's fake one
connected: dict[str, int] = {}  # bytes that smddp shares for a group once it has met, by name
local_ranks: Callable[[Sequence[int]], int] = len  # of a group's ranks, those on one host


class _Done:
    """Work that is done; as smddp's, it holds what it has written."""

    def __init__(self, written: torch.Tensor):
        self._written = written

    def wait(self) -> bool:
        return True


def connect(group: dist.ProcessGroup) -> None:
    """Note the memory that smddp shares for a group from its first collective on."""
    if backend == "smddp" and group.group_name not in connected:
        here = local_ranks(dist.get_process_group_ranks(group))
        arena = Layout.with_scratch(read_settings().scratch, here)
        connected[group.group_name] = arena.total if group.size() > 1 else 0


class _PlannedGather:
    """Stands in for gloo's and smddp's all-gather of ``fully_shard``, with their buffers."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        connect(group)
        return _Done(output_tensor) if async_op else None


class _PlannedScatter:
    """Stands in for their reduce-scatter: smddp's input is shared by the host, gloo receives a part of each peer."""

    def __init__(self, shared: int):
        self._shared, self._input_next = shared, True

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        first, self._input_next = self._input_next, not self._input_next
        if self._shared and first:
            numel = math.prod(int(s) for s in size)
            return torch.empty(numel * self._shared, dtype=dtype, device=device)[:numel]
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> Any:
        connect(group)
        if not self._shared and backend == "gloo" and output_tensor.numel():
            received = [torch.empty_like(output_tensor) for _ in range(group.size() - 1)]
            output_tensor.copy_(input_tensor[: output_tensor.numel()])
            del received
        return _Done(output_tensor) if async_op else None


def _install(module: FSDPModule, group: dist.ProcessGroup, device_type: str, *, shared_buffers: bool = True) -> None:
    """Stand in for :func:`smp.parallel.sharding.install_collectives` on CPUs; GPUs keep torch's own."""
    if device_type != "cpu" or (backend == "smddp" and (not shared_buffers or group.size() == 1)):
        return
    members = dist.get_process_group_ranks(group)
    one_host = local_ranks(members) == len(members)
    module.set_custom_all_gather(_PlannedGather())  # type: ignore[arg-type]
    scatter: Any = _PlannedScatter(len(members) if backend == "smddp" and one_host else 0)
    module.set_custom_reduce_scatter(scatter)


class _PlannedStored:
    """Stands in for a tensor on disk, whose addresses are read."""

    def __init__(self, tensor: torch.Tensor):
        self._like = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        self._tensor: torch.Tensor | None = tensor

    def written(self) -> bool:
        self._tensor = None
        return True

    def load(self) -> Callable[[], torch.Tensor]:
        shape, stride, dtype, device = self._like
        make = functools.partial(torch.empty_strided, shape, stride, dtype=dtype, device=device)
        if device.type == "cuda":  # read into host memory, and copied when it is needed
            return make
        tensor = make()
        return lambda: tensor

    def free(self) -> None:
        self._tensor = None


class _PlannedStore:
    def put(self, tensor: torch.Tensor) -> _PlannedStored:
        return _PlannedStored(tensor)


_build_store = offload_technique.build_store


def _store(directory: str | None) -> Any:
    return _build_store(None) if directory is None else _PlannedStore()


def _pausing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        global paused
        paused += 1
        try:
            return original(*args, **kwargs)
        finally:
            paused -= 1

    return call


def _outside(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return original(*args, **kwargs)

    return call


def _transformers_is_not_tracing() -> None:
    """Keep transformers from taking fake tensors for a compiler's, and making a mask of S x S that no run has."""
    from transformers import masking_utils
    from transformers.utils import import_utils

    for module in (import_utils, masking_utils):
        for name in ("is_tracing", "is_torchdynamo_compiling", "is_torch_fx_proxy"):
            if hasattr(module, name):
                setattr(module, name, lambda *args, **kwargs: False)


@functools.cache
def prepare(device_type: str, capability: tuple[int, int], devices: int, memory: int) -> None:
    """Replace what looks at values or asks other ranks, once in this process."""
    _transformers_is_not_tracing()
    propagate = "_propagate_tensor_meta_non_cached"
    setattr(ShardingPropagator, propagate, _pausing(getattr(ShardingPropagator, propagate)))
    DeviceMesh._concatenate = staticmethod(_outside(DeviceMesh._concatenate))  # type: ignore[method-assign]
    sharding.install_collectives = _install
    tensor_technique.overlap_obstacle = lambda degree, device_type: ""
    if device_type == "cuda":
        # A build for CUDA has a guard that asks its GPUs, which are hidden, and the first fake tensor would use one.
        torch._C._ensureCUDADeviceGuardSet()
        fake_tensor.init_gpu_context = lambda device: None  # type: ignore[assignment]
        # Torch 2.11 has a fake of another operator for it, with which the loss is planned without fp32 products.
        decomposition_table.pop(aten.addmm.dtype_out, None)
        fake_impls.register_op_impl(aten.addmm.dtype_out)(lambda mode, func, *args, out, **options: out)
        fake_cuda.install(devices=devices, memory=memory, capability=capability)
        F.scaled_dot_product_attention = functools.partial(attend, capability)
        torch.nn.functional.scaled_dot_product_attention = F.scaled_dot_product_attention
    offload_technique.build_store = _store
    offload_technique.require_directory = lambda directory: None  # it is one of the job's hosts


@contextlib.contextmanager
def fake_group(world: int, rank: int, local: int, job_backend: str) -> Iterator[None]:
    """Run torch's fake process group for a rank of a job.

    Args:
        world: ranks of the job.
        rank: the planned one.
        local: ranks of a host.
        job_backend: ``nccl``, ``smddp`` or ``gloo``.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    global backend, local_ranks
    backend = job_backend
    local_ranks = lambda members: sum(member // local == rank // local for member in members)  # noqa: E731
    connected.clear()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


class _WithoutValues(FakeTensorMode):
    """Keeps no value of a tensor of one element: torch would compute with it on the planned device, which is absent."""

    def may_turn_const(self, t: torch.Tensor) -> bool:
        return False


def fake_mode() -> FakeTensorMode:
    """Return the mode under which everything is allocated."""
    return _WithoutValues(allow_non_fake_inputs=True)
