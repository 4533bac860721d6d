"""Check that attention, which context parallelism replaces, is the only operation that mixes tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from smp.errors import one_line
from smp.models.attention_support import attention_dropout
from smp.models.derive import without_masks, without_values
from smp.models.hf_values import ropes_of
from smp.models.registry import build_model, family_of
from smp.parallel.attention import WIDEST_HEAD, window_of
from smp.parallel.context.attention import SHARD
from smp.parallel.documents import mixes_tokens

# Arguments of attention functions that change its scores; `sliding_window`, `s_aux` and `softcap` are honoured.
_SCORES = ("position_bias", "alibi", "attn_bias")
_BY_LENGTH = ("dynamic", "longrope")
_NONE = "its blocks call none of the attention functions in transformers' registry"


def misfit(hf_config: Any, *, on_gpu: bool = False) -> str | None:
    """Return why the sequences of a model cannot be split over ranks, if so; by a forward on the meta device.

    Args:
        on_gpu: whether attention's kernels are those of GPUs.
    """
    if dropout := attention_dropout(hf_config):
        return f"attention dropout is {dropout}, and would be another on other ranks (--attn_pdrop 0 leaves it out)"
    for rope in ropes_of(getattr(hf_config, "rope_parameters", None)):
        if rope.get("rope_type") in _BY_LENGTH:
            return f"its rotary embedding ({rope['rope_type']}) is another for each length of a rank's tokens"
    with torch.device("meta"):
        model = build_model(hf_config, attn_implementation="eager")
    if why := mixes_tokens(model):
        return f"tokens meet outside of attention ({why})"
    counting = (path for path, module in model.named_modules() if _counts_from_padding(path, module))
    if path := next(counting, None):
        return f"its positions are counted from behind its padding token's id ({path})"
    calls: list[dict[str, Any]] = []
    shard, length = object(), 6

    def attend(module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any = None, **given: Any) -> Any:
        calls.append({"query": query, "key": key, "value": value, "mask": attention_mask, **given})
        batch, heads, tokens, _width = query.shape
        return query.new_empty(batch, tokens, heads, value.shape[-1]), None

    try:
        with torch.no_grad(), torch.device("meta"), without_masks(model, attend), without_values(model):
            ids, positions = (torch.zeros(2, length, dtype=torch.long) for _ in range(2))
            model(input_ids=ids, position_ids=positions, use_cache=False, **{SHARD: shard})
    except Exception as error:  # of any type: code of any model
        if not getattr(model, "_supports_attention_backend", True):
            return _NONE
        return f"its forward does not hand on what attention needs ({one_line(error, 160)})"
    blocks = len(list(model.get_submodule(family_of(hf_config).blocks).children()))
    if not calls:
        return _NONE
    if len(calls) % blocks:
        return f"{blocks} blocks call transformers' attention functions {len(calls)} times"
    widths = (max(call[name].shape[-1] for name in ("query", "value")) for call in calls)
    width = next((width for width in widths if width % 8 or width > WIDEST_HEAD), None)
    if on_gpu and width is not None:
        return (
            f"GPUs' kernels of attention take heads of a width that 8 divides, up to {WIDEST_HEAD}, and it is {width}"
        )
    each = len(calls) // blocks
    return next(
        (why for index, call in enumerate(calls) if (why := _unfit(call, index // each, hf_config, shard, length))),
        None,
    )


def _counts_from_padding(path: str, module: nn.Module) -> bool:
    """Return whether a module embeds positions as RoBERTa's: the first is not 0, and depends on the tokens."""
    return isinstance(module, nn.Embedding) and "position" in path and module.padding_idx is not None


def _unfit(call: dict[str, Any], index: int, hf_config: Any, shard: object, length: int) -> str | None:
    """Return what of a block's call of its attention function is not known here, if something is."""
    if call.get(SHARD) is not shard:
        return "its blocks do not hand on keywords to the attention function"
    if call["mask"] is not None:
        return "it makes masks of its own"
    if name := next((name for name in _SCORES if call.get(name) is not None), None):
        return f"its attention function takes {name}, which changes the scores"
    if len({call[name].shape[2] for name in ("query", "key", "value")} | {length}) != 1:
        return "its queries and keys are not of the same tokens"
    types = getattr(hf_config, "layer_types", None) or []
    kind = types[index] if index < len(types) else "sliding_attention" if window_of(hf_config) else "full_attention"
    windows = kind == "sliding_attention", call.get("sliding_window") is not None
    if kind not in ("full_attention", "sliding_attention") or windows == (True, False):
        return f"a layer of {kind} does not tell its attention function the window"
    return None
