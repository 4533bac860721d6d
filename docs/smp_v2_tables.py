"""The keys, variables and flags of SMP v2 and SMDDP, for the page and for the tests that hold what it says."""

from __future__ import annotations

from typing import Any, NamedTuple


class Key(NamedTuple):
    """A key of SMP v2's ``init({...})``; ``given`` is a value to try, ``refused`` whether it is refused."""

    name: str
    default: Any
    given: Any
    refused: bool
    note: str


KEYS = (
    Key("hybrid_shard_degree", 0, 2, False, "the same rules for 0, 1 and k"),
    Key("tensor_parallel_degree", 1, 2, False, "most dense decoders (docs/models.md); others by a plan of five lines"),
    Key("context_parallel_degree", 1, 2, False, "counted in hybrid_shard_degree, as there; decoders that attend "
        "through transformers' functions (docs/models.md)"),
    Key("expert_parallel_degree", 1, 2, False, "folded over sharding, and takes no ranks of its own; a line of the log "
        "names the hybrid_shard_degree that gives SMP v2's memory ([experts.md](experts.md))"),
    Key("sm_activation_offloading", True, True, False, "told by smp.state, False unless it is given, which init logs; "
        "an offload_wrapper is what offloads, as there"),
    Key("activation_loading_horizon", 2, 4, False, "the same"),
    Key("fsdp_cache_flush_warnings", True, False, False, "the same, on GPUs"),
    Key("allow_empty_shards", False, True, False, "either: empty shards are always allowed"),
    Key("random_seed", 0, 1234, False, "the same; given, it also decides the initial values, else torch.manual_seed "
        "does"),
)  # fmt: skip

# Every flag of the last public train_lib.py, of the version before it, and of the guides, with its default there.
FLAGS: dict[str, Any] = {
    "train_batch_size": 2, "max_steps": 5000, "max_training_steps": 5000, "epochs": 3, "seed": 12345, "same_seed": 0,
    "bf16": 1, "fp8": 1, "fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max", "grad_clip": 1.0,
    "weight_decay": 0.2, "beta1": 0.9, "beta2": 0.95,
    "lr": 1e-4, "lr_decay_style": "cosine", "lr_decay_iters": 47683, "min_lr": 1e-5, "warmup": 0.0032, "plateau": 0.0,
    "activation_checkpointing": 1, "patch_neox_rope": 1, "delayed_param": 1, "enable_memory_profiling": 0,
    "clean_cache": 0, "offload_activations": 0, "activation_loading_horizon": 2,
    "logging_freq": 1, "logging_freq_for_avg": 50, "log_reduced_training_loss": 0, "tensorboard_dir": None,
    "num_kept_checkpoints": 2, "checkpoint_freq": 1000, "checkpoint_dir": "/opt/ml/checkpoints",
    "resume_from_checkpoint": None, "checkpoint_type": "sharded", "model_dir": None, "save_final_model": 0,
    "dataset_type": "gpt_jsonl", "data_num_workers": 0, "data_type": "gpt", "use_synthetic_data": 0, "zipped_data": 1,
    "training_dir": "$SM_CHANNEL_TRAIN", "test_dir": "$SM_CHANNEL_TEST",
    "hf_pretrained_model_name_or_dir": None, "max_context_width": 2048, "vocab_size": 50432, "hidden_width": 768,
    "num_layers": 12, "num_heads": 12, "num_key_value_heads": None, "llama_intermediate_size": 11008,
    "intermediate_size": 14336, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1, "summary_first_pdrop": 0.1,
    "initializer_range": 0.02, "model_type": "gpt_neox", "rotary_pct": 0.25, "rotary_emb_base": 10000,
    "rope_scaling_type": None, "rope_scaling_factor": 8.0, "rope_scaling_high_freq_factor": 4.0,
    "rope_scaling_low_freq_factor": 1.0, "rope_scaling_original_max_position_embeddings": 8192, "sliding_window": None,
    "use_smp_flash_attn": 1, "use_smp_implementation": 0, "tensor_parallel_degree": 1, "context_parallel_degree": 1,
    "expert_parallel_degree": 1, "cp_comm_type": "p2p", "moe": 0, "num_experts_per_tok": 2, "num_local_experts": 8,
    "moe_load_balancing": "sinkhorn", "global_token_shuffle": 0, "moe_all_to_all_dispatcher": 1,
    "moe_fp8_checkpoint_attn": 1, "moe_fp8_checkpoint_moe": 1,
    "sharding_strategy": "hybrid_shard", "shard_degree": None, "hybrid_shard_degree": 0, "limit_all_gathers": 1,
    "forward_prefetch": 1, "use_orig_params": 0, "backward_fetch_policy": "backward_pre",
    "auto_wrap_policy": "transformer_auto_wrap_policy",
    "validation_freq": None, "validation_batches": 10, "val_batch_size": 4, "fast_validation": 1,
    "preserve_np_state": 0,
    "distributed_backend": "smddp", "nccl_test_log": "", "profile_nsys": 0, "framework": "fsdp",
    "finetune": "", "pretrained_model_name": "", "pretrained_checkpoint_file": "", "finetune_checkpoint_load_dir": "",
}  # fmt: skip

# Environment variables of SMDDP and SageMaker: their names, what of it is read here, what they do here.
VARIABLES = (
    ("SM_HP_MP_PARAMETERS", "SM_HP_MP_PARAMETERS",
     "the estimator's parameters: torch.sagemaker.init takes and logs them, before those that it is given; so does the "
     "job, where neither a flag nor --config says otherwise"),
    ("SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES", "SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES",
     "staging memory of a rank in a group, 4 MiB (16 there); larger messages go in chunks, none falls back"),
    ("SMDDP_AG_SORT_BUFFER_SIZE_BYTES", "SMDDP_AG_SORT_BUFFER_SIZE_BYTES",
     "most memory of a host for the shared buffers of one group, 64 GiB, 8 on a GPU; beyond, staging memory is used"),
    ("SMDATAPARALLEL_OPTIMIZE_SDP", "", "no switch: all-gather and all-reduce are both served, by any launcher"),
    ("SMDATAPARALLEL_SERVER_ADDR, SMDATAPARALLEL_SERVER_PORT", "", "no server: MASTER_ADDR and MASTER_PORT"),
    ("SMDATAPARALLEL_USE_HOMOGENEOUS, SMDATAPARALLEL_USE_SINGLENODE", "", "found out from the processes"),
    ("SM_CHANNEL_TRAIN, SM_CHANNEL_TEST", "SM_CHANNEL_", "defaults of --training_dir and --test_dir, as there"),
)  # fmt: skip
