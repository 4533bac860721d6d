"""Open, SMP-v2-style model-parallel training for PyTorch: the public names.

``import smp`` imports torch and registers the backend ``smddp``, so that ``init_process_group("smddp")`` works in
whatever order a script imports the two. Only the ``smp`` command, whose help need not wait for torch, and the launcher
of other processes do without.
"""

import itertools
import pathlib
import sys


def _program() -> str:
    """Return the module of smp that this process was started as, ``smp`` for the command; empty in a script."""
    if sys.argv[:1] == ["-m"]:  # while Python looks for the module
        return next((name for flag, name in itertools.pairwise(sys.orig_argv) if flag == "-m"), "")
    script, bin_directory = pathlib.Path(*sys.argv[:1]), pathlib.Path(sys.executable or "").parent
    if script.name == "train_lib.py" and str(script) in sys.orig_argv:  # SMP v2's job, and no process that it starts
        return "smp.train"
    return "smp" if script.stem == "smp" and script.resolve().parent == bin_directory.resolve() else ""


__version__ = "0.1.0"
if _program() in ("smp.train", "smp.launch.local"):
    from smp.starting import announce, leave_on_interrupt

    leave_on_interrupt()
    announce(__version__, sys.argv[1:], is_launcher=_program() == "smp.launch.local")

if _program() not in ("smp", "smp.launch.local"):
    from smp import comm
    from smp.api import current as _current
    from smp.api import (
        init,
        is_initialized,
        load_pretrained,
        meta_init,
        offload_wrapper,
        parallelize,
        sequence_log_probs,
        shard_sequence,
        state,
        transform,
    )
    from smp.checkpoint.checkpointer import Checkpointer
    from smp.checkpoint.hf_export import export_hf
    from smp.compat.moe import MoEConfig
    from smp.config import ActivationConfig, CommConfig, LossConfig, ParallelConfig, PrecisionConfig
    from smp.errors import ConfigError, UserError
    from smp.fsdp import DelayedParamIniter, FullStateDictConfig, FullyShardedDataParallel, fully_shard
    from smp.fsdp import follow as _follow
    from smp.loss import causal_lm_loss_sum, count_valid_tokens
    from smp.memory.profile import profile_memory
    from smp.mesh import Mesh
    from smp.models.family import Family, LogitTransform
    from smp.models.registry import family_of, register_family
    from smp.models.tensor_plan import Part, TensorPlan
    from smp.parallel.activation_checkpoint import apply_activation_checkpointing
    from smp.parallel.grad_norm import clip_grad_norm_
    from smp.parallel.lora import adapt as lora
    from smp.parallel.loss import chunk_loss, linear_cross_entropy
    from smp.parallel.sharding import set_gradient_sync
    from smp.runtime import init_process_group

    _follow(_current)
    FSDP = FullyShardedDataParallel
    Checkpoints = Checkpointer  # its name in 0.1.0

__all__ = [
    "FSDP",
    "ActivationConfig",
    "Checkpointer",
    "Checkpoints",
    "CommConfig",
    "ConfigError",
    "DelayedParamIniter",
    "Family",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LogitTransform",
    "LossConfig",
    "Mesh",
    "MoEConfig",
    "ParallelConfig",
    "Part",
    "PrecisionConfig",
    "TensorPlan",
    "UserError",
    "apply_activation_checkpointing",
    "causal_lm_loss_sum",
    "chunk_loss",
    "clip_grad_norm_",
    "comm",
    "count_valid_tokens",
    "export_hf",
    "family_of",
    "fully_shard",
    "init",
    "init_process_group",
    "is_initialized",
    "linear_cross_entropy",
    "load_pretrained",
    "lora",
    "meta_init",
    "offload_wrapper",
    "parallelize",
    "profile_memory",
    "register_family",
    "sequence_log_probs",
    "set_gradient_sync",
    "shard_sequence",
    "state",
    "transform",
]
