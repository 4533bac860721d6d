"""Run torch's own suite for process groups over the backend ``smddp`` and over gloo, and compare test by test.

``torch.testing._internal.distributed.distributed_test`` is in torch's wheel; it needs the package ``expecttest``. It
chooses its tests by the name of the backend when it is imported. Here it is always imported as for gloo, and its
``BACKEND`` is replaced afterwards by a name that starts ``smddp`` groups and passes for gloo where a test asks. What
stays out for ``smddp``: the lists of backends whose C++ profiler events (shapes, asynchronous) the suite looks at.

    python benchmarks/torch_suite.py --processes 4 --output suite.json
"""

from __future__ import annotations

import argparse
import collections
import json
import multiprocessing
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import unittest

import smp.comm

BACKENDS = ("gloo", "smddp")

# torch.distributed.monitored_barrier refuses, before it calls it, every group whose backend is not named gloo.
REFUSED_BY_NAME = (
    "test_monitored_barrier_failure_order",
    "test_monitored_barrier_gloo",
    "test_monitored_barrier_gloo_subgroup",
    "test_monitored_barrier_wait_all_ranks",
)


class PassesForGloo(str):
    """A backend's name that equals gloo's too."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return str(self) == other or other == "gloo"

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash("gloo")


def _suite_module(backend: str, processes: int):
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(processes), DISTRIBUTED_TESTS_DEFAULT_TIMEOUT="100")
    from torch.testing._internal import common_distributed

    if processes > 2:  # the tests that ask for a large world only use ranks 1 and 2
        common_distributed.skip_if_small_worldsize = lambda test: test
    from torch.testing._internal.distributed import distributed_test

    if backend != "gloo":
        distributed_test.BACKEND = PassesForGloo(backend)
        os.environ["BACKEND"] = backend
    return distributed_test


def _test_case(module, backend: str, counts: str):
    """Return the suite's tests as a class whose ranks are forked, so that they do not import everything again."""

    class TorchSuite(module.TestDistBackend, module.DistributedTest._DistTestBase):
        def setUp(self):
            super().setUp()
            self._start_processes(multiprocessing.get_context("fork").Process)

        def run_test(self, test_name, parent_pipe):
            try:
                super().run_test(test_name, parent_pipe)
            finally:
                calls = smp.comm.report().calls(path="shared memory")
                pathlib.Path(counts, f"{test_name}.{self.rank}").write_text(str(calls))

    if backend != "gloo":
        for name in REFUSED_BY_NAME:
            why = "dist.monitored_barrier takes only groups whose backend is named gloo"
            setattr(TorchSuite, name, unittest.skip(why)(getattr(TorchSuite, name)))
    return TorchSuite


def _outcome(test: unittest.TestCase) -> dict:
    """Run one test: whether it passed, failed or was skipped, why, and how many seconds it took."""
    result, started = unittest.TestResult(), time.monotonic()
    unittest.TestSuite([test]).run(result)
    broken = [why for _, why in result.failures + result.errors]
    broken += ["passed, but was expected to fail" for _ in result.unexpectedSuccesses]
    skipped = [why for _, why in result.skipped]
    outcome = "failed" if broken else "skipped" if skipped else "passed"
    return {"outcome": outcome, "why": "\n".join(broken or skipped), "seconds": round(time.monotonic() - started, 1)}


def run(backend: str, processes: int, only: str, output: pathlib.Path) -> None:
    """Run the suite over one backend, in this process, and write the outcomes."""
    tests = {}
    with tempfile.TemporaryDirectory() as counts:
        case = _test_case(_suite_module(backend, processes), backend, counts)
        for name in unittest.TestLoader().getTestCaseNames(case):
            if only in name:
                tests[name] = _outcome(case(name))
                calls = [int(file.read_text()) for file in pathlib.Path(counts).glob(f"{name}.*")]
                tests[name]["shared_memory_calls"] = sum(calls)
                print(f"{tests[name]['outcome']:8} {name}", file=sys.stderr, flush=True)
    output.write_text(json.dumps({"backend": backend, "processes": processes, "tests": tests}, indent=1))


def compare(reference: dict, ours: dict) -> str:
    """Return the counts, and what passes on gloo and not here, as text."""
    lines = []
    for run_ in (reference, ours):
        counts = collections.Counter(test["outcome"] for test in run_["tests"].values())
        counted = ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped"))
        lines.append(f"{run_['backend']}: {len(run_['tests'])} tests, {counted}")
    ran = [test for test in ours["tests"].values() if test["shared_memory_calls"]]
    lines.append(f"{ours['backend']}: {len(ran)} tests exchanged through shared memory")
    for name, test in reference["tests"].items():
        mine = ours["tests"][name]
        if mine["outcome"] != test["outcome"]:
            lines.append(
                f"{name}: {test['outcome']} on {reference['backend']}, {mine['outcome']}: {mine['why'][-2000:]}"
            )
    skips = collections.Counter(test["why"] for test in ours["tests"].values() if test["outcome"] == "skipped")
    lines += [f"skipped {count}: {why}" for why, count in skips.most_common()]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--only", default="", help="only tests whose name contains this")
    parser.add_argument("--output", type=pathlib.Path, required=True, help="JSON file with both runs")
    parser.add_argument(
        "--backend", choices=BACKENDS, help="run only this one, here; otherwise both are run and compared"
    )
    arguments = parser.parse_args()
    if arguments.backend:
        run(arguments.backend, arguments.processes, arguments.only, arguments.output)
        return 0
    runs = []
    for backend in BACKENDS:
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder, "run.json")
            options = ["--processes", str(arguments.processes), "--only", arguments.only, "--output", str(file)]
            subprocess.run([sys.executable, __file__, "--backend", backend, *options], check=True)
            runs.append(json.loads(file.read_text()))
    arguments.output.write_text(json.dumps(runs, indent=1))
    print(compare(*runs))
    return int(any(test["outcome"] == "failed" for test in runs[1]["tests"].values()))


if __name__ == "__main__":
    sys.exit(main())
