"""Processes that are started, bounded in time, and ended with all that they have started."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_started: set[subprocess.Popen] = set()


def environment(*, gpus: int | None = 1, threads: int | None = None) -> dict[str, str]:
    """Return the environment of a process.

    Args:
        gpus: that it may see; None: all.
        threads: of its operators on the CPU; None: as many as torch takes.
    """
    paths = (str(ROOT), os.environ.get("PYTHONPATH"))
    more = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    if gpus is not None:
        seen = os.environ.get("CUDA_VISIBLE_DEVICES") or "0"
        more["CUDA_VISIBLE_DEVICES"] = ",".join(seen.split(",")[:gpus])
    if threads is not None:
        more["OMP_NUM_THREADS"] = str(threads)
    return {**os.environ, **more}


def start(words: list[str], log: Path, env: dict[str, str], **pipes: Any) -> subprocess.Popen:
    """Start Python with these words; what it says is appended to the log."""
    command = [sys.executable, *words]
    with log.open("a") as output:
        print("$", *command, file=output, flush=True)
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, start_new_session=True,
            **{"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output, **pipes},
        )  # fmt: skip
    _started.add(process)
    return process


def end(process: subprocess.Popen) -> None:
    """Kill a process and all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    _started.discard(process)


def end_all_on_signals() -> None:
    """On SIGTERM or SIGINT, such as of ``timeout``, kill what runs and exit with status 124."""

    def stop(*_: Any) -> None:
        for process in list(_started):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        os._exit(124)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)


def call(words: list[str], log: Path, env: dict[str, str], timeout: float, **pipes: Any) -> str:
    """Run Python with these words; return why it failed, or an empty string."""
    process = start(words, log, env, **pipes)
    try:
        status = process.wait(max(timeout, 1.0))
    except subprocess.TimeoutExpired:
        return f"not done within {timeout:.0f} s"
    finally:
        end(process)
    return f"ended with status {status}: {last_words(log)}" if status else ""


def last_words(log: Path) -> str:
    """Return the last error that a log names, else its last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"\w*(Error|error|Exception)\b.*:", line)]
    return (errors or lines or [""])[-1][:240]
