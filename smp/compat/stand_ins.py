"""SMP v2's small helpers, with the arguments that AWS's scripts give; :mod:`smp.sagemaker` gives them their names."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint import load_sharded_optimizer_state_dict as _load_sharded_tensors
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor

from smp import log as logs
from smp.compat.group_checkpoints import in_group, load_state_dict, use_folder_of_group
from smp.environment import read_launch
from smp.errors import UserError

_logger = logs.get_logger("smp.sagemaker")
_Function = TypeVar("_Function", bound=Callable[..., Any])


def get_logger() -> logging.Logger:
    """Return smp's logger; in a script that configures no logging, rank 0's lines go to standard output from now on."""
    if not _logger.hasHandlers():
        launch = read_launch()
        logs.log_to_console(rank=launch.rank, local_rank=launch.local_rank, world_size=launch.world_size)
    return _logger


@contextlib.contextmanager
def timeit(condition: bool, text: str, rank: int) -> Iterator[None]:
    """Log the seconds that the block takes on rank 0, if ``condition``."""
    began = time.perf_counter()
    yield
    if condition and rank == 0:
        _logger.info("%s: %.3f s", text, time.perf_counter() - began)


def last_int(name: str) -> int:
    """Return the last number in a name, SMP v2's ``SORT_BY_LAST_INT``; -1 without one."""
    return int((re.findall(r"\d+", os.path.basename(name)) or [-1])[-1])


def limit_num_subdirs(
    directory: str | os.PathLike[str],
    max_num: int,
    sort_fn: Callable[[str], Any] = last_int,
    regex: str = ".*",
    log: bool = True,
) -> None:
    """Delete the first folders in ``directory``, in the order of ``sort_fn``, until ``max_num`` are left.

    Args:
        directory: only folders right in it are deleted, no files and no links.
        max_num: at least 1.
        sort_fn: the key of a folder's name.
        regex: only folders whose name it matches are counted and deleted.
        log: delete, and log what was deleted; True on one rank.

    Raises:
        UserError: ``max_num`` is below 1.
    """
    if max_num < 1:
        raise UserError(f"limit_num_subdirs: {max_num} would delete what was just saved: give at least 1")
    if not log or not os.path.isdir(directory):
        return
    with os.scandir(directory) as entries:
        names = [e.name for e in entries if e.is_dir(follow_symlinks=False) and re.match(regex, e.name)]
    path = os.path.abspath(directory)
    if not names and regex != ".*":
        # The path of a checkpoint, or of a tensor-parallel rank's folder in it.
        for inner in (path, os.path.dirname(path)):
            if re.match(regex, os.path.basename(inner)):
                _logger.warning(
                    "limit_num_subdirs: %s is in one of the folders to limit, and has none in it, so none is deleted: "
                    "give %s, the folder around them",
                    directory,
                    os.path.dirname(inner),
                )
                break
    for name in sorted(names, key=sort_fn)[:-max_num]:
        try:
            shutil.rmtree(os.path.join(directory, name))
            _logger.info("Deleted %s in %s", name, directory)
        except OSError as error:
            _logger.warning("%s in %s could not be deleted: %s", name, directory, error)


class _Blocks(type):
    def __instancecheck__(cls, module: object) -> bool:
        from transformers.modeling_layers import GradientCheckpointingLayer

        return isinstance(module, GradientCheckpointingLayer)


class TransformerLayer(nn.Module, metaclass=_Blocks):
    """What every block of transformers' decoders is an instance of, for wrapping policies and recomputation."""

    def __new__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse to be built.

        Raises:
            UserError: always.
        """
        raise UserError("TransformerLayer cannot be built: build the model of transformers, whose blocks it stands for")


def register_tp_processing_pre_comm_hook(*args: Any, **kwargs: Any) -> None:
    """Do nothing: gradients of a split model need no hook."""


_S3 = re.compile(r"s3:/{1,2}([^/]+)/?(.*)")  # a pathlib.Path has one slash


def is_s3_uri(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is on S3."""
    return _S3.fullmatch(os.fspath(path)) is not None


def parse_s3_uri(uri: str | os.PathLike[str]) -> tuple[str, str]:
    """Return the bucket and the key of ``s3://bucket/key``.

    Raises:
        UserError: it is no such URI.
    """
    found = _S3.fullmatch(os.fspath(uri))
    if found is None:
        raise UserError(f"{uri} is not on S3: give s3://bucket/key")
    return found[1], found[2]


def format_s3_path(path: str | os.PathLike[str]) -> str:
    """Return ``s3://bucket/key`` of a path, which ``pathlib`` shortens to ``s3:/bucket/key``."""
    return "s3://" + "/".join(part for part in parse_s3_uri(path) if part)


def get_s3_region_from_uri(uri: str | os.PathLike[str]) -> str:
    """Return the region of a URI's bucket, which s3fs asks for."""
    import fsspec

    answer = fsspec.filesystem("s3").call_s3("head_bucket", Bucket=parse_s3_uri(uri)[0])
    return answer["ResponseMetadata"]["HTTPHeaders"]["x-amz-bucket-region"]


