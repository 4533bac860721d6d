"""Pretrained weights into a sharded model: each rank reads only its slices out of safetensors files."""

from __future__ import annotations

import contextlib
import logging
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from smp.delayed_init import fill_encoded_, initialize_parameter_, values_rule
from smp.errors import ConfigError, UserError
from smp.mesh import local_part
from smp.models.added import added_parameters, encoded_parameters
from smp.models.family import Family
from smp.models.file_names import buffers_of, parameters_of
from smp.models.registry import family_of
from smp.models.weight_files import INDEX, find_weights, weight_map

logger = logging.getLogger(__name__)

_SHOWN = 5
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

_Entry = tuple[str, pathlib.Path]  # key in the file, file
_Plan = dict[str, _Entry]  # by parameter name

# Rows compared at a time.
_ROWS = 4096


def _some(names: Iterable[str]) -> str:
    names = sorted(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _equal(first: _Entry, second: _Entry) -> bool:
    """Return True if two tensors of the files hold the same values; in bounded memory."""
    from safetensors import safe_open

    with safe_open(first[1], framework="pt") as one, safe_open(second[1], framework="pt") as other:
        a, b = one.get_slice(first[0]), other.get_slice(second[0])
        if a.get_shape() != b.get_shape():
            return False
        return all(torch.equal(a[row : row + _ROWS], b[row : row + _ROWS]) for row in range(0, a.get_shape()[0], _ROWS))


def _match_keys(model: nn.Module, family: Family, files: dict[str, pathlib.Path]) -> tuple[_Plan, list[str]]:
    """Find the keys of parameters and buffers. A tied one may be in the files once or, with the same values, twice."""
    parameters, added = parameters_of(model, remove_duplicate=False), added_parameters(model)
    canonical = {id(parameter): name for name, parameter in parameters_of(model).items()}
    names = {name: canonical[id(p)] for name, p in parameters.items() if name not in added}
    names |= {name: name for name, _ in buffers_of(model)}
    plan: _Plan = {}
    unexpected, problems = [], []
    for key, file in files.items():
        name = family.file_names.module_key(key)
        if name not in names and f"{family.base}.{name}" in names:
            name = f"{family.base}.{name}"  # a checkpoint of the model without its head
        if name in names:
            twin = plan.setdefault(names[name], (key, file))
            if twin != (key, file) and not _equal(twin, (key, file)):
                problems.append(f"{twin[0]} and {key} differ, but the model ties them: use --tie_word_embeddings 0")
        elif not family.file_names.ignored(key):
            unexpected.append(key)
    missing = [name for name in dict.fromkeys(names.values()) if name not in plan]
    if missing:
        tie = "tie_word_embeddings" in family.settings and len(missing) == 1
        tie = tie and missing[0] in (f"{family.head}.weight", f"{family.embedding}.weight")
        advice = "or its head is its embedding, which is --tie_word_embeddings 1" if tie else "or incomplete"
        lacking = _some(map(family.file_names.file_key, missing))
        problems.append(f"the weights lack {lacking}: they are of another model, {advice}")
    if unexpected:
        problems.append(f"the model has no parameter for {_some(unexpected)}: the weights are of another model")
    return plan, problems


def _check_tensors(tensors: dict[str, torch.Tensor], plan: _Plan) -> list[str]:
    """Compare shapes and dtypes from the files' headers; logs a conversion."""
    from safetensors import safe_open

    shapes, dtypes, conversions = [], [], set()
    for file in sorted({file for _, file in plan.values()}):
        with safe_open(file, framework="pt") as content:
            for name, (key, home) in plan.items():
                if home != file:
                    continue
                header, tensor = content.get_slice(key), tensors[name]
                shape, dtype = tuple(header.get_shape()), header.get_dtype()
                if shape != tuple(tensor.shape):
                    shapes.append(f"{key} {list(shape)} instead of {list(tensor.shape)}")
                if dtype not in _DTYPES:
                    dtypes.append(f"{key} ({dtype})")
                elif _DTYPES[dtype] != tensor.dtype:
                    conversions.add(f"{dtype} to {tensor.dtype}".replace("torch.", ""))
    if conversions:
        logger.info("pretrained weights are converted from %s", ", ".join(sorted(conversions)))
    problems = []
    if shapes:
        problems.append(f"weights of another shape: {_some(shapes)}; use the config that belongs to them")
    if dtypes:
        problems.append(f"weights of a dtype that cannot be trained: {_some(dtypes)}; use {', '.join(_DTYPES)}")
    return problems


def base_dtypes(names: Iterable[str], hf_config: Any, weights: pathlib.Path) -> dict[str, torch.dtype]:
    """Return the dtype that each tensor has in pretrained files, or else the config's; only headers are read.

    Args:
        names: of parameters and saved buffers; those that neither says are left out.
        weights: they may not be there any more.
    """
    from safetensors import SafetensorError, safe_open

    names, family = set(names), family_of(hf_config)
    usual = getattr(hf_config, "dtype", None)
    found = dict.fromkeys(names, usual) if isinstance(usual, torch.dtype) else {}
    with contextlib.suppress(UserError, OSError, SafetensorError):
        for file in sorted(set(weight_map(weights).values())):
            with safe_open(file, framework="pt") as content:
                for key in content.keys():  # noqa: SIM118
                    name, dtype = family.file_names.module_key(key), content.get_slice(key).get_dtype()
                    name = name if name in names else f"{family.base}.{name}"
                    if name in names and dtype in _DTYPES:
                        found[name] = _DTYPES[dtype]
    return found


def find_tensors(model: nn.Module, weights: pathlib.Path, *, hf_config: Any) -> _Plan:
    """Return key and file of every parameter, but those that techniques add, and saved buffer, by its name.

    Args:
        model: real or on the meta device.

    Raises:
        UserError: as :func:`load_pretrained_`.
    """
    family = family_of(hf_config)
    family.file_names.check(weights, "train from initial values")
    if (file := find_weights(weights)).name != INDEX and weights.is_dir() and (weights / INDEX).exists():
        logger.warning("%s is read, and not %s beside it, as transformers does: delete the older one", file, INDEX)
    plan, problems = _match_keys(model, family, weight_map(weights))
    tensors = {**parameters_of(model), **dict(buffers_of(model))}
    tensors |= {n: torch.empty(how.shape, device="meta") for n, how in encoded_parameters(model).items()}
    problems += _check_tensors(tensors, plan)
    if problems:
        raise ConfigError([f"{weights}: {problem}" for problem in problems])
    return plan


def read_rows(weights: pathlib.Path, family: Family, name: str, rows: Sequence[int]) -> torch.Tensor | None:
    """Return rows of a matrix in the files, ``(rows, columns)``, by its name in the model; None: they have none."""
    for key, file in weight_map(weights).items():
        found = family.file_names.module_key(key)
        if name in (found, f"{family.base}.{found}"):
            return _rows((key, file), rows)
    return None


def _rows(entry: _Entry, rows: Sequence[int]) -> torch.Tensor:
    from safetensors import safe_open

    key, file = entry
    with safe_open(file, framework="pt") as content:
        matrix = content.get_slice(key)
        return torch.cat([matrix[row : row + 1] for row in rows])


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
    from safetensors import safe_open

    tensors: dict[str, torch.Tensor] = {**parameters_of(model), **dict(buffers_of(model))}
    unallocated = [name for name, tensor in tensors.items() if tensor.is_meta]
    if unallocated:
        raise UserError(f"parameter {unallocated[0]} is on the meta device: allocate it before loading weights")
    encoded, found = encoded_parameters(model), find_tensors(model, weights, hf_config=hf_config)
    for name, each in added_parameters(model).items():
        if each.initial.rows_of is not None:
            source, rows = each.initial.rows_of
            initialize_parameter_(tensors[name], values_rule(_rows(found[source], rows)), seed=0, name=name)
    for name, (key, file) in found.items():
        if name in encoded:
            with safe_open(file, framework="pt") as content:
                fill_encoded_(tensors[name], encoded[name], content.get_tensor(key))
            continue
        local, offsets = local_part(tensors[name])
        if local.numel():
            # Opened for each tensor: what was read of a mapped file counts as this process's memory until it is closed.
            with safe_open(file, framework="pt") as content:
                slices = (slice(first, first + size) for first, size in zip(offsets, local.shape, strict=True))
                local.copy_(content.get_slice(key)[tuple(slices)])
