"""Writers of curves beside ``metrics.jsonl``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smp.log import redact


class Writers:
    """TensorBoard writers of several folders, or of none.

    Args:
        folders: each gets an event file with all curves.
        first_step: older events of this step and later, beyond the checkpoint that is resumed, are hidden.
    """

    def __init__(self, folders: list[Path], first_step: int):
        self._writers: list[Any] = []
        if folders:
            from torch.utils.tensorboard import SummaryWriter

            self._writers = [SummaryWriter(str(folder), purge_step=first_step) for folder in folders]

    def scalar(self, tag: str, value: float, step: int) -> None:
        """Write one value of one curve."""
        for writer in self._writers:
            writer.add_scalar(tag, value, step)

    def scalars(self, tag: str, values: Mapping[str, float], step: int) -> None:
        """Write a value of several curves of one chart."""
        for writer in self._writers:
            writer.add_scalars(tag, dict(values), step)

    def text(self, tag: str, text: str) -> None:
        """Write a text (markdown), secrets redacted."""
        for writer in self._writers:
            writer.add_text(tag, redact(text))

    def close(self) -> None:
        """Flush and close."""
        for writer in self._writers:
            writer.close()
