"""The attention kernel that torch chooses on a GPU, called by its operation: a CPU build has no such choice."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

aten = torch.ops.aten
_plain = F.scaled_dot_product_attention
# Attention functions of other packages, and compiled ones, that need as much memory as torch's kernels.
PLANNED_AS_SDPA = ("flash_attention_2", "flash_attention_3", "flex_attention")
_WIDEST_FLASH, _WIDEST_CUDNN = 256, 128
# cuDNN's comes first on these (torch's sdp_utils.cpp, check_prefer_cudnn_attention).
_PREFER_CUDNN = ((9, 0), (10, 0))


def attend(
    capability: tuple[int, int],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Compute what ``torch.nn.functional.scaled_dot_product_attention`` does, with the kernel of a GPU.

    Args:
        query: ``(batch, heads, sequence, width)``, fake; the others as torch's.
    """
    width = query.shape[-1]
    if query.device.type != "cuda" or query.ndim != 4:
        return _plain(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    half = query.dtype in (torch.bfloat16, torch.float16) and width % 8 == 0 and value.shape[-1] == width
    graph = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = _additive(attn_mask, query.dtype)
    if half and capability in _PREFER_CUDNN and width <= _WIDEST_CUDNN:
        found = aten._scaled_dot_product_cudnn_attention(
            query, key, value, attn_mask, graph, dropout_p, is_causal, False, scale=scale
        )
    elif half and width <= _WIDEST_FLASH and attn_mask is None:
        found = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)
    else:
        groups = query.shape[1] // key.shape[1]
        if enable_gqa and groups > 1:
            key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
        mask = None if attn_mask is None else attn_mask.expand(*query.shape[:3], key.shape[2])
        found = aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, graph, dropout_p, is_causal, scale=scale
        )
    return found[0]


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> Any:
    """Return a boolean mask as torch's kernels take it, in a new tensor."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), float("-inf"))