def retry_with_jitter(function: _Function) -> _Function:
    """Call a function up to three times, with a random pause after a failure."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for seconds in (1.0, 4.0):
            try:
                return function(*args, **kwargs)
            except Exception as error:
                _logger.warning("%s failed (%s): once more", getattr(function, "__name__", function), error)
                time.sleep(random.uniform(0.0, seconds))
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]


def path_to_file_system(path: str | os.PathLike[str]) -> Any:
    """Return torch's file system of a checkpoint, with ``create_stream``, ``concat_path`` and others."""
    reader = FsspecReader(format_s3_path(path)) if is_s3_uri(path) else checkpoint.FileSystemReader(path)
    return reader.fs


EXPORT_KEY_MODEL, EXPORT_KEY_OPTIMIZER, EXPORT_KEY_SCHEDULER, EXPORT_KEY_IDENTITY = (
    "model", "optimizer", "scheduler", "identity",
)  # fmt: skip


def save_model_checkpoint(
    model: Any,
    state_dict_type: Any,
    save_dir: str,
    sharding_strategy: Any = None,
    checkpointing_pg_metadata: Any = None,
    *,
    log: bool = False,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    extra_exports: dict[str, Any] | None = None,
) -> None:
    """Save a model of FSDP by ``torch.distributed.checkpoint``, in one folder at any layout; collective."""
    with model.state_dict_type(model, state_dict_type):
        state = {
            EXPORT_KEY_MODEL: model.state_dict(),
            EXPORT_KEY_OPTIMIZER: model.optim_state_dict(model, optimizer),
            EXPORT_KEY_SCHEDULER: scheduler.state_dict(),
            EXPORT_KEY_IDENTITY: extra_exports or {},
        }
        checkpoint.save(state, checkpoint_id=save_dir)
    if log:
        _logger.info("Saved %s", save_dir)


def load_model_checkpoint(
    model: Any,
    state_dict_type: Any,
    checkpoint_dir: str,
    sharding_strategy: Any = None,
    checkpointing_pg_metadata: Any = None,
    *,
    log: bool = False,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    extra_imports: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Load what :func:`save_model_checkpoint` has saved, in place; collective.

    Returns:
        The three, and the ``extra_exports`` by the keys of ``extra_imports``.
    """
    with model.state_dict_type(model, state_dict_type):
        state = {
            EXPORT_KEY_MODEL: model.state_dict(),
            EXPORT_KEY_OPTIMIZER: get_optimizer_state_dict(model, optimizer),  # makes an optimizer's first state
            EXPORT_KEY_SCHEDULER: scheduler.state_dict(),
            EXPORT_KEY_IDENTITY: dict(extra_imports or {}),
        }
        checkpoint.load(state, checkpoint_id=checkpoint_dir)
        model.load_state_dict(state[EXPORT_KEY_MODEL])
        optimizer.load_state_dict(model.optim_state_dict_to_load(model, optimizer, state[EXPORT_KEY_OPTIMIZER]))
        scheduler.load_state_dict(state[EXPORT_KEY_SCHEDULER])
    if log:
        _logger.info("Loaded %s", checkpoint_dir)
    # AWS's script reads an epoch, for its log, that it does not save.
    identity = {"epoch": 0, **state[EXPORT_KEY_IDENTITY]}
    loaded = {EXPORT_KEY_MODEL: model, EXPORT_KEY_OPTIMIZER: optimizer, EXPORT_KEY_SCHEDULER: scheduler}
    return {**loaded, EXPORT_KEY_IDENTITY: identity}


def load_sharded_optimizer_state_dict(
    model_state_dict: dict[str, Any],
    optimizer_key: str,
    storage_reader: Any,
    planner: Any = None,
    process_group: Any = None,
) -> dict[str, Any]:
    """Read an optimizer's state sharded as the model's, as torch's function of this name does for FSDP1; collective.

    Args:
        model_state_dict: of ``SHARDED_STATE_DICT``.
        optimizer_key: of the optimizer's state in the checkpoint.
        process_group: the ranks that read; None: all.

    Returns:
        The state, for ``FSDP.optim_state_dict_to_load``, under ``optimizer_key``.
    """
    if any(type(value).__name__ == "ShardedTensor" for value in model_state_dict.values()):  # of torch's FSDP1
        return _load_sharded_tensors(model_state_dict, optimizer_key, storage_reader, planner)
    use_folder_of_group(storage_reader)
    metadata = storage_reader.read_metadata()
    state: dict[str, Any] = {}
    for key, saved in metadata.state_dict_metadata.items():
        path = metadata.planner_data[key]  # such as (optimizer, state, name of a parameter, exp_avg)
        if path[0] != optimizer_key:
            continue
        if not isinstance(saved, TensorStorageMetadata):
            state[key] = None
            continue
        parameter = model_state_dict.get(path[2]) if len(path) > 2 else None
        if isinstance(parameter, DTensor) and in_group(parameter, process_group).shape == saved.size:
            state[key] = torch.empty_like(parameter, dtype=saved.properties.dtype, requires_grad=False)
        else:
            state[key] = torch.empty(saved.size, dtype=saved.properties.dtype)
    load_state_dict(state, storage_reader, process_group, planner=planner)
    return unflatten_state_dict(state, metadata.planner_data)
