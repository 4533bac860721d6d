"""What products keep on CPUs: memory in which MKL and oneDNN pack operands, measured on this machine.

How much it is hangs on the processor and the shapes: 9 MB of a step on one processor are 24 MB on another. So a step's
products run once, in a process of their own, and malloc is asked what has stayed.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Iterable

import torch
from torch import Tensor

from smp.plan.fork import in_child
from smp.plan.kernels import Product, product
from smp.plan.records import Operation

# Beyond these sides, of the longest and of the others, what is packed does not grow.
_LONGEST, _OTHERS = 8192, 1024
_ROUNDED = 2**20  # bytes, so that a plan made again is the same: small objects of the process are among them


class _Allocated(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = [(name, ctypes.c_size_t) for name in ("", "", "", "", "mapped", "", "", "heap", "", "")]


def packed_bytes(operations: Iterable[Operation]) -> int | None:
    """Return the bytes that one thread keeps of linear layers after their forward and backward passes.

    This process has run no products, whose memory its fork would have already.

    Args:
        operations: of the forward pass, in their order; all but products are passed over.

    Returns:
        None where malloc does not tell.
    """
    if not hasattr(ctypes.CDLL(None), "mallinfo2"):
        return None
    products: dict[tuple[str, tuple[int, ...]], Product] = {}
    for found in filter(None, map(product, operations)):
        # The loss forms gradients in the forward pass: products of the same sides in another order.
        sides = tuple(sorted((found.rows, found.inner, found.columns)))
        products.setdefault((found.dtype, sides), _shortened(found))
    return int(in_child(functools.partial(_kept, list(products.values()))))


def _shortened(found: Product) -> Product:
    sides = (found.rows, found.inner, found.columns)
    rows, inner, columns = (min(side, _LONGEST if side == max(sides) else _OTHERS) for side in sides)
    return Product(rows, inner, columns, 1, found.dtype)


def _kept(products: list[Product]) -> int:
    torch.set_num_threads(1)
    tell = ctypes.CDLL(None).mallinfo2
    tell.restype = _Allocated
    operands = [
        [_ones(p, *sides) for sides in ((p.rows, p.inner), (p.columns, p.inner), (p.rows, p.columns))] for p in products
    ]
    before = tell()
    for x, weight, y in operands:
        torch.mm(x, weight.t(), out=y)
    for x, weight, y in reversed(operands):
        torch.mm(y, weight, out=x)
        torch.mm(y.t(), x, out=weight)
    after = tell()
    kept = after.heap + after.mapped - before.heap - before.mapped
    return round(kept / _ROUNDED) * _ROUNDED


def _ones(of: Product, *sides: int) -> Tensor:
    """Return a matrix of ones in memory that is not malloc's."""
    dtype = getattr(torch, of.dtype)
    return torch.frombuffer(mmap.mmap(-1, sides[0] * sides[1] * dtype.itemsize), dtype=dtype).view(sides).fill_(1)
