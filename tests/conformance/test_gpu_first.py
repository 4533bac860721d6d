"""``benchmarks/gpu_first.sh`` with a tiny model, on a CPU and on the stand-in GPU: files, failures, a second call."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest
import torch

from benchmarks.gpu import processes, report, run
from benchmarks.gpu.cases import Case, cases, cases_of_several
from benchmarks.gpu.jobs import checks, jobs
from tests.clock import HANG_SECONDS
from tests.cuda_path.reports import shim

ROOT = processes.ROOT
# One of each kind; on a CPU tests/gpu is skipped, and torchao lies apart.
MATCH = (
    "what a GPU chooses",
    "4 bits",
    "loss in chunks of 1024",
    "torch's parts, 1",
    "asynchronous save",
    "tensor_parallel_gpu",
)


def call(out, *words: object) -> subprocess.CompletedProcess:
    command = ["bash", ROOT / "benchmarks" / "gpu_first.sh", "--budget", 570, "--out", out, *words]
    environment = {**os.environ, "PYTHON": sys.executable}
    return subprocess.run([*map(str, command)], capture_output=True, text=True, env=environment, timeout=600)


def named(out) -> dict[str, dict]:
    return {each["name"]: each for each in report.read(out / "results.jsonl")}


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A call with a tiny model on a CPU."""
    out = tmp_path_factory.mktemp("first") / "out"
    return out, call(out, "--tiny", "--side_by_side", 2, "--match", *MATCH)


@pytest.mark.slow
def test_a_call_ends_and_has_a_result_for_everything(first):
    out, done = first
    assert done.returncode == 3, done.stderr  # something has failed
    assert sorted(path.name for path in out.iterdir()) == sorted(report.FILES)
    found, file = named(out), "tests/gpu/test_tensor_parallel_gpu.py"
    loss, bits = "loss in chunks of 1024, 1 layers", "a base in 4 bits, compiled: near eager"
    right = {"environment", loss, f"plan: {loss}", "torch's parts, 1 layers", "asynchronous save"}  # a plan of a GPU
    right |= {"job: llama", "job: chosen", "what a GPU chooses by itself: near eager"}
    assert found.keys() == right | {file, bits}
    assert [name for name in found if not found[name]["ok"]] == [file] and found[bits]["kind"] == "absent"
    assert found[file]["why"].startswith("no test was executed")
    page, failures = (out / "summary.md").read_text(), (out / "failures.txt").read_text()
    assert f"Not here: {bits} (needs torchao)." in page and "extrapolated" not in page
    assert f"| {loss} |" in page and f"===== {file}: " in failures
    assert len(found[loss]["losses"]) == 8 and found[loss]["tokens"] == 64


@pytest.mark.slow
def test_a_second_call_tries_only_what_has_failed(first, tmp_path):
    before, _ = first
    done = call(tmp_path / "out", "--tiny", "--done", before / "results.jsonl", "--match", *MATCH)
    printed = re.findall(r"^\[ *\d+ s\] (.*)", done.stdout, re.MULTILINE)
    assert [line.partition(":")[0] for line in printed[1:]] == [
        "not here",
        "FAILED tests/gpu/test_tensor_parallel_gpu.py",
    ]
    assert named(tmp_path / "out").keys() == named(before).keys()
    assert "near eager | ok: loss and grad_norm within" in (tmp_path / "out" / "summary.md").read_text()
    again = call(before, "--tiny")
    assert again.returncode == 2 and "go on from it with --done" in again.stderr


def test_without_a_gpu_it_ends_with_status_1(tmp_path):
    done = call(tmp_path / "out")
    assert done.returncode == 1 and "there is no GPU that torch can use" in done.stdout
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(report.FILES)


