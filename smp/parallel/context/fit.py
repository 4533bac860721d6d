"""Check that tokens meet only where context parallelism communicates: in attention, and in layers that it splits."""

from __future__ import annotations

import functools
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
from smp.parallel.documents import UNTOLD
from smp.parallel.mixers import OF_SINGLE_TOKENS, block_kinds, elsewhere, mixers_by_block
from smp.parallel.technique import model_blocks

# Arguments of attention functions that change its scores; `sliding_window`, `s_aux` and `softcap` are honoured.
_SCORES = ("position_bias", "alibi", "attn_bias")
_BY_LENGTH = ("dynamic", "longrope")
_LENGTH = 6  # tokens of the forward
_NONE = "its blocks call none of the attention functions in transformers' registry"


def _model_of(hf_config: Any) -> nn.Module:
    with torch.device("meta"):
        return build_model(hf_config, attn_implementation="eager")


def _blocks_of(model: nn.Module) -> list[nn.Module]:
    return model_blocks(model, family_of(model.config))


def mixing(hf_config: Any) -> str | None:
    """Return what, besides attention, carries something from one token to another, if there is such a thing."""
    model = _model_of(hf_config)
    blocks = _blocks_of(model)
    kinds = zip(block_kinds(hf_config, len(blocks)), mixers_by_block(model, blocks), strict=True)
    found = next(((kind,) for kind, mixers in kinds if mixers), None)
    return found and (f"it has {found[0]} layers" if found[0] else "it has convolutions over tokens")


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
    model = _model_of(hf_config)
    counting = (path for path, module in model.named_modules() if _counts_from_padding(path, module))
    if path := next(counting, None):
        return f"its positions are counted from behind its padding token's id ({path})"
    blocks = _blocks_of(model)
    trace = _follow(model, blocks)
    if isinstance(trace, str):
        return trace
    if why := _meet_elsewhere(model, blocks, trace):
        return why
    calls = [call for block in trace for call in block.calls]
    widths = (max(call[name].shape[-1] for name in ("query", "value")) for call in calls)
    width = next((width for width in widths if width % 8 or width > WIDEST_HEAD), None)
    if on_gpu and width is not None:
        return (
            f"GPUs' kernels of attention take heads of a width that 8 divides, up to {WIDEST_HEAD}, and it is {width}"
        )
    kinds = block_kinds(hf_config, len(blocks))
    each = ((call, kind) for block, kind in zip(trace, kinds, strict=True) for call in block.calls)
    return next((why for call, kind in each if (why := _unfit(call, kind, hf_config))), None)


class _Block:
    """What a block was given in a forward.

    Attributes:
        told: whether keywords of the model's forward reach it.
        calls: arguments of each call of its attention function.
    """

    def __init__(self) -> None:
        self.told, self.calls = False, list[dict[str, Any]]()


def _follow(model: nn.Module, blocks: list[nn.Module]) -> list[_Block] | str:
    """Return what each block was given in a forward on the meta device, or why there is none."""
    shard, found = object(), [_Block() for _ in blocks]
    running = [found[0]]

    def attend(module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any = None, **given: Any) -> Any:
        told = given.get(SHARD) is shard
        call = {"query": query, "key": key, "value": value, "mask": attention_mask, **given, "told": told}
        running[0].calls.append(call)
        batch, heads, tokens, _width = query.shape
        return query.new_empty(batch, tokens, heads, value.shape[-1]), None

    def enter(each: _Block, module: nn.Module, args: Any, kwargs: Any) -> None:
        running[0], each.told = each, kwargs.get(SHARD) is shard

    for block, each in zip(blocks, found, strict=True):
        block.register_forward_pre_hook(functools.partial(enter, each), with_kwargs=True)
    try:
        with torch.no_grad(), torch.device("meta"), without_masks(model, attend), without_values(model):
            ids, positions = (torch.zeros(2, _LENGTH, dtype=torch.long) for _ in range(2))
            model(input_ids=ids, position_ids=positions, use_cache=False, **{SHARD: shard})
    except Exception as error:  # of any type: code of any model
        if not getattr(model, "_supports_attention_backend", True):
            return _NONE
        return f"its forward does not hand on what attention needs ({one_line(error, 160)})"
    return found


def _meet_elsewhere(model: nn.Module, blocks: list[nn.Module], trace: list[_Block]) -> str | None:
    """Return where tokens meet that is neither attention nor a layer that all tokens are gathered for, if so."""
    kinds, mixers = block_kinds(model.config, len(blocks)), mixers_by_block(model, blocks)
    if not any(each.calls for each in trace) and not any(mixers):
        return _NONE
    if why := elsewhere(model, blocks):
        return f"tokens meet outside of attention ({why})"
    for each, found, kind in zip(trace, mixers, kinds, strict=True):
        if found and not each.told:
            return UNTOLD
        if not found and not each.calls and kind not in OF_SINGLE_TOKENS:
            return "not every block calls an attention function in transformers' registry"
    return None


def _counts_from_padding(path: str, module: nn.Module) -> bool:
    """Return whether a module embeds positions as RoBERTa's: the first is not 0, and depends on the tokens."""
    return isinstance(module, nn.Embedding) and "position" in path and module.padding_idx is not None


def _unfit(call: dict[str, Any], kind: str | None, hf_config: Any) -> str | None:
    """Return what of a block's call of its attention function is not known here, if something is."""
    if not call["told"]:
        return "its blocks do not hand on keywords to the attention function"
    if call["mask"] is not None:
        return "it makes masks of its own"
    if name := next((name for name in _SCORES if call.get(name) is not None), None):
        return f"its attention function takes {name}, which changes the scores"
    if len({call[name].shape[2] for name in ("query", "key", "value")} | {_LENGTH}) != 1:
        return "its queries and keys are not of the same tokens"
    if kind != "full_attention" and not any(word in (kind or "") for word in ("sliding", "chunked")):
        kind = "sliding_attention" if window_of(hf_config) else "full_attention"
    assert kind is not None
    windows = "sliding" in kind, call.get("sliding_window") is not None
    if "chunked" in kind or windows == (True, False):
        return f"a layer of {kind} does not tell its attention function the window"
    return None
