"""Which tensors the backend smddp takes, and what it does with the others."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce
from torch.distributed.tensor import DeviceMesh, DTensor, Shard

import smp.comm
from smp.comm.arena import SIGNATURE_BYTES, Layout, sign
from smp.comm.tensors import Output, check_outputs, overlap, plain_cpu
from tests.distributed import run_distributed

LARGE = 200_000  # elements; from 2 MiB of all ranks on, more than two ranks share the work of adding up


def _needs_grad() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    total = world * (world + 1) / 2
    for shape in ((2, 6), (6, 2)):
        leaf = torch.nn.Parameter(torch.full((2, 6), rank + 1.0).reshape(shape).t())  # one is strided
        dist.all_reduce(leaf)
        assert leaf.requires_grad and leaf.is_leaf and (leaf == total).all()
        gathered = torch.zeros(world * 12, 2, requires_grad=True)[:, 0].detach().requires_grad_()
        dist.all_gather_into_tensor(gathered, leaf)
        assert gathered.is_leaf and (gathered == total).all()
        part = torch.zeros(12, requires_grad=True)
        dist.reduce_scatter_tensor(part, gathered)
        assert part.is_leaf and (part == world * total).all()
    computed = torch.ones(3, requires_grad=True) * (rank + 1)
    dist.broadcast(computed, 1)
    assert computed.grad_fn is not None and (computed == 2).all()


def _inference_mode() -> None:
    """Tensors that are made in this mode can be written only in it, and it holds for one thread only."""
    world = dist.get_world_size()
    with torch.inference_mode():
        made = [torch.ones(LARGE, 2).t()[0] for _ in range(8)] + [torch.ones(LARGE) for _ in range(8)]
        dist.all_reduce(made[0])
        works = [dist.all_reduce(t, async_op=True) for t in made[1:]]
        for work in works:
            work.wait()
    assert all((t == world).all() for t in made)
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        dist.all_reduce(made[8], op)  # outside
        dist.all_reduce(made[0], op)
    assert (made[8] == world**2).all() and (made[0] == world**2).all()
    usual = torch.ones(LARGE, requires_grad=True).clone()
    dist.all_reduce(usual)  # with memory that was first used in the mode
    assert not usual.is_inference() and (usual == world).all()
    usual.sum().backward()


def _defaults() -> None:
    world = dist.get_world_size()
    try:
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        source, output = torch.ones(5, device="cpu"), torch.zeros(5 * world, 2, device="cpu")[:, 1]
        assert source.dtype is torch.float64
        dist.all_gather_into_tensor(output, source)
        dist.all_reduce(source)
        assert (output == 1).all() and (source == world).all()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


class _Subclass(torch.Tensor):
    pass


def _by_gloo(why: str, function) -> None:
    """See that it runs, and is counted with its reason; then that the group goes on in shared memory."""
    smp.comm.reset_report()
    function()
    assert {(key.path, key.why) for key in smp.comm.report()} == {("gloo", why)}, str(smp.comm.report())
    dist.barrier()


def _refused_by_gloo(why: str, message: str, function) -> None:
    with pytest.raises(RuntimeError, match=message):
        _by_gloo(why, function)
    assert {(key.path, key.why) for key in smp.comm.report()} == {("gloo", why)}
    dist.barrier()


def _left_to_gloo() -> None:
    world = dist.get_world_size()
    mesh = DeviceMesh("cpu", list(range(world)))
    subclass, sparse = torch.ones(3).as_subclass(_Subclass), torch.eye(3).to_sparse()
    _by_gloo("not plain dense tensors", lambda: dist.all_reduce(subclass))
    _by_gloo("not plain dense tensors", lambda: dist.all_reduce(sparse))
    assert (subclass == world).all() and (sparse.to_dense() == world * torch.eye(3)).all()
    pending = all_reduce(torch.ones(3), "sum", mesh)
    assert isinstance(pending, AsyncCollectiveTensor)
    dist.barrier()  # it has run, and is counted, though nobody has waited for it
    _by_gloo("not plain dense tensors", lambda: dist.all_reduce(pending))
    assert (pending == world**2).all()
    local = DTensor.from_local(torch.ones(4), mesh, [Shard(0)]).to_local()
    dist.all_reduce(local)
    assert (local == world).all()

    ones = torch.ones(3)
    _by_gloo("left to it", lambda: dist.reduce(ones, 0))
    integers = torch.ones(3, dtype=torch.int64)
    _refused_by_gloo("AVG of torch.int64", "can't be cast", lambda: dist.all_reduce(integers, dist.ReduceOp.AVG))
    _refused_by_gloo("BAND of torch.float32", "non-integral", lambda: dist.all_reduce(ones, dist.ReduceOp.BAND))
    eighth = ones.to(torch.float8_e4m3fn)
    _refused_by_gloo("SUM of torch.float8_e4m3fn", "Invalid scalar type", lambda: dist.all_reduce(eighth))
    tripled = dist._make_nccl_premul_sum(3.0)
    _refused_by_gloo("PREMUL_SUM of torch.float32", "with Gloo", lambda: dist.all_reduce(ones, tripled))


def _conjugated() -> None:
    """Views whose memory holds other numbers than they show."""
    rank, group = dist.get_rank(), dist.group.WORLD
    numbers = torch.tensor([1 + 2j, 3 - 1j]) * (rank + 1)
    view = numbers.conj()
    group.broadcast([view]).wait()
    assert view.is_conj() and torch.equal(view.resolve_conj(), torch.tensor([1 - 2j, 3 + 1j]))
    dist.all_reduce(numbers)


def _all() -> None:
    for function in (_needs_grad, _inference_mode, _defaults, _left_to_gloo, _conjugated):
        function()


@pytest.mark.filterwarnings("ignore:.*is deprecated")
@pytest.mark.parametrize("world_size", [2, 3])
def test_tensors_of_all_kinds(world_size):
    run_distributed(_all, world_size=world_size, backend="smddp")


def test_what_is_plain():
    assert plain_cpu([torch.ones(2, 3).t(), torch.nn.Parameter(torch.ones(1))])
    other = [torch.ones(1).as_subclass(_Subclass), torch.eye(2).to_sparse(), torch.ones(1, device="meta")]
    assert not any(plain_cpu([torch.ones(1), tensor]) for tensor in other)


def test_expanded_tensors_cannot_be_written():
    assert check_outputs([torch.ones(1, 3).expand(1, 3), torch.ones(2, 3).t(), torch.ones(0).expand(4, 0)]) is None
    assert "(4, 3) is expanded" in str(check_outputs([torch.ones(2), torch.ones(1, 3).expand(4, 3)]))


def test_results_reach_a_tensor_that_is_not_contiguous():
    memory = torch.zeros(3, 4)
    output = Output(memory.t(), keep=False)
    output.flat.copy_(torch.arange(12.0))
    assert not memory.any()
    output.finish()
    assert torch.equal(memory.t(), torch.arange(12.0).view(4, 3)) and memory._version == 0
    kept = Output(memory[:, 1::2], keep=True)
    assert kept.flat.tolist() == memory[:, 1::2].flatten().tolist()


def test_overlap():
    memory = torch.zeros(10)
    assert overlap(memory[:5], memory[4:6]) and overlap(memory, memory[9:]) and overlap(memory[2:3], memory)
    assert not overlap(memory[:5], memory[5:]) and not overlap(memory[3:3], memory)


def test_long_signatures_differ_to_their_end():
    same = "all_gather torch.float32 (" + "1000000, " * 40
    first, other = sign(same + "1)"), sign(same + "2)")
    assert first != other and len(first) == len(other) == len(sign("barrier")) == SIGNATURE_BYTES


def test_the_smallest_slot_has_a_place_for_every_rank():
    for ranks in (2, 64, 65, 1000):
        slot = Layout.with_scratch(0, ranks).slot_bytes
        place = slot // ranks // 64 * 64  # as reductions divide a slot
        assert place >= torch.complex128.itemsize and slot % 4096 == 0
