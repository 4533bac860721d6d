"""JSON from outside: bounded in size and depth, without duplicate keys."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from smp.errors import a_type

# The largest index of a published model has 10 MB.
MAX_JSON = 64 << 20


def strict_json(data: bytes) -> Any:
    """Parse JSON without duplicate keys.

    Raises:
        ValueError: it is no such JSON, or nested too deep.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key appears twice")
        return found

    try:
        return json.loads(data, object_pairs_hook=unique)
    except RecursionError:
        raise ValueError("nested too deep") from None


def from_text(value: Any) -> Any:
    """Return the number or boolean (in any case) that a text is in JSON; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        found = json.loads(value.strip().lower())
    except (ValueError, RecursionError):
        return value
    return found if isinstance(found, (bool, int, float)) else value


def read_bytes(path: Path, *, limit: int = MAX_JSON) -> bytes:
    """Read a small regular file.

    Args:
        limit: most bytes it may have.

    Raises:
        ValueError: it is larger, or a pipe or device.
        OSError: it cannot be read.
    """
    # Without O_NONBLOCK opening a pipe would block.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("no regular file")
        if status.st_size > limit:
            raise ValueError(f"{status.st_size} bytes are more than the {limit} that are read")
        return file.read(limit)


def read_json(path: Path, *, limit: int = MAX_JSON) -> Any:
    """Read a JSON file, refusing what :func:`strict_json` and :func:`read_bytes` refuse.

    Raises:
        ValueError: it is too large, no regular file, or no such JSON.
        OSError: it cannot be read.
    """
    return strict_json(read_bytes(path, limit=limit))


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that must hold an object, as :func:`read_json`.

    Raises:
        ValueError: also if it holds something else.
        OSError: it cannot be read.
    """
    found = read_json(path)
    if not isinstance(found, dict):
        raise ValueError(f"it contains {a_type(found)} instead of an object")
    return found
