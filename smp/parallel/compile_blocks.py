"""Compile each block with ``torch.compile``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from smp.config import ActivationConfig
from smp.errors import RunError, UserError, first_line
from smp.log import get_logger
from smp.models.attention_support import random_rates
from smp.models.experts import expert_modules
from smp.models.meta_model import meta_model
from smp.parallel import lora
from smp.parallel.choices import Choice, Situation, missing_tools
from smp.parallel.documents import COMPILED
from smp.parallel.technique import Setup, model_blocks

Config = ActivationConfig

logger = get_logger(__name__)

Forward = Callable[..., Any]

# Graphs of one code, for all blocks: training or validation, with a mask or without, another batch size or number of
# documents. torch's 8 would end a run at a validation.
GRAPHS = 64

# A block is one graph, of which these would be breaks: the numbers of rows are read on the host, and experts that are
# split are an FSDP unit inside of the block, whose hooks gather it.
_NOT_OF_EXPERTS = "blocks with experts cannot be compiled: how many tokens an expert has is known in a forward alone"


def choose(situation: Situation) -> Iterator[Choice]:
    """Compile where Triton and a compiler are installed, and blocks draw nothing, are not split and have no experts."""
    missing = missing_tools()
    drawing = "--lora_dropout" if lora.has_dropout(situation.settings) else ", ".join(random_rates(situation.hf_config))
    why = ""
    if drawing:
        why = f"{drawing} draws in blocks"
    elif situation.mesh.tp.size > 1:
        why = "not yet measured on several GPUs, where split blocks have collectives"
    elif _has_experts(situation.hf_config):
        why = _NOT_OF_EXPERTS
    elif missing:
        why = missing
    yield Choice("compile", not why, why or "with Triton and a C compiler")


def _has_experts(hf_config: Any) -> bool:
    return bool(expert_modules(meta_model(hf_config).model))


def problems(hf_config: Any, setup: Setup) -> list[str]:
    """Return why blocks cannot be compiled."""
    asked = setup.settings[Config].compile is True
    return [f"--compile 1: {_NOT_OF_EXPERTS}: leave it out"] if asked and _has_experts(hf_config) else []


class _Compiler:
    """Compiles the blocks of a model, at their first forward.

    Args:
        chosen: whether compiling was chosen, not asked for: blocks that cannot be compiled run as they are.
        split: whether tensor parallelism splits the blocks, so that all ranks must run the same collectives.
    """

    def __init__(self, *, chosen: bool, split: bool):
        from torch._dynamo import exc  # imported late: it takes seconds

        self.chosen, self.split = chosen, split
        self.given_up = False
        self.compiler_failed = exc.BackendCompilerFailed
        self.limit_hit = exc.FailOnRecompileLimitHit
        self.failures = (exc.TorchDynamoException, self.limit_hit)

    def compile(self, block: nn.Module) -> Forward:
        """Return a forward that is compiled; one compilation serves all blocks of the same code."""
        name, forward = type(block).__name__, block.forward
        compiled = torch.compile(forward, fullgraph=True)
        if self.split:
            compiled = _with_local_parameters(block, compiled)

        @functools.wraps(forward)
        def called(*args: Any, **kwargs: Any) -> Any:
            # Under a dispatch mode, such as the memory profile's, torch.compile would give this code up for good.
            if self.given_up or is_in_torch_dispatch_mode():
                return forward(*args, **kwargs)
            try:
                return compiled(*args, **kwargs)
            except self.failures as error:
                self.give_up(name, error)
            return forward(*args, **kwargs)

        return called

    def give_up(self, name: str, error: Exception) -> None:
        """Let all blocks run uncompiled from now on, with a warning, if compiling was chosen.

        Nothing of the block has run yet. All ranks meet what cannot be traced; the compiler may fail on one rank alone,
        whose collectives inside split blocks could then come in another order than the others'.

        Raises:
            UserError: compiling was asked for, and the block's code cannot be traced as a whole.
            RunError: compiling was asked for, or the blocks are split, and the compiler failed.
        """
        failed = isinstance(error, self.compiler_failed)
        cause = getattr(error, "inner_exception", error)  # of the compiler
        if isinstance(error, self.limit_hit):
            cause = error.__cause__ or error  # names the limit
        what = f"torch.compile cannot compile {name}{_place(error)}: {first_line(cause)}"
        if not self.chosen or (self.split and failed):
            kind = RunError if failed else UserError
            advice = "leave --compile out or give --compile 0"
            if failed and " " in torch.__file__:
                advice += ", or install torch in a path without spaces, which torch.compile does not quote"
            raise kind(f"{what}; {advice}") from error
        logger.warning("Blocks run uncompiled: %s", what)
        self.given_up = True


def _place(error: Exception) -> str:
    """Return the line of code that cannot be compiled, where it is known."""
    stack = getattr(error, "real_stack", None)
    return f", at {stack[-1].filename}:{stack[-1].lineno} `{stack[-1].line}`" if stack else ""


def _with_local_parameters(block: nn.Module, forward: Forward) -> Forward:
    """Let ``forward`` read the local tensors of DTensor parameters.

    torch 2.13 confuses the mesh of a DTensor with the generator's state that a recomputed attention adds on CPUs.
    """

    def called(*args: Any, **kwargs: Any) -> Any:
        everything = [(m._parameters, name, p) for m in block.modules() for name, p in m._parameters.items()]
        own = [(parameters, name, p) for parameters, name, p in everything if isinstance(p, DTensor)]
        for parameters, name, parameter in own:
            parameters[name] = cast(Any, parameter).to_local()
        try:
            return forward(*args, **kwargs)
        finally:
            for parameters, name, parameter in own:
                parameters[name] = parameter

    return called


def apply(model: nn.Module, setup: Setup) -> None:
    """Compile the blocks.

    After checkpointing, which the compiler then does itself: around compiled code it would see none of the operations
    whose results it is to keep. Before offloading, whose hooks see what the compiled block saves.
    """
    if not setup.settings[Config].compile:
        return
    from torch._dynamo import config as tracing
    from torch._functorch import config as lowering

    # Split layers hand tensors on in attributes during a forward; nothing is to be done again in backward.
    tracing.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    tracing.recompile_limit = max(tracing.recompile_limit, GRAPHS)
    # Backward is compiled with forward, so that a failure is known before anything has run.
    lowering.force_non_lazy_backward_lowering = True
    compiler = _Compiler(chosen="compile" in setup.settings.chosen, split=setup.mesh.tp.size > 1)
    setattr(model, COMPILED, True)
    for block in model_blocks(model, setup.family):
        block.forward = compiler.compile(block)  # type: ignore[method-assign]
