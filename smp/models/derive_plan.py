"""A tensor-parallel plan from the layers of a model: how they follow each other, and a trial on the meta device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from smp.errors import one_line
from smp.models.attention_support import number_of
from smp.models.experts import is_experts
from smp.models.flow import Call, Flow, flow_of, run
from smp.models.tensor_plan import Part, PlanSizes, TensorPlan


class _NoPlanError(Exception):
    """Why a model, or a module of it, cannot be split."""


def _int_of(owners: Sequence[Any], *names: str) -> int | None:
    """Return the first of some attributes that is a number."""
    values = (number_of(owner, name) for owner in owners for name in names)
    return next((value for value in values if type(value) is int and value > 0), None)


def _is_attention(module: nn.Module) -> bool:
    return "attention" in type(module).__name__.lower() or hasattr(module, "head_dim")


def _sizes(module: nn.Module, hf_config: Any, width: int) -> PlanSizes:
    """Return the numbers of heads of attention, and the width that its output is computed from."""
    heads = _int_of((module, hf_config), "num_heads", "num_attention_heads", "n_heads")
    if heads is None or width % heads:
        raise _NoPlanError(f"its {width} values are not those of {heads or 'a number of'} heads")
    groups = _int_of((module,), "num_key_value_groups")
    key_value = _int_of((module, hf_config), "num_key_value_heads", "num_kv_heads") or heads
    return PlanSizes(heads, heads // groups if groups else key_value, width)


def _part(flow: Flow, block: nn.Module, path: str, hf_config: Any) -> Part:
    """Describe a submodule of which one linear layer makes the output, of what others make of its input."""
    module, inside = block.get_submodule(path), [p for p in flow.linears if p.startswith(f"{path}.")]
    rows = flow.sources(flow.outputs[path])
    row = min(rows, default="")
    if len(rows) != 1 or row not in inside:
        raise _NoPlanError(f"{path} has no linear layer of its output")
    reads = {p: flow.sources(flow.calls[p].input) for p in inside}
    if not reads[row] <= set(inside):
        raise _NoPlanError(f"{row} reads what is not of linear layers of {path}")
    between = {source for reader in inside if reader != row for source in reads[reader]}
    columns = [p for p in inside if p in reads[row] - between]
    if not columns or {row} & between:
        raise _NoPlanError(f"{row} is not the one output of layers that are split by their outputs")
    given = flow.calls[path].input
    width: int = block.get_submodule(row).in_features  # type: ignore[assignment]
    sizes = _sizes(module, hf_config, width) if _is_attention(module) else PlanSizes(0, 0, width)
    local = {p: p.removeprefix(f"{path}.") for p in inside}
    inner = tuple(local[p] for p in columns if flow.calls[p].input is not given)
    fused, of_key_value = {}, []
    for p in columns:
        sliced = len(columns) == 1 and flow.is_sliced(p, flow.calls[row].input)
        kinds = _kinds(module, block.get_submodule(p).out_features, sizes, sliced=sliced)  # type: ignore[arg-type]
        if kinds is None:
            raise _NoPlanError(f"nothing tells how to split the {block.get_submodule(p).out_features} outputs of {p}")
        if kinds == ("key_value",):
            of_key_value.append(local[p])
        elif len(kinds) > 1:
            fused[local[p]] = kinds
    if sizes.heads and not fused and not of_key_value:
        sizes = sizes._replace(key_value_heads=sizes.heads)
    norms, vectors = _others(flow, module, path, set(inside), set(columns), sizes)
    return Part(
        path, tuple(local[p] for p in columns), local[row], sizes.heads > 0, tuple(of_key_value), fused, norms,
        inner=inner, vectors=vectors, sizes=sizes,
    )  # fmt: skip


def _kinds(module: nn.Module, outputs: int, sizes: PlanSizes, *, sliced: bool) -> tuple[str, ...] | None:
    """Return what the outputs of a layer are, one after the other; None: what cannot be told."""
    heads, key_value, width = sizes
    if not heads:
        if outputs == width:
            return ("width",)
        return ("width", "width") if sliced and outputs == 2 * width else None
    of_key_value = {key_value * width // heads, key_value * (_int_of((module,), "head_dim") or 0)}
    if sliced:
        return ("heads", "key_value", "key_value") if outputs * heads == (heads + 2 * key_value) * width else None
    if key_value != heads and outputs in of_key_value:
        return ("key_value",)
    return None if outputs % heads else ("heads",)


def _others(
    flow: Flow, module: nn.Module, path: str, linears: set[str], columns: set[str], sizes: PlanSizes
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the norms of a module over its inner width, and its parameters with values for each head."""
    heads, key_value, width = sizes
    over_all = {width, width // heads * key_value} - {width // heads} if heads else {width}  # not those of each head
    norms, vectors = [], []
    for name, child in module.named_modules():
        own = f"{path}.{name}" if name else path
        if isinstance(child, nn.ModuleList) and len(child) in sizes[:2]:
            raise _NoPlanError(f"nothing tells which heads those of {own} are of")
        if own in linears:
            continue
        for key, parameter in child.named_parameters(recurse=False):
            read = flow.sources(flow.calls[own].input) if name and own in flow.calls else columns
            if not name and heads and parameter.shape == (heads,):
                vectors.append(key)
            elif parameter.ndim == 1 and name and not read & columns:
                continue  # of what is not split
            elif parameter.ndim == 1 and parameter.numel() in over_all:
                if "RMSNorm" not in type(child).__name__:
                    raise _NoPlanError(f"{own} is a {type(child).__name__} over all heads")
                norms.append(name)
            elif not name or parameter.ndim > 1 or parameter.numel() == heads:
                raise _NoPlanError(f"nothing tells how to split {key} of {own}")
    return tuple(norms), tuple(vectors)


def _shrink(layer: Any, *, outputs: int | None = None, inputs: int | None = None) -> None:
    outputs, inputs = outputs or layer.out_features, inputs or layer.in_features
    layer.weight = nn.Parameter(torch.empty(outputs, inputs, device="meta"))
    if layer.bias is not None:
        layer.bias = nn.Parameter(torch.empty(outputs, device="meta"))
    layer.out_features, layer.in_features = outputs, inputs


def _cut(module: Any, part: Part, sizes: PlanSizes, degree: int) -> Any:
    """Return a copy of a part's module on the meta device with the share of one of ``degree`` ranks."""
    module = copy.deepcopy(module)
    heads, key_value, width = sizes
    rank_key_value = max(1, key_value // degree)
    for name in part.columns:
        layer = module.get_submodule(name)
        rows = layer.out_features
        if name in part.key_value:
            rows = rows // key_value * rank_key_value
        elif "key_value" in part.fused.get(name, ()):
            rows = rows // (heads + 2 * key_value) * (heads // degree + 2 * rank_key_value)
        else:
            rows //= degree
        _shrink(layer, outputs=rows)
    _shrink(module.get_submodule(part.row), inputs=width // degree)
    for name in part.norms:
        norm = module.get_submodule(name)
        full = norm.weight.numel()
        share = full // degree if full == width else full // key_value * rank_key_value
        norm.weight = nn.Parameter(torch.empty(share, device="meta"))
    for name in part.vectors:
        setattr(module, name, nn.Parameter(torch.empty(heads // degree, device="meta")))
    if part.heads and hasattr(module, "num_key_value_groups"):
        module.num_key_value_groups = heads // degree // rank_key_value
    return module


def _counts(module: nn.Module, sizes: PlanSizes) -> list[str]:
    """Return the attributes of an attention module that may count its heads."""
    heads = sizes[:2]
    own = [
        name
        for name, value in vars(module).items()
        if type(value) is int and value in heads and "head" in name and "dim" not in name
        and name != "num_key_value_groups"
    ]  # fmt: skip
    config = getattr(module, "config", None)
    names = ("num_attention_heads", "num_key_value_heads")
    return own + [f"config.{name}" for name in names if _int_of((config,), name) in heads]


def _set_counts(module: Any, names: Sequence[str], sizes: PlanSizes, degree: int) -> None:
    """Give a module the numbers of one of ``degree`` ranks."""
    if any(name.startswith("config.") for name in names):
        module.config = copy.copy(module.config)
    for name in names:
        target, own = (module.config, name.removeprefix("config.")) if "." in name else (module, name)
        full = getattr(target, own)
        setattr(target, own, full // degree if full == sizes.heads else max(1, sizes.key_value_heads // degree))


def _tried(block: nn.Module, part: Part, call: Call) -> Part:
    """Try the share of a rank, with the attributes changed that must be: of the module, its config, or both."""
    module, sizes = block.get_submodule(part.module), part.sizes
    assert sizes is not None
    heads, key_value, width = sizes
    fits: Callable[[int], bool] = lambda d: not heads % d and not (key_value % d and d % key_value)  # noqa: E731
    degree = next((d for d in range(2, (heads or width) + 1) if (fits(d) if heads else not width % d)), 0)
    names, why = _counts(module, sizes) if heads else [], ""
    if not degree:
        return part
    for choice in ((lambda _: False), (lambda name: "." not in name), (lambda name: "." in name), (lambda _: True)):
        share, counts = _cut(module, part, sizes, degree), tuple(filter(choice, names))
        _set_counts(share, counts, sizes, degree)
        try:
            shape = run(share, call).shape
            if shape == call.input.shape:
                return Part(**{**vars(part), "counts": counts})
            why = why or f"it returns {tuple(shape)}"
        except Exception as error:  # of any type: code of any model
            why = why or one_line(error, 150)
    raise _NoPlanError(f"a rank's share of {part.module} does not run ({why})")


def _computes_tokens(module: nn.Module, call: Call | None, hidden: int) -> bool:
    """Return whether a submodule of a block computes each token by itself, on whichever rank has it."""
    if any(map(is_experts, module.modules())) or isinstance(module, nn.Linear):
        return True  # with sequence parallelism a rank sends its own tokens to experts, and gathers none
    if call is not None and torch.is_tensor(call.input) and call.input.ndim == 2:
        return True  # of all rows: a router
    return all(p.ndim == 1 and p.numel() in (1, hidden) for p in module.parameters())  # a norm


def _parts(block: nn.Module, call: Call, hf_config: Any, reasons: list[str]) -> tuple[Part, ...]:
    """Return the parts of a block; what cannot be split computes all tokens on each rank.

    Args:
        reasons: gets why submodules are not split.
    """
    hidden = call.input.shape[-1]
    for name, parameter in block.named_parameters(recurse=False):
        if parameter.numel() not in (1, hidden):
            raise _NoPlanError(f"nothing tells how to split {name} of its blocks")
    try:
        flow = flow_of(block, call)
    except Exception as error:  # of any type: code of any model
        raise _NoPlanError(f"its blocks do not run by themselves ({one_line(error, 150)})") from error
    found = []
    for path, module in block.named_children():
        if _computes_tokens(module, flow.calls.get(path), hidden):
            continue
        try:
            through = (flow.calls[path].input, flow.outputs[path]) if path in flow.calls else (None,)
            if any(getattr(each, "shape", None) != call.input.shape for each in through):
                raise _NoPlanError(f"{path} does not take hidden states and return such")
            found.append(_tried(block, _part(flow, block, path, hf_config), flow.calls[path]))
        except _NoPlanError as error:
            reasons.append(str(error))
            found.append(Part(path))
    return tuple(found)


def _check_rest(block: nn.Module, parts: Sequence[Part], call: Call) -> None:
    """Check that what is outside the parts runs with half of the tokens, as under sequence parallelism."""
    hooks, half = [], call.input.shape[1] // 2

    def gather(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = Call("", args, kwargs)
        batch, _, width = given.input.shape
        changed = given.with_input(given.input.new_empty(batch, 2 * half, width))
        return changed.args, changed.kwargs

    def scatter(module: nn.Module, args: Any, found: Any) -> Any:
        if isinstance(found, tuple):
            return found[0][:, :half].contiguous(), *found[1:]
        return found[:, :half].contiguous()

    for part in parts:
        module = block.get_submodule(part.module)
        hooks.append(module.register_forward_pre_hook(gather, with_kwargs=True))
        hooks.append((module.get_submodule(part.row) if part.row else module).register_forward_hook(scatter))
    try:
        shape = run(block, call.with_input(call.input[:, :half].contiguous())).shape
        why = f"it returns {tuple(shape)}" if shape != (*call.input.shape[:1], half, call.input.shape[2]) else ""
    except Exception as error:  # of any type: code of any model
        why = one_line(error, 150)
    finally:
        for hook in hooks:
            hook.remove()
    if why:
        raise _NoPlanError(f"its blocks do not run with a part of the tokens ({why})")


def _kind(block: nn.Module) -> tuple[Any, ...]:
    """Return what tells blocks apart that are not split alike."""
    return *((name, type(m)) for name, m in block.named_modules()), *((n, p.shape) for n, p in block.named_parameters())


def _hands_on(call: Call) -> bool:
    """Return whether blocks read what others have put into a mapping: pairs of keys and values, and no masks."""
    mappings = [value for value in call.kwargs.values() if isinstance(value, Mapping)]
    return any(isinstance(value, tuple) for mapping in mappings for value in mapping.values())


def derive_plan(model: nn.Module, calls: Sequence[Call]) -> tuple[TensorPlan | None, str]:
    """Derive the plan of a model from its layers.

    Args:
        model: on the meta device.
        calls: of its blocks, in a forward on the meta device.

    Returns:
        The plan, and an empty text; or None, and why there is none.
    """
    blocks = [model.get_submodule(call.path) for call in calls]
    kinds: dict[Any, tuple[Part, ...]] = {}
    reasons: list[str] = []
    of_block = [_kind(block) for block in blocks]
    firsts = {kind: of_block.index(kind) for kind in of_block}
    try:
        if any(map(_hands_on, calls)):
            raise _NoPlanError("its blocks hand on keys and values to others")
        for kind, index in firsts.items():
            kinds[kind] = _parts(blocks[index], calls[index], model.config, reasons)
        parts = [part for block_parts in kinds.values() for part in block_parts]
        split = [part for part in parts if part.row]
        mixtures = any(map(is_experts, model.modules()))
        if not any(part.heads for part in split):
            raise _NoPlanError("; ".join(reasons[:1]) or "its blocks have no attention")
        if all(part.heads for part in split) and not mixtures:
            raise _NoPlanError("; ".join(reasons[:1]) or "no submodule of its blocks is an MLP")
        for kind, index in firsts.items():
            _check_rest(blocks[index], kinds[kind], calls[index])
    except _NoPlanError as error:
        return None, str(error)
    return _as_plan(parts, [kinds[kind] for kind in of_block]), ""


def _as_plan(parts: Sequence[Part], by_block: Sequence[tuple[Part, ...]]) -> TensorPlan:
    """Return the plan of blocks, which may be alike."""
    sizes = [part.sizes for part in parts if part.sizes]
    attention = next(each for each in sizes if each.heads)
    width = next((each.width for each in sizes if not each.heads), attention.heads)
    alike = all(each == by_block[0] for each in by_block)
    return TensorPlan(
        by_block[0] if alike else tuple(parts), attention.heads, attention.key_value_heads, width,
        () if alike else tuple(by_block),
    )  # fmt: skip
