"""Activation checkpointing: save a block's input in forward, recompute the rest in backward."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, cast, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, CheckpointWrapper
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode, _push_mode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    _CachedTorchDispatchMode,
    _CachingTorchDispatchMode,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from smp.config import ActivationConfig
from smp.errors import UserError
from smp.log import get_logger
from smp.memory.shape import (
    NONE,
    PRODUCTS,
    RECOMPUTATION,
    SELECTIVE,
    ModelShape,
    Moment,
    Workload,
    block_bytes,
    recomputations,
    splits_tokens,
)
from smp.mesh import Mesh
from smp.models.experts import is_experts
from smp.parallel.choices import Choice, Situation
from smp.parallel.context.attention import splits_sequences
from smp.parallel.linear import ProductCounter, product_of
from smp.parallel.technique import Setup, draws, model_blocks

Config = ActivationConfig
logger = get_logger(__name__)

Mode = Literal["full", "selective", "products"]
_MARK, _NO_CACHE = "_smp_block", "_smp_no_cache"

# Operators by name: those of packages are registered when the package is imported.
_PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::_scaled_mm", "aten::_scaled_mm_v2"}
_OF_EXPERTS = {"aten::_grouped_mm", "aten::_scaled_grouped_mm"}
# Of attention, in any namespace: torch's, flash-attn's of both versions and of the kernels hub, flex attention.
_ATTENTION = {
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_attention_math",
    "_scaled_dot_product_fused_attention_overrideable",
    "_varlen_attn",
    "_flash_attn_forward",
    "_flash_attn_varlen_forward",
    "flex_attention",
}
# Small and slow. Not gathers: their results are large, and backward of split layers gathers anyway.
_REDUCTIONS = {
    "smp::reduce_tokens",
    "symm_mem::fused_matmul_reduce_scatter",
    "_c10d_functional::all_reduce",
    "_c10d_functional::reduce_scatter_tensor",
    "_c10d_functional::all_to_all_single",
    "smp::exchange_rows",
}
# What decides which tokens an expert gets. It is kept at any mode: scores that tie, or differ in a last bit, would be
# sent otherwise, and ranks that send other numbers of rows than in forward wait for each other.
_ROUTING = {"smp::chosen_experts", "smp::sum_for_choice", "smp::exchange_counts"}


def choose(situation: Situation) -> Iterator[Choice]:
    """Recompute as little as memory allows."""
    auto, config = situation.settings.undecided(), situation.settings[Config]
    given = {name: getattr(config, name) for name in RECOMPUTATION[-1] if name not in auto}
    if config.offload_activations:  # of a block that is not recomputed nearly everything would be moved
        given = {"activation_checkpointing": True, "activation_checkpointing_every": 1, **given}
    for chosen in recomputations(given):
        if fits := situation.fits(**chosen):
            break
    reason = "the first that fits into memory" if fits else "the least memory"
    yield from (Choice(name, value, reason) for name, value in chosen.items())


def _policy(*, attention: bool = True, products: bool = False) -> Callable[..., CheckpointPolicy]:
    """Save attention, reductions over ranks and every other matrix product; recompute the rest.

    Args:
        attention: whether that is saved; under context parallelism it is a sum of several results, and recomputed.
        products: save every one, of experts too.

    Source: the per-operation policy of torchtitan, and Korthikanti et al., arXiv:2205.05198.
    """
    # Recomputation decides again, and must come to the forward's decisions: it counts from the start.
    counters = {False: ProductCounter(), True: ProductCounter()}

    def decide(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = operation.name()
        if name in _PRODUCTS:
            number = counters[context.is_recompute].number()
            keep = number is not None and (products or number % 2 == 1)
        elif name in _OF_EXPERTS:
            keep = products
        else:
            keep = name in _REDUCTIONS | _ROUTING or (attention and name.rpartition("::")[2] in _ATTENTION)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return decide


def _keep_routing(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Save which experts get which tokens; recompute the rest."""
    return CheckpointPolicy.MUST_SAVE if operation.name() in _ROUTING else CheckpointPolicy.PREFER_RECOMPUTE


def hide_from_selection(module: FSDPModule) -> None:
    """Hide from the selection of what is saved, which counts operations, those of ``fully_shard`` inside of a block.

    Recomputation enters a sharded module as the first one of a forward, and has more of them than the forward.
    """
    hooks: Any = module
    state = hooks._get_fsdp_state()
    for registered, handle in (
        (hooks._forward_pre_hooks, state._pre_forward_hook_handle),
        (hooks._forward_hooks, state._post_forward_hook_handle),
    ):
        registered[handle.id] = _without_selection()(registered[handle.id])


@contextlib.contextmanager
def _without_selection() -> Iterator[None]:
    popped = []
    while isinstance(_get_current_dispatch_mode(), (_CachingTorchDispatchMode, _CachedTorchDispatchMode)):
        popped.append(_pop_mode())
    try:
        yield
    finally:
        for mode in reversed(popped):
            _push_mode(mode)


