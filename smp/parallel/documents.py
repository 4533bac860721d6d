"""Documents that share a row: masks keep them apart in attention, and calls for each in layers that mix tokens besides.

Masks are transformers', which are told which token is of which document instead of reading it from the device. Its
layers of linear attention, state spaces and convolutions take documents' lengths with kernels alone that not every
machine has, and some ignore them, so that they are called on each document by itself: where positions restart, as for
the masks, without an attention_mask and a cache. Where is read from the device, once in a forward.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from smp.config import ParallelConfig
from smp.errors import UserError
from smp.models.derive import without_values
from smp.models.hf_values import rope_limit
from smp.models.meta_model import meta_model
from smp.models.registry import build_model, family_of
from smp.parallel.mixers import LINEAR, Bounds, by_document, elsewhere, mixers_by_block
from smp.parallel.technique import Setup, model_blocks

Config = ParallelConfig

# Called in place of transformers' function, which reads positions ``(batch, sequence)``.
Find = Callable[[torch.Tensor], torch.Tensor | None]

# Keyword that a model hands on to its blocks, with which a block is recomputed, too.
DOCUMENTS = "documents_of_rows"
COMPILED = "_smp_blocks_compiled"  # attribute of a model
NOT_COMPILED = (
    "blocks that call a layer on each of their packed documents cannot be compiled, as every batch has others"
)
UNTOLD = "its blocks are not given the keywords of its forward"
_MARK = "_smp_documents_apart"
# Of attention's kernels, and of those of layers that mix tokens, which are called on rows or single documents.
_LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")

_told: contextvars.ContextVar[Find | None] = contextvars.ContextVar("smp_documents", default=None)
# Of packed documents: positions of the model that runs, and bounds of the block that runs.
_positions: contextvars.ContextVar[torch.Tensor | None] = contextvars.ContextVar("smp_positions", default=None)
_rows: contextvars.ContextVar[Bounds | None] = contextvars.ContextVar("smp_document_bounds", default=None)


@functools.cache
def _install() -> None:
    from transformers import masking_utils

    find = masking_utils.find_packed_sequence_indices

    @functools.wraps(find)
    def told(position_ids: torch.Tensor) -> torch.Tensor | None:
        return (_told.get() or find)(position_ids)

    masking_utils.find_packed_sequence_indices = told


@contextlib.contextmanager
def told(find: Find | None) -> Iterator[None]:
    """Let transformers' masks take documents from a function; None: from positions, as it does itself."""
    _install()
    token = _told.set(find)
    try:
        yield
    finally:
        _told.reset(token)


