"""Mixtures of experts: each rank keeps some experts, and tokens are sent to the ranks of theirs."""

from smp.parallel.experts.config import ExpertsConfig
from smp.parallel.experts.technique import (
    Config,
    after_update,
    apply,
    check_and_apply,
    extra_loss,
    metrics,
    problems,
    traffic,
)

__all__ = [
    "Config", "ExpertsConfig", "after_update", "apply", "check_and_apply", "extra_loss", "metrics", "problems",
    "traffic",
]  # fmt: skip
