"""Write a Hugging Face model from a checkpoint, in one process, offline; AutoModelForCausalLM.from_pretrained loads it.

Of a checkpoint of adapters (--lora_rank), it is the adapters in peft's format, or with --merge the base model with them
added. The checkpoint is verified first. Memory is needed for the largest parameter and one file of the result.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from smp.checkpoint.hf_export import DTYPES, Dtype, export_hf, pretrained_files
from smp.checkpoint.manifest import Manifest
from smp.checkpoint.model_store import refuse_foreign_objects, upload_model
from smp.checkpoint.object_store import is_url
from smp.checkpoint.outputs import inputs_of, local_path, refuse_foreign_files, refuse_inputs
from smp.cli.adapter import MODEL, adapter_of, base_of
from smp.cli.checkpoints import GivenCheckpoint, one_checkpoint
from smp.cli.find import existing_directory, refuse_links_out
from smp.cli.output import shown
from smp.cli.verify import verified
from smp.data.template import given_template
from smp.errors import UserError
from smp.models.checked_config import checked_config
from smp.models.file_names import buffers_of
from smp.models.registry import build_model, family_of
from smp.models.text_part import PART_OF, names_in, passed_beside
from smp.models.weight_files import directory_of, generation_dir_of, tokenizer_dir_of, weight_map
from smp.pretrained import base_dtypes
from smp.units import readable, scaled

_WEIGHTS = ("hf_pretrained_model_name_or_dir", "pretrained_checkpoint_file", "finetune_checkpoint_load_dir")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("checkpoint", help="a sharded checkpoint, a link to one such as checkpoints/latest, or its URL")
    parser.add_argument(
        "output", help="directory or URL to write; it must not exist, be empty, or contain an earlier export"
    )
    parser.add_argument(
        "--dtype",
        choices=sorted(DTYPES),
        help="of the files; default: that of the base model's files, else of the checkpoint",
    )
    parser.add_argument(
        "--max_shard_size", default="5GB", metavar="SIZE", help="largest file, such as 500MiB; default 5GB"
    )
    parser.add_argument(
        "--tokenizer",
        metavar="DIR",
        help="directory whose tokenizer files are copied along; default: the run's own, if it is there",
    )
    parser.add_argument(
        "--chat_template", metavar="FILE", help="chat template to add, as the job's flag; default: the run's"
    )
    parser.add_argument(
        "--quantize", choices=["fp8"], help="write in fp8, by blocks, what the base model's files have so"
    )
    parser.add_argument("--text_only", action="store_true", help="write no more than the text model of a larger one")
    parser.add_argument(
        "--merge",
        action=argparse.BooleanOptionalAction,
        help="add the checkpoint's adapters to their base model; default: adapters of experts, which servers leave out",
    )
    parser.add_argument("--base", metavar="DIR", help="with --merge: the base model; default: where the run had it")
    parser.add_argument(
        "--verify", choices=("full", "size"), default="full", help="size: do not read all files once more beforehand"
    )


def parse_size(text: str) -> int:
    """Return the bytes of ``5GB``, ``500MiB`` or ``1000000``.

    Raises:
        UserError: it is no such size, or none at all.
    """
    size = scaled(text.strip().upper().removesuffix("B"), "KMGT")
    if size < 1:
        raise UserError(f"--max_shard_size {shown(text)} is no size: give one such as 5GB or 500MiB")
    return size


def config_of(path: Path | str, manifest: Manifest) -> Any:
    """Return the model's Hugging Face config.

    Raises:
        UserError: the manifest has none that can be used.
    """
    content = manifest.model.get("config")
    if not isinstance(content, dict):
        raise UserError(f"checkpoint {path} does not say what its model is: export it from a run that resumes it")
    return checked_config(f"checkpoint {path}", content)


def parameters_of(path: Path | str, manifest: Manifest, hf_config: Any) -> dict[str, torch.Tensor]:
    """Return each parameter in the model's order, and the saved buffers, on the meta device.

    Raises:
        UserError: the checkpoint's tensors are not those of its model.
    """
    if "base" in manifest.model:
        raise UserError(f"checkpoint {path} does not contain the pretrained weights that its run has frozen: resume "
                        f"it, and the run exports what it has trained when it ends")  # fmt: skip
    with torch.device("meta"):
        model = build_model(hf_config, attn_implementation="eager")
    tensors: dict[str, torch.Tensor] = {**dict(model.named_parameters()), **dict(buffers_of(model))}
    expected = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    saved = {n.removeprefix(MODEL): entry for n, entry in manifest.tensors.items() if n.startswith(MODEL)}
    wrong = sorted(n for n in expected.keys() | saved.keys() if n not in saved or saved[n].shape != expected.get(n))
    if wrong:
        name = wrong[0]
        what = f"has {saved[name].shape}" if name in saved else "is missing"
        raise UserError(
            f"checkpoint {path} does not contain the parameters of the model it describes: {shown(name)} {what}, "
            f"{expected.get(name, 'none')} is expected"
        )
    return {name: torch.empty(shape, dtype=saved[name].dtype, device="meta") for name, shape in expected.items()}


def model_dirs(manifest: Manifest) -> list[Path]:
    """Return the directories of the run's pretrained model, as the trainer looks through them."""
    names = (
        "hf_pretrained_model_name_or_dir", "model", "pretrained_model_name", "finetune_checkpoint_load_dir",
        "pretrained_checkpoint_file",
    )  # fmt: skip
    return [path.parent if path.is_file() else path for path in _paths(manifest, names)]


