"""``save_state_dict`` and ``load_state_dict`` of ``torch.distributed.checkpoint`` as SMP v2's torch had them.

SMP v2's scripts write a folder for every tensor-parallel rank, over the process group that its tensors are sharded
over, where here a tensor is a DTensor over all ranks of the model. They write one for every expert-parallel rank, too,
whose experts are here over ranks of that group: it has one folder. And they give the coordinator by its global rank,
where torch now takes its rank in the group.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint import load_state_dict as _load
from torch.distributed.checkpoint import save_state_dict as _save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._pytree import tree_map, tree_map_only

from smp.errors import UserError

_OF_EXPERTS = re.compile(r"ep\d+-\d+")
_OF_RANK = re.compile(r"tp(\d+)-\d+")  # the folder of a tensor-parallel rank, as SMP v2's scripts name it


def in_group(tensor: DTensor, group: dist.ProcessGroup | None) -> DTensor:
    """Return the part of a tensor that a group's ranks store together, as a view of it.

    Args:
        tensor: of any mesh.
        group: along one axis of it, so that the part is a tensor-parallel rank's; of others, and of None, the tensor
            itself is returned.

    Raises:
        UserError: ranks outside the group have some of it, as of experts that tensor-parallel ranks split, too.
    """
    mesh, ranks = tensor.device_mesh, [] if group is None else dist.get_process_group_ranks(group)
    axes = [axis for axis in range(mesh.ndim) if dist.get_process_group_ranks(mesh.get_group(axis)) == ranks]
    if group is not None and not axes:
        _require_all_parts(tensor, ranks)
    if group is None or not axes or mesh.ndim == 1:
        return tensor
    placement = tensor.placements[axes[-1]]
    outside = [Replicate() if axis == axes[-1] else each for axis, each in enumerate(tensor.placements)]
    shape = torch.Size(compute_local_shape_and_global_offset(tensor.shape, mesh, outside)[0])
    return DTensor.from_local(
        tensor.to_local().detach(),
        DeviceMesh.from_group(group, mesh.device_type),
        # What fully_shard puts on top of tensor parallelism is a shard with a stride, which here is one of the part.
        [placement if placement.is_replicate() else Shard(placement.dim)],  # type: ignore[attr-defined]
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )


def _require_all_parts(tensor: DTensor, ranks: list[int]) -> None:
    at = tensor.device_mesh.get_coordinate()
    assert at is not None
    split = tuple(at[i] if each.is_replicate() else slice(None) for i, each in enumerate(tensor.placements))
    if not {*tensor.device_mesh.mesh[split].flatten().tolist()} <= {*ranks}:
        raise UserError(
            "a checkpoint of one process group has not all experts, which expert_parallel_degree splits over several: "
            "save and load without process_group, into one folder; or lower expert_parallel_degree"
        )


def use_folder_of_group(storage: Any) -> None:
    """Let a reader or writer of an expert-parallel rank's folder use the one above it, which its group shares."""
    path = getattr(storage, "path", None)
    if path is not None and _OF_EXPERTS.fullmatch(Path(path).name):
        storage.path = type(path)(Path(path).parent)


def _coordinator(group: dist.ProcessGroup | None, rank: int) -> int:
    inside = group is not None and rank in dist.get_process_group_ranks(group)
    return dist.get_group_rank(group, rank) if inside else rank  # type: ignore[arg-type]


def save_state_dict(
    state_dict: dict[str, Any],
    storage_writer: checkpoint.StorageWriter,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: checkpoint.SavePlanner | None = None,
) -> checkpoint.Metadata:
    """Save what a group's ranks hold; collective. Arguments are torch's, ``coordinator_rank`` is a global rank."""
    use_folder_of_group(storage_writer)
    own = tree_map_only(DTensor, lambda tensor: in_group(tensor, process_group), state_dict)
    return _save(own, storage_writer, process_group, _coordinator(process_group, coordinator_rank), no_dist, planner)


def _refuse_other_degree(path: Path) -> None:
    own = _OF_RANK.fullmatch(path.name)
    folder, degree = (path.parent, own[1]) if own else (path, "1")
    found = ["1"] if (folder / ".metadata").exists() else []
    found += [match[1] for each in folder.glob("tp*-*") if (match := _OF_RANK.fullmatch(each.name))]
    if found and degree not in found:
        raise UserError(
            f"{folder} is a checkpoint of tensor-parallel degree {found[0]}, and this job's is {degree}: resume it "
            f"with tensor_parallel_degree {found[0]}; one that is saved without process_group resumes at any degree"
        )


def load_state_dict(
    state_dict: dict[str, Any],
    storage_reader: checkpoint.StorageReader,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: checkpoint.LoadPlanner | None = None,
) -> None:
    """Load what :func:`save_state_dict` has saved by a group of as many ranks, in place; collective.

    Raises:
        UserError: the folders are those of another tensor-parallel degree.
    """
    use_folder_of_group(storage_reader)
    if (path := getattr(storage_reader, "path", None)) is not None:
        _refuse_other_degree(Path(path))
    full: dict[int, DTensor] = {}

    def part(tensor: DTensor) -> DTensor:
        own = in_group(tensor, process_group)
        full[id(own)] = tensor
        return own

    own = tree_map_only(DTensor, part, state_dict)
    _load(own, storage_reader, process_group, _coordinator(process_group, coordinator_rank), no_dist, planner)
    state_dict.update(tree_map(lambda value: full.get(id(value), value), own))
