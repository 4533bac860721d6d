"""``fully_shard`` over a group of one rank, which has nothing to gather and nothing to reduce.

torch takes streams, copies and buffers as for many ranks all the same. Here one rank without replicas reduces in its
only buffer, without a copy; it computes on one stream, so that a gradient's memory serves activations again; and frozen
parameters of adapters' base that have the dtype of the computation are no parameters of ``fully_shard``, which would
copy them to gather them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from smp.models import added


class AliasedReduce:
    """A reduction over one rank: its output is its input."""

    def __init__(self) -> None:
        self._input: torch.Tensor | None = None

    def begin(self) -> None:
        """Forget the input of a reduction that an error has ended: the next one's output would be its input."""
        self._input = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a new buffer for the input, and the same one for the output, which is asked for next."""
        found, self._input = self._input, None
        if found is None:
            found = self._input = torch.empty(*size, dtype=dtype, device=device)
        return found

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **how: Any) -> None:
        """Do nothing: this rank's part of the sum is there."""


def reduce_in_place(module: FSDPModule) -> None:
    """Let a module that one rank has, without replicas, reduce its gradients without a copy; on one stream.

    With several streams the buffer would be freed on that of the computation while a reduction still reads it.
    """
    reduction = AliasedReduce()
    module.set_custom_reduce_scatter(reduction)  # type: ignore[arg-type] # the interface is private
    parameters = cast(Any, module)._get_fsdp_state()._fsdp_param_group
    if parameters is not None:  # a root of which every child is a unit has none
        parameters.post_backward = _after(reduction.begin, parameters.post_backward)


def _after(first: Callable[[], None], function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        first()
        return function(*args, **kwargs)

    return called


def use_one_stream(model: nn.Module) -> None:
    """Let a model that is sharded over one rank, and has no replicas, do all on the stream of its first forward.

    [Note: one stream] The caching allocator keeps a pool for each stream. ``fully_shard`` makes fp32 gradients on its
    stream of reductions: their memory is then no activation's again, which is a gradient of all parameters more.
    The streams are those of this model's state: other models keep theirs.
    """
    context = cast(Any, model)._get_fsdp_state()._comm_ctx
    lazily = context.lazy_init

    def lazy_init(device: torch.device) -> None:
        lazily(device)
        own = context.device_handle.current_stream()
        for name in ("all_gather_copy_in_stream", "all_gather_stream", "reduce_scatter_stream", "all_reduce_stream"):
            setattr(context, name, own)

    context.lazy_init = lazy_init


def used_as_they_are(model: nn.Module, dtype: torch.dtype | None) -> set[nn.Parameter]:
    """Return the parameters that one rank computes with as they are: those of ``dtype``, or any, that stay frozen.

    Not what a script has frozen, which it may train later; nor what tensor parallelism has split.
    """
    frozen = map(model.get_parameter, added.frozen_parameters(model))
    return {each for each in frozen if dtype in (None, each.dtype) and not isinstance(each, DTensor)}
