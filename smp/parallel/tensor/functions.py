"""Split linear layers with their collectives, forward and backward, as autograd functions.

Per block and micro-batch, with sequence parallelism: forward 2 all_gathers and 2 reduce_scatters, backward 4 and 2, as
Megatron-LM: the gathered input of a column-parallel layer is not saved for backward but gathered again. With activation
checkpointing backward has 6 and 3. On GPUs the collectives of column-parallel layers' backward overlap its matrix
products; with ``tp.overlap`` all others in a block do, too: each is one with the product beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import Function

from smp.parallel.linear import Product, one_product
from smp.parallel.tensor.group import TPGroup


def _wait(work: Any) -> None:
    if work is not None:
        work.wait()


def _two(tensor: torch.Tensor) -> torch.Tensor:
    """Reshape to ``(tokens, features)``."""
    return tensor.reshape(-1, tensor.shape[-1])


class GatherTokens(Function):
    """``(batch, sequence / size, hidden)`` to ``(batch, sequence, hidden)``; gradients are reduce-scattered.

    ``whole`` is the result where it is there already.
    """

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, tp: TPGroup, whole: torch.Tensor | None = None) -> torch.Tensor:
        ctx.tp = tp
        return tp.gather(part)[0] if whole is None else whole

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


class ColumnLinears(Function):
    """Linear layers of one input, split by their outputs.

    Args (of ``apply``):
        tp: the group.
        products: of each layer.
        whole: the input of all tokens, outside autograd.
        part: the input of this rank's tokens with sequence parallelism, else ``whole``; gets the gradient.
        tensors: of each layer, the weight ``(outputs, inputs)``, the bias or None, and the product's own parameters; at
            the end, the layers' products with their weights if they are computed already.

    Returns:
        The layers' outputs ``(batch, sequence, outputs)``.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, tp: TPGroup, products: Sequence[Product], *tensors: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        # Of exactly two such arguments torch.compile loses one where no gradient is asked for; here are at least three.
        whole, part, *others = tensors
        layers, given = _by_layer(products, others)
        ctx.tp, ctx.products, ctx.given = tp, products, len(given)
        ctx.regather = tp.sequence_parallel and not tp.save_gathered
        kept = [tensor for weight, _, *own in layers for tensor in (weight, *own)]
        ctx.save_for_backward(part if ctx.regather else whole, *kept)
        outputs = []
        for index, (product, layer) in enumerate(zip(products, layers, strict=True)):
            with one_product(product, multiplied=bool(given)):
                outputs.append(product.forward(whole, *layer, product=given[index] if given else None))  # type: ignore[arg-type]
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        tp, products = ctx.tp, ctx.products
        whole, *kept = ctx.saved_tensors
        parameters = [[kept.pop(0) for _ in range(1 + len(product.own))] for product in products]
        overlap = whole.is_cuda
        gathering = reducing = None
        needs_input, needs = ctx.needs_input_grad[3], _by_layer(products, ctx.needs_input_grad[4:])[0]
        if ctx.regather and any(weight or any(own) for weight, _, *own in needs):
            whole, gathering = tp.gather(whole, async_op=overlap)
        flat = [_two(g) for g in gradients]
        input_gradient = partial = None
        if needs_input:
            for product, gradient, own in zip(products, flat, parameters, strict=True):
                partial = product.input_gradient(gradient, *own, into=partial)
            assert partial is not None
            partial = partial.view(*gradients[0].shape[:-1], -1)
            _wait(gathering)  # one collective after the other: both are of one group
            gathering = None
            input_gradient, reducing = tp.reduce(partial, async_op=overlap)
        _wait(gathering)
        tokens = _two(whole)
        found: list[torch.Tensor | None] = []
        for product, gradient, own, (weight, bias, *others) in zip(products, flat, parameters, needs, strict=True):
            of_weight: list[torch.Tensor | None] = [None] * len(own)
            if weight or any(others):
                of_weight = product.parameter_gradients(gradient, tokens, *own, needs=[weight, *others])
            found += [of_weight[0], gradient.sum(0) if bias else None, *of_weight[1:]]
        _wait(reducing)
        return None, None, None, input_gradient, *found, *([None] * ctx.given)


def _by_layer(products: Sequence[Product], values: Sequence[Any]) -> tuple[list[Sequence[Any]], Sequence[Any]]:
    """Return the values of each layer's weight, bias and own parameters, and those that are left."""
    found, start = [], 0
    for product in products:
        found.append(values[start : start + 2 + len(product.own)])
        start += len(found[-1])
    return found, values[start:]


def gathered_linears(
    tp: TPGroup, products: Sequence[Product], part: torch.Tensor, parameters: Sequence[Sequence[torch.Tensor | None]]
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Gather the tokens of all ranks and compute the column-parallel layers of them in one exchange.

    Args:
        tp: the group, with sequence parallelism.
        products: of each layer.
        part: ``(batch, sequence / size, hidden)``.
        parameters: of each layer, the weight ``(outputs, hidden)``, the bias or None, and the product's own.

    Returns:
        The gathered tokens ``(batch, sequence, hidden)`` and the layers' outputs ``(batch, sequence, outputs)``.
    """
    shape = part.shape[0], part.shape[1] * tp.size, -1
    with torch.no_grad():
        matrices = [product.matrix(own[0]) for product, own in zip(products, parameters, strict=True)]  # type: ignore[arg-type]
        whole, computed = tp.gather_products(_two(part), [matrix.t() for matrix in matrices])
        assert whole is not None
        whole = whole.view(shape)
    flat = [tensor for own in parameters for tensor in own]
    return (
        GatherTokens.apply(part, tp, whole),
        ColumnLinears.apply(tp, products, whole, part, *flat, *(p.view(shape) for p in computed)),
    )


class _RowProduct(Function):
    """A row-parallel layer's place in the graph: what backward needs, and backward; the result has no values.

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
        whole, (partial,) = ctx.tp.gather_products(_two(gradient), [product.matrix(weight)], keep=keep)
        found: list[torch.Tensor | None] = [None] * len(needs)
        if any(needs):
            found = product.parameter_gradients(whole, _two(x), weight, *own, needs=list(needs))
        return None, None, product.input_gradient(whole, weight, *own, product=partial).view_as(x), *found


class _Values(Function):
    """Values for a place in the graph."""

    @staticmethod
    def forward(ctx: Any, place: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return values

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient, None


def reduced_linear(
    tp: TPGroup, product: Product, x: torch.Tensor, weight: torch.Tensor, *own: torch.Tensor
) -> torch.Tensor:
    """Compute a row-parallel layer and reduce it to this rank's tokens in one exchange; so is its gradient gathered.

    Args:
        tp: the group, with sequence parallelism.
        product: of the layer.
        x: ``(batch, sequence, inputs)``.
        weight: ``(outputs, inputs)``.
        own: the product's own parameters.

    Returns:
        ``(batch, sequence / size, outputs)``.
    """
    place = _RowProduct.apply(tp, product, x, weight, *own)
    with torch.no_grad(), one_product(product, multiplied=True):
        tokens, matrix = product.as_one(_two(x), weight, *own)
        total = tp.reduce_product(tokens, matrix.t())
    return _Values.apply(place, total.view(place.shape))


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
