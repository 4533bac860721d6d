"""Agreement of all ranks: on flags at every step boundary, on errors and values before they go on together."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from smp.errors import UserError

T = TypeVar("T")


class Readback:
    """Numbers of a device on their way to the host, which need not wait for them until it reads.

    Args:
        values: of any shape; on a GPU they may change as soon as this returns.
    """

    def __init__(self, values: torch.Tensor):
        self._values, self._arrived = values, None
        if values.is_cuda:
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values = host.copy_(values, non_blocking=True)
            self._arrived = torch.cuda.current_stream(values.device).record_event()

    def read(self) -> Any:
        """Return the numbers, in lists by dimension; waits for the device to have come to where this was made."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values.tolist()


def count_later(device: torch.device, **flags: bool) -> Callable[[], dict[str, int]]:
    """Begin to count the ranks that raised each flag; collective, with the same flags in the same order.

    Args:
        device: of the reduced tensor; the one that the process group's backend needs.

    Returns:
        Function that waits for the counts and returns them.
    """
    mine = torch.tensor([int(value) for value in flags.values()], pin_memory=device.type == "cuda")
    raised = mine.to(device, non_blocking=True)
    if dist.get_world_size() > 1:
        dist.all_reduce(raised)
    counts = Readback(raised)
    return lambda: dict(zip(flags, counts.read(), strict=True))


def count(device: torch.device, **flags: bool) -> dict[str, int]:
    """Count the ranks that raised each flag, as :func:`count_later`, and wait for the counts."""
    return count_later(device, **flags)()


def of_all_ranks(mine: Any) -> list[Any]:
    """Return the value of each rank, by rank; collective."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def together(action: Callable[[], T]) -> T:
    """Call ``action`` on every rank, and raise a UserError of any of them on all; collective.

    Raises:
        UserError: the first rank's.
    """
    result, problem = None, None
    try:
        result = action()
    except UserError as error:
        problem = str(error)
    found = [text for text in of_all_ranks(problem) if text is not None]
    if found:
        raise UserError(found[0])
    return cast(T, result)


def require_same(mine: dict[str, Any], advice: str, before: str = "") -> None:
    """Compare values by name with those of all ranks; collective.

    Args:
        mine: this rank's; what rank 0 does not name is not compared.
        advice: what to do about a difference.
        before: what the sentence begins with.

    Raises:
        UserError: on every rank, naming the first difference from rank 0.
    """
    everyone = of_all_ranks(mine)
    for rank, theirs in enumerate(everyone):
        for what, value in theirs.items():
            if value != (first := everyone[0].get(what, value)):
                raise UserError(
                    f"{before}rank {rank} disagrees with rank 0 on {what}: {value} there, {first} here; {advice}"
                )


def require_same_weights(model: nn.Module, caller: str) -> None:
    """Refuse a model of which ranks would shard different weights; collective.

    A part of each parameter is compared, which other seeds or files make another one. One on the meta device is not, or
    that is split already.

    Raises:
        UserError: on every rank, naming the first parameter that differs.
    """
    values = {name: p for name, p in model.named_parameters() if not p.is_meta and not isinstance(p, DTensor)}
    mine = {f"the values of {name}": _sample(p) for name, p in values.items()}
    require_same(
        mine,
        "give all ranks the same weights: call torch.manual_seed(0) on each before the model is made, load the same "
        "files, or take rank 0's by smp.transform(model, load_state_dict_from_rank0=True)",
        before=f"{caller}: ",
    )


def _sample(values: torch.Tensor) -> str:
    """Return a checksum of some values from end to end; the last ones may alone be new, as of added tokens."""
    flat = values.detach().reshape(-1)
    parts = (flat[:: max(1, flat.numel() // 64)], flat[-8:])
    some = torch.cat([part.contiguous().view(torch.uint8) for part in parts])
    return f"checksum {zlib.crc32(some.cpu().numpy().tobytes()):08x}"
