import dataclasses
import os

import pytest

from smp.errors import UserError
from smp.plan.devices import DEVICES, MEASURED, DeviceRow, device_row, network_share, read_row, write_row


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SMP_DEVICES_DIR", str(tmp_path / "devices"))
    return tmp_path / "devices"


ROW = DeviceRow("cpu", peak=0.1, bandwidth=0.02, memory=8.0, source=MEASURED, date="2026-11-23", on="a test")


def test_rows_of_data_sheets():
    h100 = device_row("h100")
    assert (h100.peak, h100.memory, h100.capability) == (989, 79.1, (9, 0)) and h100.is_gpu
    assert "not measured here" in h100.described and "within 25 %" in h100.described
    compared = {"a100_40gb", "a100_80gb", "h100", "h200", "b200"}
    for row in (row for row in DEVICES.values() if row.is_gpu):
        assert row.memory < 192 and row.range == ((0.75, 1.25) if row.name in compared else (0.5, 2.0))
        assert ("not measured, here or on any such device" in row.described) == (row.name not in compared)
    # Half of the network's cards of p4d are an eighth of a host's 400 Gb/s each.
    assert network_share("efa400") == 6.25 and network_share("efa3200") == network_share("ib400") == 50
    assert network_share("12.5") == 12.5


DRIVERS = {
    "NVIDIA A100-SXM4-40GB": "a100_40gb", "NVIDIA A100-SXM4-80GB": "a100_80gb", "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200", "NVIDIA B200": "b200", "NVIDIA A10G": "a10g", "NVIDIA L4": "l4", "NVIDIA L40S": "l40s",
    "NVIDIA GeForce RTX 4090": "rtx_4090", "NVIDIA GeForce RTX 5090": "rtx_5090", "NVIDIA RTX A6000": "rtx_a6000",
    "NVIDIA RTX 6000 Ada Generation": "rtx_6000_ada", "AMD Instinct MI300X": "mi300x",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "rtx_pro_6000",
}  # fmt: skip
SPELT = {
    "H100": "h100", "L40S": "l40s", "A100-80GB": "a100_80gb", "rtx4090": "rtx_4090", "RTX 5090": "rtx_5090",
    "a6000": "rtx_a6000", "RTX 6000 Ada": "rtx_6000_ada", "RTX PRO 6000 Blackwell": "rtx_pro_6000", "MI300X": "mi300x",
}  # fmt: skip


def test_a_driver_names_a_row_and_no_other_card_has_it(folder):
    assert {driver: device_row(driver).name for driver in DRIVERS | SPELT} == DRIVERS | SPELT
    parts = ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA GH200 480GB")
    parts += ("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition")
    for driver in (*parts, "NVIDIA H100 NVL", "NVIDIA H100 PCIe", "NVIDIA A100-PCIE-40GB", "NVIDIA A100 80GB PCIe"):
        with pytest.raises(UserError, match=f"--device {driver} is not known"):
            device_row(driver)
    with pytest.raises(UserError, match=r"rows/h100\.json is no device spec"):
        device_row("rows/h100.json")
    write_row(dataclasses.replace(DEVICES["h100"], peak=700.0), folder / "h100.json")
    assert device_row("NVIDIA H100 80GB HBM3").peak == 700.0  # calibrated


def test_unknown_device_and_network(folder):
    write_row(ROW, folder / "mine.json")
    with pytest.raises(
        UserError, match=r"--device h1000 is not known: give one of a100_40gb, .*, mine, the path .*--cal"
    ):
        device_row("h1000")
    for text in ("fast", "0", "-1", "nan", "inf"):
        with pytest.raises(UserError, match=f"--network {text} is not known: give efa400, efa3200, ib400, or the GB/s"):
            network_share(text)


def test_a_calibrated_row_comes_back_and_has_precedence(folder, tmp_path):
    write_row(ROW, folder / "cpu.json")
    found = device_row("cpu")
    assert not found.is_gpu and found.range == (0.5, 2.0) and found.described == "measured 2026-11-23 on a test"
    assert read_row(folder / "cpu.json") == found == device_row(str(folder / "cpu.json"))
    write_row(dataclasses.replace(DEVICES["h100"], peak=700.0), folder / "h100.json")
    assert device_row("h100").peak == 700.0 and device_row("h100").capability == (9, 0)
    assert [file.name for file in folder.iterdir() if file.name.startswith(".")] == []


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"schema": 4, "name": "x"}',
        '{"schema": 5, "name": "x", "peak": 1.0}',
        '{"schema": 5, "name": "x", "colour": 1}',
        '{"schema": 5, "name": "x", "efficiency": {"pace": 1}}',
    ],
)
def test_a_damaged_row_is_refused(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UserError, match=r"x\.json is no device spec: .*: write it anew with `smp plan --calibrate`"):
        device_row(str(tmp_path / "x.json"))


def test_a_failed_write_leaves_the_old_row(folder, monkeypatch):
    write_row(ROW, folder / "cpu.json")
    before = (folder / "cpu.json").read_text()

    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_row(ROW, folder / "cpu.json")
    assert (folder / "cpu.json").read_text() == before and len(list(folder.iterdir())) == 1


def test_refitting_from_ledgers():
    row = DEVICES["h200"].refitted([1.1, 1.2, 1.3])  # steps took longer than predicted
    assert row.factor == pytest.approx(1 / 1.2) and row.runs == 3 and row.range == (0.75, 1.25)
    row = DEVICES["h200"].refitted([1.0, 1.1, 1.2, 1.3, 1.4])
    assert row.range == (pytest.approx(1.0 / 1.2), pytest.approx(1.4 / 1.2))
    assert "scaled to 70 published runs" in dataclasses.replace(DEVICES["h100"], memory=40.0).described
    assert "scaled to 5 runs" in row.described and DEVICES["h200"].refitted([]) is DEVICES["h200"]
