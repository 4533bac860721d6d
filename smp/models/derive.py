"""A family that is derived from what transformers knows of a model, checked by a forward on the meta device."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from torch import nn

from smp.errors import UserError, one_line
from smp.models.derive_plan import derive_plan
from smp.models.experts import TOP_KEYS, implemented_by, without_experts
from smp.models.family import COMMON_SETTINGS, Family, LogitTransform
from smp.models.file_names import file_names_of
from smp.models.flow import Call, no_reading
from smp.models.logits import find_logits
from smp.models.tensor_plan import TensorPlan

# Settings of some families, and the names of their config keys.
OTHER_SETTINGS = {
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads"),
    "sliding_window": ("sliding_window",),
    "attn_pdrop": ("attention_dropout", "attn_pdrop"),
    "embd_pdrop": ("embd_pdrop",),
    "resid_pdrop": ("resid_pdrop", "hidden_dropout", "residual_dropout"),
    "rotary_pct": ("rope_parameters.partial_rotary_factor",),
    "num_local_experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": TOP_KEYS,
}
_BIDIRECTIONAL = {"cpmant"}  # whatever the config says
_TRACE = "smp_trace"  # an attention function for which transformers makes no mask


def _refusal(hf_config: Any, why: str) -> UserError:
    return UserError(
        f"a model of type {hf_config.model_type!r} cannot be trained: {why}. docs/models.md lists the types that can"
    )


def check_config(hf_config: Any) -> None:
    """Check that a config is that of a decoder alone.

    Raises:
        UserError: it is not.
    """
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if hf_config.model_type not in CONFIG_MAPPING:
        raise UserError(f"architecture {hf_config.model_type!r} is not supported: transformers knows no model of it")
    if type(hf_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise _refusal(hf_config, "transformers has no causal language model of this type")
    if getattr(hf_config, "is_encoder_decoder", False):
        raise _refusal(hf_config, "it has an encoder and a decoder, and only decoders alone are trained")
    if hf_config.get_text_config(decoder=True) is not hf_config:
        raise _refusal(hf_config, "it contains a language model among others: give the config of its text model")
    if getattr(hf_config, "is_decoder", True) is False:
        raise _refusal(hf_config, "it is an encoder: its tokens see the ones after them (is_decoder is false)")
    if hf_config.model_type in _BIDIRECTIONAL:
        raise _refusal(hf_config, "its tokens see the ones after them, and only decoders are trained")


def _path_of(model: nn.Module, wanted: nn.Module | None) -> str | None:
    return next((path for path, module in model.named_modules() if module is wanted), None)


def _find_blocks(model: nn.Module, hf_config: Any) -> str:
    """Return the path of the list of modules with the most parameters."""
    sizes = {
        path: sum(parameter.numel() for parameter in module.parameters())
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
    }
    if not sizes:
        raise _refusal(hf_config, "its blocks are in no list (nn.ModuleList)")
    return max(sizes, key=lambda path: (sizes[path], -path.count(".")))


def _attend_nothing(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> Any:
    batch, heads, length, _width = query.shape
    return query.new_empty(batch, length, heads, value.shape[-1]), None


@contextlib.contextmanager
def without_masks(model: nn.Module, attend: Callable[..., Any] = _attend_nothing) -> Iterator[None]:
    """Let transformers make no mask, which would read tensors' values.

    Args:
        attend: the attention function in the meantime, as those of transformers' ``AttentionInterface``.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(_TRACE, attend)
    configs = (config for module in model.modules() if (config := getattr(module, "config", None)))
    with implemented_by(configs, "_attn_implementation_internal", _TRACE):
        yield


@contextlib.contextmanager
def without_values(model: nn.Module) -> Iterator[None]:
    """Let a forward be followed without values.

    Rotary embeddings of dynamic and longrope types, which read the longest position, are taken as default ones, and
    experts are left out.
    """
    former = {module: module.rope_type for module in model.modules() if hasattr(module, "rope_type")}
    try:
        for module, kind in former.items():
            module.rope_type = dict.fromkeys(kind, "default") if isinstance(kind, dict) else "default"  # type: ignore[assignment]
        with without_experts(model), no_reading():
            yield
    finally:
        for module, kind in former.items():
            module.rope_type = kind


