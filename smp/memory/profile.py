"""Memory profile: bytes of live storages by category, over one training step.

A dispatch mode sees every storage when an operation makes it, and a weak reference tells when it is freed. A storage's
category follows from its allocation site (the innermost known function on the stack), and is corrected later: a tensor
that becomes a parameter's gradient was a gradient from the start. So allocations are logged, and summed afterwards.

Torch's own trackers (``torch.distributed._tools``) know ``fully_shard``'s buffers by torch's collectives alone, not by
smddp's or in shared memory, have no category for logits, and stop at a second forward in one step. Neither sees
temporary memory inside one kernel.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import gc
import time
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from smp.memory.categories import (
    ACTIVATIONS,
    CATEGORIES,
    COMMUNICATION,
    GRADIENTS,
    LOGITS,
    OPTIMIZER,
    OTHER,
    PARAMETERS,
    UNREDUCED,
    asked_by,
    copied_inside,
    head_rows,
    lies_in,
    shared_mappings,
)
from smp.memory.tracker import peak_rss_bytes
from smp.units import MIB

_CUDA_BLOCK = 512  # the caching allocator rounds up to it

# train_step's marks: the phase that has ended.
_PHASES = {
    "Before train step": "before the step", "After forward": "forward", "After train step": "backward",
    "After opt step": "update",
}  # fmt: skip


class _Storage:
    """A storage, live or freed; ``category`` may be corrected later."""

    __slots__ = ("category", "nbytes", "reference")

    def __init__(self, category: str, nbytes: int):
        self.category, self.nbytes, self.reference = category, nbytes, None


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """Live bytes by category at one moment of the profile, and the phase that it is in."""

    categories: Mapping[str, int]
    phase: str

    @property
    def total(self) -> int:
        """Sum of the categories."""
        return sum(self.categories.values())


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Live bytes by category over a profile.

    Attributes:
        seconds: of each point, since the beginning; profiling itself takes part of the time.
        categories: bytes at each point.
        marks: phases, and the seconds when they ended.
    """

    seconds: list[float]
    categories: dict[str, list[int]]
    marks: list[tuple[str, float]]


