"""The bytes of a planned step are those of a real one: every category at the peak, on every rank that is looked at."""

from __future__ import annotations

import dataclasses
import pathlib
import random

import pytest

from smp.memory.estimate import memory_at
from smp.memory.shape import Moment
from smp.train.job import sizes
from tests.planned import job_of, measured, planned

LLAMA = (
    *("--model_type", "llama_v2", "--hidden_width", "64", "--num_layers", "3", "--num_heads", "4"),
    *("--llama_intermediate_size", "176"),
    *("--vocab_size", "512", "--max_context_width", "64", "--train_batch_size", "2"),
)  # fmt: skip
MISTRAL = ("--model_type", "mistral", *LLAMA[2:8], "--intermediate_size", "176", *LLAMA[10:])
NEOX = ("--model_type", "gpt_neox", *LLAMA[2:8], *LLAMA[10:])
TIED = ("--tie_word_embeddings", "1", "--activation_checkpointing", "0", "--loss_chunk_tokens", "0")
FULL, ZERO2 = ("--sharding_strategy", "full_shard"), ("--sharding_strategy", "shard_grad_op")
SELECTIVE, TP2 = ("--activation_checkpointing_mode", "selective"), ("--tensor_parallel_degree", "2")
ACCUMULATED = ("--gradient_accumulation_steps", "4")
CP2 = ("--context_parallel_degree", "2", "--cp_comm_type")
LORA = ("--lora_rank", "4")
LOW = ("--bf16", "1", "--param_dtype", "bf16")
FP8 = ("--fp8", "1", "--fp8_recipe", "tensorwise", "--fp8_all_gather", "1")
DPO = ("--dpo", "1")
MUON = ("--optimizer", "muon")
# Few tokens of a wide model: the update needs most.
WIDE = (*LLAMA, "--hidden_width", "512", "--llama_intermediate_size", "1376", "--max_context_width", "16")
OFFLOADED = ("--offload_activations", "1", "--activation_loading_horizon", "1", "--offload_dir", ".")

# Processes, backend, flags.
CASES: dict[str, tuple[int, str, tuple[str, ...]]] = {
    "one process": (1, "gloo", LLAMA),
    "gloo": (2, "gloo", (*LLAMA, *FULL)),
    "smddp": (2, "smddp", (*LLAMA, *FULL)),
    "accumulation": (2, "smddp", (*LLAMA, *FULL, *SELECTIVE, *ACCUMULATED)),
    "tp": (2, "gloo", (*LLAMA, *TP2)),
    "tp over smddp": (2, "smddp", (*LLAMA, *TP2, *SELECTIVE)),
    "tied, whole logits, nothing recomputed": (2, "gloo", (*LLAMA, *TIED, *FULL)),
    "hybrid, bf16": (4, "smddp", (*LLAMA, "--hybrid_shard_degree", "2", "--bf16", "1")),
    "tp and sharding": (4, "smddp", (*LLAMA, *TP2, *FULL)),
    "bf16": (2, "smddp", (*LLAMA, *FULL, "--bf16", "1")),
    "bf16 moments": (2, "gloo", (*LLAMA, *FULL, "--optimizer_state_dtype", "bf16")),
    "bf16 parameters": (2, "gloo", (*LLAMA, *FULL, *LOW)),
    "bf16 parameters, tp, accumulation": (4, "smddp", (*LLAMA, *TP2, *FULL, *LOW, *ACCUMULATED)),
    "deferred reduction": (2, "gloo", (*LLAMA, *ZERO2, *ACCUMULATED, "--defer_gradient_sync", "1")),
    "parameters kept": (2, "smddp", (*LLAMA, *FULL, *ACCUMULATED, "--reshard_between_microbatches", "0")),
    "offloading": (2, "gloo", (*LLAMA, *FULL, *OFFLOADED, "--max_context_width", "512")),
    "Muon, bf16": (1, "gloo", (*NEOX, *MUON, "--muon_dtype", "bf16")),
    "Muon, tp and sharding": (4, "gloo", (*WIDE, *TP2, *FULL, *MUON)),
    "every second block": (2, "gloo", (*LLAMA, *FULL, "--activation_checkpointing_every", "2")),
    "GPT-NeoX": (2, "gloo", (*NEOX, *FULL)),
    "GPT-NeoX over smddp, tied": (4, "smddp", (*NEOX, *TIED, *FULL)),
    "Mistral, selective": (2, "smddp", (*MISTRAL, *FULL, *SELECTIVE)),
    "cp, gathered keys": (2, "smddp", (*LLAMA, *FULL, *CP2, "all_gather")),
    "cp, ring, selective": (2, "smddp", (*LLAMA, *FULL, *CP2, "p2p", *SELECTIVE)),
    "cp, heads": (2, "gloo", (*LLAMA, *FULL, *CP2, "all_to_all")),
    "cp and tp, padded": (4, "smddp", (*LLAMA, *FULL, *TP2, *CP2, "all_gather", "--max_context_width", "61")),
    "cp and sharding, accumulation": (4, "gloo", (*LLAMA, *FULL, *CP2, "p2p", "--gradient_accumulation_steps", "3")),
    "adapters": (2, "gloo", (*LLAMA, *FULL, *LORA)),
    "adapters, bf16, tp": (2, "smddp", (*LLAMA, *TP2, *LORA, "--bf16", "1")),
    "adapters, dropout, tp": (2, "gloo", (*LLAMA, *TP2, *LORA, "--lora_dropout", "0.1")),
    "adapters, 4 bits": (2, "gloo", (*LLAMA, *FULL, *LORA, "--qlora", "1", "--llama_intermediate_size", "192")),
    "adapters, tokens, tp": (2, "gloo", (*LLAMA, *TP2, *LORA, "--lora_train_tokens", "1", "500")),
    "adapters, modules": (2, "smddp", (*LLAMA, *FULL, *LORA, "--lora_modules_to_save", "lm_head", "norm")),
    "pairs, adapters, tp": (2, "gloo", (*LLAMA, *TP2, *LORA, *DPO)),
    "pairs, adapters, zero2, bf16": (2, "smddp", (*LLAMA, *ZERO2, *LORA, *DPO, *ACCUMULATED, "--bf16", "1")),
    "pairs, all parameters, cp": (2, "gloo", (*LLAMA, *FULL, *DPO, *CP2, "p2p", "--gradient_accumulation_steps", "5")),
    "pairs, all parameters": (2, "smddp", (*LLAMA, *FULL, *DPO, *SELECTIVE)),
    "pairs, an answer a row": (2, "gloo", (*LLAMA, *FULL, *DPO, "--pack", "0")),
    "gathered in fp8": (2, "gloo", (*LLAMA, *FULL, *FP8, "--bf16", "1")),
    "gathered in fp8, tp": (4, "smddp", (*LLAMA, *TP2, *FULL, *FP8, *ACCUMULATED)),
    "cp, window": (2, "gloo", (*MISTRAL, *FULL, *CP2, "all_gather")),
}  # fmt: skip
# One of each technique; the others are crosses of them.
USUAL = (
    "one process", "hybrid, bf16", "tp and sharding", "deferred reduction", "offloading", "GPT-NeoX over smddp, tied",
    "cp, ring, selective",
    "adapters, bf16, tp", "adapters, 4 bits",
)  # fmt: skip
CROSSES = tuple(name for name in CASES if name not in USUAL)


