import pytest

from smp.environment.malloc import TUNABLES
from smp.plan.blocks import Step
from smp.plan.events import Place
from smp.plan.heap import _Pool, _requests, heap_bytes

MIB = 2**20
BEGIN, FORWARD, UPDATE = (Place(0, phase, None, "") for phase in ("begin", "forward", "update"))
# Two parameters, a state, and two tensors of a step, of which the second is left.
STEP = Step(
    ["parameters", "parameters", "optimizer state", "activations", "communication buffers"], [""] * 5, 3,
    [(BEGIN, 0, 4 * MIB), (BEGIN, 1, 8 * MIB), (BEGIN, 2, 12 * MIB), (FORWARD, 3, MIB), (FORWARD, 4, 6 * MIB),
     (FORWARD, 3, -MIB), (UPDATE, 1, -MIB), (UPDATE, 1, MIB)],
)  # fmt: skip


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    monkeypatch.setenv("GLIBC_TUNABLES", TUNABLES)


def test_the_requests_are_a_jobs():
    requests = list(_requests(STEP))
    assert requests[:4] == [(0, 4 * MIB), (1, 8 * MIB), (5, 8 * MIB), (5, 0)]
    step = [(3, MIB), (4, 6 * MIB), (3, 0), (1, 7 * MIB), (1, 8 * MIB), (4, 0)]
    assert requests[4:] == [*step[:3], (2, 12 * MIB), *step[3:], *step, *step]


def bytes_of(step, *, backend="", ranks=1, shared=0, packed=0):
    return heap_bytes(step, backend=backend, ranks=ranks, shared=shared, packed=packed)


def test_the_heap_holds_the_tensors_and_little_more():
    least, most = bytes_of(STEP)
    peak = (4 + 8 + 12 + 6) * MIB
    assert peak < least <= most < 1.6 * peak
    assert bytes_of(STEP, packed=5 * MIB) == (least + 5 * MIB, most + 5 * MIB)


def test_the_environment_does_not_matter(monkeypatch):
    before = bytes_of(STEP)
    monkeypatch.setenv("OF_NO_INTEREST", "x" * 1000)
    assert bytes_of(STEP) == before


def test_shared_buffers_are_not_in_the_heap():
    least, most = bytes_of(STEP, backend="smddp", ranks=2, shared=8 * MIB)
    alone = STEP._replace(
        categories=[*STEP.categories[:4], "activations"], changes=[c for c in STEP.changes if c[1] != 4]
    )
    heap = bytes_of(alone)
    assert (least, most) == (heap[0] + 6 * MIB + 4 * MIB, heap[1] + 6 * MIB + 4 * MIB)


def test_a_buffer_is_given_out_again():
    pool = _Pool(1, ())
    pool.resize(1, 10_000)
    pool.resize(1, 0)
    pool.resize(2, 7000)  # fits what the first has left
    pool.resize(3, 7000)
    assert sorted(buffer.capacity for buffer in pool._buffers) == [8192, 12288]
    pool.resize(2, 6500)
    pool.resize(2, 0)
    pool.resize(4, 2000)  # for which what is free is too large
    assert sorted(buffer.capacity for buffer in pool._buffers) == [4096, 8192, 12288]


def test_a_rank_touches_its_part_of_a_reduction():
    pool = _Pool(4, {8 * MIB})
    pool.resize(1, 64 * MIB)  # four times 16 MiB: its own, and a quarter of the others'
    assert pool.touched == (16 + 3 * 4) * MIB
    pool.resize(1, 0)
    pool.resize(2, 40 * MIB)
    assert pool.touched == 28 * MIB
    pool.resize(3, 8 * MIB)
    assert pool.touched == 36 * MIB


def test_more_than_malloc_has():
    step = STEP._replace(changes=[*STEP.changes, (FORWARD, 3, 2**62)])
    assert bytes_of(step) is None
