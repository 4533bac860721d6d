"""Memory that the ranks of one host share, without a name that could outlive them.

The memory is an anonymous file (``memfd_create``): it has no name in ``/dev/shm`` or anywhere else, and the kernel
frees it with the last process that maps it, however that one ends.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import platform
import secrets
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from smp.comm.peers import Peers

NONCE_BYTES = 16
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05  # seconds between looks for a rank that is late


def refusal() -> str | None:
    """Return why this machine cannot share memory between processes this way, or None."""
    if not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):
        return "no memfd_create or pidfd_open (Linux 5.3 or newer is needed)"
    if platform.machine() not in ("x86_64", "AMD64"):
        # Flags are plain stores after the data's: other processors may show them to a peer in another order.
        return f"{platform.machine()} does not keep the order of stores"
    return None


class Segment:
    """Mapped shared memory.

    Args:
        descriptor: of the anonymous file; the caller closes it.
        size: bytes.
    """

    def __init__(self, descriptor: int, size: int):
        self.size = size
        self.map = mmap.mmap(descriptor, size, mmap.MAP_SHARED)
        self.view = memoryview(self.map)
        self.words = self.view.cast("I")  # 32-bit words
        # Holds the map: a buffer that is exported cannot be unmapped.
        self._anchor = ctypes.c_char.from_buffer(self.map)
        self.address = ctypes.addressof(self._anchor)


def share(store: dist.Store, name: str, size: int, *, peers: Peers, timeout: timedelta) -> tuple[Segment | None, str]:
    """Make a segment with the ranks of this host. Every one of them must call it.

    The first rank makes it and the others open it. They agree on the outcome: all have it, or none has and all know
    the reason.

    Args:
        store: keys under ``name`` are used, once.
        name: unique in the store, the same on these ranks and on no others.
        size: bytes; the first rank's holds; untouched pages cost nothing.

    Returns:
        The segment or None, and the reason if None.

    Raises:
        torch.distributed.DistBackendError: a rank did not come in time, or died.
    """
    leader = peers.local == 0
    descriptor, nonce = -1, ""
    reason = refusal() or ""
    segment = None
    if leader:
        if not reason:
            try:
                descriptor = os.memfd_create(f"smddp-{name}")
                os.ftruncate(descriptor, size)
                segment = Segment(descriptor, size)
                nonce = secrets.token_hex(NONCE_BYTES // 2)
                segment.view[:NONCE_BYTES] = nonce.encode()
            except OSError as error:
                reason = f"{size} bytes of shared memory could not be made ({error})"
        store.set(f"{name}/offer", json.dumps([os.getpid(), descriptor, size, nonce, reason]))
    else:
        _wait(store, [f"{name}/offer"], [0], peers, timeout)
        pid, number, size, nonce, refused = json.loads(store.get(f"{name}/offer"))
        reason = reason or refused
        if not reason:
            segment, reason = _open(pid, number, size, nonce)
    try:
        store.set(f"{name}/answer{peers.local}", reason)
        keys = [f"{name}/answer{r}" for r in range(peers.size)]
        _wait(store, keys, range(peers.size), peers, timeout)
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    answers = {r: store.get(key).decode() for r, key in enumerate(keys)}
    others = [f"{peers.label(r)}: {answer}" for r, answer in answers.items() if answer and r != peers.local]
    why = reason or "".join(others[:1])
    return (None, why) if why else (segment, "")


def _open(pid: int, number: int, size: int, nonce: str) -> tuple[Segment | None, str]:
    try:
        descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        return None, f"the shared memory of process {pid} cannot be opened ({error})"
    try:
        segment = Segment(descriptor, size)
    except (OSError, ValueError) as error:
        return None, f"{size} bytes of shared memory cannot be mapped ({error})"
    finally:
        os.close(descriptor)
    if bytes(segment.view[:NONCE_BYTES]) != nonce.encode():
        return None, f"process {pid} is not the one that offered the shared memory (another pid namespace?)"
    return segment, ""


def _wait(store: dist.Store, keys: list[str], locals_: Sequence[int], peers: Peers, timeout: timedelta) -> None:
    """Wait for each key, which the local rank at the same index sets, noticing a dead one at once."""
    deadline = time.monotonic() + timeout.total_seconds()
    for key, local in zip(keys, locals_, strict=True):
        pause = _FIRST_PAUSE
        # Looked for, as torch prints four lines of warnings for every wait that ends without the key.
        while not store.check([key]):
            who = peers.label(local)
            if peers.died(local) and not store.check([key]):
                raise dist.DistBackendError(f"smddp: {who} died before the group's first collective")
            if time.monotonic() > deadline:
                raise dist.DistBackendError(
                    f"smddp: {who} has not come to the group's first collective within the timeout of "
                    f"{timeout.total_seconds():g} s"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
