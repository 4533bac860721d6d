"""What holds the memory: bytes of live storages by category, over one training step.

A dispatch mode sees every storage when an operation makes it, and a weak reference tells when it is gone. A storage's
category follows from who asked for it (the innermost known function on the stack), and is corrected when more is known:
a tensor that becomes a parameter's gradient was a gradient from the start. So the account is a log of allocations,
and is summed up afterwards.

Why not torch's own trackers (``torch.distributed._tools``): they know ``fully_shard``'s buffers by torch's collectives
alone, not by ours or in shared memory, have no category for logits, and stop at a second forward in one step.
Temporary memory inside one kernel is not seen by either.
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
from smp.plots import plot_memory

MIB = 1024**2

_PLAIN = (torch.Tensor, nn.Parameter)
_CUDA_BLOCK = 512  # the caching allocator rounds up to it

# What train_step's marks say has ended.
_PHASES = {
    "Before train step": "before the step", "After forward": "forward", "After train step": "backward",
    "After opt step": "update",
}  # fmt: skip


class _Held:
    """A storage that lives or has lived; ``category`` may be corrected later."""

    __slots__ = ("category", "nbytes", "reference")

    def __init__(self, category: str, nbytes: int):
        self.category, self.nbytes, self.reference = category, nbytes, None


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """Live bytes by category at one moment of the profile."""

    categories: Mapping[str, int]
    phase: str

    @property
    def total(self) -> int:
        """Their sum."""
        return sum(self.categories.values())


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Live bytes by category over a profile.

    Attributes:
        seconds: of each point, since the beginning. Profiling itself takes part of the time.
        categories: bytes at each point.
        marks: what ended, and when.
    """

    seconds: list[float]
    categories: dict[str, list[int]]
    marks: list[tuple[str, float]]


