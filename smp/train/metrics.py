"""Metrics of a run: the console line, ``metrics.jsonl`` and TensorBoard, written by rank 0 alone."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import json
import math
import os
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

from smp.errors import UserError
from smp.log import FILE_ONLY, get_logger
from smp.train.curves import Curves
from smp.train.flops import Flops
from smp.train.logging_config import GET_TENSORBOARD, LoggingConfig, nccl_bandwidths
from smp.train.progress_bar import ProgressBar
from smp.train.state import TrainState
from smp.train.writers import Trackers, Writers
from smp.units import clock, digits

logger = get_logger(__name__)

# SMP v2 left the first steps out of its averages ("high variance on initial steps").
STEPS_BEFORE_AVERAGE = 15
NONE: Mapping[str, float] = MappingProxyType({})
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclasses.dataclass
class _Speed:
    """Samples of some seconds of training, their tokens with a label, all that were computed, and model FLOPs."""

    samples: int = 0
    tokens: int = 0
    computed: int = 0
    flops: int = 0
    seconds: float = 0.0

    def add(self, other: _Speed) -> None:
        self.samples += other.samples
        self.tokens += other.tokens
        self.computed += other.computed
        self.flops += other.flops
        self.seconds += other.seconds

    def rate(self, count: int) -> float:
        """Return how many of a count there are in a second."""
        return count / self.seconds if self.seconds else 0.0


class NullMetricsLogger:
    """Stands in for :class:`MetricsLogger` on every rank but 0: accepts the calls, does nothing."""

    def __init__(self) -> None:
        self.writers = Writers([], 0)
        self.trackers = Trackers()
        self.bar = ProgressBar(0, 0, wanted=False)

    def train_step(self, step: int, **values: Any) -> None:
        """Do nothing."""

    def redraw(self) -> None:
        """Do nothing."""

    def validation(self, step: int, *, loss: float, more: Mapping[str, float] = NONE) -> None:
        """Do nothing."""

    def finish(self) -> None:
        """Do nothing."""


class MetricsLogger:
    """Reports a run on rank 0.

    Args:
        run_dir: the run directory; ``metrics.jsonl`` and ``tensorboard/`` are written to it.
        flops: model FLOPs, forward and backward.
        peak_flops: FLOP/s one device can do in the format computed in; None, where it is unknown, makes ``mfu`` null.
        world_size: number of devices.
        resume_from: progress at which the run resumes; lines of later steps are dropped. None: a new run, which must
            not find a ``metrics.jsonl``.
        trackers: get what ``metrics.jsonl`` gets.

    What cannot be written once training has begun is a warning, and left out: a report ends no training.

    Raises:
        UserError: ``metrics.jsonl`` exists in a new run, ``run_dir`` cannot be written, or the nccl-tests log is
            missing or holds no bandwidth.
    """

    def __init__(
        self,
        config: LoggingConfig,
        *,
        run_dir: Path,
        flops: Flops,
        peak_flops: float | None,
        world_size: int,
        max_steps: int,
        resume_from: TrainState | None = None,
        trackers: Trackers | None = None,
    ):
        self.trackers = trackers or Trackers()
        self._config = config
        self._flops = flops
        self._peak_flops = peak_flops
        self._world_size = world_size
        self._max_steps = max_steps
        begin = resume_from or TrainState()
        self._step, self._samples, self._tokens = begin.step, begin.samples, begin.tokens
        self.bar = ProgressBar(max_steps, begin.step)
        self._curves = Curves(run_dir)
        bandwidths = nccl_bandwidths(config.nccl_test_log)
        self._file = _open_metrics(run_dir / "metrics.jsonl", keep_until=resume_from.step if resume_from else None)
        self._warned = False
        folders = config.tensorboard_folders(run_dir)
        if not folders:
            logger.info("No TensorBoard curves: %s to have them.", GET_TENSORBOARD)
        self.writers = Writers(folders, first_step=self._step + 1 if self._step else 0)
        if bandwidths:
            self.writers.scalar("NCCLTest/len", len(bandwidths), self._step)
            self.writers.scalars("NCCLTest/stats", _spread(bandwidths), self._step)
        self._average = _Speed()
        # A shorter run leaves out half of its steps.
        self._average_after = min(self._step + STEPS_BEFORE_AVERAGE, (self._step + max_steps) // 2)
        self._recent: collections.deque[float] = collections.deque(maxlen=51)
        self._started = time.monotonic()
        self._train_seconds = 0.0

    def train_step(
        self,
        step: int,
        *,
        loss: float,
        lr: float,
        grad_norm: float,
        tokens: int,
        samples: int,
        computed: tuple[int, int],
        step_time_s: float,
        memory: Mapping[str, float | None],
        phase_s: Mapping[str, float] | None = None,
        more: Mapping[str, float] = NONE,
        measured: Mapping[str, Any] = NONE,
    ) -> None:
        """Report the steps since the last call.

        Args:
            step: updates done, so 1 after the first; it must grow from call to call.
            loss: mean over the valid tokens of the step's global batch.
            lr: the rate this update used.
            grad_norm: global gradient norm before clipping.
            tokens: valid tokens since the start of training, all ranks: those with a label.
            samples: samples consumed since the start of training, all ranks.
            computed: tokens that were computed since the last call, with padding and those without a label, all ranks;
                and pairs of them and of tokens of their rows, as :meth:`smp.train.flops.Flops.of` counts them.
            step_time_s: mean seconds per step since the last call, without validation and checkpoints.
            memory: what ``smp.memory.tracker.memory_stats`` returns.
            phase_s: seconds of this process in each phase since the last call, validation and checkpoints included.
            more: means of the loss's metrics over the step's global batch.
            measured: of the techniques; what is no number is in ``metrics.jsonl`` alone.
        """
        steps = step - self._step
        seconds = steps * step_time_s
        flops = self._flops.of(*computed)
        speed = _Speed(samples - self._samples, tokens - self._tokens, computed[0], flops, seconds)
        processed, tflops = speed.rate(speed.computed), self._tflops(speed)
        samples_rate, rate = speed.rate(speed.samples), speed.rate(speed.tokens)
        record = {
            "step": step,
            "loss": loss,
            **more,
            "lr": lr,
            "grad_norm": grad_norm,
            "tokens": tokens,
            "samples_per_sec": samples_rate,
            "tokens_per_sec": rate,
            "processed_tokens_per_sec": processed,
            "step_time_s": step_time_s,
            "model_tflops_per_device": tflops,
            "mfu": None if self._peak_flops is None else tflops * 1e12 / self._peak_flops,
            **{key: memory.get(key) for key in ("mem_allocated_gib", "mem_peak_gib", "host_rss_gib")},
            "phase_s": phase_s,
            **measured,
        }
        self._write(record)
        for tag, value in {
            "Loss/train": loss,
            "Perf/SeqPerSec": samples_rate,
            "Perf/ModelTFLOPs": tflops,
            "LR/learning_rate": lr,
            "Norms/grad_norm": grad_norm,
            **more,
            **{name: value for name, value in measured.items() if isinstance(value, float)},
        }.items():
            self.writers.scalar(tag, value, step)
        self._recent.append(step_time_s)
        left = (self._max_steps - step) * statistics.median(self._recent)
        differ = processed - rate > 0.01 * processed
        logger.info(
            "Batch %d Loss: %s, Speed: %s samples/sec, Model TFLOPS/GPU: %s, lr: %s, gradnorm: %s, "
            "Tokens/sec: %.0f, %sTime left: %s%s%s",
            step, f"{loss:.5f}", digits(samples_rate, 2), digits(tflops, 2), digits(lr, 6),
            digits(grad_norm, 4), rate, _memory_text(memory), clock(left),
            f", Processed tokens/sec: {processed:.0f}" if differ else "", _listed(more), extra=self._line,
        )  # fmt: skip
        shown = f"{processed:,.0f} tokens/s ({rate:,.0f} labelled)" if differ else f"{rate:,.0f} tokens/s"
        memory_text = "" if memory.get("mem_allocated_gib") is None else f", {memory['mem_peak_gib']:.1f} GiB"
        self.bar.tell(f"loss {loss:.4f}, {shown}{memory_text}")
        self._running_average(step, speed)
        self._train_seconds += seconds
        self._step, self._samples, self._tokens = step, samples, tokens

    def _running_average(self, step: int, speed: _Speed) -> None:
        """Add the steps since the last call, once past the first ones, and log the average when it is due."""
        average = self._average
        if self._step >= self._average_after:
            if not average.seconds:
                self._average_after = self._step
            average.add(speed)
        every = self._config.logging_freq_for_avg
        if average.seconds and step // every > self._step // every:
            logger.info(
                "Batch %d Running Avg Speed: %s samples/sec, Running Avg Model TFLOPS/GPU: %s (steps %d to %d)",
                step, digits(average.rate(average.samples), 2), digits(self._tflops(average), 2),
                self._average_after + 1, step, extra=self._line,
            )  # fmt: skip

    @property
    def _line(self) -> dict[str, bool] | None:
        """Where SMP v2's line goes: a terminal has the bar instead."""
        return FILE_ONLY if self.bar.shown else None

    def _tflops(self, speed: _Speed) -> float:
        return speed.rate(speed.flops) / self._world_size / 1e12

    def redraw(self) -> None:
        """Draw ``curves.png`` anew, if it is time; call it where no step is timed."""
        self._curves.redraw()

    def validation(self, step: int, *, loss: float, more: Mapping[str, float] = NONE) -> None:
        """Report a validation after ``step`` updates.

        Args:
            loss: mean over the valid tokens, with a perplexity, or over what the loss's metrics are means over.
            more: these.
        """
        self._write({"step": step, **validation_record(loss, more)})
        self.writers.scalar("Loss/val", loss, step)
        logger.info("Batch %d Validation loss: %s%s", step, f"{loss:.5f}", _listed(more))
        for name, value in more.items():
            self.writers.scalar(f"val_{name}", value, step)
        if not more:
            ppl = perplexity(loss)
            self.writers.scalar("Loss/perplexity", ppl, step)
            logger.info("Batch %d Validation perplexity: %s", step, f"{ppl:.4f}")

    def finish(self) -> None:
        """Write the run's seconds, in total and in training steps, and close the files."""
        runtime = {"total": time.monotonic() - self._started, "train": self._train_seconds}
        self.writers.scalars("Perf/runtime", runtime, self._step)
        self.writers.close()
        if self._file is not None:
            self._file.close()

    def _write(self, record: dict[str, Any]) -> None:
        self.trackers.log(record)
        if self._file is None:
            return
        try:
            _append(self._file, (json_line(record) + "\n").encode())
        except OSError as error:
            if not self._warned:
                logger.warning("%s cannot be written (%s): steps are left out of it.", self._file.name, error.strerror)
                self._warned = True


