"""Collectives by copy engine: several ranks on one GPU, and on several where there are. ``pytest tests/gpu``.

NCCL refuses two ranks on one GPU, so anything that should not have reached it fails.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import smp.comm
from smp.comm.cuda import SymmetricAllGather, install, zero_copy_available
from tests.distributed import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WORKSPACE = 2**18
# Below, at and above a chunk of the gathered bytes (half of the workspace), and many chunks.
SIZES = [0, 1, 63, 4097, 2**15 - 1, 2**15, 2**15 + 1, 300_001]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]
PATH = "symmetric memory"
# torch 2.13's names, or the older ones.
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def run(fn, *args, world_size: int, spread: bool = False) -> None:
    """Call ``fn(*args)`` on every rank of a group, all on the first GPU, or each on its own."""
    if spread and torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs")
    outcomes = run_ranks(_on_gpu, spread, fn, args, world_size=world_size, limit=300, start_method="spawn")
    errors = [f"rank {rank}: {o.status} {o.error}" for rank, o in enumerate(outcomes) if o.status != 0 or o.error]
    assert not errors, "\n".join(errors)


def _on_gpu(spread, fn, args) -> None:
    torch.cuda.set_device(dist.get_rank() if spread else 0)
    torch.zeros(1, device="cuda")
    fn(*args)
    torch.cuda.synchronize()
    meet()  # nobody leaves while another may still read its memory


def meet() -> None:
    """A barrier that is not NCCL's."""
    dist.all_reduce(torch.zeros(1))


@pytest.fixture(autouse=True)
def knobs(monkeypatch):
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    monkeypatch.setenv("SMP_SYMMETRIC_WORKSPACE_BYTES", str(WORKSPACE))
    monkeypatch.setenv("SMP_SYMMETRIC_MINIMUM_BYTES", "0")


def values(rank: int, turn: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * turn + rank)
    return (torch.randn(numel, generator=generator) * 8).to(dtype)


def gathered(turn: int, numel: int, dtype: torch.dtype, ranks=None) -> torch.Tensor:
    return torch.cat([values(r, turn, numel, dtype) for r in ranks or range(dist.get_world_size())])


def _gathers():
    size, rank = dist.get_world_size(), dist.get_rank()
    assert zero_copy_available(dist.group.WORLD) is None
    for turn, (numel, dtype) in enumerate(itertools.product(SIZES, DTYPES)):
        expected = gathered(turn, numel, dtype)
        source = values(rank, turn, numel, dtype).cuda()
        output = torch.empty(size * numel, dtype=dtype, device="cuda")
        works = [ALL_GATHER(output, source, async_op=turn % 3 == 0)]
        in_place = torch.empty_like(output)
        part = in_place[rank * numel :][:numel].copy_(source)
        works.append(ALL_GATHER(in_place, part))
        shared = SymmetricAllGather(dist.group.WORLD).allocate((size * numel,), dtype=dtype, device=output.device)
        part = shared[rank * numel :][:numel].copy_(source)
        works.append(SymmetricAllGather(dist.group.WORLD)(shared, part, dist.group.WORLD, turn % 2 == 0))
        for work in works:
            if work is not None:
                work.wait()
        for found in (output, in_place, shared):
            assert torch.equal(found.cpu(), expected), (numel, dtype)
    table = smp.comm.report()
    assert table.calls("all_gather") == table.calls("all_gather", PATH) == 3 * len(SIZES) * len(DTYPES), str(table)


@pytest.mark.parametrize(("world_size", "spread"), [(2, False), (4, False), (2, True), (8, True)])
def test_gathers(world_size, spread):
    run(_gathers, world_size=world_size, spread=spread)


def _streams():
    """Kernels before and after on the current stream, streams that change, and never a synchronisation."""
    size, rank, numel = dist.get_world_size(), dist.get_rank(), 50_000
    streams = [torch.cuda.Stream() for _ in range(3)]
    results = []
    for turn in range(24):
        stream = streams[turn % 3]
        with torch.cuda.stream(stream):
            if turn % size == rank:
                torch.cuda._sleep(20_000_000)  # this rank is late on the GPU
            source = torch.full((numel,), float(rank + turn), device="cuda") * 2
            output = torch.empty(size * numel, device="cuda")
            work = ALL_GATHER(output, source, async_op=turn % 4 == 0)
            source.zero_() if turn % 4 else None  # the next kernel of the same stream
            if work is not None:
                work.wait()
            results.append((turn, output + 1))
    torch.cuda.synchronize()
    for turn, output in results:
        expected = torch.tensor([2.0 * (r + turn) + 1 for r in range(size)]).repeat_interleave(numel)
        assert torch.equal(output.cpu(), expected), turn


@pytest.mark.parametrize("world_size", [2, 4])
def test_streams(world_size):
    run(_streams, world_size=world_size)


