"""Tensor parallelism at sizes that the ranks do not divide, and what they do to masks and positions."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config  # before the ranks are forked

from tests.distributed import run_distributed
from tests.reference import Layout
from tests.tensor_parallel import ROWS, Case, assert_same_steps, batch_of, config_of

TP2, TP4 = Layout("full_shard", tp=2), Layout("full_shard", tp=4)
TP4_WHOLE = Layout("full_shard", tp=4, sequence=False)
SHARDED, SHARDED_WHOLE = Layout("full_shard", tp=2), Layout("shard_grad_op", tp=2, sequence=False)


def odd(name: str, layout: Layout, length: int = 12, **changes) -> Case:
    config = config_of(name, **changes)
    return Case(config, layout, batch_of(config, length))


def both(name: str, *layouts: Layout, length: int = 12, **changes) -> list[Case]:
    return [odd(name, layout, length, **changes) for layout in layouts]


@pytest.mark.full
def test_fewer_key_value_heads_than_ranks():
    cases = [
        *both("llama_gqa", TP4, TP4_WHOLE, num_key_value_heads=1),
        *both("llama_gqa", TP4, TP4_WHOLE, num_key_value_heads=2, attention_bias=True),
        *both("mistral", TP4, num_key_value_heads=2),
        *both("llama_tied", SHARDED, SHARDED_WHOLE, num_key_value_heads=1, attention_bias=True),
    ]
    run_distributed(assert_same_steps, cases, world_size=4)


@pytest.mark.full
def test_eager_attention_with_fewer_key_value_heads_than_ranks():
    # Hugging Face's eager softmax is fp32 at any dtype.
    config = config_of("llama_gqa", num_key_value_heads=2)
    cases = [Case(config, layout, batch_of(config), "eager") for layout in (TP4, TP4_WHOLE, TP2)]
    run_distributed(assert_same_steps, cases, 1e-6, world_size=4)


@pytest.mark.full
def test_uneven_vocabulary():
    cases = [
        *both("llama_gqa", TP4, vocab_size=97),
        *both("llama_tied", TP4_WHOLE, SHARDED, vocab_size=97),
        *both("gpt_neox", SHARDED_WHOLE, vocab_size=97),
        *both("gpt_neox_tied", TP4, vocab_size=95),
    ]
    run_distributed(assert_same_steps, cases, world_size=4)


@pytest.mark.full
def test_uneven_intermediate():
    cases = [
        *both("llama_gqa", TP4, TP4_WHOLE, intermediate_size=50),
        *both("llama_gqa", TP4, SHARDED_WHOLE, intermediate_size=51, mlp_bias=True),
        *both("gpt_neox", TP4, TP4_WHOLE, intermediate_size=50),
        *both("gpt_neox", SHARDED, SHARDED_WHOLE, intermediate_size=51),
    ]
    run_distributed(assert_same_steps, cases, world_size=4)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.full
def test_uneven_sequence(world_size):
    layouts = [TP2] if world_size == 2 else [TP4, SHARDED]
    cases = [case for name in ("llama_gqa", "mistral", "gpt_neox") for case in both(name, *layouts, length=11)]
    cases += both("gpt_neox_tied", Layout("no_shard", tp=world_size, checkpointing=True), length=13)
    run_distributed(assert_same_steps, cases, world_size=world_size)


@pytest.mark.full
def test_the_length_that_rotary_embeddings_and_learned_positions_see_is_without_padding():
    # Longer than 8 tokens, dynamic scaling turns by the length; and GPT-2 has learned 11 positions.
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    case = odd("llama_gqa", TP2, 11, rope_parameters=rope, max_position_embeddings=8)
    learned = GPT2Config(n_positions=11, n_embd=32, n_layer=2, n_head=4, vocab_size=96, resid_pdrop=0.0, embd_pdrop=0.0,
                         attn_pdrop=0.0)  # fmt: skip
    run_distributed(assert_same_steps, [case, Case(learned, TP2, batch_of(learned, 11))], world_size=2)


@pytest.mark.full
def test_a_sequence_shorter_than_the_ranks():
    cases = [*both("llama_gqa", TP4, TP4_WHOLE, length=3), *both("gpt_neox", TP4, length=2)]
    for case in cases:
        case.batch["labels"].copy_(case.batch["input_ids"])
    run_distributed(assert_same_steps, cases, world_size=4)


@pytest.mark.full
def test_biases_and_a_padding_id():
    biases = {"attention_bias": True, "mlp_bias": True}
    cases = [
        *both("llama_gqa", TP4, TP4_WHOLE, SHARDED, **biases, pad_token_id=3),
        *both("llama_tied", SHARDED_WHOLE, TP4, **biases, pad_token_id=95),
        *both("gpt_neox", TP4, SHARDED, attention_bias=False),
    ]
    for case in cases:
        case.batch["input_ids"][:, ::3] = getattr(case.config, "pad_token_id", None) or 0
    run_distributed(assert_same_steps, cases, world_size=4)


def masked(side: str, length: int = 12) -> torch.Tensor:
    mask = torch.ones(ROWS, length, dtype=torch.int64)
    mask[0, -4:] = mask[2, -1:] = 0
    return mask if side == "right" else mask.flip(1)


def with_inputs(case: Case, **inputs: torch.Tensor) -> Case:
    batch = case.batch | inputs
    if "attention_mask" in inputs:
        batch["labels"] = batch["labels"].masked_fill(inputs["attention_mask"] == 0, -100)
    return Case(case.config, case.layout, batch, case.attention)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.full
def test_padding_masks(side):
    cases = [
        with_inputs(case, attention_mask=masked(side, length))
        for name in ("llama_gqa", "mistral", "gpt_neox")
        for layout, length in ((TP2, 12), (TP2, 11), (Layout("full_shard", tp=2, sequence=False), 11))
        for case in both(name, layout, length=length)
    ]
    run_distributed(assert_same_steps, cases, world_size=2)


@pytest.mark.full
def test_packed_documents_with_restarted_positions():
    def packed(length: int) -> torch.Tensor:
        position = torch.arange(length)
        return torch.stack([torch.where(position < cut, position, position - cut) for cut in (3, 5, 9, length)])

    cases = [
        with_inputs(case, position_ids=positions)
        for name in ("llama_gqa", "mistral", "gpt_neox_tied")
        for layout, length in ((TP4, 11), (SHARDED, 12))
        for case in both(name, layout, length=length)
        for positions in (packed(length), torch.arange(length)[None] + 5)
    ]
    run_distributed(assert_same_steps, cases, world_size=4)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.full
def test_sliding_windows(attention):
    tolerance = 1e-9 if attention == "sdpa" else 1e-6
    cases = []
    for window in (2, 6, 12, 100):
        config = config_of("mistral", sliding_window=window)
        cases += [
            Case(config, Layout("full_shard", tp=2, sequence=sequence), batch_of(config, length), attention)
            for sequence, length in ((True, 12), (True, 11), (False, 12))
        ]
    run_distributed(assert_same_steps, cases, tolerance, world_size=2)
