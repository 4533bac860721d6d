"""From ``kill -9`` of a rank to the first new step of the restarted job.

    python benchmarks/recovery.py --output benchmarks/results/recovery.md

What is measured, and how, is in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from pages import origin, publish

ROOT = Path(__file__).resolve().parents[1]
JOB = [
    "train_lib.py", "--model", "llama_tiny", "--use_synthetic_data", "1", "--max_steps", "100000",
    "--checkpoint_freq", "5", "--resume_from_checkpoint", "latest",
]  # fmt: skip
LAUNCHERS = {
    "smp.launch.local": [sys.executable, "-m", "smp.launch.local", "--nproc_per_node", "2", "--max_restarts", "3"],
    "torchrun --standalone": [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "--max_restarts", "3",
    ],
}  # fmt: skip
LIMIT = 120.0


def steps(run: Path) -> list[int]:
    """Return the steps in the metrics, in the order of their lines."""
    with contextlib.suppress(OSError):
        lines = (run / "metrics.jsonl").read_text().splitlines()
        found = []
        for line in lines:
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return [line["step"] for line in found if "loss" in line]
    return []


def saved(run: Path) -> int:
    """Return the newest checkpoint's step, 0 if there is none."""
    names = [path.name for path in run.glob("checkpoints/*-*steps")]
    return max((int(name.rpartition("-")[2].removesuffix("steps")) for name in names), default=0)


def workers(launcher: int) -> list[int]:
    """Return the launcher's children."""
    return [int(pid) for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]


def until(reached, process: subprocess.Popen) -> float:
    """Wait, and return the time."""
    end = time.monotonic() + LIMIT
    while not reached():
        if process.poll() is not None or time.monotonic() > end:
            raise SystemExit("error: the job has not got so far; its output is above")
        time.sleep(0.01)
    return time.monotonic()


@contextlib.contextmanager
def started(words: list[str], run: Path) -> Iterator[subprocess.Popen]:
    """Run the job under its launcher; end it on leaving."""
    process = subprocess.Popen(
        [*words, *JOB, "--output_dir", str(run)], cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def trial(words: list[str], rank: int) -> tuple[float, int]:
    """Seconds from the kill to a step in the metrics that was made after it, and steps done again."""
    with tempfile.TemporaryDirectory() as folder, started(words, Path(folder, "run")) as process:
        run = Path(folder, "run")
        until(lambda: saved(run) >= 5 and (steps(run) or [0])[-1] % 5 == 2, process)
        done = steps(run)[-1]
        begin = time.monotonic()
        os.kill(workers(process.pid)[rank], signal.SIGKILL)
        time.sleep(0.5)  # so that no line of before is taken for one of after
        kept, size = saved(run), (run / "metrics.jsonl").stat().st_ino

        def trains_again() -> bool:
            # Resuming writes the metrics anew, up to the checkpoint.
            with contextlib.suppress(OSError):
                return (run / "metrics.jsonl").stat().st_ino != size and (steps(run) or [0])[-1] > kept
            return False

        return until(trains_again, process) - begin, max(done - kept, 0)


def main(argv: list[str] | None = None) -> None:
    """Measure and print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rounds", type=int, default=4, help="kills with each launcher, of each rank in turn (default 4)"
    )
    parser.add_argument("--output", type=Path, help="write the page here; it is printed in any case")
    arguments = parser.parse_args(argv)
    lines = ["# From a kill to the next step", "", *origin(f"{arguments.rounds} kills with each launcher")]
    rows = []
    for name, words in LAUNCHERS.items():
        found = [trial(words, number % 2) for number in range(arguments.rounds)]
        seconds = [one for one, _ in found]
        rows.append(
            f"| {name} | {statistics.median(seconds):.1f} | {max(seconds):.1f} | {max(again for _, again in found)} |"
        )
        print(rows[-1], file=sys.stderr)
    lines += [
        "llama_tiny, 2 processes, a checkpoint every 5 steps.", "",
        "| launcher, with --max_restarts 3 | median, s | longest, s | steps done again, at most |",
        "|---|---:|---:|---:|",
        *rows, "",
    ]  # fmt: skip
    publish("\n".join(lines), arguments.output)


if __name__ == "__main__":
    main()
