"""The start of a job on GPUs: its layout, what is chosen for it, and the log that says so."""

import pytest

from tests.cuda_path.reports import FOUR_BLOCKS, report

TP8 = ("--tensor_parallel_degree", "8")


@pytest.mark.full
def test_tensor_parallelism_over_whole_hosts_shards_over_the_hosts():
    found = report(*FOUR_BLOCKS, *TP8, "--expandable_segments", "1", world=16, steps=2)
    assert found["mesh"] == "dp_replicate 1 x dp_shard 2 x tp 8"
    assert "Chosen: --sharding_strategy full_shard (tensor parallelism takes all of a host)" in found["log"]
    assert found["log"].count("Chosen: --compile 0 (") == 1
    # What is given is not chosen, and reaches torch.
    assert "Chosen: --expandable_segments" not in found["log"]
    assert found["allocator"] == "expandable_segments:True"


@pytest.mark.full
def test_a_model_that_is_too_large_for_the_gpus_is_refused():
    sentence = r"llama70b on 8 process\(es\) needs about .* there are 80\.0 GiB for each"
    with pytest.raises(AssertionError, match=sentence):
        report("--model", "llama70b")
