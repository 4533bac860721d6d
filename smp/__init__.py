"""Open, SMP-v2-style model-parallel training for PyTorch: the public names."""

from smp import comm
from smp.api import init, is_initialized, parallelize, state, transform
from smp.config import ActivationConfig, CommConfig, ParallelConfig, PrecisionConfig
from smp.errors import ConfigError, UserError
from smp.grad_norm import clip_grad_norm_
from smp.loss import causal_lm_loss_sum, count_valid_tokens
from smp.mesh import Mesh
from smp.models.family import Family
from smp.models.registry import register_family
from smp.models.tensor_plan import Part, TensorPlan
from smp.sharding import set_gradient_sync

__all__ = [
    "ActivationConfig",
    "CommConfig",
    "ConfigError",
    "Family",
    "Mesh",
    "ParallelConfig",
    "Part",
    "PrecisionConfig",
    "TensorPlan",
    "UserError",
    "causal_lm_loss_sum",
    "clip_grad_norm_",
    "comm",
    "count_valid_tokens",
    "init",
    "is_initialized",
    "parallelize",
    "register_family",
    "set_gradient_sync",
    "state",
    "transform",
]

__version__ = "0.1.0"
