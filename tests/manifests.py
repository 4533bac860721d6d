"""Checkpoints whose manifest somebody has written by hand, its checksum included."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import xxhash

from smp.checkpoint.safetensors_io import digest_of


def seal(body: bytes) -> bytes:
    """A manifest's bytes from the JSON object ``body`` without its checksum."""
    rest = body[1:]
    return b'{"checksum":"xxh3_128:' + xxhash.xxh3_128(rest).hexdigest().encode() + b'",' + rest


def read(path: pathlib.Path) -> dict[str, Any]:
    """A checkpoint's manifest as JSON."""
    content = json.loads((path / "manifest.json").read_bytes())
    del content["checksum"]
    return content


def write(path: pathlib.Path, content: Any) -> None:
    """Write it back, with the checksum that belongs to it."""
    (path / "manifest.json").write_bytes(seal(json.dumps(content).encode()))


def change(path: pathlib.Path, mutate: Callable[[dict[str, Any]], Any]) -> None:
    """Change a checkpoint's manifest in place."""
    content = read(path)
    mutate(content)
    write(path, content)


def relist(path: pathlib.Path, name: str) -> None:
    """Make the manifest agree with what the file ``name`` holds now, as far as size and digest go."""

    def mutate(content: dict[str, Any]) -> None:
        for entry in content["files"]:
            if entry[0] == name:
                entry[1:] = [os.path.getsize(path / name), digest_of(path / name)]

    change(path, mutate)


def copy(checkpoint: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """A copy that may be spoilt."""
    return pathlib.Path(shutil.copytree(checkpoint, folder / checkpoint.name))


def tensor_file(path: pathlib.Path) -> pathlib.Path:
    """The first of a checkpoint's tensor files."""
    return sorted(path.glob("*.safetensors"))[0]
