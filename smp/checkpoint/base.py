"""Frozen pretrained weights, which checkpoints do not contain: whether a model has those of its checkpoint."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from torch import nn

from smp.checkpoint.hf_export import full_tensor
from smp.checkpoint.manifest import Manifest
from smp.checkpoint.remote import RemoteCheckpoint
from smp.checkpoint.safetensors_io import bytes_of, new_digest, shown
from smp.errors import UserError
from smp.faults.agreement import together
from smp.log import get_logger
from smp.models.added import added_parameters, base_of, encoded_parameters, files_apart, left_out
from smp.models.file_names import parameters_of
from smp.models.full_digest import FullDigest
from smp.models.weight_files import digest_of
from smp.parallel.sharding import reshard

_FROZEN_DIGEST = "_smp_frozen_digest"
NF4 = "nf4-"  # begins the digest of weights that were quantised
logger = get_logger("train")


def with_base(entry: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Add to a model's entry the frozen weights that are not saved, and the files of parameters apart; collective.

    The digest of all bytes is left out where it is not known yet.

    Raises:
        UserError: on every rank; as :func:`digest_together`.
    """
    full, frozen = digest_together(model), frozen_digest(model)
    base, apart = base_of(model), files_apart(added_parameters(model).values())
    if base is not None:
        entry = {**entry, "base": base.digest, "weights": base.weights}
        if full is not None:
            entry["base_full"] = full
    if frozen is not None:
        entry = {**entry, "frozen": frozen}
    return {**entry, "apart": apart} if apart else entry


def require_base(path: Path | RemoteCheckpoint, manifest: Manifest, model: nn.Module) -> None:
    """Refuse a checkpoint without the frozen parameters that was made with others than the model has; collective.

    Where the digest of all bytes of their files is not known yet, :func:`digest_together` compares it later.

    Raises:
        UserError: on every rank.
    """
    together(lambda: _check_files(path, manifest, model))
    frozen = manifest.model.get("frozen")
    if frozen is not None and frozen_digest(model) not in (None, frozen):
        raise UserError(
            f"checkpoint {path} was made with other frozen weights than the model has, and does not contain them, as "
            f"they are in 4 bits: make the model with the same weights"
        )


def _check_files(path: Path | RemoteCheckpoint, manifest: Manifest, model: nn.Module) -> None:
    base, theirs = base_of(model), manifest.model.get("base")
    if base is None and theirs is not None and left_out(model) and dist.get_rank() == 0:
        logger.warning(
            "Checkpoint %s was made with the pretrained weights of %s and does not contain them: the model's are of no "
            "files, and are not compared.", path, manifest.model.get("weights"),
        )  # fmt: skip
    if base is None:
        return
    base.full.expected = manifest.model.get("base_full")
    if theirs is not None and (base.digest != theirs or base.full.differs):
        raise UserError(f"checkpoint {path} was made with other pretrained weights than {base.weights}, which it does "
                        f"not contain: start with those it was made with")  # fmt: skip


def frozen_digest(model: nn.Module) -> str | None:
    """Return the digest of the frozen parameters that checkpoints leave out, if they are of no files; collective.

    They do not change, and are read once.
    """
    names = frozenset() if base_of(model) else left_out(model)
    if names and not hasattr(model, _FROZEN_DIGEST):
        reshard(model)
        digest, encoded = new_digest(), encoded_parameters(model)
        for name, parameter in parameters_of(model).items():
            if name in names:
                tensor = full_tensor(parameter.detach())
                if dist.get_rank() == 0:
                    tensor = encoded[name].decode(tensor) if name in encoded else tensor
                    digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
                    digest.update(bytes_of(tensor.cpu().contiguous()))
        dist.broadcast_object_list(said := [shown(digest)])
        setattr(model, _FROZEN_DIGEST, said[0])
    return getattr(model, _FROZEN_DIGEST) if names else None


def weights_at(path: Any) -> Path | None:
    """Return where a manifest, or a user, says that pretrained weights are; None if they are missing."""
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
            "%s has not been compared in full with the weights that the checkpoint was made with: the run ended before "
            "all of it was read, or it was changed meanwhile.", base.weights,
        )  # fmt: skip
