"""Stores of offloaded tensors: host memory, or a file on fast disk.

A trace of torch's profiler shows the transfers: ranges ``smp::offload_write``, ``smp::offload_read``, and
``smp::offload_wait`` where the computation waits for one of them.
"""

from __future__ import annotations

import collections
import concurrent.futures
import ctypes
import errno
import os
import tempfile
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch.profiler import record_function

from smp.errors import RankError, UserError

WRITE, READ, WAIT = "smp::offload_write", "smp::offload_read", "smp::offload_wait"  # ranges in a profiler's trace
_ALIGNMENT = 4096
_T = TypeVar("_T")


class Stored(Protocol):
    """A tensor in a store, or in transfer to it."""

    def written(self) -> bool:
        """Wait for the transfer; returns whether the tensor was not changed meanwhile."""

    def load(self) -> Callable[[], torch.Tensor]:
        """Start the transfer to the device; the returned function waits for its end and returns the tensor."""

    def free(self) -> None:
        """Let the store reuse its memory."""


class Store(Protocol):
    """Holds tensors of one rank."""

    def put(self, tensor: torch.Tensor) -> Stored:
        """Start the transfer of a tensor. It must not be changed until :meth:`Stored.written`."""


def _gapless(tensor: torch.Tensor) -> bool:
    """Return whether its elements fill a range of memory, in any order."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _kept_layout(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's shape and strides on the meta device; a tensor with gaps gets contiguous strides.

    Equal strides make kernels compute the same bits.
    """
    if _gapless(tensor):
        return torch.empty_like(tensor, device="meta")
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


# --- host memory


