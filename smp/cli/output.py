"""Numbers, tables and progress as the commands print them, and text that a checkpoint's author chose."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

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


def progress(title: str, total: int) -> tqdm[Any]:
    """Return a bar that counts ``total`` bytes, on a terminal only."""
    bar = {"unit": "B", "unit_scale": True, "unit_divisor": 1024, "leave": False}
    return tqdm(desc=title, total=total, disable=not is_terminal(sys.stderr), **bar)