def _paths(manifest: Manifest, names: Iterable[str]) -> list[Path]:
    return [Path(text).expanduser() for name in names if (text := _setting(manifest, name)) is not None]


def _setting(manifest: Manifest, name: str) -> str | None:
    config = manifest.run.get("config")
    value = config.get(name) if isinstance(config, dict) else None
    return value if isinstance(value, str) else None


def tokenizer_of(manifest: Manifest, base: str | None = None) -> Path | None:
    """Return the directory that the run had its tokenizer from, as the trainer chooses it, if it is there."""
    given = _setting(manifest, "tokenizer_name_or_dir")
    named = [directory_of(Path(text).expanduser()) if text else None for text in (given, base)]
    return tokenizer_dir_of(named[0], *model_dirs(manifest), named[1])


def _tokenizer_given(text: str) -> Path:
    directory = existing_directory(text)
    if not any(directory.glob("tokenizer*")):
        raise UserError(f"--tokenizer {text} contains no tokenizer files: give the directory of tokenizer.json")
    return directory


def _refuse_output(text: str, checkpoint: GivenCheckpoint) -> None:
    """Refuse to write where the checkpoint or other files are."""
    if is_url(text):
        refuse_foreign_objects(text)
        return
    output = Path(text).expanduser().absolute()
    if checkpoint.path == output.resolve() or checkpoint.path in output.resolve().parents:
        raise UserError(f"{text} is in the checkpoint itself: give another directory")
    refuse_foreign_files(output)


def _refuse_inputs(options: argparse.Namespace, manifest: Manifest, tokenizer: Path | None) -> None:
    """Refuse to replace what this export reads, or the checkpoint's run does when it is resumed."""
    settings, weights = manifest.run.get("config"), manifest.model.get("weights")
    read_by_run = inputs_of(settings if isinstance(settings, dict) else {})
    inputs: dict[str, Path | str | None] = {f"the run's {flag}": path for flag, path in read_by_run.items()}
    inputs |= {"the checkpoint's run": weights if isinstance(weights, str) else None}
    inputs |= {"--base": options.base, "--tokenizer": tokenizer}
    if (output := local_path(options.output)) is not None:
        refuse_inputs(output.absolute(), inputs)


def _check_named(
    directory: Path | None, files: Mapping[str, Path], checkpoint: GivenCheckpoint, base: str | None
) -> None:
    """Refuse links out of a directory that the checkpoint names, and not the user by ``--base``."""
    given = directory_of(Path(base).expanduser()) if base is not None else None
    if directory is not None and directory != given:
        refuse_links_out(directory, files.values(), checkpoint.path)


def _template(manifest: Manifest, file: str | None) -> str | None:
    """Return the text of the chat template that was given, or that the run had."""
    if file is None:
        text = manifest.model.get("chat_template")
        return text if isinstance(text, str) else None
    return given_template(file)


def _dtype_of_files(
    options: argparse.Namespace, hf_config: Any, tensors: Mapping[str, torch.Tensor], weights: Path | None
) -> Dtype:
    """Return the dtype of the files: asked for, or each tensor's in the files of the run's base model, if it had one.

    Args:
        tensors: of the model, by name; none of adapters, which stay as they are.
        weights: of the base model.
    """
    if options.dtype is not None:
        return DTYPES[options.dtype]
    return None if weights is None else base_dtypes(tensors, hf_config, weights)


