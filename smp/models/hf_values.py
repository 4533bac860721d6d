"""Values of a Hugging Face config from settings, and their checks."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import re
from collections.abc import Mapping
from typing import Any

from smp.errors import ConfigError, UserError, one_line
from smp.models.family import Family
from smp.models.meta_model import count_parameters

logger = logging.getLogger(__name__)

# SMP v2's defaults for --rope_scaling_type llama3.
_LLAMA3_ROPE: Mapping[str, Any] = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

# Rotary embeddings that go by the number of positions.
_BY_POSITIONS = {"dynamic", "longrope"}

# Settings that pretrained weights fix; each sets a top-level key.
_FIXED_BY_WEIGHTS = (
    "vocab_size", "hidden_width", "num_layers", "num_heads", "num_key_value_heads", "intermediate_size",
    "llama_intermediate_size", "initializer_range", "num_local_experts",
)  # fmt: skip


# Bounds of the sizes in a config.json. The upper ones are those of the settings: beyond them building the model on the
# meta device takes minutes.
_RANGES: Mapping[str, tuple[int, int]] = {
    "vocab_size": (1, 1 << 24),
    "hidden_size": (1, 1 << 20),
    "intermediate_size": (1, 1 << 22),
    "num_hidden_layers": (1, 10_000),
    "num_attention_heads": (1, 1 << 16),
    "num_key_value_heads": (1, 1 << 16),
    "head_dim": (1, 1 << 16),
    "max_position_embeddings": (2, 1 << 40),
}


# Other numbers of modules, by their names; the smallest that means anything is the architecture's own.
_COUNTS = re.compile(r"(^|_)(layer|head|expert|block)s?$")
_MOST = 1 << 16


def range_problems(content: Mapping[str, Any], renamed: Mapping[str, str]) -> list[str]:
    """Return one sentence for each size in a config.json that is no whole number, or out of bounds.

    Args:
        content: the JSON object. A size may be a list, of one for each layer.
        renamed: the architecture's own key for those of ``_RANGES`` that it calls otherwise.
    """
    bounds = {**_RANGES, **{own: _RANGES[key] for key, own in renamed.items() if key in _RANGES}}
    found = []
    for key, value in content.items():
        if key in bounds:
            lowest, highest = bounds[key]
            sizes = value if isinstance(value, list) else [value]
            if value is not None and not all(type(size) is int and lowest <= size <= highest for size in sizes):
                found.append(f"{key} must be an integer from {lowest} to {highest}, got {str(value)[:40]}")
        elif _COUNTS.search(key) and isinstance(value, (int, float)) and value > _MOST:
            found.append(f"{key} must be at most {_MOST}, got {str(value)[:40]}")
    return found


def _write(values: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for key in parents:
        values = values.setdefault(key, {})
    values[last] = value


def _read(values: Mapping[str, Any], path: str) -> Any:
    found: Any = values
    for key in path.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _derived(values: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the values that follow from others unless they are given."""
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    found = {"head_dim": hidden // heads}
    if "num_key_value_heads" in family.settings:
        found["num_key_value_heads"] = heads
    if not family.gated_mlp:
        found["intermediate_size"] = 4 * hidden
    return found


def _settle_rope(rope: dict[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Complete the rotary embedding's parameters in place; returns problems."""
    rope.setdefault("rope_type", "default")
    scaling = sorted(name for name in given if name.startswith("rope_scaling_") and name != "rope_scaling_type")
    if rope["rope_type"] == "llama3":
        for key, value in _LLAMA3_ROPE.items():
            rope.setdefault(key, value)
    elif scaling:
        needed = "add --rope_scaling_type llama3, or leave it out"
        return [f"--{name} has no effect without rope scaling: {needed}" for name in scaling]
    elif "rope_scaling_type" in given:
        for key in _LLAMA3_ROPE:
            rope.pop(key, None)
    return []


def _not_fixed(base: Mapping[str, Any], family: Family, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that pretrained weights do not fix; log those that they overrule or whose values change.

    Args:
        base: config.json values of the weights.
    """
    for name, value in given.items():
        theirs = _read(base, family.settings[name]) if name in family.settings else None
        if name in _FIXED_BY_WEIGHTS and theirs != value:
            logger.info("--%s %s has no effect: the pretrained model has %s", name, value, theirs)
        elif name in family.settings and theirs != value:
            logger.info("--%s %s replaces the pretrained model's %s, which SMP v2 kept", name, value, theirs)
    return {name: value for name, value in given.items() if name not in _FIXED_BY_WEIGHTS}


def apply_settings(
    base: Mapping[str, Any], family: Family, given: Mapping[str, Any], *, pretrained: bool
) -> tuple[dict[str, Any], list[str]]:
    """Put settings into config values.

    Args:
        base: config.json values of the preset, the directory or the family's defaults; complete.
        given: settings by name, only those that were given.
        pretrained: weights will be loaded, so the shape must stay that of ``base``.

    Returns:
        The new values, and one sentence for each setting that cannot be used.
    """
    values, found = copy.deepcopy(dict(base)), []
    if pretrained:
        given = _not_fixed(base, family, given)
    elif family.defaults:
        for key, value in _derived(base, family).items():
            if values.get(key) == value:  # derived from the base's width; derived again below
                del values[key]
    for name, value in given.items():
        if name not in family.settings:
            found.append(f"--{name} is no setting of the {family.name} family: leave it out")
            continue
        _write(values, family.settings[name], value)
    if len({given[name] for name in ("intermediate_size", "llama_intermediate_size") if name in given}) > 1:
        found.append("--intermediate_size and --llama_intermediate_size differ: give one of them")
    if values.get("sliding_window") == 0:
        values["sliding_window"] = None
    if not family.defaults:  # transformers completes and checks the values of a type that is derived
        if "num_layers" in given and given["num_layers"] != base.get(family.settings["num_layers"]):
            values.pop("layer_types", None)  # one for each layer
        if "rope_scaling_type" in family.settings:
            found += _settle_rope(values["rope_parameters"], given)
        return values, found
    for key, value in _derived(values, family).items():
        if key != "head_dim":
            values.setdefault(key, value)
    found += _settle_rope(values.setdefault("rope_parameters", {}), given)
    return values, found


def value_problems(values: Mapping[str, Any], family: Family) -> list[str]:
    """Return one sentence for each combination of config values that no model can be built from."""
    found: list[str] = []
    padding = values.get("pad_token_id")
    if padding is not None and not 0 <= padding < values.get("vocab_size", padding + 1):
        found.append(
            f"the model's pad_token_id {padding} is outside the vocabulary: raise --vocab_size above it, or make it "
            f"null in config.json"
        )
    heads, key_value_heads = (
        values.get(family.settings.get(name, "")) for name in ("num_heads", "num_key_value_heads")
    )
    if type(key_value_heads) is int and key_value_heads < 1:
        found.append(f"num_key_value_heads must be at least 1, got {key_value_heads}")
    elif type(heads) is int and type(key_value_heads) is int and heads % key_value_heads:
        found.append(
            f"--num_key_value_heads {key_value_heads} does not divide --num_heads {heads}: choose a divisor, "
            f"or {heads} for plain multi-head attention"
        )
    experts, top = (values.get(family.settings.get(name, "")) for name in ("num_local_experts", "num_experts_per_tok"))
    if type(experts) is int and type(top) is int and top > experts > 0:
        found.append(f"--num_experts_per_tok {top} is more than the {experts} experts of a layer: lower it")
    groups = values.get("n_group")  # of which a token's experts are chosen first, by the two best of each
    if type(experts) is int and type(groups) is int and groups > 1 and (experts % groups or experts < 2 * groups):
        found.append(
            f"--num_local_experts {experts} does not make the {groups} groups (n_group) of this model, each of two "
            f"experts or more: choose a multiple of {groups} from {2 * groups}"
        )
    if "sliding_attention" in (values.get("layer_types") or ()) and values.get("sliding_window") is None:
        found.append("the model's layer_types name sliding_attention: choose --sliding_window above 0, or leave it out")
    return _shape_problems(values, family, found) if family.defaults else found


def _shape_problems(values: Mapping[str, Any], family: Family, found: list[str]) -> list[str]:
    """Add what a family's own settings can get wrong."""
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    if hidden % heads:
        found.append(f"--num_heads {heads} does not divide --hidden_width {hidden}: choose a divisor")
    head_dim = values.get("head_dim") or hidden // heads
    fraction = values["rope_parameters"].get("partial_rotary_factor", 1.0)
    if not (isinstance(fraction, (int, float)) and 0 < fraction <= 1):
        return [*found, f"partial_rotary_factor must be a number above 0 and at most 1, got {str(fraction)[:40]}"]
    rotated = int(head_dim * fraction)
    if not found and (rotated < 2 or rotated % 2):
        found.append(
            f"the rotary embedding turns {rotated} of each head's {head_dim} dimensions, and the number must be even "
            f"and at least 2: change --hidden_width, --num_heads"
            + (" or --rotary_pct" if "rotary_pct" in family.settings else "")
        )
    return found


def new_config(model_type: str, values: dict[str, Any]) -> Any:
    """Return transformers' config object of config.json values."""
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type].from_dict(values)


def rebuilt(family: Family, values: dict[str, Any], given: Mapping[str, Any]) -> Any:
    """Return the config object of values that settings have changed.

    Args:
        given: the settings that changed them, by name.

    Raises:
        ConfigError: no model can be built from them, or transformers drops one.
    """
    model_type = family.hf_model_type
    try:
        hf_config = new_config(model_type, values)
        count_parameters(hf_config)
    except Exception as error:  # of any type, for values that do not fit each other
        flags = ", ".join(f"--{name} {value}" for name, value in given.items()) or "these settings"
        failed = f"transformers builds no {model_type} model ({one_line(error)})"
        why = str(error) if isinstance(error, UserError) else failed
        raise ConfigError([f"{flags} cannot be used: {why}: change or leave out what does not fit"]) from error
    now = hf_config.to_dict()
    lost = [
        f"--{name} {value} has no effect: transformers' {model_type} config makes {kept} of it: leave it out"
        for name, value in given.items()
        if name in family.settings and (kept := _read(now, path := family.settings[name])) != _read(values, path)
    ]
    if lost:
        raise ConfigError(lost)
    return hf_config


# Of a config's values those that do not change what a trained model computes: of the file, of a fresh model, of
# generation, of heads that are not trained, of how it is computed, and the number of positions, which shapes tell where
# they are learned. A key that is not named here counts.
_NOT_COMPUTED = {
    "_attn_implementation", "_name_or_path", "architectures", "attn_implementation", "auto_map", "bos_token_id",
    "chunk_size_feed_forward", "decoder_start_token_id", "do_sample", "dtype", "eos_token_id",
    "forced_eos_token_id", "gradient_checkpointing", "id2label", "init_std", "initializer_factor",
    "initializer_range", "label2id", "max_length", "max_position_embeddings", "n_ctx", "n_positions",
    "num_logits_to_keep", "output_attentions", "output_hidden_states", "output_router_logits", "pad_token_id",
    "pretraining_tp", "problem_type", "repetition_penalty", "rescale_prenorm_residual", "return_dict",
    "sep_token_id", "slow_but_exact", "summary_activation", "summary_first_dropout", "summary_proj_to_labels",
    "summary_type", "summary_use_proj", "task_specific_params", "temperature", "tokenizer_class", "top_p",
    "torchscript", "transformers_version", "use_associative_scan", "use_cache", "use_mamba_kernels",
    "use_mambapy",
}  # fmt: skip


def is_of_training(key: str) -> bool:
    """Tell whether a config's value is of training alone: a model computes the same with another one."""
    return any(word in key for word in ("drop", "aux_loss", "z_loss", "jitter"))


def is_computed(key: str) -> bool:
    """Tell whether a trained model computes otherwise with another value of a config's key, dotted where nested."""
    return _NOT_COMPUTED.isdisjoint(key.split(".")) and not is_of_training(key)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found = {}
    for key, value in values.items():
        nested = isinstance(value, Mapping)
        found.update(_flat(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value})
    return found


def changed_values(values: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return by key, dotted where nested, the values that differ of what both configs have, dropout's included."""
    known = values.keys() & others.keys()  # others are of no meaning to transformers
    mine, theirs = (_flat({key: each[key] for key in sorted(known)}) for each in (values, others))
    not_computed = _NOT_COMPUTED
    if {rope.get("rope_type") for rope in ropes_of(values.get("rope_parameters"))} & _BY_POSITIONS:
        not_computed = _NOT_COMPUTED - {"max_position_embeddings"}
    found = {}
    for key in dict.fromkeys([*mine, *theirs]):
        one, other = mine.get(key), theirs.get(key)
        if one == other or not not_computed.isdisjoint(key.split(".")):
            continue
        if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):  # one for each layer
            index = next(i for i, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1])
            key, one, other = f"{key}[{index}]", one[index], other[index]
        found[key] = (one, other)
    return found


def differences(values: Mapping[str, Any], others: Mapping[str, Any]) -> list[str]:
    """Return, as ``key value instead of other``, what a model of ``values`` computes otherwise than one of ``others``.

    Args:
        values: of a config object, complete with the defaults of its class.
        others: of one of the same class.
    """
    found = changed_values(values, others)
    return [f"{key} {str(mine)[:40]} instead of {str(theirs)[:40]}" for key, (mine, theirs) in found.items()]


def number(value: dict[str, Any]) -> Any:
    """Return the number that transformers writes as an object, or else the object."""
    if value.keys() == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
        return float(value["__float__"])
    return value


def changed_config(saved: Mapping[str, Any], hf_config: Any) -> dict[str, tuple[Any, Any]]:
    """Return by key what a config and the one that was saved as JSON have otherwise, as (saved, now).

    Both are read by the class of today, so that a key that another version of transformers did not have, or wrote in
    another way, has the value that it means.
    """
    now = json.loads(hf_config.to_json_string(use_diff=False))
    if saved.get("model_type") != now.get("model_type"):
        kinds = {"model_type": (saved.get("model_type"), now.get("model_type"))}
        return {**kinds, **changed_values(saved, now)}
    with contextlib.suppress(Exception):  # of any type, for a manifest of any content
        both = (json.loads(json.dumps(each), object_hook=number) for each in (saved, now))
        texts = [type(hf_config).from_dict(each).to_json_string(use_diff=False) for each in both]
        return changed_values(*map(json.loads, texts))
    return changed_values(saved, now)


def ropes_of(parameters: Any) -> list[Mapping[str, Any]]:
    """Return the sets of a config's ``rope_parameters``: one, or one for each type of layers."""
    found = parameters if isinstance(parameters, Mapping) else {}
    return [nested for nested in found.values() if isinstance(nested, Mapping)] or [found]


def rope_limit(hf_config: Any) -> tuple[str, int] | None:
    """Return the type of a rotary embedding that is another for all of a batch beyond some tokens, and their number.

    The longest of the batch's sequences, padding included, decides; None: none does.

    Source: ``dynamic_rope_update`` of transformers' ``modeling_rope_utils.py``.
    """
    for rope in ropes_of(getattr(hf_config, "rope_parameters", None)):
        if rope.get("rope_type") == "dynamic":
            return "dynamic", hf_config.max_position_embeddings
        if rope.get("rope_type") == "longrope":
            return "longrope", rope["original_max_position_embeddings"]
    return None


def set_positions(values: dict[str, Any], length: int, hf_config: Any, *, fixed: bool, exact: bool) -> None:
    """Allow sequences of ``length`` tokens in config values.

    Not where rotary embeddings go by the number, which need no change: another would turn all tokens otherwise.

    Args:
        values: changed in place.
        fixed: weights are loaded, which may hold one vector for each position.
        exact: have no more positions either, as SMP v2 where settings alone give the shape.

    Raises:
        ConfigError: positions are parameters, and weights fix their number.
    """
    key = getattr(hf_config, "attribute_map", {}).get("max_position_embeddings", "max_position_embeddings")
    most = values.get(key)
    if most is None or not (exact or length > most):
        return
    kinds = {rope.get("rope_type") for rope in ropes_of(values.get("rope_parameters"))}
    if not exact and kinds & _BY_POSITIONS:
        return
    values[key] = length
    if fixed and count_parameters(new_config(hf_config.model_type, values)) != count_parameters(hf_config):
        raise ConfigError(
            [f"--max_context_width {length}: the model has learned {most} positions: choose at most {most}"]
        )
    if not exact:
        logger.info("%s raised from %d to %d", key, most, length)
