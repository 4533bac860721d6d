"""A tensor-parallel plan from transformers' own, tried on a part of one block on the meta device."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from smp.errors import one_line
from smp.models.experts import is_experts
from smp.models.tensor_plan import Part, TensorPlan

_COLUMNS = ("colwise", "colwise_gather_output")
_ROWS = ("rowwise", "rowwise_split_input")
_REPLICATED = ("replicated_with_grad_allreduce",)


class Call(NamedTuple):
    """A call of a module in a forward pass."""

    path: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    recorded: bool = True  # by autograd

    @property
    def input(self) -> Any:
        """The first argument, or the one that transformers' blocks call hidden_states."""
        return self.args[0] if self.args else self.kwargs.get("hidden_states")


class _NoPlanError(Exception):
    """Why transformers' plan cannot be used."""


def _with_experts(blocks: Sequence[nn.Module]) -> set[str]:
    """Return the names of the children of blocks that have experts in any block: each computes a token by itself.

    They are not split: with sequence parallelism a rank sends its own tokens to experts, and gathers none.
    """
    return {name for block in blocks for name, child in block.named_children() if any(map(is_experts, child.modules()))}


def _styles(hf_config: Any, block_list: str, block: nn.Module, without: set[str]) -> dict[str, str]:
    """Return the style of each path in a block; a plan may name what only other configs of the type have.

    Args:
        without: names of the children that are left out.
    """
    full = getattr(hf_config, "base_model_tp_plan", None) or {}
    prefix = f"{block_list}.*."
    found = {path.removeprefix(prefix): style for path, style in full.items() if path.startswith(prefix)}
    found = {path: style for path, style in found.items() if _has(block, path) and path.split(".")[0] not in without}
    if not found:
        raise _NoPlanError("transformers has no tensor-parallel plan for it")
    if unknown := sorted(set(found.values()) - {*_COLUMNS, *_ROWS, *_REPLICATED}):
        raise _NoPlanError(f"transformers' plan splits {unknown[0]!r}, which is not known here")
    return found


def _child(module: nn.Module, path: str) -> nn.Module | None:
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


def _has(module: nn.Module, path: str) -> bool:
    """Return whether a path leads to a module or a parameter."""
    owner, _, name = path.rpartition(".")
    found = _child(module, owner)
    return found is not None and getattr(found, name, None) is not None


def _linears(block: nn.Module, paths: Iterable[str]) -> dict[str, nn.Linear]:
    found = {path: module for path in paths if (module := _child(block, path)) is not None}
    for path, module in found.items():
        if not isinstance(module, nn.Linear):
            raise _NoPlanError(f"{path} is a {type(module).__name__}, and only linear layers are split")
    return found  # type: ignore[return-value]


def _parts(block: nn.Module, styles: dict[str, str], heads: int, key_value: int) -> list[Part]:
    columns = _linears(block, (path for path, style in styles.items() if style in _COLUMNS))
    rows = _linears(block, (path for path, style in styles.items() if style in _ROWS))
    found = []
    for path, row in rows.items():
        module, _, row_name = path.rpartition(".")
        own = {p.removeprefix(f"{module}."): layer for p, layer in columns.items() if p.rpartition(".")[0] == module}
        others = [p for p in rows if p != path and p.rpartition(".")[0] == module]
        if not module or not own or others:
            raise _NoPlanError(f"{path} is not the one output of layers that are split by their outputs")
        found.append(_part(block.get_submodule(module), module, own, row_name, row.in_features, heads, key_value))
    if left := [p for p in columns if p.rpartition(".")[0] not in {part.module for part in found}]:
        raise _NoPlanError(f"{left[0]} is split by its outputs, and no layer by its inputs follows it")
    return found


