"""``benchmarks/gpu_step.py`` with a model for a CPU: every row, finite numbers, a failure that stops nothing."""

from __future__ import annotations

import importlib
import json
import math
import pathlib
import re
import warnings

import pytest
import torch

from tests.flags import in_child

FOLDER = pathlib.Path(__file__).parents[2] / "benchmarks"
TINY = ["--tiny", "--quick", "--layers", "1", "2"]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")  # the Trainer sets it
    return importlib.import_module("gpu_step")


def in_this_process(script):
    """Measure in a forked process, which need not import anything, and compile nothing."""

    def begin(case, folder, timeout):
        @in_child
        def measure():
            with torch.compiler.set_stance("force_eager"):
                script.work(json.dumps(vars(case)), folder / "now.json")

        measure()
        return json.loads((folder / "now.json").read_text())

    return begin


def rows(page: str, section: str) -> list[list[str]]:
    """The rows of the first table after a heading."""
    table = re.search(r"(?:^\|.*\n)+", page[page.index(f"# {section}\n") :], re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table[0].splitlines()[2:]]


def test_every_row_is_there_and_finite(script, tmp_path):
    arguments = script.parse([*TINY, "--out", str(tmp_path), "--flags", "--loss_chunk_tokens 16"])
    results = script.run(arguments, in_this_process(script))
    assert [each for each in results if "failed" in each] == []
    page = (tmp_path / "gpu_step.md").read_text()
    steps = rows(page, "One GPU")
    names = [*script.VARIANTS, "--loss_chunk_tokens 16"]
    assert [(row[0], row[1]) for row in steps] == [(layers, name) for layers in "12" for name in names]
    for _, name, milliseconds, speed, _, ratio, peak, predicted, _, drift in steps:
        numbers = [float(cell) for cell in (milliseconds, speed, ratio, peak)]
        assert all(math.isfinite(number) and number > 0 for number in numbers), (name, numbers)
        assert float(drift) < 1e-5, name  # they do the same work
        assert predicted == "-" if name.startswith(("Trainer", "torch")) else float(predicted) > 0
    blocks = rows(page, "A block")
    assert [row[0] for row in blocks] == names
    assert all(math.isfinite(float(cell)) for row in blocks for cell in (row[1], row[3], row[4]))
    assert len(rows(page, "Attention")) == 8
    assert re.search(r"first asynchronous save of [\d.]+ GiB", page)

    def never(*_):
        raise AssertionError("measured again")

    assert script.run(arguments, never) == results


def test_a_failure_is_a_row_and_the_rest_goes_on(script, tmp_path):
    def begin(case, folder, timeout):
        if case.variant == "Trainer":
            return {**vars(case), "failed": "OutOfMemoryError: 80 GiB"}
        more = {"synchronisations": {"a.py:1 `int(x)`": 2.0}, "peak_flops": 989e12, "flops_per_token": 1e10}
        return {**vars(case), "seconds": 0.25 * case.layers, "peak": 2**30, "losses": [2.0], **more}

    options = ["--tiny", "--layers", "4", "6", "--sequence", "8192", "--sections", "--out", str(tmp_path)]
    chosen = ["--variants", "smp, eager, full", "Trainer", "torch's parts"]
    script.run(script.parse([*options, *chosen]), begin)
    page = (tmp_path / "gpu_step.md").read_text()
    found = {(row[0], row[1]): row[2:] for row in rows(page, "One GPU")}
    assert found["6", "Trainer"][0] == "failed: OutOfMemoryError: 80 GiB"
    # 8192 tokens a second at 10 GFLOP each, of 989 TFLOP/s
    assert found["4", "torch's parts"] == ["1000.0", "8192", "8.3%", "1.00", "1.0", "-", "2.0", "0.0e+00"]
    assert [row[0] for row in rows(page, "A block")] == ["smp, eager, full", "torch's parts"]
    assert "- 2.0: a.py:1 `int(x)`" in page
    left = script.run(script.parse([*options, *chosen, "--rounds", "2", "--time_limit", "-1"]), begin)
    assert len(left) == 6  # nothing was begun


def test_processes_are_started_and_end_in_time(script, tmp_path):
    one = ["--tiny", "--layers", "1", "--variants", "smp, eager, full", "--sections", "--out", str(tmp_path)]
    alone, *several = script.run(script.parse([*one, "--processes", "2"]))
    assert "failed" not in alone and alone["processes"] == 1
    assert [each["processes"] for each in several] == [2, 2, 2]
    assert [each["data_ranks"] for each in several[:2]] == [2, 1]
    late = script.start(script.Case("smp, eager, full", 1, 64, tiny=True), tmp_path / "late", 0.1)
    assert late["failed"] == "not done within 0.1 s"


def test_a_line_that_synchronises_is_named(script, monkeypatch):
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    show, watch = warnings.showwarning, importlib.import_module("gpu_meter").Watch()

    def synchronise():
        warnings.warn(
            "called a synchronizing CUDA operation (Triggered internally at CUDAFunctions.cpp:1.)", stacklevel=1
        )
        warnings.warn("something else", stacklevel=1)

    watch.start()
    for _ in range(3):
        synchronise()
    watch.stop()
    assert modes == ["warn", "default"] and warnings.showwarning is show
    [(line, count)] = watch.lines.items()
    assert count == 3 and line.startswith("tests/conformance/test_gpu_step_benchmark.py:") and "`warnings.warn(" in line
