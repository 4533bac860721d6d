"""The launchers of a job's hosts among themselves: host 0 serves a store for each attempt; the others register in it.

Each store has another identity. A host that starts again while the attempt it was part of still runs elsewhere
would otherwise join that attempt, fail with it, and leave marks that end the next one too soon.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import socket
import sys
import time
import uuid
from collections.abc import Callable
from typing import NoReturn

from torch.distributed import TCPStore

from smp.errors import first_line
from smp.runtime import START_SECONDS

SURVIVORS_SECONDS = 5.0  # for those that outlive a crash to say what they have lost
ENDING_SECONDS = 60.0  # for those that are ending in good order
_ANSWER_SECONDS = 5.0
_POLL_SECONDS = 0.2


@dataclasses.dataclass(frozen=True)
class Host:
    """This host's number, and where the job's store is.

    Args:
        number: from 0.
        address: of host 0.
        port: at which host 0 serves the job's store; 0: any that is free, on one host only.
    """

    number: int = 0
    hosts: int = 1
    address: str = "127.0.0.1"
    port: int = 0


ONE_HOST = Host()


class Attempt:
    """This host's part in one start of the job.

    Args:
        host: its number, and where the store is.
        stopped: whether this launcher was asked to stop, and is not to wait for the others.
    """

    def __init__(self, host: Host, stopped: Callable[[], bool]):
        self._host, self._stopped = host, stopped
        self._store: TCPStore | None = None
        self._identity = uuid.uuid4().hex

    def join(self) -> int | None:
        """Serve the store, or wait for host 0's and register in it.

        Returns:
            The store's port; None if the launcher was asked to stop meanwhile.

        Raises:
            SystemExit: the port is taken (2), or no attempt begins that this host is not part of already (1).
        """
        host = self._host
        if host.number == 0:
            self._store = _serve(host)
            self._store.set("launcher/identity", self._identity)
            return self._store.port
        deadline, problem = time.monotonic() + START_SECONDS, ""
        while not self._stopped():
            problem = self._register()
            if not problem:
                return host.port
            if time.monotonic() > deadline:
                print(f"error: host {host.number} cannot take part: {problem}", file=sys.stderr, flush=True)
                sys.exit(1)
            time.sleep(_POLL_SECONDS)
        return None

    def _register(self) -> str:
        """Register in the present store; return why not, or an empty text."""
        host = self._host
        where = f"port {host.port} of host 0, {host.address}"
        seconds = datetime.timedelta(seconds=_ANSWER_SECONDS)
        try:
            # The store's own client would warn of each failure.
            socket.create_connection((host.address, host.port), timeout=_ANSWER_SECONDS).close()
            store = TCPStore(host.address, host.port, is_master=False, timeout=seconds, wait_for_workers=False)
            identity = store.get("launcher/identity").decode()
            mine = uuid.uuid4().hex
            first = store.compare_set(f"launcher/{identity}/registered/{host.number}", "", mine).decode()
        except OSError as error:
            return f"{where} does not answer within {START_SECONDS:g} s ({error.strerror or error})"
        except (RuntimeError, ValueError) as error:
            return f"{where} is no store of this job ({first_line(error)})"
        if first != mine:
            return (
                f"another launcher with --node_rank {host.number} is part of the job that {where} serves, and that has "
                f"not ended within {START_SECONDS:g} s"
            )
        self._store, self._identity = store, identity
        return ""

    def leave(self, status: int, *, in_order: bool) -> int:
        """Tell host 0 that this one has ended; there, wait for the others, which need the store until then.

        Args:
            in_order: whether the processes ended as they were meant to, and the others may take longer.

        Returns:
            The status; on host 0, where that is 0, the first other one of the hosts that have ended.
        """
        if self._host.hosts == 1 or self._store is None:
            return status
        patience = datetime.timedelta(seconds=ENDING_SECONDS if in_order else SURVIVORS_SECONDS)
        keys = [f"launcher/{self._identity}/ended/{number}" for number in range(self._host.hosts)]
        with contextlib.suppress(RuntimeError, ValueError):  # then there is nobody to tell, or to wait for
            self._store.set(keys[self._host.number], str(status))
            if self._host.number == 0:
                with contextlib.suppress(RuntimeError):  # not all in time
                    self._store.wait(keys, patience)
                others = [int(self._store.get(key)) for key in keys if self._store.check([key])]
                return status or next((other for other in others if other), 0)
        return status

    def close(self) -> None:
        """Release the store; on host 0 it ends."""
        self._store = None


def _serve(host: Host) -> TCPStore:
    """Serve a fresh store for each attempt; of a job of one host, on the loopback interface alone."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as probe:  # else each rank would try for five minutes
            socket.create_connection(probe.getsockname(), timeout=_ANSWER_SECONDS).close()
    except OSError as error:
        _refuse(
            f"this host cannot reach 127.0.0.1 ({error.strerror}): bring its loopback interface up, `ip link set lo up`"
        )
    try:
        family = socket.AF_INET
        if host.hosts > 1 and socket.has_dualstack_ipv6():
            family = socket.AF_INET6
        where = ("127.0.0.1", 0) if host.hosts == 1 else ("", host.port)
        listener = socket.create_server(where, family=family, dualstack_ipv6=family == socket.AF_INET6)
    except OSError as error:
        _refuse(
            f"port {host.port} of this host cannot be used for the job's store ({error.strerror}): choose another "
            f"--master_port"
        )
    port = listener.getsockname()[1]
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _refuse(why: str) -> NoReturn:
    print(f"error: {why}", file=sys.stderr, flush=True)
    sys.exit(2)
