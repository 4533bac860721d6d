"""What is written by hand of architectures: the families of SMP v2's models, tensor-parallel plans, and presets."""

from __future__ import annotations

import dataclasses
import importlib.resources
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from smp.models.family import COMMON_DEFAULTS, COMMON_SETTINGS, Family, LogitTransform
from smp.models.file_names import FileNames, Rename
from smp.models.tensor_plan import GPT_NEOX_PLAN, LLAMA_PLAN, Part, TensorPlan
from smp.yaml_input import strict_yaml

# Wheels are unpacked on installation, so that the resource is a folder on disk.
_PRESETS = pathlib.Path(str(importlib.resources.files("smp.models"))) / "presets"

_LLAMA = Family(
    name="llama",
    hf_model_type="llama",
    architecture="LlamaForCausalLM",
    base="model",
    blocks="model.layers",
    embedding="model.embed_tokens",
    final_norm="model.norm",
    head="lm_head",
    logits=LogitTransform(),
    gated_mlp=True,
    settings={
        **COMMON_SETTINGS,
        "num_key_value_heads": "num_key_value_heads",
        "llama_intermediate_size": "intermediate_size",
    },
    tensor_plan=LLAMA_PLAN,
    defaults={
        **COMMON_DEFAULTS,
        "intermediate_size": 11008,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
)

_MISTRAL = dataclasses.replace(
    _LLAMA,
    name="mistral",
    hf_model_type="mistral",
    architecture="MistralForCausalLM",
    settings={
        **COMMON_SETTINGS,
        "num_key_value_heads": "num_key_value_heads",
        "sliding_window": "sliding_window",
    },
    defaults={**_LLAMA.defaults, "num_key_value_heads": 12, "intermediate_size": 14336, "sliding_window": None},
)

_GPT_NEOX = Family(
    name="gpt_neox",
    hf_model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    base="gpt_neox",
    blocks="gpt_neox.layers",
    embedding="gpt_neox.embed_in",
    final_norm="gpt_neox.final_layer_norm",
    head="lm_head",
    logits=LogitTransform(),
    gated_mlp=False,
    settings={
        **COMMON_SETTINGS,
        "resid_pdrop": "hidden_dropout",
        "rotary_pct": "rope_parameters.partial_rotary_factor",
    },
    tensor_plan=GPT_NEOX_PLAN,
    defaults={
        **COMMON_DEFAULTS,
        "intermediate_size": 3072,
        "layer_norm_eps": 1e-5,
        "eos_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    },
    # The module was renamed in transformers 5; the files kept the old name.
    file_names=FileNames((Rename(r"^embed_out\.", "lm_head."),), (Rename(r"^lm_head\.", "embed_out."),)),
)

FAMILIES: dict[str, Family] = {family.name: family for family in (_LLAMA, _MISTRAL, _GPT_NEOX)}

# SMP v2's defaults of a type that is derived: model_type -> config.json values. The rest is transformers'.
TYPE_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "mixtral": {
        **_MISTRAL.defaults,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
}


def list_presets() -> list[str]:
    """Return the names that ``--model`` knows, sorted."""
    return sorted(path.stem for path in _PRESETS.glob("*.yaml"))


def preset_path(name: str) -> pathlib.Path:
    """Return the YAML file of a preset; it exists when ``name`` is in :func:`list_presets`."""
    return _PRESETS / f"{name}.yaml"


def load_preset(name: str) -> dict[str, Any]:
    """Read a preset whose name is in :func:`list_presets`.

    Returns:
        ``family``: its name; ``sequence_length``: tokens per sample unless ``--max_context_width`` sets it; ``config``:
        config.json values, of which others have Hugging Face's defaults.
    """
    return strict_yaml(preset_path(name).read_text())


def _plan(attention: Part, up: str, down: str, **sizes: Any) -> TensorPlan:
    """Return a plan of blocks whose ``mlp`` has two matrices."""
    return TensorPlan(parts=(attention, Part("mlp", (up,), down)), **sizes)


def _gpt_neo(hf_config: Any) -> TensorPlan:
    """Return the plan of GPT-Neo."""
    attention = Part("attn.attention", ("q_proj", "k_proj", "v_proj"), "out_proj", heads=True, counts=("num_heads",))
    return _plan(attention, "c_fc", "c_proj", width=hf_config.intermediate_size or 4 * hf_config.hidden_size)


def _gpt2(hf_config: Any) -> TensorPlan:
    """Return the plan of GPT-2: queries, keys and values fused one after the other."""
    fused = {"c_attn": ("heads",) * 3}
    attention = Part("attn", ("c_attn",), "c_proj", heads=True, fused=fused, counts=("num_heads", "split_size"))
    return _plan(attention, "c_fc", "c_proj", width=hf_config.n_inner or 4 * hf_config.hidden_size)


def _gpt_bigcode(hf_config: Any) -> TensorPlan:
    """Return the plan of GPT-BigCode: one key/value head for all, or queries, keys and values of a head together."""
    multi_query = hf_config.multi_query
    fused = {"c_attn": ("heads", "key_value", "key_value")} if multi_query else {}
    return _plan(
        Part("attn", ("c_attn",), "c_proj", heads=True, fused=fused, counts=("num_heads", "embed_dim")),
        "c_fc",
        "c_proj",
        key_value_heads=1 if multi_query else "num_attention_heads",
        width=hf_config.n_inner or 4 * hf_config.hidden_size,
    )


def _falcon(hf_config: Any) -> TensorPlan | None:
    """Return the plan of Falcon, with three ways to fuse queries, keys and values.

    None: it has ALiBi, whose slopes are those of all heads.
    """
    if hf_config.alibi:
        return None
    heads = hf_config.num_attention_heads
    fused, groups = {}, heads
    if hf_config.new_decoder_architecture:
        groups = hf_config.num_kv_heads  # with the queries of each beside it: whole groups are split
    elif hf_config.multi_query:
        fused = {"query_key_value": ("heads", "key_value", "key_value")}
    counts = ("num_heads", "num_kv_heads")
    return _plan(
        Part("self_attention", ("query_key_value",), "dense", heads=True, fused=fused, counts=counts),
        "dense_h_to_4h",
        "dense_4h_to_h",
        heads=groups,
        key_value_heads=1 if fused else groups,
        width=hf_config.ffn_hidden_size,
    )


# model_type -> the tensor-parallel plan of a config, for types of which none can be derived.
TENSOR_PLANS: Mapping[str, Callable[[Any], TensorPlan | None]] = {
    "falcon": _falcon,
    "gpt2": _gpt2,
    "gpt_bigcode": _gpt_bigcode,
    "gpt_neo": _gpt_neo,
}
