import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from smp.errors import UserError
from smp.plan import calibrate as calibrating
from smp.plan.calibrate import calibrate
from smp.plan.devices import MEASURED, Tables, device_row
from smp.plan.kernels import moved_bytes, product
from smp.plan.measure import Log
from smp.plan.records import Exchange, Operation, Segment, TensorShape
from smp.plan.time import step_time

TABLES = Tables(
    products=[["float32", "nt", 512, 512, 512, 2**28 / 1e11]],
    elementwise=[["add", 10_000, 1e-6], ["add", 2 * 10**7, 1e-3]],
    attention=[["float32", 1000, 50, 4e-6, 2e-5]], adamw=[],
    exchanges=[["smddp", "reduce_scatter", 10**7, 1e-3]],
    host={"none": 20.0, "full": 21.0, "selective": 35.0}, probe={"add": 1e-3, "product": 2e-3, "moved": 0.01},
)  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SMP_DEVICES_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return tmp_path


def test_the_row_is_found_by_name(folder, monkeypatch):
    monkeypatch.setattr(calibrating, "_measure", lambda count, seconds, *, gpus: TABLES)
    monkeypatch.setattr(calibrating, "available_cores", lambda: 64)
    told = []
    assert calibrate(say=told.append) == folder / "cpu.json"
    assert told == ["measuring with 1 process", "measuring with 2 processes", "measuring with 4 processes"]
    row = device_row("cpu")
    assert sorted(row.tables) == [1, 2, 4] and row.source == MEASURED and not row.is_gpu and row.memory > 0
    assert f"torch {torch.__version__}" in row.on and row.date.startswith("20")
    # The closed form's peaks are those that were reached.
    assert row.peak == pytest.approx(0.1) and row.bandwidth == pytest.approx(0.02) and row.links == pytest.approx(10)
    assert row.efficiency.attention_forward == pytest.approx(
        0.5
    ) and row.efficiency.attention_backward == pytest.approx(0.25)


@pytest.mark.parametrize(("cores", "counts"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3])])
def test_every_process_has_a_core(cores, counts, monkeypatch):
    monkeypatch.setattr(calibrating, "_measure", lambda *args, **kwargs: TABLES)
    monkeypatch.setattr(calibrating, "available_cores", lambda: cores)
    assert sorted(device_row(str(calibrate())).tables) == counts


def _passes(monkeypatch, *moved):
    """Calibrate where passes find products in 1, 2 and 3 ms and the machine's speed moves; return what is told."""
    told, passes = [], []

    def measure(*args, **kwargs):
        passes.append((len(passes) + 1) / 1000)
        probe = {"add": passes[-1], "product": 2e-3, "moved": moved[len(passes) - 1]}
        products = [["float32", "nt", 512, 512, 512, passes[-1]]]
        return TABLES._replace(products=products, host={**TABLES.host, "none": 10.0 * len(passes)}, probe=probe)

    monkeypatch.setattr(calibrating, "_measure", measure)
    row = device_row(str(calibrate(processes=[1], say=told.append)))
    return told[1:], row.tables[1]


def test_a_busy_machine_is_measured_again(monkeypatch):
    told, tables = _passes(monkeypatch, 0.2, 0.04)
    assert told == ["the machine's own speed moved by 20% meanwhile: measuring again"]
    # The pass that was not disturbed counts.
    assert list(tables.products) == [["float32", "nt", 512, 512, 512, 0.002]]
    assert tables.host["none"] == 20.0 and tables.probe["add"] == 0.002


def test_a_machine_that_stays_busy(monkeypatch):
    told, tables = _passes(monkeypatch, 0.2, 0.3, 0.1)
    # The median of the passes; what was measured stays as it is.
    assert told == [
        "the machine's own speed moved by 20% meanwhile: measuring again",
        "the machine's own speed moved by 30% meanwhile: measuring again",
        "the machine's own speed moved by 10% meanwhile: the median counts; repeat this when nothing else runs",
    ]
    assert list(tables.products) == [["float32", "nt", 512, 512, 512, 0.002]]
    assert tables.elementwise == TABLES.elementwise and tables.probe["add"] == 0.002
    assert tables.host == {"none": 20.0, "full": 21.0, "selective": 35.0}


