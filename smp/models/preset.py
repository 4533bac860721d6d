"""Presets: named model shapes, one YAML file each in ``smp/models/presets``."""

from __future__ import annotations

import importlib.resources
import pathlib
from typing import Any

from smp.yaml_input import strict_yaml

# Wheels are unpacked on installation, so that the resource is a folder on disk.
_FOLDER = pathlib.Path(str(importlib.resources.files("smp.models"))) / "presets"


def list_presets() -> list[str]:
    """Return the names that ``--model`` knows, sorted."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def preset_path(name: str) -> pathlib.Path:
    """Return the YAML file of a preset; it exists when ``name`` is in :func:`list_presets`."""
    return _FOLDER / f"{name}.yaml"


def load_preset(name: str) -> dict[str, Any]:
    """Read a preset whose name is in :func:`list_presets`.

    Returns:
        ``family``: its name; ``sequence_length``: tokens per sample unless ``--max_context_width`` sets it; ``config``:
        config.json values, of which others have Hugging Face's defaults.
    """
    return strict_yaml(preset_path(name).read_text())
