"""Ports that nobody else gets while a test uses them."""

from __future__ import annotations

import collections
import socket

# Bound but not listening: who binds the port for itself may (with SO_REUSEADDR, as servers do), the system gives it to
# nobody who asks for any. More than one test uses.
_held: collections.deque[socket.socket] = collections.deque(maxlen=32)


def free_port() -> int:
    """A port at which nobody listens, and that is the caller's."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    _held.append(held)
    return held.getsockname()[1]
