"""Attention: the function that every block calls, and masks made without a read from the device.

transformers makes a model's masks from its positions, and reads from the device whether they restart. Here the caller
says so, with transformers' own arguments for packed sequences, ``cu_seq_lens_q`` and ``max_length_q``: a family whose
embedding may be split by tokens has one mask for all blocks, made here before it; the masks of others (by layer types,
biases, or in another way) remain the model's to make, and only the reading is taken out.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from smp.config import PrecisionConfig
from smp.models.attention_support import (
    attention_dropout,
    attention_misfit,
    bidirectional,
    default_attention,
    head_width,
    random_rates,
)
from smp.models.model_config import ModelConfig
from smp.parallel.choices import Choice, Situation
from smp.parallel.documents import document_index, no_documents, told
from smp.parallel.technique import Setup

Config = ModelConfig

# Names in transformers' registry of attention functions. They have no mask function in it, so that transformers makes
# no mask.
SDPA, FUSED = "smp_sdpa", "smp_fused"
MASKED = "smp_masked"  # the fused kernels, for which transformers makes masks
FLASH = ("flash_attention_2", "flash_attention_3")
KIND = "_smp_attention"  # attribute of a model that makes its mask here: the name of its attention function
_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
_HOPPER = 9
# torch 2.11's varlen_attn has no such argument, and gives heads in groups to the same kernel without it.
_ASKS_FOR_GROUPS = torch.__version__ >= (2, 12)  # type: ignore[operator]
WIDEST_HEAD = 256  # of the flash kernels, which also want a multiple of 8


def document_lengths(bounds: torch.Tensor, longest: int) -> dict[str, Any]:
    """Return transformers' arguments for documents that attention keeps apart.

    Args:
        bounds: where documents begin in the flattened batch, and its end: ``(documents + 1,)`` int32.
        longest: tokens of the longest document, or more.
    """
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}


def whole_rows(ids: torch.Tensor) -> dict[str, Any]:
    """Return the arguments of :func:`document_lengths` for ids ``(batch, sequence)`` of one document per sequence."""
    batch, length = ids.shape[:2]
    bounds = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=ids.device)
    return document_lengths(bounds, length)


def lengthened(lengths: dict[str, Any], length: int, extra: int) -> dict[str, Any]:
    """Return the arguments of :func:`document_lengths` after ``extra`` tokens were added to every row's last document.

    Args:
        length: tokens of a row before.
    """
    bounds = lengths["cu_seq_lens_q"]
    rows = torch.div(bounds, length, rounding_mode="floor")
    return document_lengths(bounds + rows * extra, lengths["max_length_q"] + extra)


def _fused_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int = 0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend by documents' lengths if they are given, else with the first kernel of ``_BACKENDS`` that can.

    Args:
        query: ``(batch, heads, sequence, width)``; ``key`` and ``value`` may have fewer heads.

    Returns:
        ``(batch, sequence, heads, width)``, as transformers' attention functions.
    """
    from torch.nn.attention import varlen
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if cu_seq_lens_q is None:
        # Here, where backward's recomputation comes past too.
        with sdpa_kernel(_BACKENDS, set_priority=True):
            return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    batch, heads, length, width = query.shape
    q, k, v = (each.transpose(1, 2).flatten(0, 1) for each in (query, key, value))
    groups: dict[str, Any] = {"enable_gqa": key.shape[1] != heads} if _ASKS_FOR_GROUPS else {}
    found = varlen.varlen_attn(
        q, k, v, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q,
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        **groups,
    )  # fmt: skip
    return cast(torch.Tensor, found).view(batch, length, heads, width), None


@functools.cache
def _register() -> None:
    from transformers import AttentionInterface, masking_utils
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(SDPA, sdpa_attention_forward)
    AttentionInterface.register(FUSED, _fused_attention)
    AttentionInterface.register(MASKED, _fused_attention)
    masking_utils.AttentionMaskInterface.register(MASKED, masking_utils.sdpa_mask)


def _layer_types(config: Any) -> list[str]:
    return getattr(config, "layer_types", None) or []


def window_of(config: Any) -> int | None:
    """Return the tokens that attention looks back; None: all.

    A config may have a key that its class does not declare, and that its model does not read: Llama's a window.
    """
    types = _layer_types(config)
    declared = "sliding_window" in inspect.signature(type(config)).parameters
    return None if not declared or (types and "sliding_attention" not in types) else config.sliding_window


