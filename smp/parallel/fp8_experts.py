"""Products of routed experts in fp8: torchao's casts and torch's grouped products.

They take the place of :func:`smp.parallel.experts.compute.multiply`. torchao's own differentiable products
(``torchao.prototype.moe_training``) compute every gradient, of frozen weights too, and all in fp8.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.utils._triton import has_triton
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated

from smp.parallel.experts.compute import group_ends, has_kernel, multiply

Cast = tuple[torch.Tensor, torch.Tensor]  # values in fp8, which a product sums up along the last axis, and scales
_DTYPE = torch.float8_e4m3fn  # the one that grouped products take
_ALIGNED, _BLOCK = 16, 32  # rows of an expert that are summed up: a multiple of these; values with one scale in MXFP8


class Groups(NamedTuple):
    """The rows of each expert in a product.

    Attributes:
        sizes: rows of each expert, with rows of zeros that make them a multiple.
        ends: ``(experts,)`` int32, where the rows of each end.
        to: ``(rows,)``, where each row is among them; None: no zeros are added.
    """

    sizes: list[int]
    ends: torch.Tensor
    to: torch.Tensor | None = None

    def pad(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows with the zeros."""
        if self.to is None:
            return rows.contiguous()
        return rows.new_zeros(sum(self.sizes), rows.shape[1]).index_copy_(0, self.to, rows)

    def cut(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows without the zeros."""
        return rows if self.to is None else rows[self.to]


def groups_of(counts: list[int], multiple: int, device: torch.device) -> Groups:
    """Return the groups of so many rows of each expert, padded to a multiple.

    An expert without rows gets zeros, too, so that no sum is of no values.
    """
    if multiple == 1:
        return Groups(counts, group_ends(counts, device))
    sizes = [max(-(-count // multiple), 1) * multiple for count in counts]
    added = itertools.accumulate(size - count for size, count in zip(sizes, counts, strict=True))
    by_expert = torch.tensor([counts, [0, *added][:-1], list(itertools.accumulate(sizes))]).to(device)  # one copy
    rows = torch.arange(sum(counts), device=device)
    to = rows + by_expert[1].repeat_interleave(by_expert[0], output_size=len(rows))
    return Groups(sizes, by_expert[2].int(), to)


class Casts:
    """Casts with a scale for each row, powers of two of its present values."""

    def rows(self, rows: torch.Tensor) -> Cast:
        """Cast ``(..., n)``, with a scale for each ``n`` values."""
        rows = rows.contiguous()
        scale = tensor_to_scale(
            rows, _DTYPE, scaling_granularity=ScalingGranularity.AXISWISE, axiswise_dim=-1,
            round_scales_to_power_of_2=True,
        )  # fmt: skip
        return to_fp8_saturated(rows.float() * scale, _DTYPE), scale.squeeze(-1)

    def matrices(self, weight: torch.Tensor, *, turned: bool) -> Cast:
        """Cast ``(experts, m, n)``, or with ``turned`` ``(experts, n, m)`` to it."""
        return self.rows(weight.transpose(-2, -1) if turned else weight)

    def columns(self, left: torch.Tensor, right: torch.Tensor, groups: Groups) -> tuple[Cast, Cast]:
        """Cast ``(rows, m)`` and ``(rows, n)`` to columns by rows, with a scale for each expert's part of a column."""
        found = []
        for each in (left, right):
            data, scales = zip(*(self.rows(part.t()) for part in each.split(groups.sizes)), strict=True)
            found.append((torch.cat([part.view(torch.uint8) for part in data], 1).view(_DTYPE), torch.cat(scales)))
        return found[0], found[1]


class TritonCasts(Casts):
    """The same by torchao's kernels, which read each value twice and write it once.

    Raises:
        ImportError: torchao has no such kernels.
    """

    def __init__(self) -> None:
        from torchao.prototype.moe_training.kernels import (
            triton_fp8_colwise_3d_scale_and_cast,
            triton_fp8_per_group_colwise_scales_dual,
            triton_fp8_rowwise_2d_scale_and_cast,
            triton_fp8_rowwise_3d_transpose_rhs,
        )

        self._rows = triton_fp8_rowwise_2d_scale_and_cast
        self._matrices = triton_fp8_colwise_3d_scale_and_cast, triton_fp8_rowwise_3d_transpose_rhs
        # Not the kernel for one tensor, which takes the mean of the groups' sizes for the largest.
        self._columns = triton_fp8_per_group_colwise_scales_dual

    def rows(self, rows: torch.Tensor) -> Cast:
        """Cast ``(rows, n)``."""
        data, scale = self._rows(rows, _DTYPE, True)
        return data, scale.squeeze(-1)

    def matrices(self, weight: torch.Tensor, *, turned: bool) -> Cast:
        """Cast ``(experts, m, n)``, or with ``turned`` ``(experts, n, m)`` to it."""
        data, scale = self._matrices[turned](weight.transpose(-2, -1), _DTYPE, True)
        return data.transpose(-2, -1), scale.view(len(scale), -1)

    def columns(self, left: torch.Tensor, right: torch.Tensor, groups: Groups) -> tuple[Cast, Cast]:
        """Cast ``(rows, m)`` and ``(rows, n)`` to columns by rows."""
        one, of_one, other, of_other = self._columns(left, right, groups.ends, _DTYPE, True)
        return (one.t(), of_one), (other.t(), of_other)


class Grouped:
    """Products of routed experts in fp8, emulated as on CPUs: the values of fp8 are multiplied in fp32.

    Args:
        values: returns values ``(..., n)`` in fp8, with scales along the last axis, as fp32.
        multiple: of the rows of each expert; others are padded. 1: weights' gradients are not in fp8.
    """

    def __init__(self, values: Callable[[torch.Tensor], torch.Tensor], multiple: int):
        self._values, self.multiple = values, multiple

    def __call__(
        self, rows: torch.Tensor, weight: torch.Tensor, counts: list[int], *, transposed: bool = False
    ) -> torch.Tensor:
        """Return what ``multiply`` returns of the same arguments."""
        if not len(rows):
            return multiply(rows, weight, counts, transposed=transposed)
        return _Grouped.apply(self, counts, transposed, rows, weight)

    def product(self, rows: torch.Tensor, weight: torch.Tensor, groups: Groups, *, turned: bool) -> torch.Tensor:
        """Multiply ``(rows, n)`` with ``(experts, m, n)``, or with ``turned`` ``(experts, n, m)``."""
        matrices = self._values(weight.transpose(-2, -1) if turned else weight)
        return multiply(self._values(rows), matrices, groups.sizes).to(rows.dtype)

    def summed(self, left: torch.Tensor, right: torch.Tensor, groups: Groups) -> torch.Tensor:
        """Return ``(experts, m, n)`` of ``(rows, m)`` and ``(rows, n)``, summed up over each expert's rows."""
        if self.multiple == 1:
            return _sum_up(left, right, groups)
        one, other = (
            torch.cat([self._values(part.t()).t() for part in each.split(groups.sizes)]) for each in (left, right)
        )
        return _sum_up(one, other, groups).to(left.dtype)


def _sum_up(left: torch.Tensor, right: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Return each expert's product ``left.T @ right``, not in fp8."""
    if not has_kernel(left):
        parts = zip(left.split(groups.sizes), right.split(groups.sizes), strict=True)
        return torch.stack([one.t() @ other for one, other in parts])
    return F.grouped_mm(left.t(), right, offs=groups.ends)


class Rowwise(Grouped):
    """Products with a scale for each row of both, by torch's kernel."""

    def __init__(self, multiple: int):
        self._casts, self.multiple = TritonCasts() if has_triton() else Casts(), multiple

    def product(self, rows: torch.Tensor, weight: torch.Tensor, groups: Groups, *, turned: bool) -> torch.Tensor:
        """Multiply ``(rows, n)`` with ``(experts, m, n)``, or with ``turned`` ``(experts, n, m)``."""
        return _scaled(self._casts.rows(rows), self._casts.matrices(weight, turned=turned), groups, rows.dtype)

    def summed(self, left: torch.Tensor, right: torch.Tensor, groups: Groups) -> torch.Tensor:
        """Return ``(experts, m, n)`` of ``(rows, m)`` and ``(rows, n)``."""
        if self.multiple == 1:
            return _sum_up(left, right, groups)
        return _scaled(*self._casts.columns(left, right, groups), groups, left.dtype)


def _scaled(left: Cast, right: Cast, groups: Groups, dtype: torch.dtype) -> torch.Tensor:
    """Multiply by torch's kernel, whose output is in bf16."""
    (one, of_one), (other, of_other) = left, right
    return torch._scaled_grouped_mm(
        one, other.transpose(-2, -1), of_one.reciprocal(), of_other.reciprocal(), offs=groups.ends,
        out_dtype=torch.bfloat16, use_fast_accum=True,
    ).to(dtype)  # fmt: skip


class Blocks(Grouped):
    """Products in MXFP8, with a scale for each 32 values that are summed up, by torchao's prototype.

    Raises:
        ImportError: torchao has no such kernels.
    """

    multiple = _BLOCK

    def __init__(self) -> None:
        from torchao.prototype.moe_training.mxfp8_grouped_mm import (
            _SM100_KERNELS_AVAILABLE,
            _compute_dgrad,
            _compute_fwd,
            _compute_wgrad,
        )
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

        if not _SM100_KERNELS_AVAILABLE:
            raise ImportError("its kernels are in builds for CUDA 12.8 and later")
        self._products, self._summed = (_compute_fwd, _compute_dgrad), _compute_wgrad
        self._rounding, self._kernels = ScaleCalculationMode.RCEIL, KernelPreference.AUTO

    def product(self, rows: torch.Tensor, weight: torch.Tensor, groups: Groups, *, turned: bool) -> torch.Tensor:
        """Multiply ``(rows, n)`` with ``(experts, m, n)``, or with ``turned`` ``(experts, n, m)``."""
        found = self._products[turned](
            rows, weight.transpose(-2, -1), groups.ends, _BLOCK, torch.bfloat16, self._rounding, self._kernels
        )  # fmt: skip
        return found.to(rows.dtype)

    def summed(self, left: torch.Tensor, right: torch.Tensor, groups: Groups) -> torch.Tensor:
        """Return ``(experts, m, n)`` of ``(rows, m)`` and ``(rows, n)``."""
        found = self._summed(
            left, right, groups.ends, _BLOCK, torch.bfloat16, self._rounding, False, self._kernels
        )  # fmt: skip
        return found.transpose(-2, -1).to(left.dtype)


def grouped(device_type: str, *, mx: bool, weights: bool) -> Grouped:
    """Return the product of experts, in MXFP8 or with a scale for each row.

    Args:
        weights: whether their gradients are in fp8, too; those of MXFP8 are.

    Raises:
        ImportError: torchao has no such products.
    """
    multiple = _BLOCK if mx else _ALIGNED if weights else 1
    if device_type != "cpu":
        return Blocks() if mx else Rowwise(multiple)
    return Grouped(_mx_values if mx else _row_values, multiple)


def _row_values(x: torch.Tensor) -> torch.Tensor:
    data, scale = Casts().rows(x)
    return data.float() / scale.unsqueeze(-1)


def _mx_values(x: torch.Tensor) -> torch.Tensor:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    return MXTensor.to_mx(x.contiguous(), _DTYPE, _BLOCK, ScaleCalculationMode.RCEIL).dequantize(torch.float32)


class _Grouped(torch.autograd.Function):
    """The product of rows, sorted by expert, with their expert's matrix."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, how: Grouped, counts: list[int], transposed: bool, rows: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        groups = groups_of(counts, how.multiple, rows.device)
        rows = groups.pad(rows)
        ctx.how, ctx.transposed, ctx.sizes = how, transposed, groups.sizes
        # Not as attributes of `ctx`, which hooks for saved tensors do not see: offloading and checkpointing are such.
        ctx.save_for_backward(rows, weight, groups.ends, groups.to)
        return groups.cut(how.product(rows, weight, groups, turned=transposed))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        rows, weight, *where = ctx.saved_tensors
        groups, of_rows, of_weight = Groups(ctx.sizes, *where), None, None
        gradient = groups.pad(gradient)
        if ctx.needs_input_grad[3]:
            of_rows = groups.cut(ctx.how.product(gradient, weight, groups, turned=not ctx.transposed))
        if ctx.needs_input_grad[4]:
            of_weight = ctx.how.summed(*((rows, gradient) if ctx.transposed else (gradient, rows)), groups)
        return None, None, None, of_rows, of_weight
