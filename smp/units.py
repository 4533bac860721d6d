"""Sizes, counts and times: their units, and how they are read and written."""

from __future__ import annotations

import math
import re

MIB, GIB = 2**20, 2**30


def scaled(text: str, letters: str, *, exponents: bool = False) -> int:
    """Return the number in ``7``, ``300B``, ``4Mi`` or ``1.5e12``; 0 where there is none.

    Args:
        letters: those of a thousand, a million and so on; ``Ki``, ``Mi``, ``Gi`` and ``Ti`` are powers of 1024.
        exponents: whether the number may have one.
    """
    number = r"\d{1,15}(?:\.\d{1,6})?" + r"(?:e\d{1,2})?" * exponents
    match = re.fullmatch(rf"({number})\s*(?:([{letters}])|([KMGT])I)?", text.strip(), re.ASCII | re.IGNORECASE)
    if match is None:
        return 0
    decimal, binary = (match[group] and match[group].upper() for group in (2, 3))
    unit = 1000 ** (letters.index(decimal) + 1) if decimal else 1024 ** ("KMGT".index(binary) + 1) if binary else 1
    return int(float(match[1]) * unit)


def readable(nbytes: int) -> str:
    """Format bytes as ``4.0 KiB`` and the like."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def gib(size: float) -> str:
    """Format bytes in GiB, with three digits for small ones."""
    return (
        f"{size / GIB:,.1f}" if size >= 9.95 * GIB else f"{size / GIB:.3f}" if size < GIB / 10 else f"{size / GIB:.2f}"
    )


def short(count: float) -> str:
    """Format a count with three digits: 950, 2.08 M, 6.74 B."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= 0.9995 * size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f}"


def parameters_text(total: int, active: int) -> str:
    """Format a number of parameters, with those that compute a token where these are fewer, as of a mixture."""
    return f"{total:,} parameters" + (f" ({active:,} active for a token)" if active < total else "")


def digits(value: float, least: int) -> str:
    """Format with ``least`` decimals, or with as many as show two digits that are not zero; never an exponent."""
    if not math.isfinite(value) or not value or abs(value) >= 1:
        return f"{value:.{least}f}"
    return f"{value:.{max(least, 1 - math.floor(math.log10(abs(value))))}f}"


def percent(share: float | None) -> str:
    """Format an error with its sign; a dash where it is not known. Nothing is shown as -0.0."""
    return "-" if share is None else f"{round(100 * share, 1) + 0.0:+.1f} %"


def seconds(value: float) -> str:
    """Format seconds with three digits."""
    return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"


def duration(seconds: float) -> str:
    """Format seconds as ``12.3 s``, ``4 min 05 s``, ``3 h 12 min`` or ``2 d 4 h``."""
    total = round(seconds)
    if seconds < 60:
        return f"{seconds:.3g} s"
    if total < 3600:
        return f"{total // 60} min {total % 60:02} s"
    if total < 86400:
        return f"{total // 3600} h {total // 60 % 60:02} min"
    return f"{total // 86400} d {total // 3600 % 24} h"


def clock(seconds: float) -> str:
    """Format seconds as ``1:02:03``."""
    total = max(round(seconds), 0)
    return f"{total // 3600}:{total // 60 % 60:02}:{total % 60:02}"
