"""Communication of a step on fake CUDA tensors: exchanges of tensor parallelism, gathers under accumulation."""

import pytest

from tests.cuda_path.reports import FOUR_BLOCKS, by_file, report, totals
from tests.cuda_path.test_step import OF_LOOP, SYNCS

pytestmark = pytest.mark.full
BLOCKS = 4
# At tp 8: forward's partial sums are reduced by an operation of smp's, in the list of all operations.
SEPARATE = "smp.reduce_tokens.default"


def step_of(*flags):
    """The last step's counts of collectives, and of all operations."""
    last = report(*FOUR_BLOCKS, *flags)["steps"][-1]
    return {**last["operations"], **totals(last["collectives"])}


@pytest.mark.parametrize("checkpointing", ["0", "1"])
def test_tensor_parallel_exchanges_overlap_their_products(checkpointing):
    split = ("--tensor_parallel_degree", "8", "--activation_checkpointing", checkpointing)
    separate, overlapped = step_of(*split), step_of(*split, "--tp_overlap", "1")
    again = int(checkpointing)  # of each block 2 gathers and 1 reduction are recomputed
    # Besides the blocks: the head gathers, and reduces its gradient; the embedding reduces, and gathers its gradient.
    assert separate["allgather_base"] == (6 + 2 * again) * BLOCKS + 2
    assert separate[SEPARATE] == (2 + again) * BLOCKS + 1
    # Columns' own in backward, beside their products, stay; all others are in one with a product.
    assert overlapped["allgather_base"] == 2 * BLOCKS + 2 and overlapped[SEPARATE] == 1
    assert overlapped["reduce_scatter_base"] == separate["reduce_scatter_base"] == 2 * BLOCKS + 1
    assert overlapped["fused_all_gather_matmul"] == (4 + 2 * again) * BLOCKS
    assert overlapped["fused_matmul_reduce_scatter"] == (2 + again) * BLOCKS


def test_tensor_parallelism_and_sharding_with_accumulation():
    """8 hosts; two micro-batches of what one rank of a host's group sends."""
    flags = ("--tensor_parallel_degree", "8", "--gradient_accumulation_steps", "2")
    found = report(*FOUR_BLOCKS, *flags, world=64)
    last, alone = found["steps"][-1], step_of("--tensor_parallel_degree", "8")
    units = BLOCKS + 2
    assert found["mesh"] == "dp_replicate 1 x dp_shard 8 x tp 8"
    assert by_file(last["syncs"]) == SYNCS
    sent = {**last["operations"], **totals(last["collectives"])}
    assert sent["allgather_base"] == 2 * (alone["allgather_base"] + units + BLOCKS)
    assert sent["reduce_scatter_base"] == 2 * (alone["reduce_scatter_base"] + units)
    assert sent[SEPARATE] == 2 * alone[SEPARATE]
    # Of the loop once a step, and a norm for each set of groups: sharded, split, and both; all others per micro-batch.
    assert sent["allreduce"] == 2 * (alone["allreduce"] - OF_LOOP) + OF_LOOP + 2


def test_accumulation_gathers_each_unit_once():
    units = BLOCKS + 2
    plain = ("--gradient_accumulation_steps", "4")
    kept = (*plain, "--reshard_between_microbatches", "0")
    resharded, once = step_of(*plain), step_of(*kept)
    assert resharded["allgather_base"] == 4 * (units + BLOCKS) and once["allgather_base"] == units
    assert resharded["reduce_scatter_base"] == once["reduce_scatter_base"] == 4 * units
    assert step_of(*kept, "--defer_gradient_sync", "1")["reduce_scatter_base"] == units


def test_auto_says_what_it_would_choose():
    log = report(*FOUR_BLOCKS, "--gradient_accumulation_steps", "4")["log"]
    assert "--reshard_between_microbatches 0: all gathered parameters fit, for the 4 micro-batches of a step" in log
    log = report(*FOUR_BLOCKS, "--tensor_parallel_degree", "8", "--activation_checkpointing", "0")["log"]
    assert "--tp_overlap 1: the GPUs of tensor-parallel ranks read each other's memory" in log
