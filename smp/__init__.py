"""Open, SMP-v2-style model-parallel training for PyTorch: the public names."""

from smp import comm
from smp.api import init, is_initialized, parallelize
from smp.config import ActivationConfig, CommConfig, ParallelConfig, PrecisionConfig
from smp.errors import ConfigError, UserError
from smp.grad_norm import clip_grad_norm_
from smp.loss import causal_lm_loss_sum, count_valid_tokens
from smp.mesh import Mesh
from smp.sharding import set_gradient_sync

__all__ = [
    "ActivationConfig",
    "CommConfig",
    "ConfigError",
    "Mesh",
    "ParallelConfig",
    "PrecisionConfig",
    "UserError",
    "causal_lm_loss_sum",
    "clip_grad_norm_",
    "comm",
    "count_valid_tokens",
    "init",
    "is_initialized",
    "parallelize",
    "set_gradient_sync",
]

__version__ = "0.1.0"
