"""Collectives among several hosts: the same bits on every rank, errors that name a rank, and training.

``SMP_HOST_ID`` makes hosts of the processes of one machine.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import os
import signal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import smp.comm
from smp.comm import segment
from smp.comm.arena import Mismatch
from smp.comm.cuda import all_gather_single, reduce_scatter_single
from smp.comm.fsdp import SharedAllGather, use_shared_buffers
from tests import netns
from tests.comm_calls import check
from tests.comm_cases import MOVERS, REDUCERS, Case, covering_cases
from tests.distributed import run_distributed, run_ranks, signal_others, wait_for

# The host of each rank.
LAYOUTS = {"2x2": "aabb", "2x2 in turns": "abab", "3x1": "abc", "2x3": "aaabbb", "3x2": "aabbcc"}
SMALL_SLOTS = str(4 * 4096)  # SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES: many chunks of little data

# Elements: one, around what each rank carries for all of its host, what comes with a meeting (64 KiB), messages.
SIZES = (1, 1023, 1025, 9001, 20_011)


def on_hosts(layout: str, environments: dict[str, dict[str, str]], rank: int) -> None:
    os.environ.update(environments.get(layout[rank], {}), SMP_HOST_ID=layout[rank])


def run_on_hosts(fn, *args, layout: str, scratch: str = SMALL_SLOTS, **environments) -> None:
    """``environments`` holds what is different on a host."""
    common = {"SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES": scratch}
    by_host = {host: common | environments.get(host, {}) for host in layout}
    prepare = functools.partial(on_hosts, layout, by_host)
    run_distributed(fn, *args, world_size=len(layout), backend="smddp", prepare=prepare)


def host_ranks(layout: str) -> list[list[int]]:
    """Ranks by host, hosts in the order of their first ranks."""
    return [[r for r, host in enumerate(layout) if host == name] for name in dict.fromkeys(layout)]


def values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """What a rank gives."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 * numel + rank)).to(dtype)


def total(hosts: list[list[int]], numel: int, dtype: torch.dtype) -> torch.Tensor:
    """The sum of all ranks' values in the documented order."""
    sums = [functools.reduce(torch.add, [values(r, numel, dtype) for r in ranks]) for ranks in hosts]
    return functools.reduce(torch.add, sums)


def same(got: torch.Tensor, wanted: torch.Tensor, *what) -> None:
    assert got.dtype == wanted.dtype and torch.equal(got, wanted), what


def _wait(work) -> None:
    if work is not None:
        work.wait()


# --- bits