def _documents_mask(config: Any, ids: torch.Tensor, bounds: torch.Tensor) -> Any:
    """Make the mask of documents, in the format of the attention that ``config`` names."""
    from transformers import masking_utils as masks

    (batch, length), window = ids.shape[:2], window_of(config)
    near = masks.causal_mask_function if window is None else masks.sliding_window_causal_mask_function(window)
    document = document_index(ids, bounds)
    return masks.ALL_MASK_ATTENTION_FUNCTIONS[config._attn_implementation](
        batch_size=batch,
        q_length=length,
        kv_length=length,
        mask_function=masks.and_masks(near, masks.packed_sequence_mask_function(document)),
        allow_is_causal_skip=False,
        device=bounds.device,
    )


def make_mask(config: Any, given: dict[str, Any], bounds: torch.Tensor | None) -> Any:
    """Make the mask of a forward pass whose arguments are ``given``; None: it is causal.

    Only positions without ``bounds``, and masks of padding, are read from the device.
    """
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    ids, mask, positions = given.get("input_ids"), given.get("attention_mask"), given.get("position_ids")
    if mask is None and bounds is not None:
        assert ids is not None
        if len(bounds) - 1 > len(ids):
            return _documents_mask(config, ids, bounds)
        positions = None  # every row is one document
    make = create_causal_mask if window_of(config) is None else create_sliding_window_causal_mask
    # Gives the batch size, the length and the device.
    embeds = given.get("inputs_embeds")
    like = embeds if embeds is not None else torch.empty((*cast(torch.Tensor, ids).shape, 1), device=ids.device)  # type: ignore[union-attr]
    return make(
        config=config,
        inputs_embeds=like,
        attention_mask=mask,
        past_key_values=given.get("past_key_values"),
        position_ids=positions,
    )


def _by_lengths(name: str, config: Any, given: dict[str, Any], lengths: dict[str, Any]) -> dict[str, Any]:
    """Return the lengths that the attention function ``name`` is to go by; empty: it goes by a mask, or is causal."""
    ids, others = given.get("input_ids"), ("attention_mask", "past_key_values")
    if name not in (FUSED, *FLASH) or ids is None or any(given.get(key) is not None for key in others):
        return {}
    batch, length = ids.shape[:2]
    if lengths and len(lengths["cu_seq_lens_q"]) - 1 > batch:
        return lengths
    if not lengths and given.get("position_ids") is not None:
        return {}  # which may restart
    # Of rows that are one document each, a window is the only mask; and of a single row transformers' flash attention
    # would read in every block whether its positions restart.
    window = window_of(config)
    needed = batch == 1 if name in FLASH else window is not None and length >= window
    return (lengths or whole_rows(ids)) if needed else {}


def _attend(model: nn.Module, name: str) -> None:
    """Replace the backbone's forward: it makes the mask, or the lengths, that all blocks share.

    Args:
        name: of the attention function that the blocks call; masks are those of the one that the model's config names.
    """
    config, backbone = cast(Any, model.config), cast(Any, model.base_model)
    forward = backbone.forward  # which a script may call without the head
    signature = inspect.signature(forward)
    named = backbone.config
    unmasked = _renamed(named, SDPA)
    names = tuple(document_lengths(torch.empty(0), 0))

    @functools.wraps(forward)
    def attending(*args: Any, **kwargs: Any) -> Any:
        given = {**signature.bind_partial(*args).arguments, **kwargs}
        lengths = {key: given.pop(key) for key in names if given.get(key) is not None}
        used = _by_lengths(name, config, given, lengths)
        if name in FLASH:  # its mask, of padding, is transformers' to make
            backbone.config = unmasked if given.get("attention_mask") is None else named
        elif not used:
            given["attention_mask"] = make_mask(config, given, lengths.get("cu_seq_lens_q"))
        return forward(**given, **used)

    backbone.forward = attending
    setattr(model, KIND, name)


def _without_reading(model: nn.Module, name: str) -> None:
    """Replace the model's forward by one in which transformers makes its masks without a read from the device.

    Args:
        name: of the attention function that the blocks call.
    """
    forward, config = model.forward, cast(Any, model.config)
    signature = inspect.signature(forward)
    names = tuple(document_lengths(torch.empty(0), 0))

    @functools.wraps(forward)
    def attending(*args: Any, **kwargs: Any) -> Any:
        given = {**signature.bind_partial(*args).arguments, **kwargs}
        lengths = {key: given.pop(key) for key in names if given.get(key) is not None}
        used = _by_lengths(name, config, given, lengths)
        ids, bounds = given.get("input_ids"), lengths.get("cu_seq_lens_q")
        if bounds is not None and ids is None:
            raise no_documents("it is given embeddings, not tokens")
        if bounds is None and given.get("position_ids") is not None:
            return forward(**given, **used)  # which may restart
        if bounds is None or ids is None or len(bounds) - 1 <= len(ids):
            with told(lambda position_ids: None):
                return forward(**given, **used)
        document, asked = document_index(ids, bounds), []
        if given.get("position_ids") is None:
            tokens = torch.arange(ids.numel(), device=ids.device).view(ids.shape)
            given["position_ids"] = tokens - bounds.long()[document - 1]
        with told(lambda position_ids: asked.append(True) or document):  # type: ignore[func-returns-value]
            found = forward(**given, **used)
        if not asked:
            raise no_documents("its masks do not depend on positions")
        return found

    model.forward = attending  # type: ignore[method-assign]
    setattr(model, KIND, name)


