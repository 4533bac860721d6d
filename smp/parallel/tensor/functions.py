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
        count: of layers.
        whole: the input of all tokens, outside autograd.
        part: the input of this rank's tokens with sequence parallelism, else ``whole``; gets the gradient.
        tensors: ``count`` weights ``(outputs, inputs)``, then as many biases or None, then the outputs if they are
            computed already.

    Returns:
        ``count`` outputs ``(batch, sequence, outputs)``.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, tp: TPGroup, count: int, *tensors: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        # Of exactly two such arguments torch.compile loses one where no gradient is asked for; here are at least three.
        whole, part, *others = tensors
        weights, biases, outputs = others[:count], others[count : 2 * count], others[2 * count :]
        ctx.tp, ctx.count, ctx.given = tp, count, len(outputs)
        ctx.regather = tp.sequence_parallel and not tp.save_gathered
        ctx.save_for_backward(part if ctx.regather else whole, *weights)
        return tuple(outputs) or tuple(  # type: ignore[return-value,arg-type]
            torch.nn.functional.linear(whole, w, b)  # type: ignore[arg-type]
            for w, b in zip(weights, biases, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        tp, count = ctx.tp, ctx.count
        whole, *weights = ctx.saved_tensors
        overlap = whole.is_cuda
        gathering = reducing = None
        needs = ctx.needs_input_grad
        if ctx.regather and any(needs[4 : 4 + count]):
            whole, gathering = tp.gather(whole, async_op=overlap)
        flat = [_two(g) for g in gradients]
        input_gradient = None
        if needs[3]:
            partial = flat[0] @ weights[0]
            for gradient, weight in zip(flat[1:], weights[1:], strict=True):
                partial.addmm_(gradient, weight)
            partial = partial.view(*gradients[0].shape[:-1], -1)
            _wait(gathering)  # one collective after the other: both are of one group
            gathering = None
            input_gradient, reducing = tp.reduce(partial, async_op=overlap)
        _wait(gathering)
        tokens = _two(whole)
        weight_gradients = [g.T @ tokens if needs[4 + i] else None for i, g in enumerate(flat)]
        bias_gradients = [g.sum(0) if needs[4 + count + i] else None for i, g in enumerate(flat)]
        _wait(reducing)
        return None, None, None, input_gradient, *weight_gradients, *bias_gradients, *([None] * ctx.given)


def gathered_linears(
    tp: TPGroup, part: torch.Tensor, parameters: Sequence[tuple[torch.Tensor, torch.Tensor | None]]
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Gather the tokens of all ranks and compute the column-parallel layers of them in one exchange.

    Args:
        tp: the group, with sequence parallelism.
        part: ``(batch, sequence / size, hidden)``.
        parameters: of each layer, the weight ``(outputs, hidden)`` and the bias or None.

    Returns:
        The gathered tokens ``(batch, sequence, hidden)`` and the layers' outputs ``(batch, sequence, outputs)``.
    """
    weights, biases = zip(*parameters, strict=True)
    shape = part.shape[0], part.shape[1] * tp.size, -1
    with torch.no_grad():
        whole, products = tp.gather_products(_two(part), [w.t() for w in weights])
        assert whole is not None
        outputs = [(p if b is None else p + b).view(shape) for p, b in zip(products, biases, strict=True)]
        whole = whole.view(shape)
    return (
        GatherTokens.apply(part, tp, whole),
        ColumnLinears.apply(tp, len(weights), whole, part, *weights, *biases, *outputs),
    )


class _RowProduct(Function):
    """A row-parallel layer's place in the graph: what backward needs, and backward; the result has no values.

    It is saved before the exchange, so that recomputation of a block stops before its last one.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, tp: TPGroup) -> torch.Tensor:
        ctx.tp = tp
        ctx.save_for_backward(x, weight)
        return x.new_empty(()).expand(x.shape[0], x.shape[1] // tp.size, weight.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        needed = ctx.needs_input_grad[1]
        whole, (partial,) = ctx.tp.gather_products(_two(gradient), [weight], keep=needed)
        return partial.view_as(x), whole.T @ _two(x) if needed else None, None


class _Values(Function):
    """Values for a place in the graph."""

    @staticmethod
    def forward(ctx: Any, place: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return values

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient, None


def reduced_linear(tp: TPGroup, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute a row-parallel layer and reduce it to this rank's tokens in one exchange; so is its gradient gathered.

    Args:
        tp: the group, with sequence parallelism.
        x: ``(batch, sequence, inputs)``.
        weight: ``(outputs, inputs)``.

    Returns:
        ``(batch, sequence / size, outputs)``.
    """
    place = _RowProduct.apply(x, weight, tp)
    with torch.no_grad():
        total = tp.reduce_product(_two(x), weight.t())
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
