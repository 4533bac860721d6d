"""A rank's checks: reads what to do from standard input, writes a line of JSON for all that it finds."""

from __future__ import annotations

import json
import logging
import os
import pkgutil
import signal
import sys
import threading
from typing import Any

import torch

from smp.doctor.check import CheckContext, Request
from smp.runtime import Launch


def main() -> None:
    """Run the checks that are asked for, one after the other."""
    asked = json.loads(sys.stdin.readline())
    pipe = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # what the job's parts print must not come between the lines
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the supervisor ends this process
    threading.Thread(target=_end_with_supervisor, daemon=True).start()
    logging.getLogger("smp").addHandler(logging.NullHandler())
    logging.getLogger("smp").propagate = False
    torch.set_num_threads(1)

    def send(said: dict[str, Any]) -> None:
        pipe.write(json.dumps(said, default=str) + "\n")

    request = Request(tuple(asked["arguments"]), asked["timeout"], asked["full"])
    ctx = CheckContext(request, Launch(**asked["launch"]), send)
    checks = {check.name: check for check in pkgutil.resolve_name(asked["checks"])}
    send({"ready": True})
    for name in asked["names"]:
        can_go_on = checks[name].run(ctx)
        send({"end": can_go_on})
        if not can_go_on:
            break
    pipe.flush()
    os._exit(0)  # a group that was not left in good order would be waited for


def _end_with_supervisor() -> None:
    """End this process when its standard input is closed, as the supervisor's end closes it."""
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
