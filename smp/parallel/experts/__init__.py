"""Mixtures of experts: each rank keeps some experts, and tokens are sent to the ranks of theirs."""

from smp.parallel.experts.technique import Config, after_update, apply, extra_loss, metrics, problems

__all__ = ["Config", "after_update", "apply", "extra_loss", "metrics", "problems"]
