import json
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from smp.errors import UserError
from smp.launch.local import LocalJob
from smp.plan import bench
from smp.plan import calibrate as calibrating
from smp.plan.bench import RECENT, Bench
from smp.plan.calibrate import calibrate
from smp.plan.devices import MEASURED, Tables, device_row
from smp.plan.kernels import moved_bytes, product
from smp.plan.measure import Log, _scaled
from smp.plan.records import Exchange, Operation, Segment, TensorShape
from smp.plan.time import step_time

TABLES = Tables(
    products=[["float32", "nt", 512, 512, 512, 2**28 / 1e11]],
    elementwise=[["add", 10_000, 1e-6], ["add", 2 * 10**7, 1e-3]],
    attention=[["float32", 1000, 50, 4e-6, 2e-5]], adamw=[],
    exchanges=[["smddp", "reduce_scatter", 10**7, 1e-3]],
    host={"none": 20.0, "full": 21.0, "selective": 35.0}, probe={"product": 2e-3, "moved": 0.01},
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


@pytest.mark.parametrize(("moved", "said"), [(0.1, []), (0.43, ["moved by 43% meanwhile: plans are for its usual"])])
def test_a_machine_whose_speed_moves(moved, said, monkeypatch):
    told, tables = [], TABLES._replace(probe={**TABLES.probe, "moved": moved})
    monkeypatch.setattr(calibrating, "_measure", lambda *args, **kwargs: tables)
    calibrate(processes=[1], say=told.append)
    assert told[0] == "measuring with 1 process" and len(told[1:]) == len(said)
    assert all(part in text for part, text in zip(said, told[1:], strict=True))


class _Slowed(Bench):
    """A bench in front of a machine whose speed halves after some numbers; a call takes as long as its product."""

    def __init__(self, monkeypatch):
        self.clock, self.slower = 0.0, 1.0
        monkeypatch.setattr(dist, "barrier", lambda: None)
        monkeypatch.setattr(time, "perf_counter", lambda: self.clock)
        super().__init__(torch.device("cpu"), 0.0)

    def now(self):
        self.clock += 0.25 * self.slower
        return self.clock


def test_a_number_is_a_multiple_of_a_product_beside_it(monkeypatch):
    bench = _Slowed(monkeypatch)
    first = bench.seconds(lambda: None)
    bench.slower = 2.0
    assert [bench.seconds(lambda: None) for _ in range(RECENT)][-1] == pytest.approx(first) and first > 0
    assert set(bench.paces) == {0.25, 0.5}


def test_a_call_that_was_disturbed():
    assert Bench.usual([1.0, 1.0, 1.0, 4.0]) == pytest.approx(1.75)  # what calls take now and then counts
    assert Bench.usual([1.0] * 9 + [100.0]) == pytest.approx(1.4)  # a pause does not


def test_floats_of_tables_are_scaled():
    assert _scaled([("float32", 512, 0.5)], 2.0) == [["float32", 512, 1.0]] and _scaled({"none": 3.0}, 2.0) == {
        "none": 6.0
    }


def test_the_mean_of_the_processes_counts(monkeypatch):
    def run(job):
        for rank in range(2):
            found = TABLES._replace(waiting=0.1 * rank, products=[["float32", "nt", 512, 512, 512, 0.001 + rank / 100]])
            (Path(job._command[-2]) / f"{rank}.json").write_text(json.dumps(found._asdict()))
        return 0

    monkeypatch.setattr(LocalJob, "run", run)
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


def test_ctrl_c_ends_the_command(folder, monkeypatch):
    monkeypatch.setattr(LocalJob, "run", lambda job: 130)
    with pytest.raises(KeyboardInterrupt):
        calibrate()
    assert not list(folder.iterdir())


def test_what_is_logged_is_what_a_trace_holds():
    a, b = torch.ones(4, 6), torch.ones(6, 8)
    with Log() as log:
        (a @ b).t().add_(1.0)
    assert [operation.name for operation in log.operations] == ["aten.mm.default", "aten.add_.Tensor"]
    assert product(log.operations[0]).flops == 2 * 4 * 6 * 8 and moved_bytes(log.operations[1]) == 2 * 4 * 32


@pytest.mark.parametrize("last, rotated", [("266240K", 260), ("32768K", 64), ("1048576K", 512), (None, 64)])
def test_operands_fill_the_last_cache(last, rotated, tmp_path, monkeypatch):
    for index, size in enumerate(["48K", "2048K", last][: 3 if last else 0]):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}/size").write_text(size + "\n")
    monkeypatch.setattr(bench, "CACHES", tmp_path)
    assert bench.rotated_bytes() == rotated * 2**20


SHORTENED = """
import os, time, torch
from smp.plan import bench, measure
measure.LINEAR, measure.HEADS, bench.ROTATED = measure.LINEAR[:2], measure.HEADS[:1], (2**20, 2**20)
measure.SIZES, measure.PARTS, measure.ADAMW = measure.SIZES[:2], measure.PARTS[:2], measure.ADAMW[:1]
measure.WAITS, measure.CALLS, measure.STEPS, measure.TURNS, measure.TOUCHED = 10, (8, 4), 2, 1, 2**20
bench.WARM = 0.01
computes = torch.Tensor.__matmul__

def late(x, w):  # one of the processes, where they are timed at meeting
    if os.environ["RANK"] == "1" and w.shape == (768, 2048):
        time.sleep(0.05)
    return computes(x, w)

torch.Tensor.__matmul__ = late
measure.main()
"""


@pytest.mark.full
def test_this_machine_is_measured(folder, tmp_path_factory, monkeypatch):
    script = tmp_path_factory.mktemp("script") / "measure.py"
    script.write_text(SHORTENED)

    def shortened(command, *args, **kwargs):
        assert command[1:3] == ["-m", "smp.plan.measure"]
        return LocalJob([command[0], str(script), *command[3:]], *args, **kwargs)

    monkeypatch.setattr(calibrating, "LocalJob", shortened)
    row = device_row(str(calibrate(processes=[2], seconds=0.001)))
    tables = row.tables[2]
    assert {line[1] for line in tables.products} == {"nt", "nn", "tn"}
    assert {line[0] for line in tables.exchanges} == {"smddp", "gloo"}
    every = [line[-1] for lines in tables[:5] for line in lines] + [*tables.probe.values()]
    assert min(every) > 0 and set(tables.probe) == {"product", "moved"}
    assert set(tables.host) == {"none", "full", "selective"} and min(tables.host.values()) >= 0
    assert 0 < tables.waiting < 1
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
