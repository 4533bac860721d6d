"""Settings of how tokens are spread over experts."""

from __future__ import annotations

import dataclasses
from typing import Literal

from smp.config import AUTO, Section, setting

WITH_COEFFICIENT = ("sequence", "aux_loss")
_COEFFICIENT, _RATE = 0.001, 0.001


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsConfig(Section):
    """Balance of the experts of a mixture."""

    moe_load_balancing: Literal["auto", "none", "sequence", "bias", "aux_loss", "sinkhorn", "balanced"] = setting(
        AUTO,
        "How tokens are spread over experts. sequence: DeepSeek-V3's loss of each sequence; bias: its bias of the "
        "selection, changed after each step; aux_loss: the Switch Transformer's loss over the global batch; sinkhorn: "
        "selection by normalised logits; balanced: by the token's position, for measurements; none: the model's router "
        "alone, as transformers trains it. auto: none; sinkhorn with --model_type mixtral of no pretrained weights.",
    )
    moe_aux_loss_coeff: float = setting(_COEFFICIENT, "Factor of the loss of sequence and aux_loss.", minimum=0.0)
    moe_z_loss_coeff: float = setting(
        0.0, "Factor of the squared logarithm of the sum of a router's exponentiated logits. 0: none.", minimum=0.0
    )
    moe_bias_update_rate: float = setting(_RATE, "Change of an expert's bias in a step of bias.", minimum=0.0)

    @property
    def method(self) -> str:
        """The balance that is asked for, or ``none``."""
        return "none" if self.moe_load_balancing == AUTO else self.moe_load_balancing

    @property
    def adds_loss(self) -> str | None:
        """Flag with which a loss is added to that of the tokens, or None."""
        if self.method in WITH_COEFFICIENT:
            return f"--moe_load_balancing {self.method}"
        return f"--moe_z_loss_coeff {self.moe_z_loss_coeff}" if self.moe_z_loss_coeff else None

    def problems(self) -> list[str]:
        """Add a factor or rate of a balance that is not asked for."""
        found = super().problems()
        if self.moe_aux_loss_coeff != _COEFFICIENT and self.method not in WITH_COEFFICIENT:
            found.append(
                f"--moe_aux_loss_coeff {self.moe_aux_loss_coeff} has a meaning only with --moe_load_balancing sequence "
                f"or aux_loss: add one, or leave it out"
            )
        if self.moe_bias_update_rate != _RATE and self.method != "bias":
            found.append(
                f"--moe_bias_update_rate {self.moe_bias_update_rate} has a meaning only with --moe_load_balancing "
                f"bias: add it, or leave it out"
            )
        return found
