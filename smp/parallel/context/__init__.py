"""Context parallelism: every sequence is split over ranks, whose attention communicates keys and values, or heads."""

from smp.parallel.context.technique import Config, apply, choose, cost, is_split, own_part, problems, traffic

__all__ = ["Config", "apply", "choose", "cost", "is_split", "own_part", "problems", "traffic"]
