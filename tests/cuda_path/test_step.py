"""A step on a GPU, on fake CUDA tensors: every synchronisation, copy between devices and collective."""

import pytest

from tests.cuda_path.reports import FOUR_BLOCKS, GPT_NEOX, LLAMA3_8B, by_file, report, totals

# The whole loop, from one batch to the next. The host reads what the step before has found: it runs ahead by one step.
SYNCS = {
    "synchronize event of 1 step(s) ago @ smp/faults/agreement.py": 2,  # results, flags
}
OF_LOOP = 4  # all_reduces: valid tokens, norm, loss, agreement


def sharded(layers, *, replicas=False):
    """fully_shard over (embedding, blocks, norm and head): forward gathers each, backward the blocks again."""
    units = layers + 2
    return {
        "allgather_base": units + layers,
        "reduce_scatter_base": units,
        "allreduce": OF_LOOP + (units if replicas else 0),
    }


def steady(found):
    """The counts of the last step; the one before has the same."""
    before, last = found["steps"][-2:]
    for what in ("syncs", "copies", "collectives"):
        assert before[what] == last[what]
    return last


@pytest.mark.full
def test_full_shard():
    found = report(*FOUR_BLOCKS)
    step = steady(found)
    assert found["mesh"] == "dp_replicate 1 x dp_shard 8 x tp 1"
    assert found["state"] == ["cuda:0"]
    assert totals(step["collectives"]) == sharded(4)
    assert by_file(step["syncs"]) == SYNCS
    assert totals(step["copies"]) == {"cpu to cuda": 3, "cuda to cpu": 2}  # ids, labels, flags; results, counts


@pytest.mark.full
def test_all_blocks_of_llama3_8b():
    step = steady(report(*LLAMA3_8B))
    assert totals(step["collectives"]) == sharded(32)
    assert by_file(step["syncs"]) == SYNCS


@pytest.mark.full
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_hybrid_shard(mode):
    found = report(*FOUR_BLOCKS, "--activation_checkpointing_mode", mode, world=64)
    assert found["mesh"] == "dp_replicate 8 x dp_shard 8 x tp 1"
    assert totals(steady(found)["collectives"]) == sharded(4, replicas=True)
    assert by_file(steady(found)["syncs"]) == SYNCS


@pytest.mark.full
def test_gpt_neox():
    step = steady(report(*GPT_NEOX))
    assert totals(step["collectives"]) == sharded(4)
    assert by_file(step["syncs"]) == SYNCS
