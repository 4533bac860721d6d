"""The parameters of a Hugging Face directory, or of an adapter's, by name."""

from __future__ import annotations

from pathlib import Path

import torch

from smp.checkpoint.safetensors_io import Stored, read_header, reason
from smp.cli.find import config_file_of
from smp.errors import UserError
from smp.json_input import read_object
from smp.models.checked_config import config_from
from smp.models.registry import family_of
from smp.models.stored_weights import StoredTensor, open_weights
from smp.models.text_part import names_in
from smp.models.weight_files import ADAPTER_CONFIG, weight_map
from smp.parallel.adapter_config import WEIGHTS
from smp.parallel.adapter_files import NAMES


class ModelTensors:
    """Parameters, named ``model.<name in the module>`` as in a checkpoint.

    Args:
        as_stored: whether tensors that are a part of a parameter, or several, are listed as the files have them.

    Attributes:
        entries: dtype and shape of each.
        files: the file that contains it.

    Raises:
        UserError: there are no usable weights, or they are of an architecture that smp does not know, or without
            ``as_stored`` of other tensors than parameters.
    """

    def __init__(self, directory: Path, *, as_stored: bool = False):
        path = config_file_of(directory)
        try:
            content = read_object(path)
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be used: {error}") from None
        self.entries: dict[str, Stored] = {}
        self.files: dict[str, Path] = {}
        self._keys: dict[str, str] = {}
        if path.name == ADAPTER_CONFIG:
            if content.get("target_parameters"):
                raise UserError(
                    f"{directory}: peft's files have the factors of experts joined, in another form than the model: "
                    f"give a checkpoint"
                )
            keys = weight_map(directory / WEIGHTS)
            names, prefix = {key: NAMES.module_key(key) for key in keys}, "model."
        else:
            family = family_of(config_from(path, content))
            in_files = names_in(directory, family)
            in_files.check(directory, "give a checkpoint", names_alone=not as_stored)
            keys = {key: file for key, file in weight_map(directory).items() if not in_files.ignored(key)}
            names = {key: in_files.module_key(key) for key in keys}
            # Files of the model without its head leave out its name there.
            with_head = not family.base or any(name.startswith(f"{family.base}.") for name in names.values())
            prefix = "model." if with_head else f"model.{family.base}."
        for file in sorted(set(keys.values())):
            try:
                with file.open("rb") as opened:
                    header = read_header(opened.fileno())
            except (OSError, ValueError) as error:
                raise UserError(f"{file} cannot be read as safetensors ({reason(error)}): copy it again") from None
            with open_weights(file) as weights:
                for key in (key for key in names if keys[key] == file):
                    name = prefix + names[key]
                    self.files[name], self._keys[name] = file, key
                    self.entries[name] = header[key] if key in header else _mxfp4(weights.get_slice(key), header, key)

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor, on the CPU, of a quantised one what it stands for."""
        with open_weights(self.files[name]) as content:
            return content.get_tensor(self._keys[name])


def _mxfp4(tensor: StoredTensor, header: dict[str, Stored], key: str) -> Stored:
    return header[f"{key}_blocks"]._replace(dtype=torch.float4_e2m1fn_x2, shape=tuple(tensor.get_shape()))
