"""What the examples share: their command line, this process's device, batches to learn from, and the log."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist

import smp

WARMUP = 2  # steps that the printed speed leaves out


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not allowed: give an integer from 1 on")
    return number


def _backend(text: str) -> str:
    if text == "nccl" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("nccl needs GPUs and none is visible: use smddp or gloo")
    return text


def parser(description: str | None, **numbers: int) -> argparse.ArgumentParser:
    """Read the flags that every example has, and a flag for each of ``numbers`` with its default."""
    result = argparse.ArgumentParser(description=(description or "").partition("\n")[0], allow_abbrev=False)
    result.add_argument("--backend", type=_backend, choices=("smddp", "gloo", "nccl"), default="smddp")
    for name, default in numbers.items():
        result.add_argument(f"--{name}", type=_positive, default=default, metavar="N", help=f"default {default}")
    result.add_argument("--report", action="store_true", help="print which way the exchanges took")
    result.add_argument("--results", type=Path, help="rank 0 writes losses, speed and exchanges here, as JSON")
    return result


def local_device() -> torch.device:
    """Return the GPU of this process, made current, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cuda", torch.cuda.current_device())


def token_batch(step: int, data_rank: int, rows: int, length: int, *, vocabulary: int = 256) -> torch.Tensor:
    """Sequences that count upwards from anywhere, ``(rows, length)``: others in each step and on each ``data_rank``."""
    generator = torch.Generator().manual_seed(1_000_003 * data_rank + step)
    return (torch.randint(0, vocabulary, (rows, 1), generator=generator) + torch.arange(length)) % vocabulary


def say(*words: object) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(*words, flush=True)


class Log:
    """Losses and times of a run's steps. Rank 0 prints them; its loss is that of its own batch.

    Args:
        args: of :func:`parser`.
        amount: how many tokens (or samples) all processes take in one step.
        unit: what they are.
    """

    def __init__(self, args: argparse.Namespace, amount: int, unit: str = "tokens"):
        self._args, self._amount, self._unit = args, amount, unit
        self.losses: list[float] = []
        self._times = [time.perf_counter()]

    def step(self, loss: torch.Tensor | float) -> None:
        """To be called at the end of every step."""
        self.losses.append(float(loss.detach() if isinstance(loss, torch.Tensor) else loss))
        self._times.append(time.perf_counter())
        say(f"step {len(self.losses)}: loss {self.losses[-1]:.4f}")

    def finish(self) -> None:
        """Print the last loss and the speed, and the report if it was asked for. Before the group is destroyed."""
        if dist.get_rank():
            return
        seconds = [after - before for before, after in zip(self._times[:-1], self._times[1:], strict=True)]
        speed = self._amount / statistics.median(seconds[WARMUP:] or seconds)
        say(f"{len(self.losses)} steps, last loss {self.losses[-1]:.4f}, {speed:.0f} {self._unit}/s")
        report = smp.comm.report()
        if self._args.report:
            say(report)
        if self._args.results:
            calls = [{**key._asdict(), "calls": count.calls} for key, count in report.items()]
            found = {"losses": self.losses, "speed": speed, "unit": self._unit, "calls": calls}
            self._args.results.write_text(json.dumps(found), encoding="utf-8")
