"""Tensors of an export in fp8, in blocks with a scale each, where those of the pretrained files are.

The form is that of DeepSeek-V3's files (``weight_scale_inv``), the values those of transformers' ``Fp8Quantize``
(integrations/finegrained_fp8.py). Its blocks divide a matrix; here the last ones may be smaller, as in DeepSeek-V3's.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from smp.checkpoint.file_tensors import FileTensor
from smp.errors import UserError
from smp.json_input import read_object
from smp.models.file_names import FileNames
from smp.models.stored_weights import Fp8Tensor, open_weights
from smp.models.weight_files import directory_of, weight_map

_DTYPE = torch.float8_e4m3fn
_SCALE = "_scale_inv"


@dataclasses.dataclass(frozen=True)
class Fp8Form:
    """How pretrained files have tensors in fp8.

    Attributes:
        config: their ``quantization_config``.
        blocks: rows and columns of a block.
        tensors: the file of each tensor in fp8, by the name that its key is read as.
    """

    config: dict[str, Any]
    blocks: tuple[int, int]
    tensors: Mapping[str, Path]

    @property
    def by_powers(self) -> bool:
        """Whether scales are powers of 2."""
        return self.config.get("scale_fmt") == "ue8m0"


def form_of(word: str, weights: Path | str | None, names: FileNames, *, text_only: bool) -> Fp8Form:
    """Return the form of pretrained files, which an export is to have.

    Args:
        word: what was asked for.
        weights: the files, or their directory.
        names: of what they contain.
        text_only: whether the text model of a larger one is written alone.

    Raises:
        UserError: something else was asked for, or the files are not in fp8 in blocks.
    """
    if word != "fp8":
        raise UserError(f"quantize {word!r} is not written: give fp8, or leave it out")
    if weights is None or text_only:
        why = "and the text model is written alone" if text_only else "and this one has none"
        raise UserError(f"quantize fp8 is of a model with pretrained files in fp8, {why}: leave it out")
    config = _quantization_config(Path(weights))
    blocks = config.get("weight_block_size")
    if config.get("quant_method") != "fp8" or not (isinstance(blocks, list) and len(blocks) == 2):
        found = config.get("quant_method", "not quantized")
        raise UserError(
            f"quantize fp8: {weights} is {found}, and fp8 is written in blocks (weight_block_size) where the "
            f"pretrained files have it so: leave it out"
        )
    tensors, files = {}, weight_map(Path(weights))
    for file in sorted(set(files.values())):
        with open_weights(file) as content:
            for key in content.keys():  # noqa: SIM118
                stored = content.get_slice(key)
                if not isinstance(stored, Fp8Tensor):
                    continue
                form = stored.scale_key, stored.scale_dtype, stored.blocks, content.as_stored(key).get_dtype()
                if form != (key + _SCALE, torch.float32, blocks, "F8_E4M3"):
                    raise UserError(
                        f"quantize fp8: {key} of {file} is not in blocks of {blocks[0]} x {blocks[1]} of e4m3 with "
                        f"scales in fp32, which alone is written: leave it out"
                    )
                tensors[names.module_key(key)] = file
    return Fp8Form(config, (blocks[0], blocks[1]), tensors)


def _quantization_config(weights: Path) -> dict[str, Any]:
    directory = directory_of(weights)
    assert directory is not None
    try:
        content = read_object(directory / "config.json")
    except (OSError, ValueError) as error:
        raise UserError(f"quantize fp8: the config.json of {weights} cannot be read ({error}): leave it out") from None
    text = content.get("text_config")
    found = content.get("quantization_config") or (text if isinstance(text, dict) else {}).get("quantization_config")
    return found if isinstance(found, dict) else {}


def in_fp8(tensors: Iterable[FileTensor], form: Fp8Form, names: FileNames) -> list[FileTensor]:
    """Return the tensors of an export, values in fp8 and their scales where the pretrained files have them.

    What is copied from these stays as it is.

    Raises:
        UserError: the export has a tensor otherwise than they have it, such as of another number of experts.
    """
    found, left = [], dict(form.tensors)
    for each in tensors:
        file = left.pop(names.module_key(each.key), None)
        if file is None:
            found.append(each)
        elif each.file is not None:
            with open_weights(file) as content:
                scale = tuple(content.as_stored(each.key + _SCALE).get_shape())
            values = each._replace(dtype=_DTYPE, as_stored=True)
            found += [values, values._replace(key=each.key + _SCALE, shape=scale, dtype=torch.float32)]
        else:
            found += _made(each, form)
    if left:
        raise UserError(f"quantize fp8: the files have {next(iter(left))} in another form than an export: leave it out")
    return found


def _made(tensor: FileTensor, form: Fp8Form) -> list[FileTensor]:
    *first, rows, columns = tensor.shape
    scale = (*first, -(-rows // form.blocks[0]), -(-columns // form.blocks[1]))
    values, scales = (functools.partial(_part, part, blocks=form.blocks, by_powers=form.by_powers) for part in (0, 1))
    return [
        tensor._replace(dtype=_DTYPE, encode=values),
        tensor._replace(key=tensor.key + _SCALE, shape=scale, dtype=torch.float32, encode=scales),
    ]


def _part(part: int, value: torch.Tensor, **form: Any) -> torch.Tensor:
    return quantised(value, **form)[part]


def quantised(value: torch.Tensor, *, blocks: tuple[int, int], by_powers: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return matrices in fp8, and what each block is multiplied by to read it.

    Args:
        value: ``(..., rows, columns)`` in fp32.
        blocks: rows and columns of a block.
        by_powers: round these factors up to powers of 2.

    Returns:
        Values as ``value``, and factors ``(..., row blocks, column blocks)`` in fp32.
    """
    (rows, columns), (height, width), most = value.shape[-2:], blocks, torch.finfo(_DTYPE).max
    padded = F.pad(value, (0, -columns % width, 0, -rows % height))
    tiles = padded.unflatten(-1, (-1, width)).unflatten(-3, (-1, height))
    largest = tiles.abs().amax((-3, -1))
    largest = torch.where(largest > 0, largest.clamp(min=most * torch.finfo(torch.float32).tiny), 0.0)
    scales = torch.where(largest > 0, most / largest, 1.0)
    inverse = 1.0 / scales
    if by_powers:
        inverse = torch.pow(2.0, torch.ceil(torch.log2(inverse.clamp(min=torch.finfo(torch.float32).tiny))))
        scales = 1.0 / inverse
    found = (tiles * scales[..., :, None, :, None]).clamp(-most, most).to(_DTYPE)
    return found.reshape(padded.shape)[..., :rows, :columns].contiguous(), inverse