def _part(
    module: nn.Module, path: str, columns: dict[str, nn.Linear], row: str, width: int, heads: int, key_value: int
) -> Part:
    """Describe one module whose inner width is ``width``: attention, by heads, or an MLP."""
    is_attention = "attention" in type(module).__name__.lower() or hasattr(module, "head_dim")
    fused: dict[str, tuple[str, ...]] = {}
    of_key_value: list[str] = []
    for name, layer in columns.items():
        rows = layer.out_features
        if is_attention and len(columns) == 1 and rows * heads == (heads + 2 * key_value) * width:
            fused[name] = ("heads", "key_value", "key_value")
        elif is_attention and rows * heads == key_value * width and key_value != heads:
            of_key_value.append(name)
        elif is_attention and rows % heads:
            raise _NoPlanError(f"the {rows} outputs of {path}.{name} are not those of {heads} heads")
        elif not is_attention and len(columns) == 1 and rows == 2 * width:
            fused[name] = ("width", "width")
        elif not is_attention and rows != width:
            raise _NoPlanError(f"{path}.{name} has {rows} outputs, and {row} takes {width}")
    norms = tuple(_norms(module, path, {*columns, row}, heads, key_value, width))
    return Part(path, tuple(columns), row, is_attention, tuple(of_key_value), fused, norms)


