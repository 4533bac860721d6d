"""Prints what a machine has, as one JSON object: versions, host, GPU."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from typing import Any

import torch

PACKAGES = ("transformers", "accelerate", "safetensors", "triton", "xxhash", "torchao", "peft", "datasets", "pytest")


def _said(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"{type(error).__name__}: {error}"


def facts() -> dict[str, Any]:
    """Return what is here, and why the job does not import, if so."""
    found: dict[str, Any] = {
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
    }
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "missing"
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found |= {
        "cores": len(os.sched_getaffinity(0)), "host memory, GiB": round(memory / 2**30, 1),
        "free in the temporary folder, GiB": round(shutil.disk_usage(os.environ.get("TMPDIR", "/tmp")).free / 2**30, 1),
        "C compiler": shutil.which("cc") or "missing", "commit": _said("git", "describe", "--always", "--dirty"),
        "GPUs": torch.cuda.device_count(),
    }  # fmt: skip
    if torch.cuda.is_available():
        about, (free, total) = torch.cuda.get_device_properties(0), torch.cuda.mem_get_info(0)
        asked = "driver_version,clocks.sm,clocks.max.sm,power.limit,temperature.gpu,mig.mode.current"
        found |= {
            "device": about.name, "capability": f"{about.major}.{about.minor}",
            "memory, GiB": f"{total / 2**30:.2f}, {free / 2**30:.2f} of them free",
            "cuDNN": torch.backends.cudnn.version(), "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
            asked: _said("nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"),
        }  # fmt: skip
    try:
        import smp.train.__main__  # noqa: F401
    except Exception as error:
        found["smp does not import"] = f"{type(error).__name__}: {error}"
    return found


if __name__ == "__main__":
    print(json.dumps(facts()))
