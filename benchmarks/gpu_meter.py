"""What ``gpu_step.py`` measures, and how: steps timed without a wait between them, memory, and synchronisations."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from smp.memory.tracker import peak_rss_bytes
from smp.train.arguments import TrainConfig, parse_args

ROOT, TORCH = Path(__file__).resolve().parents[1], str(Path(torch.__file__).parent)


@dataclasses.dataclass(frozen=True)
class Case:
    """One measurement."""

    variant: str  # a key of VARIANTS, or the flags of the job
    layers: int
    sequence: int
    processes: int = 1
    number: int = 0  # of the round
    warmup: int = 4
    steps: int = 10  # timed
    watched: int = 3  # steps after them, in which synchronisations are counted
    tiny: bool = False  # a model for a CPU

    @property
    def key(self) -> tuple[str, int, int, int, int, bool]:
        """What tells it from other measurements of a run."""
        return self.variant, self.layers, self.sequence, self.processes, self.number, self.tiny

    def config(self, flags: str = "") -> TrainConfig:
        """Read the job's settings from its flags."""
        model = f"--model {'llama_tiny' if self.tiny else 'llama3_8b'} --num_layers {self.layers}"
        lengths = f"--max_context_width {self.sequence} --train_batch_size 1 --use_synthetic_data 1"
        return parse_args(f"{model} {lengths} --sharding_strategy full_shard {flags}".split())


class Watch:
    """Counts the synchronisations of host and device, by the innermost line outside torch."""

    def __init__(self) -> None:
        self.lines: Counter[str] = Counter()
        self._undo = contextlib.ExitStack()

    def start(self) -> None:
        """Count from now on."""
        self._undo.enter_context(warnings.catch_warnings())
        warnings.simplefilter("always")
        warnings.showwarning = self._seen  # type: ignore[assignment]
        torch.cuda.set_sync_debug_mode("warn")

    def stop(self) -> None:
        """Count no more."""
        torch.cuda.set_sync_debug_mode("default")
        self._undo.close()

    def _seen(self, message: Any, *where: Any) -> None:
        if "called a synchronizing CUDA operation" not in str(message):
            return
        frames = [f for f in traceback.extract_stack()[:-1] if not f.filename.endswith("warnings.py")]
        own = [f for f in frames if not f.filename.startswith(TORCH) and not f.filename.startswith("<")]
        frame = (own or frames)[-1]
        name = frame.filename.removeprefix(f"{ROOT}/").rpartition("site-packages/")[2]
        self.lines[f"{name}:{frame.lineno} `{(frame.line or '').strip()}`"] += 1


class Meter:
    """Times the steps after the warm-up, then counts the synchronisations of some more; told of every step's end."""

    def __init__(self, case: Case, device: torch.device):
        self._case, self._device, self._number = case, device, 0
        self._watch, self._start = Watch(), 0.0
        self.losses: list[Tensor] = []
        self.seconds = self.peak = 0.0

    @property
    def all_steps(self) -> int:
        """Steps that the loop has to make."""
        return self._case.warmup + self._case.steps + self._case.watched

    def synchronize(self) -> float:
        """Wait for the device; return the time."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def done(self) -> None:
        """Note that a step has ended on the host."""
        self._number += 1
        cuda, timed = self._device.type == "cuda", self._case.warmup + self._case.steps
        if self._number == self._case.warmup:
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            self._start = self.synchronize()
        elif self._number == timed:
            self.seconds = self.synchronize() - self._start
            self.peak = torch.cuda.max_memory_allocated() if cuda else peak_rss_bytes()
            if cuda:
                self._watch.start()
        elif self._number == self.all_steps and cuda:
            self._watch.stop()

    def result(self, **more: Any) -> dict[str, Any]:
        """Return what is written for a measurement; reads the losses."""
        lines = {line: count / self._case.watched for line, count in self._watch.lines.items()}
        return {
            **dataclasses.asdict(self._case),
            "seconds": self.seconds / self._case.steps,
            "peak": self.peak,
            "losses": [float(loss) for loss in self.losses],
            "synchronisations": lines if self._device.type == "cuda" else None,
            **more,
        }
