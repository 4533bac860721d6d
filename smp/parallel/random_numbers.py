"""Random numbers that a rank, or a product, draws apart from those that follow."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


def draw_seed() -> int:
    """Draw a seed from the CPU's generator."""
    return int(torch.randint(2**62, ()))


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Let the generators of the CPU and of ``device`` begin with a seed in the ``with`` block, and then go on."""
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_gpu else []):
        torch.default_generator.manual_seed(seed)  # not torch.manual_seed, which takes ten times as long without a GPU
        if on_gpu:
            torch.cuda.manual_seed(seed)
        yield
