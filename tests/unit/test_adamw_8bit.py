"""Moments of 8 bits: their bytes wherever they are predicted, and what is refused; tests/parity has the update."""

from __future__ import annotations

import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import GPT2Config, LlamaConfig

import smp
from smp.checkpoint.config import CheckpointConfig
from smp.checkpoint.disk_forecast import state_bytes as forecast_bytes
from smp.config import ActivationConfig, Settings
from smp.errors import ConfigError
from smp.memory.estimate import memory_at
from smp.memory.host import estimate_host_memory
from smp.memory.shape import Moment, Workload, model_shape
from smp.mesh import lay_out
from smp.models.model_config import ModelConfig, resolve_model
from smp.models.parameters import parameter_table
from smp.models.registry import build_model, family_of
from smp.optim import adamw_8bit
from smp.optim.config import OptimConfig
from smp.optim.optimizers import build_optimizer, find_problems, moved_bytes
from smp.plan.cost import checkpoint_bytes, disk_bytes
from tests.flags import plan_of

CONFIG = OptimConfig(optimizer="adamw_8bit")
LAYER = "model.layers.0"
BITS = ["--optimizer", "adamw_8bit"]


@pytest.fixture
def no_torchao(monkeypatch):
    for module in ("torchao", "torchao.optim"):
        monkeypatch.setitem(sys.modules, module, None)
    adamw_8bit._torchao.cache_clear()


def model_of(**changes):
    config = LlamaConfig(**({"vocab_size": 96, "hidden_size": 1024, "intermediate_size": 1280, "num_hidden_layers": 1,
                             "num_attention_heads": 16, "tie_word_embeddings": False} | changes))  # fmt: skip
    with torch.device("meta"):
        return build_model(config, attn_implementation=None)


def table_of(model):
    return parameter_table(model, family_of(model.config))


def test_bytes_of_moments_in_8_bits():
    resolved = resolve_model(ModelConfig(model="llama3_8b"))
    shape, mesh = model_shape(resolved), lay_out(1, 8)
    vectors = sum(spec.size for spec in shape.specs if len(spec.shape) < 2)
    state = 2 * (1 + 4 / 256) * (shape.parameters - vectors) + 8 * vectors
    work = Workload(8192, 1, 2, Settings((CONFIG, ActivationConfig(cpu_offload=True))))
    on_device = Workload(8192, 1, 2, Settings((CONFIG,)), moment=Moment.UPDATE)
    assert memory_at(shape, mesh, on_device)["optimizer state"] == int(state / 8)
    host = estimate_host_memory(shape, mesh, work, is_async=True, is_local=True)
    assert host["optimizer state"] == int(state / 8)
    assert host["checkpoint copy"] == shape.parameters // 8 * 4 + int(state / 8)
    assert checkpoint_bytes(shape, work) == int(4 * shape.parameters + state)  # smp doctor's too
    disk = disk_bytes(shape, mesh, work, CheckpointConfig(num_kept_checkpoints=[1]), local=8)
    assert disk["checkpoint"] == int(4 * shape.parameters + state)
    more = adamw_8bit.MOVED_BESIDES * (shape.parameters - vectors)
    assert moved_bytes(shape.specs, CONFIG) == pytest.approx(28 + (2 * state + more) / shape.parameters)
    model = model_of()
    optimizer = build_optimizer(model, CONFIG, lr=0.1)
    counts = [sum(p.numel() for p in model.parameters() if (p.dim() > 1) is matrix) for matrix in (True, False)]
    assert forecast_bytes(model, optimizer, own=False) == (4 + 2 * (1 + 4 / 256)) * counts[0] + 12 * counts[1]


def test_a_step_is_planned_in_8_bits_without_torchao(no_torchao):
    with FakeTensorMode():
        model = torch.nn.Linear(512, 300)
        optimizer = build_optimizer(model, CONFIG, lr=0.1)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step(skip=torch.tensor(False))
        state = optimizer.state[model.weight]
    assert {key: (value.dtype, tuple(value.shape)) for key, value in state.items()} == {
        "step": (torch.float32, ()),
        "exp_avg": (torch.uint8, (300, 512)), "exp_avg_scale": (torch.float32, (300, 2)),
        "exp_avg_sq": (torch.uint8, (300, 512)), "exp_avg_sq_scale": (torch.float32, (300, 2)),
    }  # fmt: skip


def test_a_job_in_8_bits_needs_torchao_and_rows_that_are_blocks(no_torchao, tmp_path):
    wide = [*BITS, "--hidden_width", 256]
    with pytest.raises(ConfigError) as refused:
        plan_of(wide, tmp_path)
    said = "--optimizer adamw_8bit quantises with torchao, which is not installed: pip install torchao"
    assert refused.value.problems == [said] and not list(tmp_path.iterdir())
    plan_of([*wide, "--evaluate_only", 1], tmp_path)
    plan_of([*wide, "--dry_run", 1, "--dry_run_world_size", 1], tmp_path)
    with pytest.raises(ConfigError) as refused:
        plan_of(BITS, tmp_path)
    assert refused.value.problems == ["--optimizer adamw_8bit takes none of the trained parameters: use adamw"]


@pytest.mark.parametrize(
    ("changes", "mesh", "said"),
    [
        ({}, lay_out(1, 4), None),
        (
            {},
            lay_out(1, 2, 2),
            "2 gives a rank 640 of the 1280 of model.layers.0.mlp.down_proj.weight: choose one of 1",
        ),
        ({"intermediate_size": 1024}, lay_out(1, 2, 4), None),
        (
            {"intermediate_size": 1024},
            lay_out(1, 1, 8),
            f"8 gives a rank 128 of the 1024 of {LAYER}.self_attn.o_proj.weight: choose one of 1, 2, 4",
        ),
        ({"intermediate_size": 1000}, lay_out(1, 1, 2), None),  # rows that are no blocks are not quantised
        ({"intermediate_size": 512, "vocab_size": 97}, lay_out(1, 4, 2), None),
        (
            {"intermediate_size": 512, "vocab_size": 97},
            lay_out(1, 8, 2),
            "2 gives a rank 128 of the 1024 of model.embed_tokens.weight: choose one of 1",
        ),
    ],
)
def test_a_mesh_that_cuts_a_block_of_8_bits_is_refused(changes, mesh, said):
    prefix = "--optimizer adamw_8bit quantises 256 columns of a row together, and --tensor_parallel_degree "
    assert find_problems(table_of(model_of(**changes)), mesh, CONFIG) == ([prefix + said] if said else [])
    assert find_problems(table_of(model_of(**changes)), mesh, OptimConfig()) == []


def test_the_table_says_what_tensor_parallelism_splits():
    """Weights of GPT-2 are transposed; an adapter is split with the inputs or the outputs of its layer, or not."""
    with torch.device("meta"):
        model = build_model(GPT2Config(n_layer=1, n_embd=32, n_head=2), attn_implementation=None)
    smp.lora(model, 2)
    found = {spec.name.removeprefix("transformer."): spec.split for spec in table_of(model) if len(spec.shape) > 1}
    columns, rows = (1, None, 0), (0, 1, None)
    expected = {"wte.weight": 0, "wpe.weight": None}
    for layer, splits in (("attn.c_attn", columns), ("attn.c_proj", rows), ("mlp.c_fc", columns), ("mlp.c_proj", rows)):
        expected |= {f"h.0.{layer}.{name}": s for name, s in zip(("weight", "lora_A", "lora_B"), splits, strict=True)}
    assert found == expected
