"""Cases for the collectives: values that every rank can compute for every other, and tensors of all layouts.

A failing case prints itself, and can be run alone.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int32, torch.int64, torch.uint8)
REDUCED = {
    "SUM": (*FLOATS, *INTEGERS, torch.bool),
    "AVG": FLOATS,
    "PRODUCT": (*FLOATS, *INTEGERS, torch.bool),
    "MIN": (*FLOATS, *INTEGERS, torch.bool),
    "MAX": (*FLOATS, *INTEGERS, torch.bool),
    "BAND": (*INTEGERS, torch.bool),
    "BOR": (*INTEGERS, torch.bool),
    "BXOR": (*INTEGERS, torch.bool),
}
MOVERS = (
    "all_gather_single", "all_gather_list", "all_gather_uneven", "all_gather_coalesced", "all_gather_single_coalesced",
    "broadcast",
)  # fmt: skip
REDUCERS = (
    "reduce_scatter_single", "reduce_scatter_list", "reduce_scatter_uneven", "reduce_scatter_single_coalesced",
    "all_reduce", "all_reduce_coalesced",
)  # fmt: skip
# gloo takes neither tensors of different sizes nor these dtypes.
NOT_IN_GLOO = ("all_gather_uneven", "reduce_scatter_uneven", torch.float8_e4m3fn)
SIZES = (
    "0", "1", "odd", "page-1", "page", "page+1", "piece-1", "piece+1", "chunk-1", "chunk", "chunk+1", "chunks",
)  # fmt: skip
LAYOUTS = ("contiguous", "offset", "strided", "transposed", "channels_last", "negated", "expanded")
DIMENSIONS: dict[str, Sequence[Any]] = {
    "form": (*MOVERS, *REDUCERS),
    "dtype": (*FLOATS, *INTEGERS, torch.bool, torch.complex64, torch.float8_e4m3fn),
    "reduction": tuple(REDUCED),
    "size": SIZES,
    "layout": LAYOUTS,
    "in_place": (False, True),
    "asynchronous": (False, True),
    "whole": (False, True),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        form: see ``MOVERS`` and ``REDUCERS``.
        dtype: of the tensors.
        reduction: one of ``REDUCED``; SUM in a form that only moves data.
        size: one of ``SIZES``, or a number of elements.
        layout: of the outputs and, unless in place, the inputs.
        in_place: the input is a part of the output, or the other way round.
        asynchronous: whether the call returns before it is done.
        whole: small whole numbers, whose sums do not depend on the order.
        seed: of the values, and of the root.
        plain: all tensors contiguous and apart after all, with the same values.
    """

    form: str
    dtype: torch.dtype = torch.float32
    reduction: str = "SUM"
    size: str | int = "odd"
    layout: str = "contiguous"
    in_place: bool = False
    asynchronous: bool = False
    whole: bool = True
    seed: int = 0
    plain: bool = False

    @property
    def possible(self) -> bool:
        """Whether there is such a call."""
        if self.form in MOVERS and self.reduction != "SUM":
            return False
        if self.form in REDUCERS and self.dtype not in REDUCED[self.reduction]:
            return False
        if self.form in ("broadcast", "all_reduce", "all_reduce_coalesced") and self.in_place:
            return False  # they always are
        if self.in_place and self.layout not in ("contiguous", "offset"):
            return False  # a part of the tensor must be such a tensor
        return self.layout != "negated" or self.dtype is torch.float32

    @property
    def own_memory(self) -> bool:
        """Whether the outputs share no memory with the inputs."""
        return self.plain or not self.in_place

    def elements(self, world: int, chunk: int) -> int:
        """How many elements one rank has. ``chunk``: bytes of a slot."""
        if isinstance(self.size, int):
            return self.size
        piece = chunk // world // 64 * 64  # what a slot holds for one rank
        bytes_of = {"page": 4096, "piece": piece, "chunk": chunk, "chunks": 3 * chunk + chunk // 3}
        if self.size in ("0", "1", "odd"):
            return {"0": 0, "1": 1, "odd": 1023}[self.size]
        return bytes_of[self.size.rstrip("+-1")] // self.dtype.itemsize + {"-": -1, "+": 1}.get(self.size[-2], 0)

    def supported_by_gloo(self) -> bool:
        if self.reduction == "SUM" and self.dtype is torch.bool and self.form in REDUCERS:
            return False  # it adds bytes: True and True is 2
        return self.form not in NOT_IN_GLOO and self.dtype not in NOT_IN_GLOO

    def order_matters(self) -> bool:
        """Whether the result depends on the order in which the ranks' parts are taken."""
        return self.form in REDUCERS and self.dtype.is_floating_point and not self.whole


def all_cases(**fixed: Any) -> Iterator[Case]:
    """Every possible case with these values."""
    lists = [[fixed[name]] if name in fixed else values for name, values in DIMENSIONS.items()]
    for seed, values in enumerate(itertools.product(*lists)):
        case = Case(**dict(zip(DIMENSIONS, values, strict=True)), seed=seed)
        if case.possible:
            yield case


def covering_cases(seed: int) -> list[Case]:
    """Cases in which every possible pair of values of two dimensions occurs."""
    rng = random.Random(seed)
    cases: list[Case] = []
    covered: set[tuple[Any, ...]] = set()
    names = list(DIMENSIONS)
    for a, b in itertools.combinations(range(len(names)), 2):
        for pair in itertools.product(DIMENSIONS[names[a]], DIMENSIONS[names[b]]):
            if (a, b, pair) in covered:
                continue
            for _ in range(300):
                values = [rng.choice(DIMENSIONS[name]) for name in names]
                values[a], values[b] = pair
                case = Case(**dict(zip(names, values, strict=True)), seed=len(cases))
                if case.possible:
                    cases.append(case)
                    covered |= {(i, j, (values[i], values[j])) for i, j in itertools.combinations(range(len(names)), 2)}
                    break
    return cases


# --- values and tensors


def values(case: Case, rank: int, count: int, part: int = 0) -> torch.Tensor:
    """What a rank gives: 1-D, contiguous."""
    generator = torch.Generator().manual_seed(1_000_003 * case.seed + 1009 * rank + part)
    dtype, whole = case.dtype, case.whole
    if dtype is torch.float8_e4m3fn:
        return torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8).view(dtype)
    if dtype in (torch.bool, torch.uint8):
        return torch.randint(0, 2 if dtype is torch.bool else 256, (count,), generator=generator).to(dtype)
    if dtype.is_complex:
        return torch.randn(count, generator=generator, dtype=dtype)
    if whole or not dtype.is_floating_point:
        # A product of 8 stays exact in every dtype, a sum too.
        low, high = (1, 3) if case.reduction == "PRODUCT" else (-4, 5)
        return torch.randint(low, high, (count,), generator=generator).to(dtype)
    return torch.randn(count, generator=generator).to(dtype)


