"""Pretrained weights into a sharded model: each rank reads only its slices out of safetensors files."""

from __future__ import annotations

import contextlib
import itertools
import logging
import operator
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from smp.delayed_init import fill_encoded_, initialize_parameter_, values_rule
from smp.errors import ConfigError, UserError
from smp.local_shards import local_part
from smp.models.added import added_parameters, encoded_parameters
from smp.models.family import Family
from smp.models.file_keys import FileKey, Slices, one_tensor
from smp.models.file_names import FileNames, buffers_of, parameters_of
from smp.models.registry import family_of
from smp.models.stored_weights import open_weights
from smp.models.text_part import names_in
from smp.models.weight_files import INDEX, find_weights, weight_map

logger = logging.getLogger(__name__)

_SHOWN = 5
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

Entry = tuple[FileKey, pathlib.Path]  # with the key that the file has
_Plan = dict[str, list[Entry]]  # by parameter name
_Box = tuple[str, FileKey]  # of a parameter, by its name

# Rows compared at a time.
_ROWS = 4096


def _some(names: Iterable[str]) -> str:
    names = sorted(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _equal(first: Entry, second: Entry) -> bool:
    """Return True if two tensors of the files hold the same values; in bounded memory."""
    with open_weights(first[1]) as one, open_weights(second[1]) as other:
        a, b = one.get_slice(first[0].key), other.get_slice(second[0].key)
        if a.get_shape() != b.get_shape():
            return False
        return all(torch.equal(a[row : row + _ROWS], b[row : row + _ROWS]) for row in range(0, a.get_shape()[0], _ROWS))


def _expected(names: FileNames, shapes: Mapping[str, Sequence[int]]) -> dict[str, list[_Box]]:
    """Return what the tensors of the files are, by the names that their keys are read as."""
    found: dict[str, list[_Box]] = {}
    for name, shape in shapes.items():
        for row in names.module_keys(name, shape):
            found.setdefault(row.key, []).append((name, row))
    for name, shape in shapes.items():  # some files have as one tensor what others have in pieces
        found.setdefault(name, [(name, one_tensor(name, shape))])
    return found


def _owners(key: str, names: FileNames, base: str, expected: Mapping[str, list[_Box]]) -> list[_Box]:
    """Return what a key of the files is; files of a model without its head leave out where that is."""
    name = names.module_key(key)
    return expected.get(name) or expected.get(f"{base}.{name}", [])


def _match_keys(
    model: nn.Module, family: Family, in_files: FileNames, files: dict[str, pathlib.Path]
) -> tuple[_Plan, list[str]]:
    """Find the keys of parameters and buffers. A tied one may be in the files once or, with the same values, twice."""
    parameters, added = parameters_of(model, remove_duplicate=False), added_parameters(model)
    canonical = {id(parameter): name for name, parameter in parameters_of(model).items()}
    names = {name: canonical[id(p)] for name, p in parameters.items() if name not in added}
    tensors = {name: parameters[name] for name in names} | dict(buffers_of(model))
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    shapes |= {name: how.shape for name, how in encoded_parameters(model).items()}
    expected, problems, unexpected = _expected(in_files, shapes), [], []
    plan: dict[str, dict[FileKey, Entry]] = {}
    for key, file in files.items():
        owners = _owners(key, in_files, family.base, expected)
        for owner, row in owners:
            entry = row._replace(key=key), file
            twin = plan.setdefault(names.get(owner, owner), {}).setdefault(row._replace(key=""), entry)
            if twin != entry and not _equal(twin, entry):
                problems.append(f"{twin[0].key} and {key} differ, but the model ties them: use --tie_word_embeddings 0")
        if not owners and not in_files.ignored(key):
            unexpected.append(key)
    missing: dict[str, str] = {}  # by key in the files
    for name in dict.fromkeys(names.get(name, name) for name in shapes):
        rows, found = in_files.keys(name, shapes[name]), plan.get(name, {})
        if one_tensor("", shapes[name]) not in found:
            missing |= {row.key: name for row in rows if row._replace(key="") not in found}
        elif len(found) > 1:
            problems.append(f"the weights have {name} as one tensor and as several: leave those of one form")
    if missing:
        tie = "tie_word_embeddings" in family.settings and len(missing) == 1
        tie = tie and {*missing.values()} <= {f"{family.head}.weight", f"{family.embedding}.weight"}
        advice = "or its head is its embedding, which is --tie_word_embeddings 1" if tie else "or incomplete"
        problems.append(f"the weights lack {_some(missing)}: they are of another model, {advice}")
    if unexpected:
        problems.append(f"the model has no parameter for {_some(unexpected)}: the weights are of another model")
    return {name: list(found.values()) for name, found in plan.items()}, problems


def _check_tensors(tensors: Mapping[str, torch.Tensor], plan: _Plan) -> list[str]:
    """Compare shapes and dtypes from the files' headers; logs a conversion."""
    shapes, dtypes, conversions = [], [], set()
    boxes = sorted(
        ((file, name, row) for name, entries in plan.items() for row, file in entries), key=operator.itemgetter(0)
    )
    for file, in_file in itertools.groupby(boxes, operator.itemgetter(0)):
        with open_weights(file) as content:
            for _, name, row in in_file:
                header = content.get_slice(row.key)
                shape, dtype = tuple(header.get_shape()), header.get_dtype()
                if shape != row.shape:
                    shapes.append(f"{row.key} {list(shape)} instead of {list(row.shape)}")
                if dtype not in _DTYPES:
                    dtypes.append(f"{row.key} ({dtype})")
                elif _DTYPES[dtype] != tensors[name].dtype:
                    conversions.add(f"{dtype} to {tensors[name].dtype}".replace("torch.", ""))
    if conversions:
        logger.info("pretrained weights are converted from %s", ", ".join(sorted(conversions)))
    problems = []
    if shapes:
        problems.append(f"weights of another shape: {_some(shapes)}; use the config that belongs to them")
    if dtypes:
        problems.append(f"weights of a dtype that cannot be trained: {_some(dtypes)}; use {', '.join(_DTYPES)}")
    return problems


def base_dtypes(tensors: Mapping[str, torch.Tensor], hf_config: Any, weights: pathlib.Path) -> dict[str, torch.dtype]:
    """Return the dtype that each tensor has in pretrained files, or else the config's; only headers are read.

    Args:
        tensors: parameters and saved buffers by name; those that neither says are left out.
        weights: they may not be there any more.
    """
    from safetensors import SafetensorError

    family, usual = family_of(hf_config), getattr(hf_config, "dtype", None)
    names = names_in(weights, family)
    expected = _expected(names, {name: tensor.shape for name, tensor in tensors.items()})
    found = dict.fromkeys(tensors, usual) if isinstance(usual, torch.dtype) else {}
    with contextlib.suppress(UserError, OSError, SafetensorError):
        for file in sorted(set(weight_map(weights).values())):
            with open_weights(file) as content:
                for key in content.keys():  # noqa: SIM118
                    stored = content.get_slice(key)
                    if (dtype := stored.get_dtype()) in _DTYPES and not stored.is_decoded:
                        owners = _owners(key, names, family.base, expected)
                        found |= dict.fromkeys((owner for owner, _ in owners), _DTYPES[dtype])
    return found


def find_tensors(model: nn.Module, weights: pathlib.Path, *, hf_config: Any) -> _Plan:
    """Return keys and files of every parameter, but those that techniques add, and saved buffer, by its name.

    Args:
        model: real or on the meta device.

    Raises:
        UserError: as :func:`load_pretrained_`.
    """
    family = family_of(hf_config)
    names = names_in(weights, family)
    names.check(weights, "train from initial values")
    if (file := find_weights(weights)).name != INDEX and weights.is_dir() and (weights / INDEX).exists():
        logger.warning("%s is read, and not %s beside it, as transformers does: delete the older one", file, INDEX)
    plan, problems = _match_keys(model, family, names, weight_map(weights))
    tensors = {**parameters_of(model), **dict(buffers_of(model))}
    tensors |= {n: torch.empty(how.shape, device="meta") for n, how in encoded_parameters(model).items()}
    problems += _check_tensors(tensors, plan)
    if problems:
        raise ConfigError([f"{weights}: {problem}" for problem in problems])
    return plan


def read_rows(weights: pathlib.Path, family: Family, name: str, rows: Sequence[int]) -> torch.Tensor | None:
    """Return rows of a matrix in the files, ``(rows, columns)``, by its name in the model; None: they have none."""
    names = names_in(weights, family)
    for key, file in weight_map(weights).items():
        found = names.module_key(key)
        if name in (found, f"{family.base}.{found}"):
            return _rows(key, file, rows)
    return None


def _rows(key: str, file: pathlib.Path, rows: Sequence[int]) -> torch.Tensor:
    with open_weights(file) as content:
        matrix = content.get_slice(key)
        return torch.cat([matrix[row : row + 1] for row in rows])


def read_tensor(entries: Sequence[Entry]) -> torch.Tensor:
    """Return all of a parameter, in the dtype of its files.

    Args:
        entries: of the parameter, as :func:`find_tensors` returns them.
    """
    row, file = entries[0]
    with open_weights(file) as content:
        if len(entries) == 1 and row == one_tensor(row.key, row.shape):
            return content.get_tensor(row.key)
        dtype = _DTYPES[content.get_slice(row.key).get_dtype()]
    shape = [
        max(ends) for ends in zip(*(map(operator.add, each.offsets, each.sizes) for each, _ in entries), strict=True)
    ]
    found = torch.empty(shape, dtype=dtype)
    _fill(found, (0,) * len(shape), entries)
    return found


def read_box(entries: Sequence[Entry], box: Slices, dtype: torch.dtype) -> torch.Tensor:
    """Return a part of a parameter, of which no more is read.

    Args:
        entries: of the parameter, as :func:`find_tensors` returns them.
        box: with starts and stops.
    """
    found = torch.empty([each.stop - each.start for each in box], dtype=dtype)
    _fill(found, tuple(each.start for each in box), entries)
    return found


def _fill(local: torch.Tensor, offsets: tuple[int, ...], entries: Sequence[Entry]) -> None:
    """Read a shard of a parameter, and no more: a file is opened once for all that the shard has of it."""
    overlaps = ((file, row, row.overlap(offsets, local.shape)) for row, file in entries)
    wanted = [(file, row, both) for file, row, both in overlaps if both is not None]
    for file in dict.fromkeys(file for file, *_ in wanted):
        # Opened for each parameter: what was read of a mapped file counts as this process's memory until it is closed.
        with open_weights(file) as content:
            for _, row, (inside, source) in (each for each in wanted if each[0] == file):
                local[inside].copy_(row.in_order(content.get_slice(row.key)[source]))


@torch.no_grad()
def load_pretrained_(model: nn.Module, weights: pathlib.Path, *, hf_config: Any) -> None:
    """Fill every parameter, but those that techniques add, and saved buffer from a Hugging Face checkpoint, in place.

    No rank holds more than its shards and one slice. Keys are Hugging Face's, with or without the base model's prefix;
    old buffers are skipped; a head that is tied to the embedding may be left out. Every rank needs to see the files.

    Args:
        model: parameters allocated, plain or DTensor with ``Shard`` and ``Replicate`` placements.
        weights: a ``.safetensors`` file, an index JSON, or a directory of them.

    Raises:
        UserError: files that cannot be read slice by slice, or that do not fit the model: missing and unexpected keys,
            shapes and dtypes, all reported together before any parameter is changed.
    """
    tensors: dict[str, torch.Tensor] = {**parameters_of(model), **dict(buffers_of(model))}
    unallocated = [name for name, tensor in tensors.items() if tensor.is_meta]
    if unallocated:
        raise UserError(f"parameter {unallocated[0]} is on the meta device: allocate it before loading weights")
    encoded, found = encoded_parameters(model), find_tensors(model, weights, hf_config=hf_config)
    for name, each in added_parameters(model).items():
        if each.initial.rows_of is not None:
            source, rows = each.initial.rows_of
            ((row, file),) = found[source]
            initialize_parameter_(tensors[name], values_rule(_rows(row.key, file, rows)), seed=0, name=name)
    for name, entries in found.items():
        if name in encoded:
            fill_encoded_(tensors[name], encoded[name], read_tensor(entries))
            continue
        local, offsets = local_part(tensors[name])
        if local.numel():
            _fill(local, offsets, entries)
