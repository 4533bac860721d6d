"""Messages between hosts: from each rank to the ranks with its local rank on the other hosts.

gloo's sends and receives carry them, over a separate connection to each of these ranks, so that a host has as many
streams to another as it has ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from smp.comm import futex
from smp.comm.arena import SIGNATURE_BYTES
from smp.comm.topology import Topology

PAYLOAD = 64 * 1024  # bytes of data that a meeting may carry along
_MEETING_BYTES = SIGNATURE_BYTES + PAYLOAD
_OBJECTION_BYTES = 4096
_MEETING, _DATA, _NEVER = 0, 1, 2  # gloo's tags


def memory(address: int, nbytes: int) -> torch.Tensor:
    """Return the bytes at an address as a tensor that does not own them."""
    return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8)


class Message:
    """One that is under way; its memory must be left alone until :meth:`wait` has returned."""

    def __init__(self, wire: Wire, host: int, work: dist.Work):
        self._wire, self._host, self._work = wire, host, work

    def wait(self) -> None:
        """Wait until it has arrived, or has left.

        Raises:
            torch.distributed.DistBackendError: the connection has failed, or the time is over.
        """
        try:
            self._work.wait(self._wire.timeout)
        except RuntimeError as error:
            self._wire.fail(self._host, error)


class Wire:
    """The connections of one rank of a group. Making it waits for the counterparts.

    Between two ranks messages arrive in the order of their sending, and must be received with the sizes they were sent
    with.

    Args:
        topology: of the group, even.
        ranks: the job's rank of each of the group's ranks, for messages.
        group: name of the group, for messages.

    Raises:
        torch.distributed.DistBackendError: one did not come in time.
    """

    def __init__(self, store: dist.Store, topology: Topology, ranks: Sequence[int], group: str, timeout: timedelta):
        hosts, local = topology.hosts, topology.local
        self.host, self.size, self.timeout = topology.host, len(hosts), timeout
        # In this order every host talks to another at any time.
        self.after = tuple((self.host + distance) % self.size for distance in range(1, self.size))
        self.before = tuple((self.host - distance) % self.size for distance in range(1, self.size))
        self._ends = [ranks[members[local]] for members in hosts]  # by host, the job's rank at that end
        self._store, self._group, self._doing = store, group, f"the first collective of group {group}"
        self._outgoing = ctypes.create_string_buffer(self.size * _MEETING_BYTES)
        self._incoming = ctypes.create_string_buffer(self.size * _MEETING_BYTES)
        self._packed = [0] * self.size  # bytes of the payload for each host
        others = ", ".join(str(end) for end in self._ends if end != self._ends[self.host])
        try:
            self._link: Any = dist.ProcessGroupGloo(
                dist.PrefixStore(f"wire{local}", store), self.host, self.size, timeout=timeout
            )
        except RuntimeError as error:
            raise dist.DistBackendError(
                f"smddp: {self._doing}: rank {self._ends[self.host]} has no connection to rank(s) {others} on other "
                f"hosts: {_reason(error)}"
            ) from error

    def start(self, operation: str, number: int, timeout: float) -> None:
        """Begin an operation: its name for messages, and how many seconds one wait in it may last."""
        self._doing, self.timeout = f"{operation} #{number} of group {self._group}", timedelta(seconds=timeout)

    # --- messages

    def send(self, host: int, data: torch.Tensor, tag: int = _DATA) -> Message:
        """Begin to send a contiguous tensor, which must not be empty."""
        try:
            return Message(self, host, self._link.send([data], host, tag))
        except RuntimeError as error:
            self.fail(host, error)

    def receive(self, host: int, data: torch.Tensor, tag: int = _DATA) -> Message:
        """Begin to receive into a contiguous tensor, which must not be empty."""
        try:
            return Message(self, host, self._link.recv([data], host, tag))
        except RuntimeError as error:
            self.fail(host, error)

    # --- meetings

    def meet(self, signature: bytes, objection: str = "") -> list[tuple[bytes, str]]:
        """Tell every host what this one does, with what is packed for it, and hear what the others do.

        Args:
            signature: of the operation, ``SIGNATURE_BYTES`` bytes.
            objection: instead, that this host's ranks disagree, and how.

        Returns:
            For each host its signature and its objection; one of the two is empty.
        """
        if objection:
            signature = bytes(SIGNATURE_BYTES)
            text = objection.encode()[: _OBJECTION_BYTES - 1].ljust(_OBJECTION_BYTES, b"\0")
            for host in self.after:
                ctypes.memmove(self._outgoing_payload(host), text, len(text))
                self._packed[host] = len(text)
        messages = []
        for host in self.before:
            # gloo takes a shorter message than the one expected.
            whole = memory(self.incoming(host) - SIGNATURE_BYTES, _MEETING_BYTES)
            messages.append(self.receive(host, whole, _MEETING))
        for host in self.after:
            start = self._outgoing_payload(host) - SIGNATURE_BYTES
            ctypes.memmove(start, signature, SIGNATURE_BYTES)
            messages.append(self.send(host, memory(start, SIGNATURE_BYTES + self._packed[host]), _MEETING))
            self._packed[host] = 0
        for message in messages:
            message.wait()
        return [(signature.rstrip(b"\0"), objection) if h == self.host else self._heard(h) for h in range(self.size)]

    def _heard(self, host: int) -> tuple[bytes, str]:
        address = self.incoming(host)
        said = ctypes.string_at(address - SIGNATURE_BYTES, SIGNATURE_BYTES).rstrip(b"\0")
        if said:
            return said, ""
        return b"", ctypes.string_at(address, _OBJECTION_BYTES).partition(b"\0")[0].decode(errors="replace")

    def pack(self, host: int, address: int, nbytes: int) -> None:
        """Make up to ``PAYLOAD`` bytes what a host hears in the next meeting."""
        futex.copy(self._outgoing_payload(host), address, nbytes)
        self._packed[host] = nbytes

    def pack_for_all(self, address: int, nbytes: int) -> None:
        """Make it what every host hears."""
        for host in self.after:
            self.pack(host, address, nbytes)

    def incoming(self, host: int) -> int:
        """Address of what a host has packed, from one meeting to the next."""
        return ctypes.addressof(self._incoming) + host * _MEETING_BYTES + SIGNATURE_BYTES

    def _outgoing_payload(self, host: int) -> int:
        return ctypes.addressof(self._outgoing) + host * _MEETING_BYTES + SIGNATURE_BYTES

    # --- failing

    def fail(self, host: int, error: RuntimeError) -> NoReturn:
        """Raise for what went wrong with a host."""
        end, reason = self._ends[host], _reason(error)
        # Only a rank that has closed the connection has given a reason; a host that is silent may be the store's too.
        if not reason.startswith("Timed out"):
            try:
                if self._store.check([f"failed{end}"]):
                    reason += f"; rank {end} has failed: {self._store.get(f'failed{end}').decode()}"
            except RuntimeError as unknown:
                reason += f"; why cannot be asked, as the store is gone too ({_reason(unknown)})"
        raise dist.DistBackendError(
            f"smddp: {self._doing}: the connection to rank {end} on another host failed: {reason}"
        ) from error

    def close(self, reason: str) -> None:
        """Tell the counterparts at once that this rank will not send again, and why."""
        with contextlib.suppress(RuntimeError):  # the store's process may be the one that is gone
            self._store.set(f"failed{self._ends[self.host]}", reason)
        for host in self.after:
            # A receive that is late makes gloo close all its connections; otherwise they live as long as any message.
            with contextlib.suppress(RuntimeError):
                self._link.recv([torch.empty(1)], host, _NEVER).wait(timedelta(milliseconds=1))


class Unreachable(NamedTuple):
    """A rank on another host: its connection is broken, or it was ``silent`` until the time was over."""

    rank: int
    silent: bool


def unreachable(error: BaseException) -> Unreachable | None:
    """Return the rank on another host that an error names: the last, as a rank that failed names the one it lost."""
    found = re.findall(r"the connection to rank (\d+) on another host failed: (\S+ \S+)", str(error))
    return Unreachable(int(found[-1][0]), found[-1][1] == "Timed out") if found else None


def _reason(error: RuntimeError) -> str:
    """Return the first sentence of gloo's message."""
    return re.sub(r"^\[\S+\] ", "", str(error)).split(". ")[0].strip()
