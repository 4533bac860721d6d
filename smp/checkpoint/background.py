"""Write a checkpoint while training goes on: copy what the rank holds, and let a thread write the copy."""

from __future__ import annotations

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
        snapshot: must not change until the write has ended.
        check: read the files back.

    Attributes:
        seconds: that it took, when it has ended.
    """

    def __init__(self, temporary: Path, manifest: Manifest, snapshot: Snapshot, *, rank: int, check: bool):
        self.temporary, self.manifest = temporary, manifest
        self._outcome: BaseException | None = RunError("the thread that wrote it has died")

        self.seconds = 0.0

        def work() -> None:
            begun = time.perf_counter()
            self._outcome = attempt(
                lambda: write_snapshot(temporary, snapshot, rank=rank, check=check), temporary.parent, snapshot.nbytes
            )
            self.seconds = time.perf_counter() - begun

        # A daemon: a process that must leave at once does not wait for its disk.
        self._thread = threading.Thread(target=work, name="smp-checkpoint", daemon=True)
        self._thread.start()

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
