"""HTML from values: whatever is no :class:`Html` yet is escaped, its secrets hidden, its length bounded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from smp.log import redact

MOST_CHARACTERS = 600


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def text(value: Any, limit: int = MOST_CHARACTERS) -> Html:
    """Return a value as HTML: redacted, without control characters, of at most ``limit`` characters."""
    if isinstance(value, Html):
        return value
    plain = redact(str(value)[: 4 * limit])
    plain = "".join(c if c.isprintable() else " " if c in "\n\t" else "?" for c in plain)
    return Html(escape(plain if len(plain) <= limit else plain[: limit - 3] + "..."))


def tag(name: str, *inside: Any, cls: str = "") -> Html:
    """Return an element; what is inside is escaped unless it is HTML."""
    attribute = f' class="{escape(cls)}"' if cls else ""
    return Html(f"<{name}{attribute}>{''.join(map(text, inside))}</{name}>")


def join(parts: Iterable[Any], between: str = "") -> Html:
    """Return the parts in a row."""
    return Html(between.join(map(text, parts)))


def table(head: Sequence[Any], rows: Iterable[Sequence[Any]], *, numbers: Iterable[int] = ()) -> Html:
    """Return a table that scrolls sideways where the screen is narrow.

    Args:
        numbers: columns that are aligned to the right.
    """
    right = set(numbers)

    def row(cells: Sequence[Any], name: str) -> Html:
        return tag("tr", *(tag(name, cell, cls="n" if i in right else "") for i, cell in enumerate(cells)))

    body = tag("tbody", *(row(cells, "td") for cells in rows))
    return tag("div", tag("table", tag("thead", row(head, "th")), body), cls="scroll")


def bar(shares: Sequence[tuple[float, int]]) -> Html:
    """Return a bar of parts, each of a share (0 to 1) and the number of a colour."""
    parts = [
        f'<i class="c{color}" style="width:{100 * min(share, 1):.2f}%"></i>' for share, color in shares if share > 0
    ]
    return Html(f'<div class="bar">{"".join(parts)}</div>')


def items(values: Iterable[Any]) -> Html:
    """Return a list of bullets."""
    return tag("ul", *(tag("li", value) for value in values))
