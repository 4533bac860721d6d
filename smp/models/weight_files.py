"""Files of a pretrained model: its weights, in one safetensors file or several with an index, and those beside them."""

from __future__ import annotations

import contextlib
import hashlib
import pathlib
import re
from typing import Any

from smp.errors import UserError
from smp.json_input import read_object, strict_json
from smp.models.stored_weights import tensor_names

_MAX_HEADER = 100_000_000  # safetensors' own bound
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"  # of peft
_NAMES = ("model.safetensors", INDEX)  # in transformers' order: its save_pretrained leaves an older index beside a file
_SAMPLES, _SAMPLE = 64, 1 << 14  # of a file, and bytes of one
_SHARD = re.compile(r"-\d{5}-of-\d{5}")


def _refuse_pickle(path: pathlib.Path) -> UserError:
    return UserError(
        f"{path} is a pickle, which can run code when it is read: convert the model to safetensors "
        f"(transformers' save_pretrained writes them) and give that file or directory"
    )


def _named_in(config: pathlib.Path) -> str | None:
    """Return the file of the weights that a config names, as ``from_pretrained`` reads it; None if it names none."""
    try:
        name = read_object(config).get("transformers_weights")
    except (OSError, ValueError):  # which is said where it is read as a config
        return None
    return pathlib.PurePath(name).name if isinstance(name, str) else None


def refuse_adapter(path: pathlib.Path) -> None:
    """Refuse a directory of an adapter, which ``from_pretrained`` would add to the weights.

    Raises:
        UserError: it is one.
    """
    if (path / ADAPTER_CONFIG).is_file():
        raise UserError(
            f"{path} contains an adapter ({ADAPTER_CONFIG}), and not the model that it is of: give the directory of "
            f"that; a training job adds the adapter by --adapter_path {path}"
        )


def find_weights(path: pathlib.Path) -> pathlib.Path:
    """Return the safetensors file or the index JSON of ``path`` (either of them, or their directory).

    Of a directory that has both, the file, as ``from_pretrained`` does.

    Raises:
        UserError: none is there, pickles only, an adapter, or several candidates.
    """
    if not path.exists():
        raise UserError(f"no weights at {path}: give a .safetensors file, its .index.json or their directory")
    if path.is_file():
        if path.suffix in _PICKLES:
            raise _refuse_pickle(path)
        if path.suffix not in (".safetensors", ".json"):
            raise UserError(f"{path} is no weights file: give a .safetensors file, its .index.json or their directory")
        return path
    refuse_adapter(path)  # from_pretrained would add it to the weights
    if (path / "config.json").is_file() and (named := _named_in(path / "config.json")) is not None:
        return path / named
    for name in _NAMES:
        if (path / name).exists():
            return path / name
    files = sorted(path.glob("*.safetensors"))
    candidates = [file for file in files if not _SHARD.search(file.name)] + sorted(
        path.glob("*.safetensors.index*.json")
    )
    candidates = candidates or files
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        names = ", ".join(file.name for file in candidates[:3])
        raise UserError(
            f"{path} contains {len(candidates)} sets of weights ({names}) and no model.safetensors: give one of them "
            f"(to a job by --finetune 1 --pretrained_checkpoint_file)"
        )
    pickles = sorted(file for file in path.iterdir() if file.suffix in _PICKLES)
    if pickles:
        raise _refuse_pickle(pickles[0])
    raise UserError(f"{path} contains no .safetensors file: give a directory with model.safetensors or its index")


def _check_header(file: pathlib.Path) -> None:
    """Refuse names that appear twice, of which safetensors takes the last.

    Raises:
        ValueError: the header cannot be read, or has such names.
    """
    with file.open("rb") as content:
        length = int.from_bytes(content.read(8), "little")
        if length <= _MAX_HEADER:  # safetensors refuses the others
            strict_json(content.read(length))


def _keys_of(file: pathlib.Path) -> list[str]:
    from safetensors import SafetensorError, safe_open

    if not file.is_file():
        raise UserError(f"{file} is no regular file: give a .safetensors file")
    try:
        _check_header(file)
        with safe_open(file, framework="pt") as content:
            return list(content.keys())
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read as safetensors ({error}): copy or download it again") from error


