"""The training job on tensors whose device is ``cuda`` and whose memory is the host's; its values are real.

Run as a program, with the shim as its first argument, which is loaded before torch, then the job's flags; a number
before them is of ranks, which are then forked from this process, which has the imports.
"""

from __future__ import annotations

import sys
from typing import Any

if __name__ == "__main__":
    import ctypes

    ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)

from smp.plan import fake_cuda


def let_storages_resize() -> None:
    """Let ``fully_shard`` free gathered parameters: a build for CPUs refuses to resize a storage of a GPU."""
    import torch

    original = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, nbytes: int) -> Any:
        if storage.device.type != "cuda":
            return original(storage, nbytes)
        tensor = torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage)  # type: ignore[call-overload]
        torch.ops.cuda_shim.resize_storage(tensor, nbytes)
        return storage

    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


def let_flash_attention_run() -> None:
    """Stand in for flash-attn's operators, which have no kernels for CPUs; as written here they take any dtype."""
    import torch
    import torch.utils.flop_counter  # takes the operators themselves

    from smp.parallel import attention
    from smp.parallel.context import kernels
    from tests.cuda_path.host_group import on_host
    from tests.unit.test_context_kernels import FlashAttention

    kernels.GPU_DTYPES.append(torch.float32)
    unfit = attention._unfit
    attention._unfit = lambda hf_config, *, half: unfit(hf_config, half=True)  # type: ignore[assignment]
    written = FlashAttention()
    for name in ("forward", "backward"):
        original = getattr(written, name)

        def call(*args: Any, original: Any = original, **kwargs: Any) -> Any:
            return tuple(tensor.to("cuda") for tensor in original(*map(on_host, args), **kwargs))

        setattr(torch.ops.aten, f"_flash_attention_{name}", call)


if __name__ == "__main__":
    fake_cuda.install(devices=8)

    from smp import runtime
    from smp.train import __main__ as job
    from tests.cuda_path import host_group
    from tests.job import run_job

    host_group.register()
    let_storages_resize()
    let_flash_attention_run()
    runtime.choose_backend = lambda comm, device: host_group.NAME
    if not sys.argv[2].isdigit():
        sys.exit(job.main(sys.argv[2:]))
    print((outcome := run_job(*sys.argv[3:], world_size=int(sys.argv[2]))).output, file=sys.stderr)
    sys.exit(max(map(abs, outcome.statuses)))
