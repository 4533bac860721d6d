"""AdamW with moments of 8 bits (Dettmers et al., arXiv:2110.02861), quantised by torchao, in blocks of a row.

torchao's optimizer cuts its blocks of 256 values from a rank's shard, so that another layout has other blocks and other
numbers. Here they are cut from the rows of the full parameter, none of which spans two ranks: the same gradients give
the same bits at any layout. Parameters whose rows are no multiple of a block are updated by :mod:`smp.optim.adamw`.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from smp.axes import divisors
from smp.errors import UserError
from smp.local_shards import local_gradient, local_tensor
from smp.mesh import Mesh
from smp.models.parameters import ParameterSpec, ParameterTable
from smp.optim.config import OptimConfig
from smp.optim.entry import StateSpec

NAME = "adamw_8bit"
BLOCK = 256
# Updated at once, by device: what a CPU's cache takes, or enough to keep a GPU busy.
_AT_ONCE = {"cpu": 256, "cuda": 16384}
# Of a value, by torchao's functions and the rest of an update: at a time, and read and written in memory altogether.
_WORKING_BYTES, MOVED_BESIDES = 72, 1480
INSTALL = "pip install torchao"


class Rows(NamedTuple):
    """Tensors of one or more parameters, a block a row; those of scales and corrections have one column.

    Attributes:
        correction, correction_sq: what the mean gradient, and the root of the mean square, are divided by.
    """

    values: torch.Tensor
    codes: torch.Tensor
    scales: torch.Tensor
    codes_sq: torch.Tensor
    scales_sq: torch.Tensor
    gradients: torch.Tensor  # from here on not changed
    correction: torch.Tensor
    correction_sq: torch.Tensor


@functools.cache
def _torchao() -> Any:
    """Return torchao's module of quantisation.

    Raises:
        UserError: it is not installed, or is another version.
    """
    try:
        from torchao.optim import quant_utils
    except ImportError as error:
        installed = importlib.util.find_spec("torchao") is not None
        wrong = f"has no torchao.optim.quant_utils here ({error})" if installed else "is not installed"
        raise UserError(f"--optimizer {NAME} quantises with torchao, which {wrong}: {INSTALL}") from error
    return quant_utils


@functools.cache
def _values(device: torch.device, *, signed: bool) -> torch.Tensor:
    """Return the values of the 256 codes, in ascending order."""
    return torch.tensor(_torchao().create_dynamic_map(signed=signed), device=device)


# Operators, so that a plan follows shapes through them without torchao.
@torch.library.custom_op("smp::dequantise_8bit", mutates_args=())
def _dequantise(codes: torch.Tensor, scales: torch.Tensor, signed: bool) -> torch.Tensor:
    return _torchao().dequant_with_qmap(codes, _values(codes.device, signed=signed), scales)


@_dequantise.register_fake
def _(codes: torch.Tensor, scales: torch.Tensor, signed: bool) -> torch.Tensor:
    return torch.empty_like(codes, dtype=torch.float32)


@torch.library.custom_op("smp::quantise_8bit", mutates_args=())
def _quantise(values: torch.Tensor, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    scaled, scales = _torchao().scale_tensor(values, BLOCK)
    return _torchao().quantize_8bit_with_qmap(scaled, _values(values.device, signed=signed)), scales[:, None]


@_quantise.register_fake
def _(values: torch.Tensor, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(values, dtype=torch.uint8), values.new_empty(len(values), 1)


def takes(spec: ParameterSpec) -> bool:
    """Return whether the rows of a parameter are blocks; decided by the full shape, so that no layout matters."""
    return len(spec.shape) > 1 and spec.shape[-1] % BLOCK == 0


def missing() -> list[str]:
    """Return one sentence if torchao is not installed."""
    try:
        _torchao()
    except UserError as error:
        return [str(error)]
    return []


def _columns(spec: ParameterSpec, mesh: Mesh) -> int:
    """Return the columns of a parameter's shard on a rank that has most, as ``torch.chunk`` splits them."""
    columns, tp = spec.shape[-1], mesh.tp.size
    if spec.split == len(spec.shape) - 1:
        return -(-columns // tp)
    # As smp.parallel.sharding.placement: fully_shard shards the columns where rows are split unevenly.
    uneven = len(spec.shape) == 2 and spec.split == 0 and spec.shape[0] % tp
    return -(-columns // mesh.shard.size) if uneven else columns


def problems(table: ParameterTable, mesh: Mesh, config: OptimConfig) -> list[str]:
    """Return one sentence if the mesh cuts a block."""

    def first_cut(mesh: Mesh | None) -> ParameterSpec | None:
        return next((spec for spec in table if mesh and _columns(spec, mesh) % BLOCK), None)

    if (cut := first_cut(mesh)) is None:
        return []
    degrees = ((degree, mesh.with_degree("tp", degree)) for degree in divisors(mesh.world_size))
    legal = [str(degree) for degree, other in degrees if other and first_cut(other) is None]
    return [
        f"--optimizer {NAME} quantises {BLOCK} columns of a row together, and --tensor_parallel_degree {mesh.tp.size} "
        f"gives a rank {_columns(cut, mesh)} of the {cut.shape[-1]} of {cut.name}: choose one of {', '.join(legal)}"
    ]


def working_bytes(table: ParameterTable, mesh: Mesh, config: OptimConfig) -> int:
    """Return the bytes that the update of so many blocks as are updated at once takes, and frees."""
    sharded = table.count() // mesh.shard.size
    return _WORKING_BYTES * min(_AT_ONCE["cuda"] * BLOCK, sharded // mesh.tp.size)


def settings(config: OptimConfig) -> Mapping[str, Any]:
    """Return the settings of its parameter groups."""
    return {"betas": (config.beta1, config.beta2), "eps": config.adam_eps}


def state(shape: tuple[int, ...], dtype: torch.dtype, config: OptimConfig) -> Mapping[str, StateSpec]:
    """Return the state of a parameter: the updates done, and of both moments a byte a value and a scale a block."""
    codes = StateSpec(torch.uint8, shape)
    scales = StateSpec(torch.float32, (*shape[:-1], shape[-1] // BLOCK))
    return {
        "step": StateSpec(torch.float32, ()),
        "exp_avg": codes, "exp_avg_scale": scales, "exp_avg_sq": codes, "exp_avg_sq_scale": scales,
    }  # fmt: skip


def update(
    parameters: list[nn.Parameter],
    states: list[dict[str, torch.Tensor]],
    group: Mapping[str, Any],
    skip: torch.Tensor | None,
) -> None:
    """Update local tensors, some thousand blocks of one or more parameters at once."""
    device = parameters[0].device
    skip = None if skip is None else skip.to(device)
    steps = [each["step"] for each in states]
    torch._foreach_add_(steps, 1.0 if skip is None else (~skip).float())
    # Each a scalar of its parameter: on a CPU the powers of a vector of them have other bits.
    unbiased = [torch._foreach_add(torch._foreach_neg(torch._foreach_pow(beta, steps)), 1.0) for beta in group["betas"]]
    corrections = zip(unbiased[0], torch._foreach_sqrt(unbiased[1]), strict=True)
    lr = torch.full((), group["lr"], device=device)
    for pieces in _at_once(map(_rows, parameters, states, corrections), _AT_ONCE[device.type]):
        rows = Rows._make(map(torch.cat, zip(*pieces, strict=True)))
        changed = _updated(rows, group, lr)
        if skip is not None:
            changed = [torch.where(skip, *each) for each in zip(rows, changed, strict=False)]
        sizes = [len(piece.values) for piece in pieces]
        for targets, result in zip(zip(*pieces, strict=True), changed, strict=False):
            torch._foreach_copy_(list(targets), list(result.split(sizes)))


def _rows(
    parameter: nn.Parameter, state: Mapping[str, torch.Tensor], corrections: tuple[torch.Tensor, torch.Tensor]
) -> Rows:
    """Return views of a parameter's local tensors."""
    keys = ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale")
    values, *moments = map(local_tensor, (parameter, *(state[key] for key in keys)))
    count = values.numel() // BLOCK
    codes, scales, codes_sq, scales_sq = (
        each.view(count, width) for each, width in zip(moments, (BLOCK, 1, BLOCK, 1), strict=True)
    )
    gradients = local_gradient(parameter).reshape(count, BLOCK)
    correction, correction_sq = (each.expand(count, 1) for each in corrections)
    values = values.view(count, BLOCK)
    return Rows(values, codes, scales, codes_sq, scales_sq, gradients, correction, correction_sq)


def _at_once(parameters: Iterable[Rows], most: int) -> Iterator[list[Rows]]:
    """Yield the blocks of all parameters, at most so many at a time."""
    found, count = list[Rows](), 0
    for rows in parameters:
        for piece in map(Rows._make, zip(*(each.split(most) for each in rows), strict=True)):
            if count + len(piece.values) > most:
                yield found
                found, count = [], 0
            found.append(piece)
            count += len(piece.values)
    if count:  # a rank may have no part of any parameter
        yield found


def _updated(rows: Rows, group: Mapping[str, Any], lr: torch.Tensor) -> list[torch.Tensor]:
    """Return values, codes and scales after the update: torchao's operations, in its order."""
    (beta1, beta2), values, gradients = group["betas"], rows.values.float(), rows.gradients.float()
    values = values - lr * group["weight_decay"] * values
    mean = _dequantise(rows.codes, rows.scales, True).lerp(gradients, 1 - beta1)
    square = _dequantise(rows.codes_sq, rows.scales_sq, False).lerp(gradients.square(), 1 - beta2)
    step = lr * (mean / rows.correction) / (square.sqrt() / rows.correction_sq + group["eps"])
    return [values - step, *_quantise(mean, True), *_quantise(square, False)]
