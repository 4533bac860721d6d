"""Write a model as a Hugging Face directory, one parameter or expert in memory at a time plus one file's worth."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import logging
import os
import pathlib
import shutil
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from smp.checkpoint.by_expert import Shards, gathered, matrices_of_experts, shards_of
from smp.checkpoint.export_config import write_configs
from smp.checkpoint.file_tensors import (
    Dtype,
    FileTensor,
    Read,
    copy_of,
    file_tensors,
    in_files,
    stored,
    value_of,
    with_passed,
)
from smp.checkpoint.outputs import MARKER, beside, marker_of, marker_text, refuse_foreign_files, refuse_inputs
from smp.checkpoint.quantised import Fp8Form, form_of, in_fp8
from smp.checkpoint.safetensors_io import Piece, reason, sync, write_tensors
from smp.errors import RunError, UserError
from smp.faults.lock import locked
from smp.models.added import (
    LOADED,
    AddedParameter,
    added_parameters,
    files_apart,
    files_of,
    left_out,
    trained_parameters,
)
from smp.models.family import Family
from smp.models.file_names import FileNames, buffers_of, parameters_of
from smp.models.registry import family_of
from smp.models.text_part import PART_OF, content_of_whole, names_by, passed_beside, require_whole
from smp.parallel.refusals import require_model
from smp.parallel.sharding import reshard

logger = logging.getLogger(__name__)
T = TypeVar("T")

# By the values of --dtype.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

_CHAT_TEMPLATE = "chat_template.jinja"
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", _CHAT_TEMPLATE, "vocab.txt", "spiece.model", "sentencepiece.bpe.model",
    "sentencepiece.model", "tekken.json", "emoji.json", "chat_template.json", "additional_chat_templates/*.jinja",
)  # fmt: skip
_GENERATION = "generation_config.json"


def _is_main() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _on_main(action: Callable[[], object]) -> None:
    """Run ``action`` on rank 0; if it fails, every rank raises, so that none waits in a collective."""
    failure: list[tuple[type[Exception], str] | None] = [None]
    cause: Exception | None = None
    if _is_main():
        try:
            action()
        except Exception as error:
            kinds = {UserError: UserError, RunError: RunError, OSError: RunError}  # a full disk is no bad input
            kind = next((kind for of, kind in kinds.items() if isinstance(error, of)), RuntimeError)
            cause, failure[0] = error, (kind, str(error))
    if dist.is_initialized():
        dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        kind, text = failure[0]
        raise kind(f"exporting the model failed: {text}") from cause


def _of_main(action: Callable[[], T]) -> T:
    """Return what ``action`` returns on rank 0; if it fails, every rank raises."""
    found: list[Any] = [None]
    _on_main(lambda: found.append(action()))
    if dist.is_initialized():
        dist.broadcast_object_list(said := found[-1:], src=0)
        return said[0]
    return found[-1]


def _claim(directory: pathlib.Path) -> None:
    """Check that ``directory`` may be written, undo what a killed export left, and start an empty one beside it.

    With its lock taken: another export at the same time would delete this one's files, or mix with them.
    """
    partial, old = beside(directory, "partial"), beside(directory, "old")
    if old.exists() and not directory.exists():
        old.rename(directory)
    refuse_foreign_files(directory)
    for leftover in (partial, old):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir()


def pretrained_files(
    tokenizer_dir: pathlib.Path | str | None, generation_dir: pathlib.Path | str | None
) -> dict[str, pathlib.Path]:
    """Return the files that an export copies, by their names in it.

    The tokenizer's ``generation_config.json`` is taken where the model has none: token ids to stop at belong to it.
    """
    found = {}
    for directory, names in ((tokenizer_dir, (*_TOKENIZER_FILES, _GENERATION)), (generation_dir, (_GENERATION,))):
        if directory is not None:
            root = pathlib.Path(directory)
            files = [file for name in names for file in root.glob(name) if file.is_file()]
            found.update({str(file.relative_to(root)): file for file in files})
    return found


def _write_with(copied: list[FileTensor], path: pathlib.Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write tensors with those that are copied, whose files may have gone meanwhile."""
    _write_tensors(path, tensors | {each.key: copy_of(each) for each in copied})


def _write_tensors(path: pathlib.Path, tensors: dict[str, torch.Tensor]) -> None:
    try:
        write_tensors(path, [Piece(name, tensor, (0,) * tensor.dim()) for name, tensor in tensors.items()])
    except OSError as error:
        raise RunError(f"{path} cannot be written ({reason(error)})") from error