def document_index(ids: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """Return the number of every token's document, from 1 on, in the shape of ``ids``."""
    tokens = torch.arange(ids.numel(), dtype=bounds.dtype, device=bounds.device)
    return torch.bucketize(tokens, bounds, right=True).view(ids.shape)


def bounds_of(positions: torch.Tensor) -> torch.Tensor:
    """Return where documents begin in a flattened batch, and its end, ``(documents + 1,)`` int32: at rows and restarts.

    Args:
        positions: ``(batch, sequence)``.
    """
    starts = F.pad(positions[:, 1:] != positions[:, :-1] + 1, (1, 0), value=True)
    first = starts.flatten().nonzero().flatten()
    return F.pad(first, (0, 1), value=positions.numel()).to(torch.int32)


def no_documents(why: str, instead: str = "") -> UserError:
    """Return the refusal of documents that the model would not keep apart; ``instead`` is another way than rows."""
    return UserError(
        f"the model does not keep packed documents apart ({why}), as --document_mask 1 and --dataset_type chat do: use "
        f"{instead}--document_mask 0, and for conversations --pack 0"
    )


def check_documents(hf_config: Any, length: int = 0) -> None:
    """Check that a model keeps packed documents apart.

    Args:
        length: of a row: rotary embeddings with two sets of factors take one of them by the longest document.

    Raises:
        UserError: it does not.
    """
    if found := mixes_documents(hf_config, length):
        raise no_documents(*found)


def mixes_documents(hf_config: Any, length: int = 0) -> tuple[str] | tuple[str, str] | None:
    """Return why a model does not keep packed documents apart, and perhaps another way; None: it does.

    A forward on the meta device tells whether its masks follow from positions that restart.
    """
    kind, most = rope_limit(hf_config) or ("", length)
    if kind == "dynamic":
        return ("its rotary embedding (dynamic) goes by the longest document of a micro-batch",)
    if length > most:
        longer = f"beyond {most} tokens its rotary embedding is another for all of a micro-batch"
        return longer, f"--max_context_width {most}, or "
    with torch.device("meta"):
        model = build_model(hf_config, attn_implementation="eager")
        ids, positions = (torch.zeros(2, 6, dtype=torch.long) for _ in range(2))
    blocks = model_blocks(model, family_of(hf_config))
    if why := elsewhere(model, blocks):
        return (why,)
    asked, untold = list[bool](), list[bool]()

    def find(position_ids: torch.Tensor) -> torch.Tensor:
        asked.append(_same_memory(position_ids, positions))
        return positions

    def enter(block: nn.Module, args: Any, kwargs: Any) -> None:
        untold.append(DOCUMENTS not in kwargs)

    mixers = mixers_by_block(model, blocks)
    for block, found in zip(blocks, mixers, strict=True):
        if found:
            block.register_forward_pre_hook(enter, with_kwargs=True)
    more = {DOCUMENTS: ()} if any(mixers) else {}
    filling_in = _filling_in(model, positions) if any(mixers) else contextlib.nullcontext()
    try:
        with torch.no_grad(), torch.device("meta"), told(find), without_values(model), filling_in:
            model(input_ids=ids, position_ids=positions, use_cache=False, **more)
    except TypeError:
        return ("its forward takes no positions",)
    except RuntimeError as error:
        return (f"its forward cannot be followed without values: {error}",)
    if any(untold):
        return (UNTOLD,)
    return None if asked and all(asked) else ("its masks do not depend on positions",)


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether tensors are views of the same values, which those on the meta device may be, too."""
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


@contextlib.contextmanager
def _filling_in(model: nn.Module, positions: torch.Tensor) -> Iterator[None]:
    """Let a model's masks follow from its positions, which Granite's code does not hand on to them."""
    module: Any = sys.modules[type(getattr(model, "base_model", model)).__module__]
    make = getattr(module, "create_causal_mask", None)
    if make is not None and not hasattr(make, _MARK):
        module.create_causal_mask = _with_positions(make)
    token = _positions.set(positions)
    try:
        yield
    finally:
        _positions.reset(token)


def _with_positions(make: Any) -> Any:
    @functools.wraps(make)
    def create_causal_mask(*args: Any, **kwargs: Any) -> Any:
        positions = _positions.get()
        if positions is not None and len(args) < 5 and kwargs.get("position_ids") is None:
            kwargs["position_ids"] = positions
        return make(*args, **kwargs)

    setattr(create_causal_mask, _MARK, True)
    return create_causal_mask


def rows_of(positions: torch.Tensor) -> Bounds | None:
    """Return where each row's documents begin, read from the device; None: each row is one.

    Args:
        positions: ``(rows, columns)``, which restart at each document. The last one again and again is padding.
    """
    before, after = positions[:, :-1], positions[:, 1:]
    restarts = (after != before + 1) & ((after != before) | (after == 0))
    if not restarts.any():
        return None
    found = [[0] for _ in positions]
    for row, column in restarts.nonzero().tolist():
        found[row].append(column + 1)
    return tuple((*starts, positions.shape[1]) for starts in found)


def keep_apart(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Let layers that mix tokens compute each document by itself, in place.

    A model with layers that cannot be called so, or that is compiled, refuses positions that restart.
    """
    why, mixers = elsewhere(model, blocks), mixers_by_block(model, blocks)
    caller = cast(nn.Module, getattr(model, "base_model", model))
    if "position_ids" not in inspect.signature(caller.forward).parameters:
        caller, why = model, why or "its forward takes no positions"
    if hasattr(model, _MARK) or not (why or any(mixers)):
        return
    setattr(model, _MARK, True)
    for each in itertools.chain(*mixers):
        each.forward = _apart(model, each.forward)  # type: ignore[method-assign]
    for block in blocks:
        block.forward = _entered(block)  # type: ignore[method-assign]
    caller.forward = _telling(model, caller.forward, why)  # type: ignore[method-assign]


def keep_apart_in_script(model: nn.Module) -> None:
    """Call :func:`keep_apart` with a causal language model of transformers; any other module stays as it is."""
    config: Any = getattr(model, "config", None)
    kinds = getattr(config, "layer_types", None) or ()
    if config is None or not (LINEAR in kinds or any(isinstance(each, nn.Conv1d) for each in model.modules())):
        return
    try:
        blocks = model_blocks(model, family_of(config))
    except (UserError, AttributeError):  # another kind of model, or a part of one
        return
    keep_apart(model, blocks)


def calls_for_each(hf_config: Any) -> bool:
    """Return whether a model has layers that are called on each document by itself."""
    model = meta_model(hf_config).model
    return any(mixers_by_block(model, model_blocks(model, family_of(hf_config))))


def _telling(model: nn.Module, forward: Any, why_not: str | None) -> Any:
    signature = inspect.signature(forward)

    @functools.wraps(forward)
    def telling(*args: Any, **kwargs: Any) -> Any:
        given = {**signature.bind_partial(*args).arguments, **kwargs}
        positions = given.get("position_ids")
        if positions is not None and positions.ndim == 3:  # of text, height and width after those that count all
            positions = positions[0] if len(positions) == 4 else None
        others = ("attention_mask", "past_key_values", "cache_params")
        if positions is None or any(given.get(name) is not None for name in others):
            return forward(*args, **kwargs)
        ids = given["inputs_embeds"] if given.get("input_ids") is None else given["input_ids"]
        positions = positions.expand(len(ids), -1)
        if (rows := rows_of(positions)) is None:
            return forward(*args, **kwargs)
        if why_not is not None:
            raise no_documents(why_not)
        if hasattr(model, COMPILED):
            raise UserError(f"{NOT_COMPILED}: leave --compile 1 out")
        with _filling_in(model, positions):
            return forward(**{**given, "use_cache": False, DOCUMENTS: rows})

    return telling


def _entered(block: Any) -> Any:
    """Return a block's forward which tells the layers in it what it was told, also when it is recomputed."""
    forward = block.forward

    @functools.wraps(forward)
    def entered(*args: Any, **kwargs: Any) -> Any:
        if (rows := kwargs.pop(DOCUMENTS, None)) is None:
            return forward(*args, **kwargs)
        # transformers' own checkpointing, by the class, recomputes what is inside of this.
        checkpoint = vars(block).get("_gradient_checkpointing_func")
        if checkpoint is not None:
            block._gradient_checkpointing_func = lambda run, *given: checkpoint(partial(_tell, rows, run), *given)
        try:
            return _tell(rows, forward, *args, **kwargs)
        finally:
            if checkpoint is not None:
                block._gradient_checkpointing_func = checkpoint

    return entered


def _tell(rows: Bounds, run: Any, *args: Any, **kwargs: Any) -> Any:
    token = _rows.set(rows)
    try:
        return run(*args, **kwargs)
    finally:
        _rows.reset(token)


def _apart(model: nn.Module, forward: Any) -> Any:
    """Return the forward of a layer that mixes tokens, of each document by itself."""

    @functools.wraps(forward)
    def apart(*args: Any, **kwargs: Any) -> Any:
        kwargs = {name: value for name, value in kwargs.items() if name not in (DOCUMENTS, *_LENGTHS)}
        if hasattr(model, COMPILED):  # which cannot be asked for a context's variables, and has no packed documents
            return forward(*args, **kwargs)
        if (rows := _rows.get()) is not None:
            return by_document(forward, rows, args, kwargs)
        if _positions.get() is not None:
            raise no_documents(UNTOLD)
        return forward(*args, **kwargs)

    return apart


def apply(model: nn.Module, setup: Setup) -> None:
    """Keep documents apart, unless context parallelism does."""
    if setup.mesh.cp.size == 1:
        keep_apart(model, model_blocks(model, setup.family))
