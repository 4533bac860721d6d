"""Live flags of model, sharding, precision, optimizer and rate: each changes the object that is built from it."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

import smp.parallel.linear_loss
import smp.parallel.parallelize
import smp.parallel.sharding
from smp.errors import ConfigError
from smp.loss import shift_labels, token_losses
from smp.mesh import resolve_mesh
from smp.models.model_config import resolve_model
from smp.optim.optimizers import build_optimizer
from smp.parallel.loss import model_loss_sum
from smp.parallel.offload import DiskStore
from smp.train.lr_schedule import lr_at
from smp.train.report import profile_step
from smp.train.state import TrainState
from tests.flags import (
    LLAMA3,
    MISTRAL,
    MIXTRAL,
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
from tests.reference import VOCABULARY
from tests.unit.test_activation_checkpoint import products
from tests.unit.test_chunked_loss import counted

GPT2 = [*NEOX[2:], "--model_type", "gpt2"]

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
    "embd_pdrop": ([0.3], lambda c: c.embd_pdrop, 0.3, GPT2),
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
    "num_local_experts": ([4], lambda c: c.num_local_experts, 4, MIXTRAL),
    "num_experts_per_tok": ([3], lambda c: c.num_experts_per_tok, 3, MIXTRAL),
    "max_context_width": ([24], lambda c: c.max_position_embeddings, 24, LLAMA),
}  # fmt: skip


@pytest.mark.parametrize("flag", SHAPES)
@check(*SHAPES)
def test_shape(flag):
    words, reading, expected, base = SHAPES[flag]
    differs(lambda given: reading(hf(given, model=base)), [f"--{flag}", *words], expected)


@check("model_type")
def test_model_type():
    assert [hf([], model=base).model_type for base in (LLAMA, MIXTRAL, MISTRAL)] == ["llama", "mixtral", "mistral"]


@check("moe")
def test_moe():
    hf(["--moe", 1], model=MIXTRAL)
    with pytest.raises(ConfigError, match="--moe 1 is for mixtures of experts, and llama_v2 is none"):
        hf(["--moe", 1])


@check("model")
def test_model():
    name = lambda words: resolve_model(parse([*SYNTHETIC, *(words or LLAMA)]).model).name  # noqa: E731
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
    original = smp.parallel.parallelize.build_on_meta
    monkeypatch.setattr(smp.parallel.parallelize, "build_on_meta", lambda build: calls.append(1) or original(build))
    blocks([])
    assert len(calls) == 1
    blocks(["--delayed_param", 0])
    assert len(calls) == 1


@check("sharding_strategy", "hybrid_shard_degree")
def test_sharding():
    def degrees(words):
        found = resolve_mesh(parse([*SYNTHETIC, *words]).parallel, world_size=8, local_world_size=4)
        return found.replicas.size, found.shard.size

    differs(degrees, ["--sharding_strategy", "full_shard"], (1, 8))
    differs(degrees, ["--hybrid_shard_degree", 2], (4, 2))


@check("expert_parallel_degree")
def test_expert_parallel_degree():
    def degrees(words):
        found = resolve_mesh(parse([*SYNTHETIC, *words]).parallel, world_size=8, local_world_size=4)
        return found.degree("ep"), found.shard.size, found.replicas.size

    differs(degrees, ["--expert_parallel_degree", 2], (2, 4, 2))


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


@check("activation_checkpointing", "activation_checkpointing_mode", "activation_checkpointing_every")
def test_activation_checkpointing():
    def computed(words):
        """Matrix products of one backward."""
        with one_process(["--vocab_size", VOCABULARY, *words]) as built:
            return products(built.model)

    none, full = computed(["--activation_checkpointing", 0]), computed([])
    selective = computed(["--activation_checkpointing_mode", "selective"])
    assert computed(["--activation_checkpointing_mode", "products"]) == none
    every = computed(["--activation_checkpointing_every", 2])  # one of the two blocks
    assert none < selective < full and 2 * (every - none) == full - none


@check("offload_activations", "activation_loading_horizon", "offload_dir")
def test_offload_activations(monkeypatch, tmp_path):
    moved = []
    put = DiskStore.put

    def noted(store, tensor):
        moved.append(os.readlink(f"/proc/self/fd/{store.descriptor}").rpartition("/")[0])
        return put(store, tensor)

    monkeypatch.setattr(DiskStore, "put", noted)

    def places(words):
        moved.clear()
        with one_process(["--num_layers", 3, *words]) as built:
            # Inputs of blocks of 128 KiB.
            built.model(input_ids=torch.zeros(64, 16, dtype=torch.int64)).logits.sum().backward()
        return list(moved)

    offload = ["--offload_activations", 1, "--offload_dir", tmp_path]
    assert places([]) == []
    differs(places, offload, [str(tmp_path)])
    differs(places, ["--activation_loading_horizon", 1], 2 * [str(tmp_path)], base=offload)
    (tmp_path / "other").mkdir()
    differs(places, ["--offload_dir", tmp_path / "other"], [str(tmp_path / "other")], base=offload)


@check("fsdp_cache_flush_warnings")
def test_cache_flush_warnings(monkeypatch):
    watched = []
    monkeypatch.setattr(
        smp.parallel.sharding, "warn_of_cache_flushes", lambda model, device_type: watched.append(device_type)
    )
    blocks([])
    assert watched == ["cpu"]  # where the function does nothing: test_memory_warnings.py
    blocks(["--fsdp_cache_flush_warnings", 0])
    assert watched == ["cpu"]


@check("cpu_offload")
def test_cpu_offload():
    def in_host_memory(words):
        with one_process(words) as built:
            states = [unit._get_fsdp_state() for unit in built.model.modules() if isinstance(unit, FSDPModule)]
            groups = [state._fsdp_param_group for state in states if state._fsdp_param_group is not None]
            return {parameter.offload_to_cpu for group in groups for parameter in group.fsdp_params}

    assert in_host_memory([]) == {False}
    differs(in_host_memory, ["--cpu_offload", 1], {True})


@check("loss_chunk_tokens", "z_loss", "compile_loss")
def test_loss_in_chunks(monkeypatch):
    rows = counted(monkeypatch)

    def loss(words):
        rows.clear()
        with one_process(words) as built:
            ids = torch.arange(32).view(2, 16)
            value = float(model_loss_sum(built.model, {"input_ids": ids}, shift_labels(ids)))
        return value, list(rows)

    plain, whole = loss([])
    assert whole == [32] and loss(["--loss_chunk_tokens", 0]) == (pytest.approx(plain, rel=1e-6), [])
    assert loss(["--loss_chunk_tokens", 10]) == (pytest.approx(plain, rel=1e-6), [10, 10, 10, 2])
    made = lambda: lambda logits, *rest: compiled.append(len(logits)) or token_losses(logits, *rest)  # noqa: E731
    monkeypatch.setattr(smp.parallel.linear_loss, "_compiled", made)
    compiled: list[int] = []
    assert loss(["--compile_loss", 1]) == (pytest.approx(plain, rel=1e-6), []) and compiled == [32]
    # 64 words, all about as likely, so that the logarithm of the partition is about log 64.
    assert loss(["--z_loss", 0.1])[0] == pytest.approx(plain + 30 * 0.1 * math.log(64) ** 2, rel=0.05)


@check("compile")
def test_compile(monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda forward, fullgraph: compiled.append(forward) or forward)
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


@check("param_groups")
def test_param_groups(tmp_path):
    path = tmp_path / "groups.yaml"
    path.write_text("- {pattern: norm, lr_factor: 0.5}")
    with one_process(["--param_groups", path]) as built:
        groups = build_optimizer(built.model, built.config.optim, lr=1.0).param_groups
    assert sorted({group["lr_factor"] for group in groups}) == [0.5, 1.0]


@check("optimizer", "muon_momentum", "muon_nesterov", "muon_adjust_lr", "muon_dtype")
def test_muon():
    def updated(*words):
        config = parse([*SYNTHETIC, *words])
        torch.manual_seed(0)
        layer = torch.nn.Linear(4, 2, bias=False)
        optimizer = build_optimizer(layer, config.optim, lr=1.0)
        for _ in range(2):
            layer.weight.grad = torch.randn(2, 4)
            optimizer.step()
        return layer.weight.detach()

    muon = ["--optimizer", "muon"]
    found = [
        updated(*words)
        for words in ([], muon, *([*muon, *more] for more in (
            ["--muon_momentum", 0.5], ["--muon_nesterov", 0], ["--muon_adjust_lr", "original"], ["--muon_dtype", "bf16"]
        )))
    ]  # fmt: skip
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(found, 2))


@check("optimizer_state_dtype", "param_dtype", "stochastic_rounding")
def test_dtypes_of_the_update():
    def dtypes(words):
        with one_process(["--bf16", 1, *words]) as built:
            optimizer = build_optimizer(built.model, built.config.optim, lr=1.0)
            (group, _), (parameter, *_) = optimizer.param_groups, built.model.parameters()
            moment = optimizer.state_specs(parameter, group)["exp_avg"].dtype
            return parameter.dtype, moment, "rounding" in group

    fp32, bf16 = torch.float32, torch.bfloat16
    assert dtypes([]) == (fp32, fp32, False)
    assert dtypes(["--optimizer_state_dtype", "bf16"]) == (fp32, bf16, False)
    low = ["--param_dtype", "bf16"]
    assert dtypes(low) == (bf16, bf16, True)
    assert dtypes([*low, "--stochastic_rounding", 0, "--optimizer_state_dtype", "fp32"]) == (bf16, fp32, False)


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


@pytest.mark.full
@check("memory_snapshot")
def test_memory_snapshot(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **kwargs: calls.append(kwargs))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: calls.append(os.path.basename(path)))
    plan, start = plan_of(["--enable_memory_profiling", 1], tmp_path), SimpleNamespace(progress=TrainState())
    snapshot = [{"max_entries": 200_000}, "memory_snapshot_rank0.pickle", {"enabled": None}]
    for given, expected in ((False, []), (True, snapshot)):
        logging = dataclasses.replace(plan.config.logging, memory_snapshot=given)  # refused without a GPU
        profiled = dataclasses.replace(plan, config=dataclasses.replace(plan.config, logging=logging))
        with one_process([]) as built:
            optimizer = build_optimizer(built.model, built.config.optim, lr=1.0)
            with profile_step(profiled, start, built.model, optimizer, step=1, record=print):
                pass
        assert calls == expected
    for words, problem in (
        (
            ["--enable_memory_profiling", 1, "--memory_snapshot", 1],
            "--memory_snapshot 1 needs a GPU and none is visible",
        ),
        (["--memory_profiling_all_ranks", 1], "--memory_profiling_all_ranks 1 needs --enable_memory_profiling 1"),
    ):
        with pytest.raises(ConfigError, match=problem):
            plan_of(words, tmp_path)
