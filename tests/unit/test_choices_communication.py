"""What ``auto`` means for communication, and why."""

from __future__ import annotations

from smp.config import ParallelConfig, Settings
from smp.parallel import sharding
from smp.parallel.choices import Choice, Situation


def situation(*, accumulation: int = 1, fits: bool = True) -> Situation:
    return Situation(None, Settings((ParallelConfig(),)), "cuda", accumulation, lambda **values: fits)


def test_parameters_stay_gathered_between_microbatches_where_they_fit():
    name = "reshard_between_microbatches"
    assert [*sharding.choose(situation())] == [Choice(name, True, "a step has one micro-batch")]
    many = "all gathered parameters fit, for the 4 micro-batches of a step"
    assert [*sharding.choose(situation(accumulation=4))] == [Choice(name, False, many)]
    few = "all gathered parameters at once do not fit"
    assert [*sharding.choose(situation(accumulation=4, fits=False))] == [Choice(name, True, few)]
