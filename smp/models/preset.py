"""Presets: named model shapes, one YAML file each in ``smp/models/presets``."""

from __future__ import annotations

import dataclasses
import importlib.resources
import pathlib
from typing import Any

import yaml

from smp.models.family import Family
from smp.models.registry import FAMILIES

# Wheels are unpacked on installation, so that the resource is a folder on disk.
_FOLDER = pathlib.Path(str(importlib.resources.files("smp.models"))) / "presets"


@dataclasses.dataclass(frozen=True)
class Preset:
    """A named model.

    Attributes:
        name: the value of ``--model``.
        family: its architecture.
        sequence_length: tokens per sample unless ``--max_context_width`` says otherwise.
        config: config.json values; others have Hugging Face's defaults.
    """

    name: str
    family: Family
    sequence_length: int
    config: dict[str, Any]


def list_presets() -> list[str]:
    """Return the names that ``--model`` knows, sorted."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def preset_path(name: str) -> pathlib.Path:
    """Return the YAML file of a preset; it exists when ``name`` is in :func:`list_presets`."""
    return _FOLDER / f"{name}.yaml"


def load_preset(name: str) -> Preset:
    """Read a preset whose name is in :func:`list_presets`."""
    content = yaml.safe_load(preset_path(name).read_text())
    return Preset(name, FAMILIES[content["family"]], content["sequence_length"], content["config"])
