"""Settings of the optimizer; the learning rate has a section of its own."""

from __future__ import annotations

import dataclasses

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
    grad_clip: float = setting(1.0, "Bound of the global gradient norm; 0: no clipping.", minimum=0)
