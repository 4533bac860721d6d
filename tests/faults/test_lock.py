"""One run per directory."""

from __future__ import annotations

import json
import os
import signal
import socket

import pytest

from smp.errors import RankError
from smp.faults.lock import LOCK_FILE, lock_directories
from tests.faults.jobs import JOB, LONG, last_step, slowly
from tests.job import run_job, running_job


@pytest.mark.smoke
def test_a_held_directory_is_refused_with_its_holder(tmp_path):
    with lock_directories([tmp_path / "a", tmp_path / "b", tmp_path / "a" / "checkpoints"]):
        said = json.loads((tmp_path / "a" / LOCK_FILE).read_text())
        assert said["pid"] == os.getpid() and said["host"] == socket.gethostname() and said["argv0"]
        inside = rf"checkpoints is in use by process {os.getpid()}"
        with pytest.raises(RankError, match=inside), lock_directories([tmp_path / "a" / "checkpoints"]):
            pass  # another run's --checkpoint_dir may be inside this one's directory
        holder = rf"b is in use by process {os.getpid()} on {socket.gethostname()}, since \d{{4}}-\d\d-\d\dT"
        for _ in range(2):  # looking leaves what the holder wrote
            with pytest.raises(RankError, match=holder), lock_directories([tmp_path / "c", tmp_path / "b"]):
                pass
        with lock_directories([tmp_path / "c"]):  # given back by the one that was refused
            pass
    assert not (tmp_path / "a" / LOCK_FILE).exists()
    with lock_directories([tmp_path / "a"]):
        pass


def test_a_directory_is_one_by_any_of_its_names(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with (
        lock_directories([tmp_path / "run", tmp_path / "link", tmp_path / "link" / ".." / "run"]),
        pytest.raises(RankError, match="run is in use"),
        lock_directories([tmp_path / "link"]),
    ):
        pass


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path):
    (tmp_path / "precious").write_text("data")
    (tmp_path / LOCK_FILE).symlink_to(tmp_path / "precious")
    with pytest.raises(RankError, match=r"\.lock is a link .*: delete it"), lock_directories([tmp_path]):
        pass
    assert (tmp_path / "precious").read_text() == "data"


def test_a_directory_that_cannot_be_is_not_said_to_lack_locks(tmp_path):
    (tmp_path / "file").touch()
    said = r"\(Not a directory\): choose another --output_dir and --checkpoint_dir$"
    with pytest.raises(RankError, match=said), lock_directories([tmp_path / "file" / "run"]):
        pass


def test_a_lock_that_a_killed_process_left_is_taken_over(tmp_path):
    child = os.fork()
    if child == 0:
        with lock_directories([tmp_path]):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == child
    with lock_directories([tmp_path]):
        assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()


def test_a_second_run_is_refused_and_the_first_goes_on(tmp_path):
    run = tmp_path / "run"
    resume = ["--resume_from_checkpoint", "latest"]
    with running_job(*LONG, "--output_dir", run, world_size=2, prepare=slowly) as job:
        job.wait_until(lambda: last_step(run) >= 2)
        before = (run / "config.yaml").read_bytes(), last_step(run)
        second = run_job(*JOB, *resume, "--lr", 1.0, "--output_dir", run, world_size=2, prepare=lambda rank: None)
        assert second.statuses == [2, 2] and "Traceback" not in second.output, second.output
        assert f"{run} is in use by process {job.pids[0]} on {socket.gethostname()}, since" in second.output
        assert (run / "config.yaml").read_bytes() == before[0]
        job.wait_until(lambda: last_step(run) > before[1])
        job.signal(signal.SIGKILL)
        job.wait()
    run_job(*JOB, *resume, "--max_steps", 2, "--output_dir", run, world_size=2).succeeded()
    assert not (run / LOCK_FILE).exists()
