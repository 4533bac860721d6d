"""Settings of metrics, logs and profiles."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from pathlib import Path
from typing import Literal

from smp.config import Section, setting
from smp.errors import UserError

GET_TENSORBOARD = "pip install tensorboard"

# Those of accelerate.tracking; TensorBoard's curves are our own.
Tracker = Literal[
    "none", "tensorboard", "wandb", "mlflow", "trackio", "comet_ml", "swanlab", "aim", "clearml", "dvclive"
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoggingConfig(Section):
    """Metrics, logs and profiles."""

    logging_freq: int = setting(1, "Steps between log lines.", minimum=1)
    logging_freq_for_avg: int = setting(50, "Steps between lines of running averages.", minimum=1)
    tensorboard_dir: tuple[str, ...] = setting(
        (), "TensorBoard folders, each with all the curves. Default: tensorboard/ in --output_dir if it is installed."
    )
    report_to: tuple[Tracker, ...] = setting(
        (), "Experiment trackers that get the metrics and the settings; each takes its own environment variables."
    )
    project: str = setting("smp", "Project (MLflow: experiment) of the run in trackers.")
    run_name: str | None = setting(None, "Name of the run in trackers. Default: that of the run directory.")
    enable_memory_profiling: bool = setting(
        False, "Log memory at marked points of the first steps, and by category at the peak of the first two."
    )
    memory_profiling_all_ranks: bool = setting(False, "With --enable_memory_profiling 1, show it for every rank.")
    memory_snapshot: bool = setting(False, "With it, on GPUs: write the allocator's history of the second step.")
    comm_report: bool = setting(
        False, "Show the table of collectives of the smddp backend at the end; the log files have it always."
    )
    nccl_test_log: str = setting("", "Output of nccl-tests whose average bus bandwidths TensorBoard shows.")

    def problems(self) -> list[str]:
        """Add settings that need TensorBoard, one another, or a readable file."""
        found = super().problems()
        if self.tensorboard_dir and not has_tensorboard():
            found.append(f"--tensorboard_dir needs TensorBoard: {GET_TENSORBOARD}, or leave the flag out")
        found += self._tracker_problems()
        for name in ("memory_profiling_all_ranks", "memory_snapshot"):
            if getattr(self, name) and not self.enable_memory_profiling:
                found.append(f"--{name} 1 needs --enable_memory_profiling 1: set it, or leave --{name} out")
        try:
            nccl_bandwidths(self.nccl_test_log)
        except UserError as error:
            found.append(str(error))
        return found

    @property
    def trackers(self) -> tuple[str, ...]:
        """Names of the trackers that accelerate runs, each once."""
        return tuple(dict.fromkeys(name for name in self.report_to if name not in ("none", "tensorboard")))

    def _tracker_problems(self) -> list[str]:
        if "none" in self.report_to and len(set(self.report_to)) > 1:
            return [f"--report_to {' '.join(self.report_to)} has none and a tracker: leave one out"]
        missing = [GET_TENSORBOARD] if "tensorboard" in self.report_to and not has_tensorboard() else []
        if self.trackers:
            from accelerate.tracking import get_available_trackers

            installed = {str(kind) for kind in get_available_trackers()}
            missing += [f"pip install {name}" for name in self.trackers if name not in installed]
        return [
            f"--report_to {get.split()[-1]} needs a package that is not installed: {get}, or leave it out"
            for get in missing
        ]

    def due(self, step: int, *, max_steps: int) -> bool:
        """Return whether step number ``step`` (1-based, updates done) is reported; the same on every rank."""
        return step % self.logging_freq == 0 or step == max_steps

    def tensorboard_folders(self, run_dir: Path) -> list[Path]:
        """Return the folders that TensorBoard's events go to; none where it is not installed."""
        given = [Path(folder) for folder in self.tensorboard_dir]
        return given or ([run_dir / "tensorboard"] if has_tensorboard() else [])


def has_tensorboard() -> bool:
    """Return whether TensorBoard is installed."""
    return importlib.util.find_spec("tensorboard") is not None


def nccl_bandwidths(path: str) -> list[float]:
    """Read the average bus bandwidths (GB/s) from the output of nccl-tests, in order; none for no path."""
    if not path:
        return []
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(
            f"--nccl_test_log {path} cannot be read ({error.strerror}): give a file with the output of nccl-tests"
        ) from error
    found = [float(value) for value in re.findall(r"Avg bus bandwidth\s*:\s*(\d+(?:\.\d+)?)", text)]
    if not found:
        raise UserError(
            f"--nccl_test_log {path} has no line 'Avg bus bandwidth : <number>': give the output of nccl-tests"
        )
    return found
