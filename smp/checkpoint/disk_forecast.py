"""Disk space and time that a checkpoint will take, measured before the first step."""

from __future__ import annotations

import errno
import os
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from smp.checkpoint.directory import disk_free, nearest_existing
from smp.checkpoint.safetensors_io import reason
from smp.errors import UserError
from smp.local_shards import local_tensor
from smp.models.added import left_out
from smp.models.file_names import parameters_of
from smp.optim.optimizers import expected_specs
from smp.units import readable

_PROBE_BYTES = 32 << 20


def state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer, *, own: bool) -> int:
    """Return the bytes of a checkpoint's parameters and optimizer state: of the full model, or of this rank's shards.

    Frozen parameters have no optimizer state, and those of pretrained weights are in no checkpoint.
    """
    total, base, specs = 0.0, left_out(model), expected_specs(optimizer)
    for name, parameter in parameters_of(model).items():
        sizes = [spec.nbytes for spec in specs.get(parameter, {}).values() if spec.shape]
        if name not in base:
            sizes.append(parameter.numel() * parameter.element_size())
        total += sum(sizes) * (local_tensor(parameter).numel() / max(1, parameter.numel()) if own else 1)
    return int(total)


def forecast(directory: Path, nbytes: int) -> str:
    """Write a little, and return a sentence on the size of a checkpoint and the time that one disk takes for it.

    Args:
        nbytes: of a checkpoint in ``directory``.

    Raises:
        UserError: it cannot be written, or there is no space for one checkpoint.
    """
    free = disk_free(directory)
    if free < nbytes:
        raise UserError(
            f"{directory} has {readable(free)} free and a checkpoint needs about {readable(nbytes)}: free some space, "
            f"or choose another --checkpoint_dir"
        )
    data = os.urandom(min(_PROBE_BYTES, max(nbytes, 1)))
    try:
        started = time.perf_counter()
        with tempfile.TemporaryFile(dir=nearest_existing(directory)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        seconds = time.perf_counter() - started
    except OSError as error:
        mend = "raise the limit, ulimit -f" if error.errno == errno.EFBIG else "choose another directory"
        raise UserError(f"--checkpoint_dir {directory} cannot be written ({reason(error)}): {mend}") from None
    seconds *= nbytes / len(data)
    return f"{readable(nbytes)}, to be written in about {seconds:.1f} s; {readable(free)} are free"