def _trace(model: nn.Module, watched: dict[str, nn.Module], **inputs: torch.Tensor) -> list[Call]:
    """Run a forward on the meta device; returns the calls of the watched modules, in order."""
    calls: list[Call] = []
    hooks = [
        module.register_forward_pre_hook(
            lambda _, args, kwargs, path=path: calls.append(Call(path, args, kwargs, torch.is_grad_enabled())),
            with_kwargs=True,
        )
        for path, module in watched.items()
    ]
    try:
        with torch.enable_grad(), torch.device("meta"), without_values(model):
            model(**inputs, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def trace(model: nn.Module, watched: dict[str, nn.Module], hf_config: Any) -> list[Call]:
    """Return the calls of modules in a forward pass of a model on the meta device, in order.

    Raises:
        UserError: it does not run there.
    """
    ids = torch.zeros(2, 6, dtype=torch.long, device="meta")
    # Attention that chooses tokens by itself reads its mask, which transformers takes as it is where it has four axes.
    mask = torch.zeros(2, 1, *ids.shape[1:] * 2, device="meta")
    for inputs in ({"input_ids": ids}, {"input_ids": ids, "attention_mask": mask}):
        with contextlib.suppress(Exception):  # of any type: code of any model
            return _trace(model, watched, **inputs)
    try:
        with without_masks(model):
            return _trace(model, watched, input_ids=ids)
    except Exception as error:
        why = f"its forward cannot be followed without values ({one_line(error, 200)})"
        raise _refusal(hf_config, why) from error


def _check_calls(calls: list[Call], embedding: str, blocks: list[str], head: str, hf_config: Any) -> None:
    """Check that the forward is embedding, each block once and in order, head.

    Raises:
        UserError: it is something else.
    """
    order = [call.path for call in calls if call.path in {embedding, *blocks, head}]
    if order != [embedding, *blocks, head]:
        wrong = next((path for path in (embedding, *blocks, head) if order.count(path) != 1), None)
        what = f"{wrong} is called {order.count(wrong)} times" if wrong else "they are called in another order"
        raise _refusal(hf_config, f"its forward is not one embedding, each block once and one head ({what})")
    if not all(call.recorded for call in calls if call.path in blocks):
        raise _refusal(hf_config, "its backward is its own, and would read parameters that are not gathered then")
    shapes = {tuple(call.input.shape) if torch.is_tensor(call.input) else None for call in calls if call.path in blocks}
    # Of Gemma 3n and hyper-connections a token has several.
    if len(shapes) != 1 or None in shapes or len(next(iter(shapes)) or ()) not in (3, 4):
        raise _refusal(hf_config, f"its blocks do not take hidden states (batch, sequence, width) first, but {shapes}")


def _check_ties(model: nn.Module, units: list[str], hf_config: Any) -> None:
    """Check that no parameter is shared by two of the embedding, the blocks, the head and the rest.

    But for the head's: its weight with the embedding, and what it shares with the rest, as a bias.

    Args:
        units: paths of embedding, head and blocks.

    Raises:
        UserError: one is.
    """
    embedding, head, *_ = units
    owners: dict[int, tuple[str, str | None]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        unit = next((path for path in units if name.startswith(f"{path}.")), None)
        other, first = owners.setdefault(id(parameter), (name, unit))
        weights = {f"{embedding}.weight", f"{head}.weight"}
        if first != unit and {other, name} != weights and {first, unit} != {head, None}:
            raise _refusal(hf_config, f"it ties {name} to {other}, and only the head may be tied to others")


def _settings(hf_config: Any) -> dict[str, str]:
    """Return the settings that the config has keys for."""
    values, names = hf_config.to_dict(), getattr(hf_config, "attribute_map", {})
    found = {}
    wanted = {name: (key,) for name, key in COMMON_SETTINGS.items()} | OTHER_SETTINGS
    for setting, candidates in wanted.items():
        for key in candidates:
            top, _, inner = key.partition(".")
            own = names.get(top, top)
            if own in values and (not inner or _takes(values[own], inner, optional=setting in COMMON_SETTINGS)):
                found[setting] = f"{own}.{inner}" if inner else own
                break
    return found


def _takes(nested: Any, key: str, *, optional: bool) -> bool:
    """Return whether a nested object of a config has a key, or may: not if it has an object for each type of layer."""
    if not isinstance(nested, dict) or any(isinstance(value, dict) for value in nested.values()):
        return False
    return optional or key in nested


def _final_norm(calls: list[Call], last_block: str, model: nn.Module) -> str | None:
    """Return the norm after the last block, if nothing else with parameters follows."""
    paths = [call.path for call in calls]
    after = paths[paths.index(last_block) + 1 : -1]
    if len(after) == 1 and "norm" in type(model.get_submodule(after[0])).__name__.lower():
        return after[0]
    return None


def _logits(model: nn.Module) -> LogitTransform | None:
    try:
        return find_logits(model)
    except UserError:  # raised again for a loss in chunks, which alone needs it
        return None


def _linear_layers(model: nn.Module, blocks: list[str]) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """Return the linear layers of blocks by path, and the modules around them."""
    modules = {f"{block}.{path}": m for block in blocks for path, m in model.get_submodule(block).named_modules()}
    layers: dict[str, nn.Module] = {path: module for path, module in modules.items() if isinstance(module, nn.Linear)}
    return layers, {path: model.get_submodule(path) for path in {path.rpartition(".")[0] for path in layers}}


@functools.cache
def _weights_read(module: type[nn.Module]) -> frozenset[str]:
    """Return the names of the parts of a module whose weights its code reads, as to hand them to a kernel."""
    try:
        source = inspect.getsource(module)
    except (OSError, TypeError):  # made by a program, not written in a file
        return frozenset()
    return frozenset(re.findall(r"self\.(\w+)\.weight\b(?!\.(?:dtype|device)\b)", source))


def _uncalled(layers: Iterable[str], around: dict[str, nn.Module], called: set[str]) -> tuple[str, ...]:
    """Return the layers whose weight the module around them reads: in the forward, or for a kernel that it may have.

    Mamba's kernels are given the weights of layers that are called without the kernels.
    """
    parts = {path: path.rpartition(".") for path in layers}
    return tuple(
        path
        for path, (parent, _, name) in parts.items()
        if (path not in called and parent in called) or name in _weights_read(cast(Any, type(around[parent])))
    )


def derive_family(model: nn.Module, plan: TensorPlan | None = None) -> Family:
    """Derive the family of a causal language model.

    Args:
        model: of transformers, whole, on the meta device.
        plan: tensor-parallel plan written by hand; None: one that is derived from the layers, if it can be.

    Raises:
        UserError: it is no decoder, or its forward is not embedding, blocks and head.
    """
    hf_config: Any = model.config
    embedding = _path_of(model, model.get_input_embeddings())  # type: ignore[operator]
    head = _path_of(model, model.get_output_embeddings())  # type: ignore[operator]
    if embedding is None or head is None:
        raise _refusal(hf_config, f"transformers does not tell its {'embedding' if embedding is None else 'head'}")
    blocks = _find_blocks(model, hf_config)
    block_paths = [f"{blocks}.{name}" for name, _ in model.get_submodule(blocks).named_children()]
    own = [embedding, head, *block_paths]
    _check_ties(model, own, hf_config)
    rest = {
        path: module
        for path, module in model.named_modules()
        if next(module.parameters(recurse=False), None) is not None
        and not any(path == other or path.startswith(f"{other}.") for other in own)
    }
    layers, around = _linear_layers(model, block_paths)
    watched = {path: model.get_submodule(path) for path in own} | rest
    all_calls = trace(model, layers | around | watched, hf_config)
    calls, called = [call for call in all_calls if call.path in watched], {call.path for call in all_calls}
    _check_calls(calls, embedding, block_paths, head, hf_config)
    prefix = f"{model.base_model_prefix}." if hasattr(model, model.base_model_prefix) else ""  # type: ignore[arg-type]
    why = ""
    if plan is None:
        with without_experts(model):
            plan, why = derive_plan(model, [c for c in calls if c.path in block_paths])
    return Family(
        name=hf_config.model_type,
        hf_model_type=hf_config.model_type,
        architecture=type(model).__name__,
        base=prefix.rstrip("."),
        blocks=blocks,
        embedding=embedding,
        final_norm=_final_norm(calls, block_paths[-1], model),
        head=head,
        gated_mlp=True,
        settings=_settings(hf_config),
        defaults={},
        tensor_plan=plan,
        no_tensor_plan=why,
        full_sequence_embedding=True,
        logits=_logits(model),
        file_names=file_names_of(model),
        uncalled=_uncalled(layers, around, called),
    )