def weight_map(path: pathlib.Path) -> dict[str, pathlib.Path]:
    """Map each tensor in the checkpoint to its safetensors file; only headers are read.

    Quantised ones by the names of what they stand for, as :func:`smp.models.stored_weights.open_weights` reads them.

    Args:
        path: as for :func:`find_weights`.

    Raises:
        UserError: no usable file, a damaged or missing shard, or shards whose keys differ from the index.
    """
    path = find_weights(path)
    if path.suffix == ".safetensors":
        return dict.fromkeys(tensor_names(_keys_of(path)).values(), path)
    try:
        entries = read_object(path)["weight_map"]
        files = {name: path.parent / name for name in sorted(set(entries.values()))}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f": {error}" if isinstance(error, (OSError, ValueError)) else ""
        raise UserError(f"{path} is no index of safetensors files (it has no usable weight_map{reason})") from error
    outside = [name for name in files if pathlib.PurePath(name).name != name]
    if outside:
        raise UserError(f"{path} names {outside[0]}, which is not in its own directory: shards lie beside the index")
    foreign = [name for name in files if pathlib.PurePath(name).suffix != ".safetensors"]
    if foreign:
        raise UserError(f"{path} names {foreign[0]}, which is no .safetensors file: convert the model to safetensors")
    for name, file in files.items():
        if not file.is_file():
            raise UserError(f"{path} names {name}, which is missing: copy every shard beside the index")
    found: dict[str, pathlib.Path] = {}
    for name, file in files.items():
        for key in _keys_of(file):
            if key in found:
                raise UserError(f"{key} is in both {found[key]} and {name}: copy the shards again, without older ones")
            found[key] = file
    for key, name in sorted(entries.items()):
        if key not in found:
            raise UserError(f"{path} names {key} in {name}, but no shard has it: copy the shards again")
        if found[key].name != name:
            raise UserError(f"{path} names {key} in {name}, but {found[key].name} has it: copy index and shards again")
    return {name: found[key] for key, name in tensor_names(found).items()}


def directory_of(weights: pathlib.Path | None) -> pathlib.Path | None:
    """Return the directory of weights that may be a file of it."""
    return weights.parent if weights is not None and not weights.is_dir() else weights


def _first_with(names: tuple[str, ...], directories: tuple[pathlib.Path | None, ...]) -> pathlib.Path | None:
    found = (d for d in directories if d is not None and any((d / name).is_file() for name in names))
    return next(found, None)


def tokenizer_dir_of(*directories: pathlib.Path | None) -> pathlib.Path | None:
    """Return the first directory that holds a tokenizer."""
    return _first_with(("tokenizer.json", "tokenizer_config.json", "tokenizer.model"), directories)


def generation_dir_of(*directories: pathlib.Path | None) -> pathlib.Path | None:
    """Return the first directory that holds a ``generation_config.json``."""
    return _first_with(("generation_config.json",), directories)


def stops_of(directory: pathlib.Path | None, hf_config: Any) -> list[int]:
    """Return the ids at which generation with a model stops.

    Args:
        directory: of its ``generation_config.json``; None: there is none, and the config says.
    """
    found = getattr(hf_config, "eos_token_id", None)
    if directory is not None:
        with contextlib.suppress(OSError, ValueError):  # which is said where it is read
            found = read_object(directory / "generation_config.json").get("eos_token_id")
    return [each for each in (found if isinstance(found, list) else [found]) if isinstance(each, int)]


def digest_of(path: pathlib.Path) -> str:
    """Return a digest of weights by samples of their bytes: other weights of the same shapes have another one.

    Args:
        path: as for :func:`find_weights`.
    """
    found = hashlib.sha256()
    for file in sorted(set(weight_map(path).values())):
        size = file.stat().st_size
        found.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as content:
            for start in range(0, size, max(_SAMPLE, size // _SAMPLES)):
                content.seek(start)
                found.update(content.read(_SAMPLE))
    return found.hexdigest()
