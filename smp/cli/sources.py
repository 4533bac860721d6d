"""The parameters of a Hugging Face directory by name, read in pieces."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import torch

from smp.checkpoint.safetensors_io import Stored, bytes_of, read_all, read_header, reason
from smp.errors import UserError
from smp.json_input import read_object
from smp.models.registry import family_of
from smp.models.weight_files import weight_map


class ModelTensors(contextlib.ExitStack):
    """Parameters, named ``model.<name in the module>`` as in a checkpoint; a context that closes the files.

    Attributes:
        entries: where each lies.
        files: and in which file.

    Raises:
        UserError: there are no usable weights, or they are of an architecture that smp does not know.
    """

    def __init__(self, directory: Path):
        super().__init__()
        try:
            family = family_of(read_object(directory / "config.json").get("model_type"))
        except (OSError, ValueError) as error:
            raise UserError(f"{directory}/config.json cannot be used: {error}") from None
        self.entries: dict[str, Stored] = {}
        self.files: dict[str, Path] = {}
        self._descriptors: dict[Path, int] = {}
        with contextlib.ExitStack() as opened:
            for file in sorted(set(weight_map(directory).values())):
                descriptor = self._descriptors[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
                opened.callback(os.close, descriptor)
                try:
                    header = read_header(descriptor)
                except (OSError, ValueError) as error:
                    raise UserError(f"{file} cannot be read as safetensors ({reason(error)}): copy it again") from None
                for key, stored in header.items():
                    name = f"model.{family.module_key(key)}"
                    self.entries[name], self.files[name] = stored, file
            self.push(opened.pop_all())

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Part of a tensor along its first axis; a tensor without axes whole."""
        stored = self.entries[name]
        out = torch.empty((stop - start, *stored.shape[1:]) if stored.shape else (), dtype=stored.dtype)
        row_bytes = stored.nbytes // stored.shape[0] if stored.shape else 0
        read_all(self._descriptors[self.files[name]], bytes_of(out), stored.start + start * row_bytes)
        return out
