"""Show what a checkpoint, a directory of checkpoints or a Hugging Face model contains; no tensor is read."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

from smp.checkpoint.directory import step_of
from smp.checkpoint.manifest import Manifest, TensorEntry
from smp.checkpoint.object_store import is_url
from smp.cli.checkpoints import GivenCheckpoint, find
from smp.cli.find import config_file_of, existing_directory, is_checkpoint, is_model
from smp.cli.output import dtype_name, shown, table
from smp.cli.sources import ModelTensors
from smp.errors import DamagedCheckpointError, UserError
from smp.json_input import read_object
from smp.models.weight_files import ADAPTER_CONFIG
from smp.units import parameters_text, readable

MODEL = "model."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "directory",
        help="a checkpoint, a directory that contains some, or the URL of either; or a local Hugging Face model, or "
        "adapter",
    )
    parser.add_argument("--tensors", action="store_true", help="also list every tensor")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def entry_of(value: Any, *keys: str) -> Any:
    """Return ``value[key]`` for each key in turn, None where there is none: what is read may be of any shape."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _active(config: Any, parameters: int) -> int:
    """Return how many of the parameters compute a token: all where no more is known."""
    from smp.models.checked_config import config_from
    from smp.models.experts import TOP_KEYS, idle_parameters
    from smp.models.meta_model import meta_model

    if not isinstance(config, dict) or config.keys().isdisjoint(TOP_KEYS):
        return parameters
    try:
        meta = meta_model(config_from("config.json", config))
    except UserError:
        return parameters
    return parameters - idle_parameters(meta.model) * (meta.table.count() == parameters)


def _parameters(tensors: dict[str, tuple[Any, tuple[int, ...]]], config: Any) -> dict[str, Any]:
    """Return number and dtypes of the parameters among named (dtype, shape)."""
    mine = [entry for name, entry in tensors.items() if name.startswith(MODEL)]
    count = sum(math.prod(shape) for _, shape in mine)
    return {
        "parameters": count,
        "active_parameters": _active(config, count),
        "dtypes": sorted({dtype_name(dtype) for dtype, _ in mine}),
    }


def _tensor(entry: TensorEntry) -> dict[str, Any]:
    chunks = [{"file": c.file, "offsets": list(c.offsets), "sizes": list(c.sizes)} for c in entry.chunks]
    return {"dtype": dtype_name(entry.dtype), "shape": list(entry.shape), "chunks": chunks}


def checkpoint_summary(checkpoint: GivenCheckpoint, manifest: Manifest, *, tensors: bool) -> dict[str, Any]:
    """Return what a checkpoint contains, as JSON."""
    found = {
        "path": str(checkpoint.path),
        "step": manifest.step,
        "kind": manifest.kind,
        "state": "; ".join(checkpoint.quick_problems(manifest)[:3]) or "complete",
        "saved_at": manifest.saved_at,
        "versions": manifest.versions,
        "schema": manifest.schema,
        "world_size": manifest.world_size,
        "degrees": manifest.degrees,
        "model": {
            "name": entry_of(manifest.model, "name"),
            "model_type": entry_of(manifest.model, "config", "model_type"),
            **_parameters(
                {name: (entry.dtype, entry.shape) for name, entry in manifest.tensors.items()},
                entry_of(manifest.model, "config"),
            ),
        },
        "run": {key: value for key, value in manifest.run.items() if key != "config"},
        "settings": manifest.run.get("config"),
        "files": {name: dataclasses.asdict(entry) for name, entry in manifest.files.items()},
        "bytes": manifest.nbytes,
    }
    if tensors:
        found["tensors"] = {name: _tensor(entry) for name, entry in manifest.tensors.items()}
    return found


def model_summary(path: Path, *, tensors: bool) -> dict[str, Any]:
    """Return what a Hugging Face directory, or an adapter's, contains, as JSON."""
    config_file = config_file_of(path)
    try:
        config = read_object(config_file)
    except (OSError, ValueError) as error:
        raise UserError(f"{config_file} is no readable Hugging Face config ({error}): give another directory") from None
    about = ("peft_type", "base_model_name_or_path") if config_file.name == ADAPTER_CONFIG else ("model_type",)
    model = ModelTensors(path, as_stored=True)
    entries = {name: (stored.dtype, stored.shape) for name, stored in model.entries.items()}
    files = {file.name: {"size": file.stat().st_size} for file in sorted(set(model.files.values()))}
    found = {
        "path": str(path),
        "kind": "adapter" if config_file.name == ADAPTER_CONFIG else "Hugging Face model",
        "model": {**{name: config.get(name) for name in about}, **_parameters(entries, config)},
        "config": config,
        "files": files,
        "bytes": sum(entry["size"] for entry in files.values()),
    }
    if tensors:
        found["tensors"] = {
            name.removeprefix(MODEL): {
                "dtype": dtype_name(dtype),
                "shape": list(shape),
                "file": model.files[name].name,
            }
            for name, (dtype, shape) in entries.items()
        }
    return found


