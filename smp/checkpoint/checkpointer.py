"""Save and load the state of a run, together on all ranks."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from smp.checkpoint.chunks import local_part, pieces_to_write, rng_tensors, run_tensors
from smp.checkpoint.files import DTYPE_NAMES, Piece, reason
from smp.checkpoint.layout import TEMPORARY, checkpoint_name, disk_free
from smp.checkpoint.manifest import Manifest, problems_of_files
from smp.checkpoint.reader import CheckpointReader
from smp.checkpoint.writer import VISIBLE_WITHIN, appears, finish, start, write_part
from smp.comm.report import readable
from smp.errors import RunError, UserError
from smp.mesh import Mesh
from smp.parallel.sharding import reshard
from smp.train_state import TrainState

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


def model_entry(name: str, hf_config: Any) -> dict[str, Any]:
    """What a manifest says of the model: its name, its Hugging Face configuration and a digest of that."""
    text = hf_config.to_json_string(use_diff=False)
    return {"name": name, "config": json.loads(text), "hash": hashlib.sha256(text.encode()).hexdigest()}


def check_architecture(path: Path, saved: dict[str, Any], hf_config: Any) -> None:
    """Refuse a checkpoint of another model.

    Args:
        saved: the configuration in its manifest.

    Raises:
        UserError: naming every difference.
    """
    config = json.loads(hf_config.to_json_string(use_diff=False))
    mine = {key: config[key] for key in ARCHITECTURE_KEYS if key in config}
    differences = [f"{k} {saved.get(k)} there, {mine[k]} here" for k in mine if saved.get(k) != mine[k]]
    if differences:
        raise UserError(
            f"checkpoint {path} is of another model: {'; '.join(differences)}; resume with the model it was made with"
        )


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """What a rank writes: its pieces, and the shapes of the tensors they belong to."""

    pieces: list[Piece]
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]]

    @property
    def nbytes(self) -> int:
        """Bytes of the pieces."""
        return sum(piece.tensor.nbytes for piece in self.pieces)


def take_snapshot(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, everything: bool, copy: Callable[[list[Piece]], list[Piece]]
) -> Snapshot:
    """What this rank is to write.

    Args:
        everything: all that the rank holds, for a checkpoint of its own.
        copy: brings the pieces to the CPU; if training goes on meanwhile, into memory of their own.
    """
    reshard(model)
    allocate_state(optimizer)  # there is none yet if every update so far was skipped
    return snapshot_of(run_tensors(model, optimizer), everything=everything, copy=copy)


def snapshot_of(
    tensors: dict[str, torch.Tensor],
    *,
    everything: bool,
    copy: Callable[[list[Piece]], list[Piece]],
    of_rank0: Collection[str] = (),
) -> Snapshot:
    """What this rank is to write of ``tensors``, and its generators; see :func:`take_snapshot`, ``pieces_to_write``."""
    rank, world = dist.get_rank(), dist.get_world_size()
    pieces = pieces_to_write(tensors, rank=rank, world_size=world, everything=everything, of_rank0=of_rank0)
    generators = rng_tensors(rank)
    pieces = copy(pieces + [Piece(name, state, (0,)) for name, state in generators.items()])
    # Rank 0 also tells of tensors without elements, which nobody writes.
    listed_here = tensors.keys() if rank == 0 or everything else [p.name for p in pieces if p.name in tensors]
    named = {name: tensors[name] for name in listed_here} | generators
    return Snapshot(pieces, {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in named.items()})


def to_host(pieces: list[Piece]) -> list[Piece]:
    """The pieces on the CPU, as they are where they are there already."""
    return [piece._replace(tensor=piece.tensor.cpu().contiguous()) for piece in pieces]


def agree(failure: BaseException | None, what: str) -> None:
    """Raise on every rank if any has failed; collective.

    Args:
        what: is to be said of it, as the beginning of the sentence.

    Raises:
        RunError: naming the first rank that failed, and why.
    """
    said = None if failure is None else reason(failure)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, said)
    for rank, text in enumerate(everyone):
        if text is not None:
            raise RunError(f"{what}: rank {rank}: {text}") from failure


def no_room(error: BaseException, directory: Path, nbytes: int) -> BaseException:
    """The error, with what is needed and what is free if the disk is full."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT) or not nbytes:
        return error
    return RunError(
        f"{reason(error)}; its part needs {readable(nbytes)} and {directory} has {readable(disk_free(directory))} free"
    )


