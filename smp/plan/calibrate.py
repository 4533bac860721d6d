"""`smp plan --calibrate`: measure this machine and write a device row, under as many processes as will run.

Two processes of one thread each on two cores share the memory's bandwidth, and a process alone has two threads:
every number of processes is a calibration of its own. The measuring is ``smp.plan.measure``'s, in processes that are
started as a job's are.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import platform
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from smp.environment.threads import available_cores
from smp.errors import UserError
from smp.launch.local import LocalJob
from smp.memory.limits import available_memory
from smp.plan.devices import DEVICES, MEASURED, DeviceRow, Efficiency, Tables, plain_name, sheet_row, write_row
from smp.plan.kernels import ATTENTION_BACKWARD
from smp.plan.records import GIB
from smp.runtime import devices_folder

PROCESSES = (1, 2, 4)
SECONDS = 0.03  # for one number
BUSY = 0.10  # of the speed


def _measure(processes: int, seconds: float, *, gpus: bool) -> Tables:
    """Measure in as many processes, started as a job's: the mean of what they found.

    Each computes and waits for others: their means add up to what all of them take.

    Raises:
        UserError: they fail.
    """
    with tempfile.TemporaryDirectory(prefix="smp-calibrate-") as folder:
        command = [sys.executable, "-m", "smp.plan.measure", folder, str(seconds)]
        status = LocalJob(command, processes, 0, no_gpus=not gpus).run()
        if status == 128 + signal.SIGINT:
            raise KeyboardInterrupt
        outputs = list(Path(folder).iterdir())
        if status != 0 or len(outputs) != processes:
            raise UserError(
                f"measuring with {processes} process(es) ended with status {status}: see above for why, or plan with a "
                f"data sheet's row, --device {next(iter(DEVICES))}"
            )
        return Tables(**_mean([json.loads(output.read_text()) for output in outputs]))


def _mean(found: Sequence[Any]) -> Any:
    """Return the mean of what several processes measured in the same order: of numbers, at any depth."""
    first = found[0]
    if isinstance(first, Mapping):
        return {key: _mean([one[key] for one in found]) for key in first}
    if isinstance(first, Sequence) and not isinstance(first, str):
        return [_mean(own) for own in zip(*found, strict=True)]
    return statistics.fmean(found) if isinstance(first, float) else first


def _summary(row: DeviceRow) -> DeviceRow:
    """Return the row with the peaks that its largest numbers show, for the closed form; they are what is reached."""
    tables = row.tables[max(row.tables)]
    own = "bfloat16" if row.is_gpu else "float32"
    rates = [2 * m * k * n / seconds for dtype, _, m, k, n, seconds in tables.products if dtype == own]
    moved = [nbytes / seconds for name, nbytes, seconds in tables.elementwise if name == "add"]
    gathered = [nbytes / seconds for _, kind, nbytes, seconds in tables.exchanges if kind == "reduce_scatter"]
    links, peak = max(gathered, default=moved[-1]) / 1e9, max(rates)
    share = Efficiency(1, 1, 1, 1, 1, 1)
    if tables.attention:
        _, scores, width, forward, backward = tables.attention[-1]
        fused = (4 * scores * width / forward / peak, ATTENTION_BACKWARD * 4 * scores * width / backward / peak)
        share = dataclasses.replace(share, attention_forward=fused[0], attention_backward=fused[1])
    return dataclasses.replace(
        row, peak=peak / 1e12, bandwidth=moved[-1] / 1e12, links=links, network=row.network or links, efficiency=share,
        host_us=tables.host,
    )  # fmt: skip


def _device() -> tuple[DeviceRow, Sequence[int]]:
    """Return a row of the device at hand, without tables, and the numbers of processes to measure."""
    versions = f"torch {torch.__version__}, {platform.node()}"
    if not torch.cuda.is_available():
        memory = available_memory(torch.device("cpu"), 1) or 0
        where = f"{available_cores()} cores ({platform.machine()}), {versions}"
        counts = sorted({min(count, available_cores()) for count in PROCESSES})  # each with a core of its own
        return DeviceRow("cpu", memory=round(memory / GIB, 1), on=where), counts
    properties, count = torch.cuda.get_device_properties(0), torch.cuda.device_count()
    base = sheet_row(properties.name) or DeviceRow(plain_name(properties.name))
    row = dataclasses.replace(
        base, memory=round(properties.total_memory / GIB, 1), capability=(properties.major, properties.minor),
        on=f"{count} x {properties.name}, {versions}",
    )  # fmt: skip
    return row, (1, count) if count > 1 else (1,)


def calibrate(
    *,
    processes: Sequence[int] | None = None,
    seconds: float = SECONDS,
    path: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Path:
    """Measure the device at hand, and write its row.

    Args:
        processes: how many at once; default: 1, 2 and 4 on as many cores, 1 and all GPUs.
        seconds: for one number; some hundreds are measured.
        path: of the row; default: its name in the user's folder, where ``--device`` finds it.
        say: told of the progress.

    Returns:
        The path.

    Raises:
        UserError: the measuring processes fail.
    """
    row, usual = _device()
    tables: dict[int, Tables] = {}
    for count in processes or usual:
        say(f"measuring with {count} process{'es' if count > 1 else ''}")
        tables[count] = _measure(count, seconds, gpus=row.is_gpu)
        if (moved := tables[count].probe["moved"]) > BUSY:
            say(f"the machine's own speed moved by {moved:.0%} meanwhile: plans are for its usual speed")
    date = datetime.date.today().isoformat()
    measured = dataclasses.replace(row, source=MEASURED, date=date, tables=tables, factor=1.0, runs=0)
    path = path or devices_folder() / f"{row.name}.json"
    write_row(_summary(measured), path)
    return path
