"""A script that starts a job over ``ssh`` on the hosts of a file; see ``templates/hostfile.sh``."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from smp.errors import UserError
from smp.launch.command_line import comment, quoted, quoted_lines
from smp.launch.script import Job, filled, node_script, with_resume

_LINE = re.compile(r"(?P<host>(?:[\w.-]+@)?[A-Za-z0-9][\w.-]*)(?:\s+slots=(?P<slots>[1-9]\d{0,4}))?", re.ASCII)


def read_hosts(path: Path) -> tuple[list[str], int | None]:
    """Read the hosts of a file with lines ``HOST slots=N`` or ``HOST``, and the slots of each, if they are given.

    Raises:
        UserError: it cannot be read, has another line, names a host twice, or hosts differ in slots.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UserError(
            f"--hosts {path} cannot be read ({reason}): give a file of lines such as `node1 slots=8`"
        ) from None
    hosts: list[str] = []
    slots: set[int | None] = set()
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = _LINE.fullmatch(text)
        if match is None:
            raise UserError(f"{path}:{number}: {text!r} is no host: write `node1 slots=8` or `user@node1`")
        name = match["host"].rpartition("@")[2]
        if name in (host.rpartition("@")[2] for host in hosts):
            raise UserError(f"{path}:{number}: {name} is there twice: give each host one line with all its slots")
        hosts.append(match["host"])
        slots.add(int(match["slots"]) if match["slots"] else None)
    if not hosts:
        raise UserError(f"{path} names no host: give lines such as `node1 slots=8`")
    if len(hosts) > 1 and (own := next((host for host in hosts if host.rpartition("@")[2] == "localhost"), None)):
        raise UserError(
            f"{path}: {own} is another host for each of the {len(hosts)} hosts: give the name by which all reach it"
        )
    if len(slots) > 1:
        shown = ", ".join(str(value or "none") for value in sorted(slots, key=lambda value: value or 0))
        raise UserError(f"{path}: hosts differ in slots ({shown}): give all the same, as each gets as many processes")
    return hosts, slots.pop()


def hostfile_script(job: Job, hosts: list[str], port: int) -> str:
    """Return the script's text.

    Args:
        hosts: as ``ssh`` takes them; the first one has rank 0.
        port: free on the first host.
    """
    # A container of the same name is one that an earlier start has left: no other job may come to it.
    own = hashlib.sha256(repr((hosts, job)).encode()).hexdigest()[:12]
    rank_info = "nnodes=$1 node_rank=$2 address=$3 port=$4\nshift 4"
    values = {
        "COMMENTS": comment(job.comments),
        "HOSTS": quoted(hosts),
        "PORT": str(port),
        "ARGUMENTS": quoted_lines(with_resume(job)),
        "NODE": node_script(job, rank_info=rank_info, name=f'"smp-{own}-$port-$node_rank"', controlled=True),
    }
    return filled("hostfile.sh", values)