@pytest.mark.slow
def test_a_call_on_the_stand_in_gpu(tmp_path):
    check, case = "Llama in fp32: a CPU's numbers", "loss in chunks of 1024, 1 layers"
    done = call(tmp_path / "out", "--tiny", "--stand_in", shim(), "--side_by_side", 2, "--match", check, case)
    found = named(tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    assert found.keys() == {"environment", "job: llama", "job: llama, CPU", check, case, f"plan: {case}"}
    assert found[f"plan: {case}"]["allocated"] > 0 and len(found[case]["losses"]) == 8


@pytest.mark.slow
def test_several_processes_measure_one_step(tmp_path):
    done = call(tmp_path / "out", "--tiny", "--processes", 2, "--match", "eager, full, tp")
    found = [each for each in report.read(tmp_path / "out" / "results.jsonl") if each["kind"] == "step"]
    assert done.returncode == 0, done.stdout
    assert [(each["layout"], each["tokens"]) for each in found] == [("llama3_8b, 1 x 1 x 64, 1 of 2", 32.0)]


@pytest.mark.smoke
def test_the_outer_program_needs_the_standard_library_alone():
    code = "import sys; before = set(sys.modules); import benchmarks.gpu.run; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {name.partition(".")[0] for name in done.stdout.split()} <= {*sys.stdlib_module_names, "benchmarks"}


@pytest.mark.smoke
def test_every_name_is_unique_and_used():
    several = cases_of_several(8, tiny=False)
    timed, right = cases(tiny=False), checks()
    for named_ in (timed, several, right, jobs()):
        assert len({each.name for each in named_}) == len(named_)
    assert {name for check in right for name in check.jobs} == {job.name for job in jobs()}
    assert [case.layers for case in timed if case.what == "default"] == [32, 6, 6, 6]
    files = run.test_files()
    assert "fsdp1" in files[0] and {ROOT / file for file in files} == {*(ROOT / "tests" / "gpu").glob("test_*.py")}
    for word in run.ORDER:
        assert any(word in file for file in files), word


WORKER = """
import json, os, sys, time
for line in sys.stdin:
    name = json.loads(line)["name"]
    print("did", name, file=sys.stderr, flush=True)
    if name == "dies": os._exit(9)
    if name == "hangs": time.sleep(600)
    print(json.dumps({"why": "ValueError: no" if name == "fails" else "", "broken": name == "fails"}), flush=True)
"""


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Measure cases with a worker of this test's; returns the results."""
    begin, started = processes.start, []

    def start(words, log, env, **pipes):
        started.append(words)
        return begin(["-c", WORKER], log, env, **pipes)

    monkeypatch.setattr(processes, "start", start)
    monkeypatch.setattr(run, "IMPORTS", HANG_SECONDS)

    def measure(wanted, seconds=HANG_SECONDS):
        results = report.Results(tmp_path / "out", [])
        run.alone(results, argparse.Namespace(stand_in=None), wanted, tmp_path, time.monotonic() + seconds)
        return results.all, len(started)

    return measure


def test_a_worker_that_dies_or_hangs_is_replaced(measured, tmp_path, monkeypatch):
    names = ("one", "dies", "two", "fails", "three", "hangs", "four")
    found, started = measured([Case(name, "measure", "", 0.0, 0.1 if name == "hangs" else 99.0) for name in names])
    assert [each["name"] for each in found] == [*names] and started == 4
    assert {each["name"]: each["why"] for each in found if not each["ok"]} == {
        "dies": "the process ended with status 9: did dies",
        "fails": "ValueError: no",
        "hangs": "not done within 0 s",
    }
    kept = (tmp_path / "out" / "failures.txt").read_text()
    assert "did hangs" in kept and "did four" not in kept


def test_nothing_begins_that_cannot_end(measured):
    short, long = Case("short", "measure", "", 0.0, 99.0), Case("long", "measure", "", 2 * HANG_SECONDS, 99.0)
    found, _ = measured([long, short])
    assert [(each["name"], each["kind"]) for each in found] == [("long", "left"), ("short", "measure")]


def test_workers_that_never_start_end_the_measurements(measured, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "WORKER", "raise ImportError('no torch')")
    found, started = measured([Case(str(number), "measure", "", 0.0, 99.0) for number in range(5)])
    assert [each["kind"] for each in found] == ["measure"] * 3 + ["left"] * 2 and started == 3
    assert "ImportError: no torch" in found[0]["why"]


def test_the_hard_stop_ends_what_was_started(tmp_path):
    code = f"""
import pathlib
from benchmarks.gpu import processes
processes.end_all_on_signals()
child = processes.start(["-c", "import time; time.sleep(600)"], pathlib.Path({str(tmp_path / "log")!r}), {{}})
print(child.pid, flush=True)
child.wait()
"""
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    parent.send_signal(signal.SIGTERM)
    assert parent.wait(HANG_SECONDS) == 124
    status = pathlib.Path(f"/proc/{child}/stat")
    while status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)


