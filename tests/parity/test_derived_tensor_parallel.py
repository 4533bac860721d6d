"""Tensor parallelism beyond plain layers: fused ones, norms over all heads, whole sequences before the blocks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from transformers import CONFIG_MAPPING

import smp.comm
from smp.loss import causal_lm_loss_sum
from smp.models.registry import family_of
from smp.parallel.activation_checkpoint import apply_activation_checkpointing
from smp.parallel.technique import model_blocks
from tests.distributed import run_distributed
from tests.model_checks import in_double
from tests.reference import Layout
from tests.tensor_parallel import ROWS, Case, assert_same_steps, batch_of, build, split_only

COMMON = {"vocab_size": 90, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
LENGTH, ITEM = 12, 8


def config_of(model_type, **changes):
    """A tiny configuration without dropout."""
    config = CONFIG_MAPPING[model_type](**{**COMMON, **changes})
    for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop", "attention_dropout", "hidden_dropout"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    return config


LATENT = {"kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4}
FALCONS = [{"multi_query": True}, {"multi_query": False}, {"new_decoder_architecture": True, "num_kv_heads": 2}]
GROUPED = {"intermediate_size": 48, "num_key_value_heads": 1}


def _cases():
    configs = [
        config_of("gpt2", n_positions=32),
        config_of("gptj", n_positions=32, rotary_dim=4),
        config_of("gpt_bigcode", n_positions=32),
        config_of("gpt_bigcode", n_positions=32, multi_query=False),
        *(config_of("falcon", bias=True, **form) for form in FALCONS),
        config_of("phi3", **GROUPED),  # one key/value head for two ranks
        config_of("phi3", **{**GROUPED, "intermediate_size": 49}),
        config_of("olmo2", **GROUPED),
        config_of("olmo2", **{**GROUPED, "num_key_value_heads": 2}),
        config_of("gemma2", head_dim=8, sliding_window=4, query_pre_attn_scalar=8, **GROUPED),
        config_of("glm", head_dim=8, attention_bias=True, **{**GROUPED, "num_key_value_heads": 2}),
        config_of("minicpm3", intermediate_size=48, q_lora_rank=8, attention_bias=True, **LATENT),
        config_of("granite_swa", layer_types=["sliding_attention", "full_attention"], sliding_window=4, **GROUPED),
        config_of("lfm2", layer_types=["conv", "full_attention"], **GROUPED),
    ]
    for config in configs:
        family_of(build(config, attention="eager").config)  # derived once, in fp32
        yield Case(config, Layout("no_shard", tp=2, sequence=False), batch_of(config, LENGTH), "eager")
        # Padded inside; and no rank has whole rows.
        batch = {key: rows[:3] for key, rows in batch_of(config, 11).items()}
        yield Case(config, Layout("no_shard", tp=2), batch, "eager")


def _check():
    cases = list(_cases())
    with in_double():
        assert_same_steps(cases)


@pytest.mark.full
def test_gradients_equal_those_of_the_whole_model():
    run_distributed(_check, world_size=2)


def _check_four():
    wide = {**GROUPED, "num_key_value_heads": 2}
    configs = [
        config_of("phi3", **wide),
        config_of("olmo2", **wide),
        config_of("gpt2", n_positions=32),
        config_of("granite_swa", layer_types=["sliding_attention", "full_attention"], sliding_window=4, **wide),
        config_of("minicpm3", intermediate_size=48, q_lora_rank=8, **LATENT),
        config_of("lfm2", layer_types=["conv", "full_attention"], **wide),
    ]
    for config in configs:
        family_of(config)
    with in_double():
        assert_same_steps(
            [
                Case(config, layout, batch_of(config), "eager")
                for config in configs
                for layout in (Layout("no_shard", tp=4), Layout("full_shard", tp=2, checkpointing=True))
            ]
        )


@pytest.mark.full
def test_fewer_key_value_heads_than_ranks_and_shards_of_parts():
    run_distributed(_check_four, world_size=4)


def _exchanges(config, *, recompute):
    """Calls by operation of one forward with loss, and of its backward; and the bytes of the all_to_alls."""
    model = split_only(build(config, attention="eager"), Layout("no_shard", tp=2))
    if recompute:
        apply_activation_checkpointing(model_blocks(model, family_of(config)))
    ids = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % config.vocab_size
    found = []
    smp.comm.reset_report()
    loss = causal_lm_loss_sum(model(input_ids=ids).logits, ids)
    for step in (None, loss.backward):
        if step is not None:
            step()
        report = smp.comm.report()
        calls: dict[str, int] = {}
        for key, count in report.items():
            calls[key.operation] = calls.get(key.operation, 0) + count.calls
        found.append(calls)
        smp.comm.reset_report()
    return found


def _check_exchanges():
    blocks = COMMON["num_hidden_layers"]
    for config, fused in ((config_of("gpt2", n_positions=32), 1), (config_of("phi3", **GROUPED), 2)):
        forward, backward = _exchanges(config, recompute=False)
        # The embedding is summed for all tokens, both ways; the blocks' exchanges are those of plain layers.
        assert forward == {
            "all_to_all": fused * blocks, "all_gather": 2 * blocks + 1, "reduce_scatter": 2 * blocks,
            "all_reduce": 1 + 2,
        }  # fmt: skip
        positions = config.model_type == "gpt2"
        assert backward == {
            "all_to_all": fused * blocks, "all_gather": 4 * blocks, "reduce_scatter": 2 * blocks + 1,
            "all_reduce": 1 + blocks + 1 + positions,
        }  # fmt: skip
        _, again = _exchanges(config, recompute=True)
        assert again["all_to_all"] == 2 * fused * blocks


@pytest.mark.full
def test_exactly_the_exchanges_of_fused_layers():
    run_distributed(_check_exchanges, world_size=2, backend="smddp")


def _check_dropout():
    config = config_of("gpt2", n_positions=32)
    config.embd_pdrop = config.resid_pdrop = config.attn_pdrop = 0.3
    outputs, whole = [], Layout("no_shard", tp=2, sequence=False)
    ids = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % config.vocab_size
    for recompute in (False, True):
        model = split_only(build(config, attention="eager").train(), whole)
        blocks = model_blocks(model, family_of(config))
        if recompute:
            apply_activation_checkpointing(blocks)
        for block in blocks:
            block.register_forward_hook(lambda _, __, output: outputs.append(output.detach()))
        torch.manual_seed(11)
        causal_lm_loss_sum(model(input_ids=ids).logits, ids).backward()
        outputs.append(model.transformer.h[0].mlp.c_fc.weight.grad.to_local())
    half = len(outputs) // 2
    assert all(torch.equal(kept, again) for kept, again in zip(outputs[:half], outputs[half:], strict=True))
    for hidden in outputs[: half - 1]:  # the same on all ranks, though dropout is inside the parts
        first = hidden.clone()
        dist.broadcast(first, src=0)
        assert torch.equal(first, hidden)
    assert not torch.equal(outputs[0][:1], torch.zeros_like(outputs[0][:1]))


@pytest.mark.full
def test_dropout_after_a_parts_output_is_the_same_on_all_ranks():
    run_distributed(_check_dropout, world_size=2)
