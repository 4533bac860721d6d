"""Several hosts, with real wires between them: a host that is lost, a network that is cut, and the run that goes on."""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import multiprocessing
import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import LlamaForCausalLM  # noqa: F401  imported before the ranks are forked

import smp.cli
import train_lib
from smp.checkpoint.hf_export import export_hf  # noqa: F401  imported before the ranks are forked
from smp.comm.wire import unreachable
from smp.doctor.check import Request
from smp.doctor.checks import CHECKS
from smp.doctor.supervisor import examine_rank
from smp.faults import watchdog
from smp.mesh import lay_out
from smp.runtime import Launch
from tests import netns
from tests.clock import HANG_SECONDS, SharedClock, wait_until
from tests.distributed import run_distributed
from tests.faults.jobs import at_call, checkpoints, last_step, slowly, wrapped
from tests.faults.test_lost_ranks import children
from tests.job import LLAMA, RunningJob, losses, read_metrics

ROOT = pathlib.Path(__file__).parent.parent.parent
HYBRID = ["--sharding_strategy", "hybrid_shard", "--hybrid_shard_degree", 2]
JOB = [*LLAMA, "--use_synthetic_data", 1, "--lr_decay_iters", 20, "--global_batch_size", 8]
JOB += ["--distributed_timeout", HANG_SECONDS / 2]
PORT = 29400
STEPS = 10


@pytest.fixture(scope="module")
def hosts():
    """Names of three hosts."""
    if reason := netns.refusal():
        pytest.skip(reason)
    with netns.hosts(3) as names:
        yield names


def environment(rank: int, layout: list[int]) -> dict[str, str]:
    """What a launcher tells a rank; ``layout`` has the ranks of each host."""
    host = next(i for i in range(len(layout)) if rank < sum(layout[: i + 1]))
    values = {
        "RANK": rank, "WORLD_SIZE": sum(layout), "LOCAL_RANK": rank - sum(layout[:host]),
        "LOCAL_WORLD_SIZE": layout[host], "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": PORT,
    }  # fmt: skip
    return {name: str(value) for name, value in values.items()}


def _rank(rank: int, layout: list[int], names: list[str], words: list[str], output: str, prepare) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    status = 1
    try:
        netns.enter(names[next(i for i in range(len(layout)) if rank < sum(layout[: i + 1]))])
        os.environ.update(environment(rank, layout))
        if prepare is not None:
            prepare(rank)
        status = train_lib.main(words)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(ValueError):
            sys.stdout.flush()
        os._exit(status)


@contextlib.contextmanager
def running(names, layout, *words, output, prepare=None):
    """The job's ranks on their hosts, as ``srun`` starts them; what still runs in the end is killed."""
    output.touch()
    context = multiprocessing.get_context("fork")
    texts = [str(word) for word in words]
    processes = [
        context.Process(target=_rank, args=(rank, layout, names, texts, str(output), prepare))
        for rank in range(sum(layout))
    ]
    for process in processes:
        process.start()
    try:
        yield RunningJob(processes, output)
    finally:
        for process in processes:
            process.kill()
            process.join()


def finished(names, layout, *words, output):
    """Run the job to its end."""
    with running(names, layout, *words, output=output) as job:
        return job.wait().succeeded()


def by_step(run: pathlib.Path) -> dict[int, float]:
    """The loss of each step; of steps that were made twice, the later one."""
    return {line["step"]: line["loss"] for line in read_metrics(run)}


@pytest.fixture(scope="module")
def undisturbed(hosts, tmp_path_factory):
    """A run of two hosts with two ranks each that nothing happens to."""
    root = tmp_path_factory.mktemp("hosts")
    words = [*JOB, *HYBRID, "--max_steps", STEPS, "--checkpoint_freq", 4, "--comm_report", 1]
    words += ["--output_dir", root / "run"]
    finished(hosts, [2, 2], *words, output=root / "output")
    return root / "run"


