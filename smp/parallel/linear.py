"""The product of a linear layer: torch's, or the one that a technique has replaced it by.

Tensor parallelism decides a rank's slice of the weight and the collectives around the product; the product with the
slice and its gradients are computed here alone, so that low precision, adapters and quantised weights work at any
layout, in exactly the collectives of the plain product.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.fx.traceback import annotate, get_current_meta

from smp.errors import UserError, a_type
from smp.local_shards import local_tensor
from smp.models.projection import is_transposed

_PRODUCT, _TRACED = "_smp_product", "smp_product"
T = TypeVar("T", torch.Tensor, torch.Tensor | None)


def by_rows(layer: nn.Module, weight: T) -> T:
    """Return the weight of a linear layer as ``(outputs, inputs)``."""
    return weight.t() if weight is not None and is_transposed(layer) else weight


def by_token(tensor: torch.Tensor) -> torch.Tensor:
    """Reshape to ``(tokens, features)``."""
    return tensor.flatten(0, -2)  # of no features, too: a rank may have none of the head's trained rows


def _wait(work: Any) -> None:
    if work is not None:
        work.wait()


class Product:
    """The product of a linear layer, and its gradients: torch's, where a subclass has no other.

    All tensors are of this rank's part of the layer: some of its outputs (column parallel, the replicated head), or
    some of its inputs, then without bias (row parallel). Methods are neither recorded by autograd nor do collectives.

    Attributes:
        dropout: rate of what it draws at random in training, so that recomputation is to draw the same again.
        own: parameters of the layer besides weight and bias, by name: which of the layer's axes their first
            (``outputs``) or last one (``inputs``) is, and so which part of them a rank has; None: all of them. They are
            handed to each method in this order.
    """

    dropout: float = 0.0
    own: Mapping[str, Literal["outputs", "inputs"] | None] = {}

    def drawn(self, part: int) -> Product:
        """Return the product for one forward in training and its backward: it has the random numbers, if any.

        Args:
            part: number of this rank's part of the inputs; 0 where it has all of them, as other ranks may.
        """
        return self

    def matrix(self, weight: torch.Tensor) -> torch.Tensor:
        """Return what is multiplied with, ``(outputs, inputs)``; its gradient goes to ``weight``."""
        return weight

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *own: torch.Tensor,
        product: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Return the layer's output ``(..., outputs)``.

        Args:
            x: ``(..., inputs)``.
            weight: ``(outputs, inputs)``.
            product: of ``x`` and the matrix, where an overlapped collective has computed it.
        """
        if product is None:
            return F.linear(x, self.matrix(weight), bias)
        return product if bias is None else product + bias

    def input_gradient(
        self, gradient: torch.Tensor, weight: torch.Tensor, *own: torch.Tensor, into: torch.Tensor | None = None,
        product: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Return the gradient of the input ``(tokens, inputs)``.

        Args:
            gradient: of the output, ``(tokens, outputs)``.
            into: gradient by other layers of the input, to which this one is added in place.
            product: of ``gradient`` and the matrix, where an overlapped collective has computed it; may be changed.
        """
        if product is not None:
            return product
        matrix = self.matrix(weight)
        return gradient @ matrix if into is None else into.addmm_(gradient, matrix)

    def parameter_gradients(
        self, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *own: torch.Tensor, needs: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """Return the gradients of the weight and of ``own``, None where ``needs`` is false.

        Args:
            gradient: of the output, ``(tokens, outputs)``.
            x: ``(tokens, inputs)``.
            needs: of the weight, and of each of ``own``.
        """
        return [gradient.T @ x if needs[0] else None]

    def as_one(self, x: torch.Tensor, weight: torch.Tensor, *own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(tokens, n)`` and ``(outputs, n)`` whose one product is the output, for an overlapped collective."""
        return x, self.matrix(weight)


PLAIN = Product()


def one_product(
    product: Product, index: int = 0, *, multiplied: bool = False
) -> contextlib.AbstractContextManager[Any]:
    """Let all that ``product`` multiplies inside count as one product; see :class:`ProductCounter`.

    Args:
        index: among the products that one layer computes.
        multiplied: the product with the weight was computed before.
    """
    if product is PLAIN:
        return contextlib.nullcontext()
    # In a graph, whose operators are chosen among after it is traced, the layer and a number identify the product.
    key = index if torch.compiler.is_compiling() else object()
    return annotate({_TRACED: None if multiplied else key})


class ProductCounter:
    """Counts a block's products with weights, in its forward or in its recomputation.

    Selective recomputation keeps every other one, which must be the same with another product as with torch's.
    """

    def __init__(self) -> None:
        self._count = 0
        self._latest: tuple[Any, Any] | None = None

    def number(self) -> int | None:
        """Count the operator that multiplies now, and return the number of its product, from 1.

        What another product multiplies besides the weight, as an adapter does, is not counted: None.
        """
        meta = get_current_meta()
        if _TRACED in (custom := meta.get("custom") or {}):
            modules = meta.get("nn_module_stack")
            product = (next(reversed(modules)) if modules else None, custom[_TRACED])
            # The latest is enough: all that one product multiplies comes before the next.
            seen, self._latest = custom[_TRACED] is None or product == self._latest, product
            if seen:
                return None
        self._count += 1
        return self._count


def replace_product(module: nn.Linear, product: Product) -> None:
    """Let a layer compute ``product``, in place, at any layout.

    Args:
        module: the layer, split or not; one whose product has parameters (``own``), which it must have by now, is not
            split yet.
        product: its methods; one may serve several layers.

    Raises:
        UserError: ``product`` is no :class:`Product`, or the layer lacks its parameters or is split already.
    """
    if not isinstance(product, Product):
        raise UserError(f"replace_product takes a smp.parallel.linear.Product, got {a_type(product)}: derive a class "
                        f"from it that has the gradients, too")  # fmt: skip
    if missing := [name for name in product.own if module._parameters.get(name) is None]:
        raise UserError(f"replace_product: the layer has no parameter {missing[0]}: register it before")
    if product.own and isinstance(module.weight, DTensor):
        raise UserError("replace_product: the layer is split or sharded already, and the parameters of the product "
                        "with it: call it before smp.transform and smp.parallelize")  # fmt: skip
    setattr(module, _PRODUCT, product)
    if "forward" not in vars(module):  # a split layer calls linear() itself
        # Not functools.partial, for which torch.compile would compile every block anew.
        module.forward = types.MethodType(_forward, module)  # type: ignore[method-assign]


def product_of(module: nn.Module) -> Product:
    """Return the layer's product: that of :func:`replace_product`, or torch's."""
    return getattr(module, _PRODUCT, PLAIN)


def product_of_call(module: nn.Module, part: int = 0) -> Product:
    """Return the layer's product for the forward that begins, and its backward; see :meth:`Product.drawn`."""
    product = product_of(module)
    return product.drawn(part) if product.dropout and module.training else product


class Linears(torch.autograd.Function):
    """Linear layers of one input, whose gradients their products compute.

    Args (of ``apply``):
        tp: the group whose ranks have some of each layer's outputs, or None.
        products: of each layer.
        gathered: the input of all tokens, outside autograd.
        part: the input of this rank's tokens with sequence parallelism, else ``gathered``; gets the gradient.
        tensors: of each layer, the weight ``(outputs, inputs)``, the bias or None, and the product's own parameters; at
            the end, the layers' products with their weights if they are computed already.

    Returns:
        The layers' outputs ``(batch, sequence, outputs)``.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, tp: Any, products: Sequence[Product], *tensors: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        # Of exactly two such arguments torch.compile loses one where no gradient is asked for; here are at least three.
        gathered, part, *others = tensors
        layers, given = _by_layer(products, others)
        ctx.tp, ctx.products, ctx.given = tp, products, len(given)
        ctx.regather = tp is not None and tp.sequence_parallel and not tp.save_gathered
        kept = [tensor for weight, _, *own in layers for tensor in (weight, *own)]
        # Not as attributes of `ctx`, which hooks for saved tensors do not see: offloading and checkpointing are such.
        ctx.save_for_backward(part if ctx.regather else gathered, *kept)
        outputs = []
        for index, (product, layer) in enumerate(zip(products, layers, strict=True)):
            with one_product(product, index, multiplied=bool(given)):
                outputs.append(product.forward(gathered, *layer, product=given[index] if given else None))  # type: ignore[arg-type]
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        tp, products = ctx.tp, ctx.products
        gathered, *kept = ctx.saved_tensors
        if gathered.dtype != gradients[0].dtype:  # forward was converted, which this is not
            raise UserError(
                "torch.autocast does not convert the backward of layers that are split or have adapters: leave it out, "
                "and give smp.parallelize dtype=torch.bfloat16, or smp.FSDP a MixedPrecision"
            )
        parameters = _by_layer(products, kept, plain=1)[0]
        overlap = gathered.is_cuda
        gathering = reducing = None
        needs_input, needs = ctx.needs_input_grad[3], _by_layer(products, ctx.needs_input_grad[4:])[0]
        if ctx.regather and any(weight or any(own) for weight, _, *own in needs):
            # [Note: Overlap of the gather and the reduction in backward] The gradient of the input needs no gathered
            # tokens and is computed meanwhile; those of the weights need them, and are computed while it is reduced.
            gathered, gathering = tp.gather(gathered, async_op=overlap)
        flat = [by_token(g) for g in gradients]
        input_gradient = partial = None
        if needs_input:
            for product, gradient, own in zip(products, flat, parameters, strict=True):
                partial = product.input_gradient(gradient, *own, into=partial)
            assert partial is not None
            partial = partial.view(*gradients[0].shape[:-1], -1)
            _wait(gathering)  # one collective after the other: both are of one group
            gathering = None
            # The collective reads `partial`, which must live until `_wait(reducing)`: this name keeps it.
            input_gradient, reducing = (partial, None) if tp is None else tp.reduce(partial, async_op=overlap)
        _wait(gathering)
        tokens = by_token(gathered)
        found: list[torch.Tensor | None] = []
        for product, gradient, own, (weight, bias, *others) in zip(products, flat, parameters, needs, strict=True):
            of_weight: list[torch.Tensor | None] = [None] * len(own)
            if weight or any(others):
                of_weight = product.parameter_gradients(gradient, tokens, *own, needs=[weight, *others])
            found += [of_weight[0], gradient.sum(0) if bias else None, *of_weight[1:]]
        _wait(reducing)
        return None, None, None, input_gradient, *found, *([None] * ctx.given)


def _by_layer(
    products: Sequence[Product], values: Sequence[Any], plain: int = 2
) -> tuple[list[Sequence[Any]], Sequence[Any]]:
    """Return the values of each layer's weight, bias (``plain=1``: without it) and own parameters, and what is left."""
    found, start = [], 0
    for product in products:
        found.append(values[start : start + plain + len(product.own)])
        start += len(found[-1])
    return found, values[start:]


def linear(
    module: nn.Module, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *own: torch.Tensor,
    part: int = 0,
) -> torch.Tensor:  # fmt: skip
    """Compute the layer's product with this rank's part of its parameters.

    Args:
        x: ``(..., inputs)``.
        weight: ``(outputs, inputs)``.
        bias: ``(outputs,)`` or None.
        part: number of this rank's part of the inputs.
    """
    product = product_of_call(module, part)
    if product is PLAIN:
        return F.linear(x, weight, bias)
    # The product is of the detached tensor, which shares the memory; the gradient goes to `x`.
    return Linears.apply(None, (product,), x.detach(), x, weight, bias, *own)[0]


def _forward(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    own = [local_tensor(getattr(module, name)) for name in product_of(module).own]
    weight = by_rows(module, local_tensor(module.weight))  # type: ignore[type-var]
    return linear(module, x, weight, local_tensor(module.bias), *own)
