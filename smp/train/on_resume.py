"""What a resume does with each setting: take the checkpoint's, compare what it makes, warn of a change, or none."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from torch import nn

from smp.checkpoint.manifest import Manifest
from smp.checkpoint.remote import RemoteCheckpoint
from smp.checkpoint.restore import is_script
from smp.checkpoint.same_model import SCALES, adapter_settings, changes_in_training, check_architecture
from smp.config import flag_text
from smp.errors import UserError
from smp.log import get_logger
from smp.models.weight_files import ADAPTER_CONFIG
from smp.optim.groups import groups_as_json
from smp.optim.optimizers import saved_kind
from smp.train.arguments import FLAGS
from smp.train.checked_job import CheckedJob
from smp.train.state import Start

logger = get_logger("train")

SAVED, COMPARED, TOLD, FREE = "saved", "compared", "told", "free"
MEANING = {
    SAVED: "it scales saved values: without the flag the checkpoint's value is taken, and another one is refused",
    COMPARED: "what it makes is compared: the model's configuration and tensors, the optimizer, the data, the global "
    "batch, the learning rate's horizon. What gives saved values another meaning is refused; other changes are warned "
    "of, and apply",
    TOLD: "a change is warned of, and applies",
    FREE: "a change applies and is not warned of: it is of where, how long and how fast, and not of what is trained",
}
# Every setting, by what a resume does with it.
_ON_RESUME = {
    SAVED: "lora_alpha lora_use_rslora",
    COMPARED: """
        vocab_size hidden_width num_layers num_heads num_key_value_heads llama_intermediate_size intermediate_size
        resid_pdrop attn_pdrop embd_pdrop tie_word_embeddings rotary_pct rotary_emb_base rope_scaling_type
        rope_scaling_factor rope_scaling_high_freq_factor rope_scaling_low_freq_factor
        rope_scaling_original_max_position_embeddings sliding_window dataset_type max_steps epochs train_batch_size
        gradient_accumulation_steps global_batch_size lora_rank lora_dropout qlora
        lora_train_tokens lora_modules_to_save optimizer optimizer_state_dtype param_dtype param_groups
    """,
    TOLD: """
        model model_type initializer_range max_context_width attn_implementation finetune pretrained_model_name
        finetune_checkpoint_load_dir pretrained_checkpoint_file hf_pretrained_model_name_or_dir moe num_experts_per_tok
        num_local_experts moe_load_balancing moe_aux_loss_coeff moe_z_loss_coeff moe_bias_update_rate
        global_token_shuffle train_on chat_template overlong pack max_samples
        validation_split dataset_name dataset_config_name dataset_split use_synthetic_data synthetic_samples
        training_dir test_dir zipped_data tokenizer_name_or_dir text_document_separator shuffle_data document_mask seed
        deterministic stochastic_rounding weight_decay beta1 beta2 adam_eps muon_momentum muon_nesterov muon_adjust_lr
        muon_dtype grad_clip lr lr_decay_style lr_decay_iters min_lr warmup plateau wsd_decay lr_compat bf16 fp8
        fp8_recipe fp8_experts z_loss lora_target_modules lora_target_parameters adapter_path dpo
        dpo_beta dpo_label_smoothing dpo_loss nonfinite nonfinite_budget
    """,
    FREE: """
        summary_first_pdrop use_smp_flash_attn delayed_param moe_all_to_all_dispatcher
        moe_fp8_checkpoint_attn moe_fp8_checkpoint_moe fp8_all_gather fp8_amax_history_len fp8_amax_compute_algo
        show_masks data_type data_cache_dir data_num_workers
        validation_freq validation_batches val_batch_size fast_validation evaluate_only preserve_np_state output_dir
        same_seed framework dry_run dry_run_world_size plan gc_freq profile_nsys checkpoint_freq checkpoint_overhead
        num_kept_checkpoints keep_best checkpoint_dir checkpoint_type verify_checkpoint read_back on_save_error
        resume_from_checkpoint checkpoint_cache_dir reset_progress save_final_model dtype model_dir export_text_only
        logging_freq logging_freq_for_avg log_reduced_training_loss tensorboard_dir report_to project run_name
        enable_memory_profiling memory_profiling_all_ranks memory_snapshot comm_report nccl_test_log sharding_strategy
        hybrid_shard_degree tensor_parallel_degree sequence_parallel tp_save_gathered tp_overlap
        context_parallel_degree expert_parallel_degree use_smp_implementation cp_comm_type cp_load_balance
        forward_prefetch backward_fetch_policy auto_wrap_policy defer_gradient_sync reshard_between_microbatches
        shared_buffers fsdp_cache_flush_warnings limit_all_gathers use_orig_params activation_checkpointing
        activation_checkpointing_mode activation_checkpointing_every offload_activations activation_loading_horizon
        offload_dir cpu_offload compile compile_loss clean_cache patch_neox_rope loss_chunk_tokens save_merged_model
        distributed_backend distributed_timeout watchdog_timeout expandable_segments
    """,
}
ON_RESUME = {name: kind for kind, names in _ON_RESUME.items() for name in names.split()}
# Of what is told, the sections that decide the loss of an evaluation; its data is what is asked for.
_EVALUATED = ("precision", "fp8", "preference")


def check_fits(job: CheckedJob, path: Path | RemoteCheckpoint, saved: Manifest) -> None:
    """Refuse a checkpoint whose values would mean something else in the job's model.

    Raises:
        UserError: it is of another architecture, of parameters in another dtype, or its adapters are scaled otherwise
            than a flag or a file says.
    """
    check_architecture(path, saved.model["config"], job.model.hf_config)
    theirs = saved_kind(saved.run).get("param_dtype", "fp32")
    if theirs != job.config.optim.param_dtype and not is_script(saved.run):
        raise UserError(f"checkpoint {path} has its parameters in {theirs}: give --param_dtype {theirs}")
    _saved_values(job, path, saved)


def _saved_values(job: CheckedJob, path: Path | RemoteCheckpoint, saved: Manifest) -> dict[str, Any]:
    """Return the settings to take from the checkpoint, by name; raises as :func:`check_fits`."""
    theirs, mine = adapter_settings(path, saved.model), job.config.lora.with_adapter()
    if theirs is None:
        return {}
    for name in ("lora_rank", *SCALES):
        value = getattr(mine, name)
        if value == theirs[name]:
            continue
        if mine.adapter_path is not None:
            raise UserError(
                f"checkpoint {path} has adapters of {name} {theirs[name]}, and {mine.adapter_path}/{ADAPTER_CONFIG} "
                f"says {value}: undo that change, or start from the adapter without --resume_from_checkpoint"
            )
        if name == "lora_rank":
            raise UserError(
                f"checkpoint {path} has adapters of rank {theirs[name]}, and --lora_rank is {value}: give --lora_rank "
                f"{theirs[name]}, or start from the model that `smp export --merge` writes of it"
            )
        if name in job.config.given:
            raise UserError(f"--{name} {flag_text(value)} is not that of checkpoint {path}, {theirs[name]}: leave it "
                            f"out")  # fmt: skip
    return {} if mine.adapter_path is not None else {name: theirs[name] for name in SCALES}


def with_saved_settings(job: CheckedJob, start: Start) -> CheckedJob:
    """Return the job with the settings that are its checkpoint's, which :func:`check_fits` has passed."""
    if start.checkpoint is None or start.saved is None:
        return job
    found = _saved_values(job, start.checkpoint, start.saved)
    for name, value in found.items():
        if name not in job.config.given and value != FLAGS[name].field.default:
            logger.info("Taken from the checkpoint: --%s %s", name, flag_text(value))
    config = dataclasses.replace(job.config, lora=dataclasses.replace(job.config.lora, **found))
    return dataclasses.replace(job, config=config)


