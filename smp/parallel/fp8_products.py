"""Products of linear layers in fp8: torchao's casts and matrix products, behind smp's seam for products.

torchao is imported with this file and :mod:`smp.parallel.fp8_experts`, and by no other for fp8. Its ``Float8Linear``
and ``MXFP8Linear`` are modules in place of ``nn.Linear``, of which tensor parallelism and adapters know nothing; the
same casts and products give their bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torchao.float8.config import Float8LinearConfig, ScalingGranularity, ScalingType
from torchao.float8.float8_scaling_utils import get_maybe_axiswise_dim, hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole, LinearMMConfig, ScaledMMConfig
from torchao.float8.float8_utils import amax_to_scale, to_fp8_saturated

from smp.local_shards import local_tensor
from smp.parallel.adapter import Adapter
from smp.parallel.linear import PLAIN, Product, by_rows
from smp.parallel.nf4 import Unpacked

_ALIGNED = 16  # of what is summed over in a product
_INPUT, _WEIGHT, _GRADIENT = GemmInputRole.INPUT, GemmInputRole.WEIGHT, GemmInputRole.GRAD_OUTPUT


class Scaled:
    """Casts to fp8 with one scale for a tensor, or for a row, by torchao's recipes; on CPUs multiplied in fp32.

    Scales are powers of two, made of each tensor's present values: then what a value is rounded to does not depend on
    the scale, unless it is too small for the format.

    Args:
        recipe: torchao's name of what has a scale of its own, and which products are in fp8.
        sizes: outputs and inputs of the layer, of which a rank may have some.
        mesh: of the tensor-parallel ranks, where there are several. A tensor that they split has its one scale, in
            recipes with such, by the largest value of all parts.
    """

    def __init__(self, recipe: str, device_type: str, *, sizes: tuple[int, int], mesh: DeviceMesh | None = None):
        config = Float8LinearConfig.from_recipe_name(recipe)
        self._config = dataclasses.replace(config, emulate=device_type == "cpu", round_scales_to_power_of_2=True)
        self._mesh, self._sizes = mesh, sizes
        self._plain, self._padded = (_products(self._config, pad=pad) for pad in (False, True))

    def _is_split(self, role: GemmInputRole, weight: torch.Tensor) -> bool:
        """Return whether tensor-parallel ranks have parts of a tensor, by the shape of theirs of the weight."""
        if self._mesh is None:
            return False
        if weight.shape[0] < self._sizes[0]:
            return role is not _INPUT
        if weight.shape[1] < self._sizes[1]:
            return role is not _GRADIENT
        return role is not _WEIGHT  # tokens may be split

    def _cast(
        self, tensor: torch.Tensor, weight: torch.Tensor, how: Any, role: GemmInputRole, axis: int, *, pad: bool = False
    ) -> Any:
        """Return a matrix in fp8 with its scales: one, or one for all values along ``axis``; or as it is."""
        if how.scaling_type is ScalingType.DISABLED:
            return tensor
        has_one = how.scaling_granularity is ScalingGranularity.TENSORWISE
        return hp_tensor_to_float8_dynamic(
            tensor,
            how.target_dtype,
            self._padded if pad else self._plain,
            reduce_amax=has_one and self._is_split(role, weight),
            gemm_input_role=role,
            device_mesh=self._mesh,
            scaling_granularity=how.scaling_granularity,
            axiswise_dim=get_maybe_axiswise_dim(axis, how.scaling_granularity),
            round_scales_to_power_of_2=True,
        )

    def scale(self, largest: torch.Tensor) -> torch.Tensor:
        """Return the scales of weights whose largest values these are."""
        return amax_to_scale(largest, self._config.cast_config_weight.target_dtype, round_scales_to_power_of_2=True)

    def bytes(self, shard: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Return a part of a weight in fp8."""
        found = to_fp8_saturated(shard.float() * scale, self._config.cast_config_weight.target_dtype)
        return found.view(torch.uint8)

    def of_bytes(self, data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> Any:
        """Return a weight of ``dtype``, for autograd, whose values are in fp8 already."""
        fp8 = data.view(self._config.cast_config_weight.target_dtype)
        return Float8TrainingTensor(fp8, scale, dtype, self._plain, _WEIGHT)

    def weight(self, weight: torch.Tensor) -> Any:
        """Return ``(inputs, outputs)`` for forward."""
        if isinstance(weight, Float8TrainingTensor):
            return weight.t()
        return self._cast(weight.t(), weight, self._config.cast_config_weight, _WEIGHT, 0)

    def weight_for_input_gradient(self, weight: torch.Tensor) -> Any:
        """Return ``(outputs, inputs)`` for backward."""
        if isinstance(weight, Float8TrainingTensor):
            return weight
        return self._cast(weight.t(), weight, self._config.cast_config_weight_for_grad_input, _WEIGHT, -1).t()

    def input(self, x: torch.Tensor, weight: torch.Tensor) -> Any:
        """Return ``(tokens, inputs)`` for forward."""
        return self._cast(x, weight, self._config.cast_config_input, _INPUT, -1)

    def gradient(self, gradient: torch.Tensor, weight: torch.Tensor) -> Any:
        """Return ``(tokens, outputs)`` for the gradient of the input."""
        return self._cast(gradient, weight, self._config.cast_config_grad_output, _GRADIENT, -1)

    def for_weight_gradient(
        self, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(outputs, tokens)`` and ``(tokens, inputs)``, whose product is the weight's gradient."""
        config, pad = self._config, len(x) % _ALIGNED != 0
        left = self._cast(gradient, weight, config.cast_config_grad_output_for_grad_weight, _GRADIENT, 0, pad=pad)
        return left.t(), self._cast(x, weight, config.cast_config_input_for_grad_weight, _INPUT, 0, pad=pad)


def _products(config: Float8LinearConfig, *, pad: bool) -> LinearMMConfig:
    """Return how the three products are computed; with ``pad``, those over a number of tokens that is not aligned."""
    of_each = (config.gemm_config_output, config.gemm_config_grad_input, config.gemm_config_grad_weight)
    return LinearMMConfig(*(ScaledMMConfig(config.emulate, each.use_fast_accum, False, pad) for each in of_each))


class Blocks:
    """Casts to MXFP8, with a scale for each 32 values that are summed up in a product, by torchao's prototype."""

    SIZE = 32

    def __init__(self, device_type: str):
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.prototype.mx_formats.mx_tensor import MXTensor
        from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

        self._to_mx, self._rounding = MXTensor.to_mx, ScaleCalculationMode.RCEIL
        self._kernel = KernelPreference.EMULATED if device_type == "cpu" else KernelPreference.AUTO

    def _cast(self, rows: torch.Tensor) -> Any:
        return self._to_mx(rows.contiguous(), torch.float8_e4m3fn, self.SIZE, self._rounding, self._kernel)

    def weight(self, weight: torch.Tensor) -> Any:
        """Return ``(inputs, outputs)`` for forward."""
        return self._cast(weight).t()

    def weight_for_input_gradient(self, weight: torch.Tensor) -> Any:
        """Return ``(outputs, inputs)`` for backward."""
        return self._cast(weight.t()).t()

    def input(self, x: torch.Tensor, weight: torch.Tensor) -> Any:
        """Return ``(tokens, inputs)`` for forward."""
        return self._cast(x)

    gradient = input  # (tokens, outputs) for the gradient of the input

    def for_weight_gradient(
        self, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(outputs, tokens)`` and ``(tokens, inputs)``, whose product is the weight's gradient."""
        missing = -len(x) % self.SIZE
        left, right = (F.pad(each.t(), (0, missing)) for each in (gradient, x))
        return self._cast(left), self._cast(right).t()


class Fp8(Product):
    """A linear layer's product and its gradients of values that are cast to fp8.

    Attributes:
        casts: of inputs, weights and gradients; a weight that was gathered in fp8 is not cast again.
    """

    def __init__(self, casts: Scaled | Blocks):
        self.casts = casts
        self._frozen: list[Any] = []  # a weight for forward and backward; one list for all copies

    def cast_once(self, weight: torch.Tensor) -> None:
        """Cast a weight ``(outputs, inputs)`` that never changes, for all products to come."""
        self._frozen[:] = self.casts.weight(weight), self.casts.weight_for_input_gradient(weight)

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *own: torch.Tensor,
        product: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Return the layer's output ``(..., outputs)``, in the input's dtype."""
        matrix = self._frozen[0] if self._frozen else self.casts.weight(weight)
        found = torch.mm(self.casts.input(x.reshape(-1, x.shape[-1]), weight), matrix).view(*x.shape[:-1], -1)
        return found if bias is None else found + bias

    def input_gradient(
        self, gradient: torch.Tensor, weight: torch.Tensor, *own: torch.Tensor, into: torch.Tensor | None = None,
        product: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Return the gradient of the input ``(tokens, inputs)``, in that of the output's dtype."""
        matrix = self._frozen[1] if self._frozen else self.casts.weight_for_input_gradient(weight)
        found = torch.mm(self.casts.gradient(gradient, weight), matrix)
        return found if into is None else into.add_(found)

    def parameter_gradients(
        self, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *own: torch.Tensor, needs: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """Return the weight's gradient, by the recipe in fp8 or not."""
        return [torch.mm(*self.casts.for_weight_gradient(gradient, x, weight)) if needs[0] else None]


class AdapterOfFp8(Adapter, Fp8):
    """Low-rank factors beside a frozen weight in fp8: what is ``super()`` in :class:`Adapter` is :class:`Fp8` here.

    The factors' products are in the dtype of the computation.
    """

    def __init__(self, adapter: Adapter, base: Fp8):
        self.__dict__ |= vars(base) | vars(adapter)


def in_fp8(product: Product, base: Fp8) -> Product:
    """Return a layer's product with that of its weight in fp8."""
    if isinstance(product, Unpacked):
        product.inner = in_fp8(product.inner, base)
        return product
    if isinstance(product, Adapter):
        return AdapterOfFp8(product, base)
    assert product is PLAIN, product
    return base


def cast_frozen_once(block: nn.Module, layers: Sequence[tuple[Any, Fp8]]) -> None:
    """Cast frozen weights in the first forward of their block, when it has gathered them.

    Not in the products, whose code may be compiled and is run again by recomputation.
    """

    @torch.inference_mode(False)  # a first forward may validate
    @torch.no_grad()
    def cast(*_: Any) -> None:
        handle.remove()
        for layer, product in layers:
            product.cast_once(by_rows(layer, local_tensor(layer.weight)))

    handle = block.register_forward_pre_hook(torch.compiler.disable(cast))