def test_the_mean_of_the_processes_counts(monkeypatch):
    def run(command, **kwargs):
        for rank in range(2):
            found = TABLES._replace(waiting=0.1 * rank, products=[["float32", "nt", 512, 512, 512, 0.001 + rank / 100]])
            (Path(command[-2]) / f"{rank}.json").write_text(json.dumps(found._asdict()))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    tables = device_row(str(calibrate(processes=[2]))).tables[2]
    assert list(tables.products) == [["float32", "nt", 512, 512, 512, pytest.approx(0.006)]]
    assert tables.waiting == pytest.approx(0.05) and tables.host == TABLES.host
    with pytest.raises(UserError, match=r"measuring with 3 process\(es\) ended with status 0"):
        calibrate(processes=[3])  # one of them has written nothing


def test_processes_that_fail(folder, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(
        UserError, match=r"measuring with 1 process\(es\) ended with status 1: see above .* --device a100"
    ):
        calibrate()
    assert not list(folder.iterdir())


def test_what_is_logged_is_what_a_trace_holds():
    a, b = torch.ones(4, 6), torch.ones(6, 8)
    with Log() as log:
        (a @ b).t().add_(1.0)
    assert [operation.name for operation in log.operations] == ["aten.mm.default", "aten.add_.Tensor"]
    assert product(log.operations[0]).flops == 2 * 4 * 6 * 8 and moved_bytes(log.operations[1]) == 2 * 4 * 32


SHORTENED = """
import os, time, torch
from smp.plan import bench, measure
measure.LINEAR, measure.HEADS, bench.ROTATED = measure.LINEAR[:2], measure.HEADS[:1], 2**20
measure.SIZES, measure.PARTS, measure.ADAMW = measure.SIZES[:2], measure.PARTS[:2], measure.ADAMW[:1]
measure.WAITS, computes = 20, torch.Tensor.__matmul__

def late(x, w):  # one of the processes, where they are timed at meeting
    if os.environ["RANK"] == "1" and x.shape == (512, 768):
        time.sleep(0.05)
    return computes(x, w)

torch.Tensor.__matmul__ = late
measure.main()
"""


@pytest.mark.full
def test_this_machine_is_measured(folder, tmp_path_factory, monkeypatch):
    monkeypatch.setattr(calibrating, "PASSES", 1)
    script = tmp_path_factory.mktemp("script") / "measure.py"
    script.write_text(SHORTENED)

    def run(command, *, _run=subprocess.run, **kwargs):
        at = command.index("smp.plan.measure")
        return _run([*command[: at - 1], str(script), *command[at + 1 :]], **kwargs)

    monkeypatch.setattr(subprocess, "run", run)
    row = device_row(str(calibrate(processes=[2], seconds=0.001)))
    tables = row.tables[2]
    assert {line[1] for line in tables.products} == {"nt", "nn", "tn"}
    assert {line[0] for line in tables.exchanges} == {"smddp", "gloo"}
    every = [line[-1] for lines in tables[:5] for line in lines] + [*tables.probe.values()]
    assert min(every) > 0 and set(tables.probe) == {"add", "product", "moved"}
    assert set(tables.host) == {"none", "full", "selective"} and min(tables.host.values()) >= 0
    assert 0.3 < tables.waiting < 1  # a process waits, and the other does not
    assert row.peak > 0.001 and row.bandwidth > 0.0001
    single = TensorShape((512, 512), "float32")
    events = (
        Operation("aten.mm.default", (single, single), (single,)),
        Exchange("all_gather", 2**20, 2, "shard", False),
    )
    found = step_time([(Segment("forward", 0, 0, events), 3)], row, local=2, groups={})
    # Beside other work the host's part may come out as 0.
    parts = {"compute", "waiting for other ranks", "exposed gathers", "host"}
    assert set(found.parts) | {"host"} == parts and 0 < found.seconds < 60
