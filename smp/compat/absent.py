"""Flags of SMP v2 for what is not here: refused by value, or accepted because they change nothing by construction.

Nothing reads them: :class:`smp.config.Section` adds them to the sections.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

_DYNAMIC = "fp8 scales are made of the values that they scale, and not of a history"


class Absent(NamedTuple):
    """One flag, with either reason as of :func:`smp.config.setting`; ``otherwise``: its default alone is accepted."""

    name: str
    default: Any
    help: str
    otherwise: str = ""
    no_effect: str = ""
    kind: Any = None  # default: the type of the default


# By the setting behind which they stand in the section, its help and its page.
ABSENT: dict[str, tuple[Absent, ...]] = {
    "embd_pdrop": (
        Absent("summary_first_pdrop", None, "Dropout of GPT-2's summary head.", kind=float | None,
               no_effect="a model that is trained on text has no summary head"),
    ),
    "attn_implementation": (
        Absent("use_smp_flash_attn", None, "SMP v2's flash attention.", kind=bool | None,
               no_effect="attention is Hugging Face's, by --attn_implementation"),
    ),
    "hf_pretrained_model_name_or_dir": (
        Absent("global_token_shuffle", False, "Shuffle tokens over experts.",
               "shuffled tokens would give a router other sequences at every layout; leave it out"),
        Absent("moe_all_to_all_dispatcher", True, "Send tokens by all-to-all.",
               "an all-to-all is how tokens reach their experts, and none is dropped; leave it out"),
        Absent("moe_fp8_checkpoint_attn", True, "SMP v2's recomputation of attention alone, with fp8.",
               no_effect="--activation_checkpointing recomputes whole blocks, or by "
               "--activation_checkpointing_mode selective parts of them"),
        Absent("moe_fp8_checkpoint_moe", True, "SMP v2's recomputation of experts alone, with fp8.",
               no_effect="--activation_checkpointing recomputes whole blocks, or by "
               "--activation_checkpointing_mode selective parts of them"),
    ),
    "dataset_split": (
        Absent("data_type", "gpt", "SMP v2's kind of model.", kind=Literal["gpt", "bert"],
               no_effect="SMP v2 never passed it on; --dataset_type chooses the files"),
    ),
    "evaluate_only": (
        Absent("preserve_np_state", False, "Restore numpy's random state after validation.",
               no_effect="validation draws no random numbers"),
    ),
    "deterministic": (
        Absent("same_seed", False, "SMP v2's switch to one seed for all ranks.",
               no_effect="SMP v2 never read it; --seed sets the seed"),
        Absent("framework", "fsdp", "SMP v2's name of the framework.", no_effect="SMP v2 never read it"),
    ),
    "logging_freq_for_avg": (
        Absent("log_reduced_training_loss", False, "SMP v2's switch to a loss averaged over all ranks.",
               no_effect="the logged loss is always the mean over the global batch"),
    ),
    "expert_parallel_degree": (
        Absent("use_smp_implementation", False, "SMP v2's switch to its own tensor-parallel model code.",
               no_effect="--tensor_parallel_degree above 1 is the switch, and the model code is always Hugging Face's"),
    ),
    "fsdp_cache_flush_warnings": (
        Absent("limit_all_gathers", True, "FSDP1's rate limiter.",
               no_effect="fully_shard bounds the gathers in flight by itself"),
        Absent("use_orig_params", False, "FSDP1's switch to original parameters.",
               no_effect="fully_shard always keeps the original parameters"),
    ),
    "fp8_all_gather": (
        Absent("fp8_amax_history_len", 1024, "Length of SMP v2's history of scales.", no_effect=_DYNAMIC),
        Absent("fp8_amax_compute_algo", "max", "How SMP v2 makes a scale of the history.", no_effect=_DYNAMIC,
               kind=Literal["max", "most_recent"]),
    ),
    "clean_cache": (
        Absent("patch_neox_rope", True, "SMP v2's move of GPT-NeoX's rotary cache to the GPU.",
               no_effect="the rotary embedding is computed on the model's device"),
    ),
}  # fmt: skip