def compare(name: str, folder: pathlib.Path) -> None:
    """Of crosses the first rank is looked at, too."""
    if "4 bits" in name or "fp8" in name:
        pytest.importorskip("torchao")
    world, backend, words = CASES[name]
    ranks = sorted({world - 1, *([0] if name in CROSSES else [])})
    plans = planned([{"words": [*words], "world": world, "rank": rank, "backend": backend} for rank in ranks])
    real = measured([*words], world, backend, folder)
    for rank, plan in zip(ranks, plans, strict=True):
        assert plan["at_peak"] == real[rank]["at_peak"], (name, rank)
        assert plan["total"] == real[rank]["total"]


@pytest.mark.full
@pytest.mark.parametrize("name", USUAL)
def test_bytes(name, tmp_path):
    compare(name, tmp_path)


@pytest.mark.full
def test_muon_has_less_state_and_needs_most_in_the_update():
    words = [*WIDE, *TP2, *FULL]
    requests = [{"words": words + more, "world": 4, "rank": 0, "backend": "nccl"} for more in ([], [*MUON])]
    adamw, muon = planned(requests)
    assert muon["own_peaks"]["optimizer state"] < 0.6 * adamw["own_peaks"]["optimizer state"]
    job = job_of([*words, *MUON], 4, 0)
    shape, work = sizes(job)
    needed = memory_at(shape, job.mesh, dataclasses.replace(work, moment=Moment.UPDATE))
    for name in ("optimizer state", "communication buffers"):
        assert needed[name] == pytest.approx(muon["at_peak"][name], rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("name", CROSSES)
def test_bytes_of_crosses(name, tmp_path):
    compare(name, tmp_path)


def random_case(seed: int) -> tuple[int, str, tuple[str, ...]]:
    """A legal configuration of one, two or four processes."""
    draw = random.Random(seed)
    world = draw.choice((1, 2, 2, 4))
    words = [*draw.choice((LLAMA, MISTRAL, NEOX))]
    if world > 1 and draw.random() < 0.3:
        words += TP2
    words += draw.choice(((), FULL, ZERO2)) if world < 4 else draw.choice((FULL, ("--hybrid_shard_degree", "2")))
    words += draw.choice(
        ((), SELECTIVE, ("--activation_checkpointing", "0"), ("--activation_checkpointing_every", "2"))
    )
    words += ("--gradient_accumulation_steps", str(draw.choice((1, 1, 2, 3))))
    words += ("--loss_chunk_tokens", str(draw.choice((0, 16, 1024))), "--bf16", str(draw.choice((0, 0, 1))))
    words += ("--tie_word_embeddings", str(draw.choice((0, 1))), "--max_context_width", str(draw.choice((32, 64, 160))))
    if "--hybrid_shard_degree" in words and "--tensor_parallel_degree" in words:
        words = [*words, "--sequence_parallel", str(draw.choice((0, 1)))]
    return world, draw.choice(("gloo", "smddp")), tuple(words)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_never_under(seed, tmp_path):
    world, backend, words = random_case(seed)
    found = planned([{"words": [*words], "world": world, "rank": 0, "backend": backend}])[0]
    real = measured([*words], world, backend, tmp_path)[0]
    assert found["total"] >= real["total"], (world, backend, words)
    assert found["total"] <= 1.02 * real["total"]
