"""Stochastic rounding of fp32 to bf16, alike at any layout.

A value between two neighbours in bf16 becomes the upper one with the probability of its distance from the lower one, so
that its mean is the value: updates too small for the nearest one to change count in the mean.

[Note: random numbers by position]
The random bits of an element are a function of (seed, parameter name, step, index in the full parameter), in integer
arithmetic alone: no generator has a state, every layout rounds alike, on every device, and a resumed run goes on with
the numbers of the step that it has come to. A hash takes the index in one axis after another.

Source: Gupta et al., Deep Learning with Limited Numerical Precision, arXiv:1502.02551; the hash is lowbias32 of
https://github.com/skeeto/hash-prospector, public domain.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch

_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B - (1 << 32)  # as signed numbers: torch has no arithmetic of unsigned ones


def parameter_key(seed: int, name: str) -> int:
    """Return the number, of 32 bits with a sign, from which the random bits of a parameter begin."""
    digest = hashlib.blake2b(f"rounding:{seed}:{name}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little", signed=True)


def _mix_(numbers: torch.Tensor) -> torch.Tensor:
    """Hash int32 in place; products wrap around, and the masks make of a shift one without the sign.

    Of lowbias32 the last step is left out, which mixes the lower bits: the upper ones are used.
    """
    numbers.bitwise_xor_((numbers >> 16).bitwise_and_(0xFFFF)).mul_(_FIRST)
    return numbers.bitwise_xor_((numbers >> 15).bitwise_and_(0x1FFFF)).mul_(_SECOND)


def random_bits(key: int, step: torch.Tensor, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    """Return int32 of which the upper 16 bits are random, of a box of a parameter, on the device of ``step``.

    Args:
        key: of the parameter.
        step: 0-d.
        offsets: index of the box's first element in the full parameter.
        shape: of the box.
    """
    found = _mix_(step.to(torch.int32) + key)
    for offset, size in zip(offsets, shape, strict=True):
        index = torch.arange(offset, offset + size, dtype=torch.int32, device=step.device)
        found = _mix_(found.unsqueeze(-1) + index)
    return found


def round_stochastically(values: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Return fp32 values in bf16, rounded by the upper 16 of the random bits of each."""
    # Adding to the bits that bf16 lacks carries into those that it has, at either sign, as often as they are large.
    carried = (bits >> 16).bitwise_and_(0xFFFF).add_(values.view(torch.int32)).bitwise_and_(-0x10000)
    # A carry out of a NaN would be a number.
    return carried.view(torch.float32).to(torch.bfloat16).masked_fill_(values.isnan(), math.nan)
