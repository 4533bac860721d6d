"""How the doctor writes to a disk: nothing stays of it, and a slow disk is no reason to be called dead."""

from __future__ import annotations

import io

import pytest

from smp.doctor import disk
from tests.test_doctor_checks import look

MIB = 1 << 20


def test_what_is_written_has_no_name(tmp_path, monkeypatch):
    """So that nothing is left where the process is killed."""
    seen = []
    real = disk.os.fsync

    def flush(descriptor):
        seen.append(list(tmp_path.iterdir()))
        real(descriptor)

    monkeypatch.setattr(disk.os, "fsync", flush)
    assert "written and flushed at" in look(disk.check_disk, output_dir=str(tmp_path))[0][1]
    assert seen and not any(seen) and list(tmp_path.iterdir()) == []


class Slow(io.BytesIO):
    """A file of a disk that takes so many bytes a second, as a clock of its own says."""

    def __init__(self, speed):
        super().__init__()
        self.speed, self.now, self.waiting, self.total = speed, 0.0, 0, 0

    def write(self, data):  # into memory, as far as the caller can tell
        self.waiting += len(data)
        return len(data)

    def fileno(self):
        return -1

    def flush_all(self, descriptor):
        self.now += self.waiting / self.speed
        self.total, self.waiting = self.total + self.waiting, 0


@pytest.mark.parametrize("speed", [2 * MIB, 10 * MIB, 100 * MIB, 2000 * MIB])
def test_a_slow_disk_is_measured_in_time(speed, monkeypatch):
    file = Slow(speed)
    monkeypatch.setattr(disk.os, "fsync", file.flush_all)
    monkeypatch.setattr(disk.time, "perf_counter", lambda: file.now)
    assert disk.write_speed(file, 1 << 30, seconds=15.0) == pytest.approx(speed)
    assert file.now < 40 and (file.now >= 15 or file.total == 1 << 30)


def test_full_measurements_end_before_the_check_does(tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(disk, "write_speed", lambda file, size, seconds: given.append(seconds) or 1e9)
    places = {"output_dir": str(tmp_path), "checkpoint_dir": [str(tmp_path / "a"), str(tmp_path / "b")],
              "num_kept_checkpoints": [2, 2], "checkpoint_freq": [1, 1], "use_synthetic_data": True}  # fmt: skip
    assert [status for status, _ in look(disk.check_disk, full=True, **places)] == ["ok"] * 3
    assert given == [5.0] * 3  # of the 60 s of a check
