"""A script's checkpoints in their directory: which are found, kept and brought back, and who may write there."""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading

import pytest
import torch.distributed as dist

from smp.checkpoint import background, directory
from smp.checkpoint.checkpointer import Checkpointer
from smp.errors import RunError, UserError
from tests.distributed import run_distributed, run_ranks
from tests.faults.disk import kill_at
from tests.resume.test_script_checkpoint_state import small

ROOT = pathlib.Path(__file__).parents[2]


def visible(folder: str) -> list[str]:
    return sorted(path.name for path in pathlib.Path(folder).iterdir() if path.name != ".lock")


def _fresh(folder: str) -> None:
    checkpoints = Checkpointer(folder, *small(), keep=2)
    for step in (100, 200, 300):
        checkpoints.save(step, step)
    again = Checkpointer(folder, *small(), keep=2)  # a script that starts anew, and does not load
    path = again.save(5, "anew")
    assert path.exists() and os.path.samefile(f"{folder}/latest", path)
    assert visible(folder) == ["latest", "model-200steps.aside1", "model-300steps.aside1", "model-5steps"]
    assert again.load().extra == "anew"


def _branch(folder: str) -> None:
    checkpoints = Checkpointer(folder, *small(), keep=3)
    for step in (200, 205, 300):
        checkpoints.save(step, "old")
    again = Checkpointer(folder, *small(), keep=3)
    again.load(f"{folder}/model-200steps")
    assert "model-300steps" in visible(folder)  # loading alone changes nothing
    for step in (210, 220):
        assert again.save(step, "new", wait=False).name == f"model-{step}steps"
    again.finish()
    found = again.load()
    assert (found.step, found.extra) == (220, "new")
    names = [name for name in visible(folder) if name.endswith("steps")]
    assert names == ["model-200steps", "model-210steps", "model-220steps"]


@pytest.mark.parametrize("script", [_fresh, _branch])
def test_what_was_saved_last_is_found_beside_later_steps_of_another_branch(tmp_path, script):
    run_distributed(script, str(tmp_path), world_size=1)


def _killed_replacing(folder: str) -> None:
    checkpoints = Checkpointer(folder, *small(), keep=1)
    checkpoints.save(3, "first")
    kill_at(pathlib.Path(folder), "rename directory", 0, after=True)
    checkpoints.save(3, "second")


def _loads_first(folder: str) -> None:
    found = Checkpointer(folder, *small()).load()
    assert found is not None and found.extra == "first"


def test_a_kill_while_the_same_step_is_replaced_loses_nothing(tmp_path):
    (outcome,) = run_ranks(_killed_replacing, str(tmp_path), world_size=1)
    assert outcome.status == -signal.SIGKILL
    assert visible(str(tmp_path)) == ["latest", "model-3steps.old.tmp", "model-3steps.tmp"]
    run_distributed(_loads_first, str(tmp_path), world_size=1)
    assert visible(str(tmp_path)) == ["latest", "model-3steps"]


def _rename_fails(folder: str) -> None:
    checkpoints = Checkpointer(folder, *small(), keep=1)
    checkpoints.save(3, "first")
    rename = os.rename

    def fail(source, target, **options):
        if str(source).endswith("-3steps.tmp"):
            raise OSError(5, "Input/output error")
        return rename(source, target, **options)

    os.rename = fail
    with pytest.raises(RunError, match="Input/output error"):
        checkpoints.save(3, "second")
    assert visible(folder) == ["latest", "model-3steps"] and checkpoints.load().extra == "first"


def test_a_replacement_that_fails_leaves_what_was_there(tmp_path):
    run_distributed(_rename_fails, str(tmp_path), world_size=1)


ANOTHER = """
import sys, torch, torch.distributed as dist, smp
folder, what = sys.argv[1:]
dist.init_process_group("gloo", init_method=f"file://{folder}.rendezvous-{what}", rank=0, world_size=1)
model = torch.nn.Linear(2, 2)
checkpoints = smp.Checkpoints(folder, model, torch.optim.SGD(model.parameters(), lr=0.1))
try:
    print(getattr(checkpoints, what)(*[7] * (what == "save")))
except smp.UserError as error:
    print(error)
dist.destroy_process_group()
"""


def another(folder: str, what: str) -> str:
    command = [sys.executable, "-c", ANOTHER, folder, what]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300).stdout


def _two(folder: str) -> None:
    checkpoints = Checkpointer(folder, *small())
    checkpoints.save(1)
    go, write = threading.Event(), background.write_part

    def late(*args, **options):
        if threading.current_thread().name == "smp-checkpoint":
            go.wait(300)
        return write(*args, **options)

    background.write_part = late
    checkpoints.save(2, wait=False)
    beside = Checkpointer(folder, *small(), name="model-ema")  # shares the lock, and leaves the other name alone
    beside.save(1)
    refused = another(folder, "save")
    assert f"in use by process {os.getpid()} on " in refused and "give Checkpointer another directory" in refused
    assert "step=1" in another(folder, "load")
    go.set()
    checkpoints.finish()
    assert visible(folder) == ["latest", "model-1steps", "model-2steps", "model-ema-1steps"]


@pytest.mark.full
def test_one_process_saves_and_others_may_load(tmp_path):
    folder = str(tmp_path / "held")
    run_distributed(_two, folder, world_size=1)
    assert "model-7steps" in another(folder, "save")  # given back when the process ended


def _not_deleted(folder: str) -> None:
    checkpoints = Checkpointer(folder, *small(), keep=1)
    checkpoints.save(1)
    delete = shutil.rmtree

    def busy(path, *args, **options):  # as NFS does where another host has a file open
        if str(path).endswith(".old.tmp"):
            raise OSError(39, "Directory not empty", str(path))
        return delete(path, *args, **options)

    if dist.get_rank() == 0:
        directory.shutil.rmtree = busy
    assert checkpoints.save(2).exists()
    assert checkpoints.save(2, "again").exists()
    assert checkpoints.load().extra == "again"


def test_a_deletion_that_fails_is_no_failed_save(tmp_path):
    run_distributed(_not_deleted, str(tmp_path), world_size=2)


def _two_models(folder: str) -> None:
    generator, judge = (Checkpointer(folder, *small()) for _ in range(2))
    path = generator.save(1, "generator")
    with pytest.raises(UserError, match=r"step 1 of 'model' has just been saved in .* give each a name of its own"):
        judge.save(1, "judge")
    assert path.exists() and generator.load().extra == "generator"
    assert generator.save(1, "again").exists()  # by itself, it may
    assert judge.save(2, "goes on").exists()  # one after the other, too
    named = Checkpointer(folder, *small(), name="judge")
    assert named.save(2).exists() and generator.load().extra == "goes on"


def test_two_models_do_not_replace_each_other(tmp_path):
    run_distributed(_two_models, str(tmp_path), world_size=2)


def _similar_names(folder: str) -> None:
    Checkpointer(folder, *small(), name="net-ema").save(5)
    pathlib.Path(folder, "net-ema-9steps").mkdir()
    assert Checkpointer(folder, *small(), name="net").load() is None
    pathlib.Path(folder, "net-9steps").mkdir()
    with pytest.raises(UserError, match=r"net-9steps has no manifest.json"):
        Checkpointer(folder, *small(), name="net").load()


def test_another_name_that_begins_alike_is_not_taken_for_it(tmp_path):
    run_distributed(_similar_names, str(tmp_path), world_size=1)