class HostStore:
    """Host memory: pinned and through side streams for a GPU's tensors, plain copies for a CPU's.

    The copies of a GPU's tensors are ordered by events; the host never waits. Buffers are reused.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype], list[tuple[torch.Tensor, Any]]] = collections.defaultdict(list)
        self._streams: dict[torch.device, tuple[Any, Any]] = {}

    def put(self, tensor: torch.Tensor) -> Stored:
        """Start the transfer of a tensor; see :class:`Store`."""
        return _OnHost(self, tensor)

    def streams(self, device: torch.device) -> tuple[Any, Any]:
        """Return the streams to and from the host."""
        if device not in self._streams:
            self._streams[device] = (torch.cuda.Stream(device), torch.cuda.Stream(device))
        return self._streams[device]

    def take(self, numel: int, dtype: torch.dtype, *, pinned: bool) -> tuple[torch.Tensor, Any]:
        """Return a buffer, and the event after which it may be overwritten (None: now)."""
        free = self._free[numel, dtype]
        return free.pop() if free else (torch.empty(numel, dtype=dtype, pin_memory=pinned), None)

    def give_back(self, buffer: torch.Tensor, event: Any) -> None:
        """Let a buffer be reused after ``event``."""
        self._free[buffer.numel(), buffer.dtype].append((buffer, event))


class _OnHost:
    """A tensor in host memory.

    What is in transfer is referenced here until the computing stream waits for the transfer's event, so that its memory
    is not reused too early. ``record_stream`` would hold the memory until the host has seen the event, which is late
    where the host runs ahead.
    """

    def __init__(self, store: HostStore, tensor: torch.Tensor):
        self._store, self._device = store, tensor.device
        self._like, self._last = _kept_layout(tensor), None
        self._buffer, free = store.take(tensor.numel(), tensor.dtype, pinned=self._device.type == "cuda")
        flat = tensor.as_strided((tensor.numel(),), (1,)) if _gapless(tensor) else tensor.reshape(-1)
        self._moving: torch.Tensor | None = flat  # to the host or back
        self._version = flat._version
        if self._device.type != "cuda":
            with record_function(WRITE):
                self._buffer.copy_(flat)
            return
        out, _ = store.streams(self._device)
        self._stream = torch.cuda.current_stream(self._device)
        out.wait_stream(self._stream)  # whose kernels make the tensor
        if free is not None:  # the buffer's last tensor may be on its way to the device: the host has not waited
            out.wait_event(free)
        with torch.cuda.stream(out), record_function(WRITE):
            self._buffer.copy_(flat, non_blocking=True)
            self._last = out.record_event()

    def written(self) -> bool:
        moving, self._moving = self._moving, None
        if moving is not None and self._last is not None:
            # Without the reference, later kernels of this stream may be given the memory, and write to it: they are
            # ordered after the copy, and the host does not wait.
            self._stream.wait_event(self._last)
        return moving is None or moving._version == self._version

    def load(self) -> Callable[[], torch.Tensor]:
        tensor = torch.empty_like(self._like, device=self._device)
        flat = tensor.as_strided((tensor.numel(),), (1,))
        if self._device.type != "cuda":
            with record_function(READ):
                flat.copy_(self._buffer)
            return lambda: tensor
        _, back = self._store.streams(self._device)
        self._stream = torch.cuda.current_stream(self._device)
        # Which allocated the memory: the allocator orders reuse within a stream alone, so kernels that used the block
        # before may still run.
        back.wait_stream(self._stream)
        with torch.cuda.stream(back), record_function(READ):
            back.wait_event(self._last)  # of the copy to the host, on the other stream
            flat.copy_(self._buffer, non_blocking=True)
            event = self._last = back.record_event()
        self._moving, self._version, allocated_on = tensor, tensor._version, self._stream

        def ready() -> torch.Tensor:
            self._moving = None
            using = torch.cuda.current_stream(self._device)
            using.wait_event(event)
            if using != allocated_on:  # there, freed memory would be reused before this stream has read it
                tensor.record_stream(using)
            return tensor

        return ready

    def free(self) -> None:
        self.written()  # what is dropped on its way: a forward that raised, a tensor fetched and never used
        self._store.give_back(self._buffer, self._last)  # not waited for here: the next tensor's stream does


# --- disk


def _nameless_file(directory: Path) -> int:
    try:
        descriptor, path = tempfile.mkstemp(prefix=".smp-offload-", dir=directory)
        os.unlink(path)
    except OSError as error:
        raise UserError(
            f"--offload_dir {directory} cannot be written ({error.strerror}): give a directory on a fast local disk"
        ) from None
    return descriptor


def require_directory(directory: Path) -> None:
    """Check that activations can be offloaded to a directory.

    Raises:
        UserError: it is missing or cannot be written.
    """
    os.close(_nameless_file(directory))


class DiskStore:
    """A file in a directory on fast disk, written and read by two threads.

    The file is unlinked once it is open: the system frees it with the store or the process, even one that is killed.

    Args:
        directory: on a disk with space for the activations of this rank.

    Attributes:
        waits: times that backward waited for a tensor.

    Raises:
        UserError: the directory is missing or cannot be written.
    """

    def __init__(self, directory: Path):
        self.directory, self.descriptor = directory, _nameless_file(directory)
        weakref.finalize(self, os.close, self.descriptor)
        # Reentrant: a garbage collection while it is held may free tensors, which calls give_back.
        self._lock = threading.RLock()
        self.waits = 0
        self._free: dict[int, list[int]] = collections.defaultdict(list)  # by bytes
        self._end = 0
        self.writer = concurrent.futures.ThreadPoolExecutor(1, "smp-offload-write")
        self.reader = concurrent.futures.ThreadPoolExecutor(1, "smp-offload-read")

    def put(self, tensor: torch.Tensor) -> Stored:
        """Start the transfer of a tensor; see :class:`Store`."""
        return _OnDisk(self, tensor)

    def take(self, nbytes: int) -> int:
        """Return the offset of a free range."""
        size = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            if self._free[size]:
                return self._free[size].pop()
            self._end += size
            return self._end - size

    def give_back(self, offset: int, nbytes: int) -> None:
        """Let a range be reused."""
        with self._lock:
            self._free[-(-nbytes // _ALIGNMENT) * _ALIGNMENT].append(offset)

    def write(self, memory: memoryview, offset: int) -> None:
        """Write all of ``memory``, or raise."""
        try:
            while memory:
                done = os.pwrite(self.descriptor, memory, offset)
                memory, offset = memory[done:], offset + done
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            disk = os.statvfs(self.directory)
            raise RankError(
                f"--offload_dir {self.directory} is full: {self._end} bytes of activations so far, "
                f"{disk.f_bavail * disk.f_frsize} bytes free; give a larger disk, or offload less (a smaller batch)"
            ) from None

    def read(self, memory: memoryview, offset: int) -> None:
        """Fill all of ``memory``."""
        while memory:
            done = os.preadv(self.descriptor, [memory], offset)
            if not done:
                raise RuntimeError("offloaded activations are shorter than they were written")
            memory, offset = memory[done:], offset + done


class _OnDisk:
    def __init__(self, store: DiskStore, tensor: torch.Tensor):
        self._store, self._version = store, tensor._version
        self._like, self._device = _kept_layout(tensor), tensor.device
        self._tensor: torch.Tensor | None = tensor
        self._nbytes = tensor.numel() * tensor.element_size()
        self._offset = store.take(self._nbytes)
        self._direct = _gapless(tensor) and tensor.device.type == "cpu"
        # A GPU's tensor, or one with gaps, is copied to the host first.
        source = tensor if self._direct else torch.empty_like(self._like, device="cpu").copy_(tensor)
        self._writing = store.writer.submit(self._write, source)

    def _write(self, source: torch.Tensor) -> None:
        with record_function(WRITE):
            self._store.write(_memory(source, self._nbytes), self._offset)

    def written(self) -> bool:
        _wait(self._writing)  # raises what the thread has raised, such as of a full disk
        # The version counts only where the thread reads the tensor's own memory, and not a copy.
        tensor, self._tensor = self._tensor, None
        return tensor is None or not self._direct or tensor._version == self._version

    def load(self) -> Callable[[], torch.Tensor]:
        host = torch.empty_like(self._like, device="cpu")

        def read() -> torch.Tensor:
            self._writing.result()  # in the reader's thread: this write is waited for, and no later one
            with record_function(READ):
                self._store.read(_memory(host, self._nbytes), self._offset)
            return host

        reading = self._store.reader.submit(read)

        def ready() -> torch.Tensor:
            self._store.waits += not reading.done()
            return _wait(reading).to(self._device)

        return ready

    def free(self) -> None:
        # After the write has ended: a later one of the same range must not overlap it.
        self._writing.add_done_callback(lambda _: self._store.give_back(self._offset, self._nbytes))


def _wait(transfer: concurrent.futures.Future[_T]) -> _T:
    if transfer.done():
        return transfer.result()
    with record_function(WAIT):
        return transfer.result()


def _memory(tensor: torch.Tensor, nbytes: int) -> memoryview:
    """Return the memory of a tensor without gaps; the tensor must live as long."""
    buffer = (ctypes.c_char * nbytes).from_address(tensor.data_ptr())
    return memoryview(buffer).cast("B")


def build_store(directory: str | None) -> Store:
    """Build a store on disk, or in host memory without a directory."""
    return HostStore() if directory is None else DiskStore(Path(directory))
