"""Settings of the optimizer; the learning rate has a section of its own."""

from __future__ import annotations

import dataclasses
from typing import Literal

from smp.config import Section, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimConfig(Section):
    """The optimizer's settings; the learning rate has a section of its own."""

    optimizer: str = setting(
        "adamw", "The optimizer; a checkpoint is resumed only with the optimizer that it was saved with."
    )
    param_groups: str | None = setting(
        None,
        "YAML or JSON file of parameter groups: a list of mappings with `pattern`, a regular expression that is "
        "searched for in the names of transformers' parameters, and of `lr_factor`, `weight_decay` and `optimizer` "
        "what is to differ from the job's. The first group that has a parameter counts.",
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

    def problems(self) -> list[str]:
        """Add settings of an optimizer that is not used."""
        fields = [each for each in dataclasses.fields(self) if each.name.startswith("muon_")]
        changed = [each.name for each in fields if getattr(self, each.name) != each.default]
        return super().problems() + [
            f"--{name} needs --optimizer muon: set it, or leave --{name} out"
            for name in changed
            if self.optimizer != "muon" and self.param_groups is None
        ]
