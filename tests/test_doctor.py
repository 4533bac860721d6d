"""``smp doctor`` as a whole: real processes, ranks that die, hang or are slow, and what is printed."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch.distributed as dist

import smp.cli
import smp.cli.doctor
from smp.doctor import exchange, local, ranks, worker
from smp.doctor.checks import CHECKS
from smp.doctor.findings import Diagnosis, Finding, merged
from smp.doctor.local import examine_here
from smp.doctor.ranks import examine_rank
from smp.doctor.room import Check, Request
from smp.runtime import Launch
from tests.clock import HANG_SECONDS, Clock, wait_until
from tests.ports import free_port

ROOT = pathlib.Path(__file__).parent.parent
OF_THE_JOB = {check.name: check for check in CHECKS if check.scope == "job"}


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
        finding = finding if isinstance(finding, Finding) else Finding.from_json(finding)
        found.setdefault(finding.check, []).append(finding)
    return found


@pytest.fixture
def data(tmp_path):
    """A folder of rows with ids up to 63."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.jsonl").write_text('{"input_ids": [1, 2, 63]}\n' * 200)
    return tmp_path / "data"


# ------------------------------------------------------------------------------------------------------------ real runs


def is_schema(found, size):
    """What the page on the doctor promises of the JSON object."""
    assert set(found) == {"version", "ranks", "findings", "measurements"} and found["version"] == 1
    assert [rank["rank"] for rank in found["ranks"]] == list(range(size))
    assert all(set(rank) == {"rank", "local_rank", "host", "pid", "state"} for rank in found["ranks"])
    for finding in found["findings"]:
        assert set(finding) == {"check", "status", "message", "ranks", "data"}
        assert (
            finding["status"] in ("ok", "warning", "problem") and finding["message"] and "\n" not in finding["message"]
        )
        assert finding["ranks"] and set(finding["ranks"]) <= set(range(size)) and isinstance(finding["data"], dict)
    assert set(found["measurements"]["by_rank"]) == {str(rank) for rank in range(size)}


def test_two_processes(data, tmp_path):
    """Also: nothing of transformers is imported where no model is named, and nothing is left behind."""
    trap = tmp_path / "trap" / "transformers"
    trap.mkdir(parents=True)
    (trap / "__init__.py").write_text("raise SystemError('imported')")
    words = ["--json", "--training_dir", data, "--vocab_size", 64, "--output_dir", tmp_path / "run"]
    status, out, err = command(*words, PYTHONPATH=str(trap.parent))
    assert len(out.splitlines()) == 1, (out, err)
    found = json.loads(out)
    is_schema(found, 2)
    assert status == 0 and not [f for f in found["findings"] if f["status"] == "problem"], out
    assert {finding["check"] for finding in found["findings"]} == {check.name for check in CHECKS} - {"end"}
    measured = found["measurements"]
    assert {row["operation"] for row in measured["exchange"]} == {"all_gather", "reduce_scatter", "all_reduce"}
    assert {row["bytes"] for row in measured["exchange"]} == {1 << 10, 1 << 16, 1 << 20, 1 << 24}
    assert all(row["seconds"] > 0 for row in measured["exchange"])
    [pair] = measured["pairs"]
    assert pair["ranks"] == [0, 1] and pair["same_host"] and pair["bytes_per_second"] > 0
    assert set(measured["paths"]) == {"shared memory"} and len(measured["clock_offsets_seconds"]) == 2
    assert measured["by_rank"]["0"]["data"]["training_dir"]["files"] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "trap"]


def test_under_torchrun(data, tmp_path):
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "-m", "smp", "doctor")
    status, out, err = command("--training_dir", data, "--vocab_size", 10, launcher=torchrun)
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
    assert "llama_tiny: 2,077,920 parameters" in found["model"][0].message
    assert found["dry run"][0].message == "the training job accepts the settings and reads the data"
    assert len(found["disk"]) == 2 and len(found["data"]) == 2
    status, out, _ = command("--timeout", 30, "--", "--lrr", 1, "--use_synthetic_data", 1)
    assert status == 1 and "--lrr" in out and "did you mean" in out


# ------------------------------------------------------------------------------------------------------------- statuses


