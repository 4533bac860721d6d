"""Tensor parallelism at sizes that the ranks do not divide, and what they do to masks and positions."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config  # before the ranks are forked

from tests.distributed import run_distributed
from tests.reference import Layout
from tests.tensor_parallel import ROWS, Case, assert_same_steps, batch_of, config_of

TP2, TP4 = Layout("full_shard", tp=2), Layout("full_shard", tp=4)
TP2_WHOLE, TP4_WHOLE = (Layout("full_shard", tp=tp, sequence=False) for tp in (2, 4))
SHARDED, SHARDED_WHOLE = Layout("full_shard", tp=2), Layout("shard_grad_op", tp=2, sequence=False)


def odd(name: str, layout: Layout, length: int = 12, **changes) -> Case:
    config = config_of(name, **changes)
    return Case(config, layout, batch_of(config, length))


def with_inputs(case: Case, **inputs: torch.Tensor) -> Case:
    batch = case.batch | inputs
    if "attention_mask" in inputs:
        batch["labels"] = batch["labels"].masked_fill(inputs["attention_mask"] == 0, -100)
    return Case(case.config, case.layout, batch, case.attention)


@pytest.mark.full
def test_heads_and_widths_that_the_ranks_do_not_divide():
    cases = [
        # fewer key/value heads than ranks
        odd("llama_gqa", TP4, num_key_value_heads=1),
        odd("llama_gqa", TP4_WHOLE, num_key_value_heads=2, attention_bias=True),
        odd("mistral", TP4, num_key_value_heads=2),
        odd("llama_tied", SHARDED, num_key_value_heads=1, attention_bias=True),
        # vocabulary
        odd("llama_gqa", TP4, vocab_size=97),
        odd("llama_tied", TP4_WHOLE, vocab_size=97),
        odd("gpt_neox", SHARDED_WHOLE, vocab_size=97),
        odd("gpt_neox_tied", TP4, vocab_size=95),
        # intermediate size
        odd("llama_gqa", TP4, intermediate_size=50),
        odd("llama_gqa", SHARDED_WHOLE, intermediate_size=51, mlp_bias=True),
        odd("gpt_neox", TP4_WHOLE, intermediate_size=50),
        odd("gpt_neox", SHARDED, intermediate_size=51),
    ]
    run_distributed(assert_same_steps, cases, world_size=4)


@pytest.mark.full
def test_lengths_that_the_ranks_do_not_divide():
    short = [odd("llama_gqa", TP4, 3), odd("llama_gqa", TP4_WHOLE, 3), odd("gpt_neox", TP4, 2)]  # fewer than ranks
    for case in short:
        case.batch["labels"].copy_(case.batch["input_ids"])
    cases = [odd("llama_gqa", TP4, 11), odd("mistral", SHARDED, 11), odd("gpt_neox", TP4, 11)]
    cases.append(odd("gpt_neox_tied", Layout("no_shard", tp=4, checkpointing=True), 13))
    run_distributed(assert_same_steps, [*cases, *short], world_size=4)


@pytest.mark.full
def test_the_length_that_rotary_embeddings_and_learned_positions_see_is_without_padding():
    # Longer than 8 tokens, dynamic scaling turns by the length; and GPT-2 has learned 11 positions.
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    case = odd("llama_gqa", TP2, 11, rope_parameters=rope, max_position_embeddings=8)
    learned = GPT2Config(n_positions=11, n_embd=32, n_layer=2, n_head=4, vocab_size=96, resid_pdrop=0.0, embd_pdrop=0.0,
                         attn_pdrop=0.0)  # fmt: skip
    run_distributed(assert_same_steps, [case, Case(learned, TP2, batch_of(learned, 11))], world_size=2)


@pytest.mark.full
def test_biases_a_padding_id_and_packed_documents_with_restarted_positions():
    biases = {"attention_bias": True, "mlp_bias": True}
    padded = [
        odd("llama_gqa", TP4, **biases, pad_token_id=3),
        odd("llama_tied", SHARDED_WHOLE, **biases, pad_token_id=95),
        odd("gpt_neox", SHARDED, attention_bias=False),
    ]
    for case in padded:
        case.batch["input_ids"][:, ::3] = getattr(case.config, "pad_token_id", None) or 0

    def packed(length: int) -> torch.Tensor:
        position = torch.arange(length)
        return torch.stack([torch.where(position < cut, position, position - cut) for cut in (3, 5, 9, length)])

    cases = [
        with_inputs(odd("llama_gqa", TP4, 11), position_ids=packed(11)),
        with_inputs(odd("mistral", SHARDED, 12), position_ids=packed(12)),
        with_inputs(odd("gpt_neox_tied", TP4, 11), position_ids=torch.arange(11)[None] + 5),
    ]
    run_distributed(assert_same_steps, [*padded, *cases], world_size=4)


@pytest.mark.full
def test_padding_masks():
    def masked(side: str, length: int) -> torch.Tensor:
        mask = torch.ones(ROWS, length, dtype=torch.int64)
        mask[0, -4:] = mask[2, -1:] = 0
        return mask if side == "right" else mask.flip(1)

    cases = [
        with_inputs(odd(name, layout, length), attention_mask=masked(side, length))
        for name in ("llama_gqa", "mistral", "gpt_neox")
        for layout, length, side in ((TP2, 12, "left"), (TP2, 11, "right"), (TP2_WHOLE, 11, "left"))
    ]
    run_distributed(assert_same_steps, cases, world_size=2)


@pytest.mark.full
def test_sliding_windows():
    cases = [
        odd("mistral", layout, length, sliding_window=window)
        for window in (2, 6, 100)
        for layout, length in ((TP2, 11), (TP2_WHOLE, 12))
    ]
    run_distributed(assert_same_steps, cases, world_size=2)


@pytest.mark.full
def test_eager_attention():
    """With fewer key/value heads than ranks, and a window; Hugging Face's eager softmax is fp32 at any dtype."""
    config, window = config_of("llama_gqa", num_key_value_heads=2), config_of("mistral", sliding_window=6)
    cases = [Case(config, layout, batch_of(config), "eager") for layout in (TP4, TP4_WHOLE)]
    cases.append(Case(window, SHARDED, batch_of(window, 11), "eager"))
    run_distributed(assert_same_steps, cases, 1e-6, world_size=4)
