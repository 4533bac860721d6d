"""The tensors of an export's safetensors files: what each is made of, and in which file it is."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from smp.checkpoint.safetensors_io import DTYPES
from smp.errors import UserError
from smp.models.file_keys import FileKey
from smp.models.file_names import FileNames
from smp.models.stored_weights import open_weights
from smp.models.weight_files import weight_map

logger = logging.getLogger(__name__)
Dtype = torch.dtype | Mapping[str, torch.dtype] | None
Read = Callable[[str], torch.Tensor]


class FileTensor(NamedTuple):
    """A tensor of the files.

    Attributes:
        key: its name.
        shape, dtype: of the tensor.
        rows: parameters that it is made of, by name, each with its box.
        file: what it is copied from; None: it is made of parameters.
        encode: what makes it of the values of these parameters in fp32; None: its dtype.
        as_stored: whether it is copied as the file has it, and not the values that it stands for.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: list[tuple[str, FileKey]]
    file: Path | None = None
    encode: Callable[[torch.Tensor], torch.Tensor] | None = None
    as_stored: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def stored(name: str, tensor: torch.Tensor, dtype: Dtype) -> torch.dtype:
    """Return the dtype of a tensor in the files, given what was asked for."""
    asked = dtype if dtype is None or isinstance(dtype, torch.dtype) else dtype.get(name)
    return asked if asked is not None and tensor.is_floating_point() else tensor.dtype


def file_tensors(parameters: Mapping[str, torch.Tensor], names: FileNames, dtype: Dtype) -> list[FileTensor]:
    """Return the tensors of the files that parameters are written to, in the parameters' order.

    Raises:
        UserError: the parameters are not all of a tensor.
    """
    found: dict[str, FileTensor] = {}
    for name, tensor in parameters.items():
        for row in names.keys(name, tensor.shape):
            one = FileTensor(row.key, row.shape, stored(name, tensor, dtype), [])
            found.setdefault(row.key, one).rows.append((name, row))
    for each in found.values():
        if sum(math.prod(row.sizes) for _, row in each.rows) != math.prod(each.shape):
            names_of = ", ".join(name for name, _ in each.rows)
            raise UserError(
                f"{each.key} of the files is more than {names_of} of the model: mend the conversions of its family"
            )
    return list(found.values())


def passed_tensors(weights: Path, names: FileNames) -> list[FileTensor]:
    """Return the tensors of pretrained files that an export has as they are.

    Raises:
        UserError: the files cannot be read, or one is of a dtype that is not written.
    """
    found = []
    for key, file in weight_map(weights).items():
        if names.passes(key):
            with open_weights(file) as content:
                stored_as = content.get_slice(key)
                shape, dtype = tuple(stored_as.get_shape()), "BF16" if stored_as.is_decoded else stored_as.get_dtype()
            if dtype not in DTYPES:
                raise UserError(f"{file}: {key} is of {dtype}: convert it to one of {', '.join(DTYPES)}")
            found.append(FileTensor(key, shape, DTYPES[dtype], [], file))
    return found


def with_passed(tensors: Iterable[FileTensor], weights: Path, names: FileNames) -> list[FileTensor]:
    """Return the tensors of an export with those of pretrained files that it has as they are.

    The former under the keys of those files, which may be of an older form than transformers writes. Without files that
    have gone: a larger model's are missed before.

    Raises:
        UserError: as :func:`passed_tensors`.
    """
    if not weights.exists():
        logger.warning("%s has gone: its tensors of multi-token prediction, if it has any, are not written", weights)
        return [*tensors]
    keys = {names.module_key(key): key for key in weight_map(weights) if not names.passes(key)}
    own = [each._replace(key=keys.get(names.module_key(each.key), each.key)) for each in tensors]
    return [*own, *passed_tensors(weights, names)]


def in_files(tensors: Iterable[FileTensor], max_shard_bytes: int) -> dict[str, list[FileTensor]]:
    """Return tensors by file, in order, each file at most ``max_shard_bytes`` or one tensor."""
    groups: list[list[FileTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + tensor.nbytes > max_shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.nbytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]} if groups[0] else {}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, start=1)}


def copy_of(tensor: FileTensor) -> torch.Tensor:
    """Return the values of a tensor that is copied from a file."""
    assert tensor.file is not None
    with open_weights(tensor.file) as content:
        if tensor.as_stored:
            return content.as_stored(tensor.key)[...]
        return content.get_tensor(tensor.key).to(tensor.dtype)


def value_of(tensor: FileTensor, read: Read) -> torch.Tensor:
    """Return the values of a tensor that is made of parameters, on the CPU.

    Args:
        read: returns all of a parameter by name.
    """
    if tensor.encode is not None:
        plain = tensor._replace(dtype=torch.float32, shape=tensor.rows[0][1].shape, encode=None)
        return tensor.encode(value_of(plain, read))
    boxes = ((row, row.of_parameter(read(name).detach()).to("cpu", tensor.dtype)) for name, row in tensor.rows)
    if len(tensor.rows) == 1:
        return next(boxes)[1].contiguous()
    found = torch.empty(tensor.shape, dtype=tensor.dtype)
    for row, box in boxes:
        row.into(found, box)
    return found
