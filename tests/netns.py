"""Hosts with real wires between them, on one machine: network namespaces joined by a bridge. Linux, root."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import pathlib
import shutil
import subprocess
from collections.abc import Iterator

INTERFACE = "wire0"  # of every host, to the others
_CLONE_NEWNET = 0x40000000


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


def _ip(*words: str) -> None:
    _run("ip", *words)


@functools.cache
def refusal() -> str | None:
    """Why there can be no namespaces here, or None."""
    if shutil.which("ip") is None:
        return "there is no `ip` command"
    try:
        with hosts(2):
            return None
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()}"


@contextlib.contextmanager
def hosts(count: int, rate: str = "") -> Iterator[list[str]]:
    """Make namespaces, each with its loopback and with ``INTERFACE`` at 10.77.0.1, .2 and so on; their names.

    ``rate`` limits what each sends: ``4gbit`` and the like.
    """
    switch, *names = [f"smp{os.getpid()}-{i}" for i in range(count + 1)]
    made: list[str] = []
    try:
        for name in (switch, *names):
            _ip("netns", "add", name)
            made.append(name)
        _ip("-n", switch, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge0", "up")
        for i, name in enumerate(names, 1):
            _ip("-n", switch, "link", "add", f"port{i}", "type", "veth", "peer", "name", INTERFACE, "netns", name)
            _ip("-n", switch, "link", "set", f"port{i}", "master", "bridge0", "up")
            _ip("-n", name, "address", "add", f"10.77.0.{i}/24", "dev", INTERFACE)
            _ip("-n", name, "link", "set", INTERFACE, "up")
            _ip("-n", name, "link", "set", "lo", "up")
            if rate:
                limit = ["root", "tbf", "rate", rate, "burst", "1mb", "latency", "100ms"]
                _run("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, *limit)
        yield names
    finally:
        for name in made:
            _ip("netns", "delete", name)


def enter(name: str) -> None:
    """Move this process, which has one thread, to a namespace, as a host of its own.

    Raises:
        OSError: not permitted, or no such namespace.
    """
    descriptor = os.open(f"/run/netns/{name}", os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        if libc.setns(descriptor, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {name}")
    finally:
        os.close(descriptor)
    os.environ.update(SMP_HOST_ID=name, GLOO_SOCKET_IFNAME=INTERFACE)


def cut(name: str, *, mend: bool = False) -> None:
    """Take a host's network away, as when its cable is pulled, or give it back."""
    _ip("-n", name, "link", "set", INTERFACE, "up" if mend else "down")


def sent_bytes() -> int:
    """What this process's host has sent to the others so far, with the headers of Ethernet, IP and TCP."""
    for line in pathlib.Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == INTERFACE:
            return int(numbers.split()[8])
    raise RuntimeError(f"this process's namespace has no interface {INTERFACE}")