def _pairs(value: Any) -> str:
    return ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


def _size(model: dict[str, Any]) -> str:
    return f"{parameters_text(model['parameters'], model['active_parameters'])}, {', '.join(model['dtypes'])}"


def _thousands(value: Any) -> str:
    return f"{value:,}" if type(value) is int else str(value)


def checkpoint_lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Return a summary of a checkpoint as rows of a table."""
    model, progress = found["model"], found["run"].get("progress")
    degrees = {axis: degree for axis, degree in found["degrees"].items() if type(degree) is int}
    rows = [
        ("step", _thousands(found["step"])),
        ("kind", found["kind"]),
        ("state", found["state"]),
        ("saved", f"{found['saved_at']} by {_pairs(found['versions'])}"),
        ("processes", f"{found['world_size']} ({_pairs(degrees)})"),
        ("model", f"{model['name']} ({model['model_type']}), {_size(model)}"),
    ]
    if isinstance(progress, dict):
        rows.append(("progress", ", ".join(f"{_thousands(v)} {k}" for k, v in progress.items() if k != "step")))
    others = {key: value for key, value in found["run"].items() if key != "progress" and value is not None}
    return rows + [(key.replace("_", " "), _pairs(value)) for key, value in others.items()]


def _print_files(files: dict[str, dict[str, Any]], total: int) -> None:
    print(f"  {len(files)} files, {readable(total)}:")
    print(table([(shown(name), readable(entry["size"])) for name, entry in files.items()], indent="    "))


def _file_of(entry: dict[str, Any]) -> str:
    chunks = entry.get("chunks", [])
    parts = f"{len(chunks)} parts" if len(chunks) > 1 else chunks[0]["file"] if chunks else entry.get("file", "nothing")
    return shown(parts)


def _print_tensors(tensors: dict[str, dict[str, Any]]) -> None:
    print(f"  {len(tensors)} tensors:")
    rows = [(shown(n), "x".join(map(str, e["shape"])) or "scalar", e["dtype"], _file_of(e)) for n, e in tensors.items()]
    print(table(rows, indent="    "))


def _print_one(found: dict[str, Any], rows: list[tuple[str, str]]) -> None:
    print(shown(os.path.basename(found["path"])))
    print(table([(shown(name), shown(value)) for name, value in rows]))
    _print_files(found["files"], found["bytes"])
    if "tensors" in found:
        _print_tensors(found["tensors"])


def _list(checkpoints: list[GivenCheckpoint], *, as_json: bool, tensors: bool) -> None:
    """Print a line for each of several checkpoints."""
    rows = [["checkpoint", "step", "kind", "size", "val_loss", "saved", "state"]]
    summaries = []
    for checkpoint in checkpoints:
        name = shown(checkpoint.name)
        try:
            manifest = checkpoint.manifest()
        except UserError as error:
            state = "; ".join(error.problems) if isinstance(error, DamagedCheckpointError) else str(error)
            summaries.append({"path": str(checkpoint.path), "state": state})
            step = step_of(Path(checkpoint.path))
            rows.append([name, "" if step is None else str(step), "", "", "", "", shown(state)])
            continue
        found = checkpoint_summary(checkpoint, manifest, tensors=tensors)
        summaries.append(found)
        loss = found["run"].get("val_loss")
        row = (
            manifest.step,
            manifest.kind,
            readable(manifest.nbytes),
            f"{loss:.4f}" if isinstance(loss, float) else "",
            manifest.saved_at,
            found["state"],
        )
        rows.append([name, *map(shown, row)])
    print(json.dumps(summaries, indent=1) if as_json else table(rows, indent=""))


def run(options: argparse.Namespace) -> int:
    """Print what ``options.directory`` contains."""
    directory = None if is_url(options.directory) else existing_directory(options.directory)
    if directory is not None and not is_checkpoint(directory) and is_model(directory):
        found = model_summary(directory, tensors=options.tensors)
        what = found["model"].get("model_type") or "{peft_type} of {base_model_name_or_path}".format(**found["model"])
        rows = [("kind", found["kind"]), ("model", f"{what}, {_size(found['model'])}")]
    else:
        present = find(options.directory)
        if not present.single:
            _list(present.checkpoints, as_json=options.json, tensors=options.tensors)
            return 0
        (checkpoint,) = present.checkpoints
        found = checkpoint_summary(checkpoint, checkpoint.manifest(), tensors=options.tensors)
        rows = checkpoint_lines(found)
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        _print_one(found, rows)
    return 0
