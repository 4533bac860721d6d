"""Model FLOPs of one token, and what devices can do: the two halves of model FLOPs utilisation.

Model FLOPs are those of forward and backward by the mathematics of the model: activations that are recomputed are not
counted twice, and the attention square is counted whole although a causal mask hides half of it (as SMP v2 and
Megatron-LM count).
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import torch

from smp.models.registry import family_of


@dataclasses.dataclass(frozen=True)
class Flops:
    """FLOPs (a multiply and an add are two) of one token of training, and the formula that gave them."""

    total: float
    formula: str


@dataclasses.dataclass(frozen=True)
class _Shape:
    """The numbers of a Hugging Face config that a formula needs."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    gated: bool

    @classmethod
    def of(cls, config: Any) -> _Shape:
        heads = config.num_attention_heads
        return cls(
            hidden=config.hidden_size,
            layers=config.num_hidden_layers,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            intermediate=config.intermediate_size,
            vocabulary=config.vocab_size,
            gated=family_of(config).gated_mlp,
        )


def model_flops_per_token(hf_config: Any, sequence_length: int) -> Flops:
    """Model FLOPs of one token of training (forward and backward).

    6 for each weight that takes part in a matrix product, which includes the output head (tied or not) and leaves out
    the embedding, a look-up; and for attention 12 x layers x query heads x head width x sequence length.

    Args:
        hf_config: config of a supported family (grouped query heads, gated or plain MLP).
        sequence_length: tokens that attend to each other.

    Raises:
        UserError: the architecture is not supported.

    Source: Chowdhery et al., PaLM, arXiv:2204.02311, appendix B.
    """
    s = _Shape.of(hf_config)
    attention_weights = s.hidden * s.head_dim * 2 * (s.heads + s.kv_heads)  # query and output; key and value
    mlp_weights = (3 if s.gated else 2) * s.hidden * s.intermediate
    weights = s.layers * (attention_weights + mlp_weights) + s.hidden * s.vocabulary
    attention = 12 * s.layers * s.heads * s.head_dim * sequence_length
    formula = (
        f"6 x {weights} matmul weights (head included, embedding not) + 12 x {s.layers} layers x {s.heads} query heads "
        f"x {s.head_dim} head width x {sequence_length} tokens (full attention square), forward and backward, without "
        f"recomputation (PaLM, appendix B)"
    )
    return Flops(6.0 * weights + attention, formula)


def smp_v2_flops(hf_config: Any, sequence_length: int) -> Flops:
    """SMP v2's later formula, per token, with the model's own MLP width and a gated MLP counted as three matrices.

    The original put ``--intermediate_size`` (14336 unless given) in for every model and ignored the gate of dense
    ones, so its printed TFLOPS differ. Mended like this it counts what :func:`model_flops_per_token` counts.
    """
    s = _Shape.of(hf_config)
    query_ratio = s.heads * s.head_dim / s.hidden
    gate = 1.5 if s.gated else 1.0
    attention = (1 + s.kv_heads / s.heads + sequence_length / s.hidden) * query_ratio
    mlp = s.intermediate / s.hidden * gate
    head = s.vocabulary / (2 * s.layers * s.hidden)
    formula = "12 L h^2 ((1 + kv/heads + s/h) q/h + (I/h) g + V/(2 L h)), g = 3/2 with a gated MLP (SMP v2, mended)"
    return Flops(12.0 * s.layers * s.hidden**2 * (attention + mlp + head), formula)


def six_n_flops(parameters: int) -> Flops:
    """The rule of thumb of SMP v2's first versions: 6 for every parameter, attention left out."""
    return Flops(6.0 * parameters, "6 N")


@dataclasses.dataclass(frozen=True)
class _Peak:
    """Dense TFLOP/s (no sparsity) of one device's NVIDIA data sheet; None: it has none, or none is published."""

    bf16: float | None
    fp16: float | None
    tf32: float | None = None
    fp32: float | None = None


# By the whole device name: a part of a card (MIG), or a variant that is not here, has another peak.
_PEAKS = {
    r"B200": _Peak(2250, 2250, 1125),
    r"H200( 141GB HBM3e)?|H100 80GB HBM3|H100 SXM5 80GB": _Peak(989, 989, 494.7, 66.9),
    r"H(100|200) NVL": _Peak(835.5, 835.5, 417.5, 60),
    r"H100 PCIe": _Peak(756, 756, 378, 51.2),
    r"A100[- ](SXM4-|PCIE-|SXM-)?(40|80)GB( PCIe)?": _Peak(312, 312, 156, 19.5),
    r"A10": _Peak(125, 125, 62.5, 31.2),
    r"A10G": _Peak(70, 70),
    r"L40S": _Peak(362, 362, 183, 91.6),
    r"L4": _Peak(121, 121, 60, 30.3),
    r"V100-SXM2-(16|32)GB": _Peak(None, 125, None, 15.7),
    r"V100-PCIE-(16|32)GB": _Peak(None, 112, None, 14),
    r"T4": _Peak(None, 65, None, 8.1),
}


def peak_flops(device_name: str, dtype: torch.dtype, *, tf32: bool = False) -> float | None:
    """FLOP/s that one device can do in dense matrix products, or None where that is not known.

    Args:
        device_name: as ``torch.cuda.get_device_name`` gives it.
        dtype: the format computed in.
        tf32: whether fp32 products may run in TF32 (``torch.get_float32_matmul_precision() != "highest"``).
    """
    formats = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "tf32" if tf32 else "fp32"}
    model = device_name.removeprefix("NVIDIA ").removeprefix("Tesla ")
    for pattern, peak in _PEAKS.items():
        if dtype in formats and re.fullmatch(pattern, model):
            tera = getattr(peak, formats[dtype])
            return None if tera is None else tera * 1e12
    return None
