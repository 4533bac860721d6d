"""Muon: orthogonalised momentum for the matrices of blocks, of full matrices at any layout.

[Note: full matrices]
Newton-Schulz iterations multiply a matrix by itself: what a shard alone would get is not its part of the full matrix's
update, and torch.optim.Muon of DTensors has another update or gathers for every product. Here a matrix is gathered
once, over the ranks that it is sharded or split over, to one of them, which sends the parts of its update back.
Matrices are spread over these ranks by their FLOPs, and sent in rounds of bounded memory: in a round and along an axis
of the mesh one all_to_all there and one back. Axis by axis needs no process groups but the mesh's, and undoes the
sharding in the order in which it was done. Momentum and parameters stay sharded. Replicas compute the same.

Source: Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024, and Liu et al., Muon is Scalable
for LLM Training, arXiv:2502.16982, with the arithmetic of ``torch.optim.Muon``.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from smp.local_shards import local_gradient, local_tensor
from smp.mesh import Mesh
from smp.models.parameters import ParameterSpec, ParameterTable
from smp.optim.config import OptimConfig
from smp.optim.entry import StateSpec

NAME = "muon"
STEPS, COEFFICIENTS, EPSILON = 5, (3.4445, -4.7750, 2.0315), 1e-7  # as torch's defaults
ROUND_BYTES = 64 << 20  # of the matrices that a rank gathers at once; at least one matrix

Shape = tuple[int, ...]


def takes(spec: ParameterSpec) -> bool:
    """Return whether it updates such a parameter: a matrix of a block, or its experts' matrices."""
    return spec.kind in ("matrix", "experts") and isinstance(spec.unit, int)


def settings(config: OptimConfig) -> Mapping[str, Any]:
    """Return the settings of its parameter groups, by torch's names; ``dtype``: of Newton-Schulz."""
    return {
        "momentum": config.muon_momentum,
        "nesterov": config.muon_nesterov,
        "adjust_lr_fn": config.muon_adjust_lr,
        "dtype": config.muon_dtype,
    }


def group_settings(spec: ParameterSpec) -> Mapping[str, Any]:
    """Return ``transposed`` for matrices that are stored as (inputs, outputs)."""
    return {"transposed": True} if spec.transposed else {}


def state(shape: Shape, dtype: torch.dtype, config: OptimConfig) -> Mapping[str, StateSpec]:
    """Return the state of a parameter: the mean gradient."""
    return {"momentum_buffer": StateSpec(dtype, shape)}


