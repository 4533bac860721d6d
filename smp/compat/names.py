"""The table of SMP v2's and SMDDP's names and their replacements, for the documentation and ``smp.sagemaker``."""

from __future__ import annotations

from typing import NamedTuple


class Name(NamedTuple):
    """A function, class or module of the originals.

    Attributes:
        original: its dotted name.
        ours: the dotted name of what takes its place; empty if there is none.
        same: whether ours can stand in for it as it is, so that ``smp.sagemaker`` gives it.
        note: what differs, or what to do instead.
    """

    original: str
    ours: str
    same: bool
    note: str


_CHECKPOINT = "torch.sagemaker.distributed.checkpoint"
_SAVER, _UTILS, _S3 = (
    f"{_CHECKPOINT}.state_dict_saver",
    f"{_CHECKPOINT}.state_dict_utils",
    f"{_CHECKPOINT}.s3_filesystem",
)
_WRAPPERS = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
_TRANSFORMER = "torch.sagemaker.tensor_parallel.transformer"
_MODULES = "torch.sagemaker.utils.module_utils"


def _helpers(module: str, *names: str, note: str = "") -> tuple[Name, ...]:
    """Return entries of a module's functions that :mod:`smp.compat.stand_ins` has under their own names."""
    return tuple(Name(f"{module}.{name}", f"smp.compat.stand_ins.{name}", True, note) for name in names)


def _same(ours: str, module: str, *names: str, note: str = "") -> tuple[Name, ...]:
    """Return entries of names that work as they are, by ours; ``{name}`` in that is the name itself."""
    return tuple(Name(f"{module}.{name}", ours.format(name=name), True, note) for name in names)


def _gone(ours: str, module: str, *names: str, note: str) -> tuple[Name, ...]:
    """Return entries of names that are refused with a note on what to use instead; ``ours`` may be empty."""
    return tuple(Name(f"{module}.{name}", ours, False, note) for name in names)


