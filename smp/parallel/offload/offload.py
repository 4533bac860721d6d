"""Offloading block by block, through autograd's hooks for saved tensors.

Forward offloads the tensors that a block saves while the next blocks compute. Backward of block i prefetches those of
the ``horizon`` blocks before it. The last ``horizon`` blocks of a forward keep theirs, which backward needs at once. So
a device holds, besides the computing block, at most ``horizon`` blocks ahead of it, and in forward at most two blocks
whose transfer has not ended.

With activation checkpointing a block saves its input alone. Without, it saves many tensors, of which small ones stay.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

from smp.errors import UserError
from smp.local_shards import local_tensor
from smp.log import get_logger
from smp.parallel.offload.stores import Store, Stored

logger = get_logger(__name__)

MINIMUM_BYTES = 64 * 1024
_LEAVING_BLOCKS = 2  # blocks whose tensors may be in transfer while the next one computes


class _Entry:
    """A saved tensor that is offloaded; autograd references it.

    Args:
        origin: its storage, whose identity is not reused while this reference lives.
    """

    def __init__(self, group: _Group, stored: Stored, origin: StorageWeakRef):
        self.group, self.stored, self.origin = group, stored, origin
        self.saved = 0  # times that autograd has saved it, and so will unpack it
        self._loading: Callable[[], torch.Tensor] | None = None
        self._loaded: torch.Tensor | None = None
        # Of `stored` alone: a callback that references the entry would keep it alive. Autograd drops entries that no
        # backward has unpacked, too, after a forward that raised, and those must not keep the store's memory.
        weakref.finalize(self, stored.free)

    def fetch(self) -> None:
        """Start the transfer to the device, unless it was started."""
        if self._loading is None and self._loaded is None:
            # Before `load`, from which the host store has the version of the tensor that it returns: a change in place
            # of the original would go unnoticed.
            self.settle()
            self._loading = self.stored.load()

    def settle(self) -> None:
        """Wait for the transfer to the store."""
        if not self.stored.written():
            raise RuntimeError(
                "a tensor that backward needs was changed in place while it was being offloaded: change a copy"
            )

    def tensor(self) -> torch.Tensor:
        """Return the tensor on the device; hold it until every saved reference is unpacked."""
        if self._loaded is None:
            self.fetch()
            loading, self._loading = self._loading, None
            self._loaded = loading()  # type: ignore[misc]
            self._references = self.saved
        # Of a graph that is retained, autograd keeps the entry, and `_loaded` would keep the tensor on the device: a
        # second backward loads it once more.
        tensor, self._references = self._loaded, self._references - 1
        if not self._references:
            self._loaded = None
        return tensor


class _Kept(NamedTuple):
    """A saved tensor of one of the last blocks: it stays, but unpacking it starts the prefetch of others."""

    run: _Run
    block: int
    tensor: torch.Tensor


class _Group:
    """Offloaded tensors of one block in one forward."""

    def __init__(self, run: _Run, index: int):
        self.run, self.index, self._fetched = run, index, False
        # Weak: autograd alone decides how long a saved tensor is needed.
        self._entries: weakref.WeakValueDictionary[tuple[Any, ...], _Entry] = weakref.WeakValueDictionary()

    def put(self, tensor: torch.Tensor, store: Store) -> _Entry:
        """Offload a tensor, once for all times that it is saved."""
        origin = StorageWeakRef(tensor.untyped_storage())
        view = (tensor.storage_offset(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        # By version: storage that a block has changed in place between two saves contains two values.
        key = (origin.cdata, *view, tensor._version)
        entry = self._entries.get(key)
        if entry is None or entry.origin.expired():
            entry = self._entries[key] = _Entry(self, store.put(tensor), origin)
        entry.saved += 1
        return entry

    def settle(self) -> None:
        """Wait for all transfers to the store."""
        for entry in list(self._entries.values()):
            entry.settle()

    def fetch(self) -> None:
        """Start all transfers to the device, the first time; a second backward fetches tensors one by one."""
        if self._fetched:
            return
        self._fetched = True
        for entry in list(self._entries.values()):
            entry.fetch()


class _Run:
    """One forward through all blocks, and its backward."""

    def __init__(self, horizon: int):
        self.horizon = horizon
        self.groups: dict[int, weakref.ref[_Group]] = {}

    def reached(self, index: int) -> None:
        """Prefetch the blocks before this one, which backward has reached."""
        # In the order of use: a store returns tensors one after the other, on one stream or by one thread.
        for ahead in range(index, max(-1, index - self.horizon - 1), -1):
            group = self.groups.get(ahead, lambda: None)()
            if group is not None:
                group.fetch()


class _Offloader:
    def __init__(self, blocks: Sequence[nn.Module], store: Store, *, horizon: int, minimum: int):
        self.blocks, self.store, self.horizon, self.minimum = list(blocks), store, horizon, minimum
        self.run = _Run(horizon)
        for index, block in enumerate(self.blocks):
            self._wrap(index, block)

    def _wrap(self, index: int, block: nn.Module) -> None:
        forward = block.forward

        def offloaded(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            # Backward asks the run that its closures have, not the latest: of two forwards before a backward, each
            # prefetches its tensors.
            if index == 0:
                self.run = _Run(self.horizon)
            run = self.run
            if index >= len(self.blocks) - self.horizon:
                with torch.autograd.graph.saved_tensors_hooks(lambda tensor: _Kept(run, index, tensor), _unpack):
                    return forward(*args, **kwargs)
            # Structural, not bookkeeping: a transfer references its tensor until it is settled. Without this line all
            # blocks' activations would stay on the device until backward.
            if (leaving := run.groups.get(index - _LEAVING_BLOCKS, lambda: None)()) is not None:
                leaving.settle()
            group = _Group(run, index)
            run.groups[index] = weakref.ref(group)  # which references the run: no cycle for the garbage collector
            kept = self._kept(block, args, kwargs)

            def pack(tensor: torch.Tensor) -> Any:
                plain = type(tensor) in (torch.Tensor, FakeTensor) and tensor.device.type != "meta"
                if not plain or tensor.nbytes < self.minimum or tensor.untyped_storage()._cdata in kept:
                    return tensor
                return group.put(tensor.detach(), self.store)  # a transfer must not reference the graph

            with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
                return forward(*args, **kwargs)

        block.forward = offloaded  # type: ignore[method-assign]

    @staticmethod
    def _kept(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
        """Return the storages that stay: parameters, and inputs that all blocks share (all but the first).

        Not by address, which fake tensors lack and empty ones share.
        """
        first = kwargs.get("hidden_states", args[0] if args else None)
        shared = [value for value in (*args, *kwargs.values()) if value is not first]
        found = {storage for value in shared for storage in _storages(value)}
        return found | {local_tensor(p).untyped_storage()._cdata for p in block.parameters()}


def _storages(value: Any) -> list[int]:
    if isinstance(value, torch.Tensor):
        return [value.untyped_storage()._cdata]
    return [storage for item in value for storage in _storages(item)] if isinstance(value, (tuple, list)) else []


def _unpack(saved: Any) -> torch.Tensor:
    if isinstance(saved, _Kept):
        saved.run.reached(saved.block)
        return saved.tensor
    if isinstance(saved, _Entry):
        # First all prefetches, as `tensor` may block until this one has arrived.
        saved.group.run.reached(saved.group.index)
        return saved.tensor()
    return saved


def apply_activation_offload(
    blocks: Sequence[nn.Module], store: Store, *, horizon: int = 2, minimum_bytes: int = MINIMUM_BYTES
) -> None:
    """Offload the tensors that each block saves for backward, in place; after checkpointing, before sharding.

    Args:
        blocks: in the order of the forward; each gets its hidden states as its first argument.
        horizon: blocks ahead of the computing one whose tensors may be on the device; at least 1.
        minimum_bytes: smaller tensors stay.

    Raises:
        UserError: a horizon below 1.
    """
    if horizon < 1:
        raise UserError(f"activation_loading_horizon must be at least 1, got {horizon}: 1 keeps least on the device")
    if horizon >= len(blocks):
        logger.warning(
            "Nothing is offloaded: the model has %d blocks, and activation_loading_horizon keeps the last %d.",
            len(blocks), horizon,
        )  # fmt: skip
    _Offloader(blocks, store, horizon=horizon, minimum=minimum_bytes)
