"""A step on a GPU, on fake CUDA tensors: synchronisations, copies between devices, attention, collectives."""

import pytest
import torch

from tests.cuda_path.reports import (
    BLOCKS,
    DOCUMENTS,
    FUSED,
    GPT_NEOX,
    LLAMA,
    LLAMA3_8B,
    MISTRAL,
    by_file,
    report,
    totals,
)

pytestmark = pytest.mark.full
# The whole loop, from one batch to the next. The host reads what the step before has found: it runs ahead by one step.
SYNCS = {
    "synchronize event of 1 step(s) ago @ smp/faults/agreement.py": 2,  # results, flags
}
OF_LOOP = 4  # all_reduces: valid tokens, norm, loss, agreement
UNITS = BLOCKS + 2
TP8 = ("--tensor_parallel_degree", "8")
# At tp 8: forward's partial sums are reduced by an operation of smp's, in the list of all operations.
SEPARATE = "smp.reduce_tokens.default"
VARLEN, OF_VARLEN = "torch_attn._varlen_attn.default", "torch_attn._varlen_attn_backward.default"
FULL = ("--activation_checkpointing_mode", "full")


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


def sent(found):
    """The last step's counts of collectives, and of all operations."""
    last = found["steps"][-1]
    return {**last["operations"], **totals(last["collectives"])}


def attention_of(step):
    return {name: n for name, n in step["operations"].items() if "attn" in name or "attention" in name}


def reads_of_attention(step):
    text = " ".join(step["syncs"])
    return [word for word in ("attention", "masking_utils", "tensor/forward", "loss.py") if word in text]


def test_full_shard():
    found = report(*LLAMA)
    step = steady(found)
    assert found["mesh"] == "dp_replicate 1 x dp_shard 8 x tp 1"
    assert found["state"] == ["cuda:0"]
    assert totals(step["collectives"]) == sharded(BLOCKS)
    assert by_file(step["syncs"]) == SYNCS
    assert totals(step["copies"]) == {"cpu to cuda": 3, "cuda to cpu": 2}  # ids, labels, flags; results, counts
    # Choices are logged, and off until they are measured.
    assert "Chosen: --attn_implementation fused (" in found["log"]
    assert "Chosen: --gc_freq 0 (not yet measured on a GPU" in found["log"]
    assert VARLEN not in attention_of(step)


def test_muon_waits_for_nothing():
    step = steady(report(*LLAMA, "--optimizer", "muon"))
    assert totals(step["collectives"]) == {**sharded(BLOCKS), "alltoall_base": 2}  # one round
    assert by_file(step["syncs"]) == SYNCS
    assert totals(step["copies"]) == {"cpu to cuda": 3, "cuda to cpu": 2}


@pytest.mark.slow
def test_all_blocks_of_llama3_8b():
    step = steady(report(*LLAMA3_8B))
    assert totals(step["collectives"]) == sharded(32)
    assert by_file(step["syncs"]) == SYNCS


def test_hybrid_shard_with_documents():
    found = report(*LLAMA, *DOCUMENTS, "--attn_implementation", "sdpa", world=64)
    step = found["steps"][-1]
    assert found["mesh"] == "dp_replicate 8 x dp_shard 8 x tp 1"
    assert totals(step["collectives"]) == sharded(BLOCKS, replicas=True)
    assert by_file(step["syncs"]) == SYNCS  # plain attention reads nothing of a document's ends
    assert VARLEN not in attention_of(step)


def test_gpt_neox():
    step = steady(report(*GPT_NEOX))
    assert totals(step["collectives"]) == sharded(BLOCKS)
    assert by_file(step["syncs"]) == SYNCS


def test_updates_in_bf16_make_the_host_wait_for_nothing_more():
    plain, moments = report(*LLAMA), report(*LLAMA, "--optimizer_state_dtype", "bf16")
    low = ("--param_dtype", "bf16")
    nearest, stochastic = report(*LLAMA, *low, "--stochastic_rounding", "0"), report(*LLAMA, *low)
    operator = "aten.lerp.Scalar"  # of the plain operations
    for found in (plain, moments, nearest, stochastic):
        step = steady(found)
        assert by_file(step["syncs"]) == SYNCS and step["copies"] == plain["steps"][-1]["copies"]
        fused = found is not stochastic and (found is not moments or torch.__version__ >= "2.13")
        assert (operator not in step["operations"]) is fused
        assert totals(step["collectives"]) == sharded(BLOCKS)


def test_documents_go_by_their_lengths():
    step = report(*LLAMA, *DOCUMENTS, *TP8)["steps"][-1]
    assert attention_of(step) == {VARLEN: BLOCKS, OF_VARLEN: BLOCKS}
    assert reads_of_attention(step) == []


def test_sliding_windows_go_by_lengths():
    step = report(*MISTRAL, *FUSED, *FULL)["steps"][-1]
    assert attention_of(step)[VARLEN] == 2 * BLOCKS  # recomputed
    assert reads_of_attention(step) == []


def test_tensor_parallel_collectives_overlap_their_products():
    found = report(*LLAMA, *TP8, *FULL)
    separate, overlapped = sent(found), sent(report(*LLAMA, *TP8, *FULL, "--tp_overlap", "1"))
    # Of each block 2 gathers and 1 reduction are recomputed. Besides the blocks: the head gathers, and reduces its
    # gradient; the embedding reduces, and gathers its gradient.
    assert separate["allgather_base"] == 8 * BLOCKS + 2
    assert separate[SEPARATE] == 3 * BLOCKS + 1
    # Columns' own in backward, beside their products, stay; all others are in one with a product.
    assert overlapped["allgather_base"] == 2 * BLOCKS + 2 and overlapped[SEPARATE] == 1
    assert overlapped["reduce_scatter_base"] == separate["reduce_scatter_base"] == 2 * BLOCKS + 1
    assert overlapped["fused_all_gather_matmul"] == 6 * BLOCKS
    assert overlapped["fused_matmul_reduce_scatter"] == 3 * BLOCKS
    assert "--tp_overlap 1: the GPUs of tensor-parallel ranks read each other's memory" in found["log"]