NAMES = (
    *_same(
        "smp.sagemaker.init", "torch.sagemaker", "init",
        note="after the process group, as there; the estimator's parameters (SM_HP_MP_PARAMETERS) go before its "
        "argument's",
    ),
    *_same("smp.is_initialized", "torch.sagemaker", "is_initialized"),
    *_same(
        "smp.sagemaker.transform", "torch.sagemaker", "transform",
        note="splits Hugging Face's own modules in place. As smp.transform, but the model also takes batches as "
        "scripts cut them for context parallelism",
    ),
    *_same(
        "smp.state", "torch.sagemaker", "state",
        note="the same fields, and reset(); before init degrees are 1 or what was set, which init takes",
    ),
    *_same("smp.state", "torch.sagemaker.state_handler", "state", note="the same"),
    *_same("smp.clip_grad_norm_", "torch.sagemaker.grad_norm", "clip_grad_norm_", note="0 only measures"),
    *_same(
        "smp.DelayedParamIniter", "torch.sagemaker.delayed_param", "DelayedParamIniter",
        note="values do not depend on the layout",
    ),
    *_same(
        "smp.FullyShardedDataParallel", "torch.distributed.fsdp", "FullyShardedDataParallel",
        note="the same arguments, and SMP's post_param_init_fn; see from_fsdp1.md. torch's own stays in "
        "torch.distributed.fsdp.fully_sharded_data_parallel",
    ),
    *_same(
        "smp.FullStateDictConfig", "torch.distributed.fsdp", "FullStateDictConfig",
        note="takes translate_on_save=True: names are always Hugging Face's; smp.export_hf writes them",
    ),
    *_same(
        "smp.compat.stand_ins.load_sharded_optimizer_state_dict", "torch.distributed.checkpoint",
        "optimizer.load_sharded_optimizer_state_dict", "load_sharded_optimizer_state_dict",
        note="DTensors, as smp.FSDP has them; takes process_group",
    ),
    *_same(
        "smp.compat.group_checkpoints.{name}", "torch.distributed.checkpoint", "save_state_dict", "load_state_dict",
        note="by a process group of some axes of the mesh, too, such as a tensor-parallel rank's folder",
    ),
    *_gone(
        "smp.offload_wrapper", _WRAPPERS, "offload_wrapper",
        note="of checkpointed blocks, with prefetch, in place; torch's own works, too, and waits for every copy",
    ),
    *_gone(
        "smp.apply_activation_checkpointing", _WRAPPERS, "apply_activation_checkpointing",
        note="torch's own works, too, but smp.offload_wrapper needs this one",
    ),
    *_helpers("torch.sagemaker.logger", "get_logger"),
    *_helpers("torch.sagemaker.utils.utils", "timeit", note="logs seconds on rank 0"),
    *_helpers(
        "torch.sagemaker.checkpoint.utils", "limit_num_subdirs",
        note="deletes folders alone, on the rank with log=True; smp.Checkpointer(keep=...) counts complete ones",
    ),
    *_same("smp.compat.stand_ins.last_int", "torch.sagemaker.checkpoint.utils", "SORT_BY_LAST_INT"),
    *_gone(
        "", "torch.sagemaker.checkpoint.constants", "SMP_IS_LOAD_INFO_KEY", "SMP_IS_PARTIAL_KEY",
        note="a checkpoint has no such key",
    ),
    *_gone(
        "smp.Checkpointer.save", _SAVER, "save", note="smp.Checkpointer(directory, model, optimizer).save(step)"
    ),
    *_gone("smp.Checkpointer.save", _SAVER, "async_save", note="smp.Checkpointer(...).save(step, wait=False)"),
    *_gone(
        "smp.Checkpointer.finish", _SAVER, "maybe_finalize_async_calls", note="smp.Checkpointer(...).finish()"
    ),
    *_gone(
        "smp.Checkpointer.save", _SAVER, "PyTorchDistSaveShardedStrategy",
        note="smp.Checkpointer(...).save(step, wait=False)",
    ),
    *_gone(
        "smp.Checkpointer.load", f"{_CHECKPOINT}.state_dict_loader", "load",
        note="smp.Checkpointer(...).load(): verified, at any number of ranks",
    ),
    *_gone(
        "smp.Checkpointer", _UTILS, "sm_state_dict_type", "SMStateDictType",
        note="smp.Checkpointer needs no context, and so no type such as SM_LOCAL_STATE_DICT",
    ),
    *_gone(
        "smp.Checkpointer", _UTILS, "init_optim_state",
        note="smp.Checkpointer(...).load() makes the optimizer's state",
    ),
    *_gone("", _UTILS, "compute_auto_checkpoint_interval", "_Interval", note="--checkpoint_freq auto"),
    *_gone(
        "smp.Checkpointer", f"{_CHECKPOINT}.filesystem", "DistributedFileSystemReader",
        note="smp.Checkpointer reads and writes; plain torch reads the files with HuggingFaceStorageReader",
    ),
    *_gone(
        "smp.Checkpointer", f"{_CHECKPOINT}.filesystem", "DistributedFileSystemWriter",
        note="smp.Checkpointer reads and writes",
    ),
    *_helpers(f"{_CHECKPOINT}.filesystem", "path_to_file_system", note="torch's own, over fsspec for s3://"),
    *_gone(
        "smp.Checkpointer", _S3, "S3FileSystem",
        note="smp.Checkpointer takes a URL, and --checkpoint_dir does, as s3://bucket/run; s3fs reads and writes",
    ),
    *_helpers(_S3, "is_s3_uri", "parse_s3_uri", "format_s3_path", "retry_with_jitter"),
    *_helpers(_S3, "get_s3_region_from_uri", note="needs s3fs"),
    *_gone(
        "smp.Checkpointer", f"{_CHECKPOINT}.async_utils", "AsyncCallsQueue",
        note="smp.Checkpointer(...).save(step, wait=False) allows one write at a time itself",
    ),
    *_helpers(
        "torch.sagemaker.distributed.fsdp.checkpoint", "save_model_checkpoint", "load_model_checkpoint",
        "EXPORT_KEY_MODEL", "EXPORT_KEY_OPTIMIZER", "EXPORT_KEY_SCHEDULER", "EXPORT_KEY_IDENTITY",
        note="one folder of torch.distributed.checkpoint, loaded at any degrees",
    ),
    *_helpers(
        "torch.sagemaker.distributed.fsdp.fully_sharded_data_parallel", "register_tp_processing_pre_comm_hook",
        note="does nothing: gradients of a split model need no hook",
    ),
    *_same(
        "smp.MoEConfig", "torch.sagemaker.moe.moe_config", "MoEConfig",
        note="the same fields; global_token_shuffle only False, moe_all_to_all_dispatcher only True",
    ),
    *_same(
        "smp.compat.moe.MoELayer", "torch.sagemaker.moe.moe_layer", "MoELayer",
        note="for isinstance, as wrapping and recomputation ask: true for every layer of transformers with experts",
    ),
    *_gone(
        "", "torch.sagemaker.nn", "attn.FlashSelfAttention", "attn.FlashGroupedQueryAttention",
        "huggingface.llama_flashattn.LlamaFlashAttention",
        note="the model code is Hugging Face's: choose with attn_implementation, or --attn_implementation",
    ),
    *_same(
        "smp.compat.stand_ins.TransformerLayer", _TRANSFORMER, "TransformerLayer", "TETransformerLayer",
        note="for isinstance, as wrapping and recomputation ask: true for every block of transformers' decoders",
    ),
    *_gone(
        "", _TRANSFORMER, "TransformerLMHead",
        note="models stay Hugging Face's: use its class, such as LlamaForCausalLM",
    ),
    *_gone("", _MODULES, "empty_module_params", note="torch's module.to_empty(device=...)"),
    *_gone("", _MODULES, "move_buffers_to_device", note="torch's module.to(device)"),
    *_same(
        "torch.distributed.get_process_group_ranks", "torch.sagemaker.utils.process_group_utils", "get_global_ranks"
    ),
    *_gone(
        "smp.transform", "torch.sagemaker.context_parallel.utils", "setup_transformer_engine_cp_groups",
        note="smp.transform does it: leave the call out, and cut batches with smp.shard_sequence",
    ),
    *_gone(
        "smp.shard_sequence", "train_lib", "get_batch_for_cp_rank",
        note="a script's own works, too; model(**smp.shard_sequence(batch)) takes any sequence length, and documents",
    ),
    *_same("smp.comm", "smdistributed.dataparallel.torch", "torch_smddp", note="registers the backend smddp"),
    *_gone(
        "", "smdistributed", "modelparallel",
        note="SMP v1's, with pipelines and microbatches: write the script for FSDP, as docs/smp_v2.md shows",
    ),
)  # fmt: skip
