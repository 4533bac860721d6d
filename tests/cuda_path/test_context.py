"""Context parallelism on fake CUDA tensors: the table of exchanges, kernels, and no copy for which the host waits."""

import pytest

from tests.cuda_path.reports import BLOCKS, DOCUMENTS, LLAMA, MISTRAL, by_file, report
from tests.cuda_path.test_step import FULL, SYNCS, steady

pytestmark = pytest.mark.full
TP = ("--tensor_parallel_degree", "2")
KEPT = ("--activation_checkpointing", "0")
PLACES = 4  # copied for each call of the kernels: queries, keys, and where the spans of each begin
OF_BATCH = 4  # tokens, positions, and the labels that are not ignored, with their places


def step_of(ranks, exchange, *flags):
    """The last step, which is as the one before: what a step needs anew for its batch is copied, and nothing read."""
    found = report(*LLAMA, "--context_parallel_degree", str(ranks), "--cp_comm_type", exchange, *flags)
    step = found["steps"][-1] if DOCUMENTS[0] in flags else steady(found)  # other documents are other places
    assert f"(cp {ranks} inside)" in found["mesh"]
    assert by_file(step["syncs"]) == SYNCS
    return step


def exchanges(step):
    """Collectives of a block's attention, of each kind."""
    found = {}
    for text, count in step["collectives"].items():
        what, _, place = text.partition(" @ ")
        if "parallel/context/functions.py" in place or "comm/cuda.py" in place:  # batches of sends
            found[what] = found.get(what, 0) + count
    assert all(count % BLOCKS == 0 for count in found.values())
    return {what: count // BLOCKS for what, count in found.items()}


def calls(step):
    """Calls of the kernels in a block, forward and backward."""
    ran = step["operations"]
    return tuple(ran[f"aten._flash_attention_{way}.default"] / BLOCKS for way in ("forward", "backward"))


def expected(ranks, exchange, again):
    """The table of smp/parallel/context/functions.py; recomputation repeats forward's ``again`` times."""
    shifts = (ranks - 1) * (2 + again) + ranks
    return {
        "all_gather": {"allgather_base": 2 + again, "reduce_scatter_base": 1},
        "p2p": {"send": shifts, "recv": shifts},
        "all_to_all": {"alltoall_base": 4 + 2 * again},
    }[exchange]


@pytest.mark.parametrize(
    ("ranks", "flags", "exchange"),
    [
        (4, KEPT, "p2p"),
        *(
            pytest.param(ranks, flags, exchange, marks=pytest.mark.slow)
            for ranks, flags, exchange in ((4, KEPT, "all_gather"), (2, FULL, "p2p"), (2, FULL, "all_to_all"))
        ),
    ],
)
def test_exchanges_of_a_block(exchange, ranks, flags):
    step, again = step_of(ranks, exchange, *flags), int(flags == FULL)
    assert exchanges(step) == expected(ranks, exchange, again)
    # In a ring the first rank's second part sees the first whole, and both of every other rank; else all keys are here.
    once = 2 * ranks if exchange == "p2p" else 1
    assert calls(step) == ((1 + again) * once, once)
    moved = {text: count for text, count in by_file(step["copies"]).items() if "microbatch.py" in text}
    assert moved == {"cpu to cuda @ smp/parallel/microbatch.py": OF_BATCH + PLACES * once}


@pytest.mark.parametrize(
    "exchange", ["p2p", *(pytest.param(name, marks=pytest.mark.slow) for name in ("all_gather", "all_to_all"))]
)
def test_documents_and_tensor_parallelism(exchange):
    step = step_of(2, exchange, *DOCUMENTS, *TP, *FULL, "--gradient_accumulation_steps", "2")
    twice = {what: 2 * count for what, count in expected(2, exchange, 1).items()}
    assert exchanges(step) == twice


def test_windows():
    flags = ("--context_parallel_degree", "2", "--cp_comm_type", "all_gather", *FULL)
    step = steady(report(*MISTRAL, *flags))
    assert by_file(step["syncs"]) == SYNCS
    assert exchanges(step) == expected(2, "all_gather", 1)
    assert calls(step)[0] == 2 * calls(step)[1]
