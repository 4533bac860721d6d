"""Names of other trainers for what we have, and for what this version has not: advice where a name is unknown.

Of Hugging Face's TrainingArguments and TRL, torchtitan, Axolotl, DeepSpeed and Megatron-LM.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping

# Our flag -> names with the same meaning, for which the same kind of value can be given.
SAME: Mapping[str, str] = {
    "model": "model_preset",
    "max_context_width": "seq_len seq_length sequence_len sequence_length max_seq_len max_seq_length max_length "
    "max_sequence_length block_size context_length cutoff_len max_position_embeddings",
    "hidden_width": "hidden_size hidden_dim n_embd d_model dim",
    "num_layers": "num_hidden_layers n_layers n_layer",
    "num_heads": "num_attention_heads n_heads n_head",
    "num_key_value_heads": "num_query_groups num_kv_heads n_kv_heads",
    "intermediate_size": "ffn_hidden_size ffn_dim",
    "resid_pdrop": "hidden_dropout",
    "attn_pdrop": "attention_dropout",
    "initializer_range": "init_method_std",
    "rotary_pct": "rotary_percent",
    "rotary_emb_base": "rope_theta rotary_base",
    "attn_implementation": "attn_impl flash_attention flash_attn use_flash_attn use_flash_attention "
    "use_flash_attention_2",
    "training_dir": "dataset dataset_path dataset_dir datasets data data_dir data_path train_file "
    "train_data train_data_path",
    "test_dir": "validation_file eval_dataset eval_data eval_dir val_data valid_data_path",
    "tokenizer_name_or_dir": "tokenizer tokenizer_name tokenizer_path tokenizer_model",
    "data_cache_dir": "dataset_prepared_path cache_dir",
    "data_num_workers": "dataloader_num_workers num_workers",
    "shuffle_data": "shuffle",
    "validation_freq": "eval_steps eval_interval eval_freq eval_every validation_interval val_freq",
    "validation_batches": "eval_iters max_eval_batches limit_val_batches",
    "val_batch_size": "per_device_eval_batch_size eval_batch_size",
    "output_dir": "out_dir output_path dump_folder",
    "max_steps": "steps num_steps train_steps total_steps num_train_steps train_iters max_iters",
    "epochs": "num_train_epochs num_epochs n_epochs",
    "train_batch_size": "per_device_train_batch_size per_device_batch_size per_gpu_train_batch_size device_batch_size "
    "micro_batch_size train_micro_batch_size_per_gpu local_batch_size",
    "global_batch_size": "total_batch_size effective_batch_size",
    "gradient_accumulation_steps": "grad_accum grad_accum_steps gradient_accumulation accumulate_grad_batches",
    "seed": "random_seed manual_seed",
    "optimizer": "optim optim.name optimizer.name optimizer_name optimizer_type optim_type optimizer.type",
    "param_groups": "param_group optimizer.param_groups param_group_config",
    "weight_decay": "wd",
    "beta1": "adam_beta1",
    "beta2": "adam_beta2",
    "adam_eps": "adam_epsilon epsilon eps",
    "grad_clip": "max_grad_norm clip_grad clip_grad_norm grad_clip_norm gradient_clipping gradient_clip_val max_norm",
    "lr": "learning_rate",
    "lr_decay_style": "lr_scheduler_type lr_scheduler lr_schedule scheduler decay_type",
    "lr_decay_iters": "lr_decay_steps",
    "warmup": "warmup_ratio lr_warmup_fraction",
    "checkpoint_freq": "save_steps save_interval save_freq save_every checkpoint_interval checkpoint.interval "
    "checkpoint_steps",
    "num_kept_checkpoints": "save_total_limit keep_latest_k",
    "checkpoint_dir": "save save_dir checkpoint_path ckpt_dir",
    "resume_from_checkpoint": "load resume resume_from load_checkpoint",
    "save_final_model": "last_save_in_hf",
    "logging_freq": "logging_steps log_interval log_freq log_every log_every_n_steps steps_per_print",
    "tensorboard_dir": "logging_dir tensorboard_log_dir",
    "project": "wandb_project",
    "run_name": "wandb_name wandb_run_name experiment_name",
    "sharding_strategy": "fsdp fsdp_strategy fsdp_sharding_strategy",
    "hybrid_shard_degree": "dp_shard dp_shard_size data_parallel_shard_degree",
    "tensor_parallel_degree": "tp tp_size tp_degree tensor_parallel tensor_parallel_size tensor_model_parallel_size "
    "tensor_model_parallel_degree autotp_size model_parallel_size",
    "sequence_parallel": "sp enable_sequence_parallel",
    "context_parallel_degree": "cp cp_size cp_degree context_parallel context_parallel_size",
    "cp_load_balance": "context_parallel_load_balancer",
    "expert_parallel_degree": "ep ep_size ep_degree expert_parallel expert_parallel_size expert_model_parallel_size "
    "moe_parallel_size",
    "num_local_experts": "num_experts n_routed_experts moe_num_experts",
    "num_experts_per_tok": "moe_router_topk moe_topk moe_top_k top_k_experts",
    "bf16": "bfloat16 use_bf16",
    "fp8": "float8 use_fp8 enable_fp8 use_float8 enable_float8",
    "fp8_recipe": "fp8_recipe_name float8_recipe recipe_name float8_recipe_name",
    "fp8_all_gather": "enable_fsdp_float8_all_gather fp8_enable_fsdp_float8_all_gather enable_fp8_all_gather",
    "activation_checkpointing": "gradient_checkpointing use_gradient_checkpointing recompute_activations",
    "activation_checkpointing_mode": "recompute_granularity",
    "offload_activations": "sm_activation_offloading",
    "cpu_offload": "enable_cpu_offload fsdp_offload_params offload_optimizer offload_param",
    "compile": "torch_compile compile.enable use_compile",
    "distributed_backend": "ddp_backend dist_backend",
    "distributed_timeout": "ddp_timeout train_timeout_seconds",
    "lora_rank": "lora_r lora_dim",
    "lora_target_modules": "target_modules lora_modules lora_target lora_target_linear",
    "adapter_path": "adapter_name_or_path lora_model_dir lora_weights",
    "dpo_beta": "beta pref_beta rl_beta",
    "dpo_loss": "loss_type pref_loss rl_loss",
    "config": "config_file job.config_file",
}

# What to do instead of a name with another meaning, or with another kind of value -> the names.
OTHERWISE: Mapping[str, str] = {
    "a forward pass of a rank has --train_batch_size samples, a step of all ranks --global_batch_size": "batch_size",
    "a preset, or a directory's config.json, is --model; a directory whose weights are trained on is "
    "--hf_pretrained_model_name_or_dir": "model_name_or_path model_name model_id model_path base_model "
    "pretrained_model_name_or_path",
    "here it is --warmup, a fraction of --max_steps": "warmup_steps warmup_iters num_warmup_steps lr_warmup_steps "
    "lr_warmup_iters",
    "here it is --min_lr, a learning rate and no ratio": "min_lr_ratio min_lr_factor",
    "--validation_freq N validates every N steps": "eval_strategy do_eval",
    "leave it out: a job that is given --hf_pretrained_model_name_or_dir finetunes": "do_finetune",
    "leave it out: it is the value of the model's config.json, which --model takes from a directory": "norm_epsilon "
    "layernorm_epsilon layer_norm_epsilon layer_norm_eps norm_eps rms_norm_eps",
    "leave it out: sequences are always packed, and --document_mask 1 keeps documents apart": "packing sample_packing "
    "eval_packing pack_sequences",
    "--train_on assistant trains on the assistant's turns, as messages do by default": "assistant_only_loss",
    "--train_on completion trains on completions, as such pairs do by default": "completion_only_loss",
    "leave it out: the job trains unless --evaluate_only 1 is given": "do_train",
    "--checkpoint_freq N saves every N steps": "save_strategy",
    "--checkpoint_type async_sharded saves while training continues": "async_save async_mode",
    "validation data is a folder of its own, --test_dir: `python -m smp.data.prepare` splits one off": "val_set_size "
    "validation_split_percentage",
    "ZeRO-1 and 2 are --sharding_strategy shard_grad_op, ZeRO-3 is full_shard": "zero_stage zero deepspeed "
    "deepspeed_config",
    "leave it out: blocks are found; --auto_wrap_policy wraps by size": "fsdp_transformer_layer_cls_to_wrap",
    "replicas are what is left: all processes / (--hybrid_shard_degree x --tensor_parallel_degree)": "dp_replicate "
    "dp_replicate_size data_parallel_replicate_degree",
    "--lora_rank N trains adapters of that rank": "use_peft use_lora lora peft peft_type adapter finetuning_type",
    "--dpo 1 trains on pairs of answers": "rl stage rlhf use_dpo",
    "leave it out: the reference of --dpo 1 is the model that training begins from, without dropout": "ref_model "
    "precompute_ref_log_probs disable_dropout",
    "--qlora 1 with --lora_rank N stores the frozen weights in 4 bits": "load_in_4bit use_qlora qlora_4bit",
    "--report_to wandb sends the metrics there": "wandb use_wandb enable_wandb",
    "--bf16 1 computes in bfloat16, --bf16 0 in float32": "torch_dtype precision mixed_precision",
    "code of a model's directory is never run: leave it out": "trust_remote_code",
    "leave it out: `py-spy top` and --profile_nsys show which rank does not wait in collectives, and is the slow one; "
    "--watchdog_timeout ends a run whose rank hangs": "straggler_ratio",
    "leave it out: tokens go to their experts by an all-to-all, and none is dropped": "capacity_factor "
    "moe_capacity_factor moe_expert_capacity_factor moe_token_dispatcher_type moe_token_drop_policy",
    "it is the launcher's, before the module: python -m smp.launch.local --nproc_per_node N -m smp.train ..., or "
    "torchrun": "nproc_per_node nnodes node_rank num_processes num_nodes num_gpus gpus",
}

# What this version has not -> a pattern of its names.
MISSING: Mapping[str, str] = {
    "weights of 8 bits and adapters other than LoRA are not in this version: --lora_rank": r"dora(_\w+)?|use_dora|"
    r"load_in_8bit|adapter_type",
    "pipeline parallelism is not in this version: --sharding_strategy full_shard and --tensor_parallel_degree split a "
    "model": r"pp(_\w+)?|pipeline\w*|num_virtual_stages\w*",
    "experts are not split by tensor parallelism in this version: --expert_parallel_degree spreads them": r"etp|"
    r"expert_tensor_parallel\w*",
    "fp16 is not in this version: use --bf16 1": r"\w*fp16\w*|float16|half|(initial_)?loss_scale\w*",
    "optimizers other than AdamW, in 32 or 8 bits, and Muon are not in this version: leave it out": r"optim_args|"
    r"use_adafactor|galore\w*|lomo\w*",
    "label smoothing is not in this version, but of pairs, --dpo_label_smoothing": r"label_smoothing\w*",
    "noise on embeddings is not in this version": r"neftune\w*",
    "an average of the weights is not in this version": r"(use_)?ema(_\w+)?",
    "nothing is sent to a hub: leave it out": r"push_to_hub|hub_\w+",
}

# Flags of `smp plan` alone: its flag -> their names.
PLAN: Mapping[str, str] = {
    "nodes": "nnodes num_nodes",
    "gpus_per_node": "gpus num_gpus nproc_per_node n_gpus",
    "device": "gpu gpu_type",
}


def _by_name(table: Mapping[str, str]) -> dict[str, str]:
    return {name: value for value, names in table.items() for name in names.split()}


OURS, _OTHERWISE, _PLAN = map(_by_name, (SAME, OTHERWISE, PLAN))


def advice(name: str, known: Iterable[str], *, dashes: str = "--") -> str:
    """Return what to do about a setting of an unknown name.

    Args:
        name: as given, without dashes; torchtitan's with the section, such as ``training.seq_len``.
        dashes: what a setting's name begins with where it was given.
    """
    plain, known = name.replace("-", "_"), list(known)
    last = plain.rpartition(".")[2]
    for candidate in (plain, last):
        ours = OURS.get(candidate, candidate)
        if ours in known and ours != plain:
            return f"here it is {dashes}{ours}"
        if candidate in _OTHERWISE:
            return _OTHERWISE[candidate]
        if says := next((text for text, pattern in MISSING.items() if re.fullmatch(pattern, candidate)), None):
            return says
    near = nearest(plain, known)
    return f"did you mean {near}?" if near else "--help lists all of them"


def plan_advice(name: str, known: Iterable[str]) -> str | None:
    """Return what to do about an unknown flag of ``smp plan``, if it is nearly one of its own, the ``known``."""
    if (ours := _PLAN.get(name.replace("-", "_")) or nearest(name.replace("-", "_"), known)) is None:
        return None
    return f"did you mean --{ours}?"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that differs from ``name`` by a misspelling: in two letters at most, and in a fifth."""
    for near in difflib.get_close_matches(name, known, n=1, cutoff=0.8):
        blocks = difflib.SequenceMatcher(None, name, near).get_matching_blocks()
        if max(len(name), len(near)) - sum(block.size for block in blocks) <= 2:
            return near
    return None
