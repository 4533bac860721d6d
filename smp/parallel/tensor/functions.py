"""Split linear layers with their collectives, forward and backward, as autograd functions.

Per block and micro-batch, with sequence parallelism: forward 2 all_gathers and 2 reduce_scatters, backward 4 and 2, as
Megatron-LM: the gathered input of a column-parallel layer is not saved for backward but gathered again. With activation
checkpointing backward has 6 and 3. On GPUs the collectives of column-parallel layers' backward overlap its matrix
products; with ``tp.overlap`` all others in a block do, too: each is fused with the product next to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import Function

from smp.parallel.linear import Linears, Product, by_token, one_product
from smp.parallel.tensor.group import TPGroup


class GatherTokens(Function):
    """``(batch, sequence / size, hidden)`` to ``(batch, sequence, hidden)``; gradients are reduce-scattered.

    ``gathered`` is the result where it exists already.
    """

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, tp: TPGroup, gathered: torch.Tensor | None = None) -> torch.Tensor:
        ctx.tp = tp
        return tp.gather(part)[0] if gathered is None else gathered

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return ctx.tp.reduce(gradient)[0], None, None


class ReducePartial(Function):
    """Partial sums of full sequences, reduced to this rank's tokens; gradients are gathered.

    Nothing is saved for backward, so that recomputation of a block stops before its last reduction.
    """

    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, tp: TPGroup) -> torch.Tensor:
        ctx.tp = tp
        return torch.ops.smp.reduce_tokens(partial, tp.group.group_name, tp.size if tp.sequence_parallel else 1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        tp = ctx.tp
        return (tp.gather(gradient)[0] if tp.sequence_parallel else gradient), None


def gathered_linears(
    tp: TPGroup, products: Sequence[Product], part: torch.Tensor, parameters: Sequence[Sequence[torch.Tensor | None]]
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Gather the tokens of all ranks and compute the column-parallel layers of them in one collective.

    Args:
        tp: the group, with sequence parallelism.
        part: ``(batch, sequence / size, hidden)``.
        parameters: of each layer, the weight ``(outputs, hidden)``, the bias or None, and the product's own.

    Returns:
        The gathered tokens ``(batch, sequence, hidden)`` and the layers' outputs ``(batch, sequence, outputs)``.
    """
    shape = part.shape[0], part.shape[1] * tp.size, -1
    with torch.no_grad():
        matrices = [product.matrix(own[0]) for product, own in zip(products, parameters, strict=True)]  # type: ignore[arg-type]
        gathered, computed = tp.gather_products(by_token(part), [matrix.t() for matrix in matrices])
        assert gathered is not None
        gathered = gathered.view(shape)
    flat = [tensor for own in parameters for tensor in own]
    return (
        GatherTokens.apply(part, tp, gathered),
        Linears.apply(tp, products, gathered, part, *flat, *(p.view(shape) for p in computed)),
    )


class _RowProduct(Function):
    """A row-parallel layer's node in the graph: what backward needs, and backward; the result has no values.

    It is saved before the exchange, so that recomputation of a block stops before its last one.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, tp: TPGroup, product: Product, x: torch.Tensor, weight: torch.Tensor, *own: torch.Tensor
    ) -> torch.Tensor:
        ctx.tp, ctx.product = tp, product
        ctx.save_for_backward(x, weight, *own)
        return x.new_empty(()).expand(x.shape[0], x.shape[1] // tp.size, weight.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        x, weight, *own = ctx.saved_tensors
        product, needs = ctx.product, ctx.needs_input_grad[3:]
        keep = bool(own) or any(needs)
        gathered, (partial,) = ctx.tp.gather_products(by_token(gradient), [product.matrix(weight)], keep=keep)
        found: list[torch.Tensor | None] = [None] * len(needs)
        if any(needs):
            found = product.parameter_gradients(gathered, by_token(x), weight, *own, needs=list(needs))
        return None, None, product.input_gradient(gathered, weight, *own, product=partial).view_as(x), *found


class _Values(Function):
    """Values of a placeholder in the graph."""

    @staticmethod
    def forward(ctx: Any, placeholder: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return values

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient, None


def reduced_linear(
    tp: TPGroup, product: Product, x: torch.Tensor, weight: torch.Tensor, *own: torch.Tensor
) -> torch.Tensor:
    """Compute a row-parallel layer and reduce it to this rank's tokens in one collective; so is its gradient gathered.

    Args:
        tp: the group, with sequence parallelism.
        x: ``(batch, sequence, inputs)``.
        weight: ``(outputs, inputs)``.

    Returns:
        ``(batch, sequence / size, outputs)``.
    """
    placeholder = _RowProduct.apply(tp, product, x, weight, *own)
    with torch.no_grad(), one_product(product, multiplied=True):
        tokens, matrix = product.as_one(by_token(x), weight, *own)
        total = tp.reduce_product(tokens, matrix.t())
    return _Values.apply(placeholder, total.view(placeholder.shape))


class SumGradients(Function):
    """Identity; the partial gradients of all tensors are summed over the ranks in one all_reduce."""

    @staticmethod
    def forward(ctx: Any, tp: TPGroup, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        ctx.tp = tp
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        # In at least fp32: bf16 would lose precision in the sum.
        dtype = torch.promote_types(gradients[0].dtype, torch.float32)
        flat = torch.cat([g.reshape(-1).to(dtype) for g in gradients])
        torch.distributed.all_reduce(flat, group=ctx.tp.group)
        sums = flat.split([g.numel() for g in gradients])
        return None, *(s.view_as(g).to(g.dtype) for s, g in zip(sums, gradients, strict=True))
