"""Tensors of pretrained files by slices; those stored in fp8 or mxfp4 as the values that they stand for.

Sources: the scales of fp8 are those of DeepSeek-V3's files (blocks of ``weight_block_size``) and of compressed-tensors
(a tensor or a channel); mxfp4 is the OCP Microscaling Formats specification 1.0 in gpt-oss's files.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch

from smp.json_input import read_object

Slices = tuple[slice, ...]

METHODS = ("fp8", "mxfp4", "compressed-tensors", "fbgemm_fp8")  # of a quantization_config, that may be read
FORMATS = ("float-quantized", "naive-quantized")  # of compressed-tensors
_SCALES = ("_scale_inv", "_scale")  # behind the name of a tensor in fp8
# Beside such a tensor.
_UNREAD = (".input_scale", ".input_scale_ub", ".output_scale", ".activation_scale", ".weight_shape")
_BLOCKS, _OF_BLOCKS = "_blocks", "_scales"  # of a tensor in mxfp4
_FP8 = {"F8_E4M3", "F8_E5M2"}
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_GROUP = 32  # values of mxfp4 with one scale


def tensor_names(keys: Collection[str], known: Collection[str] | None = None) -> dict[str, str]:
    """Return the names of tensors by the keys that have their values; scales are left out.

    Args:
        keys: of a file, or of several.
        known: of all files that they belong to; None: ``keys``.
    """
    known = {*keys} if known is None else known
    found = {}
    for key in keys:
        base = next((key.removesuffix(end) for end in _SCALES if key.endswith(end)), None)
        of_unread = next((key.removesuffix(end) for end in _UNREAD if key.endswith(end)), None)
        if base in known or (of_unread is not None and f"{of_unread}.weight" in known):
            continue
        if key.endswith(_OF_BLOCKS) and key.removesuffix(_OF_BLOCKS) + _BLOCKS in known:
            continue
        is_blocks = key.endswith(_BLOCKS) and key.removesuffix(_BLOCKS) + _OF_BLOCKS in known
        found[key] = key.removesuffix(_BLOCKS) if is_blocks else key
    return found


class StoredTensor:
    """A tensor of an open file; ``get_shape``, ``get_dtype`` and indexing are those of safetensors' slices.

    Attributes:
        is_decoded: it is stored in fp8 or mxfp4; what is read is fp32.
    """

    is_decoded = False

    def __init__(self, stored: Any):
        self._stored = stored

    def get_shape(self) -> list[int]:
        """Return its shape."""
        return self._stored.get_shape()

    def get_dtype(self) -> str:
        """Return its dtype, as safetensors names it."""
        return self._stored.get_dtype()

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._stored[index]


class _Decoded(StoredTensor):
    is_decoded = True

    def get_dtype(self) -> str:
        """Return that of the values."""
        return "F32"

    def __getitem__(self, index: Any) -> torch.Tensor:
        given = index if isinstance(index, tuple) else (index,)
        shape = self.get_shape()
        full = [*given, *(slice(None) for _ in shape[len(given) :])]
        return self._read(tuple(slice(*each.indices(size)[:2]) for each, size in zip(full, shape, strict=True)))

    def _read(self, index: Slices) -> torch.Tensor:
        raise NotImplementedError


class Fp8Tensor(_Decoded):
    """Values in fp8, and a scale of each block of a matrix.

    Attributes:
        blocks: rows and columns of a block; none for a vector.
        scale_key: name of the scales in the files.
        scale_dtype: of the scales there.
    """

    def __init__(self, stored: Any, scale_key: str, scales: torch.Tensor, blocks: tuple[int, int] | None):
        super().__init__(stored)
        self.scale_key, self.scale_dtype = scale_key, scales.dtype
        self._scales, shape = _as_fp32(scales), stored.get_shape()
        if len(shape) < 2:
            self.blocks: list[int] = []
            return
        if self._scales.dim() < 2:  # of the tensor, or of each row
            self._scales = self._scales.reshape(-1, 1) if len(shape) < 3 else self._scales.reshape(-1, 1, 1)
        sizes = zip(shape[-2:], self._scales.shape[-2:], blocks or (None, None), strict=True)
        self.blocks = [_block(size, count, asked) for size, count, asked in sizes]

    def _read(self, index: Slices) -> torch.Tensor:
        values, scales = self._stored[index].to(torch.float32), self._scales
        if not self.blocks:  # of a vector, for all or for each value
            return values * (scales if scales.numel() == 1 else scales.reshape(-1)[index])
        for axis, each in enumerate(index[:-2]):  # of experts
            scales = scales[(slice(None),) * axis + (each,)] if scales.shape[axis] > 1 else scales
        for axis, each, block in zip((-2, -1), index[-2:], self.blocks, strict=True):
            scales = scales.index_select(axis, torch.arange(each.start, each.stop) // block)
        return values * scales


class _Mxfp4(_Decoded):
    """Pairs of fp4 in bytes ``(experts, rows, groups, 16)`` and exponents; the matrices are transposed."""

    def __init__(self, stored: Any, exponents: Any):
        super().__init__(stored)
        self._exponents = exponents

    def get_shape(self) -> list[int]:
        """Return its shape, ``(experts, 32 x groups, rows)``."""
        *first, rows, groups, _ = self._stored.get_shape()
        return [*first, groups * _GROUP, rows]

    def _read(self, index: Slices) -> torch.Tensor:
        *first, columns, rows = index
        groups = slice(columns.start // _GROUP, -(-columns.stop // _GROUP))
        stored = (*first, rows, groups)
        values, exponents = self._stored[stored], self._exponents[stored].to(torch.int32) - 127
        table = torch.tensor(_FP4)
        pairs = torch.stack([table[(values & 0xF).int()], table[(values >> 4).int()]], -1).flatten(-2)
        full = torch.ldexp(pairs, exponents.unsqueeze(-1)).flatten(-2)
        begin = columns.start - groups.start * _GROUP
        return full[..., begin : begin + columns.stop - columns.start].transpose(-1, -2)


def _as_fp32(scales: torch.Tensor) -> torch.Tensor:
    # Of MXFP8, bytes are exponents.
    return (scales.float() - 127).exp2() if scales.dtype == torch.uint8 else scales.float()


def _block(size: int, count: int, asked: int | None) -> int:
    """Return how many of ``size`` values have one of ``count`` scales; the last ones may be fewer."""
    if asked is not None and -(-size // asked) == count:
        return asked
    return size // count if size % count == 0 else 1 << (-(-size // count) - 1).bit_length()


class OpenWeights:
    """An open file of weights, whose scales may be in another one of its directory."""

    def __init__(self, file: Path, stack: contextlib.ExitStack):
        self._file, self._stack = file, stack
        self._open: dict[Path, Any] = {}
        self._files = _Files.of(file, self._content(file))

    def keys(self) -> list[str]:
        """Return the names of the file's tensors."""
        return list(self._files.keys)

    def _content(self, file: Path) -> Any:
        from safetensors import safe_open

        if file not in self._open:
            self._open[file] = self._stack.enter_context(safe_open(file, framework="pt"))
        return self._open[file]

    def get_slice(self, name: str) -> StoredTensor:
        """Return a tensor, of which indexing reads what is asked for."""
        key, files = self._files.keys.get(name, name), self._files
        stored = self._content(self._file).get_slice(key)
        if key != name:
            exponents = name + _OF_BLOCKS
            return _Mxfp4(stored, self._content(files.file_of(exponents)).get_slice(exponents))
        if stored.get_dtype() in _FP8:
            for scale in (key + end for end in _SCALES if files.has(key + end)):
                scales = self._content(files.file_of(scale)).get_tensor(scale)
                return Fp8Tensor(stored, scale, scales, _blocks_of(self._file.parent))
        return StoredTensor(stored)

    def as_stored(self, key: str) -> Any:
        """Return a tensor of this file, or a scale of another one, as safetensors' slices."""
        return self._content(self._files.file_of(key)).get_slice(key)

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return all of a tensor."""
        found = self.get_slice(name)
        return found[()] if found.is_decoded else self._content(self._file).get_tensor(name)


@contextlib.contextmanager
def open_weights(file: Path) -> Iterator[OpenWeights]:
    """Open a safetensors file of pretrained weights."""
    with contextlib.ExitStack() as stack:
        yield OpenWeights(file, stack)


class _Files:
    """What is known of a file, and of the others with tensors of the same model.

    Attributes:
        keys: of the file's tensors, by their names.
    """

    _known: ClassVar[dict[tuple[Path, int, int], _Files]] = {}

    def __init__(self, file: Path, own: Collection[str]):
        self._file, self._own, self._others = file, {*own}, _index_of(file)
        known = self._own if not self._others else self._own | self._others.keys()
        self.keys = {name: key for key, name in tensor_names(own, known).items()}

    @classmethod
    def of(cls, file: Path, content: Any) -> _Files:
        """Return what is known of an open file, which is looked into once."""
        stat = file.stat()
        key = file, stat.st_mtime_ns, stat.st_size
        if key not in cls._known:
            cls._known[key] = cls(file, content.keys())
        return cls._known[key]

    def has(self, key: str) -> bool:
        """Return whether a file has such a key."""
        return key in self._own or key in self._others

    def file_of(self, key: str) -> Path:
        """Return the file that has it."""
        return self._file if key in self._own else self._file.parent / self._others[key]


def _index_of(file: Path) -> dict[str, str]:
    """Return the names of the files of all keys, by the index that names this one; without one, nothing."""
    for index in sorted(file.parent.glob("*.safetensors.index.json")):
        stat = index.stat()
        found = _entries(index, stat.st_mtime_ns, stat.st_size)
        if file.name in found[1]:
            return found[0]
    return {}


@functools.lru_cache(maxsize=4)
def _entries(index: Path, *_: int) -> tuple[dict[str, str], set[str]]:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):  # said where it is read
        entries = read_object(index)["weight_map"]
        return entries, {*entries.values()}
    return {}, set()


def _blocks_of(directory: Path) -> tuple[int, int] | None:
    with contextlib.suppress(OSError, ValueError, AttributeError, TypeError, LookupError):
        content = read_object(directory / "config.json")
        found = content.get("quantization_config") or content["text_config"]["quantization_config"]
        if "config_groups" in found:  # compressed-tensors'
            found = next(iter(found["config_groups"].values()))["weights"]
        first, second = found.get("weight_block_size") or found["block_structure"]
        return int(first), int(second)
    return None
