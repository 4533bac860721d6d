"""What one GPU shows in two calls: how fast is it, how much memory does it take, is it right.

    bash benchmarks/gpu_first.sh                                              # or: make gpu
    bash benchmarks/gpu_first.sh --done gpu_first/results.jsonl --out second  # goes on from an earlier call
    bash benchmarks/gpu_first.sh --only tests --budget 230                    # tests/gpu alone

First the environment, then timed measurements alone on the GPU, then short jobs side by side with their checks, and
plans of what was timed beside them, then tests/gpu, file by file. Nothing here imports torch: what does not import
there is a result, too.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import select
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.gpu import processes, report
from benchmarks.gpu.cases import Case, cases, cases_of_several
from benchmarks.gpu.jobs import Check, Runner, checks
from benchmarks.gpu.processes import ROOT, call, environment
from benchmarks.gpu.report import Result, Results

IMPORTS = 45.0  # seconds that a worker may take before its first measurement
STARTS = 12.0  # seconds that a process takes to import torch
JOBS = 120.0  # seconds after which no job and no plan goes on: tests come after them
TESTS = 25.0  # seconds, without which no file of tests is begun
PARTS = ("timed", "jobs", "tests")
# Files whose tests no GPU has run first.
ORDER = ("fsdp1", "train", "comm", "tensor_parallel", "checkpoint", "context_parallel", "memory")


class Worker:
    """A process that measures one case after the other; replaced when it hangs or dies."""

    def __init__(self, work: Path, stand_in: Path | None):
        self._work, self._stand_in = work, stand_in
        self._process: subprocess.Popen | None = None
        self._count = 0
        self.answered = False  # once

    @property
    def running(self) -> bool:
        """Whether the next measurement needs no new process."""
        return self._process is not None

    def measure(self, case: Case, limit: float) -> tuple[dict[str, Any], str]:
        """Return what was found, with ``why`` if it failed, and the worker's log of it."""
        if self._process is None:
            self._start()
            limit += IMPORTS
        process, log = self._process, self._log
        assert process is not None and process.stdin is not None and process.stdout is not None
        before, ready, line = log.stat().st_size, True, b""
        try:
            process.stdin.write(json.dumps(dataclasses.asdict(case)).encode() + b"\n")
            process.stdin.flush()
            ready = bool(select.select([process.stdout], [], [], limit)[0])
            line = process.stdout.readline() if ready else b""
        except BrokenPipeError:
            pass
        why = f"not done within {limit:.0f} s"
        if ready and not line:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            why = f"the process ended with status {process.returncode}: {processes.last_words(log)}"
        found = json.loads(line) if line else {"why": why, "broken": True}
        self.answered = self.answered or bool(line)
        if found.pop("broken"):
            self.close()
        return found, log.read_bytes()[before:].decode(errors="replace")

    def _start(self) -> None:
        self._count += 1
        self._log = self._work / f"worker{self._count}.txt"
        words, pipes = ["-m", "benchmarks.gpu.timed"], {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        if self._stand_in is not None:
            from smp.plan.shim import python_with

            words = [*python_with(self._stand_in, "benchmarks.gpu.timed")[1:], str(self._stand_in)]
        self._process = processes.start(words, self._log, environment(), **pipes)

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            processes.end(self._process)
            self._process = None


def alone(results: Results, arguments: argparse.Namespace, wanted: list[Case], work: Path, deadline: float) -> None:
    """Measure cases one after the other, each if it can still end."""
    worker, failures = Worker(work, arguments.stand_in), 0
    try:
        for case in wanted:
            left = deadline - time.monotonic()
            if left < case.expected + (0.0 if worker.running else STARTS) or failures == 3:
                results.add("left", case.name)
                continue
            found, log = worker.measure(case, min(case.timeout, left))
            failures = failures + 1 if found["why"] and not worker.answered else 0
            add(results, case, found, log)
    finally:
        worker.close()


def together(results: Results, wanted: list[Case], work: Path, deadline: float) -> None:
    """Measure cases of several GPUs, each in processes of its own."""
    for number, case in enumerate(wanted):
        left = deadline - time.monotonic()
        if left < case.expected:
            results.add("left", case.name)
            continue
        log, file = work / f"several{number}.txt", work / f"several{number}.json"
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(case.processes)]
        words += ["-m", "benchmarks.gpu.timed", "--case", json.dumps(dataclasses.asdict(case)), str(file)]
        why = call(words, log, environment(gpus=None), min(case.timeout, left))
        found = json.loads(file.read_text()) if file.exists() else {"why": why}
        found.pop("broken", None)
        add(results, case, found, log.read_text(errors="replace"))


