"""What a rank's experts make of the rows that are theirs, by the attributes that transformers gives such a module."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from smp.local_shards import local_tensor

# Attributes of experts: by the name of a parameter, what multiplies with it in place of :func:`multiply`; and what is
# called with the product, the experts, the rows and the counts, and returns what is computed with instead.
PRODUCTS, BESIDE = "_smp_products_of_experts", "_smp_beside_experts"
_ALIGNED = 16  # bytes, of the strides that grouped_mm takes


def has_kernel(rows: torch.Tensor) -> bool:
    """Return whether grouped_mm takes a dtype; its fake takes bf16 alone."""
    return rows.dtype == torch.bfloat16 if isinstance(rows, FakeTensor) else rows.dtype != torch.float64


def group_ends(counts: list[int], device: torch.device) -> torch.Tensor:
    """Return where the rows of each expert end, ``(experts,)`` int32."""
    return torch.tensor(counts).cumsum(0, dtype=torch.int32).to(device)


def multiply(rows: torch.Tensor, weight: torch.Tensor, counts: list[int], *, transposed: bool = False) -> torch.Tensor:
    """Multiply rows, sorted by expert, with their expert's matrix.

    With ``torch.nn.functional.grouped_mm``, but in fp64, which it does not take, of matrices of a few rows or columns
    that it does not take, where there are no rows, and in a plan in fp32, as its fake takes bf16 alone.

    Args:
        weight: ``(experts, outputs, inputs)``, or transposed.
    """
    is_aligned = all(size * weight.element_size() % _ALIGNED == 0 for size in weight.shape[1:])
    if not has_kernel(rows) or not len(rows) or not is_aligned:
        parts = zip(rows.split(counts), weight, strict=True)
        return torch.cat([part @ each if transposed else F.linear(part, each) for part, each in parts])
    return F.grouped_mm(rows, weight if transposed else weight.transpose(-2, -1), offs=group_ends(counts, rows.device))


def _multiply(module: Any, name: str, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Multiply rows, sorted by expert, with their expert's matrix, add what is beside it, and its bias."""
    product = getattr(module, PRODUCTS, {}).get(name, multiply)
    found = product(rows, local_tensor(getattr(module, name)), counts, transposed=module.is_transposed)
    if (beside := getattr(module, BESIDE, {}).get(name)) is not None:
        found = beside(found, module, rows, counts)
    if module.has_bias:
        of_row = torch.tensor(counts).to(rows.device)
        bias = local_tensor(getattr(module, f"{name}_bias"))
        found = found + bias.repeat_interleave(of_row, 0, output_size=len(rows))
    return found


def compute(module: nn.Module, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Return the experts' outputs, ``(rows, hidden)``.

    A rank without rows computes all the same: its experts have gradients of zeros, and no collective is left out.

    Args:
        module: has the experts, or this rank's, along the first axis of each parameter.
        rows: ``(rows, hidden)``, sorted by expert.
        counts: rows of each expert; they sum up to the rows, so that nothing is computed of rows that are none.
    """
    experts: Any = module
    hidden = _multiply(experts, "gate_up_proj" if experts.has_gate else "up_proj", rows, counts)
    hidden = experts._apply_gate(hidden) if experts.has_gate else experts.act_fn(hidden)
    hidden = _multiply(experts, "down_proj", hidden, counts)
    return experts.post_expert_norm(hidden) if getattr(experts, "has_post_expert_norm", False) else hidden