@pytest.mark.parametrize(
    ("words", "pattern"),
    [
        (["--nproc_per_node", 0], "--nproc_per_node 0 is not allowed: give 1 to 1024"),
        (["--timeout", 0], "--timeout 0 is not allowed"),
        (["--vocab_size", 0], "--vocab_size 0 is not allowed"),
        (["--modle", "x"], "unrecognized arguments: --modle"),
        (["--dataset_type", "csv"], "invalid choice: 'csv'"),
    ],
)
def test_bad_words_are_refused(words, pattern, capsys):
    assert smp.cli.main(["doctor", *map(str, words)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and len(err.splitlines()) == 1 and pattern in err


def test_a_contradictory_environment_is_a_finding(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert smp.cli.main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not any(finding["check"] in OF_THE_JOB for finding in found["findings"])
    [problem] = [finding for finding in found["findings"] if finding["status"] == "problem"]
    assert problem["check"] == "environment" and "sets only part of what torchrun sets" in problem["message"]


def test_one_object_for_all_ranks(monkeypatch, capsys):
    """What ranks other than 0 have to say on their own is for people, on standard error."""
    alone = Diagnosis([], [Finding("start", "problem", "lost", (1,))], {})
    monkeypatch.setattr(smp.cli.doctor, "examine_rank", lambda request, launch: alone)
    monkeypatch.setattr(smp.cli.doctor, "examine_alone", lambda request: alone)
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    for gone in ("TORCHELASTIC_RUN_ID", "LOCAL_RANK"):  # without the second the environment is refused
        monkeypatch.delenv(gone, raising=False)
        assert smp.cli.main(["doctor", "--json"]) == 1
        out, err = capsys.readouterr()
        assert out == "" and "lost" in err and "{" not in err
    monkeypatch.setenv("RANK", "0")
    assert smp.cli.main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["findings"]
    monkeypatch.setenv("PMI_RANK", "1")
    assert smp.cli.main(["doctor", "--json"]) == 1 and capsys.readouterr().out == ""


@pytest.mark.parametrize(("name", "value"), [("RANK", "\u00b2"), ("MASTER_PORT", "\u00b2")])
def test_digits_that_are_no_numbers(name, value, monkeypatch, capsys):
    given = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "a", "MASTER_PORT": 1}
    for each, text in (given | {name: value}).items():
        monkeypatch.setenv(each, str(text))
    assert smp.cli.main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["findings"]
    assert any(finding["status"] == "problem" and f"{name}" in finding["message"] for finding in found)


def test_help_of_the_job_is_no_job(capsys):
    assert smp.cli.main(["doctor", "--", "--help"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: the flags after -- ask for help") and err.count("\n") == 1


def test_a_number_of_processes_is_no_word_for_a_launchers_job(monkeypatch, capsys):
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    assert smp.cli.main(["doctor", "--nproc_per_node", "2"]) == 2
    assert "without a launcher, and there is one" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------- ranks that die or hang


def fine(room):
    room.ok(f"rank {room.launch.rank} was here")
    room.measure("here", True)


def of_rank(rank, act):
    """A check that does something on one rank."""

    def run(room):
        if room.launch.rank == rank:
            act(room)
        room.ok("lives")

    return run


def kill(room):
    room.warn("about to die")
    os.kill(os.getpid(), signal.SIGKILL)


def hang(room):
    time.sleep(3600)


def fail(room):
    raise KeyError("of a defect")


JOB = tuple(OF_THE_JOB[name] for name in ("start", "path", "clocks", "end"))


@pytest.fixture
def hanging(monkeypatch):
    """Time passes for the checks only while rank 1 is in the bad one and rank 0 has left it behind."""
    clock, news = Clock(), local.wait_for_news

    def wait_for_news(workers, seconds):
        news(workers, seconds)
        zero, one = ([*(each.at or ())][:1] for each in workers)
        if [check.name for check in one] == ["bad"] and "bad" not in [
            check.name for check in (*zero, *workers[0]._left)
        ]:
            clock.now += 1

    monkeypatch.setattr(worker, "time", clock)
    monkeypatch.setattr(local, "wait_for_news", wait_for_news)


@pytest.mark.parametrize(("act", "said"), [(kill, "was killed by SIGKILL"), (hang, "did not end within 2 s")])
def test_a_check_that_dies_or_hangs_is_a_finding_and_the_others_go_on(act, said, hanging):
    checks = (Check("bad", of_rank(1, act), share=2 / HANG_SECONDS), Check("good", fine), *JOB)
    found = by_check(examine_here(Request(timeout=HANG_SECONDS), 2, checks))
    [problem] = [finding for finding in found["bad"] if finding.status == "problem"]
    assert said in problem.message and problem.ranks == (1,)
    assert [finding.ranks for finding in found["bad"] if finding.message == "lives"] == [(0,)]
    assert [finding.message for finding in found["good"]] == ["rank 0 was here", "rank 1 was here"]
    assert found["clocks"][0].status == "ok" and "2 process(es)" in found["start"][0].message
    assert (act is kill) == any(finding.message == "about to die" for finding in found["bad"])


def test_an_error_of_a_check_is_a_finding():
    found = by_check(examine_here(Request(), 1, (Check("bad", of_rank(0, fail)), Check("good", fine))))
    assert [finding.message for finding in found["bad"]] == ["stopped by KeyError: 'of a defect'"]
    assert found["bad"][0].data["place"].startswith(__file__) and found["good"][0].status == "ok"


@pytest.mark.parametrize(
    ("act", "said"),
    [(kill, "was killed by SIGKILL"), pytest.param(hang, "did not end within 3 s", marks=pytest.mark.slow)],
)
def test_a_rank_that_is_lost_in_an_exchange(act, said, hanging):
    bad = Check("bad", of_rank(1, act), "job", 3 / HANG_SECONDS)
    checks = (JOB[0], bad, Check("more", lambda room: dist.barrier(), "job"), *JOB[1:])
    diagnosis = examine_here(Request(timeout=HANG_SECONDS), 2, checks)
    found = by_check(diagnosis)
    [problem] = [finding for finding in found["bad"] if finding.status == "problem"]
    assert said in problem.message and problem.ranks == (1,) and diagnosis.exit_status == 1
    [follows] = found["more"]
    assert follows.status == "problem" and follows.ranks == (0,) and "rank 1" in follows.message
    assert "path" not in found
    assert diagnosis.ranks[1]["state"].endswith("in check 'bad'")


def test_nobody_waits_for_a_rank_that_is_lost_before_the_start():
    bad = Check("start", of_rank(1, kill), "job")
    checks = {0: JOB, 1: (bad, *JOB[1:])}

    def start(room):
        checks[room.launch.rank][0].run(room)

    found = by_check(examine_here(Request(timeout=60.0), 2, (Check("start", start, "job", 6.0), *JOB[1:])))
    # Who has waited says for how long.
    assert any("rank(s) 1 have not come to the process group: see" in finding.message for finding in found["start"])


# -------------------------------------------------------------------------------------- ranks of somebody's launcher


def as_ranks(act, size=2, present=2, *, timeout=HANG_SECONDS, checks=None):
    """Fork ``present`` of ``size`` ranks, as a launcher without a store of its own does; ``act(rank)`` comes first.

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
                ranks._SILENT_SECONDS = HANG_SECONDS
                os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
                os.environ.update(LOCAL_WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
                chosen = act(rank) or checks or (Check("good", fine), *JOB)
                diagnosis = examine_rank(Request(timeout=timeout), Launch(rank, size, rank, size), chosen)
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
    statuses, [found] = as_ranks(lambda rank: None)
    is_schema(found, 2)
    assert statuses == [0, 0] and [rank["state"] for rank in found["ranks"]] == ["done", "done"]
    assert [finding.ranks for finding in by_check(found)["good"]] == [(0,), (1,)]


def test_a_rank_whose_processes_are_killed_is_named(tmp_path):
    published = tmp_path / "published"

    def note(rank):
        publish = ranks.Board.publish

        def noting(self, worker, **options):
            publish(self, worker, **options)
            if rank == 1 and worker.at is not None and worker.at[0].name == "bad":
                published.touch()

        ranks.Board.publish = noting

    def kill_all(room):
        wait_until(published.exists)
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(3600)  # ended with its parent

    checks = (Check("good", fine), Check("bad", of_rank(1, kill_all)), *JOB)
    statuses, [found] = as_ranks(note, checks=checks)
    assert statuses == [1, -9]
    [problem] = [finding for finding in by_check(found)["bad"] if finding.status == "problem"]
    assert problem.message.startswith(f"rank 1 (host {socket.gethostname()}, pid ") and "has ended" in problem.message
    assert [finding.ranks for finding in by_check(found)["good"]] == [(0,), (1,)]  # what it said before is not lost
    assert any("rank(s) 1 have not come to the process group" in f.message for f in by_check(found)["start"])


def test_a_rank_that_was_never_started_is_named():
    def hasten(rank):
        ranks.time = Clock(pace=HANG_SECONDS / 50)

    statuses, [found] = as_ranks(hasten, present=1)
    assert statuses == [1]
    messages = [finding.message for finding in by_check(found)["start"]]
    assert any("rank 1 has not come within 600 s: see whether it was started" in message for message in messages)
    assert found["ranks"][1]["state"] == "has not come within 600 s" and by_check(found)["good"]


def test_without_rank_0_a_rank_says_what_it_found_itself():
    def only_the_second(rank):
        if rank == 0:
            os._exit(9)

    checks = (Check("good", fine, share=HANG_SECONDS), *JOB)
    statuses, [found] = as_ranks(only_the_second, timeout=1.0, checks=checks)
    assert statuses == [9, 1]
    assert "rank 1 does not reach the job's store at 127.0.0.1" in by_check(found)["start"][0].message
    assert by_check(found)["good"][0].message == "rank 1 was here"


def test_a_launcher_that_ends_the_job_gets_what_is_known():
    def end(room):
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(3600)

    checks = (Check("good", fine), Check("bad", of_rank(0, end)), *JOB)
    statuses, [found] = as_ranks(lambda rank: None, checks=checks)
    assert statuses[0] == 1
    assert "was told to end by its launcher: this check and those after" in by_check(found)["bad"][0].message
    assert found["ranks"][0]["state"] == "was told to end by its launcher" and by_check(found)["good"]


# ---------------------------------------------------------------------------------- what only all can see together


@pytest.mark.slow
def test_a_slow_pair_is_named(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(exchange, "time", clock)
    for name in ("send", "recv"):
        inner = getattr(dist, name)

        def timed(tensor, other, *arguments, inner=inner, **options):
            clock.now += 1e-5 + 1e-9 * tensor.nbytes + (0.05 if {dist.get_rank(), other} == {1, 3} else 0)
            return inner(tensor, other, *arguments, **options)

        monkeypatch.setattr(dist, name, timed)
    checks = tuple(OF_THE_JOB[name] for name in ("start", "pairs", "end"))
    diagnosis = examine_here(Request(), 4, checks)
    found = by_check(diagnosis)["pairs"]
    assert any([1, 3] in finding.data.get("pairs", []) for finding in found if finding.status == "warning"), found
    assert len(diagnosis.measurements["pairs"]) == 6 and diagnosis.exit_status == 0


def test_a_clock_that_is_ahead_is_named(monkeypatch):
    monkeypatch.setattr(exchange, "wall_clock", lambda: 1e9 + 5 * (dist.get_rank() == 1))
    checks = tuple(OF_THE_JOB[name] for name in ("start", "clocks", "end"))
    [finding] = by_check(examine_here(Request(), 3, checks))["clocks"]
    assert finding.status == "warning" and "clocks differ by 5.0 s (rank(s) 1 by +5.0 s)" in finding.message


def test_a_backend_that_falls_back_says_why(monkeypatch):
    monkeypatch.setattr("smp.comm.segment.refusal", lambda: "of the weather")
    checks = tuple(OF_THE_JOB[name] for name in ("start", "path", "end"))
    diagnosis = examine_here(Request(), 2, checks)
    [finding] = by_check(diagnosis)["path"]
    assert finding.status == "warning" and "by gloo (of the weather)" in finding.message
    assert set(diagnosis.measurements["paths"]) == {"gloo"}
    other = examine_here(Request({"distributed_backend": "gloo"}), 2, checks)
    assert by_check(other)["path"][0].message == "backend gloo exchanges everything itself"


@pytest.mark.parametrize("shared", [True, False])
def test_a_run_directory_that_is_not_shared_is_found(shared, monkeypatch, tmp_path):
    real = exchange.check_same_directory

    def apart(room):
        room.state["hosts"] = ["a", "b"]
        folder = tmp_path / ("one" if shared else str(room.launch.rank))
        folder.mkdir(exist_ok=True)
        os.chdir(folder)
        real(room)

    monkeypatch.setattr(exchange, "_MARK_SECONDS", 0.3)
    checks = (OF_THE_JOB["start"], Check("run directory", apart, "job"), OF_THE_JOB["end"])
    [finding] = by_check(examine_here(Request({"output_dir": "run"}), 2, checks))["run directory"]
    if shared:
        assert finding.status == "ok" and "all hosts see" in finding.message
    else:
        assert finding.status == "problem" and "rank(s) 1 do not see what rank 0 writes" in finding.message
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


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
