import sys

import pytest
import torch

from smp.errors import UserError
from smp.launch.local import LocalJob
from smp.plan import calibrate as calibrating
from smp.plan.calibrate import calibrate
from smp.plan.devices import MEASURED, device_row


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SMP_DEVICES_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return tmp_path


def test_a_row_has_the_sum_of_the_processes(monkeypatch):
    mean = {"bf16": 0.01, "fp32": 0.04, "memory": 0.01, "links": 2.0, "attention": 0.02, "host_us": 30.0}
    row = calibrating._row(mean, 4, cuda=False)
    assert (row.peak, row.fp32, row.bandwidth, row.links) == pytest.approx((0.04, 0.16, 0.04, 8.0))
    assert row.host_us == 30 and row.efficiency.attention_forward == 0.5 and row.source == MEASURED
    assert row.shared_by(4).flops(4) == pytest.approx(0.04e12) and row.shared_by(1) == row


def test_processes_that_fail(folder, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(UserError, match=r"ended with status 1: see above .* --device a100"):
        calibrate()
    assert not list(folder.iterdir())


def test_ctrl_c_ends_the_command(folder, monkeypatch):
    monkeypatch.setattr(LocalJob, "run", lambda job: 130)
    with pytest.raises(KeyboardInterrupt):
        calibrate()
    assert not list(folder.iterdir())


@pytest.mark.full
def test_this_machine_is_measured(folder):
    assert calibrate(seconds=0.01) == folder / "cpu.json"
    row = device_row("cpu")
    assert min(row.peak, row.fp32, row.bandwidth, row.links, row.host_us, row.memory) > 0 and not row.is_gpu
    assert f"torch {torch.__version__}" in row.on and row.date.startswith("20")
