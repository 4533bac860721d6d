"""Losses and gradients that are not finite: found before the update, by all ranks alike, and logged.

No collective is added. A loss that is not finite makes all gradients of its rank NaN (:func:`spread_nonfinite`); these
are reduced over the ranks in any case, and so is their norm, which decides.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from smp.errors import RunError
from smp.faults.agreement import of_all_ranks
from smp.faults.config import FaultConfig
from smp.log import get_logger

logger = get_logger("train")

FILE = "nonfinite.jsonl"
NAMES = 20
IDS = 4096
SHOWN_IDS = 16


def spread_nonfinite(loss: torch.Tensor) -> torch.Tensor:
    """Return the loss unchanged, or NaN where it is not finite: then so are all gradients that follow from it."""
    return loss * (1 + 0 * loss.detach())


def nonfinite_gradients(model: nn.Module, norms: dict[nn.Parameter, torch.Tensor]) -> list[str]:
    """Return the names of the parameters whose gradient, in this rank's shard, is not finite.

    Args:
        norms: of the gradients of this rank, from :func:`smp.parallel.grad_norm.clip_grad_norm_`.
    """
    return [name for name, p in model.named_parameters() if p in norms and not math.isfinite(float(norms[p]))]


@torch.no_grad()
def nonfinite_values(model: nn.Module) -> list[str]:
    """Return the names of the parameters of which this rank's shard has a value that is not finite."""
    shards = ((name, p.to_local() if isinstance(p, DTensor) else p) for name, p in model.named_parameters())
    # By sums, as memory may be short for masks.
    return [name for name, shard in shards if not math.isfinite(float(shard.sum(dtype=torch.float32)))]


class NonFinite:
    """Policy for a step whose update would not be finite: end the run, or leave the update out.

    Args:
        run_dir: where ``nonfinite.jsonl`` is kept, by rank 0.
    """

    def __init__(self, config: FaultConfig, run_dir: Path):
        self._config, self._path = config, run_dir / FILE

    def handle(
        self, *, step: int, skipped: int, loss: float, grad_norm: float, lr: float, sample_ids: list[int],
        parameters: list[str], values: list[str],
    ) -> None:  # fmt: skip
        """Log the step to ``nonfinite.jsonl``, and end the run unless the update may be left out; collective.

        Args:
            step: whose update was not made.
            skipped: updates left out so far, with this one.
            loss: sum of the token losses of this rank.
            grad_norm: the global one.
            sample_ids: stream positions that this rank has read in the step.
            parameters: see :func:`nonfinite_gradients`.
            values: see :func:`nonfinite_values`.

        Raises:
            RunError: on every rank, if the run is to stop or the budget is used up.
        """
        mine = {
            "rank": dist.get_rank(), "loss": _strict(loss), "sample_ids": sample_ids[:IDS], "samples": len(sample_ids),
            "nonfinite_parameters": len(parameters), "parameters": parameters[:NAMES],
            "nonfinite_values": values[:NAMES],
        }  # fmt: skip
        ranks = of_all_ranks(mine)
        skip = self._config.nonfinite == "skip" and skipped <= self._config.nonfinite_budget
        what = _sentence(step, ranks)
        if dist.get_rank() == 0:
            line = {
                "step": step, "time": time.time(), "action": "skip" if skip else "stop", "lr": lr,
                "grad_norm": _strict(grad_norm), "ranks": ranks,
            }  # fmt: skip
            self._write(line)
        if skip:
            logger.warning(
                "%s. The update was left out, %d of %d that may be; %s has the details.",
                what, skipped, self._config.nonfinite_budget, self._path,
            )  # fmt: skip
            return
        if named := sorted({name for each in ranks for name in each["nonfinite_values"]}):
            advice = (
                f"The parameters themselves are not finite, before the update: {', '.join(named[:4])}"
                f"{' and others' if len(named) > 4 else ''}: take pretrained weights or a checkpoint without NaN and "
                f"infinity"
            )
        elif self._config.nonfinite == "skip":
            advice = (
                f"{skipped} updates have not been finite, and --nonfinite_budget {self._config.nonfinite_budget} may "
                f"be left out: resume from an earlier checkpoint with a smaller --lr, or raise the budget"
            )
        else:
            advice = (
                "resume with a smaller --lr, look at these samples, or use --nonfinite skip to leave such updates out"
            )
        raise RunError(
            f"{what}. Its update was not made; checkpoints are as they were. {advice}. {self._path} has the details"
        )

    def _write(self, line: dict[str, Any]) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, allow_nan=False) + "\n")
        except OSError as error:
            logger.warning("%s cannot be written (%s).", self._path, error.strerror)


def _strict(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _sentence(step: int, ranks: list[dict[str, Any]]) -> str:
    """Name the ranks whose loss is not finite, else the parameters whose gradients are not."""
    sources = [each for each in ranks if isinstance(each["loss"], str)]
    if sources:
        who = "; ".join(f"rank {each['rank']} ({_samples(each)})" for each in sources[:4])
        more = f" and {len(sources) - 4} more ranks" if len(sources) > 4 else ""
        return f"Step {step}: the loss is not finite on {who}{more}"
    names = sorted({name for each in ranks for name in each["parameters"]})
    what = f"of {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "") if names else "in their norm"
    samples = "; ".join(f"rank {each['rank']}: {_samples(each)}" for each in ranks[:4])
    return f"Step {step}: the loss is finite and the gradients are not, {what} ({samples})"


def _samples(each: dict[str, Any]) -> str:
    ids = each["sample_ids"]
    shown = ", ".join(map(str, ids[:SHOWN_IDS])) + (", ..." if each["samples"] > SHOWN_IDS else "")
    return f"samples {shown}" if ids else "no samples"