class Laid:
    """A tensor in some layout, inside memory of which the rest must not be touched.

    Args:
        elements: in logical order.
        layout: one of ``LAYOUTS``.
    """

    def __init__(self, elements: torch.Tensor, layout: str):
        count = elements.numel()
        rows = next((d for d in (2, 3, 5, 7, 11, 13) if count and count % d == 0), 1)
        room = {"offset": count + 10, "strided": 2 * count + 1, "expanded": 1}.get(layout, count)
        memory = poison(room, torch.complex64 if layout == "negated" else elements.dtype, 90)
        if layout == "offset":
            view = memory[3 : 3 + count]
        elif layout == "strided":
            view = memory[1 : 1 + 2 * count : 2]
        elif layout == "transposed":
            view = memory.view(count // rows, rows).t()
        elif layout == "channels_last":
            view = memory.as_strided((1, rows, count // rows, 1), (count, 1, rows, rows))
        elif layout == "expanded":
            view = memory.expand(count)
        elif layout == "negated":
            view = memory.conj().imag  # strided, and its memory holds the opposite numbers
        else:
            view = memory
        self.memory, self.view, self._layout = memory, view, layout
        self.put(elements)
        self._expected = memory.clone()

    def put(self, elements: torch.Tensor) -> None:
        """Write all elements."""
        if self._layout == "expanded":
            self.memory.copy_(elements[:1]) if len(elements) else None
        else:
            self.view.copy_(elements.view(self.view.shape))

    def expect(self, elements: torch.Tensor) -> None:
        """What the elements must be in the end."""
        now = self.memory.clone()
        self.put(elements)
        self._expected = self.memory.clone()
        self.memory.copy_(now)

    def right(self) -> bool:
        """Whether every byte of the memory is as expected."""
        return same_bits(self.memory, self._expected)


def poison(count: int, dtype: torch.dtype, byte: int) -> torch.Tensor:
    """Memory filled with a byte. A bool has only two."""
    return torch.full((count * dtype.itemsize,), 1 if dtype is torch.bool else byte, dtype=torch.uint8).view(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two contiguous tensors hold the same bytes."""
    return a.dtype == b.dtype and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def reduced(parts: Sequence[torch.Tensor], name: str) -> torch.Tensor:
    """The parts reduced in rank order."""
    if parts[0].dtype is torch.bool:
        kind = {"SUM": "or", "MAX": "or", "BOR": "or", "BXOR": "xor"}.get(name, "and")
        return functools.reduce(getattr(torch, f"logical_{kind}"), parts)
    functions: dict[str, Callable[..., torch.Tensor]] = {
        "SUM": torch.add, "AVG": torch.add, "PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum,
        "BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor,
    }  # fmt: skip
    total = functools.reduce(functions[name], parts)
    return total / len(parts) if name == "AVG" else total
