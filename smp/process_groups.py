"""What is done to the process groups of a mesh once they are made."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist


def keep_timeout(groups: list[dist.ProcessGroup], device_type: str) -> None:
    """Give groups the timeout of the default group: torch creates a mesh's groups with half an hour."""
    assert dist.group.WORLD is not None
    backend = dist.group.WORLD._get_backend(torch.device(device_type))
    limit = getattr(getattr(backend, "options", None), "_timeout", None)
    if limit is not None:  # the fake backend has none
        for group in groups:
            dist.distributed_c10d._set_pg_timeout(limit, group)


def warm_up(groups: Iterable[dist.ProcessGroup]) -> None:
    """Let NCCL connect the ranks of all groups and then of each of these, by one all_reduce; collective.

    It would at a group's first collective: in a forward, or in the thread of autograd, after the model is loaded and
    compiled.

    Args:
        groups: in the same order on every rank; a group may come again.
    """
    one = torch.zeros(1, device="cuda")
    for group in dict.fromkeys([dist.group.WORLD, *groups]):
        assert group is not None
        if group.size() > 1:
            dist.all_reduce(one, group=group)
