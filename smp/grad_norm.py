"""Old name of :mod:`smp.parallel.grad_norm`."""

from smp.parallel.grad_norm import clip_grad_norm_

__all__ = ["clip_grad_norm_"]
