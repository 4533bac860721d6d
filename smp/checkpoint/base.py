"""Frozen pretrained weights, which checkpoints do not contain: whether a model has those of its checkpoint."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from torch import nn

from smp.checkpoint.manifest import Manifest
from smp.checkpoint.remote import RemoteCheckpoint
from smp.errors import UserError
from smp.log import get_logger
from smp.models.added import added_parameters, base_of
from smp.models.full_digest import FullDigest
from smp.models.weight_files import digest_of

NF4 = "nf4-"  # begins the digest of weights that were quantised
logger = get_logger("train")


def with_base(entry: dict[str, Any], model: nn.Module, full: str | None) -> dict[str, Any]:
    """Add to a model's entry the pretrained weights whose parameters are not saved, and the files of those apart.

    Args:
        full: the digest of all bytes of the weights; None: it is not known yet.
    """
    base, added = base_of(model), added_parameters(model).values()
    apart = {each.apart.file: dict(each.apart.beside) for each in added if each.apart is not None}
    if base is not None:
        entry = {**entry, "base": base.digest, "weights": base.weights}
        if full is not None:
            entry["base_full"] = full
    return {**entry, "apart": apart} if apart else entry


def check_base(path: Path | RemoteCheckpoint, manifest: Manifest, model: nn.Module) -> None:
    """Raise a UserError for a checkpoint without the frozen parameters that was made with others than the model has.

    Where the digest of all their bytes is not known yet, :func:`digest_together` compares it later.
    """
    base, theirs = base_of(model), manifest.model.get("base")
    if base is None or theirs is None:
        return
    base.full.expected = manifest.model.get("base_full")
    if base.digest != theirs or base.full.differs:
        raise UserError(f"checkpoint {path} was made with other pretrained weights than {base.weights}, which it does "
                        f"not contain: start with those it was made with")  # fmt: skip


def weights_at(path: Any) -> Path | None:
    """Return where a manifest, or a user, says that pretrained weights are; None if there is nothing."""
    with contextlib.suppress(OSError, RuntimeError):  # names that no system has, and ~ of no user
        if isinstance(path, str) and (found := Path(path).expanduser()).exists():
            return found
    return None


def is_base_of(manifest: Manifest, weights: Path) -> bool:
    """Return whether a checkpoint without the frozen parameters was made with these weights, of which all is read.

    Raises:
        UserError: they cannot be read.
    """
    full = manifest.model.get("base_full")
    same = digest_of(weights) == str(manifest.model.get("base")).removeprefix(NF4)
    return same and (full is None or FullDigest(weights).find() == full)


def begin_digest(model: nn.Module) -> None:
    """Have rank 0 read all bytes of the frozen pretrained weights in the background, unless it has done so before."""
    base = base_of(model)
    if base is not None and dist.get_rank() == 0 and base.full.begin():
        logger.info("All bytes of %s are read once in the background, for their digest.", base.weights)


def is_other_base(model: nn.Module) -> bool:
    """Return whether the frozen weights are known here to be others than those of the checkpoint resumed from."""
    base = base_of(model)
    return base is not None and base.full.differs


def refuse_other_base(model: nn.Module) -> None:
    """Raise the UserError of :func:`is_other_base`."""
    base = base_of(model)
    raise UserError(
        f"the checkpoint that was resumed from was made with other pretrained weights than "
        f"{base and base.weights}, as the digest of all their bytes shows: start with those it was made with"
    )


def digest_together(model: nn.Module) -> str | None:
    """Return the digest of all bytes of the frozen pretrained weights, if rank 0 knows it; collective.

    Raises:
        UserError: on every rank; the checkpoint that was resumed from was made with others.
    """
    base = base_of(model)
    if base is None:
        return None
    dist.broadcast_object_list(said := [base.full.value, base.full.differs])
    if said[1]:
        refuse_other_base(model)
    return cast(str | None, said[0])


def warn_unless_compared(model: nn.Module) -> None:
    """Warn where the process ends before the frozen weights have been compared with the checkpoint's."""
    base = base_of(model)
    if base is not None and dist.get_rank() == 0 and not base.full.is_compared:
        logger.warning(
            "%s has not been compared in full with the weights that the checkpoint was made with: reading it takes "
            "longer than this run.", base.weights,
        )  # fmt: skip