class MemoryProfile(TorchDispatchMode):
    """Profile of one step; :func:`profile_memory` makes it.

    Args:
        model: gives parameters and gradients; the shape of its output embedding tells logits.
        optimizer: gives the optimizer state, or None.
        device: tensors elsewhere are not counted.
    """

    plain: tuple[type, ...] = (torch.Tensor, nn.Parameter)  # the types of tensors with a storage of their own

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, device: torch.device):
        super().__init__()
        self._device, self._optimizer = device, optimizer
        self._parameters = list(model.parameters())
        self._buffers = list(model.buffers())
        self._rows = head_rows(model)
        self._live: dict[int, _Storage] = {}
        self._log: list[tuple[float, _Storage, int]] = []
        self._marks: list[tuple[str, int, float]] = []
        self._start = time.perf_counter()
        self.measured: int | None = None  # the highest sum by the device's allocator
        self.resident = 0  # the highest resident memory of the process
        gc.collect()
        shared = self._shared_mappings()
        self._claim()  # first, in the model's order; the collector's is another from time to time
        for thing in gc.get_objects():
            if type(thing) in self.plain:
                self._see(thing, COMMUNICATION if lies_in(thing, shared) else OTHER)
        if device.type == "cuda":
            unknown = torch.cuda.memory_allocated(device) - sum(entry.nbytes for entry in self._live.values())
            self._change(_Storage(OTHER, 0), max(unknown, 0))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record the storages that the operation uses and makes."""
        if any(hasattr(t, "__tensor_flatten__") for t in types):
            return NotImplemented  # DTensor and other wrappers: their local tensors are dispatched, too
        for thing in tree_leaves((args, kwargs)):
            if type(thing) in self.plain:
                self._see(thing, OTHER, ask=True)
        result = func(*args, **(kwargs or {}))
        for thing in (result,) if type(result) in self.plain else tree_leaves(result):
            if type(thing) in self.plain:
                self._see(thing, ACTIVATIONS, ask=True)
        if inside := self._copied_inside(func, args):
            self._change(passing := _Storage(COMMUNICATION, 0), inside)
            self._change(passing, 0)
        if func.namespace == "fsdp" and "chunk_cat" in func.__name__:
            for gradient in args[0]:  # whole gradients, copied into the input of ReduceScatter
                self._claim_as(gradient, UNREDUCED)
        return result

    def mark(self, ended: str) -> None:
        """Mark the end of a phase of the step, such as ``"forward"``; the peak is given with its phase."""
        self._claim()
        self._measure()
        self._marks.append((_PHASES.get(ended, ended), len(self._log), time.perf_counter() - self._start))

    def peak(self) -> Snapshot:
        """Return the live bytes at the highest sum."""
        return self._snapshot(int(self._totals().sum(axis=1).argmax()))

    def latest(self) -> Snapshot:
        """Return the live bytes at the end of the profile, or now."""
        return self._snapshot(len(self._log))

    def at(self, ended: str) -> Snapshot:
        """Return the live bytes when a phase was last marked as ended.

        Raises:
            ValueError: it never was.
        """
        last = [changes for name, changes, _ in self._marks if name == ended]
        if not last:
            raise ValueError(f"nothing was marked as {ended!r}: the marks are {[name for name, _, _ in self._marks]}")
        return self._snapshot(last[-1])

    def timeline(self, points: int = 2000) -> Timeline:
        """Return the bytes by category over the profile, at most ``points`` moments; the peak is one of them."""
        totals, seconds = self._totals(), [0.0, *(moment for moment, _, _ in self._log)]
        stride = -(-len(totals) // points)
        sums = totals.sum(axis=1)
        chosen = [start + int(sums[start : start + stride].argmax()) for start in range(0, len(totals), stride)]
        categories = dict(zip(CATEGORIES, totals[chosen].T.tolist(), strict=True))
        marks = [(ended, moment) for ended, _, moment in self._marks]
        return Timeline([seconds[index] for index in chosen], categories, marks)

    def table(
        self, *, title: str = "Memory by category at the peak", predicted: Mapping[str, int] | None = None
    ) -> str:
        """Format the peak, one category a line, in MiB and percent.

        Args:
            title: the first line.
            predicted: bytes by category from :func:`smp.memory.estimate.estimate_memory`, in a further column.
        """
        peak = self.peak()
        lines = [f"{title} ({peak.phase}):"]
        lines += [
            f"{name:>28} {size / MIB:10.2f} MiB {100 * size / max(peak.total, 1):5.1f} %{_beside(predicted, name)}"
            for name, size in peak.categories.items()
        ]
        lines.append(f"{'sum':>28} {peak.total / MIB:10.2f} MiB {100:5.1f} %")
        if self.measured is not None:
            lines.append(f"{'by the allocator':>28} {self.measured / MIB:10.2f} MiB")
        resident = self.resident or peak_rss_bytes()
        lines.append(f"{'process, highest resident':>28} {resident / MIB:10.2f} MiB")
        return "\n".join(lines)

    def plot(self, png: Path) -> None:
        """Draw the timeline.

        Raises:
            UserError: matplotlib is missing.
        """
        from smp.plots import plot_memory  # here, so that `import smp` leaves smp.plots to `python -m smp.plots`

        timeline = self.timeline()
        plot_memory(timeline.seconds, timeline.categories, timeline.marks, png)

    def _totals(self) -> np.ndarray:
        """Return live bytes by category before the first and after each change, ``(changes + 1, categories)``."""
        deltas = np.zeros((len(self._log) + 1, len(CATEGORIES)), np.int64)
        for row, (_, storage, delta) in zip(deltas[1:], self._log, strict=True):
            row[CATEGORIES.index(storage.category)] = delta
        return deltas.cumsum(axis=0)

    def _snapshot(self, changes: int) -> Snapshot:
        """Return the live bytes after so many changes."""
        phase = next((ended for ended, index, _ in self._marks if index >= changes), "the end")
        return Snapshot(dict(zip(CATEGORIES, self._totals()[changes].tolist(), strict=True)), phase)

    def _see(self, tensor: torch.Tensor, fallback: str, *, ask: bool = False) -> None:
        if self._is_elsewhere(tensor) or tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        entry = self._live[key] = _Storage((ask and self._asked_for(tensor)) or fallback, 0)
        entry.reference = weakref.ref(storage, functools.partial(self._gone, key))  # type: ignore[assignment]
        self._change(entry, self._size(storage))

    def _shared_mappings(self) -> list[range]:
        return shared_mappings()

    def _copied_inside(self, operation: Any, args: tuple[Any, ...]) -> int:
        return copied_inside(operation, args)

    def _is_elsewhere(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type != self._device.type

    def _asked_for(self, tensor: torch.Tensor) -> str | None:
        category, shape = asked_by(), tensor.shape
        matrix = tensor.ndim > 1 and tensor.is_floating_point()
        if category in (LOGITS, None) and matrix and shape[-1] in self._rows:
            return LOGITS
        if category == LOGITS and matrix:  # the loss makes gradients at once: of the head, and of the hidden states
            return UNREDUCED if shape[0] in self._rows else ACTIVATIONS
        return category

    def _size(self, storage: torch.UntypedStorage) -> int:
        nbytes = storage.nbytes()
        return -(-nbytes // _CUDA_BLOCK) * _CUDA_BLOCK if self._device.type == "cuda" else nbytes

    def _change(self, entry: _Storage, nbytes: int) -> None:
        if nbytes != entry.nbytes:
            self._log.append((time.perf_counter() - self._start, entry, nbytes - entry.nbytes))
            entry.nbytes = nbytes

    def _gone(self, key: int, reference: Any) -> None:
        entry = self._live.get(key)
        if entry is not None and entry.reference is reference:
            del self._live[key]
            self._change(entry, 0)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        entry = self._live.get(storage._cdata)
        if entry is not None:
            entry.category = asked_by() or entry.category
            self._change(entry, self._size(storage))

    def _claim_as(self, tensor: Any, category: str) -> None:
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        if not isinstance(tensor, torch.Tensor) or self._is_elsewhere(tensor):
            return
        self._see(tensor, category)
        if entry := self._live.get(tensor.untyped_storage()._cdata):
            entry.category = category

    def _claim(self) -> None:
        """Correct the categories of parameters, gradients, optimizer state and buffers."""
        for buffer in self._buffers:
            self._claim_as(buffer, OTHER)
        for parameter in self._parameters:
            self._claim_as(parameter.data, PARAMETERS)
            self._claim_as(parameter.grad, GRADIENTS)
        if self._optimizer is not None:
            for state in self._optimizer.state.values():
                for value in state.values():
                    self._claim_as(value, OPTIMIZER)

    def _measure(self) -> None:
        self.resident = peak_rss_bytes()
        if self._device.type == "cuda":
            self.measured = max(self.measured or 0, torch.cuda.max_memory_allocated(self._device))

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Profile the ``with`` block."""
        resize, profile = torch.UntypedStorage.resize_, self
        hooks = []
        if self._optimizer is not None:
            hooks.append(self._optimizer.register_step_pre_hook(lambda *_: self._claim()))

        # fully_shard frees gathered parameters by resizing, which no dispatch mode sees.
        def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            result = resize(storage, size)
            profile._resized(storage)
            return result

        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]
        try:
            with self:
                yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
            for hook in hooks:
                hook.remove()
            self._claim()
            self._measure()
            # Weak references of live parameters would go on to log.
            self._live = {}