def _append(file: BinaryIO, line: bytes) -> None:
    """Append the line to an unbuffered file, or nothing: to a part of it the next would be joined.

    Raises:
        OSError: the disk has not taken all of it.
    """
    size = os.fstat(file.fileno()).st_size
    try:
        if file.write(line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        with contextlib.suppress(OSError):
            file.truncate(size)
        raise


def _open_metrics(path: Path, *, keep_until: int | None) -> BinaryIO | None:
    """Open ``metrics.jsonl`` to append, unbuffered, after dropping the lines beyond step ``keep_until``.

    The shortened file replaces the old one in one step, so that a crash here loses no line. Returns None, with a
    warning, where the disk is full.
    """
    shortened = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size:
            if keep_until is None and not _began_only(path):
                raise UserError(
                    f"{path} already contains the metrics of a run: resume that run with --resume_from_checkpoint, "
                    f"or choose another --output_dir"
                )
            with path.open(encoding="utf-8", errors="replace") as old, shortened.open("w", encoding="utf-8") as new:
                # A start at step 0 is a new one: the validation before its first step is made again.
                new.writelines(line for line in old if keep_until and 0 <= _step_of(line) <= keep_until)
                new.flush()
                os.fsync(new.fileno())
            shortened.replace(path)
        return path.open("ab", buffering=0)
    except OSError as error:
        with contextlib.suppress(OSError):
            shortened.unlink(missing_ok=True)
        if error.errno in _FULL:
            logger.warning("%s cannot be written (%s): this start writes no metrics.", path, error.strerror)
            return None
        raise UserError(f"cannot write {path} ({error.strerror}): choose an --output_dir you may write to") from error


def last_logged_step(path: Path) -> int:
    """Return the last step of a ``metrics.jsonl``; 0 where there is none."""
    if not path.is_file():
        return 0
    with path.open(encoding="utf-8", errors="replace") as file:
        return max((0, *(_step_of(line) for line in file)))


def _began_only(path: Path) -> bool:
    """Tell whether a run ended before its first step was logged: nothing is lost with its lines."""
    with path.open(encoding="utf-8", errors="replace") as file:
        return all(_step_of(line) == 0 for line in file)


def _step_of(line: str) -> int:
    """Return the step of a line; -1 for one that a crash has truncated."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return -1


def perplexity(loss: float) -> float:
    """Return ``exp(loss)``; infinity where that overflows a double, as in a diverged run."""
    return math.exp(loss) if loss < 709 else math.inf if loss == loss else math.nan


def validation_record(loss: float, more: Mapping[str, float]) -> dict[str, float]:
    """Return the keys of a validation: its loss with the perplexity, or with the loss's metrics."""
    others = {f"val_{name}": value for name, value in more.items()}
    return {"val_loss": loss, **(others or {"val_ppl": perplexity(loss)})}


def _listed(values: Mapping[str, float]) -> str:
    return "".join(f", {name}: {digits(value, 4)}" for name, value in values.items())


def json_line(record: Mapping[str, Any]) -> str:
    """Format a record; NaN and infinity, which JSON lacks, are strings that ``float`` reads back."""
    values = {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    return json.dumps(values, allow_nan=False)


def _memory_text(memory: Mapping[str, float | None]) -> str:
    peak = memory.get("mem_peak_gib")
    return "" if peak is None else f"Memory: {peak:.2f} GiB, "


def _spread(values: list[float]) -> dict[str, float]:
    return {
        "min": min(values),
        "max": max(values),
        "mean": statistics.fmean(values),
        "median": statistics.median(values),
        "std": statistics.pstdev(values),
    }
