"""Shared test setup: offline, quiet, deterministic."""

import gc
import os
import pathlib
import sys
from multiprocessing import forkserver

# Set before any Hugging Face import: tests never reach for a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# What reads a shared buffer after it was given back then reads NaN.
os.environ.setdefault("SMP_POISON_SHARED_BUFFERS", "1")
if os.environ.get("SMP_TEST_GPU") != "1":
    # Ranks are forked, which a process that has touched CUDA cannot do; those of tests/gpu are not.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import pytest
import torch

torch.set_num_threads(1)


def start_fork() -> None:
    """Leave what a forked rank inherits from the process of the tests alone, and drop pools whose threads it has not.

    A collection would copy the inherited pages, and the end of an inherited process group waits for its threads.
    """
    gc.freeze()
    if compiler := sys.modules.get("torch._inductor.async_compile"):
        compiler.AsyncCompile.pool.cache_clear()


os.register_at_fork(after_in_child=start_fork)

HERE = pathlib.Path(__file__).parent
GPU = "tests/gpu/"
# Of tests/gpu, those that start several processes, which a mistake in one process would fail as well.
SEVERAL_PROCESSES = ("test_train_gpu.py", "test_fsdp1_gpu.py", "test_comm_cuda.py", "test_tensor_parallel_gpu.py")
_EXECUTED = ["passed", "failed", "error", "xfailed", "xpassed"]


@pytest.fixture(autouse=True)
def own_fork_server():
    """Stop the fork server that a test's data workers came from: a rank forked later would take it for its child."""
    yield
    forkserver._forkserver._stop()  # Python's own, for tests


def pytest_collection_modifyitems(items):
    """Leave conformance and faults to ``make test-all``, but for what is marked ``smoke``; order those for GPUs."""
    if all(item.nodeid.startswith(GPU) for item in items):
        names = SEVERAL_PROCESSES
        items.sort(key=lambda item: names.index(item.path.name) if item.path.name in names else -1)
    for item in items:
        if item.path.relative_to(HERE).parts[0] in ("conformance", "faults") and not item.get_closest_marker("smoke"):
            item.add_marker(pytest.mark.full)


def pytest_collection_finish():
    """Leave what collecting has imported out of each garbage collection."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session):
    """Fail a run of tests/gpu in which no test was executed: skipped tests look like success."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:  # a process of xdist
        return
    skipped, executed = ([r for how in hows for r in reporter.stats.get(how, [])] for hows in (["skipped"], _EXECUTED))
    if skipped and not executed and all(report.nodeid.startswith(GPU) for report in skipped):
        reporter.write_line("No test of tests/gpu was executed: set SMP_TEST_GPU=1 where there is a GPU.", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
