"""The parameter groups of a saved optimizer, for one whose groups may be others."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from smp.errors import UserError
from smp.log import get_logger

_logger = get_logger("smp.fsdp")

State = dict[str, Any]
Group = dict[str, nn.Parameter]  # a parameter group of an optimizer, by the plain model's names


def numbered_groups(
    saved: list[State], groups: list[Group], keys: dict[str, Any], optimizer: torch.optim.Optimizer
) -> list[State]:
    """Return the saved groups in the order of the optimizer's, with its keys of the parameters."""
    by_members = {frozenset(group["params"]): group for group in saved}
    members = [frozenset(own) for own in groups]
    if len(saved) != len(groups) or any(own not in by_members for own in members):
        other = sorted({name for group in groups for name in group} - frozenset().union(*by_members))
        if other:
            raise UserError(
                f"FSDP: the optimizer's {len(groups)} parameter groups are not the {len(saved)} saved ones, whose "
                f"'params' lack {other[0]}: add it to those of one, and it begins without a state"
            )
        by_members = dict(zip(members, _regrouped(saved, groups, optimizer), strict=True))
    return [
        {**copy.deepcopy(by_members[own]), "params": [keys[name] for name in group]}
        for own, group in zip(members, groups, strict=True)
    ]


def _regrouped(saved: list[State], groups: list[Group], optimizer: torch.optim.Optimizer) -> list[State]:
    """Return the optimizer's own groups with what all of them have in common as it was saved.

    FSDP1 with ``use_orig_params=False`` has whole units in its groups, and so all parameters in one.

    Raises:
        UserError: the saved groups do not say which learning rate a group goes on with.
    """
    filled = [group for group in saved if group["params"]]
    kept, found = set(), [dict(group) for group in optimizer.param_groups]
    for option in [option for group in filled[:1] for option in group if option != "params"]:
        values = [group[option] for group in filled if option in group]
        own = [group[option] for group in found if option in group]
        if all(value == own[0] for value in own) and all(value == values[0] for value in values):
            for group in found:
                group[option] = values[0]
        elif option in ("lr", "initial_lr"):
            raise UserError(
                f"FSDP: the optimizer's {len(groups)} parameter groups are not the {len(saved)} saved ones, and their "
                f"{option} differs: make groups of the same parameters"
            )
        else:
            kept.add(option)
    _logger.info(
        "FSDP: the optimizer's %d parameter groups are not the %d saved ones: states go by the parameters' names%s",
        len(groups), len(saved), f", and {', '.join(sorted(kept))} stays the optimizer's own" if kept else "",
    )  # fmt: skip
    return found
