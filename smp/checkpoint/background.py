"""Write a rank's part of a checkpoint, at once or in a background thread.

Parameters and optimizer state change in the optimizer's update alone. So a thread copies them during the next forward
and backward pass, and only that update waits for the copy. On a GPU its stream waits, and the host does not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from smp.checkpoint.manifest import Manifest
from smp.checkpoint.outcome import attempt
from smp.checkpoint.safetensors_io import Piece
from smp.checkpoint.shards import Snapshot
from smp.checkpoint.writer import write_part
from smp.errors import RunError, UserError
from smp.units import readable

_ALIGNMENT = 512  # of a tensor in page-locked memory
_PORTABLE = 1  # cudaHostRegisterPortable


def to_host(pieces: list[Piece]) -> list[Piece]:
    """Return the tensors on the CPU; those that are on it already without a copy."""
    return [piece._replace(tensor=piece.tensor.cpu().contiguous()) for piece in pieces]


def _pinned(nbytes: int) -> torch.Tensor:
    """Return page-locked host memory: one range, as locking takes long.

    Not of ``pin_memory``, whose allocator rounds up to powers of two. Shared memory, as a fork would part private pages
    from those that the GPU writes to.

    Raises:
        UserError: the system or the driver refuses.
    """
    try:
        memory = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
        status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), nbytes, _PORTABLE))
        why = f"CUDA error {status}" if status else ""
    except OSError as error:
        why = str(error.strerror)
    else:
        if status:
            with contextlib.suppress(RuntimeError, AssertionError):  # takes the error from the next kernel
                torch.zeros(1, device="cuda")
    if why:
        raise UserError(
            f"{readable(nbytes)} of host memory for asynchronous checkpoints could not be page-locked ({why}): run "
            f"fewer processes on a host, or use --checkpoint_type sharded, which needs none"
        )
    return memory


def _unpin(memory: torch.Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


class HostCopies:
    """Buffers in host memory that are kept from one save to the next: page-locked for a GPU."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def __bool__(self) -> bool:
        return bool(self._buffers)

    def reserve(self, pieces: list[Piece]) -> int:
        """Make the buffers that are missing, and return their bytes.

        Raises:
            UserError: they cannot be page-locked.
        """
        missing = [piece for piece in pieces if not _fits(self._buffers.get(piece.name), piece.tensor)]
        ranges = [-(-piece.tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for piece in missing if piece.tensor.is_cuda]
        if ranges:
            memory = _pinned(sum(ranges))
            # The callback references the memory, which must be unregistered before it is unmapped. Not as the process
            # ends, whose memory is freed anyway.
            weakref.finalize(self, _unpin, memory).atexit = False
            free = iter(memory.split(ranges))
        for name, tensor, _ in missing:
            if tensor.is_cuda:
                self._buffers[name] = next(free)[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            else:
                self._buffers[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        return sum(piece.tensor.nbytes for piece in missing)

    def __call__(self, pieces: list[Piece]) -> list[Piece]:
        """Copy to the buffers; from a GPU asynchronously, on the current stream."""
        # [Note: Reuse of host buffers] A write reads them until it has ended. No file gets parts of two steps, as the
        # checkpointer publishes, and so waits for, the last write before it copies for the next.
        self.reserve(pieces)
        for name, tensor, _ in pieces:
            if tensor is not self._buffers[name]:
                self._buffers[name].copy_(tensor, non_blocking=True)
        return [piece._replace(tensor=self._buffers[piece.name]) for piece in pieces]


def _fits(buffer: torch.Tensor | None, tensor: torch.Tensor) -> bool:
    return buffer is not None and buffer.shape == tensor.shape and buffer.dtype == tensor.dtype


class PendingWrite:
    """This rank's part of a checkpoint that is being written.

    Args:
        manifest: all but files and tensors.
        snapshot: of the tensors themselves, which must not change before :meth:`wait_for_copy` returns.
        copy: brings them to the CPU.
        check: read the files back.
        device: the GPU that the snapshot is copied from; None: there is none.

    Attributes:
        rank: that writes it.
        seconds: that it took, when it has ended.
    """

    def __init__(
        self,
        temporary: Path,
        manifest: Manifest,
        snapshot: Snapshot,
        *,
        copy: Callable[[list[Piece]], list[Piece]],
        check: bool,
        device: torch.device | None,
    ):
        self.temporary, self.manifest, self.seconds = temporary, manifest, 0.0
        self._snapshot, self._copy, self._check, self.rank = snapshot, copy, check, dist.get_rank()
        self._outcome: BaseException | None = RunError("the thread that wrote it has died")
        self._copied = threading.Event()  # on a GPU: the copy has been asked for, and `_event` is set
        self._device = device
        self._event: Any = None
        self._thread: threading.Thread | None = None

    def run(self) -> None:
        """Write; what fails is kept in :attr:`failure`."""
        begun = time.perf_counter()
        self._outcome = attempt(self._write, (self.temporary.parent, self._snapshot.nbytes))
        self.seconds = time.perf_counter() - begun

    def start(self) -> None:
        """Begin :meth:`run` in a thread."""
        # Recorded here: a stream is current for a thread, and the new one would wait for another than that of training.
        ready = None if self._device is None else torch.cuda.current_stream(self._device).record_event()

        def work() -> None:
            try:
                with contextlib.ExitStack() as stack:
                    if ready is not None:
                        stack.enter_context(torch.cuda.device(self._device))
                        stream = torch.cuda.Stream()
                        stack.enter_context(torch.cuda.stream(stream))
                        stream.wait_event(ready)
                    self.run()
            finally:
                self._copied.set()  # also where it has not come to that

        # A daemon: a process that must leave at once does not wait for its disk.
        self._thread = threading.Thread(target=work, name="smp-checkpoint", daemon=True)
        self._thread.start()

    def _write(self) -> None:
        copied = dataclasses.replace(self._snapshot, pieces=self._copy(self._snapshot.pieces))
        if self._device is not None:
            done = torch.cuda.Event(blocking=True)  # the thread sleeps
            self._event = torch.cuda.current_stream(self._device).record_event(done)
        # After `_event`, which `wait_for_copy` reads without a lock. Set earlier, the update would change what the copy
        # is still to read.
        self._copied.set()
        if self._event is not None:
            self._event.synchronize()  # the host memory that is written has no values before
        write_part(self.temporary, copied.pieces, copied.shapes, rank=self.rank, check=self._check)

    def wait_for_copy(self) -> None:
        """Return when the tensors may change; on a GPU by what the current stream is given to do from now on."""
        self._copied.wait()
        if self._event is not None:
            # The update's kernels are queued behind the copy, and the host goes on.
            torch.cuda.current_stream(self._device).wait_event(self._event)

    @property
    def ended(self) -> bool:
        """True when this rank's part has been written, or could not be."""
        return self._thread is None or not self._thread.is_alive()

    @property
    def failure(self) -> BaseException | None:
        """Error that ended the write; None while it is under way, and after success."""
        return self._outcome if self.ended else None

    def wait(self) -> None:
        """Return when it has ended."""
        if self._thread is not None:
            self._thread.join()
