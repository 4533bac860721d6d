"""Save and load the state of a run: torch's distributed checkpointing for tensors, JSON for the rest, no pickle."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from smp.checkpoint.layout import (
    FORMAT,
    STATE_FILE,
    TEMPORARY,
    checkpoint_name,
    prune,
    publish,
    read_state,
    tensor_files,
    write_json,
)
from smp.errors import RankError, UserError
from smp.mesh import Mesh
from smp.optimizer import allocate_state
from smp.sharding import reshard
from smp.train_state import TrainState

# A rank's data per file, so that saving needs little memory beside it.
FILE_BYTES = 1 << 30

# What must be equal for the tensors to mean the same; dropout and the like may change between runs.
ARCHITECTURE_KEYS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "tie_word_embeddings",
    "use_parallel_residual",
    "sliding_window",
    "rope_parameters",
)


def architecture(hf_config: Any) -> dict[str, Any]:
    """The part of a model's configuration that a checkpoint must agree with."""
    config = hf_config.to_dict()
    return {key: config[key] for key in ARCHITECTURE_KEYS if key in config}


def check_architecture(path: Path, saved: dict[str, Any], hf_config: Any) -> None:
    """Refuse a checkpoint of another model.

    Raises:
        UserError: naming every difference.
    """
    mine = architecture(hf_config)
    differences = [f"{k} {saved.get(k)} there, {mine.get(k)} here" for k in mine if saved.get(k) != mine.get(k)]
    if differences:
        raise UserError(
            f"checkpoint {path} is of another model: {'; '.join(differences)}; resume with the model it was made with"
        )


def _rng_tensors(rank: int) -> dict[str, torch.Tensor]:
    """This rank's generator states, under keys of its own: values under a shared key would be merged."""
    states = {f"rng.cpu.{rank:05d}": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"rng.cuda.{rank:05d}"] = torch.cuda.get_rng_state()
    return states


def _run_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Parameters and optimizer state by name; loading writes into these very tensors."""
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        tensors[f"model.{name}"] = parameter.detach()
        for key, value in optimizer.state[parameter].items():
            tensors[f"optim.{key}.{name}"] = value
    return tensors


def _files_of(tensors: dict[str, torch.Tensor], world_size: int) -> dict[str, int]:
    """Which of a rank's files (1, 2, ...) each tensor goes into; rank 0's answer holds for all.

    The writer serialises a whole file in memory, so a file gets about ``FILE_BYTES`` of a rank's data.
    """
    files, number, filled = {}, 1, 0
    for name, tensor in tensors.items():
        size = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes
        if filled and filled + size > FILE_BYTES:
            number, filled = number + 1, 0
        files[name], filled = number, filled + size
    for rank in range(world_size):
        files |= dict.fromkeys((f"rng.cpu.{rank:05d}", f"rng.cuda.{rank:05d}"), 1)
    return files


def save_checkpoint(
    directory: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: TrainState,
    model_name: str,
    extra: dict[str, Any],
    keep: int,
) -> Path:
    """Write a checkpoint and delete old ones; collective.

    Args:
        directory: shared by all ranks; the checkpoint is a new directory inside.
        extra: JSON content for ``state.json`` beside the progress: configuration, architecture, data identity.
        keep: newest checkpoints to keep in ``directory``.

    Raises:
        RankError: a rank does not see the directory that rank 0 made.
        RuntimeError: a rank could not write; nothing is published.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    reshard(model)
    final = directory / checkpoint_name(model_name, state.step)
    temporary = final.with_name(final.name + TEMPORARY)
    if rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    dist.barrier()
    if not temporary.is_dir():
        raise RankError(
            f"rank {rank} does not see {temporary}, which rank 0 made: --checkpoint_dir must be on a file system "
            f"that all hosts share"
        )
    try:
        tensors = _run_tensors(model, optimizer)
        writer = HuggingFaceStorageWriter(str(temporary), _files_of(tensors, world), save_distributed=True)
        dcp.save({**tensors, **_rng_tensors(rank)}, storage_writer=writer)
    except CheckpointException as error:  # a BaseException, which callers' handlers would miss
        raise RuntimeError(f"checkpoint {final} could not be written: {error}") from error
    if rank == 0:
        content = {
            **extra,
            "format": FORMAT,
            "torch": torch.__version__,
            "world_size": world,
            "progress": state.state_dict(),
            "files": tensor_files(temporary),
        }
        write_json(temporary / STATE_FILE, content)
        publish(temporary, final)
        prune(directory, model_name, keep)
    dist.barrier()
    return final


def _check_tensors(path: Path, saved: dict[str, Any], wanted: dict[str, torch.Tensor]) -> None:
    """Refuse missing, extra, misshapen or silently converted tensors, which torch's loader lets pass."""
    theirs = {k: v for k, v in saved.items() if isinstance(v, TensorStorageMetadata) and not k.startswith("rng.")}
    mine = {k: v for k, v in wanted.items() if not k.startswith("rng.")}
    problems = [f"{name} is missing" for name in mine.keys() - theirs.keys()]
    problems += [f"{name} is unknown here" for name in theirs.keys() - mine.keys()]
    for name in mine.keys() & theirs.keys():
        entry, tensor = theirs[name], mine[name]
        if entry.size != tensor.shape or entry.properties.dtype != tensor.dtype:
            problems.append(
                f"{name} is {entry.properties.dtype} {tuple(entry.size)}, wanted {tensor.dtype} {tuple(tensor.shape)}"
            )
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise UserError(f"checkpoint {path} does not fit the model: {'; '.join(sorted(problems)[:3])}{more}")


def load_checkpoint(
    path: Path, *, model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, mesh: Mesh
) -> TrainState:
    """Fill model, optimizer and this rank's generators from a checkpoint of any layout; collective.

    The generators continue exactly when the world size and the tensor-parallel degree are the saved ones; otherwise
    they are seeded by (seed, step, data rank): alike on ranks that hold the same data.

    Raises:
        UserError: the checkpoint is damaged or does not fit.
    """
    saved = read_state(path)
    rank = dist.get_rank()
    progress = TrainState.from_state_dict(saved["progress"])
    allocate_state(optimizer)
    tensors = _run_tensors(model, optimizer)
    same_tp = saved.get("degrees", {}).get("tp", 1) == mesh.degrees.tp
    rng = _rng_tensors(rank) if same_tp and saved["world_size"] == dist.get_world_size() else {}
    reader = HuggingFaceStorageReader(str(path))
    metadata = reader.read_metadata().state_dict_metadata
    rng = {key: value for key, value in rng.items() if key in metadata}
    _check_tensors(path, metadata, tensors)
    dcp.load({**tensors, **rng}, storage_reader=reader)
    if not rng:
        digest = hashlib.blake2b(f"{seed}:{progress.step}:{mesh.data_rank}".encode(), digest_size=8).digest()
        torch.manual_seed(int.from_bytes(digest, "little") >> 1)
    for key, value in rng.items():
        (torch.set_rng_state if key.startswith("rng.cpu.") else torch.cuda.set_rng_state)(value)
    return progress
