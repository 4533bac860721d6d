"""Live flags of model, sharding, precision, optimizer and rate: each changes the object that is built from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

import smp.prepare
from smp.lr_schedule import lr_at
from smp.mesh import resolve_degrees
from smp.models.model_config import resolve_model
from smp.optimizer import build_optimizer
from tests.flags import (
    LLAMA3,
    MISTRAL,
    SYNTHETIC,
    Words,
    blocks,
    check,
    differs,
    hf,
    one_process,
    parse,
    plan_of,
    prefetched,
)
from tests.job import LLAMA, NEOX

# flag -> (words, reading of the resolved config, expected, base). The built model reads the config: test_models.py.
SHAPES: dict[str, tuple[Words, Callable[[Any], Any], Any, Words]] = {
    "vocab_size": ([99], lambda c: c.vocab_size, 99, LLAMA),
    "hidden_width": ([64], lambda c: c.hidden_size, 64, LLAMA),
    "num_layers": ([3], lambda c: c.num_hidden_layers, 3, LLAMA),
    "num_heads": ([2], lambda c: c.num_attention_heads, 2, LLAMA),
    "num_key_value_heads": ([1], lambda c: c.num_key_value_heads, 1, LLAMA),
    "llama_intermediate_size": ([50], lambda c: c.intermediate_size, 50, LLAMA),
    "intermediate_size": ([50], lambda c: c.intermediate_size, 50, NEOX),
    "resid_pdrop": ([0.3], lambda c: c.hidden_dropout, 0.3, NEOX),
    "attn_pdrop": ([0.3], lambda c: c.attention_dropout, 0.3, LLAMA),
    "initializer_range": ([0.5], lambda c: c.initializer_range, 0.5, LLAMA),
    "tie_word_embeddings": ([1], lambda c: c.tie_word_embeddings, True, LLAMA),
    "rotary_pct": ([0.5], lambda c: c.rope_parameters["partial_rotary_factor"], 0.5, NEOX),
    "rotary_emb_base": ([500], lambda c: c.rope_parameters["rope_theta"], 500, LLAMA),
    "rope_scaling_type": (["llama3"], lambda c: c.rope_parameters["rope_type"], "llama3", LLAMA),
    "rope_scaling_factor": ([4], lambda c: c.rope_parameters["factor"], 4, LLAMA3),
    "rope_scaling_high_freq_factor": ([5], lambda c: c.rope_parameters["high_freq_factor"], 5, LLAMA3),
    "rope_scaling_low_freq_factor": ([2], lambda c: c.rope_parameters["low_freq_factor"], 2, LLAMA3),
    "rope_scaling_original_max_position_embeddings": (
        [8], lambda c: c.rope_parameters["original_max_position_embeddings"], 8, LLAMA3,
    ),
    "sliding_window": ([7], lambda c: c.sliding_window, 7, MISTRAL),
    "max_context_width": ([24], lambda c: c.max_position_embeddings, 24, LLAMA),
}  # fmt: skip


@pytest.mark.parametrize("flag", SHAPES)
@check(*SHAPES)
def test_shape(flag):
    words, reading, expected, base = SHAPES[flag]
    differs(lambda given: reading(hf(given, model=base)), [f"--{flag}", *words], expected)


@check("model")
def test_model():
    name = lambda words: resolve_model(parse([*SYNTHETIC, *words]).model).name  # noqa: E731
    differs(name, ["--model", "llama7b"], "llama7b")


@check("attn_implementation")
def test_attn_implementation():
    def used(words):
        with one_process(words) as built:
            return built.model.config._attn_implementation

    differs(used, ["--attn_implementation", "eager"], "eager")


@check("delayed_param")
def test_delayed_param(monkeypatch):
    calls = []
    original = smp.prepare.build_on_meta
    monkeypatch.setattr(smp.prepare, "build_on_meta", lambda build: calls.append(1) or original(build))
    blocks([])
    assert len(calls) == 1
    blocks(["--delayed_param", 0])
    assert len(calls) == 1


@check("sharding_strategy", "hybrid_shard_degree")
def test_sharding():
    def degrees(words):
        found = resolve_degrees(parse([*SYNTHETIC, *words]).parallel, world_size=8, local_world_size=4)
        return found.dp_replicate, found.dp_shard

    differs(degrees, ["--sharding_strategy", "full_shard"], (1, 8))
    differs(degrees, ["--hybrid_shard_degree", 2], (4, 2))


@check("forward_prefetch", "backward_fetch_policy")
def test_prefetch():
    forward = lambda words: prefetched(words, "_states_to_forward_prefetch")  # noqa: E731
    backward = lambda words: prefetched(words, "_states_to_backward_prefetch")  # noqa: E731
    differs(forward, ["--forward_prefetch", 0], 0)
    differs(backward, ["--backward_fetch_policy", "backward_post"], 5)


@check("auto_wrap_policy")
def test_auto_wrap_policy():
    def units(words):
        with one_process(words) as built:
            return sum(isinstance(module, FSDPModule) for module in built.model.modules())

    # Nothing of this model reaches 100M parameters, so that the root is the one unit.
    differs(units, ["--auto_wrap_policy", "size_based_auto_wrap_policy"], 1)


@check("activation_checkpointing")
def test_activation_checkpointing(monkeypatch):
    calls = []
    original = smp.prepare.apply_activation_checkpointing
    monkeypatch.setattr(
        smp.prepare, "apply_activation_checkpointing", lambda found: calls.append(len(found)) or original(found)
    )
    blocks(["--activation_checkpointing", 0])
    assert calls == []
    blocks([])
    assert calls == [2]


@check("compile")
def test_compile(monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda forward: compiled.append(forward) or forward)
    blocks([])
    assert compiled == []
    blocks(["--compile", 1])
    assert len(compiled) == 2


@check("bf16")
def test_bf16(tmp_path):
    differs(lambda words: plan_of(words, tmp_path).dtype, ["--bf16", 1], torch.bfloat16)


@check("distributed_timeout")
def test_distributed_timeout(monkeypatch):
    given = []
    original = dist.init_process_group
    monkeypatch.setattr(
        dist, "init_process_group", lambda *a, **k: given.append(k["timeout"].total_seconds()) or original(*a, **k)
    )
    blocks([])
    blocks(["--distributed_timeout", 77])
    assert given == [1800, 77]


@check("weight_decay", "beta1", "beta2", "adam_eps")
def test_optimizer():
    def group(words):
        config = parse([*SYNTHETIC, *words])
        groups = build_optimizer(torch.nn.Linear(2, 2), config.optim, lr=1.0).param_groups
        return groups[0]["weight_decay"], *groups[0]["betas"], groups[0]["eps"], groups[1]["weight_decay"]

    assert group([]) == (0.2, 0.9, 0.95, 1e-8, 0)
    words = ["--weight_decay", 0.3, "--beta1", 0.5, "--beta2", 0.6, "--adam_eps", 1e-3]
    assert group(words) == (0.3, 0.5, 0.6, 1e-3, 0)


# flag -> (value, style, step whose rate changes, expected rate); the schedule's numbers: test_lr_schedule.py.
RATES: dict[str, tuple[object, str, int, float]] = {
    "lr": (0.5, "constant", 50, 0.5),
    "lr_decay_style": ("constant", "cosine", 50, 1e-4),
    "lr_decay_iters": (20, "linear", 50, 1e-5),
    "min_lr": (5e-5, "linear", 99, 5e-5),
    "warmup": (0.5, "constant", 4, 1e-5),
    "plateau": (0.9, "plateau", 80, 1e-4),
    "wsd_decay": (0.5, "wsd", 74, 5.5e-5),
    "lr_compat": ("smp_v2", "cosine", 0, 0.0),
}


@pytest.mark.parametrize("flag", RATES)
@check(*RATES)
def test_rate(flag):
    value, style, step, expected = RATES[flag]
    rate = lambda words: lr_at(parse([*SYNTHETIC, *words]).lr, step, max_steps=100)  # noqa: E731
    words = ["--lr_decay_style", style]
    assert rate([*words, f"--{flag}", value]) == pytest.approx(expected) != pytest.approx(rate(words))