def test_tensor_parallelism_over_whole_hosts_shards_over_the_hosts():
    """8 hosts; two micro-batches of what one rank of a host's group sends."""
    more = ("--gradient_accumulation_steps", "2", "--expandable_segments", "1")
    found, alone = report(*LLAMA, *TP8, *more, world=64), sent(report(*LLAMA, *TP8))
    assert found["mesh"] == "dp_replicate 1 x dp_shard 8 x tp 8"
    assert by_file(found["steps"][-1]["syncs"]) == SYNCS
    every = sent(found)
    assert every["allgather_base"] == 2 * (alone["allgather_base"] + UNITS + BLOCKS)
    assert every["reduce_scatter_base"] == 2 * (alone["reduce_scatter_base"] + UNITS)
    assert every[SEPARATE] == 2 * alone[SEPARATE]
    # Of the loop once a step, and a norm for each set of groups: sharded, split, and both; all others per micro-batch.
    assert every["allreduce"] == 2 * (alone["allreduce"] - OF_LOOP) + OF_LOOP + 2
    assert "Chosen: --sharding_strategy full_shard (tensor parallelism takes all of a host)" in found["log"]
    assert found["log"].count("Chosen: --compile 0 (") == 1
    # What is given is not chosen, and reaches torch.
    assert "Chosen: --expandable_segments" not in found["log"]
    assert found["allocator"] == "expandable_segments:True"


def test_accumulation_gathers_each_unit_once():
    found = report(*LLAMA, "--gradient_accumulation_steps", "2")
    kept = ("--gradient_accumulation_steps", "2", "--reshard_between_microbatches", "0", "--defer_gradient_sync", "1")
    resharded, once = sent(found), sent(report(*LLAMA, *kept))
    assert resharded["allgather_base"] == 2 * (UNITS + BLOCKS) and once["allgather_base"] == UNITS
    assert resharded["reduce_scatter_base"] == 2 * UNITS and once["reduce_scatter_base"] == UNITS
    said = "--reshard_between_microbatches 0: all gathered parameters fit, for the 2 micro-batches of a step"
    assert said in found["log"]


def test_offloaded_blocks_leave_and_return_without_a_synchronisation():
    step = steady(report(*LLAMA3_8B, "--num_layers", "4", "--offload_activations", "1"))
    assert totals(step["collectives"]) == sharded(4)
    assert by_file(step["syncs"]) == SYNCS  # `record_stream` would be listed, too
    moved = {text: count for text, count in by_file(step["copies"]).items() if "offload" in text}
    assert moved == {
        "cuda to cpu @ smp/parallel/offload/stores.py": 2,  # the last two of four blocks keep theirs
        "cpu to cuda @ smp/parallel/offload/stores.py": 2,
    }


ACCUMULATES, LOW = ("--gradient_accumulation_steps", "2"), ("--param_dtype", "bf16")
KEEPS, ADAPTERS = ("--reshard_between_microbatches", "0"), ("--lora_rank", "8")
LLAMA_PARAMETERS = 2 * 128256 * 4096 + BLOCKS * 218_112_000 + 4096
OF_LORA = BLOCKS * 8 * (2 * 8192 + 2 * (4096 + 1024) + 3 * (4096 + 14336))


def written(*flags, world=1):
    """Bytes that a step copies or casts because of sharding: to gather, and to reduce, by operation."""
    step = steady(report(*LLAMA, *flags, world=world))
    assert by_file(step["syncs"]) == SYNCS
    ours = "_fully_shard", "parallel/one_rank.py", "parallel/gradient_sum.py"
    return totals({text: n for text, n in step["written"].items() if any(each in text for each in ours)})


@pytest.mark.parametrize(
    ("flags", "trained", "casts", "gradients"),
    [
        ((), LLAMA_PARAMETERS, 1, 4),
        (ACCUMULATES, LLAMA_PARAMETERS, 2, 4),
        ((*ACCUMULATES, *KEEPS), LLAMA_PARAMETERS, 1, 4),
        (LOW, LLAMA_PARAMETERS, 0, 0),
        ((*LOW, *ACCUMULATES), LLAMA_PARAMETERS, 0, 4 + 2),  # the sum in fp32, and it rounded
        (ADAPTERS, OF_LORA, 1, 4),
    ],
)
def test_one_rank_casts_what_it_trains_and_its_gradients(flags, trained, casts, gradients):
    """Once each, and a second micro-batch's gradients are added; none is copied, and what is frozen is not cast."""
    found = written(*flags)
    assert found.pop("aten.copy_.default", 0) == 2 * casts * trained
    assert found.pop("aten._to_copy.default", 0) == gradients * trained and not found


def test_replicas_copy_gradients_to_where_they_are_reduced():
    """As fully_shard does, but for a division by 1."""
    found = written("--sharding_strategy", "no_shard", world=8)
    assert found == {"aten.copy_.default": (2 + 4) * LLAMA_PARAMETERS, "fsdp.chunk_cat.default": 4 * LLAMA_PARAMETERS}


def test_a_model_that_is_too_large_for_the_gpus_is_refused():
    sentence = r"llama70b on 8 process\(es\) needs about .* there are 80\.0 GiB for each"
    with pytest.raises(AssertionError, match=sentence):
        report("--model", "llama70b")
