"""bf16 on CPUs that trap instructions which they advertise.

Some virtual machines advertise AMX and trap its instructions: the first bf16 matrix product ends the process with
SIGILL. oneDNN, which computes it, takes a ceiling on the instruction set, but only before its first use. So a product
is tried in a child process first, under lower and lower ceilings.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import sys

import torch

from smp.errors import UserError
from smp.log import get_logger
from smp.runtime import onednn_ceiling, set_onednn_ceiling

logger = get_logger(__name__)

# oneDNN's names, from the best that may hold bf16 to one that every x86-64 server has.
_CEILINGS = ("AVX512_CORE_BF16", "AVX512_CORE", "AVX2")
_SIZE = 256  # large enough for oneDNN to choose its matrix instructions


def try_bf16_product(ceiling: str | None) -> int:
    """Compute a bf16 product in a child process.

    Args:
        ceiling: ``ONEDNN_MAX_CPU_ISA`` for the child; None leaves it unset.

    Returns:
        0 if the product is right, the number of the signal that killed the child, or 255 for a wrong result.
    """
    child = os.fork()
    if child == 0:
        status = 255
        try:
            faulthandler.disable()  # the signal is expected
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            set_onednn_ceiling(ceiling)
            torch.set_num_threads(1)  # a pool of threads does not survive the fork
            matrix = torch.ones(_SIZE, _SIZE, dtype=torch.bfloat16)
            status = 0 if (matrix @ matrix)[0, 0] == _SIZE else 255
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def ensure_bf16_works() -> str | None:
    """Try a bf16 product on this CPU, and lower the ceiling on the instruction set if it fails.

    Call it before the process has computed anything: oneDNN reads the ceiling once, and a child of a process with
    compute threads may hang.

    Returns:
        The ceiling that was set, or None if none was needed.

    Raises:
        UserError: every ceiling fails, or the user's own does.
    """
    if not sys.platform.startswith("linux"):
        return None
    given = onednn_ceiling()
    status = try_bf16_product(given)
    if status == 0:
        return None
    death = _describe(status)
    if given:
        raise UserError(
            f"a bf16 matrix product {death} on this CPU with ONEDNN_MAX_CPU_ISA={given}: unset it, or use --bf16 0"
        )
    for ceiling in _CEILINGS:
        if try_bf16_product(ceiling) == 0:
            set_onednn_ceiling(ceiling)
            logger.warning(
                "A bf16 matrix product %s on this CPU, which advertises instructions that it traps: "
                "ONEDNN_MAX_CPU_ISA is set to %s.", death, ceiling,
            )  # fmt: skip
            return ceiling
    raise UserError(f"a bf16 matrix product {death} on this CPU with every instruction set: use --bf16 0")


def _describe(status: int) -> str:
    return "gives a wrong result" if status == 255 else f"dies ({signal.Signals(status).name})"
