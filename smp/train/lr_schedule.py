"""The learning rate as a pure function of the number of updates done."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import torch

from smp.config import Section, setting

SMP_V2_DECAY_ITERS = 47683


@dataclasses.dataclass(frozen=True, kw_only=True)
class LRConfig(Section):
    """Peak, shape and horizon of the learning rate."""

    lr: float = setting(1e-4, "Peak learning rate.", above=0)
    lr_decay_style: Literal["constant", "linear", "cosine", "exponential", "plateau", "wsd"] = setting(
        "cosine", "How the rate falls after warm-up. plateau: constant, then linear; wsd: constant, then short linear."
    )
    lr_decay_iters: int | None = setting(
        None,
        "Updates until the rate has fallen to min_lr. Default: max_steps; with --lr_compat smp_v2, 47683.",
        minimum=1,
    )
    min_lr: float = setting(1e-5, "The rate at the end of the decay.", minimum=0)
    warmup: float = setting(0.0032, "Fraction of the horizon spent in linear warm-up.", minimum=0, maximum=1)
    plateau: float = setting(
        0.0, "Fraction of the horizon at the peak; style plateau only, whose decay follows.", minimum=0, maximum=1
    )
    wsd_decay: float = setting(
        0.1, "Fraction of the horizon spent in the final decay; style wsd only.", minimum=0, maximum=1
    )
    lr_compat: Literal["none", "smp_v2"] = setting(
        "none", "smp_v2: SMP v2's numbers exactly, with a first rate of 0 and decays that stop short of their end."
    )

    def problems(self) -> list[str]:
        """Add values that contradict each other or the style."""
        found = super().problems()
        style = self.lr_decay_style
        if math.isinf(self.lr):
            found.append("--lr must be finite, got inf")
        if style != "constant" and self.min_lr > self.lr:
            found.append(f"--min_lr {self.min_lr} is above --lr {self.lr}: lower --min_lr to at most {self.lr}")
        if style == "exponential" and self.min_lr == 0 and self.lr_compat == "none":
            found.append("--lr_decay_style exponential cannot reach --min_lr 0: give a --min_lr greater than 0")
        if style == "wsd" and self.lr_compat == "smp_v2":
            found.append("--lr_compat smp_v2 has no style wsd: choose another --lr_decay_style, or --lr_compat none")
        for name, value, default, owner in (
            ("plateau", self.plateau, 0.0, "plateau"),
            ("wsd_decay", self.wsd_decay, 0.1, "wsd"),
        ):
            if style == owner and self.warmup + value > 1:
                found.append(f"--warmup {self.warmup} and --{name} {value} are fractions of one horizon: sum at most 1")
            if style != owner and value != default:
                found.append(
                    f"--{name} {value} is for --lr_decay_style {owner} only, and the style is {style}: leave it out"
                )
        return found


def lr_at(config: LRConfig, step: int, *, max_steps: int) -> float:
    """Return the learning rate of update number ``step + 1``.

    With N the horizon and W = ceil(warmup N): update i uses lr i/W up to W, then falls so that update N uses exactly
    min_lr, and so do all after it.

    Args:
        step: optimizer updates already done.
        max_steps: the run's length in updates; the horizon where ``lr_decay_iters`` gives none.

    Source: cosine, Loshchilov and Hutter, SGDR, arXiv:1608.03983; wsd, Hu et al., MiniCPM, arXiv:2404.06395.
    """
    if config.lr_compat == "smp_v2":
        return _smp_v2_lr(config, step)
    lr, min_lr, style = config.lr, config.min_lr, config.lr_decay_style
    horizon = config.lr_decay_iters or max_steps
    warmup = _updates(config.warmup, horizon)
    update = step + 1
    if update <= warmup:
        return lr * update / warmup
    if style == "constant":
        return lr
    if update >= horizon:
        return min_lr
    hold = {"plateau": warmup + _updates(config.plateau, horizon), "wsd": horizon - _updates(config.wsd_decay, horizon)}
    start = max(warmup, hold.get(style, 0))
    if update <= start:
        return lr
    done = (update - start) / (horizon - start)
    if style == "exponential":
        return lr * (min_lr / lr) ** done
    if style == "cosine":
        done = (1 - math.cos(math.pi * done)) / 2
    return lr + (min_lr - lr) * done


def _updates(fraction: float, horizon: int) -> int:
    """Round ``fraction`` of ``horizon`` up; the small term keeps 0.07 x 100 = 7.000000000000001 at 7."""
    return min(horizon, math.ceil(fraction * horizon - 1e-9))


def _smp_v2_lr(config: LRConfig, step: int) -> float:
    """Compute SMP v2's ``AnnealingLR``, itself Megatron-LM's, to the last bit."""
    lr, style = config.lr, config.lr_decay_style
    horizon = config.lr_decay_iters or SMP_V2_DECAY_ITERS
    warmup = config.warmup * horizon
    capped = min(step, horizon - warmup)
    if warmup > 0 and step <= warmup:
        return lr * capped / warmup
    done = capped - warmup
    if style == "linear":
        value = lr * (horizon - done) / horizon
    elif style == "cosine":
        value = lr / 2.0 * (math.cos(math.pi * done / horizon) + 1)
    elif style == "exponential":
        value = lr * math.exp(-0.693 * done / horizon)
    elif style == "plateau" and step > (plateau_end := warmup + config.plateau * horizon):
        value = lr * (horizon - step) / (horizon - plateau_end) if step < horizon else 0.0
    else:
        value = lr
    return max(value, config.min_lr)


def set_lr(optimizer: torch.optim.Optimizer, config: LRConfig, step: int, *, max_steps: int) -> float:
    """Set the rate of the update that follows ``step`` updates, in every parameter group by its factor; return it."""
    lr = lr_at(config, step, max_steps=max_steps)
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_factor", 1.0)
    return lr