@pytest.mark.smoke
def test_the_page_has_the_figures():
    def step(what, layers, seconds, **more):
        common = {
            "kind": "step",
            "ok": True,
            "why": "",
            "name": f"{what}, {layers} layers",
            "what": what,
            "turn": 0,
        }
        common |= {"layers": layers, "seconds": seconds, "tokens": 8192, "flops_per_token": layers * 1e10}
        common |= {"peak_flops": 1e15, "allocated": 3 * report.GIB, "reserved": None, "first_s": 1.0, "graphs": 1}
        common |= {"breaks": 0, "flushes": 1, "sm_mhz": 1650.4, "watts": 690.0, "losses": [2.0], "layout": "1 of 1"}
        return {**common, **more}

    steps = [
        step("eager", 4, 0.5),
        step("eager", 6, 0.7, losses=[2.2]),
        step("eager", 4, 0.6, turn=1, name="one"),
        step("eager", 4, 0.8, turn=2, name="two", sm_mhz=None),
    ]
    late = {"kind": "step", "ok": False, "why": "OutOfMemoryError: 80 GiB", "name": "x", "what": "x", "layers": 4}
    plan = {"kind": "plan", "name": "plan: eager, 4 layers", "of": "eager, 4 layers", "ok": True, "why": ""}
    plan |= {"allocated": 4 * report.GIB, "reserved": 5 * report.GIB, "seconds": 0.25}
    left = {"kind": "left", "name": "y", "ok": True, "why": ""}
    absent = {**left, "kind": "absent", "name": "z", "missing": "torchao"}
    page = report.page([absent, {**late, "name": "eager, 4 layers"}, {**left, "name": "x"}, *steps, plan, late, left])
    # 8192 tokens in half a second at 40 GFLOP each, of 1000 TFLOP/s
    figures = "500.0 | 250.0 | 16384 | 0.655 | 3.00 | 0.750 | - | - | 1 | 1650 | 690 | 1.0 | 1 | 0 | 0.0e+00"
    assert f"| eager, 4 layers | {figures} |" in page
    assert "| eager, 6 layers | 700.0 | - | 11703 |" in page
    assert "| x | failed: OutOfMemoryError: 80 GiB |" in page and "Failed (failures.txt has the output): x." in page
    # A block takes 0.1 s, the rest of a step 0.1 s.
    assert "| eager | 4 and 6 | 100.00 | 0.819 | 100.0 |" in page
    assert "| eager, 4 layers | 2 | 700.0 | 600.0 to 800.0 | 1650, - |" in page
    assert "Not begun, for want of time: y." in page and "Not here: z (needs torchao)." in page


@pytest.mark.smoke
def test_what_is_known_is_not_run_again():
    def result(name, kind="step", **more):
        return {"name": name, "kind": kind, "ok": True, "why": "", **more}

    arguments = run.parse(["--only", "timed", "--match", "fp8: go", "loss in chunks of 1024", "adapters, none"])
    earlier = [result("fp8: go or no-go"), result("adapters, none, 32 layers", ok=False), result("save", "left")]
    _, timed, files = run.wanted(arguments, earlier)
    assert [case.name for case in timed] == [
        "loss in chunks of 1024, 1 layers",
        "adapters, none, 32 layers",
    ] and files == []
    assert report.succeeded(earlier) == {"fp8: go or no-go"} and arguments.budget == 400


@pytest.mark.smoke
def test_times_of_another_device_are_not_taken_over(tmp_path, monkeypatch):
    def called(words, log, env, timeout, *, stdout):
        log.touch()
        stdout.write(json.dumps({"device": "H200", "GPUs": 1}))
        return ""

    monkeypatch.setattr(run, "call", called)
    kinds = ("environment", "check", "step", "plan", "tests", "left")
    earlier = [
        {"kind": kind, "name": kind, "ok": True, "why": "", "found": "", "facts": {"device": "H100"}} for kind in kinds
    ]
    (tmp_path / "done").write_text("".join(json.dumps(each) + "\n" for each in earlier) + '{"cut')
    words = ["--done", str(tmp_path / "done"), "--out", str(tmp_path / "out")]
    results, known, why = run.begin(run.parse(words), tmp_path)
    assert [each["kind"] for each in known] == ["check", "tests"] and not why
    assert results.all[-1]["facts"]["earlier"] == "timed on H100: not taken over"


