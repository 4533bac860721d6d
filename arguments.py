"""The training job's settings for scripts that import them from here; they are in ``smp.train.arguments``."""

from smp.train.arguments import FLAGS, SECTIONS, TrainConfig, parse_args

__all__ = ["FLAGS", "SECTIONS", "TrainConfig", "parse_args"]
