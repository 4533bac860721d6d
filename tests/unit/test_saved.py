"""What a block saves for backward: counted without values, and by a real forward pass."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GPT2Config, GPTNeoXConfig, LlamaConfig, PhiConfig

from smp.memory.shape import Workload, block_bytes, model_shape
from smp.mesh import lay_out
from smp.models.attention_support import default_attention
from smp.models.model_config import ModelConfig, ResolvedModel, resolve_model
from smp.models.registry import build_model, family_of
from smp.models.saved import saved_bytes
from tests.zoo import tiny_config

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, num_key_value_heads=2, intermediate_size=176),
    "gelu of many operations": GPTNeoXConfig(**SIZES, intermediate_size=256, hidden_act="gelu_fast"),
    "dropout": GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=96, attn_pdrop=0.0),
    "norms of queries and keys": Gemma3TextConfig(**SIZES, num_key_value_heads=2, intermediate_size=176, head_dim=32),
    "attention and MLP of one input": PhiConfig(**SIZES, intermediate_size=256),
}
BATCH, LENGTH = 2, 128


def really_saved(model, block) -> int:
    """Bytes of the storages that a forward of the block saves, beside its parameters and what it is given."""
    storages, given = {}, [*model.parameters(), *model.buffers()]
    forward = block.forward

    def note(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    def watched(*args, **kwargs):
        given.extend(torch.utils._pytree.tree_leaves((args, kwargs)))
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            return forward(*args, **kwargs)

    block.forward = watched
    model(input_ids=torch.zeros(BATCH, LENGTH, dtype=torch.long), use_cache=False)
    for tensor in filter(torch.is_tensor, given):
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_bytes_of_a_token_are_those_of_a_real_forward(name, dtype):
    real = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="sdpa").to(dtype).train()
    with torch.device("meta"):
        meta = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="sdpa").to(dtype).train()
    block = next(path for path, module in meta.named_modules() if path.endswith(".0"))
    counted = saved_bytes(meta, meta.get_submodule(block), dtype)
    assert BATCH * LENGTH * counted == pytest.approx(really_saved(real, real.get_submodule(block)), rel=0.02)
    assert "forward" not in vars(meta.get_submodule(block))


@pytest.mark.parametrize("kind", ["llama", "gemma3n_text", "deepseek_v4", "qwen4_exp_text", "hy_v4"])
def test_the_input_of_a_block_has_all_hidden_states_of_a_token(kind):
    config, given = tiny_config(kind), []
    attention, family = default_attention(config), family_of(config)
    model = build_model(config, attn_implementation=attention)
    block = model.get_submodule(family.blocks)[1]
    block.register_forward_pre_hook(lambda module, args: given.append(args[0]))
    with torch.no_grad():
        model(input_ids=torch.zeros(BATCH, LENGTH, dtype=torch.long), use_cache=False)
    shape = model_shape(ResolvedModel(kind, family, config, LENGTH, None, None, None, attention, True))
    assert block_bytes(shape, lay_out(), Workload(LENGTH, BATCH, compute_bytes=4)).input == given[0].nbytes


def test_the_prediction_goes_by_them():
    shapes = {name: model_shape(resolve_model(ModelConfig(model=name))) for name in ("llama7b", "gpt_neox_20b")}
    work = Workload(sequence_length=64, micro_batch_size=1, compute_bytes=2)
    inside = {}
    for name, shape in shapes.items():
        assert block_bytes(shape, lay_out(), work).inside == 64 * shape.saved[0]
        formula = dataclasses.replace(shape, saved=None)
        inside[name] = [block_bytes(each, lay_out(1, 1, 8), work).inside for each in (shape, formula)]
    assert inside["llama7b"][0] == pytest.approx(inside["llama7b"][1], rel=0.01)
    assert inside["gpt_neox_20b"][0] > 1.5 * inside["gpt_neox_20b"][1]  # its gelu is seven operations