def _right(sizes):
    """Whatever does not depend on the order of adding; of each form also with what one meeting does not carry."""
    gloo, members = dist.new_group(backend="gloo"), list(range(dist.get_world_size()))
    found = [case for case in covering_cases(len(members)) if not case.order_matters()]
    for case in found[::8]:
        check(case, None, members, int(SMALL_SLOTS) // 4, gloo)
    for form, size, later in itertools.product((*MOVERS, *REDUCERS), sizes, (False, True)):
        check(Case(form, size=size, asynchronous=later, seed=size), None, members, int(SMALL_SLOTS) // 4, gloo)


def _in_order(hosts, sizes):
    """The sums of random numbers are those of the documented order."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for numel, dtype, async_op in itertools.product(sizes, (torch.float32, torch.bfloat16), (False, True)):
        whole, wanted = values(rank, numel * size, dtype), total(hosts, numel * size, dtype)
        tensor = whole[1:].clone()
        _wait(dist.all_reduce(tensor, async_op=async_op))
        same(tensor, wanted[1:], "all_reduce", numel, dtype)
        out = torch.empty(numel, dtype=dtype)
        _wait(reduce_scatter_single(out, whole, async_op=async_op))
        same(out, wanted[rank * numel :][:numel], "reduce_scatter", numel, dtype)
    average = values(rank, 5000, torch.float32)
    dist.all_reduce(average, dist.ReduceOp.AVG)
    same(average, total(hosts, 5000, torch.float32) / size, "average")
    dist.barrier()


def _through_the_network(hosts):
    path = "shared memory and network" if len(hosts[0]) > 1 else "network"
    counts = smp.comm.report()
    ours = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "barrier")
    assert {key.path for key in counts if key.operation in ours} == {path}, str(counts)
    assert all(counts.calls(op, path) for op in ours), str(counts)


def _bits(hosts, sizes):
    _right(sizes)
    _in_order(hosts, sizes)
    _through_the_network(hosts)


@pytest.mark.parametrize("layout", ["2x2 in turns", "3x1"])
@pytest.mark.full
def test_bits(layout):
    hosts = LAYOUTS[layout]
    run_on_hosts(_bits, host_ranks(hosts), SIZES, layout=hosts)


@pytest.mark.parametrize("layout", ["2x3", "3x2"])
@pytest.mark.slow
def test_bits_of_six_ranks(layout):
    hosts = LAYOUTS[layout]
    run_on_hosts(_bits, host_ranks(hosts), (1, 1025, 20_011), layout=hosts)


def _several_megabytes(hosts):
    rank, size, numel = dist.get_rank(), dist.get_world_size(), 900_001
    mine = values(rank, numel, torch.float32)
    out = torch.empty(size * numel)
    all_gather_single(out, mine)
    same(out, torch.cat([values(r, numel, torch.float32) for r in range(size)]))
    whole = torch.cat([mine] * size)
    reduce_scatter_single(mine, whole)
    same(mine, total(hosts, numel, torch.float32))
    dist.all_reduce(whole)
    same(whole, torch.cat([mine] * size))
    tensor = values(rank, 3 * numel, torch.float32)
    dist.broadcast(tensor, 1)
    same(tensor, values(1, 3 * numel, torch.float32))


@pytest.mark.parametrize("layout", ["2x2", pytest.param("3x1", marks=pytest.mark.slow)])
def test_chunks_of_the_usual_size(layout):
    hosts = LAYOUTS[layout]
    run_on_hosts(_several_megabytes, host_ranks(hosts), layout=hosts, scratch=str(4 * 2**20))


def _slices():
    """Into shared buffers where a host has them; what is private on another host meets them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    comm = SharedAllGather(dist.group.WORLD)
    for numel in (100, 5000, 50_000):  # two with a meeting, one in messages
        for again in range(3):
            whole = comm.allocate((size * numel,), dtype=torch.float32, device=torch.device("cpu"))
            part = whole[rank * numel :][:numel]
            part.copy_(values(rank, numel, torch.float32) + again)
            comm(whole, part, dist.group.WORLD)
            same(whole, torch.cat([values(r, numel, torch.float32) + again for r in range(size)]), numel)
            del whole, part
    calls = 9 if os.environ.get("SMDDP_AG_SORT_BUFFER_SIZE_BYTES") != "0" else 0
    assert smp.comm.report().calls("all_gather", "shared buffer") == calls
    assert smp.comm.report().calls("all_gather") == 9


@pytest.mark.parametrize("layout", ["2x2", "2x2 in turns"])
@pytest.mark.parametrize("shared", ["everywhere", "on one host"])
def test_shared_buffers(layout, shared):
    other = {"SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES": str(8 * 4096)}
    if shared == "on one host":
        other["SMDDP_AG_SORT_BUFFER_SIZE_BYTES"] = "0"
    run_on_hosts(_slices, layout=LAYOUTS[layout], b=other)


# --- groups


def _subgroups(layout):
    rank = dist.get_rank()
    for members in ([0, 2], [1, 3], [0, 1], [3, 2, 1, 0], [0, 1, 2]):
        group = dist.new_group(members)
        if rank not in members:
            continue
        ordered = sorted(members)
        hosts = [[r for r in ordered if layout[r] == host] for host in dict.fromkeys(layout[r] for r in ordered)]
        for numel in (3, 5000):
            tensor = values(rank, numel, torch.float32)
            dist.all_reduce(tensor, group=group)
            if len(members) != 3:
                same(tensor, total(hosts, numel, torch.float32), members, numel)
            out = torch.empty(len(members) * numel)
            all_gather_single(out, values(rank, numel, torch.float32), group=group)
            same(out, torch.cat([values(r, numel, torch.float32) for r in ordered]), members, numel)
    counts = smp.comm.report()
    if rank == 0:
        assert {key.path for key in counts} == {"network", "shared memory", "shared memory and network", "gloo"}
        assert {key.why for key in counts} == {"", "the hosts have unequal numbers of the group's ranks"}


def test_subgroups():
    run_on_hosts(_subgroups, "aabb", layout="aabb")


def _gloo_because(why):
    out = torch.empty(3 * 5)
    all_gather_single(out, torch.full((5,), float(dist.get_rank())))
    same(out, torch.arange(3.0).repeat_interleave(5)[: len(out)])
    assert [(key.path, key.why) for key in smp.comm.report()] == [("gloo", why)]


def test_unequal_hosts_use_gloo():
    run_on_hosts(_gloo_because, "the hosts have unequal numbers of the group's ranks", layout="abb")


def _no_arena_on_one_host():
    if dist.get_rank() == 3:
        segment.Segment = _refuse
    out = torch.empty(4)
    all_gather_single(out, torch.tensor([float(dist.get_rank())]))
    same(out, torch.arange(4.0))
    ((key, _),) = smp.comm.report().items()
    assert key.path == "gloo" and key.why.startswith("on the host of rank 2: "), key
    assert "no memory for you" in key.why


def _refuse(*arguments):
    raise OSError("no memory for you")


def test_no_shared_memory_on_one_host_is_gloo_on_all():
    run_on_hosts(_no_arena_on_one_host, layout="aabb")


# --- errors


def _mismatches():
    rank = dist.get_rank()
    # The elements that each rank reduces, and what is said of the ranks with as many in one host.
    cases = [
        ([10, 10, 11, 11], {"0, 1": 10, "2, 3": 11}),
        ([9000, 9000, 10, 10], {"0, 1": 9000, "2, 3": 10}),
        ([10, 10, 10, 9000], {"0, 1": 10, "2": 10, "3": 9000}),
        ([7, 10, 10, 10], {"0": 7, "1": 10, "2, 3": 10}),
        ([5, 6, 7, 8], {"0": 5, "1": 6, "2": 7, "3": 8}),
    ]
    for sizes, said in cases:
        tensor = torch.full((sizes[rank],), 2.0)
        with pytest.raises(Mismatch) as caught:
            dist.all_reduce(tensor)
        lines = [f"rank(s) {ranks}: all_reduce SUM torch.float32 {numel}" for ranks, numel in said.items()]
        assert str(caught.value).endswith(f"do not do the same: {'; '.join(lines)}"), str(caught.value)
        assert torch.equal(tensor, torch.full((sizes[rank],), 2.0)), "written"
        dist.all_reduce(tensor := torch.ones(3))
        same(tensor, torch.full((3,), 4.0))
    # Wrong on one rank alone, which knows it before it asks anybody.
    with pytest.raises(Mismatch, match=r"rank.s. 3: all_gather with wrong arguments: .*must have 4"):
        all_gather_single(torch.empty(9 if rank == 3 else 8), torch.empty(2))
    with pytest.raises(Mismatch, match=r"rank.s. 0, 1: barrier; rank.s. 2, 3: broadcast"):
        dist.barrier() if rank < 2 else dist.broadcast(torch.ones(4), 0)
    for numel in (1, 5000):
        dist.all_reduce(tensor := torch.ones(numel))
        same(tensor, torch.full((numel,), 4.0))


def test_mismatches_raise_on_every_rank():
    run_on_hosts(_mismatches, layout="aabb")


def _one_ends(victim, how, numel):
    rank = dist.get_rank()
    dist.all_reduce(torch.ones(4))
    if how == "sleeps":
        # Shorter than what the connections were made with.
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=2))
    if rank == victim:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "raises":
            raise ValueError("enough")
        wait_for(*[f"told{other}" for other in range(dist.get_world_size()) if other != rank])
        return ""
    try:
        for _ in range(2):
            dist.all_reduce(torch.ones(numel))
    except dist.DistBackendError as error:
        signal_others(f"told{rank}")
        return str(error)
    return "nothing"


