"""Numbers, tables and progress as the commands print them, and text that a checkpoint's author chose."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from smp.comm.report import readable
from smp.log import is_terminal, redact


def shown(value: Any, limit: int = 120) -> str:
    """Show a value out of a file on one line, without secrets or control characters, which would steer the terminal."""
    text = redact(str(value)[: 4 * limit])
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def dtype_name(dtype: Any) -> str:
    """Return ``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def table(rows: Sequence[Sequence[str]], *, indent: str = "  ") -> str:
    """Return rows of equally many cells as text in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(indent + line.rstrip() for line in lines)


class Progress:
    """A line that counts bytes, on a terminal only.

    Args:
        title: of the line.
        total: bytes to come.
    """

    def __init__(self, title: str, total: int):
        self._title, self._total, self._done = title, max(total, 1), 0
        self._active = is_terminal(sys.stderr)

    def add(self, count: int) -> None:
        """Count bytes that are done."""
        self._done += count
        if self._active:
            percent = 100 * self._done // self._total
            print(f"\r{self._title}: {percent} % of {readable(self._total)}", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._active:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
