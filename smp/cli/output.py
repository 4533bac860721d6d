"""How the commands write numbers and tables, and text that a checkpoint's author chose."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from smp.log import redact


def shown(value: Any, limit: int = 120) -> str:
    """A value out of a file on one line: no control characters, which would steer the terminal, and no secrets."""
    text = redact(str(value)[: 4 * limit])
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def bytes_text(count: int) -> str:
    """Bytes in the largest binary unit that leaves a number of at least 1."""
    if count < 1024:
        return f"{count} B"
    size = float(count)
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} TiB"


def dtype_name(dtype: Any) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def table(rows: Sequence[Sequence[str]], *, indent: str = "  ") -> str:
    """Rows of equally many cells, in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(indent + line.rstrip() for line in lines)


class Progress:
    """A line that counts bytes, on a terminal only.

    Args:
        title: what is being done.
        total: bytes to come.
    """

    def __init__(self, title: str, total: int):
        self._title, self._total, self._done = title, max(total, 1), 0
        self._active = sys.stderr.isatty()

    def add(self, count: int) -> None:
        """Count bytes that are done."""
        self._done += count
        if self._active:
            percent = 100 * self._done // self._total
            print(f"\r{self._title}: {percent} % of {bytes_text(self._total)}", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._active:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
