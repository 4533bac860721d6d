"""The simulated caching allocator against sequences worked out by hand from c10/cuda/CUDACachingAllocator.cpp."""

import pytest

from smp.plan.allocator import Allocator, reserved_bytes
from smp.plan.blocks import Step
from smp.plan.events import StepPhase

KIB, MIB = 1024, 1024**2
SMALL, LARGE = 2 * MIB, 20 * MIB  # segments
PHASE = StepPhase(0, "forward", None)


def reserved_by(*sizes, expandable=False):
    """The bytes of the segments that allocations, none of them freed, need."""
    allocator = Allocator(expandable=expandable)
    for size in sizes:
        allocator.allocate(size, "")
    return allocator.reserved


def a_step(before, during):
    """A step of changes (storage, bytes), those of ``before`` made before it; all on one stream."""
    count = 1 + max(number for number, _ in [*before, *during])
    changes = [(PHASE, number, delta) for number, delta in [*before, *during]]
    return Step(["other"] * count, [""] * count, len(before), changes)


@pytest.mark.parametrize(
    ("nbytes", "segment", "rounded"),
    [
        (1, SMALL, 512),
        (512, SMALL, 512),
        (513, SMALL, 1024),
        (MIB, SMALL, MIB),  # the largest of the small pool
        (MIB + 1, LARGE, MIB + 512),
        (10 * MIB - 512, LARGE, 10 * MIB - 512),  # the largest that shares a segment
        (10 * MIB - 511, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB, 10 * MIB + 512),
        (11 * MIB, 12 * MIB, 12 * MIB),  # the rest is too small to be split off
        (21 * MIB, 22 * MIB, 22 * MIB),
    ],
)
def test_segments(nbytes, segment, rounded):
    allocator = Allocator()
    assert allocator.allocate(nbytes, "").size == rounded
    assert allocator.reserved == segment


def test_small_allocations_share_a_segment_until_it_is_full():
    assert reserved_by(*[512] * 4096) == SMALL
    assert reserved_by(*[512] * 4097) == 2 * SMALL
    # Of the small pool even 512 B that remain are used.
    assert reserved_by(MIB, MIB - 512, 512) == SMALL


def test_large_allocations_share_a_segment_of_20_mib():
    assert reserved_by(*[2 * MIB] * 10) == LARGE
    assert reserved_by(*[2 * MIB] * 11) == 2 * LARGE
    # Small ones take none of it.
    assert reserved_by(2 * MIB, 512) == LARGE + SMALL


@pytest.mark.parametrize(("asked", "size"), [(11 * MIB, 12 * MIB), (11 * MIB - 512, 11 * MIB - 512)])
def test_a_rest_of_the_large_pool_is_split_off_above_1_mib(asked, size):
    allocator = Allocator()
    allocator.free(allocator.allocate(12 * MIB, ""))
    assert allocator.allocate(asked, "").size == size
    assert allocator.reserved == 12 * MIB


def test_the_smallest_block_that_fits_is_taken():
    allocator = Allocator()
    large, middle, small = (allocator.allocate(size * MIB, "") for size in (40, 20, 30))
    for block in (large, middle, small):
        allocator.free(block)
    assert allocator.allocate(19 * MIB, "") is middle
    assert allocator.allocate(19 * MIB, "").address == small.address  # the first of 20 MiB is taken
    assert allocator.allocate(35 * MIB, "") is large
    assert allocator.reserved == 90 * MIB


def test_of_equal_blocks_the_lowest_address_is_taken():
    allocator = Allocator()
    first, second = (allocator.allocate(20 * MIB, "") for _ in range(2))
    for block in (second, first):
        allocator.free(block)
    assert allocator.allocate(20 * MIB, "") is first


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)])
def test_free_neighbours_are_merged(order):
    allocator = Allocator()
    blocks = [allocator.allocate(6 * MIB, "") for _ in range(3)]  # 18 MiB of a segment of 20
    for number in order:
        allocator.free(blocks[number])
    merged = allocator.allocate(9 * MIB, "")  # more than any of them
    assert merged.address == blocks[0].address and allocator.reserved == LARGE
    # The rest of 11 MiB is one block, too.
    assert allocator.allocate(11 * MIB, "").address == blocks[0].address + 9 * MIB
    assert allocator.reserved == LARGE


def test_what_lies_between_keeps_neighbours_apart():
    allocator = Allocator()
    first, _, last = (allocator.allocate(6 * MIB, "") for _ in range(3))
    for block in (first, last):
        allocator.free(block)
    allocator.allocate(9 * MIB, "")  # the holes are 6 and 8 MiB
    assert allocator.reserved == 2 * LARGE