@pytest.mark.smoke
def test_tests_that_have_passed_are_left_out(tmp_path, monkeypatch):
    asked = []

    def called(words, log, env, timeout):
        asked.append((words, env["SMP_TEST_GPU"]))
        log.write_text("tests/gpu/test_a.py::one[x y] PASSED [ 50%]\ntests/gpu/test_a.py::two FAILED [100%]\n")
        return "ended with status 1: FAILED"

    monkeypatch.setattr(run, "call", called)
    results = report.Results(tmp_path, [])
    for _ in range(2):
        run.run_tests(results, ["tests/gpu/test_a.py"], list(results.all), tmp_path, time.monotonic() + 99)
    assert "--deselect=tests/gpu/test_a.py::one[x y]" not in asked[0][0] and asked[0][1] == "1"
    assert "--deselect=tests/gpu/test_a.py::one[x y]" in asked[1][0]
    assert results.all[0]["found"] == "1 passed, 1 failed" and results.all[0]["why"].startswith("two; ended")
    run.run_tests(results, ["tests/gpu/test_b.py"], [], tmp_path, time.monotonic())
    assert results.all[-1]["kind"] == "left"


@pytest.mark.smoke
@pytest.mark.parametrize("tiny", [True, False])
def test_every_case_is_a_job_that_can_run(tiny):
    from benchmarks.gpu import timed
    from smp.errors import Problems
    from smp.models.model_config import resolve_model
    from smp.parallel.parallelize import find_problems
    from smp.runtime import Launch
    from smp.train.arguments import parse_args
    from smp.train.checked_job import make_job
    from smp.train.job import choose_settings, planned_batch

    for case in cases(tiny=tiny):
        if timed.missing(case):
            continue
        config, problems = parse_args(case.words()), Problems()
        job = make_job(config, Launch(), torch.device("cuda", 0), resolve_model(config.model), problems)
        job.choices.extend(choose_settings(job, 139 * report.GIB, batch=planned_batch(config, job.mesh)))
        assert {"expandable_segments", "loss_chunk_tokens"} & {*job.given.undecided()} <= {c.name for c in job.choices}
        assert problems + find_problems(job.model.hf_config, job.setup) == [], case.name
        assert timed.layout(case, job.model.sequence_length, 1, 1)["tokens"] == (
            case.accumulation * case.batch * (64 if tiny else case.length)
        )


@pytest.mark.smoke
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_products_in_fp8_are_near_those_in_bf16(recipe):
    from benchmarks.gpu import fp8

    leaves = [torch.randn(size, 64, dtype=torch.bfloat16, requires_grad=True) for size in (32, 48)]
    gradient = torch.randn(32, 48, dtype=torch.bfloat16)
    found = fp8.Fp8Linear.apply(*leaves, recipe, fp8.cast)
    right = leaves[0] @ leaves[1].t()
    for mine, theirs in zip(
        (found, *torch.autograd.grad(found, leaves, gradient)),
        (right, *torch.autograd.grad(right, leaves, gradient)),
        strict=True,
    ):
        assert (mine - theirs).norm() < 0.06 * theirs.norm()


@pytest.mark.smoke
def test_kernels_are_grouped():
    from benchmarks.gpu.timed import grouped

    kernels = [("nvjet_sm90", 6.0, 3), ("triton_poi", 1.0, 2), ("cudnn_sdpa_bprop", 2.0, 1), ("gemm", 1.0, 1)]
    assert grouped(kernels) == [
        "   10.00 ms of kernels",
        "    7.00 ms  70.0% products", "        6.00 ms     3 x nvjet_sm90", "        1.00 ms     1 x gemm",
        "    2.00 ms  20.0% attention", "        2.00 ms     1 x cudnn_sdpa_bprop",
        "    1.00 ms  10.0% compiled", "        1.00 ms     2 x triton_poi",
    ]  # fmt: skip
