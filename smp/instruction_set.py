"""Old name of :mod:`smp.cpu_bf16`."""

from smp.cpu_bf16 import ensure_bf16_works

__all__ = ["ensure_bf16_works"]