@contextlib.contextmanager
def profile_memory(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, device: torch.device | None = None
) -> Iterator[MemoryProfile]:
    """Profile the memory of the ``with`` block, such as a training step.

    It runs slower, and blocks under ``torch.compile`` run uncompiled. If memory runs out, the error carries the table
    as a note.

    Args:
        model: any module, sharded or not.
        optimizer: to tell its state from other memory.
        device: to profile; None: that of the first parameter.
    """
    if device is None:
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
    profile = MemoryProfile(model, optimizer, device)
    try:
        with profile.running():
            yield profile
    except Exception as error:
        if is_out_of_memory(error):
            error.add_note(profile.table(title="Memory by category at the peak"))
        raise


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that the device or the host is out of memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    texts = ("can't allocate memory", "not enough memory", "std::bad_alloc", "out of memory")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)


def rank_table(peaks: list[Snapshot]) -> str:
    """Format the peaks of several ranks, one a line, in MiB."""
    head = " ".join(f"{name.split()[0][:12]:>12}" for name in CATEGORIES)
    lines = [f"{'rank':>6} {head} {'sum':>12}"]
    for rank, peak in enumerate(peaks):
        sizes = " ".join(f"{peak.categories[name] / MIB:12.2f}" for name in CATEGORIES)
        lines.append(f"{rank:>6} {sizes} {peak.total / MIB:12.2f}")
    return "\n".join(lines)


def _beside(predicted: Mapping[str, int] | None, name: str) -> str:
    return f"   predicted {predicted[name] / MIB:10.2f} MiB" if predicted and name in predicted else ""
