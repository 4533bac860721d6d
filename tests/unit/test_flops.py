from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
    RoFormerConfig,
)

from smp.config import Settings
from smp.errors import UserError
from smp.models.registry import family_of
from smp.parallel import lora
from smp.parallel.parallelize import table_of
from smp.plan.devices import peak_flops
from smp.train.flops import model_flops_per_token

BATCH, LENGTH = 2, 24
TINY = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 96}
CONFIGS = {
    "llama_gqa": LlamaConfig(**TINY, intermediate_size=88, num_key_value_heads=2),
    "llama_wide_heads": LlamaConfig(**TINY, intermediate_size=88, num_key_value_heads=1, head_dim=16),
    "llama_tied": LlamaConfig(**TINY, intermediate_size=88, tie_word_embeddings=True),
    "mistral": MistralConfig(**TINY, intermediate_size=72, num_key_value_heads=2, sliding_window=None),
    "gpt_neox": GPTNeoXConfig(**TINY, intermediate_size=128),
    "gpt2": GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=96, bos_token_id=0, eos_token_id=0),
    "qwen3": Qwen3Config(**TINY, intermediate_size=88, num_key_value_heads=2, head_dim=16),
    "gemma3": Gemma3TextConfig(**TINY, intermediate_size=88, num_key_value_heads=2, head_dim=16, sliding_window=8),
    # Positions that have no gradient, and a tied head.
    "roformer": RoFormerConfig(**TINY, intermediate_size=88, is_decoder=True),
}


def counted(model):
    """What torch counts of a forward and backward pass."""
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.randint(96, (BATCH, LENGTH))).logits.sum().backward()
    # transformers 5.17 turns positions into angles by a product of matrices.
    angles = [found for name, found in counter.get_flop_counts().items() if name.endswith("rotary_emb")]
    return counter.get_total_flops() - sum(sum(found.values()) for found in angles)


@pytest.mark.parametrize("name", CONFIGS)
def test_equals_what_torch_counts(name):
    config = CONFIGS[name]
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    assert counted(model) == model_flops_per_token(config, LENGTH).total * BATCH * LENGTH


@pytest.mark.parametrize("name", ["llama_gqa", "gpt_neox", "gpt2"])
def test_equals_what_torch_counts_beside_adapters(name):
    """Where the embedding's output has a gradient, as the input of all blocks but the first does."""
    config = CONFIGS[name]
    peft = pytest.importorskip("peft")
    resolved = SimpleNamespace(hf_config=config, family=family_of(config), attn_implementation=None)
    settings = Settings((lora.Config(lora_rank=3),))
    adapters = peft.LoraConfig(task_type="CAUSAL_LM", r=3, target_modules="all-linear")
    model = peft.get_peft_model(AutoModelForCausalLM.from_config(config, attn_implementation="eager"), adapters)
    model.enable_input_require_grads()
    found = model_flops_per_token(config, LENGTH, table_of(resolved, settings))
    assert counted(model) == found.total * BATCH * LENGTH
    assert found.total < model_flops_per_token(config, LENGTH).total and "frozen matmul weights" in found.formula


def test_a_head_that_is_trained_beside_adapters_has_a_gradient():
    config, saved = CONFIGS["llama_gqa"], ("embed_tokens", "lm_head", "norm")
    peft = pytest.importorskip("peft")
    resolved = SimpleNamespace(hf_config=config, family=family_of(config), attn_implementation=None)
    settings = Settings((lora.Config(lora_rank=3, lora_modules_to_save=saved),))
    adapters = peft.LoraConfig(task_type="CAUSAL_LM", r=3, target_modules="all-linear", modules_to_save=list(saved))
    model = peft.get_peft_model(AutoModelForCausalLM.from_config(config, attn_implementation="eager"), adapters)
    found = model_flops_per_token(config, LENGTH, table_of(resolved, settings))
    assert counted(model) == found.total * BATCH * LENGTH


LLAMA_7B = LlamaConfig(
    hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, intermediate_size=11008, vocab_size=32000
)
LLAMA_70B = LlamaConfig(
    hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8, intermediate_size=28672,
    vocab_size=32000,
)  # fmt: skip
NEOX_20B = GPTNeoXConfig(
    hidden_size=6144, num_hidden_layers=44, num_attention_heads=64, intermediate_size=24576, vocab_size=50432
)


@pytest.mark.parametrize(
    ("config", "length", "tera_per_sample"), [(LLAMA_7B, 4096, 188.8), (LLAMA_70B, 4096, 1821), (NEOX_20B, 2048, 262.3)]
)
def test_published_shapes(config, length, tera_per_sample):
    flops = model_flops_per_token(config, length)
    assert flops.total * length / 1e12 == pytest.approx(tera_per_sample, rel=5e-4)
    assert f"{config.num_hidden_layers} layers" in flops.formula and "full attention square" in flops.formula


def test_an_unknown_architecture_is_refused():
    with pytest.raises(UserError, match="'bert' cannot be trained"):
        model_flops_per_token(CONFIG_MAPPING["bert"](), 128)


@pytest.mark.parametrize(
    ("name", "dtype", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312),
        ("NVIDIA A100 80GB PCIe", torch.bfloat16, 312),
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756),
        ("NVIDIA H200", torch.bfloat16, 989),
        ("NVIDIA H200", torch.float32, 66.9),
        ("NVIDIA B200", torch.bfloat16, 2250),
        ("NVIDIA A10G", torch.bfloat16, 70),
        ("NVIDIA L40S", torch.bfloat16, 362),
        ("Tesla V100-SXM2-16GB", torch.float16, 125),
    ],
)
def test_known_devices(name, dtype, tera):
    assert peak_flops(name, dtype) == tera * 1e12


def test_tf32_is_another_peak():
    assert peak_flops("NVIDIA A100-SXM4-40GB", torch.float32) == 19.5e12
    assert peak_flops("NVIDIA A100-SXM4-40GB", torch.float32, tf32=True) == 156e12


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", torch.bfloat16),
        ("NVIDIA H1000", torch.bfloat16),
        ("Intel Xeon", torch.float32),
        ("cpu", torch.bfloat16),
        ("Tesla V100-SXM2-16GB", torch.bfloat16),  # it has no bf16 units
        ("NVIDIA A10G", torch.float32),
        ("NVIDIA H200", torch.float64),
    ],
)
def test_an_unknown_peak_is_none(name, dtype):
    assert peak_flops(name, dtype) is None
