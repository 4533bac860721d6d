"""Activation offloading on fake CUDA tensors: what moves in a step, and that the host waits for none of it."""

import pytest

from tests.cuda_path.reports import FOUR_BLOCKS, by_file, report
from tests.cuda_path.test_step import SYNCS, steady


@pytest.mark.full
def test_blocks_leave_and_return_without_a_synchronisation():
    step = steady(report(*FOUR_BLOCKS, "--offload_activations", "1"))
    assert by_file(step["syncs"]) == SYNCS  # `record_stream` would be listed, too
    moved = {text: count for text, count in by_file(step["copies"]).items() if "offload" in text}
    assert moved == {
        "cuda to cpu @ smp/parallel/offload/stores.py": 2,  # the last two of four blocks keep theirs
        "cpu to cuda @ smp/parallel/offload/stores.py": 2,
    }