@pytest.mark.parametrize("layout", ["aabb", "abc"])
@pytest.mark.parametrize("numel", [5, 3_000_000])
def test_a_killed_rank_is_noticed_and_named(layout, numel):
    prepare = functools.partial(on_hosts, layout, {})
    victim = 1
    outcomes = run_ranks(_one_ends, victim, "killed", numel, world_size=len(layout), prepare=prepare)
    assert outcomes[victim].status == -signal.SIGKILL
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            assert f"rank {victim}" in outcome.result, (rank, outcome)
            assert "timed out" not in outcome.result.lower(), (rank, outcome)  # it is not waited for


def test_a_rank_that_does_not_come_is_named():
    prepare = functools.partial(on_hosts, "abc", {})
    outcomes = run_ranks(_one_ends, 1, "sleeps", 5, world_size=3, prepare=prepare)
    for outcome in (outcomes[0], outcomes[2]):
        assert "rank 1 on another host failed" in outcome.result, outcome
        assert "all_reduce #2 of group" in outcome.result, outcome
    assert any("Timed out waiting 2000ms" in outcome.result for outcome in (outcomes[0], outcomes[2]))


# --- training


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)) for _ in range(3)])


def _losses(backend: str, shape: tuple[int, ...], *, shared: bool = False) -> list[float]:
    names = ("replicate", "shard")[-len(shape) :]
    mesh = dist.device_mesh.init_device_mesh(
        "cpu", shape, mesh_dim_names=names, backend_override=dict.fromkeys(names, backend)
    )
    model = _model()
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if shared:
        assert use_shared_buffers(model, mesh.get_group("shard")) == 4
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(4):
        generator = torch.Generator().manual_seed(step * 100 + dist.get_rank())
        loss = model(torch.randn(5, 64, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean)
        losses.append(mean.item())
    return losses


def _training():
    size = dist.get_world_size()
    for shape in ((size,), (2, size // 2)):
        wanted = _losses("gloo", shape)
        assert wanted[-1] < wanted[0]
        for shared in (False, True):
            smp.comm.reset_report()
            got = _losses("smddp", shape, shared=shared)
            assert got == pytest.approx(wanted, rel=1e-6), (shape, shared)
            counts = smp.comm.report()
            assert counts.calls("all_gather", "shared buffer") > 0 if shared else counts.calls("all_gather") > 0
            assert counts.calls("reduce_scatter") > 0 and counts.calls(path="gloo") == 0, str(counts)
            if len(shape) == 2:
                assert counts.calls("all_reduce", "network") > 0, str(counts)


@pytest.mark.full
def test_training():
    run_on_hosts(_training, layout="aabb")


# --- real wires


def _enter(hosts, layout, rank):
    netns.enter(hosts["abc".index(layout[rank])])


def _wires(layout):
    """Bits, and bytes between hosts beside the least that must cross."""
    hosts, mib = host_ranks(layout), 2**20
    rank, size, n, ranks = dist.get_rank(), len(layout), len(hosts), len(hosts[0])
    _right((1, 1025))
    _in_order(hosts, (1, 1025))
    numel = 16 * mib // 4
    part, whole = values(rank, numel, torch.float32), torch.empty(size * numel)
    scattered = torch.empty(numel // size)
    cases = {
        "all_gather": (lambda: all_gather_single(whole, part), (n - 1) * ranks * 16 * mib),
        "reduce_scatter": (
            lambda: reduce_scatter_single(scattered, part[: numel // size * size]),
            (n - 1) * ranks * (16 * mib // size),
        ),
        "all_reduce": (lambda: dist.all_reduce(part), 2 * (n - 1) * 16 * mib // n),
    }
    for name, (run, least) in cases.items():
        dist.barrier()
        before = netns.sent_bytes()
        run()
        dist.barrier()
        sent = netns.sent_bytes() - before
        assert least <= sent <= 1.05 * least, f"{name}: {sent} bytes sent, at least {least} needed"
    same(whole, torch.cat([values(r, numel, torch.float32) for r in range(size)]))
    same(part, total(hosts, numel, torch.float32))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["aabb", "abc"])
def test_real_wires(layout):
    if reason := netns.refusal():
        pytest.skip(f"no network namespaces: {reason}")
    with netns.hosts(len(set(layout))) as hosts:
        run_distributed(
            _wires, layout, world_size=len(layout), backend="smddp",
            prepare=functools.partial(_enter, hosts, layout),
        )  # fmt: skip
