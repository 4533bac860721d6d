"""Tensors by name, from a checkpoint or from a Hugging Face directory, read in pieces."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from smp.checkpoint.files import Stored, bytes_of, read_all, read_header, reason
from smp.checkpoint.manifest import Manifest
from smp.checkpoint.reader import CheckpointReader
from smp.errors import UserError
from smp.json_input import read_object
from smp.models.registry import family_of
from smp.models.weight_files import weight_map


@dataclasses.dataclass(frozen=True)
class Spec:
    """What a tensor is."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class Tensors(Protocol):
    """A source of tensors; parameters are named ``model.<name in the module>``."""

    entries: dict[str, Spec]

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Part of a tensor along its first axis; a tensor without axes whole."""


class CheckpointTensors:
    """Those of a checkpoint."""

    def __init__(self, path: Path, manifest: Manifest):
        self.entries = {name: Spec(entry.dtype, entry.shape) for name, entry in manifest.tensors.items()}
        self._reader = CheckpointReader(path, manifest)

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """See :class:`Tensors`."""
        shape = self.entries[name].shape
        if not shape:
            return self._reader.read(name)
        return self._reader.read(name, (start, *(0 for _ in shape[1:])), (stop - start, *shape[1:]))

    def __enter__(self) -> CheckpointTensors:
        return self

    def __exit__(self, *exception: object) -> None:
        self._reader.close()


class ModelTensors:
    """The parameters of a Hugging Face directory.

    Raises:
        UserError: it has no usable weights, or is of an architecture that smp does not know.
    """

    def __init__(self, directory: Path):
        try:
            family = family_of(read_object(directory / "config.json").get("model_type"))
        except (OSError, ValueError) as error:
            raise UserError(f"{directory}/config.json cannot be used: {error}") from None
        self.entries: dict[str, Spec] = {}
        self.files: dict[str, Path] = {}
        self._descriptors: dict[Path, int] = {}
        self._stored: dict[str, Stored] = {}
        weights = weight_map(directory)
        try:
            for file in sorted(set(weights.values())):
                self._add(file, family.module_key)
        except BaseException:
            self.__exit__()
            raise

    def _add(self, file: Path, module_key: Callable[[str], str]) -> None:
        descriptor = self._descriptors[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            header = read_header(descriptor)
        except (OSError, ValueError) as error:
            raise UserError(f"{file} cannot be read as safetensors ({reason(error)}): copy it again") from None
        for key, stored in header.items():
            name = f"model.{module_key(key)}"
            self.entries[name], self.files[name] = Spec(stored.dtype, stored.shape), file
            self._stored[name] = stored

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """See :class:`Tensors`."""
        stored = self._stored[name]
        out = torch.empty((stop - start, *stored.shape[1:]) if stored.shape else (), dtype=stored.dtype)
        row_bytes = stored.nbytes // stored.shape[0] if stored.shape else 0
        read_all(self._descriptors[self.files[name]], bytes_of(out), stored.start + start * row_bytes)
        return out

    def __enter__(self) -> ModelTensors:
        return self

    def __exit__(self, *exception: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()