def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
    """Return the orthogonal factor of matrices, roughly: its singular values are from 0.7 to 1.2.

    Args:
        matrix: ``(..., rows, columns)``, at most one dimension of a batch; overwritten.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    product = torch.addmm if matrix.dim() == 2 else torch.baddbmm
    if is_tall:
        matrix = matrix.mT
    # The Frobenius norm bounds the spectral norm, which the iteration needs to be at most 1.
    matrix.div_(torch.linalg.vector_norm(matrix, dim=(-2, -1), keepdim=True).clamp(min=EPSILON))
    for _ in range(STEPS):
        gram = matrix @ matrix.mT
        gram = product(gram, gram, gram, beta=b, alpha=c)
        matrix = product(matrix, gram, matrix, beta=a)
    return matrix.mT if is_tall else matrix


def lr_ratio(shape: Shape, how: str, *, transposed: bool = False) -> float:
    """Return the factor of the learning rate.

    Args:
        shape: ``(..., outputs, inputs)`` of the parameter, or with ``transposed`` the other way around.
        how: ``original``: Jordan's, for rates of Muon alone; ``match_rms_adamw``: the size of AdamW's usual updates.
    """
    inputs, outputs = shape[-2:] if transposed else shape[:-3:-1]
    return math.sqrt(max(1, outputs / inputs)) if how == "original" else 0.2 * math.sqrt(max(outputs, inputs))


class _Axis(NamedTuple):
    """An axis of the mesh over which matrices are gathered."""

    group: dist.ProcessGroup
    size: int
    rank: int


def _part(shape: Shape, dim: int, size: int, rank: int) -> Shape:
    """Return the shape of a rank's part of a tensor, cut as ``torch.chunk`` does."""
    found, step = list(shape), -(-shape[dim] // size)
    found[dim] = max(0, min(step, shape[dim] - rank * step))
    return tuple(found)


def _sharding(parameter: torch.Tensor) -> tuple[tuple[_Axis, ...], tuple[int, ...]]:
    """Return the axes that a parameter's matrices are gathered over, in that order, and the dimension along each.

    What was sharded last is gathered first. ``fully_shard`` shards what tensor parallelism has split, and its axis is
    the first of the mesh; else several axes of one dimension are applied from left to right.
    """
    if not isinstance(parameter, DTensor):
        return (), ()
    mesh, axes, dims, nested, strided = parameter.device_mesh, list[_Axis](), list[int](), False, False
    for index, placement in enumerate(parameter.placements):
        if mesh.size(index) > 1 and not placement.is_replicate():
            dim = cast(Any, placement).dim - parameter.dim()
            if dim >= -2:  # experts that are sharded one by one are full matrices
                nested |= dim in dims and not strided
                strided = hasattr(placement, "split_factor")
                axes.append(_Axis(mesh.get_group(index), mesh.size(index), mesh.get_local_rank(index)))
                dims.append(dim)
    return (tuple(axes[::-1]), tuple(dims[::-1])) if nested else (tuple(axes), tuple(dims))


@functools.lru_cache(maxsize=64)
def _schedule(shapes: tuple[Shape, ...], ranks: int, itemsize: int) -> list[list[tuple[int, int]]]:
    """Spread matrices over ranks; returns of each round the (owner, index of a matrix) pairs, sorted.

    Args:
        shapes: of the full matrices.
        itemsize: bytes of an element that is sent.
    """
    sizes = [math.prod(shape) for shape in shapes]
    work = [size * min(shape[-2:]) for size, shape in zip(sizes, shapes, strict=True)]
    limit = max(max(sizes), ROUND_BYTES // itemsize if ranks > 1 else 0)
    loads = [(0, rank) for rank in range(ranks)]
    filled = [(0, 0)] * ranks  # number and elements of each rank's last round
    rounds: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for index in sorted(range(len(shapes)), key=lambda index: -work[index]):
        load, owner = heapq.heappop(loads)
        heapq.heappush(loads, (load + work[index], owner))
        number, elements = filled[owner]
        if elements + sizes[index] > limit:
            number, elements = number + 1, 0
        filled[owner] = number, elements + sizes[index]
        rounds[number].append((owner, index))
    return [sorted(rounds[number]) for number in sorted(rounds)]


def _unpack(buffer: torch.Tensor, shapes: list[Shape]) -> list[torch.Tensor]:
    """Return views of consecutive tensors."""
    return [part.view(shape) for part, shape in zip(buffer.split([*map(math.prod, shapes)]), shapes, strict=True)]


def _packed(
    tensors: Iterable[torch.Tensor], shapes: list[Shape], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return tensors of these shapes in one buffer."""
    buffer = torch.empty(sum(map(math.prod, shapes)), dtype=dtype, device=device)
    for view, tensor in zip(_unpack(buffer, shapes), tensors, strict=True):
        view.copy_(tensor)
    return buffer


class _Exchange:
    """The collectives of a round along one axis: parts of matrices to their owners, parts of the updates back.

    Args:
        shapes: of the matrices of which this rank has a part, as they are after the gather.
        dims: of each, the one along which it is gathered.
        owners: of each, the rank on the axis to which it goes, ascending.
    """

    def __init__(self, axis: _Axis, shapes: list[Shape], dims: list[int], owners: list[int]):
        self._axis, ranks = axis, range(axis.size)
        mine = [index for index, owner in enumerate(owners) if owner == axis.rank]
        self._dims = [dims[index] for index in mine]
        self._parts = [_part(shape, dim, axis.size, axis.rank) for shape, dim in zip(shapes, dims, strict=True)]
        self._arriving = [_part(shapes[index], dims[index], axis.size, rank) for rank in ranks for index in mine]
        self._sent = [0] * axis.size
        for part, owner in zip(self._parts, owners, strict=True):
            self._sent[owner] += math.prod(part)
        arriving, self.count = [*map(math.prod, self._arriving)], len(mine)
        self._received = [sum(arriving[rank * self.count : (rank + 1) * self.count]) for rank in ranks]

    def gather(self, parts: Iterable[torch.Tensor], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
        """Return the matrices that this rank gets, gathered along the axis; collective."""
        sent = _packed(parts, self._parts, dtype, device)
        arrived = sent.new_empty(sum(self._received))
        dist.all_to_all_single(arrived, sent, self._received, self._sent, group=self._axis.group)
        del sent
        found = _unpack(arrived, self._arriving)
        return [torch.cat(found[index :: self.count], dim=dim) for index, dim in enumerate(self._dims)]

    def scatter(self, matrices: list[torch.Tensor], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
        """Return this rank's parts of the matrices of all ranks; collective.

        Args:
            matrices: those that :meth:`gather` returned, or what replaces them; freed.
        """
        cut = [
            matrix.split([part[dim] for part in self._arriving[index :: self.count]], dim)
            for index, (matrix, dim) in enumerate(zip(matrices, self._dims, strict=True))
        ]
        pieces = (parts[rank] for rank in range(self._axis.size) for parts in cut)
        sent = _packed(pieces, self._arriving, dtype, device)
        matrices.clear()
        cut.clear()
        arrived = sent.new_empty(sum(self._sent))
        dist.all_to_all_single(arrived, sent, self._sent, self._received, group=self._axis.group)
        return _unpack(arrived, self._parts)


def _drained(tensors: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield tensors, which are removed from the list."""
    while tensors:
        yield tensors.pop(0)


def _full_shape(parameter: torch.Tensor) -> Shape:
    """Return the shape of the matrices of a parameter; of experts, of those that this rank has."""
    return (*local_tensor(parameter).shape[:-2], *parameter.shape[-2:])


def _exchanges(
    axes: tuple[_Axis, ...], shapes: list[Shape], dims: list[tuple[int, ...]], owners: list[int]
) -> list[_Exchange]:
    """Return the exchanges of a round, in the order of gathering.

    Args:
        shapes: of the full matrices of the round.
        dims: of each, along the axes.
        owners: of each, counted over all axes, of which the first is the slowest; ascending.
    """
    found = []
    for number, axis in enumerate(axes):
        gathered_shapes, slower = [*shapes], 1
        for later in reversed(range(number + 1, len(axes))):  # along which the matrices are still parts
            size, rank = axes[later].size, axes[later].rank
            gathered_shapes = [_part(s, d[later], size, rank) for s, d in zip(gathered_shapes, dims, strict=True)]
            slower *= size
        ranks = [owner // slower for owner in owners]
        found.append(_Exchange(axis, gathered_shapes, [each[number] for each in dims], ranks))
        mine = [index for index, rank in enumerate(ranks) if rank == axis.rank]
        shapes, dims = [shapes[index] for index in mine], [dims[index] for index in mine]
        owners = [owners[index] % slower for index in mine]
    return found


class _Member(NamedTuple):
    """A parameter with its state, and the dimensions along which its matrices are gathered."""

    parameter: nn.Parameter
    state: Mapping[str, torch.Tensor]
    dims: tuple[int, ...]


def _averaged(member: _Member, group: Mapping[str, Any], skip: torch.Tensor | None) -> torch.Tensor:
    """Update the momentum and return what is orthogonalised, a new tensor; of this rank's shard."""
    gradient, buffer = local_gradient(member.parameter), local_tensor(member.state["momentum_buffer"])
    momentum = buffer.lerp(gradient, 1 - group["momentum"])
    found = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
    _write(buffer, momentum, skip)
    return found


def _write(tensor: torch.Tensor, values: torch.Tensor, skip: torch.Tensor | None) -> None:
    """Replace the values of a tensor unless ``skip``, without waiting for the device."""
    # Not by a factor of zero: what is skipped may be infinite or NaN.
    tensor.copy_(values if skip is None else torch.where(skip, tensor, values))


def _apply(parameter: nn.Parameter, change: torch.Tensor, group: Mapping[str, Any], skip: torch.Tensor | None) -> None:
    """Decay the parameter and add an orthogonal matrix; of this rank's shard."""
    local, lr = local_tensor(parameter), group["lr"]
    ratio = lr_ratio(tuple(parameter.shape), group["adjust_lr_fn"], transposed=group.get("transposed", False))
    values = local.mul(1 - lr * group["weight_decay"])
    _write(local, values.add_(change.to(local.device), alpha=-lr * ratio), skip)


def _update_alike(
    axes: tuple[_Axis, ...],
    members: list[_Member],
    group: Mapping[str, Any],
    skip: torch.Tensor | None,
) -> None:
    """Update parameters that are sharded over the same axes."""
    first = members[0].parameter
    dtype = torch.bfloat16 if group["dtype"] == "bf16" else torch.promote_types(first.dtype, torch.float32)
    # Of shards that are offloaded to the host, too, the products are the GPU's.
    on_gpu = isinstance(first, DTensor) and first.device_mesh.device_type == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else first.device
    skip = None if skip is None else skip.to(local_tensor(first).device)
    shapes = [_full_shape(member.parameter) for member in members]
    for planned in _schedule(tuple(shapes), math.prod(axis.size for axis in axes), dtype.itemsize):
        owners, indices = [list(each) for each in zip(*planned, strict=True)]
        exchanges = _exchanges(axes, [shapes[i] for i in indices], [members[i].dims for i in indices], owners)
        parts: Iterator[torch.Tensor] = (_averaged(members[index], group, skip) for index in indices)
        for exchange in exchanges:
            parts = _drained(exchange.gather(parts, dtype, device))
        changes = []
        for _ in range(exchanges[-1].count if exchanges else len(indices)):
            changes.append(orthogonalize(next(parts).to(device, dtype)))  # no name keeps the matrix, which is freed
        for exchange in reversed(exchanges):
            changes = exchange.scatter(changes, dtype, device)
        for index, change in zip(indices, changes, strict=True):
            _apply(members[index].parameter, change, group, skip)


def update(
    parameters: list[nn.Parameter],
    states: list[dict[str, torch.Tensor]],
    group: Mapping[str, Any],
    skip: torch.Tensor | None,
) -> None:
    """Update by full matrices; collective over the ranks that they are sharded over."""
    alike = defaultdict[tuple[_Axis, ...], list[_Member]](list)
    for parameter, state in zip(parameters, states, strict=True):
        axes, dims = _sharding(parameter)
        alike[axes].append(_Member(parameter, state, dims))
    for axes, members in alike.items():
        _update_alike(axes, members, group, skip)


def _itemsize(config: OptimConfig) -> int:
    """Return the bytes of an element that is sent and multiplied."""
    return 2 if config.muon_dtype == "bf16" else 4


def gathered(table: ParameterTable, mesh: Mesh, config: OptimConfig) -> Mapping[str, float]:
    """Return the bytes that a rank gathers in one update, by axis of the mesh: of the larger side.

    A rank sends all of its parts but those of its matrices, and gets as much back: twice what one sends in an
    all_gather of so many bytes.
    """
    nbytes = 2 * _itemsize(config) * table.count() / mesh.replica_size
    return {"dp_shard": nbytes, "tp": nbytes}


def _rounds(table: ParameterTable, mesh: Mesh, config: OptimConfig) -> list[list[list[Shape]]]:
    """Return of each round, and of each rank that has some in it, the shapes of its matrices."""
    shapes, found = tuple(spec.shape for spec in table), []
    for planned in _schedule(shapes, mesh.replica_size, _itemsize(config)):
        by_owner = defaultdict[int, list[Shape]](list)
        for owner, index in planned:
            by_owner[owner].append(shapes[index])
        found.append([*by_owner.values()])
    return found


def _flops(shape: Shape) -> int:
    side, other = sorted(shape[-2:])
    return math.prod(shape[:-2]) * STEPS * 2 * side * side * (2 * other + side)


def flops(table: ParameterTable, mesh: Mesh, config: OptimConfig) -> Mapping[int, float]:
    """Return the FLOPs of Newton-Schulz by bytes of an element; of the rank that has most in each round."""
    ranks = _rounds(table, mesh, config)
    return {_itemsize(config): sum(max(sum(map(_flops, shapes)) for shapes in owners) for owners in ranks)}


def working_bytes(table: ParameterTable, mesh: Mesh, config: OptimConfig) -> int:
    """Return the most bytes of a rank in a round: its full matrices twice, or once with those of one's iteration."""
    most = 0
    for shapes in itertools.chain.from_iterable(_rounds(table, mesh, config)):
        total = sum(map(math.prod, shapes))
        iterated = (math.prod(s) + 2 * math.prod(s[:-2]) * min(s[-2:]) ** 2 for s in shapes)
        most = max(most, total + max(total, *iterated))
    return most * _itemsize(config)
