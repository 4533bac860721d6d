"""Damage to a checkpoint is found, whatever it is: every file, at many places."""

from __future__ import annotations

import functools
import os
import random
import shutil

import pytest

from smp.checkpoint.layout import find_checkpoints, quick_problem
from smp.checkpoint.manifest import problems_of_files, read_manifest
from smp.errors import UserError
from smp.train import __main__ as train_main
from tests.faults.jobs import wrapped
from tests.job import LLAMA, run_job

JOB = [*LLAMA, "--use_synthetic_data", 1, "--checkpoint_freq", 1, "--max_steps", 3, "--num_kept_checkpoints", 3]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run of two processes with three checkpoints."""
    run = tmp_path_factory.mktemp("saved") / "run"
    run_job(*JOB, "--output_dir", run, world_size=2).succeeded()
    return run


@pytest.fixture
def copy(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "run", symlinks=True)
    return tmp_path / "run"


def problem(path) -> str:
    """What a full check says; empty if nothing."""
    if found := quick_problem(path):
        return found
    try:
        return "; ".join(problems_of_files(path, read_manifest(path), content=True))
    except UserError as error:
        return str(error)


def newest(run):
    return find_checkpoints(run / "checkpoints", "llama_v2")[-1].path


def files(path):
    return sorted(p.name for p in path.iterdir())


def test_what_is_whole_is_found_whole(saved):
    path = newest(saved)
    assert problem(path) == ""
    assert files(path) == ["manifest.json", "rank00000-000.safetensors", "rank00001-000.safetensors"]


@pytest.mark.parametrize("name", ["manifest.json", "rank00000-000.safetensors", "rank00001-000.safetensors"])
def test_flips_truncations_and_additions_in_every_file(name, copy):
    draw, path = random.Random(name), newest(copy)
    file = path / name
    good = file.read_bytes()
    missed = []
    for number in range(50):
        flipped, place = bytearray(good), draw.randrange(len(good) * 8)
        flipped[place // 8] ^= 1 << place % 8
        zeroed, begin = bytearray(good), draw.randrange(len(good))
        zeroed[begin : begin + 64] = bytes(len(zeroed[begin : begin + 64]))
        cut, at = good[: draw.randrange(len(good))], draw.randrange(len(good))
        inserted = good[:at] + b"\x00" + good[at:]
        swapped = good[at:] + good[:at]
        for what, data in {
            "flip": flipped, "zeros": zeroed, "cut": cut, "insert": inserted, "append": good + b" ", "rotate": swapped,
        }.items():  # fmt: skip
            if bytes(data) == good:
                continue
            file.write_bytes(data)
            said = problem(path)
            if not said or (what != "rotate" and name not in said):
                missed.append((number, what, said))
    assert missed == []
    file.write_bytes(good)
    assert problem(path) == ""


def test_deleted_added_renamed_swapped_and_replayed(copy):
    path, other = newest(copy), find_checkpoints(copy / "checkpoints", "llama_v2")[0].path
    for name in files(path):
        data = (path / name).read_bytes()
        (path / name).unlink()
        assert (name if name != "manifest.json" else "complete") in problem(path)
        (path / name).write_bytes((other / name).read_bytes())  # of another, whole checkpoint
        assert problem(path)
        (path / name).write_bytes(data)
        shutil.copy(path / name, path / f"copy-{name}")
        assert f"copy-{name} does not belong" in problem(path)
        (path / f"copy-{name}").unlink()
    first, second = files(path)[1:]
    os.rename(path / first, path / "x")
    os.rename(path / second, path / first)
    os.rename(path / "x", path / second)
    assert first in problem(path)
    shutil.rmtree(path)
    shutil.copytree(other, path)
    assert "its manifest is of step 1" in problem(path)


def test_a_job_passes_over_what_only_reading_shows_and_refuses_it_by_name(copy):
    path = newest(copy)
    file = path / "rank00001-000.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 4
    file.write_bytes(data)
    words = [*JOB[:-4], "--max_steps", 4, "--num_kept_checkpoints", 3, "--output_dir", copy, "--resume_from_checkpoint"]
    refused = run_job(*words, path, world_size=2)
    assert refused.statuses == [2, 2], refused.output
    assert "llama_v2-3steps is damaged: rank00001-000.safetensors is not as it was written" in refused.output
    assert "Traceback" not in refused.output
    done = run_job(*words, "latest", world_size=2).succeeded()
    assert done.output.count("Passed over: checkpoint") == 1 and "Resumed from" in done.output
    assert "llama_v2-2steps at step 2" in done.output
    assert problem(newest(copy)) == "" and newest(copy).name == "llama_v2-4steps"


@pytest.mark.parametrize("what", ["content", "manifest"])
def test_a_checkpoint_that_is_passed_over_is_named_once(what, copy):
    path = newest(copy)
    if what == "manifest":
        (path / "manifest.json").write_text("{}")
    else:
        file = path / "rank00001-000.safetensors"
        data = bytearray(file.read_bytes())
        data[-5] ^= 4
        file.write_bytes(data)
    words = [*JOB[:-4], "--max_steps", 4, "--num_kept_checkpoints", 3, "--output_dir", copy]
    as_a_program = functools.partial(wrapped, "parse_args", train_main.log_to_console)
    done = run_job(*words, "--resume_from_checkpoint", "latest", prepare=lambda rank: as_a_program()).succeeded()
    said = [line for line in done.output.splitlines() if "Not resuming from" in line or "Passed over" in line]
    assert len(said) == 1 and path.name in said[0], done.output
