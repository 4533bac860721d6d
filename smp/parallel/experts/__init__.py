"""Mixtures of experts: each rank keeps some experts, and tokens are sent to the ranks of theirs."""

from smp.parallel.experts.technique import Config, apply, problems

__all__ = ["Config", "apply", "problems"]
