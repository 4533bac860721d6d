"""The families, and for each the model, its size and the initial values of its parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from smp.errors import UserError
from smp.models import falcon, gpt2, gpt_neox, gptj, llama, mistral
from smp.models.derive import check_config, derive_family
from smp.models.family import Family
from smp.models.tensor_plan import TensorPlan

FAMILIES: dict[str, Family] = {family.name: family for family in (llama.FAMILY, mistral.FAMILY, gpt_neox.FAMILY)}

_derived: dict[str, Family] = {}  # by config

# model_type -> the tensor-parallel plan of a config, for types of which transformers has none that can be used.
TENSOR_PLANS: dict[str, Callable[[Any], TensorPlan | None]] = {
    "falcon": falcon.plan,
    "gpt2": gpt2.plan,
    "gptj": gptj.plan,
}

# SMP v2's --model_type -> family, or transformers' model type.
MODEL_TYPES: Mapping[str, str] = {
    "gpt_neox": "gpt_neox",
    "llama_v2": "llama",
    "llama_v3": "llama",
    "mistral": "mistral",
    "gpt2": "gpt2",
}


def family_of(hf_config: Any) -> Family:
    """Return the family of a Hugging Face config: one that is registered, or else one that is derived.

    Args:
        hf_config: a ``PreTrainedConfig``, or its ``model_type``.

    Raises:
        UserError: no family can be derived.
    """
    model_type = hf_config if isinstance(hf_config, str) else getattr(hf_config, "model_type", None)
    for family in FAMILIES.values():
        if family.hf_model_type == model_type:
            return family
    if hf_config is None or isinstance(hf_config, str):
        from transformers import CONFIG_MAPPING

        if hf_config is None or hf_config not in CONFIG_MAPPING:
            raise UserError(f"architecture {hf_config!r} is not supported: transformers knows no model of this type")
        hf_config = CONFIG_MAPPING[hf_config]()
    check_config(hf_config)
    key = type(hf_config).__name__ + hf_config.to_json_string()
    if key not in _derived:
        plan = TENSOR_PLANS.get(hf_config.model_type)
        with torch.device("meta"):
            twin = _build(hf_config, "eager")
        _derived[key] = derive_family(twin, None if plan is None else plan(hf_config))
    return _derived[key]


def register_family(family: Family) -> None:
    """Register another architecture with ``smp.transform`` and ``smp.parallelize``.

    Raises:
        UserError: its name or ``hf_model_type`` is taken.
    """
    for known in FAMILIES.values():
        if known.name == family.name or known.hf_model_type == family.hf_model_type:
            raise UserError(f"a family {known.name!r} for {known.hf_model_type!r} exists: choose another name and type")
    FAMILIES[family.name] = family


def init_rule(module: nn.Module, parameter_name: str, *, hf_config: Any) -> tuple[str, float]:
    """Return how Hugging Face's ``_init_weights`` of the supported families initialises a parameter.

    Args:
        module: the module that owns the parameter (not an ancestor of it).
        parameter_name: its name in ``module``, such as ``weight``.
        hf_config: gives ``initializer_range``.

    Returns:
        ``normal`` (of mean 0), ``ones`` or ``zeros``, and the standard deviation.

    Raises:
        UserError: there is no rule for the parameter.
    """
    is_bias = parameter_name == "bias"
    if parameter_name == "weight" and isinstance(module, (nn.Linear, nn.Embedding)):
        # Hugging Face reads an initializer_range of 0 as "not set".
        return "normal", hf_config.initializer_range or 0.02
    if is_bias and isinstance(module, nn.Linear):
        return "zeros", 0.0
    # By name: each family has a norm class of its own, and sharding prefixes class names.
    class_name = type(module).__name__
    if parameter_name in ("weight", "bias") and ("LayerNorm" in class_name or "RMSNorm" in class_name):
        return ("zeros" if is_bias else "ones"), 0.0
    raise UserError(
        f"parameter {parameter_name!r} of a {class_name} has no initialisation rule: only linear, embedding and norm "
        f"weights and biases of the supported families can be initialised"
    )


def _build(hf_config: Any, attn_implementation: str) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(
        copy.deepcopy(hf_config), dtype=torch.float32, attn_implementation=attn_implementation, trust_remote_code=False
    )
    # A cache of keys and values serves generation only, and would hold every layer's during training.
    model.config.use_cache = False
    return model


def build_model(hf_config: Any, *, attn_implementation: str) -> nn.Module:
    """Build the causal language model in fp32 under the caller's ``torch.device`` context.

    Args:
        hf_config: of a causal language model; it is copied, not changed.
        attn_implementation: ``sdpa``, ``eager``, ``flash_attention_2`` or ``flex_attention``.

    Raises:
        UserError: the architecture is not supported.
    """
    family = family_of(hf_config)
    model = _build(hf_config, attn_implementation)
    if getattr(hf_config, "tie_word_embeddings", False):
        # Tied once more, past __setattr__: a context that builds on the meta device replaces every parameter that is
        # assigned by a new one, and so takes the tie apart.
        embedding, head = (model.get_submodule(path) for path in (family.embedding, family.head))
        head._parameters["weight"] = embedding._parameters["weight"]
    return model


def count_parameters(hf_config: Any) -> int:
    """Count the parameters of the model, a tied weight once; nothing is allocated."""
    with torch.device("meta"):
        model = build_model(hf_config, attn_implementation="eager")
    return sum(parameter.numel() for parameter in model.parameters())
