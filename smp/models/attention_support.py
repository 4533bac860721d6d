"""What the attention of a model can do, as its class and its config in transformers say."""

from __future__ import annotations

import re
from typing import Any

from smp.errors import UserError

RANDOM_RATE = re.compile(r"drop(?!_last)|jitter")  # in the names of rates of dropout, and of the jitter of routers
_CAP = re.compile(r"(?=.*att)(?=.*soft_?cap)")
_SUPPORT = {  # attribute of the model's class
    "sdpa": "_supports_sdpa",
    "fused": "_supports_sdpa",
    "flash_attention_2": "_supports_flash_attn",
    "flash_attention_3": "_supports_flash_attn",
    "flex_attention": "_supports_flex_attn",
}


def _model_class(config_class: type) -> Any:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    found = MODEL_FOR_CAUSAL_LM_MAPPING.get(config_class, None)
    return found[0] if isinstance(found, tuple) else found


def _cap(hf_config: Any) -> str | None:
    """Return the config key that caps the scores of attention, and its value."""
    found = ((key, value) for key, value in hf_config.to_dict().items() if _CAP.match(key) and value)
    return next((f"{key} {value}" for key, value in found), None)


def attention_misfit(hf_config: Any, name: str) -> str | None:
    """Return why the model cannot have an attention function, if so.

    Args:
        name: a value of ``--attn_implementation``.
    """
    model_class, attribute = _model_class(type(hf_config)), _SUPPORT.get(name)
    if model_class is None or attribute is None:
        return None
    if attribute == "_supports_sdpa" and (cap := _cap(hf_config)):
        return f"the model caps the scores of attention ({cap}), which torch's function cannot"
    if not getattr(model_class, attribute):
        return f"transformers' {model_class.__name__} does not support it"
    if name == "fused" and not model_class._supports_attention_backend:
        return f"transformers' {model_class.__name__} calls its own attention functions"
    return None


def attention_problem(hf_config: Any, name: str, *, dropout: float, here: bool = True) -> str | None:
    """Return why ``--attn_implementation`` cannot have a value on this machine, and what to use, if so.

    Args:
        here: whether this machine must have what it needs.
    """
    import torch
    from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

    flag = f"--attn_implementation {name}"
    if why := attention_misfit(hf_config, name):
        return f"{flag}: {why}: use {default_attention(hf_config)}"
    if name in ("flash_attention_3", "flex_attention") and dropout > 0:
        return f"{flag} has no attention dropout, and it is {dropout}: use sdpa, or --attn_pdrop 0"
    if not here:
        return None
    if name == "flash_attention_2" and not is_flash_attn_2_available():
        return f"{flag} needs a GPU and the flash-attn package (pip install flash-attn): use sdpa"
    if name == "flash_attention_3" and not is_flash_attn_3_available():
        return f"{flag} needs a GPU and the flash-attn-3 package (built from flash-attn's folder hopper): use sdpa"
    if name == "flex_attention" and not torch.cuda.is_available():
        return f"{flag} has no backward on a CPU: use sdpa"
    if name == "fused" and not torch.cuda.is_available():
        return f"{flag} needs a GPU and none is visible: use sdpa"
    return None


def default_attention(hf_config: Any) -> str:
    """Return sdpa, or eager for a model that cannot have it."""
    return "eager" if attention_misfit(hf_config, "sdpa") else "sdpa"


def bidirectional(hf_config: Any) -> str | None:
    """Return the config key and value by which tokens see the ones after them, if so."""
    if getattr(hf_config, "is_causal", True) is False:
        return "is_causal false"
    if getattr(hf_config, "attention_type", None) == "block_sparse":  # BigBird's, of more tokens than a few blocks
        return "attention_type block_sparse, and not original_full"
    wanted = getattr(hf_config, "use_bidirectional_attention", None)
    return f"use_bidirectional_attention {wanted}" if wanted in (True, "all") else None


def random_rates(hf_config: Any) -> dict[str, float]:
    """Return the config's rates of dropout and of routers' jitter, of any name, that are not 0; classifiers' aside."""
    return {
        key: value
        for key, value in hf_config.to_dict().items()
        if RANDOM_RATE.search(key)
        and not key.startswith(("classifier", "summary"))
        and isinstance(value, (int, float))
        and not isinstance(value, bool)
        and value > 0
    }


def attention_dropout(hf_config: Any) -> float:
    """Return the dropout of attention's weights."""
    return next((rate for key, rate in random_rates(hf_config).items() if "att" in key), 0.0)


def number_of(hf_config: Any, name: str) -> Any:
    """Return an attribute of a config, of layers that differ the largest; None: it has none."""
    try:
        return getattr(hf_config, name, None)
    except RuntimeError:  # of transformers, where layers differ
        return max(getattr(layer, name) for layer in hf_config.per_layer_config)


def head_width(hf_config: Any) -> int | None:
    """Return the width of a head; None if it cannot be told, as of heads that differ."""
    width = number_of(hf_config, "head_dim")
    if width is None:
        width, count = (number_of(hf_config, key) for key in ("hidden_size", "num_attention_heads"))
        if isinstance(width, int) and isinstance(count, int):
            return width // count
    return width if isinstance(width, int) else None


def check_attention(hf_config: Any, name: str) -> None:
    """Check that the model can have an attention function.

    Raises:
        UserError: it cannot.
    """
    if why := attention_misfit(hf_config, name):
        raise UserError(f"attn_implementation {name}: {why}: use {default_attention(hf_config)}")
