"""``smp doctor`` as a whole: real processes, ranks that die, hang or are lost, and what is printed."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading

import pytest
import torch.distributed as dist

import smp.cli
from smp.doctor import network
from smp.doctor.check import Check, Request
from smp.doctor.checks import CHECKS
from smp.doctor.report import Diagnosis, Finding, Report, merged
from smp.doctor.supervisor import Board, examine_here, examine_rank, run_checks
from smp.runtime import Launch
from tests import doctor_checks
from tests.clock import HANG_SECONDS, Clock
from tests.ports import free_port

ROOT = pathlib.Path(__file__).parents[2]
ROW = '{"input_ids": [1, 2, 63]}\n'


def command(*words, launcher=(sys.executable, "-m", "smp", "doctor"), **environment):
    """Run the command in a process of its own: its status, its standard output, its standard error."""
    values = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    words = [*map(str, (*launcher, *words))]
    done = subprocess.run(words, cwd=ROOT, env=values, capture_output=True, text=True, timeout=HANG_SECONDS)
    return done.returncode, done.stdout, done.stderr


def by_check(diagnosis):
    """The findings by the name of their check."""
    found = {}
    for finding in diagnosis.findings if isinstance(diagnosis, Diagnosis) else diagnosis["findings"]:
        finding = finding if isinstance(finding, Finding) else Finding(**finding | {"ranks": tuple(finding["ranks"])})
        found.setdefault(finding.check, []).append(finding)
    return found


# ------------------------------------------------------------------------------------------------------------ real runs


def is_schema(found, size):
    """What the page on the doctor promises of the JSON object."""
    assert set(found) == {"version", "ranks", "findings", "measurements"} and found["version"] == 2
    assert [rank["rank"] for rank in found["ranks"]] == list(range(size))
    assert all(set(rank) == {"rank", "local_rank", "host", "pid", "state"} for rank in found["ranks"])
    for finding in found["findings"]:
        assert set(finding) == {"check", "status", "message", "ranks", "data"}
        assert (
            finding["status"] in ("ok", "warning", "problem") and finding["message"] and "\n" not in finding["message"]
        )
        assert finding["ranks"] and set(finding["ranks"]) <= set(range(size)) and isinstance(finding["data"], dict)
    assert set(found["measurements"]["by_rank"]) == {str(rank) for rank in range(size)}


def test_two_processes(tmp_path):
    """Also: nothing of transformers is imported where no job is described, and nothing is left behind."""
    trap = tmp_path / "trap" / "transformers"
    trap.mkdir(parents=True)
    (trap / "__init__.py").write_text("raise SystemError('imported')")
    status, out, err = command("--json", "--output_dir", tmp_path / "run", PYTHONPATH=str(trap.parent))
    assert len(out.splitlines()) == 1, (out, err)
    found = json.loads(out)
    is_schema(found, 2)
    assert status == 0 and not [f for f in found["findings"] if f["status"] == "problem"], out
    assert {finding["check"] for finding in found["findings"]} == {check.name for check in CHECKS} - {"end"}
    measured = found["measurements"]
    assert {row["operation"] for row in measured["exchange"]} == {"all_gather", "reduce_scatter", "all_reduce"}
    assert {row["bytes"] for row in measured["exchange"]} == {1 << 10, 1 << 24}
    assert all(row["seconds"] > 0 for row in measured["exchange"])
    assert set(measured["paths"]) == {"shared memory"} and measured["start_seconds"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["trap"]


@pytest.mark.slow
def test_under_torchrun(tmp_path):
    (tmp_path / "rows.jsonl").write_text(ROW * 200)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "-m", "smp", "doctor")
    words = ("--training_dir", tmp_path, "--model", "llama_tiny", "--vocab_size", 10)
    status, out, err = command(*words, launcher=torchrun)
    assert status == 1, err  # torchrun's own, for its worker's 1
    assert out.startswith("smp doctor: 2 processes on 1 host\n") and out.count("smp doctor:") == 1
    [line] = [line for line in out.splitlines() if line.startswith("  problem")]
    assert "token id 63 is outside the model's vocabulary of 10" in line
    assert "all_gather" in out and out.endswith(" 1 problem\n")


@pytest.mark.slow
def test_under_srun(tmp_path):
    """The variables of ``srun`` on two nodes, with one task each."""
    common = {
        "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NODELIST": "localhost,other", "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    ranks = []
    for rank in range(2):
        own = {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank), "SMP_HOST_ID": f"node{rank}"}
        words = [sys.executable, "-m", "smp", "doctor", "--json", "--output_dir", str(tmp_path / "run")]
        values = {**os.environ, **common, **own}
        ranks.append(subprocess.Popen(words, cwd=ROOT, env=values, stdout=subprocess.PIPE, text=True))
    outs = [rank.communicate(timeout=HANG_SECONDS)[0] for rank in ranks]
    found = json.loads(outs[0])
    assert outs[1] == "" and [rank.returncode for rank in ranks] == [1, 0]
    is_schema(found, 2)
    # Rank 0's address is this host's own, and so is the interface that gloo is to use.
    problems = [finding for finding in found["findings"] if finding["status"] == "problem"]
    assert {finding["check"] for finding in problems} == {"environment"}, problems
    assert set(found["measurements"]["paths"]) == {"network"}
    shared = by_check(found)["run directory"][0]
    assert shared.status == "ok" and "all hosts see what rank 0 writes" in shared.message


@pytest.mark.slow
def test_a_whole_configuration(tmp_path):
    words = ["--config", "configs/demo.yaml", "--output_dir", tmp_path / "run", "--json"]
    status, out, err = command(*words)
    found = by_check(json.loads(out))
    assert status == 0, (out, err)
    fits, data = found["dry run"]
    assert "llama_tiny: 2,077,920 parameters" in fits.message and "the training data is readable" in data.message
    assert "a checkpoint of 23.8 MiB, to be written in about" in found["disk"][0].message
    status, out, _ = command("--timeout", 30, "--lrr", 1, "--use_synthetic_data", 1)
    assert status == 1 and "--lrr" in out and "did you mean" in out


# ------------------------------------------------------------------------------------------------------------- statuses


def refused(capsys, *words):
    """What the command says, which does nothing."""
    assert smp.cli.main(["doctor", *map(str, words)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and len(err.splitlines()) == 1
    return err


@pytest.mark.parametrize(
    ("words", "pattern"),
    [
        (["--nproc_per_node", 0], "--nproc_per_node 0 is not allowed: give 1 to 1024"),
        (["--timeout", 0], "--timeout 0 is not allowed"),
        (["--", "--help"], "the flags after -- ask for help"),
    ],
)
def test_bad_words_are_refused(words, pattern, capsys):
    assert pattern in refused(capsys, *words)


def as_rank(monkeypatch, rank, port="29500"):
    given = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1"}
    for name, value in (given | {"MASTER_PORT": port}).items():
        monkeypatch.setenv(name, str(value))


def test_a_launchers_contradictions_are_refused(monkeypatch, capsys):
    as_rank(monkeypatch, 0)
    assert "without a launcher, and there is one" in refused(capsys, "--nproc_per_node", 2)
    as_rank(monkeypatch, 0, port="\u00b2")
    assert "MASTER_PORT=\u00b2 do not say where rank 0 is" in refused(capsys)
    monkeypatch.delenv("LOCAL_RANK")
    assert "sets only part of what torchrun sets: LOCAL_RANK" in refused(capsys)


def test_a_rank_that_does_not_reach_the_others_says_so(monkeypatch, capsys):
    as_rank(monkeypatch, 1, port=str(free_port()))
    assert "rank 1 does not reach the job's store at 127.0.0.1" in refused(capsys, "--timeout", 1)


# --------------------------------------------------------------------------------------------- ranks that die or hang


def test_a_check_that_kills_its_process_is_a_finding_and_the_others_report():
    found = by_check(examine_here(Request(timeout=HANG_SECONDS), 2, "tests.doctor_checks:KILL"))
    [problem] = [finding for finding in found["bad"] if finding.status == "problem"]
    assert "was killed by SIGKILL" in problem.message and problem.ranks == (1,)
    assert [finding.ranks for finding in found["bad"] if finding.message == "lives"] == [(0,)]
    assert any("rank(s) 1 have not come to the process group: see" in finding.message for finding in found["start"])


def test_a_check_that_hangs_is_left_behind():
    """A call to a dead disk or a broken driver ends only when these answer."""
    answers = threading.Event()

    def hang(ctx):
        answers.wait()
        ctx.problem("late")

    launch = Launch(1, 2, 1, 2)
    report, late = Report.of(launch), threading.Event()
    checks = [
        Check("good", doctor_checks.fine),
        Check("bad", hang, share=0.0),
        Check("host", doctor_checks.fine, "host"),
        Check("after", lambda ctx: (answers.set(), ctx.ok("after it"))),
        Check("together", lambda ctx: late.wait(), "job", share=0.0),
        Check("never", doctor_checks.fine),
    ]
    try:
        run_checks(Request(timeout=HANG_SECONDS), launch, checks, report, Board(dist.HashStore(), launch))
    finally:
        late.set()
    said = [(finding.check, finding.status) for finding in report.findings]
    assert said == [("good", "ok"), ("bad", "problem"), ("after", "ok"), ("together", "problem")]
    assert "did not end within 0 s: a training process would hang" in report.findings[1].message
    assert report.state == "failed in check 'together'"


def test_a_rank_that_is_lost_in_an_exchange():
    diagnosis = examine_here(Request(timeout=HANG_SECONDS), 2, "tests.doctor_checks:LOST")
    found = by_check(diagnosis)
    [problem] = [finding for finding in found["bad"] if finding.status == "problem"]
    assert "was killed by SIGKILL" in problem.message and problem.ranks == (1,) and diagnosis.exit_status == 1
    [follows] = found["more"]
    assert follows.status == "problem" and follows.ranks == (0,) and "rank 1" in follows.message
    assert "run directory" not in found
    assert "was killed by SIGKILL" not in diagnosis.ranks[0]["state"] and diagnosis.ranks[1]["state"] != "done"


@pytest.mark.slow
def test_nobody_waits_for_a_rank_that_is_lost_before_the_start():
    found = by_check(examine_here(Request(timeout=HANG_SECONDS), 2, "tests.doctor_checks:LOST_EARLY"))
    # Who has waited says for how long.
    assert any("rank(s) 1 have not come to the process group: see" in finding.message for finding in found["start"])


# -------------------------------------------------------------------------------------- ranks of somebody's launcher


def as_ranks(checks="GOOD", size=2, present=2):
    """Fork ``present`` of ``size`` ranks, as a launcher without a store of its own does.

    Returns their statuses, and the objects that they printed.
    """
    port = free_port()
    read, write = os.pipe()
    pids = []
    for rank in range(present):
        pids.append(os.fork())
        if not pids[-1]:
            status = 70
            try:
                os.close(read)
                os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
                os.environ.update(LOCAL_WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
                request, launch = Request(timeout=HANG_SECONDS), Launch(rank, size, rank, size)
                diagnosis = examine_rank(request, launch, f"tests.doctor_checks:{checks}")
                status = 0
                if diagnosis is not None:
                    os.write(write, diagnosis.as_json().encode() + b"\n")
                    status = diagnosis.exit_status
            finally:
                os._exit(status)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    return statuses, [json.loads(line) for line in said.splitlines()]


def test_ranks_report_to_rank_0():
    statuses, [found] = as_ranks()
    is_schema(found, 2)
    assert statuses == [0, 0] and [rank["state"] for rank in found["ranks"]] == ["done", "done"]
    assert [finding.ranks for finding in by_check(found)["good"]] == [(0,), (1,)]


def test_a_rank_that_was_never_started_is_named(monkeypatch):
    monkeypatch.setattr(network, "time", Clock(pace=100.0))
    statuses, [found] = as_ranks(present=1)
    assert statuses == [1]
    messages = [finding.message for finding in by_check(found)["start"]]
    assert "rank 1 has not come: see whether it was started" in messages
    assert any("rank(s) 1 have not come to the process group within 3240 s" in message for message in messages)
    assert found["ranks"][1]["state"] == "rank 1 has not come" and by_check(found)["good"]


def test_a_launcher_that_ends_the_job_gets_what_is_known(tmp_path, monkeypatch):
    monkeypatch.setenv("SMP_TEST_FOLDER", str(tmp_path))
    statuses, [found] = as_ranks("END_JOB")
    assert statuses == [1, -signal.SIGKILL]
    told, lost = [finding.message for finding in by_check(found)["bad"]]
    assert told == "was told to end by its launcher: see which process failed first"
    assert lost.startswith(f"rank 1 (host {socket.gethostname()}, pid ") and "has not ended: see whether it was" in lost
    assert found["ranks"][0]["state"] == "was told to end by its launcher"
    assert [finding.ranks for finding in by_check(found)["good"]] == [(0,), (1,)]  # what it said before is not lost


# --------------------------------------------------------------------------------------------------------------- shown


def test_what_people_read():
    findings = merged(
        [
            Finding("devices", "ok", "well", (0,)),
            Finding("devices", "ok", "well", (1,)),
            Finding("disk", "problem", "password=geheim is\x1b[31m full: free some", (2, 3)),
        ]
    )
    ranks = [{"rank": rank, "host": f"h{rank // 2}"} for rank in range(4)]
    text = Diagnosis(ranks, findings, {}).as_text()
    assert text.splitlines() == [
        "smp doctor: 4 processes on 2 hosts",
        "  ok       devices  ranks 0, 1: well",
        "  problem  disk     ranks 2, 3: password=*** is [31m full: free some",
        "",
        "1 ok, 0 warnings, 1 problem",
    ]
    assert "geheim" not in Diagnosis(ranks, findings, {}).as_json()
