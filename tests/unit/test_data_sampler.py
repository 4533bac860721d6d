"""The order of samples and their division over ranks: data/sampler.py."""

import numpy as np
import pytest

from smp.data.sampler import PADDING, dealt_positions, permute, samples_at, step_positions


@pytest.mark.parametrize("n", [*range(1, 40), 63, 64, 65, 255, 256, 257, 1000, 4095, 4097, 65537])
def test_every_epoch_is_a_bijection(n):
    for epoch in range(3):
        assert sorted(permute(np.arange(n), n, seed=7, epoch=epoch)) == list(range(n))


def test_orders_differ_by_seed_and_epoch_and_look_random():
    n = 10_000
    orders = [permute(np.arange(n), n, seed=seed, epoch=epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    for order in orders:
        assert abs(np.corrcoef(np.arange(n), order)[0, 1]) < 0.05
        assert abs(np.mean(np.diff(order) > 0) - 0.5) < 0.03
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert np.mean(orders[a] == orders[b]) < 0.01


def test_small_orders_are_all_reached_evenly():
    first = np.array([permute(np.arange(5), 5, seed=0, epoch=epoch)[0] for epoch in range(2000)])
    assert np.bincount(first, minlength=5).min() > 330  # 400 expected, 18 standard deviation


def test_a_place_needs_no_other_place():
    n = 10**15
    places = np.array([0, 1, 12345, n - 1])
    order = permute(places, n, seed=3, epoch=2)
    assert [int(permute(places[i : i + 1], n, seed=3, epoch=2)[0]) for i in range(4)] == order.tolist()
    assert (order < n).all() and (order >= 0).all()


def test_the_stream_is_each_epoch_once():
    stream = samples_at(np.arange(30), 10, seed=1, shuffle=True)
    epochs = stream.reshape(3, 10)
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert (epochs[0] != epochs[1]).any()
    assert samples_at(np.arange(8, 13), 10, seed=1, shuffle=False).tolist() == [8, 9, 0, 1, 2]


@pytest.mark.parametrize("batch", [1, 2, 5, 8, 13])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("micro", [1, 2, 3, 16])
def test_a_step_is_divided_whole_and_every_rank_has_as_many_microbatches(batch, size, micro):
    ranks = [step_positions(batch=batch, micro=micro, rank=rank, size=size) for rank in range(size)]
    real = [position for parts in ranks for part in parts for position in part if position != PADDING]
    assert real == list(range(batch))
    assert len({len(parts) for parts in ranks}) == 1
    assert all(1 <= len(part) <= micro for parts in ranks for part in parts)


@pytest.mark.parametrize(("batch", "size", "micro"), [(8, 2, 2), (13, 3, 2), (5, 4, 1), (2, 4, 3)])
def test_sorted_samples_are_dealt_in_order_to_ranks_that_compute_at_the_same_time(batch, size, micro):
    settings = {"batch": batch, "micro": micro, "size": size}
    ranks = [dealt_positions(rank=rank, **settings) for rank in range(size)]
    plain = [step_positions(rank=rank, **settings) for rank in range(size)]
    assert [[len(part) for part in parts] for parts in ranks] == [[len(part) for part in parts] for parts in plain]
    real = [n for parts in zip(*ranks, strict=True) for part in parts for n in part.tolist() if n != PADDING]
    assert real == list(range(batch))