def changes_since(start: Start, job: CheckedJob, model: nn.Module) -> list[str]:
    """List what differs from the run that wrote the checkpoint, as ``name before -> now``."""
    if start.checkpoint is None or start.saved is None or job.config.checkpoint.reset_progress:  # which is another run
        return []
    run = start.saved.run
    found = [*_told(run.get("config", {}), job), *changes_in_training(start.checkpoint, start.saved, model)]
    if change := _change_of_data(run, job):
        found.append(f"{change}; the position in it is kept, so samples may be missed or repeated")
    if (run.get("param_groups") or []) != groups_as_json(job.config.optim.param_groups):
        found.append("the groups of --param_groups")
    batch = run.get("global_batch_size")
    if batch not in (None, start.global_batch_size):
        found.append(f"the global batch, {batch} -> {start.global_batch_size} samples")
    horizon = run.get("max_steps")
    if job.config.lr.lr_decay_iters is None and horizon not in (None, start.max_steps):
        found.append(
            f"the learning rate's horizon, {horizon} -> {start.max_steps} steps (--lr_decay_iters {horizon} keeps it)"
        )
    return found


def _change_of_data(saved: dict[str, Any], job: CheckedJob) -> str:
    if saved.get("data") not in (None, job.train_data.fingerprint):
        return "the data"
    if saved.get("rows") not in (None, job.train_data.digest):
        return "the rows of the data or their order, in files of the same names and sizes"
    return ""


def changes_evaluated(start: Start, job: CheckedJob) -> list[str]:
    """List what differs from the run that wrote the checkpoint in how its loss is computed."""
    saved = start.saved.run.get("config") if start.saved is not None else None
    return _told(saved, job, _EVALUATED) if isinstance(saved, dict) else []  # a script's has none


def _told(saved: dict[str, Any], job: CheckedJob, sections: tuple[str, ...] | None = None) -> list[str]:
    """Return the changed settings that are told; one that the checkpoint does not name is not known."""
    now = job.config.flat()
    return [
        f"{name} {saved[name]} -> {now[name]}"
        for name, flag in FLAGS.items()
        if name == flag.field.name
        and ON_RESUME.get(name, TOLD) == TOLD
        and (sections is None or flag.section in sections)
        and name in saved
        and saved[name] != now[name]
    ]
