"""Tensor and sequence parallelism for Hugging Face models: split layers, collectives, forward."""

from smp.parallel.tensor.technique import Config, apply, choose, cost, problems, traffic

__all__ = ["Config", "apply", "choose", "cost", "problems", "traffic"]
