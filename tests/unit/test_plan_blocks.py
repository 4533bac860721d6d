"""A step written out from few blocks is the step of all blocks: to the byte at the peak."""

from __future__ import annotations

import pytest

from smp.plan.blocks import Step, blocks_to_trace
from smp.plan.devices import device_row
from smp.plan.events import StepPhase
from smp.plan.memory import account
from smp.plan.shim import compiler
from smp.plan.worker import worker

pytestmark = pytest.mark.skipif(compiler() is None, reason="fake CUDA tensors need a C++ compiler")
ROW = device_row("h100")
SIZES = (
    *("--hidden_width", "256", "--num_layers", "8", "--num_heads", "8", "--vocab_size", "2048"),
    *("--max_context_width", "256", "--train_batch_size", "2"),
)  # fmt: skip
LLAMA = ("--model_type", "llama_v2", *SIZES, "--llama_intermediate_size", "704")
CASES = {
    "Llama": LLAMA,
    "selective, accumulation": (
        *(*LLAMA, "--activation_checkpointing_mode", "selective", "--gradient_accumulation_steps", "2"),
    ),
    "nothing recomputed, tied": (*LLAMA, "--activation_checkpointing", "0", "--tie_word_embeddings", "1"),
    "every second block": (*LLAMA, "--activation_checkpointing_every", "2"),
    "offloading": (*LLAMA, "--offload_activations", "1", "--num_layers", "12"),
    "tp": (*LLAMA, "--tensor_parallel_degree", "2"),
    "cp": (*LLAMA, "--context_parallel_degree", "2"),
    "cp in a ring, selective": (
        *(*LLAMA, "--context_parallel_degree", "4", "--cp_comm_type", "p2p"),
        *("--activation_checkpointing_mode", "selective"),
    ),
    "deferred": (
        *LLAMA, "--sharding_strategy", "shard_grad_op", "--gradient_accumulation_steps", "2",
        "--defer_gradient_sync", "1",
    ),
    "Mistral": ("--model_type", "mistral", *SIZES, "--intermediate_size", "704"),
    "GPT-NeoX": ("--model_type", "gpt_neox", *SIZES),
    "pairs beside their reference": (
        *LLAMA, "--sharding_strategy", "shard_grad_op", "--lora_rank", "8", "--dpo", "1",
        "--gradient_accumulation_steps", "2", "--num_layers", "6", "--activation_checkpointing_mode", "full",
    ),
    "layers of two kinds": ("--model", "gemma3_1b", "--max_context_width", "256"),
}  # fmt: skip
USUAL = ("every second block", "pairs beside their reference")  # blocks of two kinds; two forward passes
MARKED = [pytest.param(name, marks=pytest.mark.full if name in USUAL else pytest.mark.slow) for name in CASES]


@pytest.fixture(scope="module")
def ask():
    with worker(ROW) as one:
        yield one


def plans(ask, *jobs, local=8, exact=False):
    return ask("plan_layouts", [["--use_synthetic_data", "1", *job] for job in jobs], nodes=1, local=local, row=ROW,
               exact=exact)  # fmt: skip


@pytest.mark.parametrize("name", MARKED)
def test_few_blocks_are_all_blocks(name, ask):
    (few,), (every,) = (plans(ask, CASES[name], exact=exact) for exact in (False, True))
    assert (few.method, every.method) == ("blocks", "exact")
    assert few.memory.peak == every.memory.peak
    assert few.memory.own_peaks["activations"] == every.memory.own_peaks["activations"]
    assert few.memory.reserved == pytest.approx(every.memory.reserved, rel=0.02)
    assert few.step.seconds == pytest.approx(every.step.seconds, rel=0.002)
    assert few.step.inside == pytest.approx(every.step.inside, rel=1e-6)


@pytest.mark.full
def test_attention_of_a_gpu_is_planned_without_one(ask):
    names = ("sdpa", "fused", "flash_attention_3")
    plain, *others = plans(ask, *((*LLAMA, "--attn_implementation", name) for name in names), local=1)
    assert [each.memory.peak for each in others] == [plain.memory.peak] * 2


def test_the_peak_is_in_the_timeline_and_all_of_it_is_thinned():
    place, changes = StepPhase(0, "forward", 0), []
    for number in range(5000):
        size = 1000 if number == 3333 else 10
        changes += [(place, number, size), (place._replace(block=1), number, -size)]
    step = Step(["activations"] * 5000, [""] * 5000, 0, changes)
    found = account(step, shared=7)
    assert found.peak.total == 1007 and found.peak.where == "forward of block 0"
    assert max(sum(sizes.values()) for _, sizes in found.timeline) == 1007
    assert 300 < len(found.timeline) <= 500 and found.own_peaks["activations"] == 1000


@pytest.mark.parametrize(
    ("wanted", "period", "margin", "few"), [(80, 1, 2, 5), (4, 1, 2, 4), (5, 1, 2, 5), (34, 6, 6, 22), (16, 2, 2, 6)]
)
def test_as_few_are_traced_as_keep_the_places_in_a_period(wanted, period, margin, few):
    assert blocks_to_trace(wanted, period=period, margin=margin) == few
    assert few == wanted or (wanted - few) % period == 0
