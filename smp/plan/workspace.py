"""Bytes that kernels of a GPU allocate inside, by operation: no fake tensor shows them.

Sources: aten/src/ATen/cuda/CUDABlas.cpp (workspaces of cuBLAS), the host code of flash-attention's backward (an fp32
accumulator of dQ, softmax sums, expanded dK and dV under grouped queries), Embedding.cu (sorted indices),
ForeachReduceOp.cu (partial norms). cuDNN says its workspace only to itself: flash-attention's is assumed. On an H200
allocated bytes of a step were within 0.5 % of the plan with them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from smp.units import MIB

_FP32, _INT64 = 4, 8
_CHUNK = 65536  # elements that a block of a foreach kernel reduces
_SORTED = 6  # arrays of indices, with the sort's own


def cublas_bytes(capability: tuple[int, int]) -> int:
    """Return the workspace of one cuBLAS handle and stream, made at the first product and kept."""
    return 32 * MIB if capability >= (9, 0) else 8 * MIB + 128 * 1024


def is_product(name: str) -> bool:
    """Return whether an operation runs on cuBLAS."""
    return name in ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step


def inside(name: str, tensors: Sequence[torch.Tensor]) -> int:
    """Return the bytes that a kernel holds while it runs.

    Args:
        name: of the operation, such as ``aten::embedding_dense_backward``.
        tensors: its arguments.
    """
    if "scaled_dot_product" in name and name.endswith("backward"):
        _, query, key, value, *_ = tensors
        batch, heads, length, width = query.shape
        rows = batch * heads * _round_up(length, 128)
        accumulated = rows * (_round_up(width, 32) + 1) * _FP32
        expanded = 0
        if key.shape[1] != heads:
            expanded = 2 * batch * heads * key.shape[2] * value.shape[-1] * query.element_size()
        return accumulated + expanded
    if name in ("torch_attn::_varlen_attn_backward", "aten::_flash_attention_backward"):
        _, query, key, *_ = tensors
        tokens, heads, width = query.shape
        accumulated = tokens * heads * (_round_up(width, 32) + 1) * _FP32
        return accumulated + (2 * query.nbytes if key.shape[1] != heads else 0)
    if name == "aten::embedding_dense_backward":
        return _SORTED * tensors[1].numel() * _INT64
    if name == "aten::_foreach_norm":
        chunks = max(-(-each.numel() // _CHUNK) for each in tensors)
        return len(tensors) * chunks * _FP32
    return 0