def attempt(action: Callable[[], object], directory: Path, nbytes: int) -> BaseException | None:
    """Run ``action`` and return what it raises, made ready to be said."""
    try:
        action()
    except Exception as error:
        return no_room(error, directory, nbytes)
    return None


def write_snapshot(temporary: Path, snapshot: Snapshot, *, rank: int, check: bool) -> None:
    """Write this rank's part, and read it back if ``check``; needs no other rank."""
    write_part(temporary, snapshot.pieces, snapshot.shapes, rank=rank, check=check)


def begin(directory: Path, name: str, *, own: bool) -> Path:
    """Make the temporary directory of a checkpoint; collective.

    Args:
        own: every rank makes one for itself.

    Raises:
        RunError: it cannot be made, or a rank does not see it; nothing is left behind.
    """
    temporary = directory / (name + TEMPORARY)
    failure = attempt(lambda: start(temporary), directory, 0) if own or dist.get_rank() == 0 else None
    said = f"checkpoint {directory / name} could not be begun"
    agree(failure, said)

    def see() -> None:
        if not appears(temporary):
            raise RunError(
                f"it does not see {temporary}, which rank 0 made, within {VISIBLE_WITHIN:g} s: checkpoints must be on "
                f"a file system that all hosts share"
            )

    try:
        agree(attempt(see, directory, 0), said)
    except RunError:
        remove_temporary(temporary, own)
        raise
    return temporary


def publish_snapshot(temporary: Path, manifest: Manifest) -> None:
    """Publish what all ranks have written; each rank for a checkpoint of its own, else rank 0 alone."""
    final = temporary.with_name(temporary.name.removesuffix(TEMPORARY))
    rank = dist.get_rank()
    if manifest.kind == "local":
        finish(temporary, final, [rank], manifest)
    elif rank == 0:
        finish(temporary, final, list(range(manifest.world_size)), manifest)


def save_checkpoint(
    directory: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    manifest: Manifest,
    check: bool = True,
    copy: Callable[[list[Piece]], list[Piece]] = to_host,
) -> Path:
    """Write a checkpoint, and return when it is published; collective.

    Args:
        directory: the checkpoint is a new directory inside; shared by all ranks unless the manifest's kind is local.
        manifest: all but files and tensors.
        check: read every file back before publishing.
        copy: brings what is written to the CPU.

    Raises:
        RunError: a rank could not write; nothing is published, and nothing is left behind.
    """
    name, local = checkpoint_name(manifest.model["name"], manifest.step), manifest.kind == "local"
    temporary = begin(directory, name, own=local)
    said = f"checkpoint {directory / name} could not be written"
    snapshot = take_snapshot(model, optimizer, everything=local, copy=copy)

    def write() -> None:
        write_snapshot(temporary, snapshot, rank=dist.get_rank(), check=check)

    try:
        agree(attempt(write, directory, snapshot.nbytes), said)
        agree(attempt(lambda: publish_snapshot(temporary, manifest), directory, 0), said)
    except RunError:
        remove_temporary(temporary, local)
        raise
    return directory / name


def remove_temporary(temporary: Path, own: bool) -> None:
    """Leave nothing of a checkpoint that was not published."""
    if own or dist.get_rank() == 0:
        shutil.rmtree(temporary, ignore_errors=True)


