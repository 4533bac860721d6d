"""Shared test setup: offline, quiet, deterministic."""

import os
import pathlib
import sys
from multiprocessing import forkserver

# Set before any Hugging Face import: tests never reach for a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# What reads a shared buffer after it was given back then reads NaN.
os.environ.setdefault("SMP_POISON_SHARED_BUFFERS", "1")
if not any("gpu" in word for word in sys.argv):
    # Ranks are forked, which a process that has touched CUDA cannot do; `pytest tests/gpu` keeps its GPUs.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import pytest
import torch

torch.set_num_threads(1)

HERE = pathlib.Path(__file__).parent


@pytest.fixture(autouse=True)
def own_fork_server():
    """Stop the fork server that a test's data workers came from: a rank forked later would take it for its child."""
    yield
    forkserver._forkserver._stop()  # Python's own, for tests


def pytest_collection_modifyitems(items):
    """Leave conformance and faults to ``make test-all``, but for what is marked ``smoke``."""
    for item in items:
        if item.path.relative_to(HERE).parts[0] in ("conformance", "faults") and not item.get_closest_marker("smoke"):
            item.add_marker(pytest.mark.full)