def add(results: Results, case: Case, found: dict[str, Any], log: str) -> None:
    """Write what was found."""
    if found.get("missing"):
        results.add("absent", case.name, missing=found["missing"])
        return
    about = {"layers": case.layers, "what": case.what, "flags": case.flags, "turn": case.turn}
    results.add(case.kind, case.name, log=log, **about, **found)


def to_plan(results: Results, arguments: argparse.Namespace) -> list[Case]:
    """Return the measured steps whose plan is not known."""
    known = report.succeeded(results.all)
    found = [case for case in cases(tiny=arguments.tiny) if case.method == "step" and case.turn <= 1]
    return [case for case in found if case.name in known and f"plan: {case.name}" not in known]


def plan(results: Results, case: Case, work: Path, deadline: float) -> None:
    """Write what ``smp plan`` says about a case, on the host's cores."""
    if deadline - time.monotonic() < STARTS:
        return
    device = next(str(each["facts"].get("device")) for each in results.all if each["kind"] == "environment")
    device = "h200" if "H200" in device else "h100"
    name, found = re.sub(r"\W+", "_", case.name), {}
    log, file = work / f"plan_{name}.txt", work / f"plan_{name}.json"
    words = ["-m", "smp", "plan", "--search", "0", "--nodes", "1", "--gpus_per_node", "1", "--device", device]
    words += ["--json", str(file), *case.words()]
    why = call(words, log, environment(gpus=0, threads=1), deadline - time.monotonic())
    try:
        if not why:
            layout = json.loads(file.read_text())["layouts"][0]
            found = {key: layout["memory"][key] for key in ("allocated", "reserved")}
            found["seconds"] = layout["step"]["seconds"]
    except (OSError, ValueError, KeyError) as error:
        why = f"{type(error).__name__}: {error}"
    results.add("plan", f"plan: {case.name}", why, log.read_text(errors="replace"), of=case.name, **found)


def run_tests(results: Results, files: list[str], earlier: list[Result], work: Path, deadline: float) -> None:
    """Run tests file by file; what has passed is left out next time, also of a file that was not done in time."""
    for file in files:
        left, log = deadline - time.monotonic(), work / f"{Path(file).stem}.txt"
        if left < TESTS:
            results.add("left", file)
            continue
        before = [test for each in earlier if each["name"] == file for test in each.get("passed", [])]
        words = ["-m", "pytest", "-v", "-p", "no:cacheprovider", file, *(f"--deselect={test}" for test in before)]
        why = call(words, log, {**environment(gpus=None), "SMP_TEST_GPU": "1"}, left)
        said = log.read_text(errors="replace")
        ends = re.findall(r"^(tests/\S+::.+?) (PASSED|FAILED|SKIPPED|ERROR)", said, re.MULTILINE)
        counts = Counter(how.lower() for _, how in ends)
        failed = [test.partition("::")[2] for test, how in ends if how in ("FAILED", "ERROR")]
        if not before and not counts["passed"] and not counts["failed"]:
            why = f"no test was executed; {why}".removesuffix("; ")
        passed = [*before, *(test for test, how in ends if how == "PASSED")]
        found = ", ".join(f"{count} {how}" for how, count in counts.items()) + (
            f", {len(before)} before" if before else ""
        )
        results.add("tests", file, "; ".join([*failed, *([why] if why else [])]), said, found=found, passed=passed)


def test_files() -> list[str]:
    """Return the files of ``tests/gpu`` in the order in which they are run."""

    def position(name: str) -> int:
        return next((number for number, word in enumerate(ORDER) if word in name), len(ORDER))

    return [
        f"tests/gpu/{each.name}"
        for each in sorted((ROOT / "tests/gpu").glob("test_*.py"), key=lambda p: position(p.name))
    ]


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="gpu_first.sh", description=(__doc__ or "").partition("\n")[0], allow_abbrev=False
    )
    out = Path(os.environ.get("OUT", "gpu_first"))
    parser.add_argument("--out", type=Path, default=out, help="folder of the three files (default: $OUT, or gpu_first)")
    parser.add_argument(
        "--done", type=Path, help="results.jsonl of an earlier call: what was right there is not run again"
    )
    parser.add_argument(
        "--budget", type=float, help="seconds in all (default 400, with --done 250; at 590 it is stopped)"
    )
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS), help="default: all")
    parser.add_argument("--match", nargs="+", metavar="TEXT", help="only what has one of these in its name")
    parser.add_argument(
        "--processes", type=int, default=1, help="time the whole model on so many GPUs, and nothing else"
    )
    parser.add_argument("--side_by_side", type=int, default=6, help="jobs at a time (default 6)")
    parser.add_argument("--tiny", action="store_true", help="a trial with a tiny model, also without a GPU")
    parser.add_argument("--stand_in", type=Path, help="with --tiny: the shim of tests/cuda_path, built")
    arguments = parser.parse_args(argv)
    arguments.out = arguments.out.resolve()
    arguments.budget = arguments.budget or (400.0 if arguments.done is None else 250.0)
    if arguments.done is not None and not arguments.done.is_file():
        parser.error(f"--done {arguments.done}: there is no such file; give the results.jsonl of an earlier call")
    earlier = arguments.out / "results.jsonl"
    if earlier.exists() and (arguments.done is None or arguments.done.resolve() != earlier):
        parser.error(f"{earlier} is an earlier call's: go on from it with --done {earlier}, or give another --out")
    return arguments


