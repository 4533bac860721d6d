"""What a block saves for backward, counted in a forward pass on the meta device."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from smp.models.derive import without_masks, without_values

_SEQUENCE = 64  # tokens that are counted


class _Fused(torch.autograd.Function):
    """Attention as a fused kernel saves it: query, key, value, output, and a logarithm for each head and token."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        output = torch.empty_like(query)  # with its strides, as the kernels' own
        ctx.save_for_backward(query, key, value, output, query.new_empty(query.shape[:3], dtype=torch.float32))
        return output


def _attend(_: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *__: Any, **___: Any) -> Any:
    return _Fused.apply(query, key, value).transpose(1, 2).contiguous(), None


class _CountedError(Exception):
    """Ends a forward pass behind the block."""


def _convert(model: nn.Module, dtype: torch.dtype) -> None:
    """Give parameters and buffers another dtype; ``nn.Module.to`` fails where torch swaps tensors in use."""
    made: dict[nn.Parameter, nn.Parameter] = {}  # a tied one once
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                new = made.get(parameter)
                module._parameters[name] = made[parameter] = nn.Parameter(parameter.to(dtype)) if new is None else new
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(dtype)


def saved_bytes(model: nn.Module, block: nn.Module, dtype: torch.dtype) -> int | None:
    """Count what a block saves for backward beside parameters and what it is given, in bytes of each token.

    Args:
        model: whole, on the meta device; it is converted to ``dtype``.

    Returns:
        None, where the forward cannot be followed without values.
    """
    _convert(model, dtype)
    for masks in (without_masks(model, _attend), contextlib.nullcontext()):
        with contextlib.suppress(Exception), masks:  # of any type: code of any model
            return _count(model, block) // _SEQUENCE
    return None


def _count(model: nn.Module, block: nn.Module) -> int:
    seen: dict[int, torch.UntypedStorage] = {}
    given: list[Any] = [*model.parameters(), *model.buffers()]
    forward = block.forward

    def note(saved: torch.Tensor) -> torch.Tensor:
        storage = saved.untyped_storage()
        seen[storage._cdata] = storage
        return saved

    def watched(*args: Any, **kwargs: Any) -> Any:
        given.extend(tree_leaves((args, kwargs)))
        with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
            forward(*args, **kwargs)
        raise _CountedError

    block.forward = watched  # type: ignore[method-assign]
    try:
        with torch.enable_grad(), torch.device("meta"), without_values(model):
            model(input_ids=torch.zeros(1, _SEQUENCE, dtype=torch.long, device="meta"), use_cache=False)
    except _CountedError:  # of what follows, nothing is asked
        pass
    finally:
        del block.forward
    for value in given:
        if torch.is_tensor(value):
            seen.pop(value.untyped_storage()._cdata, None)
    return sum(storage.nbytes() for storage in seen.values())
