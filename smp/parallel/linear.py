"""The product of a linear layer: torch's, or the one that a technique has put in its place.

Tensor parallelism decides a rank's slice of the weight and the collectives around the product; the product with the
slice and its gradients are computed here alone, so that low precision, adapters and quantised weights work at any
layout, in exactly the collectives of the plain product.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from smp.errors import UserError, a_type

_PRODUCT = "_smp_product"
T = TypeVar("T", torch.Tensor, torch.Tensor | None)

# Whether the layer that is being computed has had its product with the weight; None outside of other products.
_multiplied: bool | None = None


def local_tensor(tensor: T) -> T:
    """Return the local tensor of a DTensor, through which gradients flow back; others as they are."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_transposed(layer: nn.Module) -> bool:
    """Return whether the weight of a linear layer is ``(inputs, outputs)``: transformers' ``Conv1D``."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(layer, Conv1D)


def by_rows(layer: nn.Module, weight: T) -> T:
    """Return the weight of a linear layer as ``(outputs, inputs)``."""
    return weight.t() if weight is not None and is_transposed(layer) else weight


class Product:
    """The product of a linear layer, and its gradients: torch's, where a subclass has no other.

    All tensors are of this rank's part of the layer: some of its outputs (column parallel, the replicated head), or
    some of its inputs, then without bias (row parallel). Nothing here is recorded by autograd, or does collectives.

    Attributes:
        own: parameters of the layer beside weight and bias, by name: which of the layer's axes their first
            (``outputs``) or last one (``inputs``) is, and so which part of them a rank has; None: all of them. They are
            handed to each method in this order.
    """

    own: Mapping[str, Literal["outputs", "inputs"] | None] = {}

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


@contextlib.contextmanager
def _one_product(*, multiplied: bool) -> Iterator[None]:
    global _multiplied
    _multiplied = multiplied
    try:
        yield
    finally:
        _multiplied = None


def one_product(product: Product, *, multiplied: bool = False) -> contextlib.AbstractContextManager[None]:
    """Let all that ``product`` multiplies inside count as one product; see :func:`is_main_product`.

    Args:
        multiplied: the product with the weight was computed before.
    """
    plain = product is PLAIN or torch.compiler.is_compiling()
    return contextlib.nullcontext() if plain else _one_product(multiplied=multiplied)


def is_main_product() -> bool:
    """Return whether the operator that multiplies now does so with a layer's weight, and not beside it.

    Selective recomputation keeps every other product of a block, which is to be the same with another product.
    """
    global _multiplied
    if _multiplied is None:
        return True
    before, _multiplied = _multiplied, True
    return not before


def replace_product(module: nn.Linear, product: Product) -> None:
    """Let a layer compute ``product``, in place, at any layout.

    Args:
        module: the layer, split or not; one whose product has parameters of its own, which it must have by now, is not
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
        module.forward = functools.partial(_forward, module)  # type: ignore[method-assign]


def product_of(module: nn.Module) -> Product:
    """Return the layer's product: that of :func:`replace_product`, or torch's."""
    return getattr(module, _PRODUCT, PLAIN)


class _Linear(torch.autograd.Function):
    """A product that autograd takes the gradients of from its methods."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, product: Product, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *own: torch.Tensor
    ) -> torch.Tensor:
        ctx.product = product
        needed = ctx.needs_input_grad[2] or any(ctx.needs_input_grad[4:])
        ctx.save_for_backward(x if needed else None, weight, *own)
        with one_product(product):
            return product.forward(x, weight, bias, *own)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        x, weight, *own = ctx.saved_tensors
        _, needs_x, needs_weight, needs_bias, *needs_own = ctx.needs_input_grad
        flat = gradient.reshape(-1, gradient.shape[-1])
        of_x = of_bias = None
        of_weight: list[torch.Tensor | None] = [None] * (1 + len(own))
        if needs_x:
            of_x = ctx.product.input_gradient(flat, weight, *own).view(*gradient.shape[:-1], -1)
        if x is not None:
            tokens, needs = x.reshape(-1, x.shape[-1]), [needs_weight, *needs_own]
            of_weight = ctx.product.parameter_gradients(flat, tokens, weight, *own, needs=needs)
        if needs_bias:
            of_bias = flat.sum(0)
        return None, of_x, of_weight[0], of_bias, *of_weight[1:]


def linear(
    module: nn.Module, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *own: torch.Tensor
) -> torch.Tensor:
    """Compute the layer's product with this rank's part of its parameters.

    Args:
        module: the layer.
        x: ``(..., inputs)``.
        weight: ``(outputs, inputs)``.
        bias: ``(outputs,)`` or None.
        own: parameters of its product.
    """
    product = product_of(module)
    return F.linear(x, weight, bias) if product is PLAIN else _Linear.apply(product, x, weight, bias, *own)


def _forward(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    own = [local_tensor(getattr(module, name)) for name in product_of(module).own]
    weight = by_rows(module, local_tensor(module.weight))  # type: ignore[type-var]
    return linear(module, x, weight, local_tensor(module.bias), *own)
