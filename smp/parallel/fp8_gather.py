"""Weights of layers in fp8 are gathered in fp8: each rank casts its shard before it is sent, to a byte for a value.

torchao's ``enable_fsdp_float8_all_gather`` does it with a subclass of tensors as the parameter, and scales that are no
powers of two. Here parameters are as without: the objects of ``fully_shard`` that manage them have the functions that
it looks for in such a subclass. One collective after an update gives the scales of all weights, as torchao's
``precompute_float8_dynamic_scale_for_fsdp``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from smp.log import get_logger
from smp.memory.shape import ModelShape, Moment, Workload
from smp.mesh import Mesh
from smp.parallel import fp8
from smp.parallel.linear import product_of
from smp.parallel.sharding import fsdp_modules
from smp.parallel.sharding_cost import gathered_blocks
from smp.parallel.technique import Setup

logger = get_logger("model")

Config = fp8.Config
_SCALES = "_smp_fp8_scales"  # attribute of a model


class _Scales:
    """Scales of all weights, each of the largest value in the dtype of the computation.

    Attributes:
        stale: whether weights have changed since; the same on all ranks.
    """

    def __init__(self, weights: Sequence[_GatheredInFp8], dtype: torch.dtype | None):
        self.stale = True
        self._weights, self._dtype = weights, dtype
        # Always in the same memory, to which gathered weights refer.
        self._values = torch.empty(len(weights), device=weights[0].device if weights else None)

    def of(self, weight: _GatheredInFp8) -> torch.Tensor:
        """Return the scale of a weight, fp32, 0-d; collective over all ranks where weights have changed."""
        if self.stale:
            self._update()
        return self._values[weight.index]

    def _update(self) -> None:
        shards = [each._sharded_param_data for each in self._weights]
        # Rounding keeps the order of values, so that the largest one is rounded instead of all.
        largest = torch.stack(torch._foreach_norm(shards, math.inf, dtype=torch.float32)).to(self._values.device)
        # Over all ranks at once: replicas have the same values, ranks of tensor parallelism parts of a weight or all.
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        rounded = largest if self._dtype is None else largest.to(self._dtype)
        self._values.copy_(self._weights[0].casts.scale(rounded))
        self.stale = False


class _GatheredInFp8(FSDPParam):
    """A weight whose shard ``fully_shard`` casts before it is gathered; it is set as the class of an FSDPParam.

    ``fully_shard`` asks the local tensor of a parameter for the functions of a gather in another form. That tensor is
    replaced where values are loaded or moved; this object is not, and answers in its place.
    """

    casts: Any
    scales: _Scales
    index: int

    @property
    def _sharded_local_tensor(self) -> Any:
        return self

    def to(self, *_: Any, **__: Any) -> _GatheredInFp8:
        """Return it: the shard is moved when it is cast."""
        return self

    def reset_sharded_param(self) -> None:
        """Take the shard that a module has now, as after ``load_state_dict``."""
        super().reset_sharded_param()
        self.scales.stale = True

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor], None]:
        """Return the shard in fp8, as bytes, which every backend sends."""
        shard = self._sharded_param_data.view(self.padded_sharded_param_size)
        shard = shard.to(self.device, non_blocking=True).to(self.param_dtype or self.orig_dtype)
        return (self.casts.bytes(shard, self.scales.of(self)),), None

    def fsdp_post_all_gather(
        self, outputs: tuple[torch.Tensor], metadata: None, dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, tuple[()]] | None:
        """Return the weight in fp8; again, nothing: its memory has the new bytes and scale."""
        return None if out is not None else (self.casts.of_bytes(outputs[0], self.scales.of(self), dtype), ())


def apply(model: nn.Module, setup: Setup) -> None:
    """Let ``fully_shard`` gather the weights of layers in fp8 in fp8; after the model is sharded."""
    config = setup.settings[Config]
    if not config.fp8_all_gather or setup.device_type is None:  # None: a dry run, which computes nothing
        return
    from smp.parallel.fp8_products import Fp8

    weights: list[Any] = []
    cast_once = fp8.casts_once(setup.mesh, setup.settings)
    for unit in fsdp_modules(model):
        group = cast(Any, unit)._get_fsdp_state()._fsdp_param_group
        for each in group.fsdp_params if group is not None else ():
            product, trained = product_of(each._module_info.module), each.sharded_param.requires_grad
            if isinstance(product, Fp8) and each._module_info.param_name == "weight" and (trained or not cast_once):
                each.__class__, each.casts, each.index = _GatheredInFp8, product.casts, len(weights)
                weights.append(each)
    scales = _Scales(weights, setup.dtype)
    for each in weights:
        each.scales = scales
    setattr(model, _SCALES, scales)
    logger.info("%d weights are gathered in fp8.", len(weights))


def after_update(model: nn.Module, setup: Setup, skipped: torch.Tensor) -> None:
    """Let the next gather of a weight compute the scales of all."""
    if (scales := getattr(model, _SCALES, None)) is not None:
        scales.stale = True


def cost(shape: ModelShape, mesh: Mesh, work: Workload) -> dict[str, int]:
    """Count what gathered weights are smaller, and the casts that products do not make."""
    if not (less := fp8.gathered_less(shape, mesh, work)) or work.moment is Moment.UPDATE:
        return {}
    found = {"gathered parameters": -gathered_blocks(shape, mesh, work) * less}
    if work.moment in (Moment.LAST_BLOCK, Moment.FIRST_BLOCK):
        found["activations"] = -(shape.hidden * shape.intermediate // mesh.tp.size)
    return found