def test_segments_are_not_merged():
    allocator = Allocator()
    for block in [allocator.allocate(20 * MIB, "") for _ in range(2)]:
        allocator.free(block)
    allocator.allocate(40 * MIB, "")
    assert allocator.reserved == 80 * MIB


@pytest.mark.parametrize(("expandable", "reserved"), [(False, 60 * MIB), (True, 80 * MIB)])
def test_streams_do_not_share(expandable, reserved):
    allocator = Allocator(expandable=expandable)
    allocator.free(allocator.allocate(30 * MIB, "default"))
    allocator.allocate(30 * MIB, "gathers")
    assert allocator.reserved == reserved
    allocator.allocate(30 * MIB, "default")
    assert allocator.reserved == reserved


def test_expandable_segments_grow_by_pages():
    # One page of 20 MiB, and what two allocations need together, not each.
    assert reserved_by(15 * MIB, expandable=True) == LARGE
    assert reserved_by(15 * MIB, 25 * MIB, expandable=True) == 2 * LARGE
    assert reserved_by(15 * MIB, 25 * MIB, 512, expandable=True) == 2 * LARGE + SMALL
    assert reserved_by(15 * MIB, 25 * MIB) == 16 * MIB + 26 * MIB


def test_expandable_segments_grow_from_the_free_end():
    allocator = Allocator(expandable=True)
    first, second = allocator.allocate(20 * MIB, ""), allocator.allocate(40 * MIB, "")
    allocator.free(second)
    assert allocator.allocate(60 * MIB, "").address == first.address + first.size
    assert allocator.reserved == 80 * MIB
    # The hole in front does not grow: what needs more goes to the end.
    allocator.free(first)
    allocator.allocate(25 * MIB, "")
    assert allocator.reserved == 120 * MIB
    assert allocator.allocate(20 * MIB, "").address == first.address
    assert allocator.reserved == 120 * MIB


def test_expandable_segments_split_from_512_bytes_on():
    allocator = Allocator(expandable=True)
    assert allocator.allocate(20 * MIB - 512, "").size == 20 * MIB - 512
    assert Allocator().allocate(20 * MIB - 512, "").size == 20 * MIB


def test_what_can_grow_is_taken_last():
    allocator = Allocator(expandable=True)
    hole, _ = allocator.allocate(40 * MIB, ""), allocator.allocate(50 * MIB, "")
    allocator.free(hole)  # 40 MiB, and 10 MiB at the end
    assert allocator.allocate(6 * MIB, "") is hole
    # What is at the end, and can grow, is used where nothing else is large enough.
    assert allocator.allocate(36 * MIB, "").address == 90 * MIB
    assert allocator.reserved == 140 * MIB


def test_a_step_is_repeated_without_more():
    parameters = [(0, 30 * MIB)]
    passing = [(1, 40 * MIB), (2, 10 * MIB), (1, -40 * MIB), (2, -10 * MIB)]
    for steps in (1, 2, 5):
        assert reserved_bytes(a_step(parameters, passing), steps=steps) == 80 * MIB


def test_what_a_step_leaves_is_replaced_in_the_next():
    """Gradients that a step leaves are freed when the next one begins, not held twice."""
    step = a_step([(0, 30 * MIB)], [(1, 40 * MIB)])
    assert reserved_bytes(step, steps=5) == 70 * MIB


def test_what_lies_in_the_way_in_the_first_step_does_so_in_the_next():
    step = a_step([], [(0, 30 * MIB), (0, -30 * MIB), (1, 12 * MIB), (2, 30 * MIB), (1, -12 * MIB), (2, -30 * MIB)])
    # 12 of the first 30 are taken, so 30 more are needed.
    assert reserved_bytes(step, steps=1) == reserved_bytes(step, steps=3) == 60 * MIB


def test_a_storage_that_is_resized_is_there_twice():
    """As fully_shard's gathered parameters: from 0 B and back to them; one with bytes is copied."""
    assert reserved_bytes(a_step([(0, 30 * MIB)], [(1, 40 * MIB), (1, -40 * MIB)])) == 70 * MIB
    assert reserved_bytes(a_step([], [(0, 40 * MIB), (0, -10 * MIB)]), steps=1) == 70 * MIB


def test_expandable_segments_reserve_less_for_a_step():
    during = [(0, 30 * MIB), (0, -30 * MIB), (1, 40 * MIB), (1, -40 * MIB), (2, 50 * MIB), (2, -50 * MIB)]
    assert reserved_bytes(a_step([], during)) == 120 * MIB
    assert reserved_bytes(a_step([], during), expandable=True) == 60 * MIB
