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
    assert [storage for storage, _ in requests[4:7]] == [6, 7, 8]
    step = [(3, MIB), (4, 6 * MIB), (3, 0), (1, 7 * MIB), (1, 8 * MIB), (4, 0)]
    assert requests[7:] == [*step[:3], (2, 12 * MIB), *step[3:], *step, *step]


def test_the_heap_holds_the_tensors_and_little_more():
    least, most = heap_bytes(STEP, backend="", shared=0, threads=1)
    peak = (4 + 8 + 12 + 6) * MIB + 5522080 + 2179744 + 1786528
    assert peak < least <= most < 1.4 * peak
    assert heap_bytes(STEP, backend="", shared=0, threads=1) == (least, most)
    more = heap_bytes(STEP, backend="", shared=0, threads=2)
    assert more == (least + 9488352, most + 9488352)


def test_shared_buffers_are_not_in_the_heap():
    least, most = heap_bytes(STEP, backend="smddp", shared=8 * MIB, threads=1)
    alone = STEP._replace(
        categories=[*STEP.categories[:4], "activations"], changes=[c for c in STEP.changes if c[1] != 4]
    )
    heap = heap_bytes(alone, backend="", shared=0, threads=1)
    assert least == heap[0] + 6 * MIB + 4 * MIB and most == heap[1] + 9 * MIB + 4 * MIB


def test_a_buffer_is_given_out_again():
    pool = _Pool()
    pool.resize(1, 10_000)
    pool.resize(1, 0)
    pool.resize(2, 7000)  # fits what the first has left
    pool.resize(3, 7000)
    assert sorted(pool.sizes) == [0, 8192, 12288]
    pool.resize(2, 6500)
    pool.resize(2, 0)
    pool.resize(4, 2000)  # for which what is free is too large
    assert sorted(pool.sizes) == [0, 4096, 8192, 12288]


def test_more_than_malloc_has():
    step = STEP._replace(changes=[*STEP.changes, (FORWARD, 3, 2**62)])
    assert heap_bytes(step, backend="", shared=0, threads=1) is None