def is_the_same_run(run: pathlib.Path, undisturbed: pathlib.Path, steps: int = STEPS) -> None:
    """Every loss and the last checkpoint are equal, bit for bit."""
    assert by_step(run) == by_step(undisturbed) and max(by_step(run)) == steps
    ends = [str(path / "checkpoints" / f"llama_v2-{steps}steps") for path in (run, undisturbed)]
    assert smp.cli.main(["diff", "--values", *ends]) in (0, 1)  # settings name other directories, and --max_steps
    for end in zip(*(sorted(pathlib.Path(each).glob("*.safetensors")) for each in ends), strict=True):
        first, second = (load_file(path) for path in end)
        assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def disturbed(names, layout, run, output, disturb, *words, steps=6, prepare=slowly):
    """Train until some steps are done, let something happen, and wait: outcome, and the ranks' pids."""
    words = [*JOB, *words, "--max_steps", 100_000, "--checkpoint_freq", 4, "--output_dir", run]
    with running(names, layout, *words, output=output, prepare=prepare) as job:
        job.wait_until(lambda: last_step(run) >= steps)
        disturb(job)
        return job.wait(), job.pids


# ----------------------------------------------------------------------------------------------------------------------


def test_two_hosts_train_as_one_does(hosts, undisturbed, tmp_path):
    words = [*JOB, *HYBRID, "--max_steps", STEPS, "--comm_report", 1, "--output_dir", tmp_path / "run"]
    outcome = finished(hosts, [4], *words, output=tmp_path / "output")
    assert losses(undisturbed) == pytest.approx(losses(tmp_path / "run"), rel=1e-6)
    assert "network" not in outcome.output and "network" in (undisturbed.parent / "output").read_text()
    assert "dp_replicate 2 x dp_shard 2" in outcome.output


def _timeouts(seconds):
    groups = lay_out(2, 1, 1).join("cpu").device_mesh.get_all_groups()
    assert {group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups} == {seconds}


@pytest.mark.parametrize("backend", ["smddp", "gloo"])
def test_the_groups_of_the_mesh_keep_the_timeout_of_the_job(backend):
    run_distributed(_timeouts, 77.0, world_size=2, backend=backend, timeout=77)


@pytest.mark.smoke
def test_whom_an_error_tells_of():
    begun = "smddp: all_reduce #3 of group 0: the connection to rank 5 on another host failed: "
    assert unreachable(RuntimeError(f"{begun}Connection closed by peer [::1]:1")) == (5, False)
    assert unreachable(RuntimeError(f"{begun}Timed out waiting 4000ms for recv")) == (5, True)
    told = f"{begun}Connection closed by peer; rank 5 has failed: {begun.replace('5', '7')}Read error [::1]:2"
    assert unreachable(RuntimeError(told)) == (7, False)
    assert unreachable(RuntimeError("smddp: rank 1 (pid 3) died")) is None


@pytest.mark.parametrize(
    "lost",
    [
        pytest.param([2, 3], id="1", marks=pytest.mark.slow),
        pytest.param([0, 1], id="0, of the store"),
        pytest.param([3], marks=pytest.mark.slow),
    ],
)
def test_a_lost_host_is_named_and_the_run_goes_on(lost, hosts, undisturbed, tmp_path):
    run = tmp_path / "run"
    outcome, pids = disturbed(
        hosts, [2, 2], run, tmp_path / "first", lambda job: job.signal(signal.SIGKILL, *lost), *HYBRID
    )
    assert outcome.statuses == [-9 if rank in lost else 1 for rank in range(4)], outcome.output
    assert "Traceback (most" not in outcome.output, outcome.output
    # A rank that outlives another one of its host only by a moment names that one.
    said = [line for line in outcome.output.splitlines() if re.search(r"^(error: )?rank \d: lost rank", line)]
    named = {rank for rank in lost for line in said if f"lost rank {rank} (" in line and f"pid {pids[rank]})" in line}
    assert named, outcome.output
    if len(lost) > 1:
        assert (
            f"the connection is broken, as where a process or its host has ended; on that host: ranks {lost[0]}, "
            in ("".join(said))
        )
    words = [*JOB, *HYBRID, "--max_steps", STEPS, "--checkpoint_freq", 4, "--output_dir", run]
    outcome = finished(hosts, [2, 2], *words, "--resume_from_checkpoint", "latest", output=tmp_path / "second")
    assert "Resumed from" in outcome.output
    is_the_same_run(run, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("host", [1, 0])
def test_a_cut_network_ends_both_hosts_and_the_run_goes_on(host, hosts, undisturbed, tmp_path):
    run, go = tmp_path / "run", tmp_path / "go"

    def prepare(rank):
        """No rank waits for less than is given to all before the network is cut."""

        def hold():
            wait_until(go.exists)
            for group in list(dist.distributed_c10d._world.pg_map):
                dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=4), group)

        wrapped("forward", at_call(7, hold))

    def cut(job):
        netns.cut(hosts[host])
        go.touch()

    try:
        outcome, _ = disturbed(hosts, [2, 2], run, tmp_path / "first", cut, *HYBRID, prepare=prepare)
    finally:
        netns.cut(hosts[host], mend=True)
    assert outcome.statuses == [1] * 4, outcome.output
    said = [line for line in outcome.output.splitlines() if "no answer from rank" in line]
    assert any(line.endswith("on that host: ranks 2, 3") for line in said), outcome.output
    assert any(line.endswith("on that host: ranks 0, 1") for line in said), outcome.output
    words = [*JOB, *HYBRID, "--max_steps", STEPS, "--checkpoint_freq", 4, "--output_dir", run]
    finished(hosts, [2, 2], *words, "--resume_from_checkpoint", "latest", output=tmp_path / "second")
    is_the_same_run(run, undisturbed)


