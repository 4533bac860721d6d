"""Frozen weights of linear layers in 4 bits (NF4 of QLoRA: Dettmers et al., arXiv:2305.14314), quantised by torchao.

The weight of a layer becomes a matrix of bytes, row by row: two values of 4 bits in each, then a byte for the scale of
each 64 values. It is kept as bf16 of the same bits, which ``fully_shard`` cuts by rows, and gathers without a
cast. What belongs to all rows, 4 bytes for 16,384 values, is a buffer. The layer multiplies with the weight that they
stand for, made anew for each product.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from smp.config import ActivationConfig
from smp.errors import UserError
from smp.memory.shape import ModelShape, Moment, Workload
from smp.models.added import Encoded, encode_parameter, encoded_parameters
from smp.models.experts import expert_modules
from smp.parallel.linear import Product, product_of, replace_product

BLOCK = 64
BYTES = 1 / 2 + 1 / BLOCK  # of a value
_SCALE_BLOCK = 256  # at most
_SCALES = "nf4_scales"
_VALUES = 16  # of 4 bits
INSTALL = "pip install torchao"


def is_installed() -> bool:
    """Return whether torchao, which quantises, is installed."""
    return importlib.util.find_spec("torchao") is not None


def _to_nf4(weight: torch.Tensor) -> Any:
    if not is_installed():
        raise UserError(f"weights in 4 bits are quantised by torchao, which is not installed: {INSTALL}")
    try:
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4
    except ImportError as error:  # it was elsewhere before 0.18
        raise UserError(f"this torchao has no NF4 where 0.18 has it ({error}): {INSTALL}==0.18.0") from error
    return to_nf4(weight, BLOCK, math.gcd(_SCALE_BLOCK, weight.numel() // BLOCK))


def _columns(inputs: int) -> int:
    """Return the columns of the matrix of bf16 that stands for a row of ``inputs`` values."""
    return -(-(inputs // 2 + inputs // BLOCK) // 2)


def pack(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a weight.

    Args:
        weight: ``(outputs, inputs)``.

    Returns:
        ``(outputs, columns)`` in bf16; and what belongs to all rows: the 16 values, the mean of the scales, and a
        factor for each group of them, fp32.
    """
    found, (outputs, inputs) = _to_nf4(weight.float().contiguous()), weight.shape
    parts = [found.quantized_data.view(outputs, -1), found.quantized_scalers.view(torch.uint8).view(outputs, -1)]
    rows = torch.zeros(outputs, 2 * _columns(inputs), dtype=torch.uint8, device=weight.device)
    rows[:, : inputs // 2 + inputs // BLOCK] = torch.cat(parts, 1)
    return rows.view(torch.bfloat16), torch.cat([found.nf4, found.scaler_mean.view(1), found.quantization_factor])


def unpack(packed: torch.Tensor, scales: torch.Tensor, inputs: int) -> torch.Tensor:
    """Return the weight ``(outputs, inputs)`` that :func:`pack` has made ``packed`` and ``scales`` of, fp32."""
    if packed.dtype != torch.bfloat16:
        raise UserError(f"weights in 4 bits, kept as bf16, were cast to {packed.dtype}: do not cast the model "
                        f"after smp.lora, and compute in bf16 or without mixed precision")  # fmt: skip
    table, mean, factors = scales[:_VALUES], scales[_VALUES], scales[_VALUES + 1 :]
    rows = packed.view(torch.uint8)
    codes, levels = rows[:, : inputs // 2], rows[:, inputs // 2 : inputs // 2 + inputs // BLOCK]
    scale = (levels.reshape(len(factors), -1).view(torch.int8) / factors[:, None]).reshape(-1, 1) + mean
    pairs = torch.stack([table.repeat_interleave(_VALUES), table.repeat(_VALUES)], 1)
    return (pairs[codes.int()].view(-1, BLOCK) * scale).view(-1, inputs)


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """Return what a weight is after it was quantised, in its dtype."""
    return unpack(*pack(weight), weight.shape[1]).to(weight.dtype)


class Unpacked(Product):
    """Another product, with the weight that a packed one stands for."""

    def __init__(self, inner: Product, layer: nn.Module, inputs: int):
        self.inner, self.own, self.dropout = inner, inner.own, inner.dropout
        self._layer, self._inputs = layer, inputs

    def drawn(self, part: int) -> Unpacked:
        """Return it with the random numbers of the inner product."""
        return Unpacked(self.inner.drawn(part), self._layer, self._inputs)

    def _weight(self, packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return unpack(packed, self._layer.get_buffer(_SCALES), self._inputs).to(dtype)

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *own: torch.Tensor,
        product: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Return the layer's output."""
        return self.inner.forward(x, self._weight(weight, x.dtype), bias, *own, product=product)

    def input_gradient(
        self, gradient: torch.Tensor, weight: torch.Tensor, *own: torch.Tensor, into: torch.Tensor | None = None,
        product: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Return the gradient of the input."""
        weight = self._weight(weight, gradient.dtype)
        return self.inner.input_gradient(gradient, weight, *own, into=into, product=product)

    def parameter_gradients(
        self, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *own: torch.Tensor, needs: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """Return the gradients of the parameters of the inner product; the weight is frozen."""
        return self.inner.parameter_gradients(gradient, x, weight, *own, needs=needs)


def problems(tp: int) -> list[str]:
    """Return why weights in 4 bits cannot be had."""
    found = [] if is_installed() else [f"--qlora 1 quantises with torchao, which is not installed: {INSTALL}"]
    if tp > 1:
        found.append(
            f"--qlora 1 with --tensor_parallel_degree {tp}: weights in 4 bits are sharded, and not split: leave the "
            f"degree at 1, or train with --qlora 0"
        )
    return found


def problems_of_experts(model: nn.Module) -> list[str]:
    """Return why the weights of a mixture cannot be had in 4 bits."""
    if not expert_modules(model):
        return []
    return ["--qlora 1 stores linear layers in 4 bits, and routed experts are none: train a mixture with --qlora 0"]


def cost(shape: ModelShape, work: Workload, *, shard: int, gathered: int) -> dict[str, int]:
    """Count what the blocks' weights are smaller than in the dtype of the computation, and one that is unpacked.

    Args:
        shard: ranks that parameters are sharded over.
        gathered: blocks whose parameters are gathered.
    """
    fp32, less = 4, work.compute_bytes - BYTES
    unpacked = shape.hidden * shape.intermediate * (2 * fp32 + 2)  # codes as int32 for each two values, values, product
    in_backward = work.moment in (Moment.LAST_BLOCK, Moment.FIRST_BLOCK)
    in_host_memory = work.settings[ActivationConfig].cpu_offload and work.device_type != "cpu"
    return {
        "parameters": 0 if in_host_memory else -int(shape.layers * shape.linear * less) // shard,
        "gathered parameters": -int(gathered * shape.linear * less),
        "activations": unpacked if in_backward else 0,
    }


@torch.no_grad()
def quantise(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Hold the weights of linear layers in 4 bits, in place; before the model is split or sharded.

    Args:
        model: with values, or on the meta device.
        layers: of it, by path.

    Raises:
        UserError: a layer cannot be packed, the model has routed experts, or torchao is not installed.
    """
    if found := problems_of_experts(model):
        raise UserError(found[0])
    for path, layer in layers.items():
        weight: Any = layer.weight
        outputs, inputs = weight.shape
        if not isinstance(layer, nn.Linear) or inputs % BLOCK:
            what = f"has {inputs} inputs" if isinstance(layer, nn.Linear) else f"is a {type(layer).__name__}"
            raise UserError(
                f"weights in 4 bits: {path} {what}, and must be a torch.nn.Linear with a multiple of {BLOCK}: "
                f"train the adapters without --qlora"
            )
        groups = outputs * inputs // BLOCK
        scales = torch.zeros(_VALUES + 1 + groups // math.gcd(_SCALE_BLOCK, groups))
        layer.register_buffer(_SCALES, scales.to("cpu" if weight.is_meta else weight.device), persistent=False)
        how = Encoded("nf4", tuple(weight.shape), functools.partial(_encode, layer), functools.partial(_decode, layer))
        packed = torch.empty(outputs, _columns(inputs), dtype=torch.bfloat16, device=weight.device)
        if not weight.is_meta:
            packed = _encode(layer, weight)
        layer.weight = nn.Parameter(packed, requires_grad=False)
        encode_parameter(model, f"{path}.weight", how)
        replace_product(layer, Unpacked(product_of(layer), layer, inputs))


def is_quantised(model: nn.Module) -> bool:
    """Return whether weights are stored in 4 bits."""
    return bool(encoded_parameters(model))


def _encode(layer: nn.Module, weight: torch.Tensor) -> torch.Tensor:
    scales = layer.get_buffer(_SCALES)
    packed, found = pack(weight.to(scales.device))
    scales.copy_(found)
    return packed


def _decode(layer: nn.Linear, packed: torch.Tensor) -> torch.Tensor:
    return unpack(packed, layer.get_buffer(_SCALES).to(packed.device), layer.in_features)
