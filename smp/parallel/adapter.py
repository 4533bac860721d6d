"""The product of a frozen weight plus that of two low-rank factors: of :mod:`smp.parallel.lora`."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch

from smp.parallel.linear import Product, by_token
from smp.parallel.random_numbers import draw_seed, seeded


class Adapter(Product):
    """A frozen weight's product plus the scaled one of two factors.

    Args:
        scale: of the factors' product.
        dropout: of their input, in training; the weight's own product has none.
    """

    own: Mapping[str, Literal["outputs", "inputs"] | None] = {"lora_A": "inputs", "lora_B": "outputs"}

    def __init__(self, scale: float, dropout: float = 0.0):
        self.scale, self.dropout = scale, dropout
        self.left_out = False
        self._seed: int | None = None
        # The latest gradient of an output and its B, and their product.
        self._latest: tuple[Callable[[], torch.Tensor | None], Callable[[], torch.Tensor | None], torch.Tensor] | None
        self._latest = None

    def drawn(self, part: int) -> Adapter:
        """Return the product with the seed of a mask, which is made of it in forward and again in backward."""
        if not self.dropout or self.left_out:
            return self
        found = copy.copy(self)
        found._seed, found.scale = draw_seed() + part, self.scale / (1 - self.dropout)
        return found

    def _kept(self, x: torch.Tensor) -> torch.Tensor:
        """Return which values of the input dropout keeps, in the shape of ``x``; the same at each call."""
        assert self._seed is not None
        with seeded(self._seed, x.device):
            # A new tensor: what a kernel draws depends on strides and alignment.
            return torch.empty(x.shape, dtype=torch.bool, device=x.device).bernoulli_(1 - self.dropout)

    def _input(self, x: torch.Tensor) -> torch.Tensor:
        return x if self._seed is None else x * self._kept(x)

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *own: torch.Tensor,
        product: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Add the factors' product."""
        a, b = own
        found = super().forward(x, weight, bias, product=product)
        if self.left_out:
            return found
        # One pass over the output. Not in place: recomputation may keep the weight's product.
        low = by_token(self._input(x)) @ a.T
        return torch.addmm(by_token(found), low, b.T, alpha=self.scale).view(found.shape)

    def input_gradient(
        self, gradient: torch.Tensor, weight: torch.Tensor, *own: torch.Tensor, into: torch.Tensor | None = None,
        product: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Add what comes through the factors."""
        a, b = own
        found = super().input_gradient(gradient, weight, into=into, product=product)
        low = self._low(gradient, b)
        if self._seed is None:
            return found.addmm_(low, a, alpha=self.scale)
        through = low @ a
        return found.add_(through.mul_(self._kept(through)), alpha=self.scale)

    def _low(self, gradient: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the input's product with A, unscaled; both gradients of a layer ask for it."""
        if torch.compiler.is_compiling():  # which finds what is computed twice
            return gradient @ b
        if self._latest is None or self._latest[0]() is not gradient or self._latest[1]() is not b:
            self._latest = weakref.ref(gradient), weakref.ref(b), gradient @ b
        return self._latest[2]

    def parameter_gradients(
        self, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *own: torch.Tensor, needs: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """Add the factors' gradients."""
        a, b = own
        of_weight, x = super().parameter_gradients(gradient, x, weight, needs=needs), self._input(x)
        of_a = self._low(gradient, b).T @ x * self.scale if needs[1] else None
        self._latest = None
        return [*of_weight, of_a, gradient.T @ (x @ a.T) * self.scale if needs[2] else None]

    def as_one(self, x: torch.Tensor, weight: torch.Tensor, *own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the input concatenated with its product with A, and the weight with B."""
        if self.left_out:
            return super().as_one(x, weight)
        a, b = own
        return torch.cat([x, self._input(x) @ a.T * self.scale], 1), torch.cat([weight, b], 1)
