"""Tensors of safetensors files, and what each is of the parameters of a model, as data."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, TypeVar

import torch

Slices = tuple[slice, ...]
T = TypeVar("T")


class FileKey(NamedTuple):
    """A tensor of the files, and the box of a parameter that it contains.

    A parameter has one or more, whose boxes cover it; several parameters may be boxes of one tensor of the files.

    Attributes:
        key: name of the tensor in the files.
        shape: of the tensor.
        offsets, sizes: of the box, in the parameter.
        start: where the box begins in the tensor.
        is_piece: whether the tensor lacks the parameter's first axis, of which the box is one index.
        transposed: two axes of the tensor that the parameter has swapped.
        step: along each axis of the tensor, between elements of the box; empty: 1.
    """

    key: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: tuple[int, ...]
    is_piece: bool = False
    transposed: tuple[int, int] | None = None
    step: tuple[int, ...] = ()

    def overlap(self, offsets: Sequence[int], sizes: Sequence[int]) -> tuple[Slices, Slices] | None:
        """Return what a shard has of the box, as slices of the shard and of the tensor; None: nothing.

        Args:
            offsets, sizes: of the shard, in the parameter.
        """
        inside, source = [], []
        for first, size, begin, length in zip(offsets, sizes, self.offsets, self.sizes, strict=True):
            low, high = max(first, begin), min(first + size, begin + length)
            if low >= high:
                return None
            inside.append(slice(low - first, high - first))
            source.append(slice(low - begin, high - begin))
        return tuple(inside), self._in_tensor(_swapped(source[self.is_piece :], self.transposed))

    def _in_tensor(self, box: Iterable[slice]) -> Slices:
        """Return where a part of the box is in the tensor, whose axes it has."""
        axes = zip(box, self.start, self.step or (1,) * len(self.start), strict=True)
        return tuple(
            slice(at + each.start * step, at + (each.stop - 1) * step + 1, None if step == 1 else step)
            for each, at, step in axes
        )

    def of_parameter(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the box of a full parameter, as a view with the tensor's axes."""
        box = parameter[tuple(slice(at, at + size) for at, size in zip(self.offsets, self.sizes, strict=True))]
        return self.in_order(box[0] if self.is_piece else box)

    def in_order(self, values: torch.Tensor) -> torch.Tensor:
        """Return a part of the tensor with its axes as the parameter has them, or the other way round."""
        return values if self.transposed is None else values.transpose(*self.transposed)

    @property
    def in_tensor(self) -> Slices:
        """Where the box is in the tensor."""
        sizes = _swapped(self.sizes[self.is_piece :], self.transposed)
        return self._in_tensor(slice(0, size) for size in sizes)

    def into(self, tensor: torch.Tensor, box: torch.Tensor) -> None:
        """Copy what :meth:`of_parameter` has returned to its part of the tensor."""
        tensor[self.in_tensor].copy_(box)


def _swapped(axes: Iterable[T], transposed: tuple[int, int] | None) -> tuple[T, ...]:
    found = list(axes)
    if transposed is not None:
        first, second = transposed
        found[first], found[second] = found[second], found[first]
    return tuple(found)


def one_tensor(key: str, shape: Sequence[int]) -> FileKey:
    """Return the key of a parameter that is one tensor of the files, as it is."""
    zeros = (0,) * len(shape)
    return FileKey(key, tuple(shape), zeros, tuple(shape), zeros)


@dataclasses.dataclass(frozen=True)
class Conversion:
    """Parameters that are not one tensor of the files each, as transformers' ``WeightConverter``.

    One of ``files`` and ``parameters`` has a single entry. Several ``files`` are parts of a parameter along ``axis``
    (``Concatenate``), several ``parameters`` of a tensor of the files (``Chunk``), as ``torch.chunk`` makes them.

    Attributes:
        files: parts of the keys of tensors; with a ``*``, each index of the parameter's first axis is a tensor
            (``MergeModulelist``).
        parameters: what parameters have instead in their names.
        axis: of the parameter.
        transposed: two axes of the tensors that the parameters have swapped (``Transpose``).
        prefixes: only names that begin with one of these are meant.
        joined: the matrices of the parameter's first axis are a single one of the files: its rows one matrix after the
            other, or its columns the first of each matrix, then the second of each.
    """

    files: tuple[str, ...]
    parameters: tuple[str, ...]
    axis: int = 0
    transposed: tuple[int, int] | None = None
    prefixes: tuple[str, ...] = ("",)
    joined: Literal["rows", "columns"] | None = None

    def keys(self, name: str, shape: Sequence[int]) -> list[FileKey]:
        """Return the tensors that a parameter is made of; none: it is another parameter."""
        if not name.startswith(self.prefixes):
            return []
        for number, parameter in enumerate(self.parameters):
            # It ends where a part of the name does, as in transformers: experts.up_proj is not experts.up_proj_bias.
            if found := re.search(re.escape(parameter) + r"(?!\w)", name):
                before, after = name[: found.start()], name[found.end() :]
                return [each._replace(key=before + each.key + after) for each in self._file_keys(number, shape)]
        return []

    def _file_keys(self, number: int, shape: Sequence[int]) -> Iterator[FileKey]:
        """Yield the keys of the parameter ``number``; keys are the entries of ``files``."""
        if self.joined is not None:
            yield from self._joined_keys(*shape)
            return
        is_piece, parts = "*" in self.files[0], len(self.files)
        width, many = -(-shape[self.axis] // parts), len(self.parameters)
        for index, part in itertools.product(range(shape[0] if is_piece else 1), range(parts)):
            offsets, sizes, start = [0] * len(shape), list(shape), [0] * len(shape)
            if parts > 1:
                offsets[self.axis], sizes[self.axis] = part * width, min(width, shape[self.axis] - part * width)
            if is_piece:
                offsets[0], sizes[0] = index, 1
            stored = list(sizes)
            if many > 1:
                start[self.axis], stored[self.axis] = number * shape[self.axis], many * shape[self.axis]
            yield FileKey(
                self.files[part].replace("*", str(index)),
                _swapped(stored[is_piece:], self.transposed),
                tuple(offsets),
                tuple(sizes),
                _swapped(start[is_piece:], self.transposed),
                is_piece,
                self.transposed,
            )

    def _joined_keys(self, count: int, rows: int, columns: int) -> Iterator[FileKey]:
        for index in range(count):
            box = FileKey(
                self.files[0], (count * rows, columns), (index, 0, 0), (1, rows, columns), (index * rows, 0), True
            )
            if self.joined == "columns":
                box = box._replace(shape=(rows, columns * count), start=(0, index), step=(1, count))
            yield box