def _renamed(config: Any, name: str) -> Any:
    config = copy.copy(config)
    config._attn_implementation = name
    return config


def _rename(model: nn.Module, name: str) -> None:
    """Let the blocks call the attention function of another name."""
    # Not in the model's own config, with which others may build a model that makes its mask in transformers.
    config = cast(Any, model.config)
    private = _renamed(config, name)
    for module in model.modules():
        if module is not model and getattr(module, "config", None) is config:
            module.config = private


def use(model: nn.Module, name: str) -> None:
    """Let the blocks call an attention function that needs no mask, whatever is asked for.

    Args:
        name: in transformers' registry of attention functions, which has no mask function of that name.
    """
    _rename(model, name)
    setattr(model, KIND, name)


def apply(model: nn.Module, setup: Setup) -> None:
    """Switch the model to the attention function that is asked for, unless it was built with another than sdpa."""
    if hasattr(model, KIND):  # by another technique
        return
    config = cast(Any, model.config)
    name = getattr(config, "_attn_implementation", None)
    own = setup.family.full_sequence_embedding  # the model makes its masks
    if not own and (name not in ("sdpa", "flex_attention", *FLASH) or len(set(_layer_types(config))) > 1):
        return  # no mask to make, or of several kinds
    _register()
    wanted = setup.settings[Config].attn_implementation
    renamed = wanted in ("fused", "flash_attention_3") and not attention_misfit(config, wanted)
    if name == "sdpa" and (renamed or not own):
        name = {"fused": MASKED if own else FUSED, "flash_attention_3": wanted}.get(wanted, SDPA)
        _rename(model, name)
    if own:
        _without_reading(model, str(name))
    else:
        _attend(model, str(name))


def _unfit(hf_config: Any, *, half: bool) -> str | None:
    """Return why the fused kernels cannot be used, if so."""
    width, dropout = head_width(hf_config), attention_dropout(hf_config)
    if why := attention_misfit(hf_config, "fused"):
        return why
    if dropout:
        return f"they have no attention dropout, and it is {dropout}"
    if not half:
        return "they compute in bf16, and --bf16 is 0"
    if width is None or width % 8 or width > WIDEST_HEAD:
        return f"they take heads of a width that 8 divides, up to {WIDEST_HEAD}, and it is {width or 'not the same'}"
    return None


def problems(hf_config: Any, setup: Setup) -> list[str]:
    """Refuse functions that do not fit, tokens that see later ones, and blocks that are left out at random."""
    found = []
    wanted, default = setup.settings[Config].attn_implementation, default_attention(hf_config)
    if wanted == "fused" and (why := _unfit(hf_config, half=setup.dtype != torch.float32)):
        found.append(f"--attn_implementation fused: {why}: use {default}")
    if how := bidirectional(hf_config):
        found.append(
            f"tokens of this model see the ones after them ({how}), and only decoders are trained: turn it off"
        )
    skipped = next((f"{key} {rate}" for key, rate in random_rates(hf_config).items() if "layerdrop" in key), None)
    if skipped:
        found.append(f"{skipped} in the model's config would leave out other blocks on each rank: set it to 0")
    return found


def choose(situation: Situation) -> Iterator[Choice]:
    """Take flash attention 3 on a Hopper where its package is installed, else the fused kernels where they fit."""
    from transformers.utils import is_flash_attn_3_available

    if default_attention(situation.hf_config) != "sdpa":
        return  # it was built with another
    name, half = "attn_implementation", situation.settings[PrecisionConfig].bf16 is not False
    why, no_flash = (
        _unfit(situation.hf_config, half=half),
        attention_misfit(situation.hf_config, "flash_attention_3"),
    )
    if why:
        yield Choice(name, "sdpa", f"no fused kernels: {why}")
    elif not no_flash and is_flash_attn_3_available() and torch.cuda.get_device_capability()[0] == _HOPPER:
        yield Choice(name, "flash_attention_3", "its package is here, and the GPU is a Hopper")
    else:
        yield Choice(name, "fused", "torch's kernels, cuDNN's first")
