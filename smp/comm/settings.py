"""The backend's settings, from environment variables: SMDDP's two, with their meaning here, and its own."""

from __future__ import annotations

import dataclasses

from smp.errors import UserError
from smp.runtime import environment_bytes

_PAGE = 4096


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes in bytes.

    Attributes:
        scratch: ``SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES``: staging memory of one rank in one group, four slots of a
            quarter each. A message of any size passes; it goes in chunks of one slot.
        shared: ``SMDDP_AG_SORT_BUFFER_SIZE_BYTES``: most memory that one group on a host keeps for the shared buffers
            of ``fully_shard``; what does not fit goes through the scratch memory. 0: no shared buffers.
        gpu_shared: the same variable: most memory that one group keeps on each GPU for them; torch's statistics do not
            show it.
        poison: ``SMP_POISON_SHARED_BUFFERS``: 1 fills a shared buffer with NaN bytes before it is used again, to find
            what reads it too late. Slow.
        kernel: ``SMP_COMM_KERNEL``: 0 runs the rounds in Python even where the C kernel could be compiled.
        workspace: ``SMP_SYMMETRIC_WORKSPACE_BYTES``: memory of one rank's GPU in one group that the other GPUs of the
            host can read, for what does not lie in such memory already. A message of any size passes; it goes in
            chunks of half of it. 0: everything on GPUs is left to NCCL.
        gpu_minimum: ``SMP_SYMMETRIC_MINIMUM_BYTES``: what is smaller than this, per rank, is left to NCCL: one kernel
            of NCCL's starts sooner than a barrier and a copy for every peer.
    """

    scratch: int = 4 * 2**20
    shared: int = 64 * 2**30
    gpu_shared: int = 8 * 2**30
    poison: bool = False
    kernel: bool = True
    workspace: int = 32 * 2**20
    gpu_minimum: int = 2**20


def read_settings() -> Settings:
    """Read the settings from the environment.

    Raises:
        smp.errors.UserError: a value is not a number, too small, or not a multiple; or a removed variable is set.
    """
    if environment_bytes("SMP_SYMMETRIC_REDUCE_SCATTER", 0, multiple=1, minimum=0):
        raise UserError(
            "SMP_SYMMETRIC_REDUCE_SCATTER is no longer supported: NCCL does every reduce_scatter on GPUs; unset it"
        )
    default = Settings()
    return Settings(
        environment_bytes("SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES", default.scratch, multiple=4 * _PAGE, minimum=4 * _PAGE),
        environment_bytes("SMDDP_AG_SORT_BUFFER_SIZE_BYTES", default.shared, multiple=1, minimum=0),
        environment_bytes("SMDDP_AG_SORT_BUFFER_SIZE_BYTES", default.gpu_shared, multiple=1, minimum=0),
        bool(environment_bytes("SMP_POISON_SHARED_BUFFERS", 0, multiple=1, minimum=0)),
        bool(environment_bytes("SMP_COMM_KERNEL", 1, multiple=1, minimum=0)),
        environment_bytes("SMP_SYMMETRIC_WORKSPACE_BYTES", default.workspace, multiple=2 * 64 * 2**10, minimum=0),
        environment_bytes("SMP_SYMMETRIC_MINIMUM_BYTES", default.gpu_minimum, multiple=1, minimum=0),
    )