def _norms(module: nn.Module, path: str, known: set[str], heads: int, key_value: int, width: int) -> Iterator[str]:
    """Yield the norms over the whole inner width; refuse what else has parameters of the width or of heads."""
    over_all = {width, width // heads * key_value} - {width // heads}  # not those of each head by itself
    for name, child in module.named_modules():
        if name in known:
            continue
        for own, parameter in child.named_parameters(recurse=False):
            if parameter.ndim == 1 and parameter.numel() in over_all:
                if "RMSNorm" not in type(child).__name__:
                    raise _NoPlanError(f"{path}.{name} is a {type(child).__name__} over all heads")
                yield name
            elif parameter.ndim > 1 or parameter.numel() == heads:
                raise _NoPlanError(f"nothing tells how to split {own} of {path}{'.' * bool(name)}{name}")


def _check_rest(block: nn.Module, parts: Sequence[Part], hidden: int, without: set[str]) -> None:
    """Check that everything outside the parts computes each token by itself: norms and factors have vectors only."""
    for name, parameter in block.named_parameters():
        inside = any(name.startswith(f"{part.module}.") for part in parts) or name.split(".")[0] in without
        if not inside and (parameter.ndim > 1 or parameter.numel() not in (1, hidden)):
            raise _NoPlanError(f"transformers' plan says nothing of {name}")


def _check_alike(blocks: Sequence[nn.Module], without: set[str]) -> None:
    """Check that all blocks have the same parameters of the same shapes, but in the children that are left out."""
    shapes = [
        {name: p.shape for name, p in block.named_parameters() if name.split(".")[0] not in without} for block in blocks
    ]
    for index, found in enumerate(shapes):
        if found != shapes[0]:
            raise _NoPlanError(f"its blocks differ: block {index} has other parameters than block 0")


def _shrink(layer: nn.Linear, *, outputs: int | None = None, inputs: int | None = None) -> None:
    outputs, inputs = outputs or layer.out_features, inputs or layer.in_features
    layer.weight = nn.Parameter(torch.empty(outputs, inputs, device="meta"))
    if layer.bias is not None:
        layer.bias = nn.Parameter(torch.empty(outputs, device="meta"))
    layer.out_features, layer.in_features = outputs, inputs


def _cut(block: nn.Module, parts: Sequence[Part], heads: int, key_value: int, degree: int) -> nn.Module:
    """Return a copy of a block on the meta device with the share of one of ``degree`` ranks."""
    block = copy.deepcopy(block)
    rank_key_value = max(1, key_value // degree)
    for part in parts:
        module = block.get_submodule(part.module)
        if not part.heads and module.get_submodule(part.row).in_features % degree:  # type: ignore[operator]
            continue  # ranks have unequal shares, of which this is none
        for name in part.columns:
            layer: Any = module.get_submodule(name)
            rows = layer.out_features
            if name in part.key_value:
                rows = rows // key_value * rank_key_value
            elif "key_value" in part.fused.get(name, ()):
                rows = rows // (heads + 2 * key_value) * (heads // degree + 2 * rank_key_value)
            else:
                rows //= degree
            _shrink(layer, outputs=rows)
        row: Any = module.get_submodule(part.row)
        width = row.in_features
        _shrink(row, inputs=width // degree)
        for name in part.norms:
            norm = module.get_submodule(name)
            full = norm.weight.numel()  # type: ignore[union-attr, operator]
            share = full // degree if full == width else full // key_value * rank_key_value
            norm.weight = nn.Parameter(torch.empty(share, device="meta"))
        if part.heads and hasattr(module, "num_key_value_groups"):
            module.num_key_value_groups = heads // degree // rank_key_value  # type: ignore[assignment]
    return block


def _counts(module: nn.Module, heads: int, key_value: int) -> list[str]:
    """Return the attributes of an attention module that may count its heads."""
    own = [
        name
        for name, value in vars(module).items()
        if type(value) is int and value in (heads, key_value) and "head" in name and "dim" not in name
        and name != "num_key_value_groups"
    ]  # fmt: skip
    config = getattr(module, "config", None)
    names = ("num_attention_heads", "num_key_value_heads")
    return own + [f"config.{name}" for name in names if getattr(config, name, None) in (heads, key_value)]


def _set_counts(module: Any, names: Sequence[str], heads: int, key_value: int, degree: int) -> None:
    """Give a module the numbers of one of ``degree`` ranks."""
    if any(name.startswith("config.") for name in names):
        module.config = copy.copy(module.config)
    for name in names:
        target, own = (module.config, name.removeprefix("config.")) if "." in name else (module, name)
        full = getattr(target, own)
        setattr(target, own, full // degree if full == heads else max(1, key_value // degree))


def _runs(block: nn.Module, call: Call) -> str:
    """Return why a block on the meta device does not run with the arguments of a call; empty: it does."""
    try:
        with torch.no_grad(), torch.device("meta"):
            found = block(*call.args, **call.kwargs)
    except Exception as error:  # of any type: code of any model
        return one_line(error, 150)
    found = found if torch.is_tensor(found) else found[0]
    return "" if found.shape == call.input.shape else f"it returns {tuple(found.shape)}"


def _with_counts(
    block: nn.Module, parts: list[Part], call: Call, heads: int, key_value: int, degree: int
) -> list[Part]:
    """Find the attributes that must change for a rank's share of the heads: of the module, its config, or both."""
    where = [index for index, part in enumerate(parts) if part.heads]
    candidates = [_counts(block.get_submodule(parts[index].module), heads, key_value) for index in where]
    why = ""
    for choice in (
        lambda name: False,
        lambda name: "." not in name,
        lambda name: "." in name,
        lambda name: True,
    ):
        share = _cut(block, parts, heads, key_value, degree)
        chosen = {index: tuple(filter(choice, names)) for index, names in zip(where, candidates, strict=True)}
        for index, names in chosen.items():
            _set_counts(share.get_submodule(parts[index].module), names, heads, key_value, degree)
        why_not = _runs(share, call)
        if not why_not:
            return [Part(**{**vars(part), "counts": chosen.get(index, ())}) for index, part in enumerate(parts)]
        why = why or why_not
    raise _NoPlanError(f"a rank's share of its heads does not run ({why})")


def derive_plan(model: nn.Module, block_list: str, calls: Sequence[Call]) -> tuple[TensorPlan | None, str]:
    """Derive the plan of a model from transformers' ``base_model_tp_plan``.

    Args:
        model: on the meta device.
        block_list: path of the blocks in the model without its head.
        calls: of the blocks, in a forward on the meta device.

    Returns:
        The plan, and an empty text; or None, and why there is none.
    """
    hf_config: Any = model.config
    blocks = [model.get_submodule(call.path) for call in calls]
    heads = getattr(hf_config, "num_attention_heads", None)
    try:
        without = _with_experts(blocks)
        styles = _styles(hf_config, block_list, blocks[0], without)
        if type(heads) is not int:
            raise _NoPlanError("its config does not tell the number of heads")
        key_value = getattr(hf_config, "num_key_value_heads", None) or heads
        _check_alike(blocks, without)
        parts = _parts(blocks[0], styles, heads, key_value)
        _check_rest(blocks[0], parts, calls[0].input.shape[-1], without)
        degree = next((d for d in range(2, heads + 1) if heads % d == 0 and not (key_value % d and d % key_value)), 0)
        widths: list[Any] = [blocks[0].get_submodule(f"{p.module}.{p.row}").in_features for p in parts if not p.heads]
        if degree:
            parts = _with_counts(blocks[0], parts, calls[0], heads, key_value, degree)
        if without and not widths:  # no MLP is split, and a rank has as much as of the heads
            widths = [heads]
        if len(set(widths)) != 1:
            raise _NoPlanError("its blocks have no MLP, or several of different widths")
    except _NoPlanError as error:
        return None, str(error)
    return TensorPlan(tuple(parts), heads, key_value, widths[0]), ""
