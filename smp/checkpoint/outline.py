"""Manifests without their tensors, read once: whether the kept checkpoints are whole is asked at every save."""

from __future__ import annotations

import dataclasses
import functools
import os
from pathlib import Path

from smp.checkpoint.manifest import MANIFEST_FILE, Manifest, read_manifest


def read_outline(path: Path) -> Manifest:
    """What :func:`read_manifest` returns, without the tensors; from memory while the file is as it was when read.

    Raises: as that does.
    """
    try:
        status = os.lstat(path / MANIFEST_FILE)
    except OSError:
        return read_manifest(path)  # which says what is wrong
    return _read(path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@functools.lru_cache(maxsize=64)
def _read(path: Path, *identity: int) -> Manifest:
    return dataclasses.replace(read_manifest(path), tensors={})
