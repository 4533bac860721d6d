"""Settings of the optimizer; the learning rate has a section of its own."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch

from smp.config import Section, setting

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimConfig(Section):
    """The optimizer's settings, and the formats of what it updates; the learning rate has a section of its own."""

    optimizer: str = setting(
        "adamw", "The optimizer; a checkpoint is resumed only with the optimizer that it was saved with."
    )
    param_groups: str | None = setting(
        None,
        "YAML or JSON file of parameter groups: a list of mappings with `pattern`, a regular expression that is "
        "searched for in the names of transformers' parameters, and of `lr_factor`, `weight_decay` and `optimizer` "
        "what is to differ from the job's. The first group that has a parameter counts.",
    )
    optimizer_state_dtype: Literal["fp32", "bf16"] | None = setting(
        None, "Dtype in which AdamW keeps the mean gradient and the mean squared gradient. Default: --param_dtype's."
    )
    param_dtype: Literal["fp32", "bf16"] = setting(
        "fp32",
        "Dtype of trained parameters and their gradients between steps. With bf16, gradients are summed over ranks and "
        "micro-batches in fp32 and rounded once.",
    )
    stochastic_rounding: bool | None = setting(
        None,
        "Round updated bf16 parameters up or down at random, with the update as the mean; 0: to the nearest, which "
        "loses updates below 1/256 of a parameter. Default: 1 with --param_dtype bf16.",
    )
    weight_decay: float = setting(
        0.2, "Decoupled weight decay of matrices; norms and biases have none.", minimum=0, maximum=1000
    )
    beta1: float = setting(0.9, "AdamW's decay of the mean gradient.", minimum=0, maximum=0.999999)
    beta2: float = setting(0.95, "AdamW's decay of the mean squared gradient.", minimum=0, maximum=0.999999)
    adam_eps: float = setting(1e-8, "AdamW's epsilon.", above=0, maximum=1)
    muon_momentum: float = setting(0.95, "Muon's decay of the mean gradient.", minimum=0, maximum=0.999999)
    muon_nesterov: bool = setting(True, "Nesterov momentum in Muon.")
    muon_adjust_lr: Literal["match_rms_adamw", "original"] = setting(
        "match_rms_adamw",
        "Factor of Muon's learning rate: match_rms_adamw, 0.2 * sqrt(max(outputs, inputs)), for rates of AdamW; "
        "original, sqrt(max(1, outputs / inputs)), for rates of Muon alone.",
    )
    muon_dtype: Literal["fp32", "bf16"] = setting(
        "fp32", "Dtype in which Muon sends and orthogonalises momentum: bf16 as torch.optim.Muon, in half the bytes."
    )
    grad_clip: float = setting(1.0, "Bound of the global gradient norm; 0: no clipping.", minimum=0)

    @property
    def moments(self) -> str:
        """Dtype of AdamW's moments, as a flag has it."""
        return self.optimizer_state_dtype or self.param_dtype

    @property
    def parameter_bytes(self) -> int:
        """Bytes of an element of a trained parameter between steps, and of its gradient."""
        return _DTYPES[self.param_dtype].itemsize

    @property
    def rounds_stochastically(self) -> bool:
        """Whether updated parameters are rounded stochastically."""
        return self.param_dtype == "bf16" and self.stochastic_rounding is not False

    def problems(self) -> list[str]:
        """Add rounding of a dtype that is not used, and means that bf16 cannot follow."""
        found = super().problems()
        if self.stochastic_rounding and self.param_dtype != "bf16":
            found.append(
                "--stochastic_rounding 1 rounds bf16 parameters and --param_dtype is fp32: give --param_dtype bf16, or "
                "leave it out"
            )
        for name in ("beta1", "beta2"):
            if self.moments == "bf16" and 1 - getattr(self, name) < 1 / 256:
                found.append(
                    f"--{name} {getattr(self, name)} changes a mean by less than bf16 has digits for, so that it would "
                    f"stay as it is: give at most 0.996, or --optimizer_state_dtype fp32"
                )
        return found


def torch_dtype(text: str) -> torch.dtype:
    """Return the dtype that a flag names."""
    return _DTYPES[text]
