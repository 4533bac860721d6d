"""Damage to a checkpoint is found, whatever it is: every file, at many places."""

from __future__ import annotations

import random
import shutil

import pytest

from smp.checkpoint.directory import find_checkpoints, quick_problem
from smp.checkpoint.manifest import problems_of_files, read_manifest
from smp.errors import UserError
from smp.train import __main__ as train_main
from tests.faults.jobs import wrapped
from tests.job import LLAMA, flip, run_job

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


def resuming(run, source, world_size, prepare=None):
    words = [*JOB[:-4], "--max_steps", 4, "--num_kept_checkpoints", 3, "--output_dir", run]
    return run_job(*words, "--resume_from_checkpoint", source, world_size=world_size, prepare=prepare)


def as_a_program(rank: int) -> None:
    wrapped("parse_args", train_main.log_to_console)


def assert_one_is_named_once(done, path) -> None:
    said = [line for line in done.output.splitlines() if "Not resuming from" in line or "Passed over" in line]
    assert len(said) == 1 and path.name in said[0], done.output


def test_a_job_passes_over_what_only_reading_shows_and_refuses_it_by_name(copy):
    path = newest(copy)
    flip(path / "rank00001-000.safetensors")
    refused = resuming(copy, path, 2)
    assert refused.statuses == [2, 2], refused.output
    assert "llama_v2-3steps is damaged: rank00001-000.safetensors is not as it was written" in refused.output
    assert "Traceback" not in refused.output
    done = resuming(copy, "latest", 2, as_a_program).succeeded()
    assert_one_is_named_once(done, path)
    assert "Resumed from" in done.output and "llama_v2-2steps at step 2" in done.output
    assert problem(newest(copy)) == "" and newest(copy).name == "llama_v2-4steps"


def test_a_damaged_manifest_is_named_once(copy):
    path = newest(copy)
    (path / "manifest.json").write_text("{}")
    assert_one_is_named_once(resuming(copy, "latest", 1, as_a_program).succeeded(), path)