def wanted(arguments: argparse.Namespace, earlier: list[Result]) -> tuple[list[Check], list[Case], list[str]]:
    """Return the checks, cases and test files that are to be run; what has failed before comes last."""
    right, tried = report.succeeded(earlier), {each["name"] for each in earlier}
    only, several = arguments.only, arguments.processes > 1

    def chosen(part: str, named: Iterable[tuple[str, Any]]) -> list[Any]:
        found = [(name, each) for name, each in named if part in only and name not in right]
        found = [(name, each) for name, each in found if any(text in name for text in arguments.match or [name])]
        return [each for _, each in sorted(found, key=lambda pair: pair[0] in tried)]

    timed = cases_of_several(arguments.processes, tiny=arguments.tiny) if several else cases(tiny=arguments.tiny)
    return (
        chosen("jobs", [] if several else ((check.name, check) for check in checks())),
        chosen("timed", ((case.name, case) for case in timed)),
        chosen("tests", [] if several else ((file, file) for file in test_files())),
    )


def begin(arguments: argparse.Namespace, work: Path) -> tuple[Results, list[Result], str]:
    """Find out what is here; return the results with those of an earlier call, those, and why nothing can be run."""
    log, said = work / "about.txt", work / "about.json"
    with said.open("w") as stdout:
        why = call(["-m", "benchmarks.gpu.about"], log, environment(gpus=None), 120.0, stdout=stdout)
    facts = json.loads(said.read_text()) if not why else {}
    earlier = report.read(arguments.done) if arguments.done else []
    device = [each["facts"].get("device") for each in earlier if each["kind"] == "environment"]
    earlier = [each for each in earlier if each["kind"] not in ("left", "absent", "environment")]
    if device and device[-1] != facts.get("device"):
        facts["earlier"] = f"timed on {device[-1]}: not taken over"
        earlier = [each for each in earlier if each["kind"] not in ("step", "measure", "plan")]
    if not why and "smp does not import" in facts:
        why = f"smp does not import: {facts['smp does not import']}"
    elif not why and not facts.get("device") and not arguments.tiny:
        why = "there is no GPU that torch can use"
    elif not why and arguments.processes > 1 and not arguments.tiny and facts["GPUs"] < arguments.processes:
        why = f"--processes {arguments.processes}, and there are {facts['GPUs']} GPUs"
    results = Results(arguments.out, earlier)
    results.add("environment", "environment", why, log.read_text(errors="replace"), facts=facts)
    return results, earlier, why


def main(argv: list[str]) -> int:
    """Run everything that fits into the budget; 0: all is right, 1: nothing could be run, 3: something has failed."""
    arguments, began = parse(argv), time.monotonic()
    end = began + arguments.budget
    processes.end_all_on_signals()
    with tempfile.TemporaryDirectory(prefix="gpu_first_") as temporary:
        work = Path(temporary)
        results, earlier, why = begin(arguments, work)
        if why:
            return 1
        right, timed, files = wanted(arguments, earlier)
        if arguments.processes > 1:
            together(results, timed, work, end)
        else:
            alone(results, arguments, timed, work, end)
        jobs_end = end if arguments.tiny else min(end, time.monotonic() + JOBS)
        with ThreadPoolExecutor(
            max(1, arguments.side_by_side // 2)
        ) as pool:  # beside the jobs: it takes the host's cores
            for case in to_plan(results, arguments):
                pool.submit(plan, results, case, work, jobs_end)
            Runner(results, arguments, work, jobs_end).run(right)
        run_tests(results, files, earlier, work, end)
    print((arguments.out / "summary.md").read_text(), flush=True)
    failed = [each["name"] for found in report.newest(results.all).values() for each in found if not each["ok"]]
    print(f"{len(failed)} failed, {time.monotonic() - began:.0f} s: {arguments.out}/summary.md", flush=True)
    return 3 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