def _blocks(model: nn.Module | Iterable[nn.Module], check_fn: Callable[[nn.Module], bool] | None) -> list[nn.Module]:
    if not isinstance(model, nn.Module) or (check_fn is None and isinstance(model, (nn.ModuleList, nn.Sequential))):
        return list(model)
    blocks = [module for module in model.modules() if check_fn is not None and check_fn(module)]
    if not blocks:
        raise UserError(
            "apply_activation_checkpointing finds no block: give check_fn, such as "
            "lambda module: isinstance(module, LlamaDecoderLayer), or the blocks themselves"
        )
    return blocks


def _selective_contexts(attention: bool, products: bool) -> tuple[Any, Any]:
    return create_selective_checkpoint_contexts(_policy(attention=attention, products=products))


def checkpointed_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules that :func:`apply_activation_checkpointing` was given, in order."""
    return [module for module in model.modules() if hasattr(module, _MARK)]


def leave_out_cache(model: nn.Module) -> None:
    """Let transformers' models below ``model`` compute without a cache of keys and values wherever gradients are.

    Recomputation calls a block twice, and the second call would add its keys to those of the first: with torch's
    reentrant checkpointing gradients are then wrong without an error. Under ``torch.no_grad()``, as in ``generate``,
    a cache is used as before.
    """
    caching = []
    for module in model.modules():
        names = list(inspect.signature(module.forward).parameters) if hasattr(module, "config") else []
        if "use_cache" in names and not hasattr(module, _NO_CACHE):
            setattr(module, _NO_CACHE, True)
            hook = functools.partial(_without_cache, names.index("use_cache"))
            module.register_forward_pre_hook(hook, with_kwargs=True)
            caching.append(module)
    if not any(getattr(module.config, "use_cache", False) for module in caching):
        return

    def tell(*_: object) -> None:
        handle.remove()
        if dist.is_initialized() and dist.get_rank():
            return
        recomputes = any(isinstance(module, CheckpointWrapper) or hasattr(module, _MARK) for module in model.modules())
        logger.log(
            logging.WARNING if recomputes else logging.INFO,
            "use_cache is off in forwards with gradients: recomputing a block would fill its cache of keys and values "
            "twice, and gradients would be wrong. generate() and torch.no_grad() have it as before; "
            "model.config.use_cache = False before training does the same without this message",
        )

    handle = caching[0].register_forward_pre_hook(torch.compiler.disable(tell))


def _without_cache(
    index: int, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the arguments of a forward with ``use_cache=False``, its ``index``-th, unless they have a cache.

    Raises:
        UserError: they have one that torch's reentrant checkpointing would fill twice.
    """
    if not torch.is_grad_enabled() or len(args) > index:
        return None
    if kwargs.get("use_cache") or kwargs.get("past_key_values") is not None:
        for module in model.modules():
            if isinstance(module, CheckpointWrapper) and module.checkpoint_impl is CheckpointImpl.REENTRANT:
                raise UserError(
                    "use_cache=True or past_key_values with reentrant checkpointing: recomputation would fill the "
                    "cache twice, and gradients would be wrong. Leave both out, or call the model under "
                    "torch.no_grad()"
                )
        return None
    return args, {**kwargs, "use_cache": False}


def apply_activation_checkpointing(
    model: nn.Module | Iterable[nn.Module],
    *,
    check_fn: Callable[[nn.Module], bool] | None = None,
    mode: Mode = "full",
    every: int = 1,
    preserve_rng_state: bool = True,
) -> None:
    """Recompute blocks in backward (non-reentrant), with the dropout masks of their forward.

    The block's ``forward`` is wrapped, not the module: parameter names stay Hugging Face's, and recomputation runs
    inside the hooks of ``fully_shard``, without another gather of the parameters.

    Args:
        model: the blocks in the order of the forward, or a model and ``check_fn``. Blocks alone must not fill a cache
            of keys and values, which a model's forward then does without.
        check_fn: tells the model's blocks, as for torch's function of this name:
            ``lambda module: isinstance(module, LlamaDecoderLayer)``.
        mode: ``full`` saves a block's input alone, and of a mixture which experts get which tokens; ``selective`` also
            the outputs of attention, of reductions over ranks and of every other matrix product; ``products`` those of
            every one. Under context parallelism attention is recomputed, with its collectives.
        every: recompute every n-th block only, beginning with the first.
        preserve_rng_state: draw the same random numbers again; False spares the copies of the generators, where
            no random numbers are drawn.

    Raises:
        UserError: an unknown mode, ``every`` below 1, a model without ``check_fn``, or no block in it.

    Source: Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv:1604.06174.
    """
    if mode not in get_args(Mode) or every < 1:
        raise UserError(
            f"activation checkpointing takes mode {', '.join(get_args(Mode))} and every >= 1, got {mode} and {every}"
        )
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": preserve_rng_state}
    blocks = _blocks(model, check_fn)
    if isinstance(model, nn.Module):
        leave_out_cache(model)
    if mode != "full":
        attention = not any(map(splits_sequences, blocks))
        options["context_fn"] = functools.partial(_selective_contexts, attention, mode == "products")
    elif any(is_experts(module) for block in blocks for module in block.modules()):
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _keep_routing)
    for index, block in enumerate(blocks):
        setattr(block, _MARK, True)
        if index % every:
            continue
        forward = block.forward
        block.forward = functools.wraps(forward)(  # type: ignore[method-assign]
            functools.partial(checkpoint, forward, **options)
        )