def _write(
    checkpoint: GivenCheckpoint, manifest: Manifest, output: Path, options: argparse.Namespace, tokenizer: Path | None
) -> None:
    hf_config = config_of(checkpoint.path, manifest)
    adapter, base, added = adapter_of(checkpoint.path, manifest), None, None
    merges = options.merge
    if merges is None and (merges := adapter is not None and adapter.has_experts):
        print("The adapters are merged, as servers drop those of experts; --no-merge writes them")
    if merges and adapter is None:
        raise UserError(f"--merge: checkpoint {checkpoint.path} contains no adapters: leave it out")
    if options.base is not None and not merges:
        raise UserError("--base is of --merge, which adds adapters to it: give both or none")
    of_models = [name for name in ("text_only", "quantize") if getattr(options, name)]
    if of_models and adapter is not None and not merges:
        raise UserError(f"--{of_models[0]} is of a model, and adapters are written: add --merge, or leave it out")
    if options.text_only and not hasattr(hf_config, PART_OF):
        raise UserError(f"--text_only: the model of {checkpoint.path} is no part of a larger one: leave it out")
    with checkpoint.reader(manifest) as reader:

        def read(name: str) -> torch.Tensor:
            return reader.read(MODEL + name)

        read_merged: Callable[[str], torch.Tensor] = read
        if adapter is None:
            parameters = parameters_of(checkpoint.path, manifest, hf_config)
        elif merges:
            base = base_of(checkpoint.path, manifest, options.base)
            if base is None:
                own = {name: entry for name, entry in manifest.tensors.items() if name not in adapter.saved}
                parameters_of(checkpoint.path, dataclasses.replace(manifest, tensors=own), hf_config)
            parameters, read_merged = adapter.merged(hf_config, base, read)
        else:
            parameters, added = adapter.alone(hf_config)
        generation = generation_dir_of(*model_dirs(manifest), directory_of(base))
        _check_named(generation, pretrained_files(None, generation), checkpoint, options.base)
        weights = base or next(iter(_paths(manifest, _WEIGHTS)), None)
        if weights is not None and weights.exists() and names_in(weights, family_of(hf_config)).has_passed:
            files = weight_map(weights) | passed_beside(weights)
            _check_named(directory_of(weights), files, checkpoint, options.base)
        export_hf(
            parameters,
            output,
            hf_config=hf_config,
            read=read_merged,
            added=added,
            tokenizer_dir=tokenizer,
            generation_dir=generation,
            chat_template=_template(manifest, options.chat_template),
            max_shard_bytes=parse_size(options.max_shard_size),
            dtype=_dtype_of_files(options, hf_config, parameters if added is None else {}, weights),
            weights=weights,
            text_only=options.text_only,
            quantize=options.quantize,
        )


def run(options: argparse.Namespace) -> int:
    """Export what ``options.checkpoint`` names to ``options.output``."""
    started = time.perf_counter()
    parse_size(options.max_shard_size)
    checkpoint = one_checkpoint(options.checkpoint)
    tokenizer = _tokenizer_given(options.tokenizer) if options.tokenizer else None
    _refuse_output(options.output, checkpoint)
    manifest = verified(checkpoint, content=options.verify == "full")
    if manifest.kind != "sharded":
        raise UserError(
            f"{checkpoint.path} is a {manifest.kind} checkpoint, which has the state of one rank: resume from it and "
            f"save a sharded one"
        )
    _refuse_inputs(options, manifest, tokenizer)
    known = None if tokenizer is not None else tokenizer_of(manifest, options.base)
    _check_named(known, pretrained_files(known, None), checkpoint, options.base)
    with contextlib.ExitStack() as stack:
        output = Path(options.output).expanduser().absolute()
        if is_url(options.output):
            output = Path(stack.enter_context(tempfile.TemporaryDirectory()), "model")
        _write(checkpoint, manifest, output, options, tokenizer or known)
        if is_url(options.output):
            upload_model(output, options.output)
        files = [file.stat().st_size for file in output.glob("*.safetensors")]
    print(
        f"Exported step {manifest.step} of {shown(checkpoint.name)} to {options.output}: {len(files)} file(s), "
        f"{readable(sum(files))}, {time.perf_counter() - started:.1f} s"
    )
    if known is not None:
        print(f"Tokenizer: that of the run, {shown(str(known))}")
    elif tokenizer is None:
        print("No tokenizer was copied: --tokenizer DIR does that")
    if _setting(manifest, "chat_template") and not (options.chat_template or "chat_template" in manifest.model):
        print("No chat template was copied: the checkpoint has no text of the run's: --chat_template FILE adds it")
    return 0
