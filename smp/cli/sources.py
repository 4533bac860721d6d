"""The parameters of a Hugging Face directory by name."""

from __future__ import annotations

from pathlib import Path

import torch

from smp.checkpoint.safetensors_io import Stored, read_header, reason
from smp.errors import UserError
from smp.json_input import read_object
from smp.models.registry import family_of
from smp.models.weight_files import weight_map


class ModelTensors:
    """Parameters, named ``model.<name in the module>`` as in a checkpoint.

    Attributes:
        entries: dtype and shape of each.
        files: the file that holds it.

    Raises:
        UserError: there are no usable weights, or they are of an architecture that smp does not know.
    """

    def __init__(self, directory: Path):
        try:
            family = family_of(read_object(directory / "config.json").get("model_type"))
        except (OSError, ValueError) as error:
            raise UserError(f"{directory}/config.json cannot be used: {error}") from None
        self.entries: dict[str, Stored] = {}
        self.files: dict[str, Path] = {}
        self._keys: dict[str, str] = {}
        for file in sorted(set(weight_map(directory).values())):
            try:
                with file.open("rb") as content:
                    header = read_header(content.fileno())
            except (OSError, ValueError) as error:
                raise UserError(f"{file} cannot be read as safetensors ({reason(error)}): copy it again") from None
            for key, stored in header.items():
                name = f"model.{family.module_key(key)}"
                self.entries[name], self.files[name], self._keys[name] = stored, file, key

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor, on the CPU."""
        from safetensors import safe_open

        with safe_open(self.files[name], framework="pt") as content:
            return content.get_tensor(self._keys[name])
