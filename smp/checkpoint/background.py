"""Write a checkpoint while training goes on: a thread copies what the rank holds, then writes the copy.

Parameters and optimizer state change in the optimizer's update alone. So the copy is made beside the next forward and
backward pass, and only that update waits for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from pathlib import Path

import torch

from smp.checkpoint.checkpointer import Snapshot, attempt, write_snapshot
from smp.checkpoint.files import Piece
from smp.checkpoint.manifest import Manifest
from smp.errors import RunError


class HostCopies:
    """Copies of pieces in host memory that is kept from one save to the next: pinned for a GPU."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

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


class BackgroundWrite:
    """A checkpoint that a thread of this rank is writing.

    Args:
        temporary: the checkpoint's temporary directory.
        manifest: all but files and tensors.
        snapshot: of the tensors themselves, which must not change before :meth:`wait_for_copy` returns.
        copies: where to copy them; of use for one write at a time.
        check: read the files back.

    Attributes:
        seconds: that it took, when it has ended.
    """

    def __init__(
        self, temporary: Path, manifest: Manifest, snapshot: Snapshot, *, copies: HostCopies, rank: int, check: bool
    ):
        self.temporary, self.manifest, self.seconds = temporary, manifest, 0.0
        self._outcome: BaseException | None = RunError("the thread that wrote it has died")
        self._copied = threading.Event()
        device = next((p.tensor.device for p in snapshot.pieces if p.tensor.device.type == "cuda"), None)
        ready = None if device is None else torch.cuda.current_stream(device).record_event()

        def write() -> None:
            with contextlib.ExitStack() as stack:
                if ready is not None:
                    stack.enter_context(torch.cuda.device(device))
                    stream = torch.cuda.Stream()
                    stack.enter_context(torch.cuda.stream(stream))
                    stream.wait_event(ready)
                copied = dataclasses.replace(snapshot, pieces=copies(snapshot.pieces))
            self._copied.set()
            write_snapshot(temporary, copied, rank=rank, check=check)

        def work() -> None:
            begun = time.perf_counter()
            try:
                self._outcome = attempt(write, temporary.parent, snapshot.nbytes)
            finally:
                self._copied.set()
            self.seconds = time.perf_counter() - begun

        # A daemon: a process that must leave at once does not wait for its disk.
        self._thread = threading.Thread(target=work, name="smp-checkpoint", daemon=True)
        self._thread.start()

    def wait_for_copy(self) -> None:
        """Return when the tensors may change."""
        self._copied.wait()

    @property
    def ended(self) -> bool:
        """Whether this rank's part has been written, or could not be."""
        return not self._thread.is_alive()

    @property
    def failure(self) -> BaseException | None:
        """Why it could not be written; None while it is being written, and after success."""
        return self._outcome if self.ended else None

    def wait(self) -> None:
        """Return when it has ended."""
        self._thread.join()
