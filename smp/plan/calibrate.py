"""`smp plan --calibrate`: measure this machine and write a device row, in some seconds.

As many processes as there are GPUs, or cores, compute at once, as in a job: on CPUs the row has the sum of what they
reach, of which each process of a job gets its share. Measured are products in fp32 and bf16, attention, memory, the
all-gather of the job's backend, and what the host takes for an operation of a model's block.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import itertools
import json
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

from smp.comm.cuda import all_gather_single
from smp.config import CommConfig
from smp.environment import devices_folder, read_launch
from smp.environment.threads import available_cores
from smp.errors import UserError
from smp.launch.local import LocalJob
from smp.memory.limits import available_memory
from smp.plan.devices import DEVICES, MEASURED, DeviceRow, Efficiency, plain_name, sheet_row, write_row
from smp.runtime import choose_device, own_arguments, process_group
from smp.units import GIB

SECONDS = 0.25  # for each number
MOST_PROCESSES = 8  # on CPUs
# Linear layers, and operations of each and of a product of its sides: two forward and six backward.
_LAYERS, _OPERATIONS = 50, 8


def calibrate(*, seconds: float = SECONDS) -> Path:
    """Measure the device at hand, and write its row.

    Args:
        seconds: for each number.

    Returns:
        The row's path, in the user's folder, where ``--device`` finds it by its name.

    Raises:
        UserError: the measuring processes fail.
    """
    cuda, cores = torch.cuda.is_available(), available_cores()
    count = torch.cuda.device_count() if cuda else min(cores, MOST_PROCESSES)
    with tempfile.TemporaryDirectory(prefix="smp-calibrate-") as folder:
        command = [sys.executable, "-m", "smp.plan.calibrate", folder, str(seconds)]
        status = LocalJob(command, count, 0, no_gpus=not cuda).run()
        if status == 128 + signal.SIGINT:
            raise KeyboardInterrupt
        outputs = list(Path(folder).iterdir())
        if status != 0 or len(outputs) != count:
            raise UserError(
                f"measuring with {count} process(es) ended with status {status}: see above for why, or plan with a "
                f"data sheet's, such as --device {next(iter(DEVICES))}"
            )
        found = [json.loads(output.read_text()) for output in outputs]
    mean = {name: statistics.fmean(each[name] for each in found) for name in found[0]}
    row = _row(mean, count, cuda=cuda)
    path = devices_folder() / f"{row.name}.json"
    write_row(row, path)
    return path


def _row(mean: dict[str, float], count: int, *, cuda: bool) -> DeviceRow:
    """Return the row of what the processes measured on average."""
    versions, date = f"torch {torch.__version__}, {platform.node()}", datetime.date.today().isoformat()
    if cuda:
        properties = torch.cuda.get_device_properties(0)
        base = sheet_row(properties.name) or DeviceRow(plain_name(properties.name))
        memory, where, together = properties.total_memory, f"{count} x {properties.name}, {versions}", 1
        capability = (properties.major, properties.minor)
    else:
        base, capability, together = DEVICES["cpu"], None, count
        memory = available_memory(torch.device("cpu"), 1) or 0
        where = f"{available_cores()} cores ({platform.machine()}), {versions}"
    peak, fp32, bandwidth, links = (together * mean[name] for name in ("bf16", "fp32", "memory", "links"))
    links = links or base.links or bandwidth * 1000
    forward = mean["attention"] / (mean["bf16"] if cuda else mean["fp32"])
    slower = base.efficiency.attention_backward / base.efficiency.attention_forward
    share = Efficiency(1, forward, forward * slower, 1, 1, base.efficiency.network)
    return dataclasses.replace(
        base, peak=peak, fp32=fp32, bandwidth=bandwidth, links=links, network=base.network or links,
        memory=round(memory / GIB, 1), capability=capability, efficiency=share, host_us=mean["host_us"], factor=1.0,
        runs=0, source=MEASURED, date=date, on=where,
    )  # fmt: skip


def _mean_seconds(call: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Return the mean seconds of a call, after a first one; all ranks begin at once."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    call()
    wait()
    begin = time.perf_counter()
    call()
    wait()
    times = torch.tensor(max(1, int(seconds / max(time.perf_counter() - begin, 1e-6))), device=device)
    dist.all_reduce(times, dist.ReduceOp.MIN)  # a collective takes as many calls on each rank
    begin = time.perf_counter()
    for _ in range(int(times)):
        call()
    wait()
    return (time.perf_counter() - begin) / int(times)


def measure(device: torch.device, seconds: float) -> dict[str, float]:
    """Return what this process reaches while the others run: TFLOP/s, TB/s, GB/s, and microseconds of an operation."""
    gpu = device.type == "cuda"
    side, found = (8192 if gpu else 768), dict[str, float]()
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        # Of more weights than the caches hold, as in a model.
        weights = itertools.cycle([torch.randn(side, side, device=device, dtype=dtype) for _ in range(2 if gpu else 8)])
        x = torch.randn(side, side, device=device, dtype=dtype)
        product = functools.partial(lambda x, weights: x @ next(weights).t(), x, weights)
        found[name] = 2 * side**3 / _mean_seconds(product, device, seconds) / 1e12
    heads, tokens, width = (32, 4096, 128) if gpu else (8, 512, 64)
    dtype = torch.bfloat16 if gpu else torch.float32
    q, k, v = (torch.randn(1, heads, tokens, width, device=device, dtype=dtype) for _ in range(3))
    attended = _mean_seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), device, seconds)
    found["attention"] = 2 * heads * tokens**2 * width / attended / 1e12
    a, b = (torch.randn(2**28 if gpu else 2**23, device=device) for _ in range(2))
    found["memory"] = 3 * a.nbytes / _mean_seconds(lambda: torch.add(a, b), device, seconds) / 1e12
    ranks = dist.get_world_size()
    part = torch.ones(2**26 if gpu else 2**20, device=device)
    full = torch.empty(ranks * len(part), device=device)
    gathered = _mean_seconds(lambda: all_gather_single(full, part), device, seconds)
    found["links"] = full.nbytes * (ranks - 1) / ranks / gathered / 1e9 if ranks > 1 else 0.0
    found["host_us"] = 1e6 * _operation_seconds(device, seconds)
    return found


def _operation_seconds(device: torch.device, seconds: float) -> float:
    """Return the seconds of an operation, with its module and its backward, that is so small that the host's count."""
    layers = [torch.nn.Linear(8, 8, device=device) for _ in range(_LAYERS)]

    def step() -> None:
        x = torch.ones(8, 8, device=device, requires_grad=True)
        for layer in layers:
            x = layer(x) * x
        x.sum().backward()

    return _mean_seconds(step, device, seconds) / (_LAYERS * _OPERATIONS)


def main() -> None:
    """Measure in this process, one of those that :func:`calibrate` starts: ``FOLDER SECONDS``."""
    folder, seconds = own_arguments(None)
    launch = read_launch()
    device = choose_device(launch)
    with process_group(CommConfig(), launch, device):
        found = measure(device, float(seconds))
        (Path(folder) / f"{launch.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
