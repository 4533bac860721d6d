"""Differences between model families, as data: module paths, config keys, file keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from smp.models.file_names import FileNames
from smp.models.tensor_plan import TensorPlan, degree_reasons

# Settings that every family has, and the config.json key each one sets (a dot reaches into a nested object).
COMMON_SETTINGS: Mapping[str, str] = {
    "vocab_size": "vocab_size",
    "hidden_width": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "initializer_range": "initializer_range",
    "tie_word_embeddings": "tie_word_embeddings",
    "attn_pdrop": "attention_dropout",
    "rotary_emb_base": "rope_parameters.rope_theta",
    "rope_scaling_type": "rope_parameters.rope_type",
    "rope_scaling_factor": "rope_parameters.factor",
    "rope_scaling_high_freq_factor": "rope_parameters.high_freq_factor",
    "rope_scaling_low_freq_factor": "rope_parameters.low_freq_factor",
    "rope_scaling_original_max_position_embeddings": "rope_parameters.original_max_position_embeddings",
}

# SMP v2's defaults of the settings above, the starting point of --model_type.
COMMON_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 50432,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
}


@dataclasses.dataclass(frozen=True)
class LogitTransform:
    """Function of the head's outputs that makes the logits: ``cap * tanh(scale * x / cap)``; no cap: ``scale * x``."""

    scale: float = 1.0
    cap: float | None = None


@dataclasses.dataclass(frozen=True)
class Family:
    """One architecture of Hugging Face, described by paths and keys.

    Attributes:
        name: the name in messages and presets.
        hf_model_type: ``model_type`` in config.json.
        architecture: Hugging Face class of the causal language model.
        base: path of the model without its head; checkpoints of the bare model leave this prefix out.
        blocks: path of the list of transformer blocks.
        embedding: path of the token embedding.
        final_norm: path of the norm after the last block; None: there is none, or more than a norm.
        head: path of the output projection.
        gated_mlp: whether the MLP has three matrices (SwiGLU) or two.
        settings: setting name -> config.json key; settings not named here do not exist in the family.
        defaults: config.json values that ``--model_type`` starts from.
        tensor_plan: how blocks are split over ranks; None: tensor parallelism is refused.
        no_tensor_plan: why there is none, for the refusal.
        full_sequence_embedding: whether every tensor-parallel rank computes what is before the first and after the last
            block of all tokens, as where positions are added to the embedding; else of its own tokens.
        logits: what becomes of the head's outputs; None: it is found by the model's forward, for a loss in chunks.
        file_names: names of parameters in files, where they differ from the model's.
        uncalled: paths of linear layers whose weights the module around them, or a kernel of it, reads itself.
    """

    name: str
    hf_model_type: str
    architecture: str
    base: str
    blocks: str
    embedding: str
    final_norm: str | None
    head: str
    gated_mlp: bool
    settings: Mapping[str, str]
    defaults: Mapping[str, Any]
    tensor_plan: TensorPlan | None = None
    no_tensor_plan: str = ""
    full_sequence_embedding: bool = False
    logits: LogitTransform | None = None
    file_names: FileNames = FileNames()
    uncalled: tuple[str, ...] = ()

    def split_axis(self, path: str) -> str | None:
        """Return the axis along which tensor parallelism splits a layer, ``outputs`` or ``inputs``, or None."""
        if self.tensor_plan is None or path in (self.embedding, self.head):
            return "outputs" if self.tensor_plan else None
        block = path.removeprefix(f"{self.blocks}.")
        if block == path:
            return None
        index, _, inside = block.partition(".")
        return self.tensor_plan.axes(int(index)).get(inside)


def tensor_parallel_problems(family: Family, hf_config: Any, *, degree: int, shard: int = 1) -> list[str]:
    """Return one sentence for each reason why the model cannot be split over ``degree`` ranks.

    Args:
        shard: ranks of a sharding group.
    """
    if degree == 1:
        return []
    name, plan = f"--tensor_parallel_degree {degree}", family.tensor_plan
    if plan is None:
        why = family.no_tensor_plan or "its family has none"
        return [f"{name}: a model of type {hf_config.model_type!r} has no tensor-parallel plan ({why}): leave it at 1"]
    found = degree_reasons(plan, hf_config, degree=degree, shard=shard)
    if not found:
        return []
    higher = range(2, plan.sizes(hf_config).heads + 1)
    legal = [1, *(d for d in higher if not degree_reasons(plan, hf_config, degree=d, shard=shard))]
    return [f"{name} {reason}: choose one of {', '.join(map(str, legal))}" for reason in found]