@pytest.mark.slow
def test_the_watchdog_ends_hosts_that_do_not_reach_each_other(hosts, undisturbed, tmp_path):
    run, limits = tmp_path / "run", ["--watchdog_timeout", 4]
    clock = SharedClock(tmp_path / "clock")

    def prepare(rank):
        slowly(rank)
        watchdog.time = clock

    def cut(job):
        netns.cut(hosts[1])
        clock.run()

    try:
        outcome, _ = disturbed(hosts, [2, 2], run, tmp_path / "first", cut, *HYBRID, *limits, prepare=prepare)
    finally:
        netns.cut(hosts[1], mend=True)
    assert outcome.statuses == [1] * 4, outcome.output
    assert "error: no progress within --watchdog_timeout 4" in outcome.output


@pytest.mark.slow
@pytest.mark.parametrize("lost", [[2, 3], [0, 1]])
def test_over_gloo_a_lost_host_ends_the_other_one(lost, hosts, undisturbed, tmp_path):
    """gloo names an address at best, and where the store is gone as well its answer is waited for."""
    run, words = tmp_path / "run", [*HYBRID, "--distributed_backend", "gloo"]
    outcome, _ = disturbed(
        hosts, [2, 2], run, tmp_path / "first", lambda job: job.signal(signal.SIGKILL, *lost), *words
    )
    assert outcome.statuses == [-9 if rank in lost else 1 for rank in range(4)], outcome.output
    words = [*JOB, *HYBRID, "--max_steps", STEPS, "--checkpoint_freq", 4, "--output_dir", run]
    finished(hosts, [2, 2], *words, "--resume_from_checkpoint", "latest", output=tmp_path / "second")
    got, wanted = by_step(run), by_step(undisturbed)
    assert [got[step] for step in wanted] == pytest.approx([wanted[step] for step in wanted], rel=1e-6)


@pytest.mark.slow
def test_three_hosts_go_on_as_two(hosts, undisturbed, tmp_path):
    run = tmp_path / "run"
    full = ["--sharding_strategy", "full_shard"]
    outcome, _ = disturbed(hosts, [1, 1, 1], run, tmp_path / "first", lambda job: job.signal(signal.SIGKILL, 2), *full)
    assert outcome.statuses == [1, 1, -9], outcome.output
    assert "lost rank 2" in outcome.output
    words = [*JOB, *full, "--max_steps", STEPS, "--checkpoint_freq", 4, "--output_dir", run]
    finished(hosts, [1, 1], *words, "--resume_from_checkpoint", "latest", output=tmp_path / "second")
    got, wanted = by_step(run), by_step(undisturbed)
    assert got.keys() == wanted.keys()
    assert [got[step] for step in wanted] == pytest.approx([wanted[step] for step in wanted], rel=1e-5)


