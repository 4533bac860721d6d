"""The tensor-parallel process group and its collectives.

With sequence parallelism a hidden state is sharded by tokens: a rank has ``(batch, sequence / size, hidden)``, a
consecutive part of the flattened ``batch x sequence`` tokens, so that gathering and scattering move contiguous memory.
Modules that compute each token by itself do not depend on which tokens a rank has.

Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, arXiv:2205.05198.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from smp.comm.cuda import all_gather_single, reduce_scatter_single
from smp.parallel.random_numbers import draw_seed, seeded

# A custom operation, so that selective activation checkpointing can save its result.
library = torch.library.Library("smp", "DEF")
library.define("reduce_tokens(Tensor partial, str group, int size) -> Tensor")


def _reduce_tokens(partial: torch.Tensor, group: str, size: int) -> torch.Tensor:
    """Sum over the group; returns this rank's tokens, or all with ``size`` 1."""
    ranks = dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    if size == 1:
        total = partial.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ranks)
        return total
    part = _like_reduced(partial, group, size)
    reduce_scatter_single(part.view(-1), partial.contiguous().view(-1), group=ranks)
    return part


def _like_reduced(partial: torch.Tensor, group: str, size: int) -> torch.Tensor:
    batch, length, hidden = partial.shape
    return partial.new_empty(batch, length // size, hidden)


library.impl("reduce_tokens", _reduce_tokens, "CompositeExplicitAutograd")
torch.library.register_fake("smp::reduce_tokens", _like_reduced, lib=library)


class TPGroup:
    """A tensor-parallel group.

    Compiled collectives are synchronous: torch.compile takes no others. Those of torch 2.11 return a tensor then.

    Args:
        mesh: its 1-D device mesh.
        sequence_parallel: shard hidden states between the split layers by tokens.
        save_gathered: save gathered inputs for backward instead of gathering them again.
        overlap: overlap collectives of hidden states with matmuls, in memory that the ranks' GPUs share.
        random_seed: added to the seeds of :meth:`fork_random`.
    """

    def __init__(
        self, mesh: DeviceMesh, *, sequence_parallel: bool = True, save_gathered: bool = False, overlap: bool = False,
        random_seed: int = 0,
    ):  # fmt: skip
        self.random_seed, self.overlap = random_seed, overlap
        self.mesh, self.sequence_parallel, self.save_gathered = mesh, sequence_parallel, save_gathered
        self.group, self.rank, self.size = mesh.get_group(), mesh.get_local_rank(), mesh.size()
        self.device = torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else "cpu"

    def bounds(self, total: int) -> tuple[int, int]:
        """Return the bounds [first, last) of this rank's rows of ``total``, as ``torch.chunk`` splits them."""
        step = -(-total // self.size)
        return min(self.rank * step, total), min((self.rank + 1) * step, total)

    def gather(self, part: torch.Tensor, *, async_op: bool = False) -> tuple[torch.Tensor, Any]:
        """Gather every rank's tokens; collective.

        Args:
            part: ``(batch, sequence / size, hidden)``.
            async_op: return before it is done.

        Returns:
            ``(batch, sequence, hidden)``, and the work to wait for or None.
        """
        batch, length, hidden = part.shape
        gathered = part.new_empty(batch, length * self.size, hidden)
        async_op = async_op and not torch.compiler.is_compiling()
        work = all_gather_single(gathered.view(-1), part.contiguous().view(-1), group=self.group, async_op=async_op)
        return gathered, work if async_op else None

    def reduce(self, partial: torch.Tensor, *, async_op: bool = False) -> tuple[torch.Tensor, Any]:
        """Sum the ranks' partial results; returns this rank's tokens, or all without sequence parallelism; collective.

        Args:
            partial: ``(batch, sequence, hidden)``; may be overwritten.
            async_op: return before it is done; ``partial`` must live until then.

        Returns:
            ``(batch, sequence / size, hidden)`` or ``partial``, and the work to wait for or None.
        """
        partial = partial.contiguous()
        async_op = async_op and not torch.compiler.is_compiling()
        if not self.sequence_parallel:
            work = dist.all_reduce(partial, group=self.group, async_op=async_op)
            return partial, work if async_op else None
        batch, length, hidden = partial.shape
        part = partial.new_empty(batch, length // self.size, hidden)
        work = reduce_scatter_single(part.view(-1), partial.view(-1), group=self.group, async_op=async_op)
        return part, work if async_op else None

    def gather_products(
        self, part: torch.Tensor, weights: list[torch.Tensor], *, keep: bool = True
    ) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        """Gather every rank's tokens, and multiply each rank's as they arrive; collective.

        Copy engines move the tokens while the products before them run: the "async TP" of torch's symmetric memory.

        Args:
            part: ``(tokens / size, inputs)``.
            weights: each ``(inputs, outputs)``.
            keep: return the gathered tokens.

        Returns:
            ``(tokens, inputs)`` or None, and the products ``(tokens, outputs)``.
        """
        name = self.group.group_name
        return torch.ops.symm_mem.fused_all_gather_matmul(part.contiguous(), weights, 0, name, return_A=keep)

    def reduce_product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Multiply the tokens of one rank after the other, and sum the ranks' products meanwhile; collective.

        Args:
            x: ``(tokens, inputs)``.
            weight: ``(inputs, outputs)``.

        Returns:
            ``(tokens / size, outputs)``.
        """
        name = self.group.group_name
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(x.contiguous(), weight, "sum", 0, name)

    @contextlib.contextmanager
    def fork_random(self, device: torch.device) -> Iterator[None]:
        """Draw random numbers of this rank alone in the ``with`` block.

        The block advances the ranks' common generators by one number, and draws the same again where their state at the
        entry is restored, as activation checkpointing does.
        """
        seed = draw_seed()
        with seeded(seed + self.random_seed + self.rank, device):
            yield