def full_tensor(parameter: torch.Tensor) -> torch.Tensor:
    """Gather a parameter from its shards, axis by axis; collective.

    The data axes first, which were split last. ``full_tensor()`` does the same, and warns that it does.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    full = parameter
    for axis, placement in enumerate(parameter.placements):
        if not placement.is_replicate():
            full = full.redistribute(placements=[Replicate()] * (axis + 1) + list(parameter.placements[axis + 1 :]))
    return full.to_local()


def _planned(
    parameters: Mapping[str, torch.Tensor],
    added: Mapping[str, AddedParameter],
    names: FileNames,
    *,
    dtype: Dtype,
    weights: pathlib.Path | str | None,
    max_shard_bytes: int,
    quantised: Fp8Form | None,
) -> tuple[dict[str, list[FileTensor]], dict[str, list[FileTensor]]]:
    """Return the tensors of the model by file, and those of files beside it; collective."""
    beside_it = {name: each.apart for name, each in added.items() if each.apart is not None}
    own = file_tensors({n: t for n, t in parameters.items() if n not in beside_it}, names, dtype)
    apart: dict[str, list[FileTensor]] = {}
    for name, each in beside_it.items():
        apart.setdefault(each.file, []).extend(file_tensors({name: parameters[name]}, each.names, dtype))
    if own and weights is not None and names.has_passed:
        # Ranks that do not see the files plan the same ones.
        own = _of_main(lambda: with_passed(own, pathlib.Path(weights), names))
    if quantised is not None:
        own = _of_main(lambda: in_fp8(own, quantised, names))
    return in_files(own, max_shard_bytes), apart


def _gather_and_write(
    files: Mapping[str, list[FileTensor]],
    apart: Mapping[str, list[FileTensor]],
    partial: pathlib.Path,
    *,
    read: Read,
    by_expert: Mapping[str, torch.Tensor],
    progress: Callable[[], None],
) -> None:
    """Write every tensor, and the index if there are several files of the model.

    Args:
        files, apart: tensors by file, of the model and beside it.
        read: gathers a parameter by name; collective. A parameter of several tensors is read once.
        by_expert: parameters of which an expert's matrix is gathered at a time, by name.
    """

    @functools.lru_cache(maxsize=1)
    def latest(name: str) -> torch.Tensor:
        progress()
        return read(name)

    @functools.lru_cache(maxsize=1)
    def shards(name: str) -> Shards:
        progress()
        return shards_of(by_expert[name])

    weight_map, total_size = {}, 0
    for file, group in {**files, **apart}.items():
        tensors, copied = {}, []
        for tensor in group:
            if tensor.file is not None:
                copied.append(tensor)
            elif tensor.rows and tensor.rows[0][0] in by_expert:
                if (value := gathered(tensor, shards)) is not None:
                    tensors[tensor.key] = value
            elif _is_main():
                tensors[tensor.key] = value_of(tensor, latest)
            else:
                for name, _ in tensor.rows:
                    latest(name)
        progress()
        _on_main(functools.partial(_write_with, copied, partial / file, tensors))
        if file in files:
            weight_map.update({tensor.key: file for tensor in group})
            total_size += sum(tensor.nbytes for tensor in group)
    if len(files) > 1:
        content = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
        text = json.dumps(content, indent=2) + "\n"
        _on_main(lambda: (partial / "model.safetensors.index.json").write_text(text))


def _publish(partial: pathlib.Path, directory: pathlib.Path) -> None:
    """Flush the finished export and put it in the place of ``directory``."""
    (partial / MARKER).write_text(marker_text(marker_of(partial)))
    for path in [*partial.rglob("*"), partial]:
        sync(path)
    old = beside(directory, "old")
    if directory.exists():
        directory.rename(old)
    partial.rename(directory)
    sync(directory.parent)
    shutil.rmtree(old, ignore_errors=True)


def _tied_as_weights(hf_config: Any, family: Family, parameters: Mapping[str, torch.Tensor]) -> Any:
    """Return the config, without a tie that the weights do not have: from_pretrained would tie what differs."""
    untied = {f"{family.embedding}.weight", f"{family.head}.weight"} <= parameters.keys()
    if untied and getattr(hf_config, "tie_word_embeddings", False):
        hf_config = copy.deepcopy(hf_config)
        hf_config.tie_word_embeddings = False
    return hf_config


def _whole_of(weights: Any, hf_config: Any) -> tuple[dict[str, Any] | None, dict[str, pathlib.Path]]:
    """Return the config.json of the larger model that weights are of, and the files beside it; None: there is none."""
    if weights is None:
        return None, {}
    path = pathlib.Path(weights)
    whole = _of_main(lambda: content_of_whole(path))
    require_whole(hf_config, whole, weights)
    return whole, {} if whole is None else _of_main(lambda: passed_beside(path))


def _tensors_of(model: nn.Module) -> tuple[Mapping[str, torch.Tensor], Mapping[str, AddedParameter]]:
    """Return the tensors of a model that are written, and those of its parameters that techniques have added."""
    reshard(model)  # a gathered parameter is in the dtype of the computation
    left, everything = left_out(model), {**parameters_of(model), **dict(buffers_of(model))}
    added = {**added_parameters(model), **trained_parameters(model)}
    return {name: tensor for name, tensor in everything.items() if name not in left}, added


@torch.no_grad()
def export_hf(
    model: nn.Module | Mapping[str, torch.Tensor],
    directory: pathlib.Path | str,
    *,
    hf_config: Any = None,
    read: Callable[[str], torch.Tensor] | None = None,
    added: Mapping[str, AddedParameter] | None = None,
    tokenizer_dir: pathlib.Path | str | None = None,
    generation_dir: pathlib.Path | str | None = None,
    chat_template: str | None = None,
    max_shard_bytes: int = 5 * 2**30,
    dtype: Dtype = None,
    weights: pathlib.Path | str | None = None,
    text_only: bool = False,
    quantize: str | None = None,
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Write a directory that ``from_pretrained`` loads: safetensors, configs, tokenizer. All ranks call it.

    Rank 0 gathers one parameter at a time, of experts one expert's matrix, and writes; the directory appears when it
    is complete. An earlier export there is replaced; a directory with anything else in it, or that the model was loaded
    from, is not touched. Without a process group this process writes.
    Parameters that techniques have added go to the files that they name, frozen ones of pretrained weights to none.

    Args:
        model: of a supported family, its parameters plain or DTensor; or, to go with ``read``, tensors of the shape
            and dtype of each parameter, a tied one once, and each saved buffer by name.
        directory: where to; its parent is made if missing.
        hf_config: the config to write; None: ``model.config``.
        read: returns a parameter by name; called once for each, in their order, on every rank. None: gathered.
        added: of ``model``'s tensors, those that techniques have added; a model knows its own.
        tokenizer_dir: directory whose tokenizer files are copied along.
        generation_dir: directory whose ``generation_config.json`` is; None: that of ``tokenizer_dir``, if it has one.
        chat_template: text of the template that the model was trained with, if it is not the tokenizer's own.
        max_shard_bytes: largest file, as long as one parameter fits; also the most that rank 0 keeps in CPU memory.
        dtype: dtype of the files, of all or by parameter's name; None: the parameters'.
        weights: pretrained weights, whose tensors that the family passes through are copied; of a larger model with
            this text model, such as one of vision and language, all others with its config and files: the directory is
            one of the larger model. None: those that ``smp.load_pretrained`` has loaded.
        text_only: write the text model alone.
        quantize: ``fp8``: the tensors that are so in ``weights``, in blocks with a scale each.
        progress: called before each parameter and each file.

    Raises:
        UserError: the model's files differ from it by more than names; the directory contains other files or what was
            read, is a mount point, or is in use; raised on every rank.
        RunError: it cannot be written; raised on every rank.
    """
    added = added or {}
    if chat_template is not None and "{" not in str(chat_template):
        raise UserError(f"smp.export_hf: chat_template is the text of a template, got {chat_template!r}: read its file")
    if hf_config is None:
        require_model("smp.export_hf", model, changes=False)
    parameters, added = _tensors_of(model) if isinstance(model, nn.Module) else (model, added)
    hf_config = getattr(model, "config", None) if hf_config is None else hf_config
    inputs = {"tokenizer_dir": tokenizer_dir, "generation_dir": generation_dir, "weights": weights}
    inputs["from_pretrained"] = getattr(hf_config, "_name_or_path", None) or None
    if isinstance(model, nn.Module):
        inputs |= files_of(model)
        weights = files_of(model).get(LOADED) if weights is None else weights
    directory = pathlib.Path(os.path.realpath(directory))  # a link stays, and what it points to is replaced
    partial, family = beside(directory, "partial"), family_of(hf_config)
    whole, beside_weights = _whole_of(None if text_only else weights, hf_config)
    names = names_by(whole, family, weights)
    names.check(directory, "have transformers' save_pretrained write it")
    passing = None if text_only and hasattr(hf_config, PART_OF) else weights
    quantised = None if quantize is None else _of_main(lambda: form_of(quantize, weights, names, text_only=text_only))
    files, apart = _planned(
        parameters, added, names, dtype=dtype, weights=passing, max_shard_bytes=max_shard_bytes, quantised=quantised
    )
    hf_config = _tied_as_weights(hf_config, family, parameters)

    with contextlib.ExitStack() as stack:

        def prepare() -> None:
            # The last thing a run does is not to fail for want of locks.
            lock = beside(directory, "lock")
            stack.enter_context(locked(lock, directory, "give another directory", required=False))
            stack.callback(shutil.rmtree, partial, ignore_errors=True)  # of a failure: a published one has its name
            refuse_inputs(directory, inputs)
            _claim(directory)
            generation = getattr(model, "generation_config", None)
            copied = (beside_weights if files else {}) | pretrained_files(tokenizer_dir, generation_dir)
            write_configs(
                partial, hf_config, family,
                generation=generation, dtype=stored(*next(iter(parameters.items())), dtype), with_model=bool(files),
                copied=copied, whole=whole, quantization=None if quantised is None else quantised.config,
            )  # fmt: skip
            for texts in files_apart(added.values()).values():
                for name, text in texts.items():
                    (partial / name).write_text(text, encoding="utf-8")
            if chat_template is not None:
                (partial / _CHAT_TEMPLATE).write_text(chat_template, encoding="utf-8")

        _on_main(prepare)
        gather = read or (lambda name: full_tensor(parameters[name]))
        experts = matrices_of_experts(model) if isinstance(model, nn.Module) and not (read or quantised) else set()
        by_expert = {name: parameters[name] for name in experts & parameters.keys()}
        _gather_and_write(files, apart, partial, read=gather, by_expert=by_expert, progress=progress)
        _on_main(lambda: _publish(partial, directory))
