"""Writers of curves in addition to ``metrics.jsonl``: TensorBoard, and the trackers that ``accelerate`` knows."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from smp.errors import first_line
from smp.log import get_logger, redact, redacted

logger = get_logger(__name__)

# What each tracker's constructor calls the name of a run; accelerate has no word for all.
RUN_NAME = {
    "wandb": "name",
    "trackio": "name",
    "mlflow": "run_name",
    "swanlab": "experiment_name",
    "clearml": "task_name",
}
# Records that wait for a tracker, of a few hundred bytes each; what comes beyond is not sent.
MAX_WAITING = 10_000
FINISH_SECONDS = 30.0


class Writers:
    """TensorBoard writers of several folders, or of none; one that fails is left out, with a warning.

    Args:
        folders: each gets an event file with all curves.
        first_step: older events of this step and later, beyond the checkpoint that is resumed, are hidden.
    """

    def __init__(self, folders: list[Path], first_step: int):
        self._writers: dict[Path, Any] = {}
        if folders:
            from torch.utils.tensorboard import SummaryWriter

            for folder in folders:
                with self._leaving_out(folder):
                    self._writers[folder] = SummaryWriter(str(folder), purge_step=first_step)

    def scalar(self, tag: str, value: float, step: int) -> None:
        """Write one value of one curve."""
        self._each(lambda writer: writer.add_scalar(tag, value, step))

    def scalars(self, tag: str, values: Mapping[str, float], step: int) -> None:
        """Write a value of several curves of one chart."""
        self._each(lambda writer: writer.add_scalars(tag, dict(values), step))

    def text(self, tag: str, text: str) -> None:
        """Write a text (markdown), secrets redacted."""
        self._each(lambda writer: writer.add_text(tag, redact(text)))

    def close(self) -> None:
        """Flush and close."""
        self._each(lambda writer: writer.close())

    def _each(self, call: Callable[[Any], object]) -> None:
        for folder, writer in list(self._writers.items()):
            with self._leaving_out(folder):
                call(writer)

    @contextlib.contextmanager
    def _leaving_out(self, folder: Path) -> Iterator[None]:
        """Drop the folder's writer if it fails: a report ends no training."""
        try:
            yield
        except Exception as error:  # of any type: that of its thread
            self._writers.pop(folder, None)
            logger.warning("TensorBoard's %s cannot be written (%s): it gets no more curves.", folder, error)


class Trackers:
    """Experiment trackers, each with a thread: its network never stalls or ends training.

    A context manager: trackers begin on entering and are finished on leaving, also by an error.

    Args:
        names: as in ``accelerate.tracking``; none makes an object that does nothing.
        run_dir: for a tracker that asks for a folder.
    """

    def __init__(
        self,
        names: tuple[str, ...] = (),
        *,
        project: str = "",
        run_name: str = "",
        config: dict[str, Any] | None = None,
        run_dir: Path | None = None,
    ):
        self._names, self._project, self._run_name, self._run_dir = names, project, run_name, run_dir
        self._config = redacted(config or {})
        self._feeds: dict[str, tuple[threading.Thread, queue.Queue[dict[str, Any] | None]]] = {}
        self._warned: set[str] = set()

    def __enter__(self) -> Trackers:
        if self._names:
            from accelerate import PartialState

            # accelerate's logging wants it; in a process group that exists it starts nothing. It refuses some GPUs.
            self._attempt(self._names[0], PartialState)
        for name in self._names:
            records: queue.Queue[dict[str, Any] | None] = queue.Queue(MAX_WAITING)
            thread = threading.Thread(target=self._serve, args=(name, records), name=f"tracker-{name}", daemon=True)
            self._feeds[name] = thread, records
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        end = time.monotonic() + FINISH_SECONDS
        for thread, records in self._feeds.values():
            if thread.is_alive():
                with contextlib.suppress(queue.Full):
                    records.put(None, timeout=max(0.0, end - time.monotonic()))
        for name, (thread, _) in self._feeds.items():
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                logger.warning(
                    "--report_to %s: not finished after %g s, its last values are lost", name, FINISH_SECONDS
                )

    def log(self, record: Mapping[str, Any]) -> None:
        """Queue a line of ``metrics.jsonl``: ``loss`` is sent as ``train/loss``, ``val_loss`` as ``val/loss``."""
        for name, (thread, records) in self._feeds.items():
            if thread.is_alive():
                try:
                    records.put_nowait(dict(record))
                except queue.Full:
                    self._warn(name, f"{MAX_WAITING} records wait; those that follow are dropped")

    def _serve(self, name: str, records: queue.Queue[dict[str, Any] | None]) -> None:
        """Start a tracker, send it what is queued, and finish it."""
        tracker = self._attempt(name, lambda: self._start(name))
        while tracker is not None and (record := records.get()) is not None:
            step = record.pop("step")
            phases = {f"phase_s/{phase}": seconds for phase, seconds in (record.pop("phase_s", None) or {}).items()}
            values = {
                _curve(key): value for key, value in (record | phases).items() if not isinstance(value, list | None)
            }
            self._attempt(name, lambda: tracker.log(values, step=step))  # noqa: B023  called at once
        if tracker is not None:
            self._attempt(name, tracker.finish)

    def _start(self, name: str) -> Any:
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        kind = LOGGER_TYPE_TO_CLASS[name]
        options = {RUN_NAME[name]: self._run_name} if name in RUN_NAME else {}
        if kind.requires_logging_directory:
            options["logging_dir"] = str(self._run_dir)
        tracker = kind(self._project, **options)
        tracker.main_process_only = False  # this is rank 0
        tracker.start()
        tracker.store_init_configuration(self._config)
        return tracker

    def _attempt(self, name: str, call: Callable[[], Any]) -> Any:
        """Call; None, and for the first time a warning, where that fails."""
        try:
            return call()
        except Exception as error:
            self._warn(name, f"{type(error).__name__}: {first_line(error)}")
            return None

    def _warn(self, name: str, reason: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            logger.warning("--report_to %s: %s. Training continues; metrics.jsonl has every value.", name, reason)


def _curve(key: str) -> str:
    """Return a tracker's name for a key of ``metrics.jsonl``."""
    return f"val/{key.removeprefix('val_')}" if key.startswith("val_") else f"train/{key}"
