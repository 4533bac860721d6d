"""Element-wise reductions of CPU tensors, the same bits on every rank because every rank adds in rank order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.distributed import ReduceOp

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_INTEGERS = (torch.int32, torch.int64, torch.uint8, torch.int8, torch.int16)
_NUMBERS = _FLOATS + _INTEGERS

# name: (the function, the dtypes it takes). bool is added as "or" and multiplied as "and".
_FUNCTIONS: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.dtype, ...]]] = {
    "SUM": (torch.add, (*_NUMBERS, torch.bool)),
    "AVG": (torch.add, _FLOATS),
    "PRODUCT": (torch.mul, (*_NUMBERS, torch.bool)),
    "MIN": (torch.minimum, (*_NUMBERS, torch.bool)),
    "MAX": (torch.maximum, (*_NUMBERS, torch.bool)),
    "BAND": (torch.bitwise_and, (*_INTEGERS, torch.bool)),
    "BOR": (torch.bitwise_or, (*_INTEGERS, torch.bool)),
    "BXOR": (torch.bitwise_xor, (*_INTEGERS, torch.bool)),
}


_SUM = ReduceOp.SUM


class Reduction:
    """One reduction over a fixed number of ranks.

    Args:
        name: ``SUM``, ``AVG``, ``PRODUCT``, ``MIN``, ``MAX``, ``BAND``, ``BOR`` or ``BXOR``.
        ranks: how many parts there are in all, for the average.
    """

    def __init__(self, name: str, ranks: int):
        self.name, self.ranks = name, ranks
        self._function = _FUNCTIONS[name][0]

    def combine(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Reduce ``parts`` (two or more, 1-D, equal length) from the first to the last; ``out`` may be one of the
        first two."""
        self._function(parts[0], parts[1], out=out)
        for part in parts[2:]:
            self._function(out, part, out=out)

    def finish(self, out: torch.Tensor) -> None:
        """Divide an average by the number of ranks, when every rank's part is in."""
        if self.name == "AVG":
            out.div_(self.ranks)


def reduction_name(op: ReduceOp) -> str:
    """Return ``SUM`` and so on for an option's ``reduceOp`` or for its plain kind."""
    # The order matters: a kind equals a ReduceOp only from the ReduceOp's side.
    if op == _SUM:
        return "SUM"
    return next((name for name in _FUNCTIONS if op == getattr(ReduceOp, name)), "PREMUL_SUM")


def supported(name: str, dtype: torch.dtype) -> bool:
    """Return whether :class:`Reduction` takes this dtype."""
    return name in _FUNCTIONS and dtype in _FUNCTIONS[name][1]