class MemoryProfile(TorchDispatchMode):
    """The account of one step; :func:`profile_memory` makes it.

    Args:
        model: its parameters and their gradients are known; its output embedding tells what logits look like.
        optimizer: its state is known.
        device: whose memory; tensors elsewhere are not counted.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, device: torch.device):
        super().__init__()
        self._device, self._optimizer = device, optimizer
        self._parameters = list(model.parameters())
        self._buffers = list(model.buffers())
        self._rows = head_rows(model)
        self._live: dict[int, _Held] = {}
        self._log: list[tuple[float, _Held, int]] = []
        self._marks: list[tuple[str, int, float]] = []
        self._start = time.perf_counter()
        self.measured: int | None = None  # the highest sum that the device's allocator has seen
        self.resident = 0  # the highest resident memory of the process
        gc.collect()
        shared = shared_mappings()
        for thing in gc.get_objects():
            if type(thing) in _PLAIN:
                self._see(thing, COMMUNICATION if lies_in(thing, shared) else OTHER)
        self._claim()
        if device.type == "cuda":
            unknown = torch.cuda.memory_allocated(device) - sum(held.nbytes for held in self._live.values())
            self._change(_Held(OTHER, 0), max(unknown, 0))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See what the operation uses and makes."""
        if any(hasattr(t, "__tensor_flatten__") for t in types):
            return NotImplemented  # DTensor and its like: their parts come by themselves
        for thing in tree_leaves((args, kwargs)):
            if type(thing) in _PLAIN:
                self._see(thing, OTHER, ask=True)
        result = func(*args, **(kwargs or {}))
        for thing in (result,) if type(result) is torch.Tensor else tree_leaves(result):
            if type(thing) in _PLAIN:
                self._see(thing, ACTIVATIONS, ask=True)
        if inside := copied_inside(func, args):
            self._change(passing := _Held(COMMUNICATION, 0), inside)
            self._change(passing, 0)
        if func.namespace == "fsdp" and "chunk_cat" in func.__name__:
            for gradient in args[0]:  # whole gradients, on their way into the input of ReduceScatter
                self._claim_as(gradient, UNREDUCED)
        return result

    def mark(self, ended: str) -> None:
        """Say what part of the step has just ended, such as ``"forward"``; the peak is given with that name."""
        self._claim()
        self._measure()
        self._marks.append((_PHASES.get(ended, ended), len(self._log), time.perf_counter() - self._start))

    def peak(self) -> Snapshot:
        """The moment of the highest sum."""
        best, best_index, total = -1, 0, 0
        for index, (_, _, delta) in enumerate(self._log):
            total += delta
            if total > best:
                best, best_index = total, index
        return self._snapshot(best_index)

    def latest(self) -> Snapshot:
        """The last moment: the end of the profile, or now."""
        return self._snapshot(len(self._log) - 1)

    def at(self, ended: str) -> Snapshot:
        """The moment when something was last marked as ended.

        Raises:
            ValueError: it never was.
        """
        last = [index for name, index, _ in self._marks if name == ended]
        if not last:
            raise ValueError(f"nothing was marked as {ended!r}: the marks are {[name for name, _, _ in self._marks]}")
        return self._snapshot(last[-1] - 1)

    def timeline(self, points: int = 2000) -> Timeline:
        """Bytes by category over the profile, thinned out to at most ``points``; the peak stays."""
        stride = -(-len(self._log) // points)
        seconds: list[float] = []
        series: dict[str, list[int]] = {category: [] for category in CATEGORIES}
        now = dict.fromkeys(CATEGORIES, 0)
        best, best_now = -1, dict(now)
        for index, (moment, held, delta) in enumerate(self._log):
            now[held.category] += delta
            if (total := sum(now.values())) > best:
                best, best_now = total, dict(now)
            if (index + 1) % stride == 0 or index + 1 == len(self._log):
                seconds.append(moment)
                for category in CATEGORIES:
                    series[category].append(best_now[category])
                best = -1
        return Timeline(seconds, series, [(ended, moment) for ended, _, moment in self._marks])

    def table(
        self, *, title: str = "What holds the memory at the peak", predicted: Mapping[str, int] | None = None
    ) -> str:
        """The peak as text, one category a line, in MiB and percent.

        Args:
            title: the first line.
            predicted: bytes by category from :func:`smp.memory.plan.estimate_memory`, shown beside.
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
        timeline = self.timeline()
        plot_memory(timeline.seconds, timeline.categories, timeline.marks, png)

    def _snapshot(self, last: int) -> Snapshot:
        categories = dict.fromkeys(CATEGORIES, 0)
        for _, held, delta in self._log[: last + 1]:
            categories[held.category] += delta
        phase = next((ended for ended, index, _ in self._marks if index > last), "the end")
        return Snapshot(categories, phase)

    def _see(self, tensor: torch.Tensor, fallback: str, *, ask: bool = False) -> None:
        if tensor.device.type != self._device.type or tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        held = self._live[key] = _Held((ask and self._asked_for(tensor)) or fallback, 0)
        held.reference = weakref.ref(storage, functools.partial(self._gone, key))  # type: ignore[assignment]
        self._change(held, self._size(storage))

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

    def _change(self, held: _Held, nbytes: int) -> None:
        if nbytes != held.nbytes:
            self._log.append((time.perf_counter() - self._start, held, nbytes - held.nbytes))
            held.nbytes = nbytes

    def _gone(self, key: int, reference: Any) -> None:
        held = self._live.get(key)
        if held is not None and held.reference is reference:
            del self._live[key]
            self._change(held, 0)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        held = self._live.get(storage._cdata)
        if held is not None:
            held.category = asked_by() or held.category
            self._change(held, self._size(storage))

    def _claim_as(self, tensor: Any, category: str) -> None:
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        if not isinstance(tensor, torch.Tensor) or tensor.device.type != self._device.type:
            return
        self._see(tensor, category)
        if held := self._live.get(tensor.untyped_storage()._cdata):
            held.category = category

    def _claim(self) -> None:
        """Say what is known by name."""
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
        """Account for what happens inside."""
        resize, profile = torch.UntypedStorage.resize_, self
        hooks = []
        if self._optimizer is not None:
            hooks.append(self._optimizer.register_step_pre_hook(lambda *_: self._claim()))

        # fully_shard frees gathered parameters so, which no dispatch mode sees; torch's own tracker does the same.
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
            # The callbacks would go on for as long as the parameters live.
            self._live = {}


@contextlib.contextmanager
def profile_memory(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, device: torch.device | None = None
) -> Iterator[MemoryProfile]:
    """Account for the memory of a training step, or of anything else, that runs inside.

    It runs slower, and blocks under ``torch.compile`` run uncompiled. If memory runs out inside, the error carries the
    table as a note.

    Args:
        model: any module, sharded or not.
        optimizer: whose state is to be known as such.
        device: whose memory; None: that of the first parameter.
    """
    if device is None:
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
    profile = MemoryProfile(model, optimizer, device)
    try:
        with profile.running():
            yield profile
    except Exception as error:
        if is_out_of_memory(error):
            error.add_note(profile.table(title="What held the memory at the peak"))
        raise


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the device's or the host's memory is used up."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    words = ("can't allocate memory", "not enough memory", "std::bad_alloc", "out of memory")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def rank_table(peaks: list[Snapshot]) -> str:
    """The peaks of several ranks, one a line, in MiB."""
    head = " ".join(f"{name.split()[0][:12]:>12}" for name in CATEGORIES)
    lines = [f"{'rank':>6} {head} {'sum':>12}"]
    for rank, peak in enumerate(peaks):
        sizes = " ".join(f"{peak.categories[name] / MIB:12.2f}" for name in CATEGORIES)
        lines.append(f"{rank:>6} {sizes} {peak.total / MIB:12.2f}")
    return "\n".join(lines)


def _beside(predicted: Mapping[str, int] | None, name: str) -> str:
    return f"   predicted {predicted[name] / MIB:10.2f} MiB" if predicted and name in predicted else ""