def _subgroups():
    """Ranks that are in unequal numbers of groups."""
    rank = dist.get_rank()
    groups = [[0, 1], [0, 1, 2], [1, 3], [0, 1, 2, 3]]
    made = [dist.new_group(ranks, backend="smddp") for ranks in groups]
    for turn, (ranks, group) in enumerate(zip(groups * 3, made * 3, strict=True)):
        if rank in ranks:
            output = torch.empty(len(ranks) * 40_000, device="cuda")
            ALL_GATHER(output, values(rank, turn, 40_000, torch.float32).cuda(), group=group)
            assert torch.equal(output.cpu(), gathered(turn, 40_000, torch.float32, ranks))
    assert smp.comm.report().calls("all_gather", "nccl") == 0


def test_subgroups():
    run(_subgroups, world_size=4)


def _strided():
    size, rank = dist.get_world_size(), dist.get_rank()
    strided = torch.zeros(size * 1000, 2, device="cuda")[:, 0]
    ALL_GATHER(strided, values(rank, 7, 1000, torch.float32).cuda())
    assert torch.equal(strided.cpu(), gathered(7, 1000, torch.float32))


def test_strided():
    run(_strided, world_size=2)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)) for _ in range(4)]
    return nn.Sequential(*layers).cuda()


def _batch(step: int, row: int) -> torch.Tensor:
    return torch.randn(8, 256, generator=torch.Generator().manual_seed(10 * step + row)).cuda()


def _losses(model: nn.Module, rows: list[int], steps: int, share: float) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        loss = sum(model(_batch(step, row)).square().mean() for row in rows) * share
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


class SumOfGathered:
    """ReduceScatter for ``fully_shard`` made of an AllGather, as NCCL refuses two ranks on one GPU."""

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        whole = input_tensor.new_empty(group.size() * input_tensor.numel())
        ALL_GATHER(whole, input_tensor, group=group)
        torch.sum(whole.view(group.size(), group.size(), -1)[:, group.rank()], 0, out=output_tensor)


def _fully_shard(unshard_async: bool, mixed: bool):
    """Steps with ``fully_shard`` whose only collectives on the GPU are copies; the losses of one process."""
    size, rank = dist.get_world_size(), dist.get_rank()
    expected = _losses(_model(), list(range(size)), 6, 1 / size)
    model = _model()
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cuda")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if mixed else None
    for module in (*model, model):
        fully_shard(module, mesh=mesh, **({"mp_policy": policy} if policy else {}))
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        assert install(module, dist.group.WORLD) is None
        module.set_custom_reduce_scatter(SumOfGathered())
    model._set_unshard_async_op(unshard_async)
    smp.comm.reset_report()
    mine = torch.tensor(_losses(model, [rank], 6, 1 / size))
    dist.all_reduce(mine)
    torch.testing.assert_close(mine.tolist(), expected, rtol=3e-2 if mixed else 1e-5, atol=0)
    table = smp.comm.report()
    assert table.calls("all_gather", PATH) == 6 * 2 * 4 + 6 * 4, str(table)
    assert table.calls(path="nccl") == 0
    # Every buffer was used again and again.
    assert len(dist.group.WORLD.gpu(torch.device("cuda", torch.cuda.current_device())).buffers._blocks) <= 8


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("unshard_async", [False, True])
@pytest.mark.parametrize("world_size", [2, 4])
def test_fully_shard(world_size, unshard_async, mixed, monkeypatch):
    monkeypatch.setenv("SMP_POISON_SHARED_BUFFERS", "1")
    run(_fully_shard, unshard_async, mixed, world_size=world_size)


def _inference():
    size, rank = dist.get_world_size(), dist.get_rank()
    with torch.inference_mode():
        output = torch.empty(size * 1000, device="cuda")
    ALL_GATHER(output, values(rank, 0, 1000, torch.float32).cuda())
    assert torch.equal(output.cpu(), gathered(0, 1000, torch.float32))


def test_inference_mode():
    run(_inference, world_size=2)


def _again(reason: str):
    size, rank = dist.get_world_size(), dist.get_rank()
    assert (zero_copy_available(dist.group.WORLD) or "") == reason
    if not reason:
        output = torch.empty(size * 70_000, device="cuda")
        ALL_GATHER(output, values(rank, 1, 70_000, torch.float32).cuda())
        assert torch.equal(output.cpu(), gathered(1, 70_000, torch.float32))
        meet()
        group = dist.new_group(list(range(size)), backend="smddp")
        ALL_GATHER(output, values(rank, 2, 70_000, torch.float32).cuda(), group=group)
        assert torch.equal(output.cpu(), gathered(2, 70_000, torch.float32))
        meet()
        dist.destroy_process_group(group)


def test_a_group_ends():
    run(_again, "", world_size=2)


def test_reasons(monkeypatch):
    monkeypatch.setenv("SMP_SYMMETRIC_WORKSPACE_BYTES", "0")
    run(_again, "SMP_SYMMETRIC_WORKSPACE_BYTES is 0", world_size=2)


def _refused_by_torch():
    assert "overlapping devices" in (zero_copy_available(dist.group.WORLD) or "")


def test_torch_refuses_two_ranks_on_one_gpu(monkeypatch):
    monkeypatch.delenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES")
    run(_refused_by_torch, world_size=2)
