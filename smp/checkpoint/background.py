"""Write a rank's part of a checkpoint, at once or in a thread beside training.

Parameters and optimizer state change in the optimizer's update alone. So a thread copies them beside the next forward
and backward pass, and only that update waits for the copy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from smp.checkpoint.manifest import Manifest
from smp.checkpoint.safetensors_io import Piece
from smp.checkpoint.shards import Snapshot
from smp.checkpoint.storage import attempt
from smp.checkpoint.writer import write_part
from smp.errors import RunError


def to_host(pieces: list[Piece]) -> list[Piece]:
    """Return the tensors on the CPU; those that are there already without a copy."""
    return [piece._replace(tensor=piece.tensor.cpu().contiguous()) for piece in pieces]


class HostCopies:
    """Buffers in host memory that are kept from one save to the next: pinned for a GPU."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def __bool__(self) -> bool:
        return bool(self._buffers)

    def __call__(self, pieces: list[Piece]) -> list[Piece]:
        """Copy, and return when the originals may change."""
        copies = []
        for piece in pieces:
            buffer = self._buffers.get(piece.name)
            if buffer is None or buffer.shape != piece.tensor.shape or buffer.dtype != piece.tensor.dtype:
                on_gpu = piece.tensor.device.type == "cuda"
                buffer = torch.empty(piece.tensor.shape, dtype=piece.tensor.dtype, pin_memory=on_gpu)
                self._buffers[piece.name] = buffer
            buffer.copy_(piece.tensor, non_blocking=True)
            copies.append(piece._replace(tensor=buffer))
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        return copies


class PendingWrite:
    """This rank's part of a checkpoint that is being written.

    Args:
        temporary: the checkpoint's temporary directory.
        manifest: all but files and tensors.
        snapshot: of the tensors themselves, which must not change before :meth:`wait_for_copy` returns.
        copy: brings them to the CPU.
        check: read the files back.

    Attributes:
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
    ):
        self.temporary, self.manifest, self.seconds = temporary, manifest, 0.0
        self._snapshot, self._copy, self._check, self._rank = snapshot, copy, check, dist.get_rank()
        self._outcome: BaseException | None = RunError("the thread that wrote it has died")
        self._copied = threading.Event()
        self._thread: threading.Thread | None = None

    def run(self) -> None:
        """Write; what fails is kept in :attr:`failure`."""
        begun = time.perf_counter()
        try:
            self._outcome = attempt(self._write, self.temporary.parent, self._snapshot.nbytes)
        finally:
            self._copied.set()
        self.seconds = time.perf_counter() - begun

    def start(self) -> None:
        """Begin :meth:`run` in a thread of its own."""
        device = next((p.tensor.device for p in self._snapshot.pieces if p.tensor.device.type == "cuda"), None)
        ready = None if device is None else torch.cuda.current_stream(device).record_event()

        def work() -> None:
            with contextlib.ExitStack() as stack:
                if ready is not None:
                    stack.enter_context(torch.cuda.device(device))
                    stream = torch.cuda.Stream()
                    stack.enter_context(torch.cuda.stream(stream))
                    stream.wait_event(ready)
                self.run()

        # A daemon: a process that must leave at once does not wait for its disk.
        self._thread = threading.Thread(target=work, name="smp-checkpoint", daemon=True)
        self._thread.start()

    def _write(self) -> None:
        copied = dataclasses.replace(self._snapshot, pieces=self._copy(self._snapshot.pieces))
        self._copied.set()
        write_part(self.temporary, copied.pieces, copied.shapes, rank=self._rank, check=self._check)

    def wait_for_copy(self) -> None:
        """Return when the tensors may change."""
        self._copied.wait()

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