# ------------------------------------------------------------------------------------------------------------- torchrun


def torchrun(names, node: int, log: pathlib.Path, *words: object) -> subprocess.Popen:
    """One host's launcher, in a session of its own."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node_rank", str(node)]
    launcher += ["--nproc_per_node", "2", "--master_addr", "10.77.0.1", "--master_port", str(PORT + 1)]
    values = {**os.environ, "OMP_NUM_THREADS": "1", "SMP_HOST_ID": names[node], "GLOO_SOCKET_IFNAME": netns.INTERFACE}
    with log.open("a") as file:
        return subprocess.Popen(
            [*launcher, "train_lib.py", *map(str, words)], cwd=ROOT, env=values, stdout=file, stderr=file,
            preexec_fn=functools.partial(netns.enter, names[node]), start_new_session=True,
        )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("lost", [1, 0])
def test_torchrun_on_two_hosts(lost, hosts, undisturbed, tmp_path):
    run, logs = tmp_path / "run", [tmp_path / "0", tmp_path / "1"]
    words = [*JOB, *HYBRID, "--checkpoint_freq", 4, "--output_dir", run, "--resume_from_checkpoint", "latest"]

    def start(steps):
        return [torchrun(hosts, node, logs[node], *words, "--max_steps", steps) for node in range(2)]

    def everything():
        return "\n".join(log.read_text() for log in logs)

    nodes = start(100_000)
    try:
        alive = lambda: all(node.poll() is None for node in nodes)  # noqa: E731
        wait_until(lambda: last_step(run) >= 6, alive=alive, said=everything)
        for pid in [*children(nodes[lost].pid), nodes[lost].pid]:
            os.kill(pid, signal.SIGKILL)
        reached = checkpoints(run)
        assert nodes[1 - lost].wait(HANG_SECONDS) == 1 and reached, everything()
        assert f"on that host: ranks {2 * lost}, {2 * lost + 1}" in everything()
        # Killed at any step, it may be past the one at which the other run ended.
        aim = max(STEPS, max(by_step(run)) + 2)
        nodes = start(aim)
        assert [node.wait(HANG_SECONDS) for node in nodes] == [0, 0], everything()
    finally:
        for node in nodes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGKILL)
            node.wait()
    assert "Resumed from" in everything()
    whole = undisturbed
    if aim > STEPS:
        whole = tmp_path / "whole"
        longer = [*JOB, *HYBRID, "--max_steps", aim, "--checkpoint_freq", 4, "--output_dir", whole]
        finished(hosts, [2, 2], *longer, output=tmp_path / "output")
    is_the_same_run(run, whole, aim)


# --------------------------------------------------------------------------------------------------------------- doctor


def _examine(layout: list[int], names: list[str], rank: int) -> None:
    host = next(i for i in range(len(layout)) if rank < sum(layout[: i + 1]))
    netns.enter(names[host])
    values = environment(rank, layout)
    os.environ.update(values)
    numbers = [int(values[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    diagnosis = examine_rank(Request(timeout=HANG_SECONDS), Launch(*numbers), f"{__name__}:DOCTOR")
    if diagnosis is not None:
        sys.stdout = os.fdopen(os.dup(1), "w")
        print(diagnosis.as_json(), flush=True)
    os._exit(0)


DOCTOR = [check for check in CHECKS if check.name in ("environment", "host name") or check.scope == "job"]


def test_the_doctor_sees_two_hosts(hosts, tmp_path):
    layout = [2, 2]
    context = multiprocessing.get_context("fork")
    with (tmp_path / "out").open("w+") as file:
        saved = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            ranks = [context.Process(target=_examine, args=(layout, hosts, rank)) for rank in range(4)]
            for rank in ranks:
                rank.start()
            for rank in ranks:
                rank.join(HANG_SECONDS)
        finally:
            os.dup2(saved, 1)
            os.close(saved)
        found = json.loads((tmp_path / "out").read_text())
    assert set(found["measurements"]["paths"]) == {"shared memory and network"}, found
    assert not [each for each in found["findings"] if each["status"] == "problem"], found["findings"]
