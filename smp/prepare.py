"""Old name of :mod:`smp.parallel.parallelize`."""

from smp.parallel.parallelize import compute_dtype, parallelize, prepare_model

__all__ = ["compute_dtype", "parallelize", "prepare_model"]