def verify_together(path: Path, manifest: Manifest, *, content: bool) -> list[str]:
    """Problems of a checkpoint's files, the reading shared among the ranks; collective, the same on all."""
    rank, world = dist.get_rank(), dist.get_world_size()
    names = list(manifest.files) if manifest.kind == "local" else list(manifest.files)[rank::world]
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, problems_of_files(path, manifest, content=content, names=names))
    return sorted({problem for problems in everyone for problem in problems})


def check_tensors(path: Path, manifest: Manifest, wanted: dict[str, torch.Tensor]) -> None:
    """Refuse missing, extra and misshapen tensors, and other dtypes: nothing is converted silently.

    Raises:
        UserError: naming the first few.
    """
    theirs = {name: entry for name, entry in manifest.tensors.items() if not name.startswith("rng.")}
    problems = [f"{name} is missing" for name in wanted.keys() - theirs.keys()]
    problems += [f"{name} is unknown here" for name in theirs.keys() - wanted.keys()]
    for name in wanted.keys() & theirs.keys():
        entry, tensor = theirs[name], wanted[name]
        if entry.shape != tuple(tensor.shape) or entry.dtype != tensor.dtype:
            problems.append(
                f"{name} is {DTYPE_NAMES[entry.dtype]} {entry.shape}, wanted {tensor.dtype} {tuple(tensor.shape)}"
            )
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise UserError(f"checkpoint {path} does not fit the model: {'; '.join(sorted(problems)[:3])}{more}")


def allocate_state(optimizer: torch.optim.Optimizer) -> None:
    """Create AdamW's state (zero moments, step 0) without taking a step, so that a checkpoint can be read into it."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def load_checkpoint(
    path: Path,
    manifest: Manifest,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    seed: int,
    mesh: Mesh,
) -> TrainState:
    """Fill model, optimizer and this rank's generators from a checkpoint of any layout; each rank reads what it holds.

    The generators continue exactly when the world size and the tensor-parallel degree are the saved ones; otherwise
    they are seeded by (seed, step, data rank): alike on ranks that hold the same data.

    Raises:
        DamagedCheckpointError: a file is not what the manifest says.
        UserError: it does not fit the model.
    """
    progress = TrainState.from_state_dict(manifest.run["progress"])
    allocate_state(optimizer)
    tensors = run_tensors(model, optimizer)
    check_tensors(path, manifest, tensors)
    fill(path, manifest, tensors)
    same_layout = manifest.degrees.get("tp", 1) == mesh.tp.size and manifest.world_size == dist.get_world_size()
    restore_generators(path, manifest, same_layout=same_layout, otherwise=f"{seed}:{progress.step}:{mesh.data.rank}")
    return progress


@torch.no_grad()
def fill(path: Path, manifest: Manifest, tensors: dict[str, torch.Tensor]) -> None:
    """Read what this rank holds of each tensor into it.

    Raises:
        DamagedCheckpointError: a file is not what the manifest says.
    """
    with CheckpointReader(path, manifest) as reader:
        for name, tensor in tensors.items():
            local, offsets = local_part(tensor)
            if local.numel():
                local.copy_(reader.read(name, offsets, local.shape))


def restore_generators(path: Path, manifest: Manifest, *, same_layout: bool, otherwise: str) -> None:
    """Give this rank's generators the saved state where the layout is the saved one, else seed them by a text."""
    rank = dist.get_rank()
    if same_layout and f"rng.cpu.{rank:05d}" in manifest.tensors:
        with CheckpointReader(path, manifest) as reader:
            torch.set_rng_state(reader.read(f"rng.cpu.{rank:05d}"))
            if torch.cuda.is_available() and f"rng.cuda.{rank:05d}" in manifest.tensors:
                torch.cuda.set_rng_state(reader.read(f"rng.cuda.{rank:05d}"))
    else:
        digest = hashlib.blake2b(otherwise.encode(), digest_size=8).digest()
        torch.manual_seed(int.from_bytes(digest, "little") >> 1)
