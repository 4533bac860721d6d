"""The families, and for each the model, its size and the initial values of its parameters."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from smp.errors import UserError, one_line
from smp.models.attention_support import check_attention, default_attention
from smp.models.derive import check_config, derive_family
from smp.models.families import FAMILIES, TENSOR_PLANS, TYPE_DEFAULTS
from smp.models.family import Family

_derived: dict[str, Family] = {}  # by config

# Values of a config that change nothing of a model that is built of it: in fp32 and without a cache.
_NOT_BUILT = ("_name_or_path", "architectures", "dtype", "transformers_version", "use_cache")

# SMP v2's --model_type -> family, or transformers' model type.
MODEL_TYPES: Mapping[str, str] = {
    "gpt_neox": "gpt_neox",
    "llama_v2": "llama",
    "llama_v3": "llama",
    "mistral": "mistral",
    "mixtral": "mixtral",
    "gpt2": "gpt2",
}


def model_key(hf_config: Any) -> str:
    """Return a text that configs of which the same model is built have alike."""
    values = json.loads(hf_config.to_json_string())
    return type(hf_config).__name__ + json.dumps({k: v for k, v in values.items() if k not in _NOT_BUILT})


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
    key = model_key(hf_config)
    if key not in _derived:
        plan = TENSOR_PLANS.get(hf_config.model_type)
        try:
            with torch.device("meta"):
                twin = _build(hf_config, "eager")
        except Exception as error:  # of any type: code of any model
            raise UserError(
                f"transformers builds no model of this {hf_config.model_type} config ({one_line(error)})"
            ) from error
        derived = derive_family(twin, None if plan is None else plan(hf_config))
        _derived[key] = dataclasses.replace(derived, defaults=TYPE_DEFAULTS.get(hf_config.model_type, {}))
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


# A method of some models: with a pad token and no mask, it reads the first and last tokens from the device.
_WARNING = "warn_if_padding_and_no_attention_mask"


def _no_warning(*_: Any) -> None:
    """Take no look at the tokens: rows are padded on the right, where a causal model needs no mask."""


def _build(hf_config: Any, attn_implementation: str) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(
        copy.deepcopy(hf_config), dtype=torch.float32, attn_implementation=attn_implementation, trust_remote_code=False
    )
    # A cache of keys and values serves generation only, and would hold every layer's during training.
    model.config.use_cache = False
    for module in model.modules():
        if hasattr(module, _WARNING):
            setattr(module, _WARNING, _no_warning)
    return model


def build_model(hf_config: Any, *, attn_implementation: str | None) -> nn.Module:
    """Build the causal language model in fp32 under the caller's ``torch.device`` context.

    Args:
        hf_config: of a causal language model; it is copied, not changed.
        attn_implementation: ``sdpa``, ``eager``, ``flash_attention_2`` or ``flex_attention``; None: sdpa, or eager
            for a model that cannot have it.

    Raises:
        UserError: the architecture is not supported, or not with this function.
    """
    family_of(hf_config)
    attn_implementation = attn_implementation or default_attention(hf_config)
    check_attention(hf_config, attn_implementation)
    model = _build(hf_config, attn_implementation)
    tie_on_meta(model)
    return model


def tie_on_meta(model: nn.Module) -> None:
    """Tie again what models of Hugging Face in ``model`` tie by their config, where it is on the meta device.

    Accelerate's ``init_empty_weights`` replaces every parameter that is assigned by a new one, and so takes ties apart.
    Real values are left as they are: two may differ.
    """
    for module in model.modules():
        for tied, source in getattr(module, "all_tied_weights_keys", {}).items():
            owner, _, name = tied.rpartition(".")
            try:
                parameters = module.get_parameter(source), module.get_parameter(tied)
            except AttributeError:  # another module has taken its place, such as an adapter
                continue
            if all(parameter.is_meta for parameter in parameters):
                # Past __setattr__, which such a context has replaced.
                module.get_submodule(owner)._parameters[name] = parameters[0]