def apply(model: nn.Module, setup: Setup) -> None:
    """Checkpoint the model's blocks."""
    config = setup.settings[Config]
    if config.activation_checkpointing:
        apply_activation_checkpointing(
            model_blocks(model, setup.family),
            mode=cast(Mode, config.activation_checkpointing_mode),
            every=cast(int, config.activation_checkpointing_every),
            preserve_rng_state=draws(model, model.config) or any(product_of(m).dropout for m in model.modules()),
        )


def waiting_bytes(shape: ModelShape, mesh: Mesh, work: Workload, *, blocks: int) -> int:
    """Count the bytes that so many blocks save for backward; a checkpointed one saves its input alone."""
    config, block = work.settings[Config], block_bytes(shape, mesh, work)
    per_block = float(block.inside)
    if config.activation_checkpointing:
        recomputed = -(-shape.layers // work.every)
        per_block = (recomputed * block.input + (shape.layers - recomputed) * block.inside) / shape.layers
    return int(blocks * per_block)


def cost(shape: ModelShape, mesh: Mesh, work: Workload) -> dict[str, int]:
    """Count the saved activations, those of the block that is recomputed, and the gradients that pass through it."""
    moment = work.moment
    state = work.tokens(mesh) * shape.hidden * work.compute_bytes
    if moment is Moment.UPDATE:
        return {}
    # Tokens, labels and positions, 8 bytes each, and two tables of rotary angles in fp32.
    inputs = 3 * 8 * work.tokens(mesh) + 2 * 4 * work.columns(mesh) * (shape.attention or shape.hidden) // shape.heads
    if moment is Moment.EMBEDDING:
        return {"activations": 2 * shape.states * state + inputs}
    blocks = 1 if moment in (Moment.FIRST_BLOCK, Moment.FIRST_REDUCTION) else shape.layers
    total = inputs + waiting_bytes(shape, mesh, work, blocks=blocks)
    selective = work.recomputation in (PRODUCTS, SELECTIVE)
    if selective:  # these are not offloaded
        total += -(-blocks // work.every) * _kept_bytes(shape, mesh, work)
    if moment in (Moment.LAST_BLOCK, Moment.FIRST_BLOCK):
        return {"activations": total + _running_bytes(shape, mesh, work, selective=selective)}
    # The loss's input and the final norm's, which is in fp32, and their gradients.
    return {"activations": total + (4 if work.compute_bytes >= 4 else 6) * state}


def _running_bytes(shape: ModelShape, mesh: Mesh, work: Workload, *, selective: bool) -> int:
    """Count what the block in backward holds: what it has recomputed, and the gradients that pass through its MLP.

    Measured: four widths of the MLP and of the hidden states where nothing is recomputed, two of the MLP where all is.
    With ``selective`` or ``products``, what is recomputed leaves out what was kept, which makes up for them.
    """
    inner = work.tokens(mesh) * shape.intermediate * work.compute_bytes // mesh.tp.size
    if work.recomputation == NONE:
        return 4 * (inner + work.tokens(mesh) * shape.hidden * work.compute_bytes)
    return block_bytes(shape, mesh, work).inside + (0 if selective else 2 * inner)


def _kept_bytes(shape: ModelShape, mesh: Mesh, work: Workload) -> int:
    """Count what ``selective``, or ``products``, keeps of a block besides its input.

    Of the products query, value and the first of the MLP's, of which a gated one has another; or query, key and value
    in one; and its last. Or all of them, of experts half of what these save. Attention's output and, per head and
    token, the logarithm of its sum in fp32. Under tensor parallelism two sums over the ranks. Under context parallelism
    not attention's. Of experts that are split, what is sent to them and what comes back.
    """
    tp = mesh.tp.size
    key_value = shape.key_value // (2 * shape.hidden) or shape.hidden
    products = shape.hidden + key_value + shape.intermediate + shape.hidden
    routed = 0
    if work.recomputation == PRODUCTS:
        products += shape.hidden + key_value + (shape.intermediate if shape.gated_mlp else 0)
        routed = int(work.imbalance * shape.routed) // 2 * work.compute_bytes
    attention = 0 if mesh.cp.size > 1 else shape.hidden * work.compute_bytes + 4 * shape.heads
    split = products * work.compute_bytes + attention
    reduced = 2 * shape.hidden // (tp if splits_tokens(mesh, work) else 1) * work.compute_bytes if tp > 1 else 0
    sent = int((work.imbalance + 1) * shape.sent) * work.compute_bytes if mesh.degree("ep") > 1 else 0
    return work.tokens(mesh) * (split // tp + reduced + (sent + routed) // (tp if splits_tokens(mesh, work) else 1))
