"""Stand-ins of the planned world, each undone for one plan: what goes wrong without it."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from transformers import masking_utils
from transformers.utils import import_utils

from smp.data.data_pipeline import StepBatch
from smp.mesh import Mesh
from smp.parallel import sharding
from smp.parallel.offload import offload
from smp.parallel.offload import technique as offload_technique
from smp.plan import fake_cuda, trace, world
from smp.plan.trace import StepTrace

# As they are before the world is prepared.
_INSTALL_COLLECTIVES = sharding.install_collectives
_CONCATENATE = DeviceMesh._concatenate
_IS_TRACING = import_utils.is_tracing
_SDPA = F.scaled_dot_product_attention
_PROPAGATE = ShardingPropagator._propagate_tensor_meta_non_cached


@contextlib.contextmanager
def _with(owner: Any, name: str, value: Any) -> Iterator[None]:
    now = inspect.getattr_static(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, now)


def _pause() -> contextlib.AbstractContextManager[None]:
    """Count what DTensor's propagation of shapes allocates."""
    return _with(ShardingPropagator, "_propagate_tensor_meta_non_cached", _PROPAGATE)


@contextlib.contextmanager
def _is_tracing() -> Iterator[None]:
    with _with(import_utils, "is_tracing", _IS_TRACING), _with(masking_utils, "is_tracing", _IS_TRACING):
        yield


def _numbers() -> contextlib.AbstractContextManager[None]:
    """Let fake tensors be read."""
    dispatch = StepTrace.__torch_dispatch__

    def passed_on(self: StepTrace, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return func(*args)
        return dispatch(self, func, types, args, kwargs)

    return _with(StepTrace, "__torch_dispatch__", passed_on)


def _mesh() -> contextlib.AbstractContextManager[None]:
    """Join the mesh inside the mode."""
    join = Mesh.join

    def inside(self: Mesh, device_type: str) -> Mesh:
        with world.fake_mode():
            return join(self, device_type)

    return _with(Mesh, "join", inside)


def _concatenate() -> contextlib.AbstractContextManager[None]:
    return _with(DeviceMesh, "_concatenate", staticmethod(_CONCATENATE))


def _collectives() -> contextlib.AbstractContextManager[None]:
    return _with(sharding, "install_collectives", _INSTALL_COLLECTIVES)


def _store() -> contextlib.AbstractContextManager[None]:
    return _with(offload_technique, "build_store", world._build_store)


@contextlib.contextmanager
def _identity() -> Iterator[None]:
    """Tell storages apart by their addresses, as offloading once did."""
    source = inspect.getsource(offload)
    assert "untyped_storage()._cdata" in source
    exec(source.replace("untyped_storage()._cdata", "untyped_storage().data_ptr()"), offload.__dict__)
    with _with(offload_technique, "apply_activation_offload", offload.apply_activation_offload):
        yield
    importlib.reload(offload)


def _device() -> contextlib.AbstractContextManager[None]:
    """Ask fake tensors for their device."""

    def asking(self: StepTrace, tensor: Any) -> bool:
        return tensor.device.type != self._device.type or getattr(tensor, "fake_mode", None) is not self._fake

    return _with(StepTrace, "_is_elsewhere", asking)


def _attention() -> contextlib.AbstractContextManager[None]:
    return _with(F, "scaled_dot_product_attention", _SDPA)


def _streams() -> contextlib.AbstractContextManager[None]:
    """Allocate everything on one stream."""
    return _with(fake_cuda.Stream, "__enter__", lambda self: fake_cuda._streams.stack.append(fake_cuda.default))


WITHOUT: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "pause": _pause, "is_tracing": _is_tracing, "numbers": _numbers, "mesh": _mesh, "concatenate": _concatenate,
    "collectives": _collectives, "store": _store, "identity": _identity, "device": _device, "attention": _attention,
    "streams": _streams,
}  # fmt: skip


def _new_shapes() -> contextlib.AbstractContextManager[None]:
    """Forget the shapes that DTensor has propagated before the step, as torch does when its limit is reached."""
    allocate = trace._allocate_state

    def forgetting(optimizer: torch.optim.Optimizer) -> None:
        allocate(optimizer)
        _clear_sharding_prop_cache()

    return _with(trace, "_allocate_state", forgetting)


def _padding_masks() -> contextlib.AbstractContextManager[None]:
    """Give each batch a padding mask."""
    make = trace._batch

    def masked(job: Any) -> StepBatch:
        batch = make(job)
        for microbatch in batch.microbatches:
            microbatch["attention_mask"] = torch.ones_like(microbatch["input_ids"])
        return batch

    return _with(trace, "_batch", masked)


look_ups = 0  # of the device of a fake tensor, each an operation


@contextlib.contextmanager
def _count_look_ups() -> Iterator[None]:
    global look_ups
    dispatch, look_ups = FakeTensorMode.__torch_dispatch__, 0

    def counting(self: FakeTensorMode, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        global look_ups
        look_ups += func is torch.ops.prim.device.default
        return dispatch(self, func, types, args, kwargs)

    with _with(FakeTensorMode, "__torch_dispatch__", counting):
        yield


# What a step must be like for a trap to show.
WHERE: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "shapes are new": _new_shapes, "batches have padding masks": _padding_masks, "look-ups count": _count_look_ups,
}  # fmt: skip
